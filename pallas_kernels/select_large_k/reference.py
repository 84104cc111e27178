"""The k best scores by a stable sort, which is the definition; for tests only."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


def select_mask(scores: Float[Array, "*R S"], k: Int[Array, "*R"]) -> Bool[Array, "*R S"]:
    """Whether a slot is among the k best: score descending, slot ascending, -inf and NaN never."""
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    order = jnp.argsort(-scores, axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    return (rank < k[..., None]) & (scores > -jnp.inf)


def select_large_k(
    scores: Float[Array, "*R S"], k: Int[Array, "*R"], *, size: int
) -> Int[Array, "*R C"]:
    """The slots of `select_mask` in ascending order, then -1."""
    slots = scores.shape[-1]
    chosen = jnp.sort(jnp.where(select_mask(scores, k), jnp.arange(slots), slots), axis=-1)
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, max(size - slots, 0))]
    chosen = jnp.pad(chosen, padding, constant_values=slots)[..., :size]
    return jnp.where(chosen < slots, chosen, -1).astype(jnp.int32)
