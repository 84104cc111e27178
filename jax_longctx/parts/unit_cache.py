"""Which units of the past would be on the device, if the others waited on the host.

InfLLM, section 3.3 (cache management): the device has room for a fixed number of units. For each
chunk and each generated token those that are chosen and absent are loaded (misses), and of the
others those of the smallest key leave:

- `lru`: when a unit was chosen last;
- `lru-s`: the attention it received, `decay` times what it was at each step; 0 as it is loaded.

Of equal keys the older unit leaves first. All units are on the device here, so that no output
depends on it: what is counted says how often a smaller device would have waited. Counting goes on
from question to question, as the cache would.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import where_rows
from jax_longctx.contract import LayerContext
from jax_longctx.sharding import axes_field
from pallas_kernels.select_large_k import select_mask

__all__ = ["Policy", "Room", "UnitCache", "empty_unit_cache", "hit_rates", "note_step"]

Policy = Literal["lru", "lru-s"]


class Room(NamedTuple):
    """Units that have room, and which of them leave."""

    size: int
    policy: Policy
    decay: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UnitCache:
    """One layer's.

    Attributes:
      resident: units on the device.
      key: of each resident unit, by the policy; float32.
      steps: chunks and tokens so far.
      hits, misses: chosen units that were on the device, and that were not.
    """

    resident: Bool[Array, "B P"] = axes_field("batch", "pages")
    key: Float[Array, "B P"] = axes_field("batch", "pages")
    steps: Int[Array, " B"] = axes_field("batch")
    hits: Int[Array, " B"] = axes_field("batch")
    misses: Int[Array, " B"] = axes_field("batch")


def empty_unit_cache(batch: int, units: int) -> UnitCache:
    """Nothing on the device."""
    counts = [jnp.zeros((batch,), jnp.int32) for _ in range(3)]
    shape = (batch, units)
    return UnitCache(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32), *counts)


def note_step(
    cache: UnitCache,
    chosen: Int[Array, "B C"],
    mass: Float[Array, "B C"] | None,
    packed: Int[Array, " B"],
    rows: Bool[Array, " B"],
    room: Room,
    ctx: LayerContext,
) -> UnitCache:
    """The cache after the rows of `rows` attended the `chosen` units, -1 for none.

    Args:
      mass: the attention that each received, for `lru-s`.
      packed: units there are; what lies beyond is garbage.
    """
    resident, key = ctx.gather_seq(cache.resident, 1), ctx.gather_seq(cache.key, 1)
    units_P = jnp.arange(resident.shape[1])
    named_BCP = chosen[..., None] == units_P
    wanted = jnp.any(named_BCP, axis=1)
    resident = resident & (units_P < packed[:, None])
    hits_B, all_B = (jnp.sum(x, axis=1, dtype=jnp.int32) for x in (wanted & resident, wanted))
    ranked = jnp.where(wanted, jnp.inf, jnp.where(resident, key, -jnp.inf))
    # Of equals the mask takes the first, which is to be the newest.
    stays = jnp.flip(select_mask(jnp.flip(ranked, axis=1), room.size), axis=1)
    if room.policy == "lru":
        key = jnp.where(wanted, (cache.steps + 1)[:, None].astype(jnp.float32), key)
    else:
        assert mass is not None
        received = jnp.sum(jnp.where(named_BCP, mass[..., None], 0.0), axis=1)
        key = jnp.where(resident, room.decay * key, 0.0) + received
    own = cache.resident.shape[1]
    stays, key = (
        jax.lax.dynamic_slice_in_dim(x, ctx.seq_offset(own), own, axis=1) for x in (stays, key)
    )
    new = UnitCache(stays, key, cache.steps + 1, cache.hits + hits_B, cache.misses + all_B - hits_B)
    return where_rows(rows, new, cache)


def hit_rates(caches: Sequence[UnitCache]) -> list[float]:
    """Of each layer, the share of its chosen units that were on the device; NaN before any."""
    hits, misses = (
        [int(np.sum(np.asarray(getattr(cache, name)))) for cache in caches]
        for name in ("hits", "misses")
    )
    return [h / (h + m) if h + m else float("nan") for h, m in zip(hits, misses, strict=True)]
