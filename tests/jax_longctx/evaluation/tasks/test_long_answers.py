import itertools
import re
from functools import partial

import pytest

from jax_longctx.errors import ConfigError, LengthError
from jax_longctx.evaluation.tasks import make_task
from jax_longctx.evaluation.tasks.chain_of_key import chain_score
from jax_longctx.evaluation.tasks.html_tsv import LAYOUTS, score_table
from tests.jax_longctx.evaluation.tasks.cases import drawn, page_rows, words

pages = partial(drawn, "html_tsv_syn", tokens=2000, trials=24, seed=4, output=200, max_new=250)


def test_a_parser_recovers_the_table():
    _, samples = pages()
    blanks = 0
    for sample in samples:
        header, *rows = [line.split("\t") for line in sample.outputs[0].split("\n")]
        assert page_rows(sample) == rows and len(rows) == sample.meta["records"]
        assert sample.answer_prefix == "\n\n```tsv\n" + "\t".join(header)
        assert f"with the columns {', '.join(header)}." in sample.query
        assert header[0] == "Name" and 3 <= len(header) <= 6 and len(set(header)) == len(header)
        assert 190 < words(sample.outputs[0]) <= 200
        names = [row[0] for row in rows]
        assert len(set(names)) == len(names)
        blanks += sum(cell == "N/A" for row in rows for cell in row)
        # As much of the page stands before the records as behind them.
        start, end = (sample.context.index(rows[i][0]) for i in (0, -1))
        lines = [part.count("\n") for part in (sample.context[:start], sample.context[end:])]
        assert lines[0] == pytest.approx(lines[1], abs=12)
    assert {sample.meta["layout"] for sample in samples} == set(LAYOUTS)
    assert blanks > 20
    assert len({sample.outputs[0].split("\n")[0] for sample in samples}) > 10
    styles = {sample.context.partition('class="c')[2][:3] for sample in samples}
    assert len(styles) > 15


def test_what_follows_the_header_is_scored_and_needs_room():
    task, (sample, *_) = pages(trials=1)
    rows = sample.outputs[0].split("\n")[1:]
    half = "\n" + "\n".join(rows[: len(rows) // 2])
    assert task.parts(half, sample)["precision"] == 100
    assert task.parts(half, sample)["recall"] == pytest.approx(50, abs=5)
    assert task.score(half, sample) == pytest.approx(200 / 3, abs=5)
    assert task.stop == ("\n```",)
    _, (short, *_) = pages(tokens=400, trials=1)
    _, (long, *_) = pages(trials=1)
    assert 0 < short.meta["records"] < long.meta["records"]
    with pytest.raises(LengthError, match="few"):
        pages(tokens=320, trials=1)
    for name, value, message in (("max_new", "100", "output = 500"), ("output", "0", "1")):
        with pytest.raises(ConfigError, match=f"{name} must be at least {message}, got {value}"):
            make_task("html_tsv_syn", {name: value})


GOLD = "A\tB\n1\tx y\n2\tz\n3\tN/A"


def test_tables_are_scored():
    for answer, precision, recall, f1 in [
        (GOLD, 100, 100, 100),
        (f"Here: ```tsv\n{GOLD}\n``` done", 100, 100, 100),
        (f"```tsv\n{GOLD}", 100, 100, 100),
        # To the last fence, here of another block: between is a row of another width.
        (f"```tsv\n{GOLD}\n```\nor\n```", 75, 100, 600 / 7),
        # Order and header names do not count, nor case, punctuation, articles and white space.
        ("x\ty\n3.\tn/a\n2\tThe Z!\n1\tXY", 100, 100, 100),
        ("A\tB\n1\tx y\n1\tx y\n9\tq\n9\tr", 50, 100 / 3, 40),
        # The last row is dropped where its width is another; one before it becomes all N/A.
        ("A\tB\n1\tx y\n2", 100, 100 / 3, 50),
        ("A\tB\n1\n2\tz\n3\tN/A", 200 / 3, 200 / 3, 200 / 3),
        ("A\tB\n1\tx y\n\n2\tz", 200 / 3, 200 / 3, 200 / 3),
        ("A\tB\n5\tq", 0, 0, 0),
        ("A\tB", 0, 0, 0),
        ("A\tB\tC\n1\tx y\t3", 0, 0, 0),
        ("", 0, 0, 0),
    ]:
        expected = {"f1": f1, "precision": precision, "recall": recall}
        assert score_table(answer, GOLD) == pytest.approx(expected), answer


@pytest.mark.parametrize("steps", [3, 10])
def test_keys_are_one_cycle_and_the_example_is_another(steps):
    task, samples = drawn("chain_of_key", tokens=500, trials=5, steps=steps)
    for sample in samples:
        head, _, listed = sample.context.partition("Name of key: ")
        pairs = re.findall(r"(\w+)-(\w+)", listed)
        after = dict(pairs)
        assert len(after) == len(pairs) == sample.meta["keys"] > steps
        assert set(after) == set(after.values())
        walked, word = {pairs[0][0]}, after[pairs[0][0]]
        while word != pairs[0][0]:
            walked.add(word)
            word = after[word]
        assert walked == set(after)
        # The list is shuffled: next to no key follows its predecessor.
        in_order = sum(a[1] == b[0] for a, b in itertools.pairwise(pairs))
        assert in_order < len(pairs) / 4
        example = re.findall(r"(\w+)-(\w+)", head.partition("copied: ")[2])
        assert len(example) == steps
        assert all(a[1] == b[0] for a, b in itertools.pairwise(example))
        assert not {word for key in example for word in key} & set(after)
        assert task.score(", ".join(sample.outputs), sample) == 100
        assert f"chain of {steps} keys" in sample.query
        assert sample.answer_prefix == f"\n\nA chain of {steps} keys:"


def test_a_chain_counts_to_its_first_break():
    keys = ("red-dog", "dog-sun", "sun-cup", "cup-red", "a-b-c", "c-red")
    for answer, score in [
        ("red-dog, dog-sun, sun-cup, cup-red", 100),
        ("cup-red, red-dog, dog-sun, sun-cup", 100),
        ("red-dog, dog-sun, cup-red, red-dog", 50),
        ("red-dog, dog-sun, sun-sea, sea-cup", 50),
        ("red-dog, red-dog, dog-sun, sun-cup", 25),
        ("none, red-dog, dog-sun, sun-cup", 0),
        (" RED-dog , Dog-Sun .\n", 50),
        ("red-dog, dog-sun, sun-cup, cup-red, red-dog, wrong", 100),
        ("a-b-c, c-red, red-dog", 75),
        ("red-dog dog-sun", 0),
        ("", 0),
    ]:
        assert chain_score(answer, keys, 4) == score, answer
    # Table 12 of the paper: of ten keys three before the break are worth 0.3, two 0.2.
    ring = [f"{i}-{(i + 1) % 12}" for i in range(12)]
    chain = [f"{i}-{i + 1}" for i in range(10)]
    assert chain_score(", ".join(chain), ring, 10) == 100
    assert chain_score(", ".join([*chain[:3], "5-6", *chain[4:]]), ring, 10) == 30
    assert chain_score(", ".join([*chain[:2], "2-9", *chain[3:]]), ring, 10) == 20
    # A list of more keys.
    lengths = range(350, 365, 3)
    few = [drawn("chain_of_key", tokens=tokens)[1][0].meta["keys"] for tokens in lengths]
    assert few == sorted(few) and few[0] >= 11
    with pytest.raises(LengthError, match="few"):
        drawn("chain_of_key", tokens=300)
    with pytest.raises(ConfigError, match="steps must be at least 2, got 1"):
        make_task("chain_of_key", {"steps": 1})
