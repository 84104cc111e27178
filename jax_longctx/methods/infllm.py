"""InfLLM: the newest tokens, the first ones, and the units of the past that fit the queries best.

Xiao et al. 2024, section 3 (arXiv 2402.04617). All keys stay, cached before rotary embedding. For
every chunk of the context and every generated token, each layer

1. takes the mean query and chooses the `topk` units of `block_size` tokens whose representative
   keys have the largest dot product with it, summed over all heads (`parts.unit_memory`);
2. attends, in one softmax, the window of `n_local` tokens at true distances, and at the constant
   distance n_local - 1 the first `n_init` tokens, the tokens between the last unit and the
   window, and the chosen units (`windowed_attention`): no position beyond n_local + chunk is used;
3. adds up the attention that every token in the window receives, and packs the tokens that complete
   a unit behind it: its representative is the mean of the `repr_topk` keys that received most.

The question's last token is fed alone, as generated tokens are: it chooses for itself. Units of
equal tokens can have equal representatives; then the older unit comes first (`parts.voted_keys`).

Cost of a token: attention over about n_init + n_local + topk * block_size tokens, and one dot
product a unit and head, at any length. Memory is full attention's and the representatives. The
authors move units to the host and load those that are chosen; so does `offload="host"`, and the
answers are the same.

As in the authors' code and unlike the paper, the amount received is attention probability, distance
0 included, far keys stand at n_local - 1, and representatives are per query head. Unlike the
released code a key is never attended twice, sums are float32, rotary embedding is the model's own
with its scaling, and each row of a batch chooses for itself. With `decode=dense`
generated tokens attend every key, as in the port that MInference and SCBench evaluate.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_longctx.caches import local_slots
from jax_longctx.contract import (
    QKV,
    CacheShape,
    Feed,
    LayerContext,
    Segment,
    WithCache,
    chunk_segments,
    method,
    question_segments,
)
from jax_longctx.models.config import ModelConfig
from jax_longctx.parts.appending import Appending
from jax_longctx.parts.unit_memory import (
    Layout,
    Packed,
    UnitMemory,
    best_units,
    empty_unit_memory,
)
from jax_longctx.parts.windowed_attention import (
    WindowedAttention,
    attend_everything,
    unit_pages,
)


@method(source="Xiao et al. 2024, section 3 (InfLLM)")
class InfLLM(Appending):
    """The newest tokens and the units of the past that the queries ask for.

    Attributes:
      n_init: first tokens that are always attended.
      n_local: l_L, newest tokens that are always attended, at their true distances.
      block_size: l_bs, tokens of a unit.
      topk: k_m, units that are attended.
      repr_topk: r_k, tokens of a unit whose keys represent it.
      chunk: tokens of the context that choose together (the authors' `exc_block_size`).
      decode: `dense` attends every key at its true position in decode, beyond any trained length.
    """

    n_init: int = 128
    n_local: int = 4096
    block_size: int = 128
    topk: int = 16
    repr_topk: int = 4
    chunk: int = 512
    decode: Literal["sparse", "dense"] = "sparse"

    phase = "both"
    query_aware = looks_ahead = raw_keys = True
    # The masks of its windows take a shard's tokens as one run. What a chunk reads is bounded.
    stripes = False

    def __post_init__(self) -> None:
        self.at_least(0, "n_init", "topk")
        self.at_least(1, "n_local", "block_size", "repr_topk", "chunk")
        if self.chunk > self.n_local:
            raise self.refused(
                f"n_local {self.n_local} must hold a chunk of {self.chunk} tokens; raise "
                "n_local or lower chunk"
            )
        if self.repr_topk > self.block_size:
            raise self.refused(
                f"repr_topk {self.repr_topk} tokens cannot be chosen of block_size "
                f"{self.block_size}; lower repr_topk"
            )

    @property
    def layout(self) -> Layout:
        return Layout(self.n_init, self.n_local, self.block_size, self.chunk)

    @property
    def cannot_offload(self) -> str | None:
        """None unless decode is dense."""
        return "decode=dense attends every key in each step" if self.decode == "dense" else None

    @property
    def cannot_adopt(self) -> str | None:
        """None unless decode is dense."""
        return "decode=dense attends every key; take full" if self.decode == "dense" else None

    def adopt(self, cache: UnitMemory, ctx: LayerContext, queries: Array | None = None) -> Any:
        """Units are known by the mean of their keys: what these received is not known."""
        store, layout = cache.store, self.layout
        begin_B = jnp.zeros_like(store.length)
        slots_BE = layout.completed(begin_B, store.sizes[2] * ctx.seq_size).reshape(
            len(begin_B), -1
        )
        slots_BE = jnp.where(slots_BE < store.length[:, None], slots_BE, -1)
        local_BE = local_slots(slots_BE, store.sizes[2], ctx)
        keys = store.read(local_BE[:, None], values=False)[0]
        none = jnp.zeros((*cache.received.shape[:2], slots_BE.shape[1]), jnp.float32)
        return cache.pack(begin_B, Packed(none, keys), layout, layout.block, ctx)

    def reach(self, config: ModelConfig, tokens: int) -> int:
        return tokens if self.decode == "dense" else min(tokens, self.n_local)

    def validate(self, config: ModelConfig) -> None:
        """Refuses distances beyond the trained length."""
        if self.n_local > config.trained_length:
            raise self.refused(
                f"n_local {self.n_local} reaches beyond the {config.trained_length} positions "
                f"that the model was trained to; lower it"
            )

    def init_cache(self, shape: CacheShape) -> UnitMemory:
        return empty_unit_memory(shape, self.layout, self.topk)

    def segments(self, feed: Feed) -> Iterable[Segment]:
        if feed.stage == "context":
            return chunk_segments(feed.rows, self.chunk, "context")
        return question_segments(feed.rows, self.chunk)

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        (q, k, v), valid_B = new, segment.valid_of()
        if segment.role == "decode" and self.decode == "dense":
            store = cache.store.append(k, v, valid_B, ctx)
            part = attend_everything(q, store.on_device(), ctx)
            return part, dataclasses.replace(cache, store=store)
        # A rotary base that follows the length must follow the window's, which bounds distances.
        ctx = dataclasses.replace(ctx, total=jnp.minimum(ctx.total, self.n_local))
        begin_B = cache.store.length
        # Of the place in the text: a window has positions of its own.
        q = ctx.grown(q, cache.store.position[:, None] + jnp.arange(q.shape[1]))
        chosen = self.choose(q, cache, valid_B, ctx)
        store = cache.store.append(k, v, valid_B, ctx)
        far, alone = self.far(q, ctx), q.shape[1] == 1
        pages = unit_pages(chosen, store.sizes[2], self.layout, ctx)
        if self.topk:
            store = store.fetch(pages, valid_B, ctx, step=alone)
        attention = WindowedAttention(store, begin_B, valid_B, q.shape[1], self.layout, ctx)
        if alone:
            parts = [attention.beyond(far, chosen, pages)]
        else:
            parts = [attention.rest(far)]
            if self.topk:
                parts.append(attention.units(far, pages))
        part, received, packed = attention.near((q, k, v), parts, cache.received)
        cache = dataclasses.replace(cache, store=store, received=received)
        return part, cache.pack(begin_B, packed, self.layout, self.repr_topk, ctx)

    def choose(
        self,
        q: Float[Array, "B T N H"],
        cache: UnitMemory,
        valid: Int[Array, " B"],
        ctx: LayerContext,
    ) -> Int[Array, "B 1 C"]:
        """The units chosen by the raw queries of the next `valid` tokens; then -1."""
        counted_BT11 = (jnp.arange(q.shape[1]) < valid[:, None])[..., None, None]
        sum_B1NH = jnp.sum(q.astype(jnp.float32), 1, keepdims=True, where=counted_BT11)
        mean_B1NH = sum_B1NH / jnp.maximum(valid, 1)[:, None, None, None]
        query_BNH, packed_B = self.far(mean_B1NH, ctx)[:, 0], self.layout.units(cache.store.length)
        return best_units(query_BNH, cache.units, packed_B, self.topk, ctx)

    def far(self, q: Float[Array, "B T N H"], ctx: LayerContext) -> Float[Array, "B T N H"]:
        """Queries for keys without rotary embedding."""
        rotated = ctx.rotate(q, np.full((1, q.shape[1]), self.n_local - 1, np.int32))
        return ctx.for_raw_keys(rotated)

    def read_bytes(self, cache: UnitMemory, length: int) -> int:
        everything = super().read_bytes(cache.store, length)
        if self.decode == "dense":
            return everything
        # Attended tokens, every representative (empty rows too), and the ring.
        most = self.n_init + self.n_local + (self.topk + 1) * self.block_size
        attended = min(length, most) * everything // cache.store.sizes[2]
        return attended + cache.units.nbytes + cache.received.nbytes
