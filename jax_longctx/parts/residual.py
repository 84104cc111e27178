"""RESA's prior: logits of all keys under the prompt's mean query, and their use in a decode step.

RESA, section 4, Eq. 2 to 5. With the prompt's mean query mu_q and the keys' mean mu_k, both after
rotary embedding, a key j that was not selected gets the logit p0_j + b. p0_j = scale mu_q.k_j is
computed once; b = scale (q - mu_q).mu_k is one number for each query and head. The softmax of p0
over all keys is known too, by its log-sum-exp `lse0` and its output `o0`. With the selected set I
attended exactly, the others' mass R and weighted values U are differences:

    A = sum_I exp(a_j)                 Z = exp(lse0 + b)     Z_I = sum_I exp(p0_j + b)
    R = max(Z - Z_I, 0)                U = Z o0 - sum_I exp(p0_j + b) v_j
    out = (A out_I + lam U) / (A + lam R)

The paper's Eq. 5 divides by A + R for any lam, so lam = 0 is not the plain sparse output that the
paper claims. Here lam scales the residual in both places. Both agree at lam = 1.

mu_q, p0 and o0 belong to a query head; mu_k belongs to a kv head. All are float32 but mu_q, which
is rounded to the model's dtype before every use. p0 is not stored: the selected keys are read
anyway, and mu_q's products with them are one more row of the same matmul.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import AppendCache, Rewinding, SelectiveCache, numbers, where_rows
from jax_longctx.contract import CacheShape, LayerContext
from jax_longctx.parts.sparse_decode import Prior, Selected
from jax_longctx.sharding import axes_field
from pallas_kernels.common import Capped, capped, factor_of
from pallas_kernels.decode_attention import decode_logits, weighted_values


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Background(Rewinding):
    """The prior of one layer, float32 but for `mean`.

    Attributes:
      query_sum: sum of the prompt's queries.
      key_sum: sum of all keys; their mean is mu_k.
      context_query_sum, context_key_sum: both at the end of the context.
      counted: number of keys in `key_sum`.
      mean: mu_q when lse0 and o0 were last made from all keys, in the model's dtype.
      lse, out: lse0 and o0.
    """

    query_sum: Float[Array, "B N H"] = axes_field("batch", "heads", None)
    key_sum: Float[Array, "B K H"] = axes_field("batch", "kv_heads", None)
    context_query_sum: Float[Array, "B N H"] = axes_field("batch", "heads", None)
    context_key_sum: Float[Array, "B K H"] = axes_field("batch", "kv_heads", None)
    counted: Int[Array, " B"] = axes_field("batch")
    mean: Float[Array, "B N H"] = axes_field("batch", "heads", None)
    lse: Float[Array, "B N"] = axes_field("batch", "heads")
    out: Float[Array, "B N H"] = axes_field("batch", "heads", None)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ResaCache(SelectiveCache):
    """A selector's cache and the prior. After a rewind the next question makes the prior anew."""

    background: Background


def empty_background(shape: CacheShape) -> Background:
    """Empty sums."""
    batch, heads, width = shape.batch, shape.num_heads, shape.head_dim

    def zeros(*size: int) -> Array:
        return jnp.zeros((batch, *size), jnp.float32)

    return Background(
        query_sum=zeros(heads, width),
        key_sum=zeros(shape.num_kv_heads, width),
        context_query_sum=zeros(heads, width),
        context_key_sum=zeros(shape.num_kv_heads, width),
        counted=jnp.zeros(batch, jnp.int32),
        mean=zeros(heads, width).astype(shape.dtype),
        lse=zeros(heads),
        out=zeros(heads, width),
    )


def observe(
    background: Background,
    q: Float[Array, "B T N H"] | None,
    k: Float[Array, "B T K H"],
    valid: Int[Array, " B"],
    length: Int[Array, " B"],
) -> Background:
    """Adds each row's first `valid[b]` rotated keys, and queries if given, to the sums.

    `length` is the number of keys in the sum then.
    """
    held = (jnp.arange(k.shape[1]) < valid[:, None])[..., None, None]

    def added(total: Array, new: Array | None) -> Array:
        if new is None:
            return total
        return total + jnp.sum(jnp.where(held, new.astype(jnp.float32), 0.0), axis=1)

    query_sum, key_sum = added(background.query_sum, q), added(background.key_sum, k)
    return dataclasses.replace(background, query_sum=query_sum, key_sum=key_sum, counted=length)


def adopt(
    background: Background,
    store: AppendCache,
    ctx: LayerContext,
    queries: Float[Array, "B N H"] | None,
) -> Background:
    """The background of a store that another method has filled; `queries` is their sum."""
    if queries is None:
        queries = background.query_sum
    held_BS = jnp.arange(store.k.shape[2]) < store.held(ctx)[:, None]
    # Fused into the sum: the keys are not in memory as floats.
    wide = numbers(store.k).astype(jnp.float32)
    keys = jnp.where(held_BS[:, None, :, None], wide, 0.0)
    total_BKH = ctx.psum_seq(jnp.sum(keys, axis=2))
    sums = {"query_sum": queries, "key_sum": total_BKH}
    return dataclasses.replace(background, **sums, counted=store.length)


def begin_answer(
    background: Background, store: AppendCache, rows: Bool[Array, " B"], ctx: LayerContext
) -> Background:
    """Computes mu_q, lse0 and o0 over all keys of `rows`; the other rows keep theirs.

    The sums must cover all tokens of the store.
    """
    mean_BNH = background.query_sum / jnp.maximum(background.counted, 1)[:, None, None]
    mean_BNH = mean_BNH.astype(background.mean.dtype)
    logits_BNS = decode_logits(mean_BNH[:, None], store.k, store.held(ctx), scale=ctx.scale)
    top_BN1 = jnp.max(logits_BNS, axis=-1, keepdims=True)
    top_BN1 = jnp.maximum(top_BN1, jnp.finfo(jnp.float32).min)
    weights_BNS = jnp.exp(logits_BNS - top_BN1)
    total_BN1 = jnp.sum(weights_BNS, axis=-1, keepdims=True)
    # o0 stays in float32; the decode attention operation would return bfloat16.
    out_BNH = weighted_values(weights_BNS, store.v) / jnp.maximum(total_BN1, 1e-30)
    lse_BN1 = jnp.where(total_BN1 > 0, top_BN1 + jnp.log(total_BN1), -jnp.inf)
    out_B1NH, lse_B1N = ctx.seq_merge(out_BNH[:, None], lse_BN1.swapaxes(1, 2))
    begun = dataclasses.replace(
        background,
        mean=mean_BNH,
        lse=lse_B1N[:, 0],
        out=out_B1NH[:, 0],
    )
    return where_rows(rows, begun, background)


def grow(
    background: Background,
    k: Float[Array, "B 1 K H"],
    v: Float[Array, "B 1 K H"],
    valid: Int[Array, " B"],
    ctx: LayerContext,
) -> Background:
    """Adds a generated token to lse0 and o0, by its rotated key; O(H) a head. mu_q stays."""
    each = background.mean.shape[1] // k.shape[2]
    k_BNH, v_BNH = (jnp.repeat(x[:, 0], each, axis=1).astype(jnp.float32) for x in (k, v))
    score_BN = jnp.sum(background.mean.astype(jnp.float32) * k_BNH, axis=-1)
    logit_BN = capped(factor_of(ctx.scale) * score_BN, ctx.scale)
    lse_BN = jnp.logaddexp(background.lse, logit_BN)
    before, now = jnp.exp(background.lse - lse_BN), jnp.exp(logit_BN - lse_BN)
    out_BNH = before[..., None] * background.out + now[..., None] * v_BNH
    grown = dataclasses.replace(background, lse=lse_BN, out=out_BNH)
    return where_rows(valid > 0, grown, background)


def prior_of(background: Background, q: Float[Array, "B 1 N H"], ctx: LayerContext) -> Prior:
    """The prior as this query sees it, for each query head."""
    mean_key_BKH = background.key_sum / jnp.maximum(background.counted, 1)[:, None, None]
    mean_key_BNH = jnp.repeat(mean_key_BKH, q.shape[2] // mean_key_BKH.shape[1], axis=1)
    query_BNH = background.mean
    away_BNH = q[:, 0].astype(jnp.float32) - query_BNH.astype(jnp.float32)
    bias_BN = factor_of(ctx.scale) * jnp.sum(away_BNH * mean_key_BNH, axis=-1)
    if isinstance(ctx.scale, Capped):
        # Of capped scores: the difference at the mean key.
        products_BN = jnp.sum(query_BNH.astype(jnp.float32) * mean_key_BNH, axis=-1)
        before_BN = factor_of(ctx.scale) * products_BN
        bias_BN = capped(before_BN + bias_BN, ctx.scale) - capped(before_BN, ctx.scale)
    return Prior(query_BNH[:, None].astype(q.dtype), background.lse, background.out, bias_BN)


def combine(
    chosen: Selected,
    prior: Prior,
    everything: Bool[Array, "B N"],
    *,
    lam: float,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"]]:
    """The output and the log of its denominator; no residual where `everything` was attended."""
    assert chosen.prior_out is not None and chosen.prior_lse is not None
    exact, whole = chosen.lse[:, 0], prior.lse + prior.bias
    top = jnp.maximum(jnp.maximum(exact, whole), jnp.finfo(jnp.float32).min)
    a, z = jnp.exp(exact - top), jnp.exp(whole - top)
    z_i = jnp.exp(chosen.prior_lse[:, 0] + prior.bias - top)
    residual = jnp.where(everything, 0.0, jnp.maximum(z - z_i, 0.0))
    values = z[..., None] * prior.out - z_i[..., None] * chosen.prior_out[:, 0]
    values = jnp.where(everything[..., None], 0.0, values)
    total = a + lam * residual
    safe = jnp.where(total > 0, total, 1.0)[..., None]
    out = (a[..., None] * chosen.out[:, 0].astype(jnp.float32) + lam * values) / safe
    lse = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)
    return out[:, None].astype(chosen.out.dtype), lse[:, None]
