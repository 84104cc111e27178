"""A sentence is hidden at its depth, at a border; as many units as fit are found in few counts."""

import itertools
import re
from unittest.mock import Mock

import pytest

from jax_longctx.errors import InputError, LengthError
from jax_longctx.evaluation.haystack import Haystack, largest, most_units, python_topics

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
        filled = Haystack(numbered(1000), words).fill(
            needles, tokens=505, start=3, head="Look out. ", inline=inline
        )
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
    """The size, and what it is called with."""
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
    """Two to see what a unit has in little, one more where the text is long, then the search."""
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
