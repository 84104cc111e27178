"""Star Attention as the authors' released code computes it, for studies of parity alone.

The first phase is Star's. In the second, their code calls flash attention with a causal mask on
every host. With fewer queries than keys that mask is aligned to the last key: of n queries, row r
sees the keys up to L - n + r of the host's L. That is right on the host that holds the end of the
text, where the question's own keys are the last ones. On every other host the first rows of a
question miss up to n - 1 of the last tokens (spec: ST-B1). A generated token, n = 1, sees all.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import AppendCache, read_lines
from jax_longctx.contract import QKV, Feed, LayerContext, Segment, WithCache, method
from jax_longctx.methods.full import Full
from jax_longctx.methods.star import Star
from pallas_kernels.common import capped, factor_of, merge
from pallas_kernels.prefill_attention import cache_attention, causal_attention


@method(source="Acharya et al. 2024, released code")
class StarReleasedMask(Star):
    """Star Attention under the causal mask that the authors' code gives a question."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decode != Full():
            raise self.refused("the authors' code decodes by full attention; set decode=full")

    def segments(self, feed: Feed) -> Iterable[Segment]:
        # The mask of a question that is prefilled at once.
        longest = max(map(len, feed.question or ()), default=0)
        if feed.stage == "question":
            feed = dataclasses.replace(feed, chunk=max(feed.chunk, longest))
        return super().segments(feed)

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        if segment.role != "query":
            return super().attend(new, cache, segment, ctx)
        q, k, v = new
        at_BT = cache.position[:, None] + jnp.arange(q.shape[1])
        q, k = ctx.rotate_queries(q, at_BT), ctx.rotate(k, at_BT)
        valid_B, held_B = segment.valid_of(), cache.held(ctx)
        size = cache.k.shape[2]
        # The host of the text's last token.
        whole_B = (cache.length - 1) // size == ctx.seq_index
        seen_B = jnp.where(whole_B, held_B, jnp.maximum(held_B - valid_B, 0))
        part = cache_attention(q, cache.k, cache.v, seen_B, scale=ctx.scale)
        masked = _last_keys(q, cache, jnp.where(whole_B, 0, held_B), valid_B, ctx)
        earlier = ctx.seq_merge(*merge([part, masked]))
        within = causal_attention(q, k, v, scale=ctx.scale)
        return merge([earlier, within]), cache.append(k, v, valid_B, ctx)


def _last_keys(
    q: Float[Array, "B T N H"],
    cache: AppendCache,
    held: Int[Array, " B"],
    valid: Int[Array, " B"],
    ctx: LayerContext,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The last valid[b] of this shard's `held` slots: row r of the question sees 0 to r of them."""
    batch, queries, heads, width = q.shape
    index_T = jnp.arange(queries)
    slots_BT = (held - valid)[:, None] + index_T
    there_BT = (index_T < valid[:, None]) & (slots_BT >= 0)
    lines_B1T = jnp.where(there_BT, slots_BT, -1)[:, None]
    keys, values = (read_lines(x, lines_B1T) for x in (cache.k, cache.v))
    q_BTKGH = q.reshape(batch, queries, keys.shape[1], -1, width)  # [B, T, K, N / K, H]
    logits = factor_of(ctx.scale) * jnp.einsum(
        "BTKGH,BKSH->BTKGS", q_BTKGH, keys, preferred_element_type=jnp.float32
    )
    logits = capped(logits, ctx.scale)
    seen_BTS = there_BT[:, None] & (index_T[:, None] >= index_T)
    logits = jnp.where(seen_BTS[:, :, None, None], logits, -jnp.inf)
    lse = jax.nn.logsumexp(logits, axis=-1)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(lse), lse, 0.0)[..., None])
    out = jnp.einsum("BTKGS,BKSH->BTKGH", weights, values.astype(jnp.float32))
    shape = (batch, queries, heads)
    return out.reshape(*shape, width).astype(q.dtype), lse.reshape(shape)
