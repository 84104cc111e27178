"""Attention to chosen pages by definition, a mask over all slots; for tests only."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int


def sparse_decode_attention(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    pages: Int[Array, "B X C"],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
    *,
    page_size: int,
    scale: float,
    prior: Float[Array, "B N S"] | None = None,
    prior_query: Float[Array, "B 1 N H"] | None = None,
) -> tuple[Array, ...]:
    """Slot s counts where its page is listed and start[b] <= s < stop[b]."""
    page_S = jnp.arange(k.shape[2]) // page_size
    listed_BXS = jnp.any(pages[..., None] == page_S, axis=2)
    if prior_query is not None:
        prior = _logits(prior_query, k, scale)
    return _attend(q, k, v, listed_BXS, start, stop, scale, prior)


def flat_sparse_decode_attention(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    heads: Int[Array, "B E"],
    pages: Int[Array, "B E"],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
    *,
    page_size: int,
    scale: float,
    prior: Float[Array, "B N S"] | None = None,
    prior_query: Float[Array, "B 1 N H"] | None = None,
) -> tuple[Array, ...]:
    """Slot s of kv head k counts where (k, s // page_size) is listed and start <= s < stop."""
    page_S = jnp.arange(k.shape[2]) // page_size
    head_BEK1 = heads[:, :, None, None] == jnp.arange(k.shape[1])[:, None]
    listed_BKS = jnp.any(head_BEK1 & (pages[:, :, None, None] == page_S), axis=1)
    if prior_query is not None:
        prior = _logits(prior_query, k, scale)
    return _attend(q, k, v, listed_BKS, start, stop, scale, prior)


def _logits(
    q: Float[Array, "B 1 N H"], k: Float[Array, "B K S H"], scale: float
) -> Float[Array, "B N S"]:
    k_BNSH = jnp.repeat(k, q.shape[2] // k.shape[1], axis=1).astype(jnp.float32)
    q_BNH = q[:, 0].astype(jnp.float32)
    return scale * jnp.einsum("BNH,BNSH->BNS", q_BNH, k_BNSH, precision="highest")


def _attend(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    listed: Bool[Array, "B X S"],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
    scale: float,
    prior: Float[Array, "B N S"] | None,
) -> tuple[Array, ...]:
    """Softmax over the listed slots with logits scale q.k, and with the prior's if there is one."""
    heads = q.shape[2]
    slots_S = jnp.arange(k.shape[2])
    held_BS = (slots_S >= start[:, None]) & (slots_S < stop[:, None])
    held_BNS = jnp.repeat(listed & held_BS[:, None], heads // listed.shape[1], axis=1)
    v_BNSH = jnp.repeat(v, heads // v.shape[1], axis=1).astype(jnp.float32)
    v_BNSH = jnp.where(held_BS[:, None, :, None], v_BNSH, 0)  # 0 x NaN is NaN
    logits_BNS = _logits(q, k, scale)
    results = []
    for logits in (logits_BNS,) if prior is None else (logits_BNS, prior):
        masked_BNS = jnp.where(held_BNS, logits, -jnp.inf)
        top_BN1 = jnp.max(masked_BNS, axis=-1, keepdims=True)
        some_BN1 = top_BN1 > -jnp.inf
        top_BN1 = jnp.where(some_BN1, top_BN1, 0)
        weights_BNS = jnp.exp(masked_BNS - top_BN1)
        total_BN1 = jnp.where(some_BN1, jnp.sum(weights_BNS, axis=-1, keepdims=True), 1)
        out_BNH = jnp.einsum("BNS,BNSH->BNH", weights_BNS, v_BNSH, precision="highest")
        lse_BN1 = jnp.where(some_BN1, top_BN1 + jnp.log(total_BN1), -jnp.inf)
        dtype = jnp.float32 if results else q.dtype
        results += [(out_BNH / total_BN1).astype(dtype)[:, None], lse_BN1[:, None, :, 0]]
    return tuple(results)
