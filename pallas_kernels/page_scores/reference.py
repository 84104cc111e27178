"""Scores of pages by definition, every coordinate's larger product; for tests only."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common import PerRow


def page_scores(
    q: Float[Array, "B N H"],
    upper: Float[Array, "B K P H"],
    lower: Float[Array, "B K P H"],
    pages: PerRow,
) -> Float[Array, "B N P"]:
    """Sum over d of max(q_d upper_d, q_d lower_d); -inf from page pages[b] on."""
    groups = q.shape[1] // upper.shape[1]
    q_BN1H = q.astype(jnp.float32)[:, :, None]
    products = (q_BN1H * jnp.repeat(x, groups, axis=1).astype(jnp.float32) for x in (upper, lower))
    scores_BNP = jnp.sum(jnp.maximum(*products), axis=-1)
    held_B1P = jnp.arange(upper.shape[2]) < pages[:, None, None]
    return jnp.where(held_B1P, scores_BNP, -jnp.inf)
