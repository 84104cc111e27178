"""`select_pages` in plain XLA: `page_scores`, masks, and the selection of `select_large_k`."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.page_scores import (
    Best,
    Digests,
    SharedPages,
    page_scores,
    shared_page_scores,
)
from pallas_kernels.select_large_k import select_large_k


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
    first, last, count_B = best
    if shared is None:
        scores_BNP = page_scores(q, digests, last)
    else:
        scores_BNP = shared_page_scores(q, digests, last, shared)
    page_P = jnp.arange(scores_BNP.shape[2])
    inside_BP = (page_P >= first[:, None]) & (page_P < last[:, None])
    scores_BXP = jnp.where(inside_BP[:, None], scores_BNP, -jnp.inf)
    if together:
        scores_BXP = jnp.sum(scores_BXP, axis=1, keepdims=True) / q.shape[1]
    count_BX = jnp.broadcast_to(jnp.asarray(count_B)[:, None], scores_BXP.shape[:2])
    return select_large_k(scores_BXP, count_BX, size=size)
