"""The definition of `select_pages`: every product by itself, and a stable sort."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.page_scores import Best, Digests, SharedPages
from pallas_kernels.select_large_k import reference


def select_pages(
    q: Float[Array, "B N H"],
    digests: Digests,
    best: Best,
    *,
    size: int,
    together: bool,
    shared: SharedPages | None = None,
) -> Int[Array, "B X C"]:
    """See the public function."""
    if shared is not None:

        def joined(theirs: Any, own: Any) -> Any:
            return _joined(theirs, own, shared.split)

        digests = jax.tree.map(joined, shared.digests, digests)
    (high, low, radius), (first, last, count) = digests, best
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


def _joined(shared: Any, own: Array, split: Int[Array, " 1"]) -> Array:
    """Every row's digests as if it shared none."""
    page = jnp.arange(shared.shape[2] + own.shape[2])
    shared = jnp.broadcast_to(shared, (len(own), *shared.shape[1:]))
    before = shared[:, :, jnp.minimum(page, shared.shape[2] - 1)]
    after = own[:, :, jnp.clip(page - split, 0, own.shape[2] - 1)]
    shape = (-1, *[1] * (own.ndim - 3))
    return jnp.where((page < split).reshape(shape), before, after)
