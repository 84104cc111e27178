"""The greatest number of units that fits is found, and with few counts."""

import pytest

from jax_longctx.evaluation.fitting import largest


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
