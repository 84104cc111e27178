"""Scores and their intervals, against published and hand-computed values and enumeration."""

import itertools
import math

import numpy as np
import pytest

from jax_longctx.evaluation import intervals, metrics
from jax_longctx.evaluation.intervals import mean_interval, paired_interval, paired_shares, wilson


def test_clean_and_matches():
    for answer, stop, expected in [
        ("  42 \n", (), "42"),
        ("a\tb\x00c", (), "a\nb\nc"),
        ("\x01 a", (), "a"),
        ("right. Question: more. Answer", ("Question:", "Answer"), "right. "),
        ("right", ("\n",), "right"),
        ("one\ttwo", ("\n",), "one"),
    ]:
        assert metrics.clean(answer, stop) == expected
    assert metrics.string_match_all("AB and cd", ("ab", "CD", "ef", "gh")) == 50
    assert metrics.string_match_all("", ("ab",)) == 0
    assert metrics.string_match_part("xABx", ("no", "ab")) == 100
    assert metrics.string_match_part("a b", ("no", "ab")) == 0
    first = {"is 17.": 100, "017": 0, "1 17": 0, "": 0, "171": 0}
    assert {answer: metrics.exact_first_int(answer, "17") for answer in first} == first


def test_rouge_token_f1_and_needlebench():
    # "the cat sat on the mat" and "the cat the dog sat": 4 words in common (the twice, cat, sat) of
    # 6 and 5; one pair (the cat) of 5 and 4; in order the, cat, sat: 3.
    scores = metrics.rouge("The cat sat on the mat", "the cat the dog sat")
    assert scores == pytest.approx(
        {"rouge_1": 800 / 11, "rouge_2": 200 / 9, "rouge_l": 600 / 11}, abs=1e-9
    )
    # Precision 1, recall 1/4: F is 2 * 1 * 0.25 / 1.25.
    assert metrics.rouge("b", "a b c d")["rouge_1"] == pytest.approx(40)
    assert metrics.rouge("", "a b") == {"rouge_1": 0, "rouge_2": 0, "rouge_l": 0}
    assert metrics.rouge("mat.", "mat")["rouge_1"] == 0
    assert metrics.normalize(" The cat's  hat, an (old) one ") == "cats hat old one"
    # {red, hat} and {red, hat, band, red}: F is 2 * 2 / 6.
    assert metrics.token_f1("The red hat!", "a red hat band? Red") == pytest.approx(200 * 2 / 6)
    assert metrics.token_f1("red red", "red") == pytest.approx(200 / 3)
    assert metrics.token_f1("", "red") == 0
    assert metrics.needlebench("the blue box", "blue", "It is in the blue box.") == 100
    # "redbox" and "bluebox": substitute three letters and insert one: 4 of 7.
    assert metrics.needlebench("red  box", "blue", "blue\nbox") == pytest.approx(20 * 3 / 7)
    assert metrics.needlebench("", "blue", "blue box") == 0
    # Two of "sitting"'s seven letters are other ones, and one more.
    assert metrics.needlebench("kitten", "blue", "sitting") == pytest.approx(20 * 4 / 7)


def bootstrap(values):
    mean, low, high = intervals.bootstrap(np.array(values))
    assert mean == pytest.approx(np.mean(values))
    return low, high


def test_wilson():
    # 8 of 10: Newcombe 1998, table I's method 3, by hand.
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 50) == pytest.approx((0.0, 0.0714), abs=1e-4)
    assert wilson(50, 50) == pytest.approx((0.9286, 1.0), abs=1e-4)
    for bad in ((1, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError):
            wilson(*bad)


def test_paired_shares_are_those_of_newcombe():
    # Newcombe 1998, Improved confidence intervals ... based on paired data: 36, 12, 2, 0.
    assert paired_shares(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=1e-4)
    # By hand. Both shares 1 of 2, Wilson's [0.0945, 0.9055]; they agree, so phi is
    # (1 * 1 - 0) - 2/2 = 0 once it is corrected: sqrt(2) * 0.4055.
    assert paired_shares(1, 0, 0, 1) == pytest.approx((-0.5734, 0.5734), abs=1e-3)
    # They disagree: phi = -1, and the distances add up to more than there is room for.
    assert paired_shares(0, 1, 1, 0) == pytest.approx((-0.811, 0.811), abs=1e-3)
    # 10 of 20 agree more than chance: 8 * 8 - 2 * 2 = 60, less 10, over 10^4's root: phi = 0.5.
    low, high = paired_shares(8, 2, 2, 8)
    wilson = 0.5 - 0.29930
    assert high == -low == pytest.approx(wilson * (2 - 2 * 0.5) ** 0.5, abs=1e-4)
    # No pair differs, which does not say that none could.
    low, high = paired_shares(10, 0, 0, 0)
    assert low == pytest.approx(-0.2775, abs=1e-4) and high == pytest.approx(0.2775, abs=1e-4)
    with pytest.raises(ValueError):
        paired_shares(0, 0, 0, 0)
    for counts in itertools.product(range(4), repeat=4):
        if sum(counts):
            both, first, second, neither = counts
            low, high = paired_shares(both, first, second, neither)
            assert paired_shares(both, second, first, neither) == pytest.approx((-high, -low))
            share = (first - second) / sum(counts)
            assert low <= share <= high


def test_a_bootstrap_is_the_quantiles_of_all_resamples():
    values = [0.0, 30.0, 50.0, 100.0]
    means = [np.mean(draw) for draw in itertools.product(values, repeat=4)]
    # Five thousand of 256 resamples: a quantile lies within a step of the exact one.
    exact = np.quantile(means, [0.025, 0.975])
    assert bootstrap(values) == pytest.approx(tuple(exact), abs=7.5)
    assert bootstrap(values) == bootstrap(values)
    many = [float(value % 101) for value in range(5_000)]
    low, high = bootstrap(many)
    # The normal approximation, by hand: 29.15 / sqrt(5000) * 1.96 = 0.808.
    assert (high - low) / 2 == pytest.approx(0.808, abs=0.05)
    # Of two values: a quarter of the resamples each at the ends.
    assert bootstrap([1.0, 3.0]) == (1.0, 3.0)
    assert np.isnan(bootstrap([4.0])).all()
    with pytest.raises(ValueError, match="no values"):
        intervals.bootstrap(np.array([]))


def test_right_and_wrong_answers_have_wilsons_interval_and_graded_ones_a_bootstrap():
    assert mean_interval([100.0] * 8 + [0.0] * 2) == pytest.approx((49.02, 94.33), abs=0.01)
    # All graded answers are right: no bootstrap would say less than certainty.
    assert mean_interval([100.0] * 50) == pytest.approx((92.86, 100.0), abs=0.01)
    graded = [0.0, 50.0, 100.0]
    assert mean_interval(graded) == bootstrap(graded)
    # The same share as 5 of 10: 0.2366 and 0.7634.
    assert mean_interval([50.0] * 10) == pytest.approx((23.66, 76.34), abs=0.01)
    assert all(math.isnan(end) for end in paired_interval([50.0, 40.0], [40.0, 30.0]))
    pairs = [(100.0, 100.0)] * 36 + [(100.0, 0.0)] * 12 + [(0.0, 100.0)] * 2
    first, second = zip(*pairs, strict=True)
    assert paired_interval(first, second) == pytest.approx((5.69, 34.04), abs=0.01)
    assert paired_interval([50.0, 100.0], [40.0, 70.0]) == bootstrap([10.0, 30.0])
