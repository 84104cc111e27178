"""The pages that queries name, by digests of keys before rotary embedding.

The largest q.k in a box is sum_d max(q_d high_d, q_d low_d) = max(q, 0).high + min(q, 0).low. So a
box is one key of twice the width, and pages are ranked as `voted_keys` ranks keys, with its ties.
A single token scores the digests as they are stored: the joined key would be a copy of them.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import PageDigests
from jax_longctx.contract import LayerContext
from jax_longctx.parts.voted_keys import KeySpan, best_keys, key_sizes, score_tolerance
from pallas_kernels.page_scores import page_scores
from pallas_kernels.topk_scores import merge_topk, tied_top_k


def best_pages(
    q: Float[Array, "B T N H"],
    digests: PageDigests,
    span: KeySpan,
    ctx: LayerContext,
    *,
    count: int,
) -> Int[Array, "B T N C"]:
    """Global pages of each query's best scores in the span; then -1.

    Digests are boxes or points. C is `count`, or for one token at most a shard's pages.
    """
    start, stop, valid, page = span
    if q.shape[1] > 1:
        if digests.low is not None:
            q = jnp.concatenate([jnp.maximum(q, 0), jnp.minimum(q, 0)], axis=-1)
        return best_keys(q, digests.vectors, span, ctx, count=count)
    pages = digests.high.shape[2]
    own = ctx.slots(pages, page)
    sizes = key_sizes(digests.high, stop, ctx, page)
    allowed_BN = score_tolerance(q, sizes, digests.high.dtype)[:, 0]
    filled_B = own.below(jnp.where(valid > 0, stop, 0))
    scores_BNP = page_scores(q[:, 0], digests.plain, filled_B)
    page_P = own.at(jnp.arange(pages))
    scores_BNP = jnp.where(page_P < start, -jnp.inf, scores_BNP)
    values_BNC, pages_BNC = tied_top_k(scores_BNP, min(count, pages), allowed_BN)
    if ctx.seq_size > 1:
        pages_BNC = jnp.where(pages_BNC < 0, -1, own.at(pages_BNC))
        values_BNE, pages_BNE = (ctx.gather_seq(x, -1) for x in (values_BNC, pages_BNC))
        _, pages_BNC = merge_topk(values_BNE, pages_BNE, count, allowed_BN)
    return pages_BNC[:, None]
