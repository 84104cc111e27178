"""The greatest number of units that fits is found, and with few counts."""

import pytest

from jax_longctx.errors import LengthError
from jax_longctx.evaluation.haystack import largest, most_units


def counted(size):
    calls = []

    def wrapped(n):
        calls.append(n)
        return size(n)

    return wrapped, calls


@pytest.mark.parametrize("guess", [-3, 0, 95, 100, 107, 5000])
@pytest.mark.parametrize("each", [1.0, 7.0, 60.0])
def test_the_greatest_that_fits(guess, each):
    size, calls = counted(lambda n: 12 + 7 * n)
    assert largest(size, 12 + 7 * 100 + 6, guess=guess, each=each) == 100
    assert len(calls) < 30


def test_a_good_guess_takes_two_or_three_counts():
    for guess in (99, 100, 101):
        size, calls = counted(lambda n: 12 + 7 * n)
        assert largest(size, 12 + 7 * 100 + 6, guess=guess, each=7.0) == 100
        assert len(calls) <= 3


@pytest.mark.parametrize("guess", [150, 5000])
def test_a_bad_guess_takes_a_count_more(guess):
    size, calls = counted(lambda n: 12 + 7 * n)
    assert largest(size, 12 + 7 * 100 + 6, guess=guess, each=7.0) == 100
    assert len(calls) <= 3


def test_sizes_that_do_not_grow_evenly_are_halved():
    size, calls = counted(lambda n: n**3)
    assert largest(size, 10**9 + 5, guess=20_000, each=1.0) == 1000
    assert len(calls) <= 40


def test_texts_of_units_take_few_counts():
    """Two to see what a unit has in little, one more where the text is long, then the search."""
    calls = []

    def count(text):
        calls.append(len(text))
        return len(text)

    found = most_units(count, lambda n: "head." + "unit---" * n, 70_004)
    assert (found.units, found.tokens, found.text) == (9999, 69_998, "head." + "unit---" * 9999)
    assert calls[0] == 5 and calls[1] == 5 + 7 * 20 and calls[2] < 70_000 / 7
    assert len(calls) <= 5
    # A unit has more the later it comes, as numbers do: a longer look guesses better.
    calls.clear()
    found = most_units(count, lambda n: "".join(f"{i} " for i in range(n)), 100_000)
    assert found.tokens <= 100_000 < found.tokens + 6
    assert len(calls) <= 8


def test_texts_of_few_units():
    def text(n):
        assert n <= 3
        return "unit---" * n

    assert most_units(len, text, 1000, limit=3).units == 3
    assert most_units(len, text, 15, limit=3).units == 2
    assert most_units(len, text, 6, fewest=0, limit=3).units == 0
    with pytest.raises(LengthError, match="6 tokens are too few for this task's text"):
        most_units(len, text, 6, limit=3)
    with pytest.raises(LengthError, match="0 tokens are too few"):
        most_units(len, text, -5, fewest=0, limit=3)


def test_limits():
    assert largest(lambda n: 7 * n, 100, guess=3, each=7.0, limit=5) == 5
    assert largest(lambda n: 7 * n, 100, guess=9, each=7.0, limit=14) == 14
    assert largest(lambda n: 7 * n, 0, guess=9, each=7.0) == 0
    assert largest(lambda n: 7 * n + 1, 0, guess=9, each=7.0) == -1


def test_what_is_found_fits_though_sizes_fall_now_and_then():
    def size(n):
        return 5 * n - 3 * (n % 4 == 0)

    for most in range(20, 90):
        found = largest(size, most, guess=9, each=5.0)
        assert size(found) <= most < size(found + 1)
