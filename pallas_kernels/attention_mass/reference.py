"""Attention mass by its definition, every probability materialised in float32; for tests only."""

from typing import Literal

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common import Cache, PerQuery, PerRow, Queries, group_heads

# How mass is reduced over the query heads that share a kv head ("first" is the group's lowest head
# alone), and before that over a head's queries.
OverGroup = Literal["sum", "max", "first"]
OverQueries = Literal["sum", "max"]


def attention_mass(
    q: Queries,
    k: Cache,
    lse: PerQuery,
    lengths: PerRow,
    *,
    scale: float,
    valid: PerRow,
    causal_start: PerRow | None,
    over_group: OverGroup,
    over_queries: OverQueries,
    squares: bool,
) -> tuple[Float[Array, "B K S"], Float[Array, "B K S"] | None]:
    """p[b,n,t,s] = exp(scale q.k - lse[b,t,n]) where seen and 0 elsewhere, reduced by its axes."""
    queries_T, slots_S = jnp.arange(q.shape[1]), jnp.arange(k.shape[2])
    counted_BT1 = (queries_T < valid[:, None])[..., None]
    seen_BTS = counted_BT1 & (slots_S < lengths[:, None, None])
    if causal_start is not None:
        seen_BTS &= slots_S <= (causal_start[:, None] + queries_T)[..., None]
    q_BKGTH = group_heads(q, k.shape[1]).astype(jnp.float32)
    lse_BKGT = group_heads(lse[..., None], k.shape[1])[..., 0]
    logits_BKGTS = scale * jnp.einsum(
        "BKGTH,BKSH->BKGTS", q_BKGTH, k.astype(jnp.float32), precision="highest"
    )
    seen_BKGTS = seen_BTS[:, None, None] & (lse_BKGT > -jnp.inf)[..., None]
    p_BKGTS = jnp.where(seen_BKGTS, jnp.exp(logits_BKGTS - lse_BKGT[..., None]), 0.0)
    per_head_BKGS = p_BKGTS.sum(3) if over_queries == "sum" else p_BKGTS.max(3)
    mass_BKS = {
        "sum": per_head_BKGS.sum(2),
        "max": per_head_BKGS.max(2),
        "first": per_head_BKGS[:, :, 0],
    }[over_group]
    return mass_BKS, jnp.sum(p_BKGTS.mean(2) ** 2, axis=2) if squares else None
