"""Attention to everything outside a window, at one constant distance.

The position scheme of InfLLM (section 3.3) is ReRoPE's: a key within the window is rotated as
ever (see `window`); every other one stands at one distance, by a query rotated to that distance
and keys that stay as they are cached, before rotary embedding. Two parts lie outside:

- the rest: the first tokens, and those that have left the window and belong to no unit yet;
- chosen units of the cache.

While a chunk of queries is read, the keys at the window's edge are near to its first queries and
outside to its last. They are masked by a sliding window of one token over queries and keys in
reversed order, where "at least so far back" becomes "not ahead".

Over sharded slots every shard attends to what it holds of each part; no key travels.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import AppendCache, local_run, local_slots, read_lines
from jax_longctx.contract import LayerContext
from jax_longctx.parts.block_memory import Layout
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.prefill_attention import cache_attention
from pallas_kernels.sparse_decode_attention import sparse_decode_attention

__all__ = ["Run", "attend_far", "attend_rest", "read_run"]

_LAST = jnp.iinfo(jnp.int32).max


class Run(NamedTuple):
    """This shard's part of a monotone list of slots: keys and values [B, K, X, H].

    Entry i of row b is entry first[b] + i of the whole list; number[b] of them count, the others
    are zeros.
    """

    k: Array
    v: Array
    first: Array
    number: Array


def read_run(
    store: AppendCache,
    slots: Int[Array, "B X"],
    number: Int[Array, " B"],
    ctx: LayerContext,
    *,
    descending: bool = False,
) -> Run:
    """The entries that this shard holds of each row's list, of which the first number[b] count."""
    size = store.k.shape[2]
    local_BX, first_B, number = local_run(slots, number, size, ctx, descending=descending)
    k, v = (read_lines(x, local_BX[:, None]) for x in (store.k, store.v))
    return Run(k, v, first_B, number)


def attend_rest(
    q: Float[Array, "B T N H"],
    store: AppendCache,
    begin: Int[Array, " B"],
    valid: Int[Array, " B"],
    layout: Layout,
    ctx: LayerContext,
    *,
    masked: bool,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """First tokens and the remainder: tokens outside of units that are `window` or more back.

    Args:
      q: of the valid[b] tokens from token begin[b] on, at the constant distance.
      masked: without it every query sees what only the last one should.
    """
    queries = q.shape[1]
    in_units_B = layout.units(begin) * layout.block
    newest_B = begin + valid - 1 - layout.window
    index_X = jnp.arange(layout.sinks + layout.block - 1 + queries)
    # From the newest down, over the units to the first tokens.
    before_B = newest_B - layout.sinks - in_units_B + 1
    over_BX = jnp.where(index_X < before_B[:, None], 0, in_units_B[:, None])
    slots_BX = newest_B[:, None] - index_X - over_BX
    number_B = jnp.maximum(newest_B + 1 - in_units_B, 0)
    run = read_run(store, slots_BX, number_B, ctx, descending=True)
    if queries == 1:
        return decode_attention(q, run.k, run.v, run.number, scale=ctx.scale)
    if not masked:
        return cache_attention(q, run.k, run.v, run.number, scale=ctx.scale)
    # Query t sees entry i where t >= valid - 1 - i; r = T - 1 - t counts them from the last.
    start_B = valid - queries - run.first
    how = {"scale": ctx.scale, "window": 1, "query_start": start_B}
    out, lse = cache_attention(jnp.flip(q, axis=1), run.k, run.v, run.number, **how)
    return jnp.flip(out, axis=1), jnp.flip(lse, axis=1)


def attend_far(
    q: Float[Array, "B T N H"],
    store: AppendCache,
    chosen: Int[Array, "B X C"],
    layout: Layout,
    ctx: LayerContext,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The chosen units, -1 for none; X = 1 list for all heads, or one for each query head."""
    batch, queries, heads, _ = q.shape
    kv_heads, local = store.k.shape[1:3]
    pages, number, page = _local_pages(chosen, layout, local, ctx)
    if queries == 1:
        lists = heads if chosen.shape[1] > 1 else kv_heads
        pages = jnp.broadcast_to(pages, (batch, lists, pages.shape[2]))
        start_B, stop_B = jnp.zeros((batch,), jnp.int32), jnp.full((batch,), local, jnp.int32)
        how = {"page_size": page, "scale": ctx.scale}
        out, lse = sparse_decode_attention(q, store.k, store.v, pages, start_B, stop_B, **how)
        return out, lse
    slots = jnp.where(pages[..., None] < 0, -1, pages[..., None] * page + jnp.arange(page))
    shared = chosen.shape[1] == 1
    slots_BXE = slots.reshape(batch, 1 if shared else kv_heads, -1)  # [B, 1, E] or [B, K, G * E]
    k, v = (read_lines(x, slots_BXE) for x in (store.k, store.v))
    if shared:
        return cache_attention(q, k, v, number[:, 0] * page, scale=ctx.scale)
    # Heads that see different keys are rows of their own.
    k, v = (x.reshape(batch * heads, 1, -1, x.shape[3]) for x in (k, v))
    rows = jnp.swapaxes(q, 1, 2).reshape(batch * heads, queries, 1, -1)
    out, lse = cache_attention(rows, k, v, number.reshape(-1) * page, scale=ctx.scale)
    out = jnp.swapaxes(out.reshape(batch, heads, queries, -1), 1, 2)
    return out, jnp.swapaxes(lse.reshape(batch, heads, queries), 1, 2)


def _local_pages(
    chosen: Int[Array, "B X C"], layout: Layout, local: int, ctx: LayerContext
) -> tuple[Int[Array, "B X E"], Int[Array, "B X"], int]:
    """The units as pages of this shard's `local` slots: (pages, then -1; how many; page size).

    A page is a unit where the first tokens are whole units, and else what divides both.
    """
    page = math.gcd(layout.sinks, layout.block, local)
    each = layout.block // page
    first = chosen * each + layout.sinks // page
    pages = jnp.where((chosen >= 0)[..., None], first[..., None] + jnp.arange(each), -1)
    pages = local_slots(pages, local // page, ctx)
    mine = pages >= 0
    pages = jnp.where(mine, pages, _LAST).reshape(*chosen.shape[:2], -1)  # [B, X, C * each]
    number = jnp.sum(mine, axis=(2, 3))
    if ctx.seq_size > 1:
        pages = jnp.sort(pages, axis=-1)
    return jnp.where(pages == _LAST, -1, pages), number, page
