"""How many units of text fit a number of tokens, found with few counts of the whole."""

import dataclasses
import math
from collections.abc import Callable

from jax_longctx.errors import LengthError

__all__ = ["Fitted", "largest", "most_units"]

# From so many units, at least, is guessed how many tokens one has.
_PROBE = 20


def largest(
    size: Callable[[int], int], most: int, *, guess: int, each: float, limit: int | None = None
) -> int:
    """The greatest `n` from 0 to `limit` with `size(n) <= most`; -1 where there is none.

    Two or three calls suffice when the guess is good. Where `size` falls now and then, as tokens
    may where pieces join, the result fits and the next greater one does not.

    Args:
      size: tokens of a text of n units, growing with n.
      guess: where to begin.
      each: about how many tokens a unit has: how far to go for what is missing or too much.
    """
    low, high = -1, math.inf if limit is None else limit + 1
    n, known, tried = guess, None, 0
    while high - low > 1:
        n = int(min(max(n, low + 1), high - 1))
        tried += 1
        if tried % 4 == 0 and high < math.inf:
            # However badly sizes grow, the rest is halved now and then.
            n = (low + int(high)) // 2
        over = size(n) - most
        if known is not None and (over - known[1]) * (n - known[0]) > 0:
            each = (over - known[1]) / (n - known[0])
        known = n, over
        if over > 0:
            high = n
            n -= math.ceil(over / each)
        else:
            low = n
            n += max(1, math.floor(-over / each))
    return low


@dataclasses.dataclass(frozen=True)
class Fitted:
    """A text of as many units as fit, and its tokens."""

    units: int
    text: str
    tokens: int


def most_units(
    count: Callable[[str], int],
    text: Callable[[int], str],
    room: int,
    *,
    fewest: int = 1,
    limit: int | None = None,
) -> Fitted:
    """`text` of the most units, from `fewest` to `limit`, that has at most `room` tokens.

    Raises:
      LengthError: not even `fewest` fit.
    """
    sizes: dict[int, int] = {}

    def size(units: int) -> int:
        sizes[units] = count(text(units))
        return sizes[units]

    base, each, guess, probe = size(0), 1.0, 0, _PROBE
    # What a unit has is seen in a few first, and again in a text that is not much of the whole.
    for _ in range(2):
        probe = probe if limit is None else min(probe, max(limit, 1))
        each = max((size(probe) - base) / probe, 1.0)
        guess = max(int((room - base) / each), 0)
        probe = max(guess // 8, _PROBE)
    units = largest(size, room, guess=guess, each=each, limit=limit)
    if units < fewest:
        raise LengthError(f"{max(room, 0)} tokens are too few for this task's text; ask for more")
    return Fitted(units, text(units), sizes[units])
