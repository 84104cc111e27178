"""Questions of a user's file stand among its documents; the made-up set says what it is."""

import json
import re

import pytest

from jax_longctx.errors import InputError
from jax_longctx.evaluation.tasks import make_task
from jax_longctx.evaluation.tasks.ruler_qa import read_questions
from tests.jax_longctx.evaluation.tasks.cases import drawn


def of_file(path, *, tokens=300):
    return drawn("qa_1", tokens=tokens, trials=12, file=str(path))


def paragraph(text, *pairs):
    """Questions with their answers; None for one that cannot be answered."""
    entries = [
        {
            "question": question,
            "answers": [{"text": answer} for answer in answers or ()],
            "is_impossible": answers is None,
        }
        for question, answers in pairs
    ]
    return {"context": text, "qas": entries}


@pytest.fixture
def squad(tmp_path):
    def fact(name, i):
        text = f"{name} fact {i}. " + "filler " * 20
        return paragraph(text, (f"{name} {i}?", [f"{name}{i}", "x", "x"]))

    articles = [
        {"title": name, "paragraphs": [fact(name, i) for i in range(3)]} for name in ("Ant", "Bee")
    ]
    articles[0]["paragraphs"][1]["qas"] += paragraph("", ("Nothing?", None))["qas"]
    path = tmp_path / "dev-v2.0.json"
    path.write_text(json.dumps({"version": "v2.0", "data": articles}), encoding="utf-8")
    return path


@pytest.fixture
def hotpot(tmp_path):
    def entry(i):
        context = [[f"T{i}{j}", [f"Says {i}{j}.", " More."]] for j in range(4)]
        supporting = [[f"T{i}1", 0], [f"T{i}3", 0], [f"T{i}3", 1]]
        asked = {"question": f"Q{i}?", "answer": f"A{i}"}
        return asked | {"supporting_facts": supporting, "context": context}

    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps([entry(0), entry(1)]), encoding="utf-8")
    return path


def test_squad_and_hotpot(squad, hotpot):
    read = read_questions(str(squad), 1)
    assert len(read.documents) == 6 and len(read.questions) == 6
    first = read.questions[0]
    assert (first.text, first.answers) == ("Ant 0?", ("Ant0", "x"))
    assert (first.gold, first.near) == ((0,), (1, 2))
    read = read_questions(str(hotpot), 1)
    assert read.documents[5] == "T11\nSays 11. More."
    second = read.questions[1]
    assert (second.answers, second.gold, second.near) == (("A1",), (5, 7), (4, 6))


def test_documents_stand_in_a_drawn_order_near_ones_before_others(squad):
    task, samples = of_file(squad, tokens=140)
    assert task.label == "qa_1@dev-v2.0"
    places = set()
    for sample in samples:
        name, number = sample.query.removesuffix("?").split()[-2:]
        listed = re.findall(r"Document (\d+):\n(\w+) fact (\d)", sample.context)
        assert [int(i) for i, _, _ in listed] == list(range(1, len(listed) + 1))
        # Three fit, all of the same article.
        assert sorted(listed, key=lambda found: found[2]) == [
            (found[0], name, str(i)) for i, found in enumerate(sorted(listed, key=lambda f: f[2]))
        ]
        assert len(listed) == 3 == sample.meta["documents"]
        places.add(next(i for i, _, found in listed if found == number))
    assert places == {"1", "2", "3"}


def test_a_set_that_is_used_up_starts_over_and_any_answer_is_right(squad):
    _, (sample, *_) = of_file(squad, tokens=900)
    listed = re.findall(r"\n(\w+ fact \d)", sample.context)
    name, number = sample.query.removesuffix("?").split()[-2:]
    assert len(set(listed)) == 6 < len(listed)
    assert listed.count(f"{name} fact {number}") == 1
    task, (sample, *_) = of_file(squad)
    assert sample.outputs[1] == "x"
    assert task.score("X, I think", sample) == 100
    assert task.score("none", sample) == 0
    assert task.parts(f"the {sample.outputs[0]}\nand more", sample) == {"f1": 100}
    assert task.parts(f"{sample.outputs[0]} it is", sample) == {"f1": 50}
    assert task.parts("", sample) == {"f1": 0}


def test_the_made_up_set():
    one, two = read_questions("qa_syn", 1), read_questions("qa_syn", 2)
    assert one.documents == two.documents and len(set(one.documents)) == 3600
    assert len(one.questions) == 9000 and len(two.questions) == 3000
    assert {len(q.gold) for q in one.questions} == {1}
    for question in two.questions:
        person, town = (two.documents[n].split("\n")[0] for n in question.gold)
        assert person in question.text
        assert f"{person} was born in {town} in" in two.documents[question.gold[0]]
        assert f"on the river {question.answers[0]}." in two.documents[question.gold[1]]
    assert make_task("qa_1").label == "qa_1@qa_syn" and make_task("qa_2").label == "qa_2@qa_syn"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "holds no questions: JSONDecodeError"),
        ('{"rows": []}', "holds no questions: KeyError"),
        ('[{"question": "Q"}]', "holds no questions: KeyError"),
        ("3", "holds no questions: Type"),
        ("[]", "holds no question that has an answer"),
        ('{"data": []}', "holds no question that has an answer"),
    ],
)
def test_files_that_are_something_else(tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(InputError, match=f"bad.json {message}.*give qa_syn, or a JSON file"):
        of_file(path)
    path = tmp_path / "one.json"
    data = [{"title": "A", "paragraphs": [paragraph("Only.", ("Q?", ["A"]))]}]
    path.write_text(json.dumps({"data": data}), encoding="utf-8")
    with pytest.raises(InputError, match="all documents of the file answer the question"):
        of_file(path)
