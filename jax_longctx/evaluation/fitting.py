"""How many units of text fit a number of tokens, found with few counts of the whole."""

import math
from collections.abc import Callable

__all__ = ["largest"]


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
