"""Star Attention: the context in blocks, each behind an anchor, read at the same time.

Acharya et al. 2024, "Star Attention: Efficient LLM Inference over Long Sequences", section 2.
Phase 1: the context is cut into blocks, which lie on the shards of the slots in the text's order.
Every block but the first is read behind the anchor, a copy of the first block's first tokens at
their own positions. It attends to the anchor and causally to itself; shards exchange nothing. The
anchor's keys are dropped. The blocks' keys stay where they were computed, at their true positions.
Phase 2: the question and the answer attend to all blocks, each shard to its own, merged by
log-sum-exp.

Slots follow the text, so phase 1 leaves the sharded cache of full attention. Phase 2 can be any
method that decodes over one (`decode`: full, quest, arkvale, ideal-topk, resa over each of them,
refreshkv). Selectors choose among the keys of all shards, as on one device. RESA's mean query is
that of the blocks' tokens without anchors.

A shard reads the anchor once, for all its blocks. With `anchor_kv=broadcast` no shard reads it: it
is the head of block 0, whose keys and values the first shard sends to the others in each layer, in
a segment of a whole block (tokens^2 attention, activations of a block at once). One block, or two
with anchor = block, are full attention.

Cost on a shard with n blocks of b tokens, anchor a: (a + n b) tokens through the model, and n b
(a + b / 2) attended pairs; text^2 / 2 over all shards with full attention.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jax_longctx.caches import AppendCache, with_store, write_rows
from jax_longctx.contract import (
    QKV,
    Attended,
    CacheShape,
    Feed,
    LayerContext,
    Method,
    Segment,
    Stage,
    WithCache,
    method,
)
from jax_longctx.methods.full import Full
from jax_longctx.models.config import ModelConfig
from jax_longctx.parts.text_blocks import ANCHOR, SENDS, Blocks, StarCache
from pallas_kernels.common import cut, merge
from pallas_kernels.prefill_attention import cache_attention, causal_attention
from pallas_kernels.quantised import stored_as


@method(source="Acharya et al. 2024, section 2")
class Star(Blocks):
    """The context in blocks side by side, each behind an anchor, one block a device.

    Attributes:
      decode: the method of phase 2.
    """

    decode: Method = Full()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decode.cannot_adopt is not None or self.decode.raw_keys:
            raise self.refused(
                f"{type(self.decode).__name__} cannot decode over blocks read elsewhere; "
                f"choose one of full, quest, arkvale, ideal-topk, resa, refreshkv"
            )
        # A page must lie in one block.
        page = self.decode.page_tokens
        if self.block % page:
            raise self.refused(
                f"block {self.block} must be whole pages of {page} tokens (decode.page_size)"
            )

    def validate(self, config: ModelConfig) -> None:
        self.decode.validate(config)

    def of_layer(self, layer: int, layers: int) -> "Star":
        return dataclasses.replace(self, decode=self.decode.of_layer(layer, layers))

    def init_cache(self, shape: CacheShape) -> StarCache:
        return self.empty_cache(shape, self.decode)

    def segments(self, feed: Feed) -> Iterable[Segment]:
        of = self.decode if feed.stage == "question" else super()
        return of.segments(feed)

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        if not segment.spread:
            return self.decode.attend(new, cache, segment, ctx)
        valid_B = segment.valid_of()
        if segment.variant == ANCHOR:
            return self._read_anchor(new, cache, valid_B, ctx)
        return self._read_block(new, cache, valid_B, ctx, sends=segment.variant == SENDS)

    def _read_anchor(
        self, new: QKV, cache: StarCache, valid: Array, ctx: LayerContext
    ) -> tuple[Attended, StarCache]:
        """The anchor's tokens, causal among themselves; a complete one starts over."""
        q, k, v = new
        start_B = cache.anchored[:, 0] % self.anchor_size
        index_BT = start_B[:, None] + jnp.arange(q.shape[1])
        longest = cache.decode.store.k.shape[2] * ctx.seq_size
        at_BT = self.anchor_positions(index_BT, self._block_of(cache, ctx), longest)
        q, k = ctx.rotate_queries(q, at_BT), ctx.rotate(k, at_BT)
        kept = cache.anchor_k, cache.anchor_v
        earlier = cache_attention(q, *kept, start_B, scale=ctx.scale)
        within = causal_attention(q, k, v, scale=ctx.scale)
        written = (write_rows(x, y, start_B, valid) for x, y in zip(kept, (k, v), strict=True))
        anchor_k, anchor_v = written
        anchored = jnp.where(valid > 0, start_B + valid, cache.anchored[:, 0])[:, None]
        cache = dataclasses.replace(cache, anchor_k=anchor_k, anchor_v=anchor_v, anchored=anchored)
        return merge([earlier, within]), cache

    def _block_of(self, cache: StarCache, ctx: LayerContext) -> Int[Array, " B"]:
        """Index in the text of the block that each row reads next."""
        each = cache.decode.store.k.shape[2] // self.block
        return ctx.seq_index * each + cache.filled[:, 0] // self.block

    def _read_block(
        self, new: QKV, cache: StarCache, valid: Array, ctx: LayerContext, *, sends: bool
    ) -> tuple[Attended, StarCache]:
        """A part of each shard's block: attends the anchor, the block so far, and itself."""
        q, k, v = new
        store: AppendCache = cache.decode.store
        filled_B, local = cache.filled[:, 0], store.k.shape[2]
        at_BT = ctx.seq_offset(local) + filled_B[:, None] + jnp.arange(q.shape[1])
        q, k = ctx.rotate_queries(q, at_BT), ctx.rotate(k, at_BT)
        if sends:
            cache = self._sent(k, v, cache, valid, ctx)
        # All rows with valid tokens are in the same turn.
        turn = jnp.max(jnp.where(valid > 0, filled_B // self.block, 0))
        first_block = ctx.seq_index * (local // self.block) + turn == 0
        parts = [causal_attention(q, k, v, scale=ctx.scale)]
        if not sends:
            begin = turn * self.block
            block_k, block_v = (cut(x, begin, self.block) for x in (store.k, store.v))
            so_far_B = filled_B - begin
            parts.append(cache_attention(q, block_k, block_v, so_far_B, scale=ctx.scale))
        if self.anchor_size:
            seen_B = jnp.where(first_block, 0, cache.anchored[:, 0])
            kept = cache.anchor_k, cache.anchor_v
            parts.append(cache_attention(q, *kept, seen_B, scale=ctx.scale))
        store = dataclasses.replace(
            store,
            k=write_rows(store.k, k, filled_B, valid),
            v=write_rows(store.v, v, filled_B, valid),
        )
        decode = with_store(cache.decode, store)
        cache = dataclasses.replace(cache, decode=decode, filled=(filled_B + valid)[:, None])
        return merge(parts), cache.observed(q, valid)

    def _sent(
        self, k: Array, v: Array, cache: StarCache, valid: Array, ctx: LayerContext
    ) -> StarCache:
        """The head of the first shard's block as the anchor of all shards."""
        first = ctx.seq_index == 0

        def everywhere(x: Array) -> Array:
            # A sum with zeros is exact.
            return ctx.psum_seq(jnp.where(first, x, jnp.zeros_like(x)))

        anchor_k, anchor_v = (
            stored_as(old, jnp.swapaxes(everywhere(x[:, : self.anchor_size]), 1, 2))
            for x, old in ((k, cache.anchor_k), (v, cache.anchor_v))
        )
        anchored = jnp.minimum(everywhere(valid), self.anchor_size)[:, None]
        return dataclasses.replace(cache, anchor_k=anchor_k, anchor_v=anchor_v, anchored=anchored)

    def finish(self, cache: Any, ctx: LayerContext, stage: Stage, reserve: int) -> Any:
        if stage == "question":
            return self.decode.finish(cache, ctx, stage, reserve)
        length_B = ctx.psum_seq(cache.filled[:, 0])
        store = dataclasses.replace(cache.decode.store, length=length_B, position=length_B)
        queries = None if cache.queries is None else ctx.psum_seq(cache.queries[:, 0])
        adopted = self.decode.adopt(with_store(cache.decode, store), ctx, queries)
        return self.decode.finish(adopted, ctx, stage, reserve)

    def fork(self, cache: Any) -> Any:
        return self.decode.fork(cache)

    @property
    def own_tokens(self) -> int | None:
        return self.decode.own_tokens

    def step_variant(self, step: int) -> str:
        return self.decode.step_variant(step)

    def read_bytes(self, cache: Any, length: int) -> int:
        return self.decode.read_bytes(cache, length)
