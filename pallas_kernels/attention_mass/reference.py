"""Attention mass by its definition, every probability materialised in float32; for tests only."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels.common import (
    Cache,
    PerQuery,
    PerRow,
    Queries,
    Scale,
    capped,
    factor_of,
    group_heads,
)

# How mass is reduced over the query heads that share a kv head: "first" is the group's first head.
OverGroup = Literal["sum", "max", "first"]
# The mass of every slot, and with `squares` these too.
Masses = tuple[Float[Array, "B K S"], Float[Array, "B K S"] | None]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("valid", "causal_start"),
    meta_fields=("scale", "over_group", "squares"),
)
@dataclass(frozen=True)
class Reduction:
    """Which queries count, and how the sums of their probabilities are reduced.

    Attributes:
      valid: [B] int32; only the queries t < valid[b] count (all when None); the others may hold
        anything.
      causal_start: query t of row b stands at slot causal_start[b] + t and sees no later slot;
        None lets every query see all filled slots.
      over_group: sum or maximum over the query heads that share a kv head, or the first of them.
      squares: the sum over queries of the squared mean probability of the group, too (RoCo); beside
        a sum over the group alone.
    """

    scale: Scale
    valid: Any = None
    causal_start: PerRow | None = None
    over_group: OverGroup = "sum"
    squares: bool = False

    def __post_init__(self) -> None:
        if self.squares and self.over_group != "sum":
            raise ValueError(f"attention_mass: squares beside over_group {self.over_group!r}")


def attention_mass(q: Queries, k: Cache, lse: PerQuery, lengths: PerRow, how: Reduction) -> Masses:
    """p[b,n,t,s] = exp(scale q.k - lse[b,t,n]) where seen and 0 elsewhere, reduced by its axes."""
    queries_T, slots_S = jnp.arange(q.shape[1]), jnp.arange(k.shape[2])
    counted_BT1 = (queries_T < how.valid[:, None])[..., None]
    seen_BTS = counted_BT1 & (slots_S < lengths[:, None, None])
    if how.causal_start is not None:
        seen_BTS &= slots_S <= (how.causal_start[:, None] + queries_T)[..., None]
    q_BKGTH = group_heads(q, k.shape[1]).astype(jnp.float32)
    lse_BKGT = group_heads(lse[..., None], k.shape[1])[..., 0]
    scores_BKGTS = jnp.einsum(
        "BKGTH,BKSH->BKGTS", q_BKGTH, k.astype(jnp.float32), precision="highest"
    )
    logits_BKGTS = capped(factor_of(how.scale) * scores_BKGTS, how.scale)
    seen_BKGTS = seen_BTS[:, None, None] & (lse_BKGT > -jnp.inf)[..., None]
    p_BKGTS = jnp.where(seen_BKGTS, jnp.exp(logits_BKGTS - lse_BKGT[..., None]), 0.0)
    per_head_BKGS = p_BKGTS.sum(3)
    mass_BKS = {
        "sum": per_head_BKGS.sum(2),
        "max": per_head_BKGS.max(2),
        "first": per_head_BKGS[:, :, 0],
    }[how.over_group]
    return mass_BKS, jnp.sum(p_BKGTS.mean(2) ** 2, axis=2) if how.squares else None
