"""Rankings where scores within a tolerance tie, and merges of ranked lists.

A score ranks as the best score that is at most `tolerance` above it. Where two rank alike, the one
with the lower index comes first. So if a ranks before b, then a >= b - tolerance.

Scores form groups if any two of one group are within the tolerance and any two of different groups
are not. Then every score ranks as its group's best, and `a ranks before b` is a weak order. A
search by blocks, lists and merges with this comparison then finds the definition's slots, as it
does with exact ties. Scores may also form a chain: b is within the tolerance of a and of c, but a
is not within it of c. Then parts of the slots may rank otherwise than all of them.
"""

import math

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels import hopper
from pallas_kernels.dispatch import platform
from pallas_kernels.topk_scores import gpu_ties

_LAST = jnp.iinfo(jnp.int32).max


def tied_top_k(
    scores: Float[Array, "*B S"], count: int, tolerance: Float[Array, "*#B"]
) -> tuple[Float[Array, "*B C"], Int[Array, "*B C"]]:
    """`lax.top_k` with ties; the values are the scores themselves. No score may be NaN.

    The index of each score of -inf is -1.
    """
    *batch, entries = scores.shape
    on_hopper = platform() == "gpu" and gpu_ties.takes(math.prod(batch), entries, count)
    if on_hopper and hopper.unsupported_device() is None:
        each = jnp.broadcast_to(tolerance, batch).reshape(-1)
        found = gpu_ties.tied_best(scores.reshape(-1, entries), count, each)
        values, at = (x.reshape(*batch, count) for x in found)
        return values, at
    # By their indices: where nothing uses these, XLA's CPU compiler sorts all scores instead.
    best = jnp.take_along_axis(scores, lax.top_k(scores, count)[1], axis=-1)
    # What is not within the tolerance of one of these ranks behind all of them.
    above = scores + tolerance[..., None]
    rank_as = jnp.full_like(scores, -jnp.inf)
    for i in reversed(range(count)):
        one = best[..., i : i + 1]
        rank_as = jnp.where(one <= above, one, rank_as)
    at = lax.top_k(rank_as, count)[1]
    values = jnp.take_along_axis(scores, at, axis=-1)
    return values, jnp.where(values > -jnp.inf, at, -1)


def merge_topk(
    values: Float[Array, "*B E"],
    indices: Int[Array, "*B E"],
    count: int,
    tolerance: Float[Array, "*#B"],
) -> tuple[Float[Array, "*B C"], Int[Array, "*B C"]]:
    """The `count` best of E listed keys, ties to the lowest index, -1 last.

    Args:
      values: float32 scores of disjoint keys, in any order.
      indices: the keys' int32 slots; -1 marks an empty entry, whatever its value.

    Returns:
      (values, indices) of `count` entries, -inf and -1 where fewer keys were listed.
    """
    absent = indices < 0
    short = [(0, 0)] * (values.ndim - 1) + [(0, max(0, count - values.shape[-1]))]
    slots, values = lax.sort(
        (
            jnp.pad(jnp.where(absent, _LAST, indices), short, constant_values=_LAST),
            jnp.pad(jnp.where(absent, -jnp.inf, values), short, constant_values=-jnp.inf),
        ),
        num_keys=1,
    )
    values, at = tied_top_k(values, count, tolerance)
    return values, jnp.where(at < 0, -1, jnp.take_along_axis(slots, at, axis=-1))
