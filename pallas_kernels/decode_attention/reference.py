"""Attention of a few queries to a cache by its definition; for tests only."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common import Cache, PerRow
from pallas_kernels.prefill_attention.reference import cache_attention as decode_attention
from pallas_kernels.prefill_attention.reference import logits_of, weigh

__all__ = ["attend_logits", "decode_attention", "decode_logits"]


def decode_logits(
    q: Float[Array, "B 1 N H"], k: Cache, lengths: PerRow, *, scale: float
) -> Float[Array, "B N S"]:
    """scale q.k for the slots below lengths[b], -inf for the others."""
    held_B1S = (jnp.arange(k.shape[2]) < lengths[:, None])[:, None]
    return jnp.where(held_B1S, logits_of(q, k, scale)[:, 0], -jnp.inf)


def attend_logits(
    logits: Float[Array, "B N S"], v: Cache
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"]]:
    """Softmax of the logits times v; out 0 and lse -inf where every logit is -inf."""
    out, lse = weigh(logits[:, None], v)
    return out.astype(v.dtype), lse
