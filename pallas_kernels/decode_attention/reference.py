"""Attention of a few queries to a cache by its definition; for tests only."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common import Cache, PerRow, Scale
from pallas_kernels.prefill_attention.reference import cache_attention as decode_attention
from pallas_kernels.prefill_attention.reference import logits_of, weigh

__all__ = ["attend_with_logits", "decode_attention"]


def attend_with_logits(
    q: Float[Array, "B 1 N H"], k: Cache, v: Cache, lengths: PerRow, *, scale: Scale
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"], Float[Array, "B N S"]]:
    """Softmax of the logits times v, log-sum-exp, and the logits; -inf beyond lengths[b]."""
    held_B1S = (jnp.arange(k.shape[2]) < lengths[:, None])[:, None]
    logits_BNS = jnp.where(held_B1S, logits_of(q, k, scale)[:, 0], -jnp.inf)
    out, lse = weigh(logits_BNS[:, None], v)
    return out.astype(v.dtype), lse, logits_BNS
