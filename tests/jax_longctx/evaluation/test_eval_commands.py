import json
from pathlib import Path
from unittest.mock import create_autospec

import pytest

from jax_longctx.cli import demo, process
from jax_longctx.cli import eval as eval_module
from jax_longctx.cli.options import ReplicaChoice
from jax_longctx.cli.terminal import Terminal
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.evaluation import config, runner
from jax_longctx.evaluation.config import parse_config
from jax_longctx.evaluation.rows import read_rows
from tests.jax_longctx.cli.conftest import refused

RUN = ("eval", "run", "-c", "model", "-t", "small", "--length", "64", "--trials", "2")
PART = {"methods": ["full"], "tasks": ["small"], "lengths": [64], "trials": 1}
TOML = "".join(f"{name} = {json.dumps(value)}\n" for name, value in PART.items())


def test_run_writes_rows_and_a_report_and_goes_on(run, loads, small, tmp_path):
    out = tmp_path / "out"
    result = run(*RUN, "--output", out, code=0)
    assert result.stdout.startswith("At 64 tokens\n\n| method | mean | small n = 2 letters")
    assert (out / "report.html").is_file() and (out / "report.md").is_file()
    (row, _) = read_rows(out)
    assert row["checkpoint"] == "model" and row["versions"]["jax"] and row["mesh"]["data"] == 1
    again = run(*RUN, "--output", out, "--json")
    assert [json.loads(line) for line in again.stdout.splitlines()] == read_rows(out)
    page = (out / "report.html").read_bytes()
    (out / "report.html").unlink()
    assert run("eval", "report", out).exit_code == 0
    assert (out / "report.html").read_bytes() == page
    (tmp_path / "empty").mkdir()
    refused(run("eval", "report", out, "--perplexity", out / "rows.jsonl"), "no results of")
    other = tmp_path / "perplexity.json"
    other.write_text('{"runs": [], "made_from": {"all_weights": "others"}}')
    said = f"{other} was made with all_weights 'others', now it is "
    refused(run("eval", "report", out, "--perplexity", other), said)
    refused(run("eval", "report", tmp_path / "empty"), "give the --output of a run")


@pytest.mark.thorough
def test_a_report_of_two_folders(run, loads, small, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    for out, method in ((one, "full"), (two, "streaming-llm:budget=32,chunk=16"), (two, "full")):
        assert run(*RUN, "-o", out, "-m", method).exit_code == 0
    result = run("eval", "report", one, two)
    # Two prompts in each folder: full attention's of both are the same two.
    assert "4 rows; " in result.stderr
    assert "| full |" in result.stdout and "| streaming-llm budget=32 chunk=16 |" in result.stdout
    run(*RUN, "-o", tmp_path / "chat", "--chat", code=0)
    said = (
        f"{one} was made with chat False, now it is True; run with the same, or write a report of"
    )
    refused(run("eval", "report", one, tmp_path / "chat"), said)


def test_a_file_in_place_of_options(run, loads, small, tmp_path):
    toml, out = tmp_path / "eval.toml", tmp_path / "out"
    toml.write_text(f'title = "Mine"\n[run]\ncheckpoint = "model"\nchunk = 32\n[[part]]\n{TOML}')
    given = ("eval", "run", "--config", toml, "--output", out)
    run(*given, "--chunk", 64, code=0)
    assert loads[0][1]["chunk"] == 64 and "<h1>Mine</h1>" in (out / "report.html").read_text()
    refused(run(*given, "-t", "small"), "--task and --config exclude each other")
    toml.write_text(toml.read_text().replace("trials", "trails"))
    refused(run(*given), "unknown [part] key 'trails'; known: ")


def test_a_job_does_not_convert_the_demos_model(loads, small, tmp_path, monkeypatch):
    folder = tmp_path / "demo-model"
    monkeypatch.setattr(demo, "MODEL_FOLDER", folder)

    def prepare(source, folder, terminal):
        folder.mkdir()
        (folder / "manifest.json").touch()

    prepared = create_autospec(demo.prepare_model, side_effect=prepare)
    monkeypatch.setattr(demo, "prepare_model", prepared)
    config = parse_config({"run": {"checkpoint": "demo"}, "part": [PART]})
    monkeypatch.setattr(process, "number", lambda: 1)
    with pytest.raises(InputError, match=r"demo-model is not there; run jax-longctx demo once"):
        eval_module._open(config, Terminal(), ReplicaChoice())
    assert not prepared.called and loads == []
    monkeypatch.setattr(process, "number", lambda: None)
    eval_module._open(config, Terminal(), ReplicaChoice())
    assert prepared.call_args.args[1] == folder and len(loads) == 1


def test_a_suite_by_its_name_and_lists(run, loads, small, tmp_path, monkeypatch):
    (tmp_path / "some.toml").write_text(f'title = "Some"\n[[part]]\n{TOML}')
    monkeypatch.setattr(config, "SUITES", tmp_path)
    monkeypatch.setattr(config, "RESEARCH", tmp_path / "none")
    out = tmp_path / "out"
    given = ("eval", "--suite", "some", "--output", out)
    refused(run(*given), "name one with --checkpoint")
    run(*given, "-c", "model", code=0)
    assert len(read_rows(out)) == 1 and loads[0][0] == Path("model")
    assert run("eval", "suites").stdout.startswith("some: Some; 1 cells, 1 rows")
    listed = run("eval", "tasks").stdout
    assert "passkey: " in listed and "    depths: int = 11" in listed


def test_mistakes_are_one_line_before_the_model_is_loaded(run, loads, small, monkeypatch):
    for args, message in [
        (("eval", "-o", "x"), "--suite is missing"),
        (("eval", "--suite", "quick", "tasks"), "options before tasks are for --suite"),
        ((*RUN[:4], "--length", "64", "-o", "x"), "--task is missing"),
        ((*RUN[:6], "-o", "x"), "--length is missing"),
        (RUN, "--output is missing"),
        ((*RUN[:2], *RUN[4:], "-o", "x"), "no model given; name one with --checkpoint"),
        ((*RUN, "-m", "snapkv:budget=many", "-o", "x"), "expected a whole number"),
        ((*RUN, "-t", "smal", "-o", "x"), "did you mean 'small'"),
        ((*RUN, "-t", "longbench:file=none.jsonl", "-o", "x"), "none.jsonl cannot be"),
        ((*RUN[:-1], "0", "-o", "x"), "trials of at least 1"),
    ]:
        refused(run(*args), message)
    # What plots need is asked for before hours of work, and so is what scores need.
    chosen = {}
    for task in ("niah_single", "longbench:file=f.json"):
        chosen[task] = parse_config({"part": [{**PART, "tasks": [task], "lengths": [512]}]})
        runner.check_config(chosen[task])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(run(*RUN, "-o", "x"), "pip install 'jax-longctx[eval]'")
    assert loads == [] and not Path("x").exists()
    for each in chosen.values():
        with pytest.raises(ConfigError, match=r"needs rapidfuzz; run: pip install"):
            runner.check_config(each)
    runner.check_config(parse_config({"part": [{**PART, "tasks": ["passkey", "vt"]}]}))


def test_own_questions_are_all_asked_and_shown(run, loads, tmp_path):
    my, out = tmp_path / "my.jsonl", tmp_path / "out"
    line = {"text": "Rain falls.", "question": "What <falls>?", "answers": ["Rain"]}
    my.write_text(json.dumps(line) * 2)
    asked = ("eval", "run", "-c", "model", "-t", f"questions:file={my},answer_tokens=2", "-o", out)
    refused(run(*asked, "--length", 64), f"{my}, line 1: ")
    assert loads == [] and not out.exists()
    lines = [{**line, "question": f"What <falls>? {i}"} for i in range(21)]
    my.write_text("\n".join(map(json.dumps, lines)))
    run(*asked, "--length", 256, code=0)
    rows = read_rows(out)
    assert len(rows) == 21
    assert {row["task_label"] for row in rows} == {f"questions@my file={my} answer_tokens=2"}
    page = (out / "report.html").read_text()
    assert "questions@my file=my.jsonl answer_tokens=2" in page and str(my) not in page
    assert page.count("What &lt;falls&gt;?") == 21 and page.count('type="checkbox"') == 4
    shown = run("eval", "report", out, "--rows").stdout
    assert str(my) not in shown
    for row in rows:
        answer = " ".join(row["answer"].split())
        assert (
            f"What <falls>? {row['index']} Answer:\n    right: Rain\n      0 full: {answer}\n"
            in shown
        )


def test_after_an_interruption_a_run_goes_on(run, loads, small, tmp_path, monkeypatch):
    answer, asked = runner.answer_batch, []

    def interrupted(model, engine, work):
        asked.append(len(work.contexts))
        if len(asked) == 2:
            raise KeyboardInterrupt
        return answer(model, engine, work)

    monkeypatch.setattr(runner, "answer_batch", interrupted)
    out = tmp_path / "out"
    assert run(*RUN, "--batch", 1, "-o", out).exit_code == 130
    assert len(read_rows(out)) == 1
    result = run(*RUN, "--batch", 1, "-o", out)
    assert result.exit_code == 0 and result.stderr.count("1 of 2 rows are there already") == 1
    assert len(read_rows(out)) == 2 and asked == [1, 1, 1]
