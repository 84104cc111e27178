"""One decode step over selected pages.

A query attends

- always the first `sink` and the last `local` tokens;
- of what lies between them the best pages, as many as the budget says (see `budgets`).

Both parts merge by log-sum-exp. Over shards of the slots every shard scores its own pages and
attends those of the selected that it holds. Under a uniform budget it sends its own best with their
scores, as many as a list may have, and all select from those; other budgets need all scores.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import AppendCache, local_slots
from jax_longctx.contract import LayerContext
from jax_longctx.parts import budgets, page_cache, psa
from jax_longctx.parts.selectors import Prior, SelectiveCache, Selector, Span
from pallas_kernels.lse import merge
from pallas_kernels.select_large_k import select_large_k, select_mask
from pallas_kernels.sparse_decode_attention import (
    flat_sparse_decode_attention,
    sparse_decode_attention,
)

__all__ = ["Selected", "attend_selected", "first_resident", "most_pages"]


class Selected(NamedTuple):
    """Attention over the fixed and the selected tokens.

    Attributes:
      out, lse: of the query's own logits, [B,1,N,H] and [B,1,N].
      prior_out, prior_lse: of the prior's over the same tokens, float32; None without a prior.
      kept: how many tokens, of each query head.
      resident: this shard's part of the page cache after the step; None without one.
    """

    out: Float[Array, "B 1 N H"]
    lse: Float[Array, "B 1 N"]
    prior_out: Float[Array, "B 1 N H"] | None
    prior_lse: Float[Array, "B 1 N"] | None
    kept: Int[Array, "B N"]
    resident: Bool[Array, "B P"] | None = None


class Lists(NamedTuple):
    """Global pages, -1 for none: X lists a row, or with `heads` one list of kv head and page.

    `resident` is as in `Selected`.
    """

    pages: Int[Array, "B X C"]
    heads: Int[Array, "B E"] | None
    resident: Bool[Array, "B P"] | None = None


def attend_selected(
    method: Selector,
    q: Float[Array, "B 1 N H"],
    cache: SelectiveCache,
    ctx: LayerContext,
    prior: Prior | None = None,
) -> Selected:
    """The rotated query of the newest token against the fixed and the selected tokens."""
    store, page_size = cache.store, method.page_size
    span = selectable(method, store, ctx)
    given: dict[str, Any] = {}
    if prior is not None:
        given = {"prior_query": prior.query} if prior.logits is None else {"prior": prior.logits}
    fixed = _attend_fixed(method, q, store, span, ctx, given)
    lists = choose(method, q, cache, span, ctx, fixed, prior)
    local = local_slots(lists.pages, store.k.shape[2] // page_size, ctx)
    offset = ctx.seq_offset(store.k.shape[2])
    where = (span.start - offset, span.stop - offset)
    how: dict[str, Any] = {"page_size": page_size, "scale": ctx.scale, **given}
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
    return Selected(out, lse, *behind, kept_BN, lists.resident)


def selectable(method: Selector, store: AppendCache, ctx: LayerContext) -> Span:
    """What lies between the fixed tokens of each row."""
    page = method.page_size
    pages = store.k.shape[2] * ctx.seq_size // page
    sink, stop_B = method.sink, store.length - method.local
    if method.whole_pages:
        sink, stop_B = -(-sink // page) * page, stop_B // page * page
    start_B = jnp.minimum(sink, store.length)
    stop_B = jnp.maximum(stop_B, start_B)
    first_P = jnp.arange(pages) * page
    end_BP = jnp.minimum(first_P + page, stop_B[:, None])
    tokens_BP = jnp.maximum(end_BP - jnp.maximum(first_P, start_B[:, None]), 0)
    return Span(start_B, stop_B, tokens_BP)


def _attend_fixed(
    method: Selector,
    q: Array,
    store: AppendCache,
    span: Span,
    ctx: LayerContext,
    prior: Mapping[str, Any],
) -> tuple[Array, ...] | None:
    """This shard's part of the first and the last tokens; None where a method has no such.

    `prior` are the arguments that say what RESA's prior is, if any.
    """
    page = method.page_size if method.whole_pages else 1
    sink, local = -(-method.sink // page) * page, method.local + page - 1
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
    return sparse_decode_attention(
        q,
        store.k,
        store.v,
        fixed_BKC,
        zero_B,
        zero_B + slots,
        page_size=1,
        scale=ctx.scale,
        **prior,
    )


def _kept(lists: Lists, span: Span, store: AppendCache, query_heads: int) -> Int[Array, "B N"]:
    """Tokens that each query head attends."""
    fixed_B = store.length - (span.stop - span.start)
    pages_BC = lists.pages.reshape(lists.pages.shape[0], -1)  # [B, X * C]
    tokens_BC = jnp.take_along_axis(span.tokens, jnp.maximum(pages_BC, 0), axis=1)
    tokens_BC = jnp.where(pages_BC >= 0, tokens_BC, 0)
    if lists.heads is None:
        tokens_BX = jnp.sum(tokens_BC.reshape(lists.pages.shape), axis=-1)
    else:
        named_BEK = lists.heads[..., None] == jnp.arange(store.k.shape[1])
        tokens_BX = jnp.sum(jnp.where(named_BEK, tokens_BC[..., None], 0), axis=1)
    each = query_heads // tokens_BX.shape[1]
    return fixed_B[:, None] + jnp.repeat(tokens_BX, each, axis=1)


def page_counts(method: Selector, prompt: Int[Array, " B"]) -> Int[Array, " B"]:
    """Pages of each head under a uniform budget."""
    tokens_B = jnp.full_like(prompt, method.budget)
    if method.ratio is not None:
        tokens_B = budgets.share(method.ratio, prompt)
    if method.count_fixed:
        tokens_B = jnp.maximum(tokens_B - method.sink - method.local, 0)
    return jnp.maximum(tokens_B // method.page_size, method.min_pages)


def most_pages(method: Selector, slots: int, pages: int) -> int:
    """The largest of `page_counts` for prompts of at most `slots` tokens, within `pages`."""
    tokens = method.budget
    if method.ratio is not None:
        tokens = budgets.most_of(method.ratio, slots)
    if method.count_fixed:
        tokens = max(tokens - method.sink - method.local, 0)
    return min(max(tokens // method.page_size, method.min_pages), pages)


def choose(
    method: Selector,
    q: Float[Array, "B 1 N H"],
    cache: SelectiveCache,
    span: Span,
    ctx: LayerContext,
    fixed: tuple[Array, ...] | None,
    prior: Prior | None,
) -> Lists:
    """The pages to attend. `fixed` is this shard's attention over the fixed tokens."""
    pages = span.tokens.shape[1]
    most = most_pages(method, pages * method.page_size, pages)
    count_B = jnp.minimum(page_counts(method, cache.prompt), most)
    kv_heads = cache.store.k.shape[1]
    own_BNP = method.scores(q[:, 0], cache, ctx)
    plain = method.allocation == "uniform" and cache.resident is None
    # Of each listed page a score and an index travel.
    if plain and ctx.seq_size > 1 and 2 * ctx.seq_size * most < pages:
        return Lists(_best_of_shards(method, own_BNP, span, count_B, most, kv_heads, ctx), None)
    scores_BNP = ctx.gather_seq(own_BNP, axis=2)
    scores_BNP = jnp.where((span.tokens > 0)[:, None], scores_BNP, -jnp.inf)
    if method.allocation in ("ada-floor", "ada-blend"):
        mass_BKP = _pooled(method, scores_BNP, span.tokens, kv_heads, ctx)
        if method.pools == "scores":
            mass_BKP = budgets.softmax_mass(mass_BKP, span.tokens, ctx.scale)
        blend = method.allocation == "ada-blend"
        heads, chosen = budgets.ada_kv(
            mass_BKP, count_B, ctx, most=most, alpha=method.alpha, blend=blend
        )
        return Lists(chosen[:, None], heads)
    ranked_BXP = _pooled(method, scores_BNP, span.tokens, kv_heads, ctx)
    if cache.resident is not None:
        earlier = dataclasses.replace(cache.store, length=cache.store.length - 1)
        before = selectable(method, earlier, ctx)
        held_BP = page_cache.held(cache.resident, span, before, ctx)
        size = min(method.resident_pages, pages)
        chosen_BC, held_BP = page_cache.recall(ranked_BXP[:, 0], held_BP, count_B, size)
        lists_BKC = jnp.broadcast_to(chosen_BC[:, None], (len(count_B), kv_heads, size))
        return Lists(lists_BKC, None, page_cache.local_part(held_BP, ctx))
    count_BX = jnp.broadcast_to(count_B[:, None], ranked_BXP.shape[:2])
    lists = select_large_k(ranked_BXP, count_BX, size=most)
    if method.allocation != "uniform":
        forced = None if fixed is None else [lse[:, 0] for lse in fixed[1::2]]
        candidates = psa.Candidates(scores_BNP, lists, count_BX, span)
        lists = psa.until_enough(method, q, cache.store, candidates, forced, prior, ctx)
    return Lists(lists, None)


def first_resident(
    method: Selector, q: Float[Array, "B 1 N H"], cache: SelectiveCache, ctx: LayerContext
) -> Bool[Array, "B P"]:
    """This shard's part of the page cache as the prompt's last rotated query leaves it."""
    span = selectable(method, cache.store, ctx)
    scores_BNP = ctx.gather_seq(method.scores(q[:, 0], cache, ctx), axis=2)
    scores_BNP = jnp.where((span.tokens > 0)[:, None], scores_BNP, -jnp.inf)
    ranked_BXP = _pooled(method, scores_BNP, span.tokens, cache.store.k.shape[1], ctx)
    kept_BP = select_mask(ranked_BXP[:, 0], method.resident_pages)
    return page_cache.local_part(kept_BP, ctx)


def _best_of_shards(
    method: Selector,
    own: Float[Array, "B N P"],
    span: Span,
    count: Int[Array, " B"],
    most: int,
    kv_heads: int,
    ctx: LayerContext,
) -> Int[Array, "B X C"]:
    """The count[b] best pages of all shards, ascending, from the scores of this shard's own.

    Whatever is among the best of all is among the best of its shard.
    """
    first = ctx.seq_offset(own.shape[2])
    tokens_BP = jax.lax.dynamic_slice_in_dim(span.tokens, first, own.shape[2], axis=1)
    own = jnp.where((tokens_BP > 0)[:, None], own, -jnp.inf)
    ranked_BXP = _pooled(method, own, tokens_BP, kv_heads, ctx, sharded=True)
    count_BX = jnp.broadcast_to(count[:, None], ranked_BXP.shape[:2])
    best_BXC = select_large_k(ranked_BXP, count_BX, size=most)
    scores_BXC = jnp.take_along_axis(ranked_BXP, jnp.maximum(best_BXC, 0), axis=2)
    scores_BXC = jnp.where(best_BXC >= 0, scores_BXC, -jnp.inf)
    # Shard after shard, each ascending: ties still go to the lowest page.
    pages_BXE = ctx.gather_seq(best_BXC + first, axis=2)
    chosen_BXC = select_large_k(ctx.gather_seq(scores_BXC, axis=2), count_BX, size=most)
    pages_BXC = jnp.take_along_axis(pages_BXE, jnp.maximum(chosen_BXC, 0), axis=2)
    return jnp.where(chosen_BXC >= 0, pages_BXC, -1)


def _pooled(
    method: Selector,
    scores: Float[Array, "B N P"],
    tokens: Int[Array, "B P"],
    kv_heads: int,
    ctx: LayerContext,
    *,
    sharded: bool = False,
) -> Float[Array, "B X P"]:
    """What each list is ranked by: X query heads, kv heads, or kv heads that all agree.

    The pages are all, or with `sharded` this shard's.
    """
    if method.granularity == "query_head":
        return scores
    if method.pools == "mass":
        # Logits of different heads are not comparable, shares of their softmax are.
        over = ctx if sharded else None
        scores = budgets.softmax_mass(scores, tokens, ctx.scale, over)
    batch, heads, pages = scores.shape
    if method.granularity == "kv_head":
        return jnp.mean(scores.reshape(batch, kv_heads, -1, pages), axis=2)  # [B, K, G, P]
    mean_BP = ctx.psum_heads(jnp.sum(scores, axis=1)) / (heads * ctx.head_shards)
    return jnp.broadcast_to(mean_BP[:, None], (batch, kv_heads, pages))
