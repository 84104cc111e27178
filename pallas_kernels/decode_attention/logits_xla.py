"""The two halves of one query's attention, `logits.py`, in plain XLA.

As in `xla.py` the cache is an operand of the matmuls as it lies in memory, empty capacity is read
too, and the second matmul is split into blocks of slots. Values beyond a row's length must be
finite, as caches hold them: their weight is 0, and 0 x NaN is NaN; keys may hold anything there.
The logits and the weights made of them, [B,N,S] in float32, are 4 G / H of a bfloat16 cache's
bytes together.

Roofline: the bytes of k for the first half, of v for the second, and 4 N S of logits for each.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.common import group_heads
from pallas_kernels.decode_attention import xla


def decode_logits(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
) -> Float[Array, "B N S"]:
    """scale q.k of every head and slot, -inf at and beyond lengths[b]."""
    k = lax.optimization_barrier(k)  # as in xla.decode_attention: no second append on CPU
    scores_BKGTS = xla.scores(group_heads(q, k.shape[1]), k, scale)
    scores_BNS = scores_BKGTS.reshape(q.shape[0], q.shape[2], k.shape[2])  # [B, K, G, 1, S]
    held_B1S = (jnp.arange(k.shape[2]) < lengths[:, None])[:, None]
    return jnp.where(held_B1S, scores_BNS, -jnp.inf)


def attend_logits(
    logits: Float[Array, "B N S"], v: Float[Array, "B K S H"], *, block: int = xla.BLOCK
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"]]:
    """The softmax of the logits times the values, in v's dtype, and its log-sum-exp."""
    v = lax.optimization_barrier(v)
    (b, n, slots), kv_heads = logits.shape, v.shape[1]
    top_BN1 = jnp.max(logits, axis=-1, keepdims=True)
    some_BN1 = top_BN1 > -jnp.inf
    top_BN1 = jnp.where(some_BN1, top_BN1, 0.0)  # -inf - -inf would be NaN
    weights_BNS = jnp.exp(logits - top_BN1)
    total_BN1 = jnp.where(some_BN1, jnp.sum(weights_BNS, axis=-1, keepdims=True), 1.0)
    weights_BKGTS = weights_BNS.reshape(b, kv_heads, -1, 1, slots).astype(v.dtype)
    acc_BKGTH = jnp.sum(xla.weighted_values(weights_BKGTS, v, xla.divisor(slots, block)), axis=2)
    out_BNH = acc_BKGTH.reshape(b, n, v.shape[3]) / total_BN1  # [B, K, G, 1, H]
    lse_BN1 = jnp.where(some_BN1, top_BN1 + jnp.log(total_BN1), -jnp.inf)
    return out_BNH.astype(v.dtype)[:, None], lse_BN1.swapaxes(1, 2)
