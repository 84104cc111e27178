"""Attention of a decode step over fixed tokens and the pages that `selecting` lists.

Both parts merge by log-sum-exp. Every shard of the slots attends the pages that it holds.
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import Near, Store, local_slots, merged
from jax_longctx.contract import LayerContext
from pallas_kernels.sparse_decode_attention import Around, Pages


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


class Margins(NamedTuple):
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
      local: the listed pages by their index on this shard, -1 for other shards' pages.
      store: the store, which has fetched the listed pages; None where it is as it was.
    """

    out: Float[Array, "B 1 N H"]
    lse: Float[Array, "B 1 N"]
    prior_out: Float[Array, "B 1 N H"] | None
    prior_lse: Float[Array, "B 1 N"] | None
    kept: Int[Array, "B N"]
    local: Int[Array, "B X C"] | None = None
    store: Any = None


@dataclasses.dataclass(frozen=True)
class Step:
    """A decode step over the fixed tokens and chosen pages.

    Attributes:
      q: the rotated query of each row's newest token, which is in the store.
      margins: of the fixed tokens.
      valid: 1 for the rows that take this step.
    """

    q: Float[Array, "B 1 N H"]
    store: Store
    span: Span
    margins: Margins
    valid: Int[Array, " B"]
    prior: Prior | None

    @property
    def _prior(self) -> Array | None:
        return None if self.prior is None else self.prior.query

    def fixed(self, ctx: LayerContext) -> Near:
        """This shard's slots of the fixed tokens."""
        (sink, local), store, span = self.margins, self.store, self.span
        first = jnp.broadcast_to(jnp.arange(sink), (len(self.q), sink))
        first = jnp.where(first < span.start[:, None], first, -1)
        last = span.stop[:, None] + jnp.arange(local)
        last = jnp.where(last < store.length[:, None], last, -1)
        return Near(local_slots(jnp.concatenate([first, last], axis=1), store.sizes[2], ctx))

    def attend_fixed(self, ctx: LayerContext) -> tuple[Array, ...] | None:
        """This shard's part of the attention to the fixed tokens; None where there are none."""
        if not sum(self.margins):
            return None
        return self.store.attend_pages(self.q, [lambda: [self.fixed(ctx)]], ctx, self._prior)

    def attend(self, lists: Lists, fixed: tuple[Array, ...] | None, ctx: LayerContext) -> Selected:
        """The query against the listed pages' tokens in the span, and the fixed ones.

        Args:
          fixed: what `attend_fixed` returned; without it they are attended here, in the same
            launch where a kernel can.
        """
        span, slots = self.span, self.store.sizes[2]
        page = slots * ctx.seq_size // span.tokens.shape[1]
        # One shard has every page.
        local, where = lists.pages, (span.start, span.stop)
        if ctx.seq_size > 1:
            local = local_slots(lists.pages, slots // page, ctx, page)
            own = ctx.slots(slots)
            where = (own.below(span.start), own.below(span.stop))
        store = self.store.fetch(local, self.valid, ctx, step=True)
        listed_pages = local if lists.heads is None else local[:, 0]
        pages = Pages(listed_pages, *where, page, lists.heads)
        ways = [lambda: [pages]]
        if fixed is None and sum(self.margins):
            ways = [lambda: [self.fixed(ctx), pages]]
            if ctx.seq_size == 1 and lists.heads is None:
                around = Around(store.length, *self.margins)
                ways.insert(0, lambda: [dataclasses.replace(pages, around=around)])
        found = store.attend_pages(self.q, ways, ctx, self._prior)
        found = merged([fixed, found]) if fixed else found
        out, lse = ctx.seq_merge(*found[:2])
        behind = ctx.seq_merge(*found[2:]) if self.prior else (None, None)
        kept_BN = _kept(lists, span, store, self.q.shape[2])
        return Selected(out, lse, *behind, kept_BN, local, store)


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
