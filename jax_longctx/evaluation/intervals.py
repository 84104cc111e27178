"""Confidence intervals of shares and of means."""

import math

import numpy as np
from jaxtyping import Float

__all__ = ["bootstrap", "wilson"]

RESAMPLES = 10_000


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


def bootstrap(values: Float[np.ndarray, " n"], seed: int = 0) -> tuple[float, float, float]:
    """A mean and its 95% interval by resampling the values (Efron 1979, percentiles).

    Of differences between two runs on the same texts the interval is a paired one. A single value
    says nothing of how others would be: then both ends are NaN.

    Returns:
      (mean, lower, upper).

    Raises:
      ValueError: there is no value.
    """
    if not len(values):
        raise ValueError("no values to take a mean of; expected at least one")
    mean = float(np.mean(values))
    if len(values) == 1:
        return mean, math.nan, math.nan
    rng = np.random.default_rng(seed)
    means = [np.mean(rng.choice(values, len(values))) for _ in range(RESAMPLES)]
    low, high = np.quantile(means, [0.025, 0.975])
    return mean, float(low), float(high)
