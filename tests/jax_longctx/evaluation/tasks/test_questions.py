import json

import pytest

from jax_longctx.errors import InputError
from tests.jax_longctx.evaluation.tasks.cases import any_answer_has_a_score, drawn

WHO = {"question": "Who came?", "text": "Ann came.", "answers": ["Ann Lee", "Ann"]}


def of_lines(path, *lines):
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return drawn("questions", trials=9, file=str(path))


def of(path, **changes):
    task, (sample,) = of_lines(path, WHO | changes)
    any_answer_has_a_score(task, sample)
    return lambda answer: (task.score(answer, sample), task.parts(answer, sample))


def test_texts_and_questions_are_those_of_the_lines(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("One.\n")
    (tmp_path / "b.txt").write_text("Two.")
    files = {"question": "Which?", "files": ["in/a.txt", "b.txt"], "pattern": "tw|on"}
    file = {"question": "Where?", "file": "b.txt", "answers": "here"}
    file |= {"choices": ["here", "there"]}
    task, samples = of_lines(tmp_path / "my.jsonl", WHO, files, file, {**WHO, "question": "How?"})
    assert task.label == "questions@my" and task.usual_trials == 4
    texts = [
        "Ann came.",
        "Document: in/a.txt\n\nOne.\n\n\nDocument: b.txt\n\nTwo.",
        "Two.",
        "Ann came.",
    ]
    assert [sample.context for sample in samples] == texts
    assert [sample.outputs for sample in samples[:3]] == [("Ann Lee", "Ann"), ("tw|on",), ("here",)]
    assert samples[0].query.endswith("\n\nWho came?\n\nAnswer:") and not samples[0].answer_prefix
    assert samples[2].query.endswith("\n\nWhere?\nA. here\nB. there\n\nAnswer:")
    asked = [{**WHO, "instruction": said} for said in ("", "Think first.")]
    _, samples = of_lines(tmp_path / "own.jsonl", *asked)
    assert [each.query for each in samples] == ["\n\nWho came?", "\n\nThink first.\n\nWho came?"]


def test_answers_are_compared_after_normalisation(tmp_path):
    score = of(tmp_path / "a.jsonl")
    assert score("The ann-lee?\nx") == (0, {"contained": 0, "exact match": 0, "token F1": 0})
    assert score(" It was ANN.")[1] == {"contained": 100, "exact match": 0, "token F1": 50}
    first = {"contained": 100, "exact match": 100, "token F1": 100}
    assert score("the Ann Lee!\nBob came.") == (100, first)
    assert score("Bob came.\nAnn came.")[1]["contained"] == 100
    assert score("Annie, Hann")[0] == 0
    # Letters that have no spaces between words.
    assert of(tmp_path / "b.jsonl", answers="\u4e09\u6708")("\u5728\u4e09\u6708\u3002")[0] == 100
    pattern = {key: WHO[key] for key in ("question", "text")} | {"pattern": r"(?i)\bann\b"}
    task, (sample,) = of_lines(tmp_path / "c.jsonl", pattern)
    assert task.parts("x ANN", sample) == {"pattern found": 100} and not task.score("Anna", sample)
    chosen = of(tmp_path / "d.jsonl", answers=["Ann"], choices=["Bob", "Ann"])
    assert [chosen(said)[0] for said in ("B", "A. Bob", "Ann.", "")] == [100, 0, 100, 0]
    within = of(tmp_path / "e.jsonl", answers="Ann Lee", choices=["ann", "Ann Lee"])
    assert [within(said)[0] for said in ("B. Ann Lee", "Ann Lee", "A. Ann")] == [100, 100, 0]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "JSON|Expecting"),
        ("3", "no JSON object with a question"),
        ('{"text": "x", "answers": "y"}', "no JSON object with a question"),
        (WHO | {"question": " "}, "texts that are not blank"),
        (WHO | {"answer": "x"}, "unknown key 'answer'; known: question, text"),
        (WHO | {"file": "a.txt"}, "give one of text, file, files; the line has text and file"),
        (WHO | {"pattern": "x"}, "give one of answers, pattern; the line has answers and"),
        ({"question": "x", "text": "y"}, "give one of answers, pattern; the line has none"),
        (WHO | {"answers": []}, "no context, or no answer"),
        (WHO | {"answers": ["The"]}, "the answer 'The' is punctuation or an article alone"),
        (WHO | {"choices": ["Bob", "Ann"]}, "answers must be among choices"),
        (
            {"question": "x", "text": "y", "pattern": "z", "choices": [*"123456789"]},
            "it has 9 choices; give 8 at most",
        ),
        ({"question": "x", "text": "y", "pattern": "("}, "pattern is no regular expression: "),
        ({"question": "x", "file": "none.txt", "answers": "y"}, r"none\.txt cannot be read: No "),
        ({"question": "x", "file": "a.pdf", "answers": "y"}, r"a\.pdf is a damaged PDF"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.7")
    path = tmp_path / "my.jsonl"
    bad = line if isinstance(line, str) else json.dumps(line)
    path.write_text(f"{json.dumps(WHO)}\n\n{bad}\n")
    with pytest.raises(InputError, match=rf"my\.jsonl, line 3: .*({message}).*; give JSON lines"):
        drawn("questions", file=str(path))
