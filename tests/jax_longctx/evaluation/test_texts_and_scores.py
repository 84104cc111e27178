import itertools
import math
import re
from unittest.mock import Mock

import numpy as np
import pytest

from jax_longctx.errors import InputError, LengthError
from jax_longctx.evaluation import intervals, metrics
from jax_longctx.evaluation.haystack import Haystack, largest, most_units, python_topics
from jax_longctx.evaluation.intervals import mean_interval, paired_interval, paired_shares, wilson


def test_scores_by_hand():
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
    # "the cat sat on the mat" and "the cat the dog sat": 4 words in common (the twice, cat, sat) of
    # 6 and 5; one pair (the cat) of 5 and 4; in order the, cat, sat: 3.
    scores = metrics.rouge("The cat sat on the mat", "the cat the dog sat")
    by_hand = {"rouge_1": 800 / 11, "rouge_2": 200 / 9, "rouge_l": 600 / 11}
    assert scores == pytest.approx(by_hand, abs=1e-9)
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


def test_wilsons_interval_and_newcombes_of_pairs():
    # 8 of 10: Newcombe 1998, table I's method 3, by hand.
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert wilson(0, 50) == pytest.approx((0.0, 0.0714), abs=1e-4)
    assert wilson(50, 50) == pytest.approx((0.9286, 1.0), abs=1e-4)
    for bad in ((1, 0), (3, 2), (-1, 2)):
        with pytest.raises(ValueError):
            wilson(*bad)
    # Newcombe 1998, Improved confidence intervals ... based on paired data: 36, 12, 2, 0.
    assert paired_shares(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=1e-4)
    # By hand. Both shares 1 of 2, Wilson's [0.0945, 0.9055]; they agree, so phi is
    # (1 * 1 - 0) - 2/2 = 0 once it is corrected: sqrt(2) * 0.4055.
    assert paired_shares(1, 0, 0, 1) == pytest.approx((-0.5734, 0.5734), abs=1e-3)
    # They disagree: phi = -1, and the distances add up to more than there is room for.
    assert paired_shares(0, 1, 1, 0) == pytest.approx((-0.811, 0.811), abs=1e-3)
    # 10 of 20 agree more than chance: 8 * 8 - 2 * 2 = 60, less 10, over 10^4's root: phi = 0.5.
    low, high = paired_shares(8, 2, 2, 8)
    half = 0.5 - 0.29930
    assert high == -low == pytest.approx(half * (2 - 2 * 0.5) ** 0.5, abs=1e-4)
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


NEEDLE = "The pass key is 12345."


def words(text):
    return len(text.split())


def hide(haystack, *, tokens, depth, start=0):
    """A text with one sentence in it, and the share of the other tokens that come before it."""
    filled = haystack.fill([(depth, NEEDLE)], tokens=tokens, start=start)
    return filled.text, filled.depths[0]


def numbered(count):
    return " ".join(f"Sentence {i} stands here." for i in range(count))


def test_place_and_size():
    for tokens, depth in itertools.product((100, 1000), (0.0, 0.1, 0.5, 0.9, 1.0)):
        text, share = hide(Haystack(numbered(1000), words), tokens=tokens, depth=depth)
        head, _, tail = text.partition(NEEDLE)
        around = words(text) - words(NEEDLE)
        assert words(head) == pytest.approx(share * around)
        assert tokens - 4 < words(text) <= tokens
        assert share == pytest.approx(depth, abs=4 / around)
        # Nothing of the text is lost or cut: the numbered sentences with one more between.
        assert (head.strip() + " " + tail.strip()).strip() == numbered((words(text) - 5) // 4)
    # Alone a sentence of subwords has one token more, or joints of many cost some.
    for more, missing in ((bool, 5), (lambda text: len(text) // 300, 8)):

        def count(text, more=more):
            return words(text) + more(text)

        text, _ = hide(Haystack(numbered(1000), count), tokens=400, depth=0.5)
        assert 400 - missing <= count(text) <= 400


def test_needle_stands_between_whole_sentences_of_real_text():
    source = python_topics()
    assert words(source) > 25_000
    assert not re.search(r"::=|>>>|\+--", source)
    assert not any("\n" in paragraph for paragraph in source.split("\n\n"))
    for depth in (0.11, 0.37, 0.5, 0.83):
        text, share = hide(Haystack(source, words), tokens=2000, depth=depth)
        head, _, tail = text.partition(f"\n\n{NEEDLE}\n\n")
        assert words(head) == pytest.approx(share * (words(text) - words(NEEDLE)))
        assert source.startswith(head)
        between = source[len(head) : source.index(tail, len(head))]
        assert between and not between.strip()
        assert "\n\n" in between or (head[-1] in ".?!" and tail[0].isupper())


def test_several_sentences_stand_at_their_depths_in_order():
    needles = [(0.0, "First."), (0.25, "Second."), (0.25, "Third."), (1.0, "Last.")]
    for gap, inline in ((" ", True), ("\n\n", False)):
        how = {"tokens": 505, "start": 3, "head": "Look out. ", "inline": inline}
        filled = Haystack(numbered(1000), words).fill(needles, **how)
        assert filled.tokens == words(filled.text) == 505 - (505 - 6) % 4
        around = words(filled.text) - 2 - len(needles)
        assert around == 4 * (499 // 4)
        before = [words(filled.text.partition(text)[0]) for _, text in needles]
        # The head has two words, and each sentence before one more.
        assert filled.depths == tuple((n - 2 - i) / around for i, n in enumerate(before))
        assert filled.depths == (0, 124 / around, 124 / around, 1)
        assert f"{gap}Second.{gap}Third.{gap}Sentence" in filled.text
        assert filled.text.startswith(f"Look out. First.{gap}Sentence 3 stands")
        assert filled.text.endswith(f"here.{gap}Last.")
    # A paragraph stays one where a sentence is set in.
    filled = Haystack("One two.\n\n" * 40, words).fill([(0.5, "Here.")], tokens=41, inline=True)
    assert filled.text == "One two.\n\n" * 10 + "Here. " + "\n\n".join(["One two."] * 10)


def test_a_short_text_starts_over_and_an_empty_one_is_refused():
    text, _ = hide(Haystack(numbered(10), words), tokens=100, depth=0.5, start=7)
    head, _, tail = text.partition(NEEDLE)
    numbers = [int(word) for word in (head + tail).split() if word.isdigit()]
    assert numbers == [(7 + i) % 10 for i in range(len(numbers))]
    assert len(numbers) == 23
    with pytest.raises(LengthError, match="too few"):
        hide(Haystack(numbered(10), words), tokens=6, depth=0.5)
    with pytest.raises(InputError, match="empty"):
        Haystack(" \n", words)


def counted(size):
    stub = Mock(side_effect=size)
    return stub, stub.call_args_list


def test_the_greatest_that_fits():
    for guess, each in itertools.product(
        (-3, 0, 95, 99, 100, 101, 107, 150, 5000), (1.0, 7.0, 60.0)
    ):
        size, calls = counted(lambda n: 12 + 7 * n)
        assert largest(size, 12 + 7 * 100 + 6, guess=guess, each=each) == 100
        # A good guess of both is enough, and so is one that is too high.
        assert len(calls) <= (3 if each == 7.0 and guess in (99, 100, 101, 150, 5000) else 29)
    # Limits, and sizes that do not grow evenly.
    assert largest(lambda n: 7 * n, 100, guess=3, each=7.0, limit=5) == 5
    assert largest(lambda n: 7 * n, 100, guess=9, each=7.0, limit=14) == 14
    assert largest(lambda n: 7 * n, 0, guess=9, each=7.0) == 0
    assert largest(lambda n: 7 * n + 1, 0, guess=9, each=7.0) == -1
    size, calls = counted(lambda n: n**3)
    assert largest(size, 10**9 + 5, guess=20_000, each=1.0) == 1000
    assert len(calls) <= 40

    def size(n):
        return 5 * n - 3 * (n % 4 == 0)

    for most in range(20, 90):
        found = largest(size, most, guess=9, each=5.0)
        assert size(found) <= most < size(found + 1)


def test_texts_of_units_take_few_counts():
    calls = []

    def count(text):
        calls.append(len(text))
        return len(text)

    found = most_units(count, lambda n: "head." + "unit---" * n, 70_004)
    assert (found.units, found.tokens, found.text) == (9999, 69_998, "head." + "unit---" * 9999)
    assert calls[:2] == [5, 5 + 7 * 20] and calls[2] < 70_000 / 7 and len(calls) <= 5
    # A unit has more the later it comes, as numbers do: a longer look guesses better.
    calls.clear()
    found = most_units(count, lambda n: "".join(f"{i} " for i in range(n)), 100_000)
    assert found.tokens <= 100_000 < found.tokens + 6 and len(calls) <= 8

    def text(n):
        assert n <= 3
        return "unit---" * n

    for most, fewest, units in ((1000, 1, 3), (15, 1, 2), (6, 0, 0)):
        assert most_units(len, text, most, fewest=fewest, limit=3).units == units
    with pytest.raises(LengthError, match="6 tokens are too few for this task's text"):
        most_units(len, text, 6, limit=3)
    with pytest.raises(LengthError, match="0 tokens are too few"):
        most_units(len, text, -5, fewest=0, limit=3)
