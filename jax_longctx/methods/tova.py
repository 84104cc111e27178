"""TOVA: the tokens that the newest token attends to most.

Oren et al. 2024, section 3.2. After a segment each layer keeps the `budget` tokens with the highest
attention probability under the segment's last token, averaged over all query heads, so that all
heads of a layer keep the same tokens; the last token itself competes. Nothing is remembered from
one segment to the next: a token stays for as long as it is looked at. While answering one token
leaves a step. Cost: attention over the budget, and one more row of scores.

Differences from the authors' code, which drops once after the whole prompt: the text is read in
chunks, each followed by an eviction, so that memory is bounded (`chunk` as long as the text is
theirs); kept tokens stay in the order of the text, without which `shifted` would be wrong. As a
baseline of CItruS (`protocol=citrus`, `positions=shifted`) the last row of a chunk ranks the tokens
before it, and the last row of the question those that remain.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.caches import BudgetCache
from jax_longctx.contract import (
    CHUNK_ROWS,
    QKV,
    Attended,
    CacheShape,
    LayerContext,
    Registered,
    Segment,
    method,
)
from jax_longctx.parts import eviction
from pallas_kernels.attention_mass import attention_mass

__all__ = ["TOVA"]


@method(source="Oren et al. 2024, section 3.2")
class TOVA(Registered):
    """The tokens that the newest one attends to most, per layer.

    Attributes:
      budget: tokens kept in each layer.
      chunk: tokens of the context read between two evictions.
      protect_current: the segment's last token stays whatever its score. With it and `chunk=1`
        TOVA is standard chunked state eviction (CItruS, section 5.2).
      positions: `true` (the authors' code) or `shifted` (keys stand at their slots).
      protocol: `own` (the paper), or `citrus` (as a baseline of CItruS, section 5.2).
    """

    budget: int = 1024
    chunk: int = 256
    protect_current: bool = False
    positions: eviction.Positions = "true"
    protocol: eviction.Protocol = "own"

    def __post_init__(self) -> None:
        eviction.check(self)

    def init_cache(self, shape: CacheShape) -> BudgetCache:
        return eviction.empty_cache(self, shape)

    def attend(
        self, new: QKV, cache: BudgetCache, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, BudgetCache]:
        valid_B = segment.valid_of(CHUNK_ROWS)
        if eviction.only_joins(self, segment):
            return eviction.read_and_append(self, new, cache, valid_B, ctx)
        seen = eviction.look(self, new, cache, valid_B, ctx)
        # A sum over all heads ranks as their mean does.
        scores_BU = ctx.psum_heads(jnp.sum(_last_row(seen), axis=1))
        if self.protect_current:
            current_B1 = (seen.length + seen.valid - 1)[:, None]
            scores_BU = jnp.where(seen.order == current_B1, jnp.inf, scores_BU)
        scores_BKU = jnp.broadcast_to(scores_BU[:, None], (*cache.k.shape[:2], scores_BU.shape[1]))
        return (seen.out, seen.lse), eviction.evict(self, cache, seen, scores_BKU, segment)

    validate = eviction.validate
    reach = eviction.reach
    segments = eviction.segments
    finish = eviction.finish
    fork = eviction.fork
    read_bytes = eviction.read_bytes


def _last_row(seen: eviction.Look) -> Float[Array, "B K U"]:
    """Each row's last valid query: its probability of every slot and token, over the group."""
    last_B1 = jnp.maximum(seen.valid - 1, 0)[:, None]
    q_B1NH = jnp.take_along_axis(seen.q, last_B1[..., None, None], axis=1)
    lse_B1N = jnp.take_along_axis(seen.lse, last_B1[..., None], axis=1)
    past = attention_mass(q_B1NH, seen.past_k, lse_B1N, seen.length, scale=seen.scale)
    # It sees every valid token of its segment, so no causal start is needed.
    k_BKTH = jnp.swapaxes(seen.k, 1, 2)
    new = attention_mass(q_B1NH, k_BKTH, lse_B1N, seen.valid, scale=seen.scale)
    return jnp.concatenate([past, new], axis=2)
