"""PSA's budget: each head visits its pages, best first, until enough of the attention is reached.

See `budgets` for the stop tests. The visited pages' masses are exact: their keys are read here once
more; but under `psa-digest` they are what the pages' scores say, and no key is read. What is
reached by how many pages is known only then, so the lists have the static length that the method's
budget allows, and end early by -1.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import AppendCache, local_slots, read_lines
from jax_longctx.contract import LayerContext
from jax_longctx.parts import budgets
from jax_longctx.parts.selectors import Prior, Selector, Span
from pallas_kernels.decode_attention import decode_logits
from pallas_kernels.select_large_k import select_mask

__all__ = ["Candidates", "until_enough"]


class Candidates(NamedTuple):
    """What may be attended.

    Attributes:
      scores: of all pages, -inf where a page is no candidate.
      lists: the pages of the best scores.
      count: how many of the best those are.
      span: the tokens that may be selected.
    """

    scores: Float[Array, "B N P"]
    lists: Int[Array, "B N C"]
    count: Int[Array, "B N"]
    span: Span


def until_enough(
    method: Selector,
    q: Float[Array, "B 1 N H"],
    store: AppendCache,
    candidates: Candidates,
    forced: Sequence[Float[Array, "B N"]] | None,
    prior: Prior | None,
    ctx: LayerContext,
) -> Int[Array, "B N C"]:
    """The lists, best first, cut where enough of the attention is reached.

    Args:
      forced: log-sum-exps of this shard's fixed tokens, the query's own and then the prior's.
    """
    lists = budgets.best_first(candidates.scores, candidates.lists)
    none_BN = jnp.full(lists.shape[:2], -jnp.inf)
    if method.allocation == "psa-digest":
        logits_BNP = budgets.page_logits(candidates.scores, candidates.span.tokens, ctx.scale)
        masses = jnp.take_along_axis(logits_BNP, jnp.maximum(lists, 0), axis=-1)
        masses = jnp.where(lists >= 0, masses, -jnp.inf)
    else:
        masses = _page_masses(method, q, store, lists, candidates.span, ctx, None)
    forced_BN = none_BN if forced is None else _seq_lse(forced[0], ctx)
    whole = missing = None
    if method.allocation == "psa-oracle":
        logits_BNS = decode_logits(q, store.k, store.held(ctx), scale=ctx.scale)
        whole = _seq_lse(jax.nn.logsumexp(logits_BNS, axis=-1), ctx)
    elif method.allocation in ("psa-estimate", "psa-digest"):
        missing = _estimated(candidates, lists, ctx.scale)
    else:
        assert prior is not None
        known_BN = none_BN if forced is None else _seq_lse(forced[1], ctx)
        behind = _page_masses(method, prior.query, store, lists, candidates.span, ctx, prior.logits)
        missing = _left_over(prior, known_BN, behind)
    kept = budgets.pages_until(
        method.epsilon, forced_BN, masses, whole, missing, at_least=method.min_pages
    )
    return jnp.where(kept, lists, -1)


def _seq_lse(lse: Float[Array, "B N"], ctx: LayerContext) -> Float[Array, "B N"]:
    """Log-sum-exp over the shards of the slots: attention without values."""
    return ctx.seq_merge(jnp.zeros((*lse.shape, 1, 0)), lse[..., None])[1][..., 0]


def _page_masses(
    method: Selector,
    q: Array,
    store: AppendCache,
    lists: Int[Array, "B N C"],
    span: Span,
    ctx: LayerContext,
    prior: Float[Array, "B N S"] | None,
) -> Float[Array, "B N C"]:
    """Log-sum-exp over each listed page's selectable tokens, of `prior`'s logits if given."""
    page, slots = method.page_size, store.k.shape[2]
    local = local_slots(lists, slots // page, ctx)
    slot_BNCZ = jnp.maximum(local, 0)[..., None] * page + jnp.arange(page)
    offset = ctx.seq_offset(slots)
    start, stop = (x.reshape(-1, 1, 1, 1) - offset for x in (span.start, span.stop))
    held = (local[..., None] >= 0) & (slot_BNCZ >= start) & (slot_BNCZ < stop)
    if prior is not None:
        slot_BNM = slot_BNCZ.reshape(*slot_BNCZ.shape[:2], -1)  # [B, N, C * Z]
        logits = jnp.take_along_axis(prior, slot_BNM, axis=2).reshape(slot_BNCZ.shape)
    else:
        batch, kv_heads, _, head_dim = store.k.shape
        # Heads of one group side by side: they read the same keys.
        slot_BKM = slot_BNCZ.reshape(batch, kv_heads, -1)  # [B, K, G * C * Z]
        keys = read_lines(store.k, slot_BKM).reshape(*slot_BNCZ.shape, head_dim)
        logits = ctx.scale * jnp.einsum(
            "BNH,BNCZH->BNCZ", q[:, 0], keys, preferred_element_type=jnp.float32
        )
    masses = jax.nn.logsumexp(jnp.where(held, logits, -jnp.inf), axis=-1)
    # One shard holds each page.
    return ctx.pmax_seq(masses)


def _estimated(
    candidates: Candidates, lists: Int[Array, "B N C"], scale: float
) -> Float[Array, "B N C"]:
    """Log of what the pages after each listed one hold, if all tokens had their page's score."""
    logits = budgets.page_logits(candidates.scores, candidates.span.tokens, scale)
    top = jnp.max(logits, axis=-1, keepdims=True)
    top = jnp.maximum(top, jnp.finfo(jnp.float32).min)
    guess_BNP = jnp.exp(logits - top)
    listed = select_mask(candidates.scores, candidates.count)
    outside_BN1 = jnp.sum(jnp.where(listed, 0.0, guess_BNP), axis=-1, keepdims=True)
    each_BNC = jnp.take_along_axis(guess_BNP, jnp.maximum(lists, 0), axis=-1)
    each_BNC = jnp.where(lists >= 0, each_BNC, 0.0)
    # Summed from the end, where a difference of sums would cancel.
    later_BNC = jnp.cumsum(each_BNC[..., ::-1], axis=-1)[..., ::-1]
    later_BNC = jnp.pad(later_BNC[..., 1:], [(0, 0), (0, 0), (0, 1)])
    return jnp.log(outside_BN1 + later_BNC) + top


def _left_over(
    prior: Prior, known: Float[Array, "B N"], behind: Float[Array, "B N C"]
) -> Float[Array, "B N C"]:
    """Log of the prior's mass (with the bias) outside the fixed and the first listed pages."""
    lse_BN1 = prior.lse[..., None]
    gone = jnp.exp(known[..., None] - lse_BN1) + jnp.cumsum(jnp.exp(behind - lse_BN1), axis=-1)
    return jnp.log(jnp.maximum(1.0 - gone, 0.0)) + lse_BN1 + prior.bias[..., None]
