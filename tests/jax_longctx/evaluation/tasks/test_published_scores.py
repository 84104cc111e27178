"""L-Eval, LongProc and Counting-Stars: prompts as published, scores as by the authors' own code."""

import json
import shutil
from pathlib import Path

import pytest

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.evaluation.tasks import files, longproc, stars
from tests.jax_longctx.evaluation.tasks.cases import any_answer_has_a_score, drawn

PATH = Path(__file__).parents[3] / "goldens/data/benchmark_scores.json"
GOLDEN = json.loads(PATH.read_text(encoding="utf-8"))
PROGRAMS = "longproc/pseudo_to_code/pseudo_to_code_0.5k.json"
TEMPLATES = {
    "html_to_tsv": "{html_str}\n\n[TARGET INFORMATION]\n{task_topic}\n{{Your TSV}} {tsv_header}",
    "countdown": "Braces {{}}.\n{demonstration}\n\n[Problem]\nNumbers: {nums}\nTarget: {target}",
    "path_traversal": "{city_context}\n\nNow find the route from {src_city} to {dst_city}.",
    "tom_tracking": "{story}\n\n[QUESTION]\n{question}\n\n[YOUR ANSWER]",
    "pseudo_to_code": "{pseudocode}\n\n[CODE]:",
}


def published(name, folder):
    """The task of a golden, on the file that its entries are written to, and its prompts."""
    kind, _, rest = name.partition("/")
    if not rest:
        return drawn(kind, tokens=2000, trials=1)
    path, entries = folder / name, GOLDEN[name]["entries"]
    path.parent.mkdir(parents=True, exist_ok=True)
    if kind == "leval":
        path.write_text("".join(json.dumps(line) + "\n" for line in entries), encoding="utf-8")
        return drawn(kind, file=str(path), trials=99)
    path.write_text(json.dumps(entries), encoding="utf-8")
    lines = TEMPLATES[path.parent.name].replace("\n", "\n  ")
    (path.parent / "prompts.yaml").write_text(f"USER_PROMPT: |-\n  {lines}\n", encoding="utf-8")
    for entry in entries:
        if "html_path" in entry:
            page = path.parent / entry["html_path"]
            page.parent.mkdir(exist_ok=True)
            page.write_text(f"<p>{entry['task_topic']}</p>", encoding="utf-8")
    settings = {"run_code": "true"} if "pseudo" in name else {}
    return drawn(kind, file=str(path), trials=99, **settings)


@pytest.mark.quick("leval", "html", "countdown", "path", "tom", "stars")
@pytest.mark.parametrize("name", GOLDEN)
def test_scores_are_those_of_the_benchmarks_own_code(name, tmp_path):
    if name == PROGRAMS and shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    task, samples = published(name, tmp_path)
    answers = GOLDEN[name]["answers"]
    assert len(answers) >= 50
    for index, answer, scores in answers:
        found = task.parts(answer, samples[index]) or {"score": task.score(answer, samples[index])}
        assert list(found.values()) == pytest.approx(scores), (index, answer)
        assert task.score(answer, samples[index]) == pytest.approx(scores[0])
    if name != PROGRAMS:
        any_answer_has_a_score(task, samples[0])
    else:
        assert not longproc.runs_right("// \ud800", "[]")
        assert not longproc.runs_right("int main() { while (true) {} }", '[[["1"], ["1"]]]')


def test_prompts_are_the_benchmarks_own(tmp_path):
    task, (sample, *_) = published("leval/tpo.jsonl", tmp_path)
    assert (task.label, task.max_new) == ("leval@tpo", 512)
    entry = GOLDEN["leval/tpo.jsonl"]["entries"][0]
    assert sample.context.endswith(
        f"concise and accurate answer. Document is as follows. {entry['input']}"
    )
    assert sample.query == (
        " \nQuestion: Question 1: which?.  Please directly give the answer without any additional "
        "output or explanation "
    )
    assert sample.answer_prefix == "\nAnswer:"
    _, (sample, *_) = published("leval/gsm100.jsonl", tmp_path)
    assert sample.context.startswith("Given several question answer pairs, you need to follow a ")
    assert (sample.query, sample.answer_prefix) == ("\n\nQuestion 1: which?", "")
    _, (told, known, *_) = published("leval/sci_fi.jsonl", tmp_path)
    assert "Document is as follows. A text" in told.context and told.outputs == ("True ",)
    assert known.context.endswith("facts up until your last training") and known.outputs == (
        "False",
    )
    _, (sample, *_) = published("leval/financial_qa.jsonl", tmp_path)
    assert sample.query.endswith(" \nAnswer this question with 10 words.")
    # A line that a person judges has no prompt.
    path, entry = tmp_path / "other.jsonl", GOLDEN["leval/gov_report_summ.jsonl"]["entries"][0]
    judged = {**entry, "evaluation": "human"}
    path.write_text(json.dumps(judged) + "\n" + json.dumps(entry), encoding="utf-8")
    assert len(drawn("leval", file=str(path))[1]) == len(entry["outputs"])
    task, (sample, *_) = published("longproc/countdown/countdown_0.5k.json", tmp_path)
    nums, target = GOLDEN["longproc/countdown/countdown_0.5k.json"]["entries"][0].values()
    assert task.max_new == 1024 and sample.context.startswith(
        "Braces {}.\n# Example\nNumbers: [40, "
    )
    assert sample.context.endswith("144 / 12 = 12\n</Solution>\n")
    assert sample.query == f"\n\n[Problem]\nNumbers: {nums}\nTarget: {target}"
    task, (sample, *_) = published("longproc/html_to_tsv/html_to_tsv_0.5k.json", tmp_path)
    assert sample.context == "<p>lamps</p>" and sample.query.endswith("{Your TSV} name\tprice")


def test_a_search_writes_what_it_tries():
    lines = longproc.search((9, 16, 6, 18), 12).split("\n")
    for line in (
        "  |- Try 16 + 9 = 25. Add 25 to the number set. Current number set: [25, 6, 18], target: "
        "12. Options for choosing two numbers: [(25, 6), (25, 18), (6, 18)].",
        "   |- Pick two numbers (6, 18) (numbers left: [25]). Try possible operations.",
        "     |- Try 31 / 18 = 1.7. 1.7 is a decimal, drop this branch.",
        "     |- Try 150 * 18 = 2700. 2700 exceeds the maximum intermediate result, drop this "
        "branch.",
        "     |- Try 18 / 1 = 18. Evaluate 18 != 12, drop this branch.",
    ):
        assert line in lines
    zero = longproc.search((5, 5, 1, 3), 9)
    assert "|- Try 1 / 0 (invalid operation). drop this branch." in zero


def test_what_longproc_refuses(tmp_path):
    with pytest.raises(ConfigError, match=r"pseudo_to_code compiles programs.*set run_code=true"):
        file = tmp_path / "pseudo_to_code_0.5k.json"
        file.write_text(json.dumps(GOLDEN[PROGRAMS]["entries"]), encoding="utf-8")
        drawn("longproc", file=str(file))
    task, _ = published("longproc/tom_tracking/tom_tracking_0.5k.json", tmp_path)
    (Path(task.file).parent / "prompts.yaml").write_text("USER_PROMPT: |-\n  {story}\n")
    files.read_records.cache_clear()
    with pytest.raises(
        InputError, match=r"entry 1: ValueError.*prompts.yaml has no '\[QUESTION\]'"
    ):
        drawn("longproc", file=task.file)
    with pytest.raises(ValueError, match=r"no way from \[1, 1, 1, 1\] to 99"):
        longproc.search((1, 1, 1, 1), 99)
    for name in ("travel_planning_2k.json", "countdown_1k.json"):
        (tmp_path / name).write_text("[{}]", encoding="utf-8")
        with pytest.raises(ConfigError, match=rf"{name} is not read; read are .*tom_.* 2k, 8k"):
            drawn("longproc", file=str(tmp_path / name))


@pytest.mark.parametrize(
    ("dataset", "changes", "message"),
    [
        ("html_to_tsv", {"html_path": "webpage/none.html"}, "none.html cannot be read.*beside"),
        ("html_to_tsv", {"gt": "name\tprice"}, "its table has no rows"),
        ("countdown", {"nums": [1, 2]}, r"no way from \[1, 2\]"),
        ("countdown", {"nums": [40.0, 19, 23, 7]}, r"Type(Check)?Error"),
        ("path_traversal", {"answer_nl": ["a"]}, "a list of texts"),
        ("tom_tracking", {"solution": "none"}, "its solution has no beliefs"),
        ("tom_tracking", {"solution": None}, "a list of texts"),
        ("pseudo_to_code", {"testcases": []}, "its tests are not pairs"),
        ("pseudo_to_code", {"testcases": [[["1"]]]}, "its tests are not pairs"),
        ("pseudo_to_code", {"testcases": [[[1], [1]]]}, "a list of texts"),
        ("countdown", {}, "entry 1: IndexError"),
    ],
)
def test_a_damaged_entry_is_named_before_the_model_answers(dataset, changes, message, tmp_path):
    path = tmp_path / f"longproc/{dataset}/{dataset}_0.5k.json"
    (entry, *_), template = GOLDEN[str(path.relative_to(tmp_path))]["entries"], TEMPLATES[dataset]
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps([{**entry, **changes}]), encoding="utf-8")
    template = template.replace("\n", "\n  ") + ("" if changes else "{0}")
    (path.parent / "prompts.yaml").write_text(f"USER_PROMPT: |-\n  {template}", encoding="utf-8")
    (path.parent / "webpage").mkdir()
    (path.parent / "webpage/lamps.html").write_text("<p>lamps</p>", encoding="utf-8")
    with pytest.raises(InputError, match=message):
        drawn("longproc", file=str(path))


def test_stars_stand_where_the_authors_put_them():
    text = stars.sprinkled(" ".join(map(str, range(1, 9))), [" a\n", " b\n"])
    assert text == "1 2 3 4 a\n5 6 7 8 b\n"
