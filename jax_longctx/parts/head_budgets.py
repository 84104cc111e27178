"""How many pages each head attends: uniform, Ada-KV, PSA. One function each.

- `best_pages`: every head the same number;
- `ada_kv` (Feng et al. 2024, section 3.3): the kv heads of a layer share one budget. The best pages
  of all heads are kept, ranked by the softmax of each head's scores. `floor` first keeps the best
  `ALPHA` share of each head's uniform budget; its total is exact. `blend`, as the authors' code,
  mixes the counts without that floor with the uniform count; its total is exact up to rounding;
- `progressive` (PSA, progressive sparse attention, Zhou et al. 2025): each head visits its pages
  from the best on until the share `epsilon` of the attention is reached. The authors' stop test is
  not published; here the mass still missing comes from all keys (`oracle`), or from the pages'
  scores (`estimate`). The visited pages' masses are exact: their keys are read once more. The lists
  have the static length that the method's budget allows, -1 after the last page.

`ada_tokens` is Ada-KV and CriticalKV of tokens that leave for good, in place of pages.

Scores are [B, heads, P] of all pages, -inf where a page is no candidate; lists hold global page
ids.
"""

import fractions
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import AppendCache, local_slots
from jax_longctx.contract import LayerContext
from jax_longctx.parts.sparse_decode import Lists, Span, listed
from pallas_kernels.common import Scale, capped, factor_of
from pallas_kernels.decode_attention import decode_logits
from pallas_kernels.select_large_k import select_large_k, select_mask

Granularity = Literal["query_head", "kv_head", "layer"]
Allocation = Literal["uniform", "ada-floor", "ada-blend", "psa-oracle", "psa-estimate"]

# The share of the uniform budget that Ada-KV leaves to each head, as its authors have it.
ALPHA = 0.2
# What CriticalKV adds to scores before it weighs them, as its authors have it.
CRITICAL_RAISE = 1e-4


def best_pages(
    ranked: Float[Array, "B X P"], count: Int[Array, " B"], most: int
) -> Int[Array, "B X C"]:
    """The count[b] best pages of each list, at most C = `most`, ascending."""
    count_BX = jnp.broadcast_to(count[:, None], ranked.shape[:2])
    return select_large_k(ranked, count_BX, size=most)


def ada_kv(
    mass: Float[Array, "B K P"],
    count: Int[Array, " B"],
    most: int,
    ctx: LayerContext,
    *,
    blend: bool,
) -> Lists:
    """A row's list of (local kv head, page), -1 for none and for the heads of another shard.

    Args:
      mass: shares of a softmax, of the local kv heads.
      count: pages of each head under a uniform budget, at most `most`.
    """
    local_heads, pages = mass.shape[1:]
    mass = ctx.gather_heads(mass, axis=1)
    heads = mass.shape[1]
    safe_B = share(ALPHA, count)
    flat = mass.reshape(mass.shape[0], -1)  # [B, K * P]
    # Blended counts may exceed the total by half a page a head, from rounding.
    size = min(heads * most + (heads + 1) // 2 * blend, heads * pages)
    if blend:
        free_BKP = select_mask(flat, heads * count).reshape(mass.shape)
        free_BK = jnp.sum(free_BKP, axis=-1)
        count_BK = jnp.round(free_BK * (1 - ALPHA)).astype(jnp.int32)
        kept_BKP = select_mask(mass, count_BK + safe_B[:, None])
        ranked_BKP = jnp.where(kept_BKP, 0.0, -jnp.inf)
        entries_BE = select_large_k(ranked_BKP.reshape(flat.shape), size, size=size)
    else:
        kept_BKP = select_mask(mass, jnp.broadcast_to(safe_B[:, None], mass.shape[:2]))
        ranked = jnp.where(kept_BKP.reshape(flat.shape), jnp.inf, flat)
        entries_BE = select_large_k(ranked, heads * count, size=size)
    head_BE = entries_BE // pages - ctx.head_offset(local_heads)
    mine_BE = (entries_BE >= 0) & (head_BE >= 0) & (head_BE < local_heads)
    pages_BE = jnp.where(mine_BE, entries_BE % pages, -1)
    return Lists(pages_BE[:, None], jnp.where(mine_BE, head_BE, -1))


def ada_tokens(
    scores: Float[Array, "B K S"],
    count: Int[Array, " B"],
    norms: Float[Array, "B K S"] | None,
) -> Bool[Array, "B K S"]:
    """Which tokens stay where the kv heads of a layer share `count` tokens for each of them.

    Each head's best `ALPHA` share of `count`, one at least, is safe; then the best of all heads.
    With `norms` each head keeps as many (CriticalKV): the first half by the scores, and the rest by
    the scores, a little raised, times the norms.

    Args:
      scores: of all heads, -inf where there is no token; inf stays before all others.
      norms: of the values as the output projection has them.
    """
    (batch, heads, _), first = scores.shape, jnp.inf
    safe_B1 = jnp.maximum(share(ALPHA, count), 1)[:, None]
    safe_BKS = select_mask(scores, jnp.broadcast_to(safe_B1, (batch, heads)))
    # What stays before all others may be more than the budget: no head's is another's safe share.
    ranked = jnp.where(safe_BKS, first, jnp.minimum(scores, jnp.finfo(scores.dtype).max))
    kept = select_mask(ranked.reshape(batch, -1), heads * count).reshape(scores.shape)
    if norms is None:
        return kept
    count_BK = jnp.sum(kept, axis=-1, dtype=jnp.int32)
    ranked = jnp.where(select_mask(ranked, count_BK // 2), first, ranked)
    weighed = jnp.where(jnp.isfinite(ranked), (ranked + CRITICAL_RAISE) * norms, ranked)
    return select_mask(weighed, count_BK)


class Enough(NamedTuple):
    """How many pages a head visits.

    Attributes:
      share: of the attention, at which it stops.
      known: where the missing mass is read from, as the allocation is named.
      count, most: pages of each head at most, and the largest count.
    """

    share: float
    known: str
    count: Int[Array, " B"]
    most: int


def progressive(
    q: Float[Array, "B 1 N H"],
    store: AppendCache,
    span: Span,
    scores: Float[Array, "B N P"],
    enough: Enough,
    ctx: LayerContext,
    forced: Float[Array, "B N"] | None,
) -> Lists:
    """Each head's best pages, best first, until enough of the attention is reached.

    Args:
      q: the rotated query.
      forced: log-sum-exp of this shard's fixed tokens; None without them.
    """
    epsilon, stop, count, most = enough
    lists = best_first(scores, best_pages(scores, count, most))
    masses = _page_masses(q, store, lists, span, ctx)
    forced_BN = jnp.full(lists.shape[:2], -jnp.inf)
    if forced is not None:
        forced_BN = _seq_lse(forced, ctx)
    if stop == "oracle":
        logits_BNS = decode_logits(q, store.k, store.held(ctx), scale=ctx.scale)
        known = _seq_lse(jax.nn.logsumexp(logits_BNS, axis=-1), ctx)[..., None]
    else:
        known = _estimated(scores, span.tokens, count, lists, ctx.scale)
    kept = pages_until(epsilon, forced_BN, masses, known, stop == "oracle")
    return Lists(jnp.where(kept, lists, -1))


def share(ratio: float, count: Any) -> Any:
    """floor(ratio * count) of an int or of int32 counts, exact for the ratio as it is written.

    In float32 a share of a whole number may fall below it. Four decimals are kept.
    """
    exact = fractions.Fraction(str(ratio)).limit_denominator(10_000)
    over, under = exact.numerator, exact.denominator
    return count // under * over + count % under * over // under


def page_logits(
    scores: Float[Array, "B X P"], tokens: Int[Array, "B P"], scale: Scale
) -> Float[Array, "B X P"]:
    """Each page's log-sum-exp if all its tokens had the page's score; -inf stays -inf."""
    logits = capped(factor_of(scale) * scores, scale)
    return logits + jnp.log(jnp.maximum(tokens, 1).astype(jnp.float32))[:, None]


def softmax_mass(
    scores: Float[Array, "B X P"],
    tokens: Int[Array, "B P"],
    scale: Scale,
    over: LayerContext | None = None,
) -> Float[Array, "B X P"]:
    """Each page's share of the softmax over `page_logits`; -inf where a page has no score.

    With `over` the pages are this shard's, and the softmax goes over all shards' pages.
    """
    logits = page_logits(scores, tokens, scale)
    logits = jnp.where(scores > -jnp.inf, logits, jnp.finfo(jnp.float32).min)
    if over is None:
        mass = jax.nn.softmax(logits, axis=-1)
    else:
        top = over.pmax_seq(jnp.max(logits, axis=-1, keepdims=True))
        weight = jnp.exp(logits - top)
        mass = weight / over.psum_seq(jnp.sum(weight, axis=-1, keepdims=True))
    return jnp.where(scores > -jnp.inf, mass, -jnp.inf)


def best_first(scores: Float[Array, "B X P"], pages: Int[Array, "B X C"]) -> Int[Array, "B X C"]:
    """The listed pages from the best score on; of equals the lower one first, -1 last."""
    order = jnp.argsort(-listed(scores, pages), axis=-1, stable=True)
    return jnp.take_along_axis(pages, order, axis=-1)


def pages_until(
    epsilon: float,
    forced: Float[Array, "B N"],
    pages: Float[Array, "B N C"],
    known: Float[Array, "B N X"],
    whole: bool,
) -> Bool[Array, "B N C"]:
    """Which of the pages to attend, best first, until `epsilon` of the attention is reached.

    All masses are natural logs. A(t) is the mass of `forced` and the first t pages. A head stops
    where A(t) / known >= epsilon, with `whole`: `known` is the whole mass of the attention; or else
    where A(t) / (A(t) + known(t)) >= epsilon: `known` is the estimated missing mass after page t.
    """
    top = jnp.max(jnp.concatenate([forced[..., None], pages, known], axis=-1), axis=-1)[..., None]
    top = jnp.maximum(top, jnp.finfo(jnp.float32).min)
    sofar = jnp.exp(forced[..., None] - top) + jnp.cumsum(jnp.exp(pages - top), axis=-1)
    others = jnp.exp(known - top)
    enough = sofar >= epsilon * (others if whole else sofar + others)
    # Page t is attended when t - 1 pages were not enough.
    before = jnp.pad(enough[..., :-1], [(0, 0)] * (enough.ndim - 1) + [(1, 0)])
    stopped = jnp.cumsum(before, axis=-1) > 0
    return ~stopped | (jnp.arange(pages.shape[-1]) < 1)


def _seq_lse(lse: Float[Array, "B N"], ctx: LayerContext) -> Float[Array, "B N"]:
    """Log-sum-exp over the shards of the slots: attention without values."""
    return ctx.seq_merge(jnp.zeros((*lse.shape, 1, 0)), lse[..., None])[1][..., 0]


def _page_masses(
    q: Array,
    store: AppendCache,
    lists: Int[Array, "B N C"],
    span: Span,
    ctx: LayerContext,
) -> Float[Array, "B N C"]:
    """Log-sum-exp over each listed page's selectable tokens."""
    slots = store.k.shape[2]
    page = slots * ctx.seq_size // span.tokens.shape[1]
    local = local_slots(lists, slots // page, ctx, page)
    slot_BNCZ = jnp.maximum(local, 0)[..., None] * page + jnp.arange(page)
    below = ctx.slots(slots).below
    start, stop = (below(x).reshape(-1, 1, 1, 1) for x in (span.start, span.stop))
    held = (local[..., None] >= 0) & (slot_BNCZ >= start) & (slot_BNCZ < stop)
    batch, kv_heads, _, head_dim = store.k.shape
    # Heads of one group side by side: they read the same keys.
    slot_BKM = slot_BNCZ.reshape(batch, kv_heads, -1)  # [B, K, G * C * Z]
    keys = store.read(slot_BKM, values=False)[0].reshape(*slot_BNCZ.shape, head_dim)
    scores = jnp.einsum("BNH,BNCZH->BNCZ", q[:, 0], keys, preferred_element_type=jnp.float32)
    logits = capped(factor_of(ctx.scale) * scores, ctx.scale)
    masses = jax.nn.logsumexp(jnp.where(held, logits, -jnp.inf), axis=-1)
    # One shard holds each page.
    return ctx.pmax_seq(masses)


def _estimated(
    scores: Float[Array, "B N P"],
    tokens: Int[Array, "B P"],
    count: Int[Array, " B"],
    lists: Int[Array, "B N C"],
    scale: Scale,
) -> Float[Array, "B N C"]:
    """Log of the mass of the pages after each listed one, if tokens had their page's score."""
    logits = page_logits(scores, tokens, scale)
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jnp.maximum(top, jnp.finfo(jnp.float32).min)
    guess_BNP = jnp.exp(logits - top)
    among = select_mask(scores, jnp.broadcast_to(count[:, None], scores.shape[:2]))
    outside_BN1 = jnp.sum(jnp.where(among, 0.0, guess_BNP), axis=-1, keepdims=True)
    each_BNC = listed(guess_BNP, lists, 0.0)
    # Summed from the end: a difference of sums would cancel.
    later_BNC = jnp.cumsum(each_BNC[..., ::-1], axis=-1)[..., ::-1]
    later_BNC = jnp.pad(later_BNC[..., 1:], [(0, 0), (0, 0), (0, 1)])
    return jnp.log(outside_BN1 + later_BNC) + top
