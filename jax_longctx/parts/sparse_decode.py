"""Attention of a decode step over fixed tokens and listed pages; `selecting` says which pages.

Both parts merge by log-sum-exp. Every shard of the slots attends those of the pages that it holds.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import AppendCache, local_slots
from jax_longctx.contract import LayerContext
from pallas_kernels.common import merge
from pallas_kernels.sparse_decode_attention import (
    flat_sparse_decode_attention,
    sparse_decode_attention,
)


class Span(NamedTuple):
    """The tokens start <= slot < stop that may be selected; those around them are fixed.

    `tokens` is how many of them each page of the whole cache holds.
    """

    start: Int[Array, " B"]
    stop: Int[Array, " B"]
    tokens: Int[Array, "B P"]


class Lists(NamedTuple):
    """Global pages, -1 for none: X lists a row, or with `heads` one list of kv head and page."""

    pages: Int[Array, "B X C"]
    heads: Int[Array, "B E"] | None = None


class Prior(NamedTuple):
    """Logits that stand in for those that are not selected (RESA).

    A slot has scale query.k, or what `logits` says of it, and `bias` for this query.

    Attributes:
      query: RESA's mean query, in the queries' dtype.
      lse, out: log-sum-exp over all slots and the softmax's output, float32; without the bias.
      bias: float32.
      logits: where not every slot has one, -inf there.
    """

    query: Float[Array, "B 1 N H"]
    lse: Float[Array, "B N"]
    out: Float[Array, "B N H"]
    bias: Float[Array, "B N"]
    logits: Float[Array, "B N S"] | None

    def arguments(self) -> dict[str, Any]:
        """As the operation takes it."""
        return {"prior_query": self.query} if self.logits is None else {"prior": self.logits}


class Selected(NamedTuple):
    """Attention over the fixed and the selected tokens.

    Attributes:
      out, lse: of the query's own logits, [B,1,N,H] and [B,1,N].
      prior_out, prior_lse: of the prior's over the same tokens, float32; None without a prior.
      kept: how many tokens, of each query head.
      local: the listed pages by their index on this shard, -1 where they are on another.
    """

    out: Float[Array, "B 1 N H"]
    lse: Float[Array, "B 1 N"]
    prior_out: Float[Array, "B 1 N H"] | None
    prior_lse: Float[Array, "B 1 N"] | None
    kept: Int[Array, "B N"]
    local: Int[Array, "B X C"] | None = None


def attend_fixed(
    q: Float[Array, "B 1 N H"],
    store: AppendCache,
    span: Span,
    sink: int,
    local: int,
    ctx: LayerContext,
    prior: Prior | None,
) -> tuple[Array, ...] | None:
    """This shard's part of the first and the last tokens; None where there are none.

    Args:
      sink, local: the most there are before and after the span.
    """
    if sink + local == 0:
        return None
    batch, heads, slots, _ = store.k.shape
    first = jnp.broadcast_to(jnp.arange(sink), (batch, sink))
    first = jnp.where(first < span.start[:, None], first, -1)
    last = span.stop[:, None] + jnp.arange(local)
    last = jnp.where(last < store.length[:, None], last, -1)
    fixed_BC = local_slots(jnp.concatenate([first, last], axis=1), slots, ctx)
    fixed_BKC = jnp.broadcast_to(fixed_BC[:, None], (batch, heads, sink + local))
    zero_B = jnp.zeros_like(store.length)
    how: dict[str, Any] = {"page_size": 1, "scale": ctx.scale}
    how |= {} if prior is None else prior.arguments()
    return sparse_decode_attention(q, store.k, store.v, fixed_BKC, zero_B, zero_B + slots, **how)


def attend_lists(
    q: Float[Array, "B 1 N H"],
    store: AppendCache,
    lists: Lists,
    span: Span,
    fixed: tuple[Array, ...] | None,
    ctx: LayerContext,
    prior: Prior | None,
) -> Selected:
    """The rotated query against the listed pages' tokens in the span, and the fixed ones."""
    slots = store.k.shape[2]
    page_size = slots * ctx.seq_size // span.tokens.shape[1]
    local = local_slots(lists.pages, slots // page_size, ctx)
    where = (span.start - ctx.seq_offset(slots), span.stop - ctx.seq_offset(slots))
    how: dict[str, Any] = {"page_size": page_size, "scale": ctx.scale}
    how |= {} if prior is None else prior.arguments()
    if lists.heads is None:
        chosen = sparse_decode_attention(q, store.k, store.v, local, *where, **how)
    else:
        chosen = flat_sparse_decode_attention(
            q, store.k, store.v, lists.heads, local[:, 0], *where, **how
        )
    parts = [chosen] if fixed is None else [fixed, chosen]
    out, lse = ctx.seq_merge(*merge([(part[0], part[1]) for part in parts]))
    kept_BN = _kept(lists, span, store, q.shape[2])
    behind = (None, None)
    if prior is not None:
        behind = ctx.seq_merge(*merge([(part[2], part[3]) for part in parts]))
    return Selected(out, lse, *behind, kept_BN, local)


def _kept(lists: Lists, span: Span, store: AppendCache, query_heads: int) -> Int[Array, "B N"]:
    """Tokens that each query head attends."""
    fixed_B = store.length - (span.stop - span.start)
    tokens_BC = listed(span.tokens, lists.pages.reshape(len(fixed_B), -1), 0)  # [B, X * C]
    if lists.heads is None:
        tokens_BX = jnp.sum(tokens_BC.reshape(lists.pages.shape), axis=-1)
    else:
        named_BEK = lists.heads[..., None] == jnp.arange(store.k.shape[1])
        tokens_BX = jnp.sum(jnp.where(named_BEK, tokens_BC[..., None], 0), axis=1)
    each = query_heads // tokens_BX.shape[1]
    return fixed_B[:, None] + jnp.repeat(tokens_BX, each, axis=1)


def listed(x: Array, lists: Int[Array, "*B C"], none: float = -jnp.inf) -> Array:
    """Of each listed page or entry what `x` says of it, `none` where a list has -1."""
    each = jnp.take_along_axis(x, jnp.maximum(lists, 0), axis=-1)
    return jnp.where(lists >= 0, each, none)
