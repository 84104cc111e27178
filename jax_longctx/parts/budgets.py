"""How many pages each head attends: uniform, Ada-KV, PSA.

- uniform: every head the same number;
- Ada-KV (Feng et al. 2024, section 3.3): the kv heads of a layer share one budget. The best pages
  of all heads win, ranked by the softmax of their scores, which makes heads comparable. `floor`
  keeps the best `alpha` share of each head's uniform budget first, its total is exact; `blend`
  mixes the counts of the unfloored winners with the uniform count, as the authors' code does, and
  meets the total up to rounding;
- PSA (progressive sparse attention, Zhou et al. 2025): each head visits its pages from the best on
  until the share `epsilon` of the attention is reached. The authors' stop test is not published;
  here the mass still missing is read from all keys (`oracle`), from the pages' scores
  (`estimate`; with `digest` the visited pages' masses too), or from RESA's prior (`resa`).

Scores are [B,heads,P] of all pages, -inf where a page is no candidate; lists hold global page ids.
"""

import fractions

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.contract import LayerContext
from pallas_kernels.select_large_k import select_large_k, select_mask

__all__ = ["ada_kv", "best_first", "most_of", "page_logits", "pages_until", "share", "softmax_mass"]


def share(ratio: float, count: Int[Array, "*B"]) -> Int[Array, "*B"]:
    """floor(ratio * count) of int32 counts, exact for the ratio as it is written.

    In float32 a share of a whole number may fall below it. Four decimals are kept.
    """
    exact = fractions.Fraction(str(ratio)).limit_denominator(10_000)
    over, under = exact.numerator, exact.denominator
    return count // under * over + count % under * over // under


def most_of(ratio: float, count: int) -> int:
    """`share` of a Python int."""
    exact = fractions.Fraction(str(ratio)).limit_denominator(10_000)
    return count * exact.numerator // exact.denominator


def page_logits(
    scores: Float[Array, "B X P"], tokens: Int[Array, "B P"], scale: float
) -> Float[Array, "B X P"]:
    """Each page's log-sum-exp, if all its tokens had the page's score; -inf stays."""
    return scale * scores + jnp.log(jnp.maximum(tokens, 1).astype(jnp.float32))[:, None]


def softmax_mass(
    scores: Float[Array, "B X P"],
    tokens: Int[Array, "B P"],
    scale: float,
    over: LayerContext | None = None,
) -> Float[Array, "B X P"]:
    """Each page's share of the softmax over `page_logits`; -inf where a page has no score.

    With `over` the pages are this shard's, and the softmax goes over those of all shards.
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


def ada_kv(
    mass: Float[Array, "B K P"],
    count: Int[Array, " B"],
    ctx: LayerContext,
    *,
    most: int,
    alpha: float,
    blend: bool,
) -> tuple[Int[Array, "B E"], Int[Array, "B E"]]:
    """A row's list of (local kv head, page), -1 for none or where another shard has the head.

    Args:
      mass: of the local kv heads.
      count: pages of a head under a uniform budget, at most `most`.
    """
    local_heads, pages = mass.shape[1:]
    mass = ctx.gather_heads(mass, axis=1)
    heads = mass.shape[1]
    safe_B = share(alpha, count)
    flat = mass.reshape(mass.shape[0], -1)  # [B, K * P]
    # Blended counts may exceed the total by half a page a head, from rounding.
    size = min(heads * most + (heads + 1) // 2 * blend, heads * pages)
    if blend:
        free_BKP = select_mask(flat, heads * count).reshape(mass.shape)
        free_BK = jnp.sum(free_BKP, axis=-1)
        count_BK = jnp.round(free_BK * (1 - alpha)).astype(jnp.int32)
        kept_BKP = select_mask(mass, count_BK + safe_B[:, None])
        ranked_BKP = jnp.where(kept_BKP, 0.0, -jnp.inf)
        entries_BE = select_large_k(ranked_BKP.reshape(flat.shape), size, size=size)
    else:
        kept_BKP = select_mask(mass, jnp.broadcast_to(safe_B[:, None], mass.shape[:2]))
        ranked = jnp.where(kept_BKP.reshape(flat.shape), jnp.inf, flat)
        entries_BE = select_large_k(ranked, heads * count, size=size)
    head_BE = entries_BE // pages - ctx.head_offset(local_heads)
    mine_BE = (entries_BE >= 0) & (head_BE >= 0) & (head_BE < local_heads)
    return jnp.where(mine_BE, head_BE, -1), jnp.where(mine_BE, entries_BE % pages, -1)


def best_first(scores: Float[Array, "B X P"], pages: Int[Array, "B X C"]) -> Int[Array, "B X C"]:
    """The listed pages from the best score on; of equals the lower one first, -1 last."""
    each = jnp.take_along_axis(scores, jnp.maximum(pages, 0), axis=-1)
    each = jnp.where(pages >= 0, each, -jnp.inf)
    order = jnp.argsort(-each, axis=-1, stable=True)
    return jnp.take_along_axis(pages, order, axis=-1)


def pages_until(
    epsilon: float,
    forced: Float[Array, "B N"],
    pages: Float[Array, "B N C"],
    whole: Float[Array, "B N"] | None = None,
    missing: Float[Array, "B N C"] | None = None,
    at_least: int = 1,
) -> Bool[Array, "B N C"]:
    """Which of the pages to attend, best first, until `epsilon` of the attention is reached.

    All masses are natural logs. After t pages A(t) is the mass of `forced` and those pages; enough
    is A(t) / whole >= epsilon, or A(t) / (A(t) + missing(t)) >= epsilon.

    Args:
      whole: the attention's whole mass.
      missing: what is thought to be missing after page t.
    """
    known = whole[..., None] if missing is None and whole is not None else missing
    assert known is not None
    top = jnp.max(jnp.concatenate([forced[..., None], pages, known], axis=-1), axis=-1)[..., None]
    top = jnp.maximum(top, jnp.finfo(jnp.float32).min)
    sofar = jnp.exp(forced[..., None] - top) + jnp.cumsum(jnp.exp(pages - top), axis=-1)
    others = jnp.exp(known - top)
    enough = sofar >= epsilon * (others if missing is None else sofar + others)
    # Page t is attended when t - 1 pages were not enough.
    before = jnp.pad(enough[..., :-1], [(0, 0)] * (enough.ndim - 1) + [(1, 0)])
    stopped = jnp.cumsum(before, axis=-1) > 0
    return ~stopped | (jnp.arange(pages.shape[-1]) < at_least)
