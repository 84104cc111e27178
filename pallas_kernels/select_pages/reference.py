"""The definition of `select_pages`: every product by itself, and a stable sort."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.select_large_k import reference


def select_pages(
    q: Float[Array, "B N H"],
    high: Float[Array, "B K P H"],
    low: Float[Array, "B K P H"] | None,
    radius: Float[Array, "B K P"] | None,
    first: Int[Array, " B"],
    last: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    size: int,
    together: bool,
) -> Int[Array, "B X C"]:
    """See the public function."""
    group = q.shape[1] // high.shape[1]
    corners = [
        jnp.repeat(x.astype(jnp.float32), group, axis=1) for x in (high, low) if x is not None
    ]
    q = q.astype(jnp.float32)
    terms = [q[:, :, None] * corner for corner in corners]
    scores = jnp.sum(jnp.maximum(terms[0], terms[-1]), axis=-1)
    if radius is not None:
        scores += jnp.sqrt(jnp.sum(q**2, axis=-1))[..., None] * jnp.repeat(radius, group, axis=1)
    if together:
        scores = jnp.mean(scores, axis=1, keepdims=True)
    page = jnp.arange(high.shape[2])
    inside = (page >= first[:, None]) & (page < last[:, None])
    scores = jnp.where(inside[:, None], scores, -jnp.inf)
    k = jnp.broadcast_to(jnp.minimum(count, size)[:, None], scores.shape[:2])
    return reference.select(scores, k, size)
