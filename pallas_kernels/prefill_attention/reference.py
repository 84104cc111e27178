"""Attention of a chunk by its definition, everything materialised in float32; for tests only."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float

from pallas_kernels.common import (
    Attended,
    Cache,
    Chunk,
    PerRow,
    Queries,
    Scale,
    Window,
    capped,
    factor_of,
)


def causal_attention(
    q: Queries, k: Chunk, v: Chunk, *, scale: Scale, window: int | None = None
) -> Attended:
    """Token t sees the tokens j <= t, and with a window those with t - j < window."""
    t = jnp.arange(q.shape[1])
    back_TT = t[:, None] - t
    visible_TT = back_TT >= 0
    if window is not None:
        visible_TT &= back_TT < window
    k_BKTH, v_BKTH = jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2)
    return _attend(q, k_BKTH, v_BKTH, visible_TT[None], scale)


def cache_attention(
    q: Queries, k: Cache, v: Cache, lengths: PerRow, *, scale: Scale, window: Window | None = None
) -> Attended:
    """Every query of row b sees the slots below lengths[b], within the window if there is one."""
    slots_S = jnp.arange(k.shape[2])
    held_B1S = (slots_S < lengths[:, None])[:, None]
    visible_BTS = held_B1S
    if window is not None:
        visible_BTS = held_B1S & window.sees(slots_S, jnp.arange(q.shape[1]))
    v = jnp.where(held_B1S[:, 0, None, :, None], v, 0)  # 0 x NaN is NaN
    return _attend(q, k, v, visible_BTS, scale)


def _attend(
    q: Queries, k: Cache, v: Cache, visible: Bool[Array, "#B #T S"], scale: Scale
) -> Attended:
    logits_BTNS = jnp.where(visible[:, :, None], logits_of(q, k, scale), -jnp.inf)
    out_BTNH, lse_BTN = weigh(logits_BTNS, v)
    return out_BTNH.astype(q.dtype), lse_BTN


def logits_of(q: Queries, k: Cache, scale: Scale) -> Float[Array, "B T N S"]:
    """scale q.k of every query head and slot; head n reads kv head n // G."""
    k_BNSH = jnp.repeat(k, q.shape[2] // k.shape[1], axis=1).astype(jnp.float32)
    scores = jnp.einsum("BTNH,BNSH->BTNS", q.astype(jnp.float32), k_BNSH, precision="highest")
    return capped(factor_of(scale) * scores, scale)


def weigh(logits: Float[Array, "B T N S"], v: Cache) -> Attended:
    """The softmax of the logits times v in float32; out 0 and lse -inf where all are -inf."""
    v_BNSH = jnp.repeat(v, logits.shape[2] // v.shape[1], axis=1).astype(jnp.float32)
    top_BTN1 = jnp.max(logits, axis=-1, keepdims=True)
    some_BTN1 = top_BTN1 > -jnp.inf
    top_BTN1 = jnp.where(some_BTN1, top_BTN1, 0)
    weights_BTNS = jnp.exp(logits - top_BTN1)
    total_BTN1 = jnp.sum(weights_BTNS, axis=-1, keepdims=True)
    out_BTNH = jnp.einsum("BTNS,BNSH->BTNH", weights_BTNS, v_BNSH, precision="highest")
    out_BTNH = jnp.where(some_BTN1, out_BTNH / jnp.where(some_BTN1, total_BTN1, 1), 0)
    lse_BTN1 = jnp.where(some_BTN1, top_BTN1 + jnp.log(total_BTN1), -jnp.inf)
    return out_BTNH, lse_BTN1[..., 0]
