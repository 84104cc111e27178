"""Trials are what they say; intervals and tables are right on cases computed by hand."""

import re

import pytest

from jax_longctx.evaluation.haystack import Haystack, python_topics
from jax_longctx.evaluation.intervals import wilson
from jax_longctx.evaluation.passkey import SENTENCE, STEM, is_right, make_trials, summary
from jax_longctx.evaluation.passkey_report import heatmap, markdown


def words(text):
    return len(text.split())


@pytest.fixture(scope="module")
def haystack():
    return Haystack(python_topics(), words)


def test_trials_hold_their_key_twice_at_their_depth(haystack):
    trials = make_trials(haystack, [400, 1500], [0.0, 0.5, 1.0], 6, seed=3)
    assert [(t.length, t.depth) for t in trials] == [
        (length, depth) for length in (400, 1500) for depth in (0.0, 0.5, 1.0) * 2
    ]
    assert len({t.key for t in trials}) == 12
    assert len({t.text[:40] for t in trials if t.depth > 0}) == 8
    for trial in trials:
        assert trial.text.count(trial.key) == 2
        assert 0 <= trial.length - 1 - words(STEM) - words(trial.text) < 400
        before = words(trial.text.partition(SENTENCE.format(key=trial.key))[0])
        assert before == pytest.approx(trial.depth * trial.length, abs=400)


def test_the_same_seed_gives_the_same_trials_for_any_choice_of_lengths(haystack):
    both = make_trials(haystack, [400, 600], [0.2, 0.8], 4, seed=3)
    assert both[4:] == make_trials(haystack, [600], [0.2, 0.8], 4, seed=3)
    assert both[:4] != make_trials(haystack, [400], [0.2, 0.8], 4, seed=4)


@pytest.mark.parametrize(
    ("answer", "right"),
    [(" 12345.", True), (" 12345", True), (" 123456", False), ("none", False), ("1 12345", False)],
)
def test_the_first_number_counts(answer, right):
    assert is_right(answer, "12345") is right


def test_wilson():
    # 8 of 10: Newcombe 1998, table I's method 3, by hand.
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 50) == pytest.approx((0.0, 0.0714), abs=1e-4)
    assert wilson(50, 50) == pytest.approx((0.9286, 1.0), abs=1e-4)
    for bad in ((1, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError):
            wilson(*bad)


def runs():
    rows = [
        {"length": 1024, "depth": depth, "right": depth < 0.5} for depth in (0.0, 0.5, 1.0, 0.0)
    ]
    more = [{"length": 2048, "depth": 0.0, "right": True}]
    return [
        {"method": "full", "given": {}, "rows": rows + more},
        {"method": "citrus", "given": {"budget": "64"}, "rows": rows},
    ]


def test_tables():
    assert summary(runs()[0]["rows"]) == {1024: (2, 4), 2048: (1, 1)}
    lines = markdown(runs()).splitlines()
    assert lines[0] == "| method | 1,024 | 2,048 |"
    assert lines[2] == "| `full` | 50 [15, 85] n=4 | 100 [21, 100] n=1 |"
    assert lines[3] == "| `citrus budget=64` | 50 [15, 85] n=4 | - |"


def test_heatmap_is_a_picture(tmp_path):
    heatmap(runs(), tmp_path / "map.png")
    assert (tmp_path / "map.png").read_bytes()[:4] == b"\x89PNG"


def test_stem_begins_the_hidden_sentence():
    assert re.match(re.escape(STEM.strip()), SENTENCE)
