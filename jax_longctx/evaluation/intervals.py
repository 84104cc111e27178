"""Confidence intervals of shares."""

import math

__all__ = ["wilson"]


def wilson(right: int, count: int, z: float = 1.959964) -> tuple[float, float]:
    """Wilson's score interval of a share `right / count`, 95% by default (Wilson 1927).

    Raises:
      ValueError: no trials, or more right ones than trials.
    """
    if not 0 <= right <= count or count == 0:
        raise ValueError(f"{right} of {count} is not a share; expected 0 <= right <= count > 0")
    share, spread = right / count, z * z / count
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    # At the ends the interval reaches them exactly; the formula does so but for rounding.
    low = 0.0 if right == 0 else centre - half
    return low, 1.0 if right == count else centre + half
