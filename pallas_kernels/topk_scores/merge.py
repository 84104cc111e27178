"""Merge lists of best keys over disjoint slots: exact, since each list holds its slots' best."""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

_LAST = jnp.iinfo(jnp.int32).max


def merge_topk(
    values: Float[Array, "*B E"], indices: Int[Array, "*B E"], count: int
) -> tuple[Float[Array, "*B C"], Int[Array, "*B C"]]:
    """The `count` best of E listed keys: descending score, ties to the lowest index, -1 last.

    Args:
      values: float32 scores of disjoint keys, in any order.
      indices: the keys' int32 slots; -1 marks an empty entry, whatever its value.

    Returns:
      (values, indices) of `count` entries, -inf and -1 where fewer keys were listed.
    """
    absent = indices < 0
    values = jnp.where(absent, -jnp.inf, values)
    short = [(0, 0)] * (values.ndim - 1) + [(0, max(0, count - values.shape[-1]))]
    order = (
        jnp.pad(-values, short, constant_values=jnp.inf),
        jnp.pad(jnp.where(absent, _LAST, indices), short, constant_values=_LAST),
    )
    negative, slots = (x[..., :count] for x in lax.sort(order, num_keys=2))
    return -negative, jnp.where(slots == _LAST, -1, slots)
