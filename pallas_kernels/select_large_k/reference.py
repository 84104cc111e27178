"""The k best scores by a stable sort, which is the definition; for tests only."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int


def select(scores: Float[Array, "*R S"], k: Int[Array, "*R"], size: int | None) -> Array:
    """The k best: score descending, slot ascending, -inf and NaN never.

    Returns: their slots [*R,C] in ascending order, then -1; where size is None their mask [*R,S].
    """
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)
    order = jnp.argsort(-scores, axis=-1, stable=True)
    mask = (jnp.argsort(order, axis=-1) < k[..., None]) & (scores > -jnp.inf)
    if size is None:
        return mask
    slots = scores.shape[-1]
    chosen = jnp.sort(jnp.where(mask, jnp.arange(slots), slots), axis=-1)
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, max(size - slots, 0))]
    chosen = jnp.pad(chosen, padding, constant_values=slots)[..., :size]
    return jnp.where(chosen < slots, chosen, -1).astype(jnp.int32)
