"""RESA's prior: what every key would get from the prompt's mean query, and its combination.

RESA, section 4, Eq. 2 to 5. With the prompt's mean query mu_q and the keys' mean mu_k, both after
rotary embedding, a key j that was not selected gets the logit p0_j + b, where p0_j = scale mu_q.k_j
is computed once and b = scale (q - mu_q).mu_k is one number for each query and head. The softmax of
p0 over all keys, its log-sum-exp `lse0` and its output `o0`, is known too; so with the selected set
I attended exactly, the others' mass R and weighted values U are differences:

    A = sum_I exp(a_j)                 Z = exp(lse0 + b)     Z_I = sum_I exp(p0_j + b)
    R = max(Z - Z_I, 0)                U = Z o0 - sum_I exp(p0_j + b) v_j
    out = (A out_I + lam U) / (A + lam R)

The paper's Eq. 5 divides by A + R whatever lam is, so that lam = 0 is not the plain sparse output
that it claims (`paper_literal`); here lam scales the residual in both places (`normalized`), and
both agree at lam = 1.

mu_q, p0 and o0 belong to a query head, mu_k to a kv head. All in float32; mu_q is rounded to the
model's dtype where it meets keys, so that every use of it agrees.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import AppendCache, local_slots, where_rows
from jax_longctx.contract import CacheShape, LayerContext
from jax_longctx.methods.selectors import Prior, SelectiveCache
from jax_longctx.methods.sparse_decode import Selected
from jax_longctx.sharding import axes_field
from pallas_kernels.decode_attention import decode_logits
from pallas_kernels.dispatch import platform

__all__ = [
    "Background",
    "ResaCache",
    "begin_answer",
    "combine",
    "empty_background",
    "grow",
    "observe",
    "prior_of",
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Background:
    """The prior of one layer, float32.

    Attributes:
      query_sum: over the prompt's queries; their mean is mu_q.
      key_sum: over all keys; their mean is mu_k.
      context_query_sum, context_key_sum: both as they were at the end of the context.
      counted: keys in `key_sum`.
      logits: p0 of every slot, -inf where there is none.
      lse, out: lse0 and o0.
    """

    query_sum: Float[Array, "B N H"] = axes_field("batch", "heads", None)
    key_sum: Float[Array, "B K H"] = axes_field("batch", "kv_heads", None)
    context_query_sum: Float[Array, "B N H"] = axes_field("batch", "heads", None)
    context_key_sum: Float[Array, "B K H"] = axes_field("batch", "kv_heads", None)
    counted: Int[Array, " B"] = axes_field("batch")
    logits: Float[Array, "B N S"] = axes_field("batch", "heads", "slots")
    lse: Float[Array, "B N"] = axes_field("batch", "heads")
    out: Float[Array, "B N H"] = axes_field("batch", "heads", None)

    def end_context(self) -> "Background":
        """Remembers the sums, so that `rewind` can return to them."""
        return dataclasses.replace(
            self, context_query_sum=self.query_sum, context_key_sum=self.key_sum
        )

    def rewind(self) -> "Background":
        """The sums at the end of the context; the rest is made anew with the next question."""
        return dataclasses.replace(
            self,
            query_sum=jnp.array(self.context_query_sum, copy=True),
            key_sum=jnp.array(self.context_key_sum, copy=True),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ResaCache:
    """A selector's cache and the prior."""

    selective: SelectiveCache
    background: Background

    def end_context(self) -> "ResaCache":
        """Remembers where the context ends, so that `rewind` can return there."""
        return ResaCache(self.selective.end_context(), self.background.end_context())

    def rewind(self) -> "ResaCache":
        """The cache at the end of the context; the prior is made anew with the next question."""
        return ResaCache(self.selective.rewind(), self.background.rewind())


def empty_background(shape: CacheShape) -> Background:
    """Nothing observed."""
    queries = (shape.batch, shape.num_heads, shape.head_dim)
    keys = (shape.batch, shape.num_kv_heads, shape.head_dim)
    return Background(
        jnp.zeros(queries, jnp.float32),
        jnp.zeros(keys, jnp.float32),
        jnp.zeros(queries, jnp.float32),
        jnp.zeros(keys, jnp.float32),
        jnp.zeros((shape.batch,), jnp.int32),
        jnp.zeros((shape.batch, shape.num_heads, shape.slots), jnp.float32),
        jnp.zeros((shape.batch, shape.num_heads), jnp.float32),
        jnp.zeros(queries, jnp.float32),
    )


def observe(
    background: Background,
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    valid: Int[Array, " B"],
    length: Int[Array, " B"],
) -> Background:
    """Adds each row's first `valid[b]` rotated queries and keys; it has length[b] tokens now."""
    held = (jnp.arange(q.shape[1]) < valid[:, None])[..., None, None]
    query_sum, key_sum = (
        jnp.sum(jnp.where(held, x.astype(jnp.float32), 0.0), axis=1) for x in (q, k)
    )
    return dataclasses.replace(
        background,
        query_sum=background.query_sum + query_sum,
        key_sum=background.key_sum + key_sum,
        counted=length,
    )


def mean_query(background: Background, prompt: Int[Array, " B"], dtype: jnp.dtype) -> Array:
    """mu_q [B,N,H], rounded to the keys' dtype."""
    return (background.query_sum / jnp.maximum(prompt, 1)[:, None, None]).astype(dtype)


def begin_answer(
    background: Background,
    store: AppendCache,
    prompt: Int[Array, " B"],
    rows: Bool[Array, " B"],
    ctx: LayerContext,
) -> Background:
    """p0, lse0 and o0 over all keys of the rows whose prompt ends here; the others keep theirs."""
    slots, kv_heads = store.k.shape[2], store.k.shape[1]
    mean_B1NH = mean_query(background, prompt, store.k.dtype)[:, None]
    logits_BNS = decode_logits(mean_B1NH, store.k, store.held(ctx), scale=ctx.scale)
    top_BN1 = jnp.max(logits_BNS, axis=-1, keepdims=True)
    top_BN1 = jnp.maximum(top_BN1, jnp.finfo(jnp.float32).min)
    weights_BNS = jnp.exp(logits_BNS - top_BN1)
    total_BN1 = jnp.sum(weights_BNS, axis=-1, keepdims=True)
    # o0 stays in float32, which the doors of decode attention do not return for bfloat16 values.
    weights_BKGS = weights_BNS.reshape(len(prompt), kv_heads, -1, slots).astype(store.v.dtype)
    sums_BKGH = jnp.einsum(
        "BKGS,BKSH->BKGH", weights_BKGS, store.v, preferred_element_type=jnp.float32
    )
    out_BNH = sums_BKGH.reshape(mean_B1NH[:, 0].shape) / jnp.maximum(total_BN1, 1e-30)
    lse_BN1 = jnp.where(total_BN1 > 0, top_BN1 + jnp.log(total_BN1), -jnp.inf)
    out_B1NH, lse_B1N = ctx.seq_merge(out_BNH[:, None], lse_BN1.swapaxes(1, 2))
    begun = dataclasses.replace(
        background, logits=logits_BNS, lse=lse_B1N[:, 0], out=out_B1NH[:, 0]
    )
    return where_rows(rows, begun, background)


def grow(
    background: Background,
    k: Float[Array, "B 1 K H"],
    v: Float[Array, "B 1 K H"],
    prompt: Int[Array, " B"],
    slot: Int[Array, " B"],
    valid: Int[Array, " B"],
    ctx: LayerContext,
    *,
    mean_key: bool,
) -> Background:
    """A generated token's own prior, in O(H) a head, as if it had been there from the start.

    Args:
      k: rotated.
      slot: where the token stands.
      mean_key: whether mu_k goes on to be the mean of all keys.
    """
    group = background.logits.shape[1] // k.shape[2]
    k_BNH, v_BNH = (jnp.repeat(x[:, 0], group, axis=1).astype(jnp.float32) for x in (k, v))
    mean_BNH = mean_query(background, prompt, k.dtype).astype(jnp.float32)
    logit_BN = ctx.scale * jnp.sum(mean_BNH * k_BNH, axis=-1)
    lse_BN = jnp.logaddexp(background.lse, logit_BN)
    before, now = jnp.exp(background.lse - lse_BN), jnp.exp(logit_BN - lse_BN)
    out_BNH = before[..., None] * background.out + now[..., None] * v_BNH
    new_B = valid > 0
    counted_B, key_sum = background.counted, background.key_sum
    if mean_key:
        counted_B = counted_B + valid
        key_sum = key_sum + jnp.where(new_B[:, None, None], k[:, 0].astype(jnp.float32), 0.0)
    return dataclasses.replace(
        background,
        key_sum=key_sum,
        counted=counted_B,
        logits=_write(background.logits, logit_BN, slot, new_B, ctx),
        lse=jnp.where(new_B[:, None], lse_BN, background.lse),
        out=jnp.where(new_B[:, None, None], out_BNH, background.out),
    )


def _write(
    buffer: Float[Array, "B N S"],
    new: Float[Array, "B N"],
    slot: Int[Array, " B"],
    rows: Bool[Array, " B"],
    ctx: LayerContext,
) -> Float[Array, "B N S"]:
    """One slot of each of the rows, in place; nothing where another shard has the slot."""
    batch, heads, slots = buffer.shape
    local_B = local_slots(slot, slots, ctx)
    mine_B = rows & (local_B >= 0)
    if batch > 1 and platform() != "tpu":
        # One past the end is what `drop` drops.
        at_B1 = jnp.where(mine_B, local_B, slots)[:, None]
        row_B1 = jnp.arange(batch)[:, None]
        return buffer.at[row_B1, jnp.arange(heads), at_B1].set(new, mode="drop")

    def write(row: Array | int, buffer: Array) -> Array:
        # A scatter along the slots would make the TPU compiler copy the buffer.
        at = (row, 0, jnp.maximum(local_B[row], 0))
        old_1N1 = jax.lax.dynamic_slice(buffer, at, (1, heads, 1))
        new_1N1 = jnp.where(mine_B[row], new[row][None, :, None], old_1N1)
        return jax.lax.dynamic_update_slice(buffer, new_1N1, at)

    return write(0, buffer) if batch == 1 else jax.lax.fori_loop(0, batch, write, buffer)


def prior_of(
    background: Background, q: Float[Array, "B 1 N H"], prompt: Int[Array, " B"], ctx: LayerContext
) -> Prior:
    """The prior as this query sees it."""
    mean_BNH = mean_query(background, prompt, q.dtype).astype(jnp.float32)
    mean_key_BKH = background.key_sum / jnp.maximum(background.counted, 1)[:, None, None]
    group = q.shape[2] // mean_key_BKH.shape[1]
    away_BNH = q[:, 0].astype(jnp.float32) - mean_BNH
    bias_BN = ctx.scale * jnp.sum(away_BNH * jnp.repeat(mean_key_BKH, group, axis=1), axis=-1)
    return Prior(background.logits, background.lse, bias_BN)


def combine(
    chosen: Selected,
    background: Background,
    prior: Prior,
    everything: Bool[Array, "B N"],
    *,
    lam: float,
    literal: bool,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"]]:
    """The output and the log of its denominator. Where `everything` was attended, that alone."""
    assert chosen.prior_out is not None and chosen.prior_lse is not None
    exact, whole = chosen.lse[:, 0], prior.lse + prior.bias
    top = jnp.maximum(jnp.maximum(exact, whole), jnp.finfo(jnp.float32).min)
    a, z = jnp.exp(exact - top), jnp.exp(whole - top)
    z_i = jnp.exp(chosen.prior_lse[:, 0] + prior.bias - top)
    residual = jnp.where(everything, 0.0, jnp.maximum(z - z_i, 0.0))
    values = z[..., None] * background.out - z_i[..., None] * chosen.prior_out[:, 0]
    values = jnp.where(everything[..., None], 0.0, values)
    total = a + (residual if literal else lam * residual)
    safe = jnp.where(total > 0, total, 1.0)[..., None]
    out = (a[..., None] * chosen.out[:, 0].astype(jnp.float32) + lam * values) / safe
    lse = jnp.where(total > 0, top + jnp.log(total), -jnp.inf)
    return out[:, None].astype(chosen.out.dtype), lse[:, None]
