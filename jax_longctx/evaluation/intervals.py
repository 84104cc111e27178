"""95% confidence intervals of shares, means and paired differences."""

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

RESAMPLES = 5_000


def wilson(right: float, count: int) -> tuple[float, float]:
    """Wilson's 95% score interval of a share `right / count` (Wilson 1927).

    Raises:
      ValueError: no trials, or more right ones than trials.
    """
    if not 0 <= right <= count or count == 0:
        raise ValueError(f"{right} of {count} is not a share; expected 0 <= right <= count > 0")
    z, share = 1.959964, right / count
    spread = z * z / count
    centre = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    # Exact at 0 and 1, where the formula only rounds to them.
    low = 0.0 if right == 0 else centre - half
    return low, 1.0 if right == count else centre + half


def bootstrap(values: Float[np.ndarray, " n"]) -> tuple[float, float, float]:
    """A mean and its 95% interval by resampling the values (Efron 1979, percentiles).

    For differences between two runs on the same texts the interval is a paired one. Both ends are
    NaN for a single value.

    Returns:
      (mean, lower, upper).

    Raises:
      ValueError: no values.
    """
    if not len(values):
        raise ValueError("no values to take a mean of; expected at least one")
    mean = float(np.mean(values))
    if len(values) == 1:
        return mean, math.nan, math.nan
    # Takes longer to import than most commands take to begin.
    from scipy import stats

    # In batches, to bound the memory for resamples of many values.
    found = stats.bootstrap(
        (values,),
        np.mean,
        n_resamples=RESAMPLES,
        batch=max(1, 1_000_000 // len(values)),
        method="percentile",
        rng=0,
    )
    low, high = found.confidence_interval
    return mean, float(low), float(high)


def mean_interval(scores: Sequence[float]) -> tuple[float, float]:
    """Interval of the mean of scores from 0 to 100.

    Wilson's where all scores are 0 or 100, else a bootstrap. Wilson's also where all scores are
    equal: a bootstrap would have width 0, and no scores of that mean spread wider than 0 and 100.
    """
    if set(scores) <= {0, 100} or len(set(scores)) == 1:
        low, high = wilson(sum(scores) / 100, len(scores))
        return 100 * low, 100 * high
    return bootstrap(np.asarray(scores, np.float64))[1:]


def paired_shares(both: int, first: int, second: int, neither: int) -> tuple[float, float]:
    """Interval of the difference of two shares over the same trials (Newcombe 1998, method 10).

    Combines Wilson's intervals of both shares by their correlation.

    Args:
      both, first, second, neither: trials that both, only the first, only the second, or none got
        right. The difference is the first share minus the second.

    Raises:
      ValueError: no trials.
    """
    count = both + first + second + neither
    one, two = (both + first) / count if count else 0.0, (both + second) / max(count, 1)
    (low_1, high_1), (low_2, high_2) = wilson(both + first, count), wilson(both + second, count)
    product = (both + first) * (second + neither) * (both + second) * (first + neither)
    excess = both * neither - first * second
    if excess > 0:
        # The paper's continuity correction.
        excess = max(excess - count / 2, 0.0)
    correlation = excess / math.sqrt(product) if product else 0.0

    def distance(up: float, down: float) -> float:
        return math.sqrt(max(up * up - 2 * correlation * up * down + down * down, 0.0))

    below, above = distance(one - low_1, high_2 - two), distance(high_1 - one, two - low_2)
    return one - two - below, one - two + above


def paired_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Interval of the mean of `first[i] - second[i]`, scores from 0 to 100 of the same prompts.

    Newcombe's where all scores are 0 or 100, else a bootstrap of the differences; NaN where these
    are all equal.
    """
    pairs = list(zip(first, second, strict=True))
    if {score for pair in pairs for score in pair} <= {0, 100}:
        counts = [pairs.count(pair) for pair in ((100, 100), (100, 0), (0, 100), (0, 0))]
        low, high = paired_shares(*counts)
        return 100 * low, 100 * high
    differences = np.subtract(first, second)
    if np.ptp(differences) == 0:
        return math.nan, math.nan
    return bootstrap(differences)[1:]
