"""Attention over a scope: slots of a long cache, chosen anew each time, at positions 0, 1, 2, ...

A scope is an ascending list of slots that ends with the newest tokens. Keys are cached before
rotary embedding and rotated where they stand in the scope. Over sharded slots every shard attends
to the run of the scope that it holds, and the parts are merged by log-sum-exp: no key travels.

Also how a prompt is fed to such a method: nothing is chosen while all of it fits the scope, and
the question's last token goes alone.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_longctx.caches import AppendCache, local_run, read_lines
from jax_longctx.contract import LayerContext, Segment, chunk_segments, make_segment
from jax_longctx.models.rope import rope_angles
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.dispatch import platform
from pallas_kernels.lse import merge
from pallas_kernels.prefill_attention import cache_attention, causal_attention

__all__ = ["WHOLE", "attend_scope", "context_segments", "lay_out", "question_segments"]

# The tag of segments in which everything that a row has cached is attended.
WHOLE = "whole"


def context_segments(
    rows: Sequence[Sequence[int]], cuts: Sequence[int], chunk: int
) -> Iterator[Segment]:
    """Each row's first `cuts[b]` tokens in segments tagged WHOLE, then the rest of all rows."""
    more = np.array([len(row) > cut for row, cut in zip(rows, cuts, strict=True)])
    first = [row[:cut] for row, cut in zip(rows, cuts, strict=True)]
    for segment in chunk_segments(first, chunk, "context"):
        ends = np.asarray(segment.ends) & ~more
        yield dataclasses.replace(segment, ends=ends, variant=WHOLE)
    rest = [row[cut:] for row, cut in zip(rows, cuts, strict=True)]
    yield from chunk_segments(rest, chunk, "context")


def question_segments(rows: Sequence[Sequence[int]], chunk: int) -> Iterator[Segment]:
    """The question, its last token in a segment of one column."""
    some = np.array([len(row) > 0 for row in rows])
    for segment in chunk_segments([row[:-1] for row in rows], chunk, "query"):
        yield dataclasses.replace(segment, ends=np.zeros_like(some))
    yield make_segment([row[-1:] for row in rows], 1, "query", some)


def lay_out(
    kept: Int[Array, "B X"],
    number: Int[Array, " B"],
    stop: Int[Array, " B"],
    *,
    global_size: int,
    local_size: int,
) -> Int[Array, "B C"]:
    """[global | kept | local]: the first slots, number[b] kept ones, and those from stop[b] on."""
    index_X = jnp.arange(kept.shape[1] + local_size)
    kept_BX = jnp.pad(kept, ((0, 0), (0, local_size)))
    local_BX = stop[:, None] + index_X - number[:, None]
    rest_BX = jnp.where(index_X < number[:, None], kept_BX, local_BX)
    first_BX = jnp.broadcast_to(jnp.arange(global_size), (kept.shape[0], global_size))
    return jnp.concatenate([first_BX, rest_BX], axis=1)


def attend_scope(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    cache: AppendCache,
    valid: Int[Array, " B"],
    scope: tuple[Int[Array, "B C"], Int[Array, " B"]],
    ctx: LayerContext,
    *,
    original: bool = False,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Attention of the cache's newest `valid[b]` tokens, the scope's last, causal among them.

    Args:
      q, k, v: the newest tokens', before rotary embedding.
      scope: slots and how many of them count in each row.
      original: keys and queries stand at their slots instead.
    """
    slots_BC, number_B = scope
    alone = q.shape[1] == 1
    # A chunk attends to itself apart; a lone token is read from the cache with the others.
    read_B = number_B if alone else number_B - valid
    slots_BX, first_B, read_B = local_run(slots_BC, read_B, cache.k.shape[2], ctx)
    if original:
        key_BX, begin_B = slots_BX + ctx.seq_offset(cache.k.shape[2]), cache.length - valid
    else:
        key_BX = first_B[:, None] + jnp.arange(slots_BX.shape[1])
        begin_B = number_B - valid
        # The length that a rotary base may follow is the scope's: it bounds the positions.
        ctx = dataclasses.replace(ctx, total=jnp.minimum(ctx.total, slots_BC.shape[1]))
    keys = _rotated_lines(cache.k, slots_BX, key_BX, ctx)
    values = read_lines(cache.v, slots_BX[:, None])
    at_BT = begin_B[:, None] + jnp.arange(q.shape[1])
    q = ctx.rotate(q, at_BT)
    if alone:
        return ctx.seq_merge(*decode_attention(q, keys, values, read_B, scale=ctx.scale))
    earlier = ctx.seq_merge(*cache_attention(q, keys, values, read_B, scale=ctx.scale))
    within = causal_attention(q, ctx.rotate(k, at_BT), v, scale=ctx.scale)
    return merge([earlier, within])


def _rotated_lines(
    buffer: Float[Array, "B K S H"],
    slots: Int[Array, "B X"],
    positions: Int[Array, "B X"],
    ctx: LayerContext,
) -> Float[Array, "B K X H"]:
    """The keys in this shard's `slots` for all heads, rotated to `positions`; zeros for -1."""
    if platform() == "tpu":
        # Half lines are another layout there: the cache would be copied.
        lines = jnp.swapaxes(read_lines(buffer, slots[:, None]), 1, 2)
        return jnp.swapaxes(ctx.rotate(lines, positions), 1, 2)
    # A channel's partner is in the line's other half: two reads of half lines, elementwise from
    # there on. To put two halves together cost a GPU 32 us for 8 heads and 8192 slots, where to
    # read them takes 12.
    batch, heads, size, head_dim = buffer.shape
    halves = buffer.reshape(-1, head_dim // 2)  # [B*K*S*2, F]
    row_BK1 = (jnp.arange(batch)[:, None, None] * heads + jnp.arange(heads)[:, None]) * size
    line_BKX1 = 2 * (row_BK1 + jnp.maximum(slots, 0)[:, None])[..., None]
    own, partner = (
        jnp.take(halves, line_BKX1 + np.array(order), axis=0, mode="clip").astype(jnp.float32)
        for order in ([0, 1], [1, 0])
    )  # [B, K, X, 2, F]
    cos, sin = (x[:, None, :, None] for x in rope_angles(ctx.rope, head_dim, positions, ctx.total))
    turned = own * cos + partner * (sin * np.array([[-1.0], [1.0]], np.float32))
    turned = jnp.where((slots >= 0)[:, None, :, None, None], turned, 0)
    return turned.astype(buffer.dtype).reshape(batch, heads, -1, head_dim)  # [B, K, X, H]
