"""Ring Attention: exact attention whose context is spread over the shards of the slots.

Liu et al. 2023, "Ring Attention with Blockwise Transformers", section 3. Every shard projects and
keeps a run of the text. Keys and values go around the ring, from each shard to the next, and each
shard attends to those that pass; the parts are merged by log-sum-exp in float32. The whole context
is one segment, as a layer needs the outputs of all shards. Question and answer are read by full
attention over the sharded cache, whose shards exchange partial results.

In the order of the text the last shard attends to everything and the first to itself alone. With
`order=zigzag` shard r of R holds pieces r and 2R - 1 - r of 2R, so all shards have the same work in
every hop. One more hop returns keys and values to the order of the text before they are cached.

Cost on R shards, text L: 4 N H L^2 (R - 1/2) / R^2 operations a layer for the last shard, which
ends last; 2 N H L^2 / R for each with zigzag. R - 1 times a shard's keys and values are received.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_longctx.contract import (
    QKV,
    Attended,
    Feed,
    LayerContext,
    PrefillWork,
    Segment,
    WithCache,
    method,
    spread_segment,
)
from jax_longctx.parts.appending import Appending
from pallas_kernels.common import merge, side_by_side
from pallas_kernels.prefill_attention import cache_attention, causal_attention
from pallas_kernels.quantised import stored_as

Pair = tuple[Array, Array]  # keys and values


@method(source="Liu et al. 2023, section 3")
class Ring(Appending):
    """Exact attention, the context spread over the devices, keys sent around a ring.

    Attributes:
      order: which pieces of the text a shard computes.
    """

    order: Literal["contiguous", "zigzag"] = "contiguous"

    phase = "prefill"
    # Each shard computes a run of the text, and its keys stay there.
    stripes = False
    own_tokens = 0
    cannot_slide = "it reads parts of a text side by side, and a window reaches across parts"

    def segments(self, feed: Feed) -> Iterable[Segment]:
        if feed.stage == "question":
            return super().segments(feed)
        rows, shards = feed.rows, feed.shards
        if not any(rows):
            return ()
        size = feed.slots // shards
        ends = np.array([len(row) > 0 for row in rows])
        if self.order == "contiguous":
            parts = [[row[s * size : (s + 1) * size] for s in range(shards)] for row in rows]
        else:
            half = size // 2
            piece = [[row[i * half : (i + 1) * half] for i in range(2 * shards)] for row in rows]
            parts = [[[*p[s], *p[2 * shards - 1 - s]] for s in range(shards)] for p in piece]
        return (spread_segment(parts, size, ends),)

    def prefill_work(self, feed: Feed) -> PrefillWork:
        """As `jax-longctx plan` asks; the last shard attends to the most."""
        (row,), shards = feed.context or ((),), feed.shards
        length, own, hops = len(row), len(row) / shards, shards - 1
        if self.order == "zigzag":
            # Keys and values go back to the order of the text, one hop more.
            return PrefillWork(own, own * length / 2, (hops + 1) * own, hops + 1)
        return PrefillWork(own, own * own * (hops + 0.5), hops * own, hops)

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        if not segment.spread:
            return super().attend(new, cache, segment, ctx)
        q, k, v = new
        size, rank, zigzag = q.shape[1], ctx.seq_index, self.order == "zigzag"
        length_B = ctx.psum_seq(segment.valid_of())
        # Where this shard's tokens stand in the text.
        index_T = jnp.arange(size)
        at_T = rank * size + index_T
        if zigzag:
            half = size // 2
            last = (2 * ctx.seq_size - 1 - rank) * half
            at_T = jnp.where(index_T < half, rank * half + index_T, last + index_T - half)
        at_BT = jnp.broadcast_to(at_T, q.shape[:2])
        q, k = ctx.rotate_queries(q, at_BT), ctx.rotate(k, at_BT)
        keys, values = (jnp.swapaxes(x, 1, 2) for x in (k, v))
        out, lse = self._around(q, k, v, (keys, values), length_B, ctx)
        if zigzag:
            keys, values = (_in_order(x, ctx) for x in (keys, values))
        store = dataclasses.replace(
            cache,
            k=stored_as(cache.k, keys),
            v=stored_as(cache.v, values),
            length=length_B,
            position=length_B,
        )
        return (out.astype(new[0].dtype), lse), store

    def _around(
        self, q: Array, k: Array, v: Array, here: Pair, length: Array, ctx: LayerContext
    ) -> Attended:
        """A shard's own part, then the other shards' parts as their keys come by.

        With zigzag shard r holds pieces r and 2R - 1 - r, in the order of the text within it. All
        its queries see the first piece of a shard before it and none of its last; its last piece's
        queries see both pieces of a shard behind it, its first piece's none. Without it the only
        piece of a shard behind is not seen.
        """
        rank, shards, zigzag = ctx.seq_index, ctx.seq_size, self.order == "zigzag"
        size = q.shape[1] // 2 if zigzag else q.shape[1]

        def held(piece: Array) -> Array:
            return jnp.clip(length - piece * size, 0, size)

        def within(part: slice) -> Attended:
            """In float32: it is merged as many times as there are shards."""
            out, lse = causal_attention(q[:, part], k[:, part], v[:, part], scale=ctx.scale)
            return out.astype(jnp.float32), lse

        def before(found: Attended, here: Pair, source: Array) -> Attended:
            first_k, first_v = (x[:, :, :size] for x in here)
            part = cache_attention(q, first_k, first_v, held(source), scale=ctx.scale)
            return merge([found, part])

        def behind(found: Attended, here: Pair, source: Array) -> Attended:
            if not zigzag:
                return found
            out, lse = found
            low, high = (out[:, :size], lse[:, :size]), (out[:, size:], lse[:, size:])
            held_B = held(source) + held(2 * shards - 1 - source)
            more = cache_attention(q[:, size:], *here, held_B, scale=ctx.scale)
            return side_by_side(low, merge([high, more]))

        found = within(slice(0, size))
        if zigzag:
            first_k, first_v = (x[:, :, :size] for x in here)
            more = cache_attention(q[:, size:], first_k, first_v, held(rank), scale=ctx.scale)
            found = side_by_side(found, merge([within(slice(size, None)), more]))
        onward = [(s + 1) % shards for s in range(shards)]
        for hop in range(1, shards):
            keys, values = (ctx.send_seq(x, onward) for x in here)
            here, source = (keys, values), (rank - hop) % shards
            # No collective within: a shard that sees nothing does nothing.
            found = jax.lax.cond(source < rank, before, behind, found, here, source)
        return found


def _in_order(x: Float[Array, "B K S H"], ctx: LayerContext) -> Float[Array, "B K S H"]:
    """Zigzag pieces of keys or values in the order of the text: shard d gets pieces 2d, 2d + 1.

    Of pieces r and 2R - 1 - r exactly one is even, and no two shards send their even piece (nor
    their odd one) to the same shard: two permutations.
    """
    shards, half = ctx.seq_size, x.shape[2] // 2
    low, high = x[:, :, :half], x[:, :, half:]
    low_is_even = ctx.seq_index % 2 == 0
    even, odd = jnp.where(low_is_even, low, high), jnp.where(low_is_even, high, low)
    pieces = [(r, 2 * shards - 1 - r) for r in range(shards)]
    moved = [
        ctx.send_seq(part, [next(p for p in own if p % 2 == parity) // 2 for own in pieces])
        for parity, part in enumerate((even, odd))
    ]
    return jnp.concatenate(moved, axis=2)
