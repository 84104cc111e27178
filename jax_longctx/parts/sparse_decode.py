"""Attention of a decode step over fixed tokens and the pages that `selecting` lists.

Both parts merge by log-sum-exp. Every shard of the slots attends the pages that it holds.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import (
    Branched,
    Offloaded,
    Store,
    local_slots,
)
from jax_longctx.contract import LayerContext
from pallas_kernels.common import AnyCache, merge
from pallas_kernels.sparse_decode_attention import (
    Around,
    Pages,
    Shared,
    sparse_decode_attention,
    takes_around,
)


class Span(NamedTuple):
    """The tokens start <= slot < stop that may be selected; those around them are fixed.

    `tokens` is the number of them in each page of the whole cache.
    """

    start: Int[Array, " B"]
    stop: Int[Array, " B"]
    tokens: Int[Array, "B P"]


class Lists(NamedTuple):
    """Global pages, -1 for none: X lists a row, or with `heads` one list of kv head and page."""

    pages: Int[Array, "B X C"]
    heads: Int[Array, "B E"] | None = None


class Ends(NamedTuple):
    """The most tokens before and after the span: fixed ones that are still to be attended."""

    sink: int
    local: int


class Prior(NamedTuple):
    """RESA's estimate of the logits of tokens that are not selected.

    A slot's logit is scale * query.k + bias.

    Attributes:
      query: the mean query, in the queries' dtype.
      lse, out: log-sum-exp over all slots and the softmax's output, float32; without the bias.
      bias: float32.
    """

    query: Float[Array, "B 1 N H"]
    lse: Float[Array, "B N"]
    out: Float[Array, "B N H"]
    bias: Float[Array, "B N"]


class Selected(NamedTuple):
    """Attention over the fixed and the selected tokens.

    Attributes:
      out, lse: with the query's own logits.
      prior_out, prior_lse: with the prior's logits over the same tokens, float32; None without one.
      kept: number of tokens that each query head attends.
      local: the listed pages by their index on this shard, -1 for those of others.
      store: the store where it has fetched the listed pages; None where it is as it was.
    """

    out: Float[Array, "B 1 N H"]
    lse: Float[Array, "B 1 N"]
    prior_out: Float[Array, "B 1 N H"] | None
    prior_lse: Float[Array, "B 1 N"] | None
    kept: Int[Array, "B N"]
    local: Int[Array, "B X C"] | None = None
    store: Any = None


def sparse_attention(
    q: Float[Array, "B 1 N H"],
    store: Store,
    pages: Pages,
    ctx: LayerContext,
    prior: Prior | None = None,
) -> tuple[Array, ...]:
    """`sparse_decode_attention` of a store, whose rows may share a context.

    Of a store that is offloaded, pages and slots are those of its `buffers`. Over a context that
    rows share, `start` is the same for all of them, or beyond what they share; `stop` lies beyond
    it. Every page lies on one side. Flat lists and priors are not for these.
    """
    (k, v), shared = _caches(store, ctx)
    known = None if prior is None else prior.query
    return sparse_decode_attention(q, k, v, pages, scale=ctx.scale, prior=known, shared=shared)


def _caches(store: Store, ctx: LayerContext) -> tuple[tuple[AnyCache, AnyCache], Shared | None]:
    """Keys and values that rows have for themselves on this shard, and what they share."""
    if not isinstance(store, Branched):
        return store.buffers, None
    k, v, split = store.shared.k, store.shared.v, store.split
    if ctx.seq_size > 1:
        split = ctx.slots(k.shape[2]).below(split)
    return (store.own.k, store.own.v), Shared(k, v, split)


def attend_fixed(
    q: Float[Array, "B 1 N H"],
    store: Store,
    span: Span,
    sink: int,
    local: int,
    ctx: LayerContext,
    prior: Prior | None,
) -> tuple[Array, ...] | None:
    """This shard's part of the first and the last tokens; None where there are none.

    Args:
      sink, local: most tokens before and after the span.
    """
    if sink + local == 0:
        return None
    batch, heads, slots, _ = store.sizes
    first = jnp.broadcast_to(jnp.arange(sink), (batch, sink))
    first = jnp.where(first < span.start[:, None], first, -1)
    last = span.stop[:, None] + jnp.arange(local)
    last = jnp.where(last < store.length[:, None], last, -1)
    fixed_BC = local_slots(jnp.concatenate([first, last], axis=1), slots, ctx)
    if isinstance(store, Offloaded):
        fixed_BC, slots = store.placed(fixed_BC), store.pool_k.shape[2]
    fixed_BKC = jnp.broadcast_to(fixed_BC[:, None], (batch, heads, sink + local))
    zero_B = jnp.zeros_like(store.length)
    return sparse_attention(q, store, Pages(fixed_BKC, zero_B, zero_B + slots, 1), ctx, prior)


def attend_lists(
    q: Float[Array, "B 1 N H"],
    store: Store,
    lists: Lists,
    span: Span,
    fixed: tuple[Array, ...] | Ends | None,
    ctx: LayerContext,
    prior: Prior | None,
    valid: Int[Array, " B"],
) -> Selected:
    """The rotated query against the listed pages' tokens in the span, and the fixed ones.

    Args:
      valid: 1 for the rows that take this step.
      fixed: what `attend_fixed` returned. Of `Ends` they are attended here, in the same launch
        where a kernel can.
    """
    slots = store.sizes[2]
    page_size = slots * ctx.seq_size // span.tokens.shape[1]
    # One shard has every page.
    local, where = lists.pages, (span.start, span.stop)
    if ctx.seq_size > 1:
        local = local_slots(lists.pages, slots // page_size, ctx, page_size)
        own = ctx.slots(slots)
        where = (own.below(span.start), own.below(span.stop))
    around = None
    store, listed_pages = store.brought(local, valid, ctx, step=True)
    if isinstance(store, Offloaded):
        where = store.span(*where)
    if lists.heads is not None:
        listed_pages = listed_pages[:, 0]
    if isinstance(fixed, Ends):
        one = ctx.seq_size == 1 and lists.heads is None and sum(fixed) > 0
        # The pool of an offloaded store is no run of slots.
        one = one and not isinstance(store, Offloaded)
        (keys, _), shared = _caches(store, ctx)
        if one and takes_around(q, keys, listed_pages, page_size, prior is not None, shared):
            fixed, around = None, Around(store.length, *fixed)
        else:
            fixed = attend_fixed(q, store, span, *fixed, ctx, prior)
    pages = Pages(listed_pages, *where, page_size, lists.heads, around)
    chosen = sparse_attention(q, store, pages, ctx, prior)
    parts = [chosen] if fixed is None else [fixed, chosen]
    out, lse = ctx.seq_merge(*_merged([(part[0], part[1]) for part in parts]))
    kept_BN = _kept(lists, span, store, q.shape[2])
    behind = (None, None)
    if prior is not None:
        behind = ctx.seq_merge(*_merged([(part[2], part[3]) for part in parts]))
    return Selected(out, lse, *behind, kept_BN, local, store)


def _merged(parts: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    """`merge` of several. One, an attention of a kernel's, is 0 where it is empty."""
    return parts[0] if len(parts) == 1 else merge(parts)


def _kept(lists: Lists, span: Span, store: Store, query_heads: int) -> Int[Array, "B N"]:
    """Tokens that each query head attends."""
    fixed_B = store.length - (span.stop - span.start)
    tokens_BC = listed(span.tokens, lists.pages.reshape(len(fixed_B), -1), 0)  # [B, X * C]
    if lists.heads is None:
        tokens_BX = jnp.sum(tokens_BC.reshape(lists.pages.shape), axis=-1)
    else:
        named_BEK = lists.heads[..., None] == jnp.arange(store.sizes[1])
        tokens_BX = jnp.sum(jnp.where(named_BEK, tokens_BC[..., None], 0), axis=1)
    each = query_heads // tokens_BX.shape[1]
    return fixed_B[:, None] + jnp.repeat(tokens_BX, each, axis=1)


def named(lists: Int[Array, "*B C"], pages: int) -> Bool[Array, "*B P"]:
    """Which of `pages` pages each list names."""
    return jnp.any(lists[..., None] == jnp.arange(pages), axis=-2)


def listed(x: Array, lists: Int[Array, "*B C"], none: float = -jnp.inf) -> Array:
    """The entry of `x` for each listed page, `none` for -1."""
    each = jnp.take_along_axis(x, jnp.maximum(lists, 0), axis=-1)
    return jnp.where(lists >= 0, each, none)
