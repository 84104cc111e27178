"""Attention to chosen pages by definition, a mask over all slots; for tests only."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common import Cache, Scale
from pallas_kernels.prefill_attention.reference import logits_of, weigh
from pallas_kernels.sparse_decode_attention.lists import Pages


def sparse_decode_attention(
    q: Float[Array, "B 1 N H"],
    k: Cache,
    v: Cache,
    pages: Pages,
    *,
    scale: Scale,
    prior: Float[Array, "B 1 N H"] | None = None,
) -> tuple[Array, ...]:
    """Softmax over the listed slots with logits scale q.k, and with the prior's if there is one."""
    slots_S = jnp.arange(k.shape[2])
    page_S = slots_S // pages.size
    if pages.heads is None:
        listed_BXS = jnp.any(pages.listed[..., None] == page_S, axis=2)
    else:
        head_BEK1 = pages.heads[:, :, None, None] == jnp.arange(k.shape[1])[:, None]
        listed_BXS = jnp.any(head_BEK1 & (pages.listed[:, :, None, None] == page_S), axis=1)
    held_BS = (slots_S >= pages.start[:, None]) & (slots_S < pages.stop[:, None])
    held_BNS = jnp.repeat(listed_BXS & held_BS[:, None], q.shape[2] // listed_BXS.shape[1], axis=1)
    v = jnp.where(held_BS[:, None, :, None], v, 0)  # 0 x NaN is NaN
    logits = [logits_of(q, k, scale)]
    if prior is not None:
        logits.append(logits_of(prior, k, scale))
    results = []
    for logits_B1NS in logits:
        out_B1NH, lse_B1N = weigh(jnp.where(held_BNS[:, None], logits_B1NS, -jnp.inf), v)
        results += [out_B1NH.astype(jnp.float32 if results else q.dtype), lse_B1N]
    return tuple(results)
