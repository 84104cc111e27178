"""Attention to chosen pages by definition, a mask over all slots; for tests only."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.common import Cache, PerRow


def sparse_decode_attention(
    q: Float[Array, "B 1 N H"],
    k: Cache,
    v: Cache,
    pages: Int[Array, "B ..."],
    start: PerRow,
    stop: PerRow,
    *,
    heads: Int[Array, "B E"] | None = None,
    page_size: int,
    scale: float,
    prior: Float[Array, "B N S"] | None = None,
    prior_query: Float[Array, "B 1 N H"] | None = None,
) -> tuple[Array, ...]:
    """Softmax over the listed slots with logits scale q.k, and with the prior's if there is one.

    Slot s counts where start[b] <= s < stop[b] and its page is listed in `pages` [B,X,C] or, with
    `heads`, (kv head, page) among the entries [B,E].
    """
    slots_S = jnp.arange(k.shape[2])
    page_S = slots_S // page_size
    if heads is None:
        listed_BXS = jnp.any(pages[..., None] == page_S, axis=2)
    else:
        head_BEK1 = heads[:, :, None, None] == jnp.arange(k.shape[1])[:, None]
        listed_BXS = jnp.any(head_BEK1 & (pages[:, :, None, None] == page_S), axis=1)
    held_BS = (slots_S >= start[:, None]) & (slots_S < stop[:, None])
    held_BNS = jnp.repeat(listed_BXS & held_BS[:, None], q.shape[2] // listed_BXS.shape[1], axis=1)
    k_BNSH, v_BNSH = (
        jnp.repeat(x, q.shape[2] // x.shape[1], axis=1).astype(jnp.float32) for x in (k, v)
    )
    v_BNSH = jnp.where(held_BS[:, None, :, None], v_BNSH, 0)  # 0 x NaN is NaN

    def logits_of(query: Array) -> Array:
        query_BNH = query[:, 0].astype(jnp.float32)
        return scale * jnp.einsum("BNH,BNSH->BNS", query_BNH, k_BNSH, precision="highest")

    if prior_query is not None:
        prior = logits_of(prior_query)
    results = []
    for logits_BNS in (logits_of(q),) if prior is None else (logits_of(q), prior):
        masked_BNS = jnp.where(held_BNS, logits_BNS, -jnp.inf)
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
