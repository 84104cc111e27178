"""Attention to chosen pages by definition, a mask over all slots; for tests only."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.common import Cache, PerRow
from pallas_kernels.prefill_attention.reference import logits_of, weigh


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
    v = jnp.where(held_BS[:, None, :, None], v, 0)  # 0 x NaN is NaN
    logits = [logits_of(q, k, scale)]
    if prior_query is not None:
        logits.append(logits_of(prior_query, k, scale))
    if prior is not None:
        logits.append(prior[:, None])
    results = []
    for logits_B1NS in logits:
        out_B1NH, lse_B1N = weigh(jnp.where(held_BNS[:, None], logits_B1NS, -jnp.inf), v)
        results += [out_B1NH.astype(jnp.float32 if results else q.dtype), lse_B1N]
    return tuple(results)
