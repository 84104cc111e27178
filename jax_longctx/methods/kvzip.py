"""KVzip: tokens stay that the model attends to while it repeats the text.

Kim et al. 2025, "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction", section
3. When the text has been read, it passes through the model once more in parts of `chunk` tokens,
each behind words that ask to repeat it, with the 8 tokens before the part. These tokens stand at
the positions after the text, attend to all of it, and join no cache.

A part's tokens are ranked by its own repetition: of each query the softmax over the text's first
`sink` tokens, the part, and the repetition up to itself. A token's score is the largest probability
that a query of the kv head's group gives it.

The words are those of kvpress for models without a chat template. An engine without a tokenizer
asks without words. The authors let all heads of all layers compete for one budget; here each kv
head keeps `budget` tokens (their uniform variant), or a `ratio` of the text: 0.3 is the paper's.

Cost: a second pass over the text that attends to all of it, three times the attention of prefill
in all. The probabilities of a part and a kv head are materialised: G (chunk + 128) chunk floats.
"""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_longctx.caches import AppendCache, Rewinding
from jax_longctx.caches.reading import gather_slots
from jax_longctx.contract import (
    QKV,
    CacheShape,
    Feed,
    LayerContext,
    PrefillWork,
    Segment,
    WithCache,
    make_segment,
    method,
    tail_size,
)
from jax_longctx.errors import InputError
from jax_longctx.parts.compressing import Compressing, whole
from jax_longctx.sharding import axes_field
from pallas_kernels.common import capped, factor_of, merge
from pallas_kernels.prefill_attention import cache_attention, causal_attention

# Columns of a segment for the words and the tokens before a part, and how many of these.
ROOM, BEFORE = 128, 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RepeatedCache(Rewinding):
    """Every key and value of a row, and what its repetition gave each so far.

    Attributes:
      given: the largest probability.
      repeated: tokens of the text that were repeated.
    """

    store: AppendCache
    given: Float[Array, "B K S"] = axes_field("batch", "kv_heads", "slots")
    repeated: Int[Array, " B"] = axes_field("batch")


@method(source="Kim et al. 2025 (KVzip), section 3")
class KVzip(Compressing):
    """After the context, only tokens stay that the model attends to while it repeats the text.

    Attributes:
      chunk: tokens of a part that is repeated.
    """

    chunk: int = 2048

    cannot_go_on = "it ranks what it repeats, and an answer is not repeated"
    asks = (
        "\n\nRepeat the previous context exactly.",
        "\n\nRepeat the part of the previous context exactly, starting with",
        "\n",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "chunk")

    def init_cache(self, shape: CacheShape) -> RepeatedCache:
        size = (shape.batch, shape.num_kv_heads, shape.slots)
        given, repeated = jnp.zeros(size, jnp.float32), jnp.zeros(shape.batch, jnp.int32)
        return RepeatedCache(super().init_cache(shape), given, repeated)

    def segments(self, feed: Feed) -> Iterable[Segment]:
        yield from super().segments(feed)
        if feed.stage == "context":
            yield from self._repetitions(feed)

    def _repetitions(self, feed: Feed) -> Iterator[Segment]:
        """The parts behind their words; a row that has ended is left out."""
        first, later, end = feed.asks or ((), (), ())
        asked = max(len(first), len(later)) + len(end)
        if asked > ROOM - BEFORE:
            raise InputError(
                f"kvzip: the words that ask to repeat a text are {asked} tokens for this "
                f"tokenizer, {ROOM - BEFORE} fit; choose another method"
            )
        longest = max(map(len, feed.rows), default=0)
        most = -(-(self.chunk + ROOM) // ROOM) * ROOM
        size = tail_size(min(self.chunk, longest) + ROOM, most)
        for start in range(0, longest, self.chunk):
            rows = []
            for row in feed.rows:
                part = row[start : start + self.chunk]
                words = [*later, *row[max(start - BEFORE, 0) : start]] if start else first
                rows.append([*words, *end, *part] if part else [])
            yield make_segment(rows, size, "probe", np.zeros(len(rows), bool))

    def prefill_work(self, feed: Feed) -> PrefillWork:
        """Of the repetition's tokens each attends to the whole text."""
        tokens, shards = len(feed.rows[0]), feed.shards
        chunks, parts = (-(-tokens // size) for size in (feed.chunk, self.chunk))
        again = tokens + parts * BEFORE
        pairs = tokens * (tokens + 1) / 2 + again * (tokens + self.chunk / 2)
        return PrefillWork(tokens + again, pairs / shards, passes=chunks + parts)

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        if segment.role != "probe":
            part, store = super().attend(new, cache.store, segment, ctx)
            read = segment.role == "context"
            return part, dataclasses.replace(cache, store=store) if read else store
        q, k, v = new
        store: AppendCache = cache.store
        at_BT = store.position[:, None] + jnp.arange(q.shape[1])
        q, k = ctx.rotate_queries(q, at_BT), ctx.rotate(k, at_BT)
        seen_B = store.held(ctx)
        text = ctx.seq_merge(*cache_attention(q, store.k, store.v, seen_B, scale=ctx.scale))
        own = causal_attention(q, k, v, scale=ctx.scale)
        valid_B = segment.valid_of()
        return merge([text, own]), self._scored(cache, q, ctx.with_sinks(own[1]), valid_B, ctx)

    def _scored(
        self, cache: RepeatedCache, q: Array, own: Array, valid: Array, ctx: LayerContext
    ) -> RepeatedCache:
        """The cache after a repetition of the next part; `own` is its queries' log-sum-exp."""
        store, start_B = cache.store, cache.repeated
        batch, heads, slots = store.sizes[:3]
        some_B = jnp.where(valid > 0, jnp.minimum(store.length - start_B, self.chunk), 0)
        index_C, start_B1 = jnp.arange(self.sink + self.chunk) - self.sink, start_B[:, None]
        first_BC = jnp.where(index_C + self.sink < start_B1, index_C + self.sink, -1)
        part_BC = jnp.where(index_C < some_B[:, None], start_B1 + index_C, -1)
        slots_BC = jnp.where(index_C < 0, first_BC, part_BC)
        slots_BKC = jnp.broadcast_to(slots_BC[:, None], (batch, heads, slots_BC.shape[1]))
        keys_BKCH = gather_slots(store.k, slots_BKC, ctx)

        def given(head: tuple[Array, Array, Array]) -> Float[Array, "B C"]:
            q_BTGH, own_BTG, keys_BCH = head
            dots = jnp.einsum(
                "BTGH,BCH->BTGC", q_BTGH, keys_BCH, preferred_element_type=jnp.float32
            )
            logits = capped(dots * factor_of(ctx.scale), ctx.scale)
            logits = jnp.where((slots_BC >= 0)[:, None, None], logits, -jnp.inf)
            total_BTG = jnp.logaddexp(jax.nn.logsumexp(logits, axis=-1), own_BTG)
            counts_BT = jnp.arange(q.shape[1]) < valid[:, None]
            logits = jnp.where(counts_BT[..., None, None], logits - total_BTG[..., None], -jnp.inf)
            return jnp.exp(jnp.max(logits, axis=(1, 2)))

        # Head by head: probabilities of all heads would be as large as many caches.
        grouped = (x.reshape(*x.shape[:2], heads, -1, *x.shape[3:]) for x in (q, own))
        each = [jnp.moveaxis(x, 2, 0) for x in grouped]
        found_KBC = jax.lax.map(given, (*each, jnp.moveaxis(keys_BKCH, 1, 0)))
        into_BS = ctx.slots(slots).at(jnp.arange(slots)) - start_B1
        found_BKS = jnp.take_along_axis(
            jnp.moveaxis(found_KBC, 0, 1)[..., self.sink :],
            jnp.clip(into_BS, 0, self.chunk - 1)[:, None],
            axis=2,
        )
        mine_BS = (into_BS >= 0) & (into_BS < some_B[:, None])
        scores = jnp.where(mine_BS[:, None], found_BKS, cache.given)
        return dataclasses.replace(cache, given=scores, repeated=start_B + some_B)

    def scores(self, cache: Any, ctx: LayerContext) -> Float[Array, "B K S"]:
        return whole(cache.given, ctx)
