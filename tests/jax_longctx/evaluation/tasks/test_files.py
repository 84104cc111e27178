import json
import re

import pytest

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.evaluation.tasks import describe, files, make_task
from jax_longctx.evaluation.tasks.ruler_qa import read_questions
from tests.jax_longctx.evaluation.tasks.cases import any_answer_has_a_score, drawn, words


def of_lines(name, path, lines, *, tokens=100, trials=9):
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return drawn(name, tokens=tokens, trials=trials, file=str(path))


def longbench(dataset="hotpotqa", **changes):
    line = {"input": "Who came?", "context": "Long text.", "answers": ["Ann Lee", "Ann"]}
    line |= {"length": 2, "dataset": dataset, "language": "en", "all_classes": None, "_id": "1"}
    return {**line, **changes}


def test_longbench(tmp_path):
    lines = [longbench(), longbench("hotpotqa_e", input="And who went?")]
    task, samples = of_lines("longbench", tmp_path / "hotpotqa.jsonl", lines)
    assert task.label == "longbench@hotpotqa" and task.max_new == 32
    one, two = samples
    assert (one.index, two.index, one.context) == (0, 1, "Long text.")
    assert one.query.endswith("\n\nWho came?") and two.query.endswith("\n\nAnd who went?")
    assert one.outputs == ("Ann Lee", "Ann")
    assert one.length == 1 + 2 + words(one.query + one.answer_prefix) + 32
    assert task.score("Ann", one) == 100 and task.score("the Lee", one) == pytest.approx(200 / 3)
    assert task.parts("Bob", one) == {"token F1": 0}
    # Code goes on in the question, and a prompt is as long as it is.
    lines = [longbench("lcc", input=""), longbench("repobench-p", input="    return a\n")]
    _, (one, two) = of_lines("longbench", tmp_path / "lcc.jsonl", lines)
    words_of_it = "\n\nWrite the next line of the code above."
    assert (one.query, two.query) == (words_of_it, "\n    return a" + words_of_it)
    text = "word " * 500
    _, (sample,) = of_lines("longbench", tmp_path / "x.jsonl", [longbench(context=text)], tokens=60)
    assert sample.context == text.strip() and sample.length > 500
    _, samples = of_lines("longbench", tmp_path / "y.jsonl", [longbench()] * 5, trials=2)
    assert len(samples) == 2
    # A line of JSON ends at a line feed alone.
    path, text = tmp_path / "z.jsonl", "one\u2028two\x85three\u2029four"
    path.write_text(json.dumps(longbench(context=text), ensure_ascii=False), encoding="utf-8")
    assert drawn("longbench", file=str(path))[1][0].context == text
    line = longbench("trec", answers=["Human: city"], all_classes=["city", "Human: city", "date"])
    task, (sample,) = of_lines("longbench", tmp_path / "trec.jsonl", [line])
    assert sample.meta["choices"] == ["city", "Human: city", "date"]
    # A class that is a part of the right one's name is not held against it.
    assert task.score("Human: city\ndate", sample) == 100
    assert task.score("Human: city or date", sample) == 50
    assert task.score("city", sample) == 0


def test_infinitebench(tmp_path):
    line = infinitebench(options=["one", "two", "twenty"])
    task, (sample,) = of_lines("infinitebench", tmp_path / "longbook_choice_eng.jsonl", [line])
    assert task.label == "infinitebench@longbook_choice_eng" and task.max_new == 40
    assert sample.query.endswith("Which?\nA. one\nB. two\nC. twenty")
    assert [task.score(text, sample) for text in ("B", "two", "B. two")] == [100] * 3
    assert [task.score(text, sample) for text in ("C", "one, two", "")] == [0] * 3
    calc = infinitebench(answer=[5, -2, 9, 4])
    task, (sample,) = of_lines("infinitebench", tmp_path / "math_calc.jsonl", [calc])
    assert sample.outputs == ("5", "-2", "9", "4")
    assert [task.score(text, sample) for text in ("5, -2, 9, 4", "5 -2 8 4", "1")] == [100, 50, 0]
    key = infinitebench(answer="71432")
    task, (sample,) = of_lines("infinitebench", tmp_path / "passkey.jsonl", [key])
    assert task.score("It is 71432.", sample) == 100 and task.score("7 71432", sample) == 0


def infinitebench(**changes):
    line = {"id": 3, "context": "Long text.", "input": "Which?", "answer": ["two"], "options": []}
    return {**line, **changes}


def test_scores():
    for metric, answer, outputs, score in [
        ("token F1", "the red hat", ("hat", "red hat"), 100),
        ("token F1 of the first line", "\nred hat\nand more", ("red hat",), 100),
        ("token F1", "red hat\nand more", ("red hat",), 200 / 3),
        # Two of three and three characters; marks do not count.
        ("character F1", "他 在\uff0c家", ("在家。",), 80),
        ("ROUGE-L", "a b c d", ("a x c d", "z"), 75),
        ("ROUGE-L of the first line", "a b\nc d", ("a b",), 100),
        ("character ROUGE-L", "他在家", ("在他家",), 200 / 3),
        ("share of numbers", "Paragraph 3, not 12 or 3", ("Paragraph 3",), 200 / 3),
        ("share of numbers", "none", ("Paragraph 3",), 0),
        ("likeness of code", "```\n# so\nx = 1 // y\n\n  return a\nb", ("\treturn b",), 87.5),
        ("likeness of code", "", ("return b",), 0),
        ("likeness of code", "", ("",), 0),
        ("likeness of code", "a\tb", ("a\tb",), 100),
        ("first number", "it is -2.50 or 3", ("-2.5",), 100),
        ("first number", "3 or 4", ("4",), 0),
        ("contained", "says BOB", ("x", "bob"), 100),
        ("numbers before the first wrong one", "", ("1",), 0),
    ]:
        found = files.SCORES[metric](answer, outputs, ())
        assert found == pytest.approx(score), (metric, answer)
    read = {"B": "B", "(D)": "D", "DB.": "BD", "B, D and A since": "ABD", "Because": "", "": ""}
    read |= {"B) Because A is not": "B", "The right answer is C.": "C", "Answer: (A), (C)": "AC"}
    assert {answer: files.choice_letters(answer) for answer in read} == read


def test_every_data_set_has_a_metric_which_gives_its_own_answer_full_marks(tmp_path):
    for _, metric, most in [*files.LONGBENCH.values(), *files.INFINITEBENCH.values()]:
        assert metric in files.SCORES and most > 0
    assert len(files.LONGBENCH) == 21 and len(files.INFINITEBENCH) == 12
    for dataset in files.LONGBENCH:
        answers = ["Paragraph 4"] if "passage" in dataset else ["right words"]
        line = longbench(dataset, answers=answers, all_classes=["right words", "else"])
        task, (sample,) = of_lines("longbench", tmp_path / f"{dataset}.jsonl", [line])
        assert task.score(f" {answers[0]}", sample) == 100, dataset
        assert task.score("", sample) == 0, dataset
        any_answer_has_a_score(task, sample)
    for dataset in files.INFINITEBENCH:
        line = infinitebench(answer=["2", 1], options=["2", "B"])
        task, (sample,) = of_lines("infinitebench", tmp_path / f"{dataset}.jsonl", [line])
        any_answer_has_a_score(task, sample)


def test_files_that_are_something_else(tmp_path):
    path = tmp_path / "bad.jsonl"
    for name, content, message in [
        ("longbench", "{", r"line 1: JSONDecodeError.*give the longbench file"),
        ("longbench", json.dumps(longbench("news")), "line 1: KeyError.'news'"),
        ("longbench", json.dumps(longbench(answers=[])), "line 1: ValueError.*no answer"),
        ("longbench", json.dumps(longbench(answers="Paris")), "line 1: .*a list of texts"),
        ("longbench", json.dumps(longbench(answers=["a", " "])), "line 1: .*not blank, got"),
        ("longbench", json.dumps(longbench("trec", all_classes="ab")), "a list of texts"),
        ("leval", json.dumps(longbench()), "line 1: KeyError"),
        ("leval", leval(evaluation="human"), "bad.jsonl has no prompt that is scored; give the"),
        ("leval", leval(instructions=[], outputs=[]), "has no prompt that is scored"),
        ("leval", leval(instructions="Wh", outputs="AB"), "list of texts.*got 'Wh'"),
        *(
            ("leval", leval(outputs=[bad]), "line 1: ValueError.*list of")
            for bad in ("", " ", None, 5)
        ),
        ("longproc", "[", r"entry 0: JSONDecodeError.*give the longproc file"),
        ("longproc", "[]", "has no prompt that is scored; give the longproc file"),
        ("infinitebench", json.dumps(infinitebench()), "line 1: KeyError.'bad'"),
        ("infinitebench", "\n3", "line 2: Type"),
    ]:
        path.write_text(content, encoding="utf-8")
        with pytest.raises(InputError, match=message):
            drawn(name, file=str(path))
    for dataset, answer in (("passkey", "a"), ("math_calc", [1, "x"]), ("code_run", "inf")):
        with pytest.raises(InputError, match="line 1: ValueError"):
            of_lines("infinitebench", tmp_path / f"{dataset}.jsonl", [infinitebench(answer=answer)])
    for name in ("longbench", "leval", "infinitebench", "longproc"):
        with pytest.raises(InputError, match=f"{name} reads a file of yours: set file=PATH"):
            drawn(name)
        assert json.dumps(describe(name)) and make_task(name).label == name
        with pytest.raises(ConfigError, match="answer_tokens must be at least 1, got 0"):
            make_task(name, {"answer_tokens": "0"})
    path, none = tmp_path / "bad.json", "holds no question that has an answer"
    for content, message in [
        ("{", "holds no questions: JSONDecodeError"),
        ('{"rows": []}', "holds no questions: KeyError"),
        ('[{"question": "Q"}]', "holds no questions: KeyError"),
        ("3", "holds no questions: Type"),
        *(
            (json.dumps(entries), "holds no questions: ValueError.*list of texts")
            for entries in (
                {"data": [{"paragraphs": [paragraph("x", ("Q?", [5]))]}]},
                [{"question": "Q?", "answer": "", "context": [], "supporting_facts": []}],
            )
        ),
        ("[]", none),
        ('{"data": []}', none),
    ]:
        path.write_text(content, encoding="utf-8")
        with pytest.raises(InputError, match=f"bad.json {message}.*give qa_syn, or a JSON file"):
            of_file(path)
    data = [{"title": "A", "paragraphs": [paragraph("Only.", ("Q?", ["A"]))]}]
    path.write_text(json.dumps({"data": data}), encoding="utf-8")
    with pytest.raises(InputError, match="all documents of the file answer the question"):
        of_file(path)


def leval(**changes):
    line = {"instructions": ["Which?"], "outputs": ["A"], "input": "Text.", "evaluation": "exam"}
    return json.dumps({**line, **changes})


def of_file(path, *, tokens=300):
    return drawn("qa_1", tokens=tokens, trials=12, file=str(path))


def paragraph(text, *pairs):
    """Questions with their answers; None for one that cannot be answered."""
    entries = []
    for question, answers in pairs:
        listed = [{"text": answer} for answer in answers or ()]
        entries.append({"question": question, "answers": listed, "is_impossible": answers is None})
    return {"context": text, "qas": entries}


@pytest.fixture
def squad(tmp_path):
    def fact(name, i):
        text = f"{name} fact {i}. " + "filler " * 20
        return paragraph(text, (f"{name} {i}?", [f"{name}{i}", "x", "x"]))

    told = {name: [fact(name, i) for i in range(3)] for name in ("Ant", "Bee")}
    articles = [{"title": name, "paragraphs": facts} for name, facts in told.items()]
    articles[0]["paragraphs"][1]["qas"] += paragraph("", ("Nothing?", None))["qas"]
    path = tmp_path / "dev-v2.0.json"
    path.write_text(json.dumps({"version": "v2.0", "data": articles}), encoding="utf-8")
    return path


@pytest.fixture
def hotpot(tmp_path):
    entries = []
    for i in range(2):
        context = [[f"T{i}{j}", [f"Says {i}{j}.", " More."]] for j in range(4)]
        asked = {"question": f"Q{i}?", "answer": f"A{i}", "context": context}
        supporting = [[f"T{i}1", 0], [f"T{i}3", 0], [f"T{i}3", 1]]
        entries.append(asked | {"supporting_facts": supporting})
    path = tmp_path / "hotpot.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return path


def test_questions_are_read(squad, hotpot):
    read = read_questions(str(squad), 1)
    assert len(read.documents) == 6 and len(read.questions) == 6
    first = read.questions[0]
    assert (first.text, first.answers) == ("Ant 0?", ("Ant0", "x"))
    assert (first.gold, first.near) == ((0,), (1, 2))
    read = read_questions(str(hotpot), 1)
    assert read.documents[5] == "T11\nSays 11. More."
    second = read.questions[1]
    assert (second.answers, second.gold, second.near) == (("A1",), (5, 7), (4, 6))
    # The made-up set.
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


def test_documents_stand_in_a_drawn_order_near_ones_before_others(squad):
    task, samples = of_file(squad, tokens=140)
    assert task.label == "qa_1@dev-v2.0"
    places = set()
    for sample in samples:
        name, number = sample.query.removesuffix("?").split()[-2:]
        listed = re.findall(r"Document (\d+):\n(\w+) fact (\d)", sample.context)
        assert [int(i) for i, _, _ in listed] == list(range(1, len(listed) + 1))
        # Three fit, all of the same article.
        assert sorted(found[1:] for found in listed) == [(name, str(i)) for i in range(3)]
        assert len(listed) == 3 == sample.meta["documents"]
        places.add(next(i for i, _, found in listed if found == number))
    assert places == {"1", "2", "3"}
    # A set that is used up starts over, and any answer is right.
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
