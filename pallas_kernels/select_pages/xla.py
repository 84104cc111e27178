"""`select_pages` in plain XLA: `page_scores`, masks, and the selection of `select_large_k`."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.page_scores import SharedPages, page_scores, shared_page_scores
from pallas_kernels.select_large_k import select_large_k


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
    shared: SharedPages | None = None,
) -> Int[Array, "B X C"]:
    """See the public function."""
    if shared is None:
        scores_BNP = page_scores(q, high, high if low is None else low, last, radius)
    else:
        scores_BNP = shared_page_scores(q, high, low, last, radius, shared)
    page_P = jnp.arange(scores_BNP.shape[2])
    inside_BP = (page_P >= first[:, None]) & (page_P < last[:, None])
    scores_BXP = jnp.where(inside_BP[:, None], scores_BNP, -jnp.inf)
    if together:
        scores_BXP = jnp.sum(scores_BXP, axis=1, keepdims=True) / q.shape[1]
    count_BX = jnp.broadcast_to(count[:, None], scores_BXP.shape[:2])
    return select_large_k(scores_BXP, count_BX, size=size)
