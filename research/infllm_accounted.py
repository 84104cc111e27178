"""InfLLM with a count of the units that would be loaded if most of them lay on the host.

InfLLM, section 3.3 (cache management): the device has room for a fixed number of units. For each
chunk and each generated token, chosen units that are absent are loaded (misses), and of the others
those of the smallest key leave. The key is

- `lru`: the step at which the unit was last chosen;
- `lru-s`: the attention it received, multiplied by `decay` at each step; 0 when it is loaded.

Of equal keys the older unit leaves first. All units are on the device here, so outputs do not
change; the counts say how often a smaller device would have waited. Counting continues from
question to question.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import AppendCache, gather_slots, where_rows
from jax_longctx.contract import QKV, Attended, CacheShape, LayerContext, method
from jax_longctx.methods.infllm import InfLLM
from jax_longctx.parts.unit_memory import Layout, UnitMemory
from jax_longctx.sharding import axes_field
from pallas_kernels.attention_mass import Reduction, attention_mass
from pallas_kernels.select_large_k import select_mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UnitAccount:
    """The account of one layer.

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


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AccountedMemory(UnitMemory):
    """InfLLM's memory and the account of its units."""

    account: UnitAccount


@method(source="Xiao et al. 2024, section 3.3 (InfLLM)")
class InfLLMAccounted(InfLLM):
    """InfLLM that counts the units a device with room for few of them would have to load.

    Attributes:
      max_cached_block: units that the device would hold.
      cache_policy, score_decay: the key by which units leave.
    """

    max_cached_block: int = 32
    cache_policy: Literal["lru", "lru-s"] = "lru"
    score_decay: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(0, "max_cached_block")
        self.fraction("score_decay")
        if self.max_cached_block < self.topk:
            raise self.refused(
                f"max_cached_block {self.max_cached_block} must hold the topk {self.topk} "
                f"units that a layer attends"
            )

    @property
    def cannot_offload(self) -> str:
        """It reads units to rank them."""
        return "it counts the loads of a device that is not there; use infllm"

    def init_cache(self, shape: CacheShape) -> AccountedMemory:
        memory = super().init_cache(shape)
        account = empty_account(shape.batch, memory.units.shape[2])
        return AccountedMemory(**vars(memory), account=account)

    def attend_units(
        self,
        new: QKV,
        cache: AccountedMemory,
        valid: Int[Array, " B"],
        chosen: Int[Array, "B 1 C"],
        ctx: LayerContext,
    ) -> tuple[Attended, UnitMemory]:
        part, after = super().attend_units(new, cache, valid, chosen, ctx)
        chosen_BC, layout, mass_BC = chosen[:, 0], self.layout, None
        if self.cache_policy == "lru-s":
            far = self.far(new[0], ctx)
            store = after.store.on_device()
            mass_BC = _unit_mass(far, part[1], store, chosen_BC, valid, layout, ctx)
        limits = (layout.units(cache.store.length), self.max_cached_block, self.score_decay)
        account = note_step(cache.account, chosen_BC, mass_BC, *limits, ctx)
        account = where_rows(valid > 0, account, cache.account)
        return part, dataclasses.replace(after, account=account)


def empty_account(batch: int, units: int) -> UnitAccount:
    """Nothing on the device."""
    counts = [jnp.zeros((batch,), jnp.int32) for _ in range(3)]
    shape = (batch, units)
    return UnitAccount(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32), *counts)


def note_step(
    account: UnitAccount,
    chosen: Int[Array, "B C"],
    mass: Float[Array, "B C"] | None,
    packed: Int[Array, " B"],
    room: int,
    decay: float,
    ctx: LayerContext,
) -> UnitAccount:
    """The account after all rows attended the `chosen` units, -1 for none.

    Args:
      mass: the attention that each received, for `lru-s`; None for `lru`.
      packed: number of units; entries beyond are garbage.
      room: units that the device holds.
    """
    resident, key = ctx.gather_seq(account.resident, 1), ctx.gather_seq(account.key, 1)
    units_P = jnp.arange(resident.shape[1])
    named_BCP = chosen[..., None] == units_P
    wanted = jnp.any(named_BCP, axis=1)
    resident = resident & (units_P < packed[:, None])
    hits_B, all_B = (jnp.sum(x, axis=1, dtype=jnp.int32) for x in (wanted & resident, wanted))
    ranked = jnp.where(wanted, jnp.inf, jnp.where(resident, key, -jnp.inf))
    # Flipped: of equals the mask takes the first, which must be the newest unit.
    stays = jnp.flip(select_mask(jnp.flip(ranked, axis=1), room), axis=1)
    if mass is None:
        key = jnp.where(wanted, (account.steps + 1)[:, None].astype(jnp.float32), key)
    else:
        received = jnp.sum(jnp.where(named_BCP, mass[..., None], 0.0), axis=1)
        key = jnp.where(resident, decay * key, 0.0) + received
    own = account.key.shape[1]
    stays, key = (
        jax.lax.dynamic_slice_in_dim(x, ctx.seq_index * own, own, axis=1) for x in (stays, key)
    )
    hits_B, misses_B = account.hits + hits_B, account.misses + all_B - hits_B
    return UnitAccount(stays, key, account.steps + 1, hits_B, misses_B)


def _unit_mass(
    q: Float[Array, "B T N H"],
    lse: Float[Array, "B T N"],
    store: AppendCache,
    chosen: Int[Array, "B C"],
    valid: Int[Array, " B"],
    layout: Layout,
    ctx: LayerContext,
) -> Float[Array, "B C"]:
    """The probability that each chosen unit received from all heads of the valid queries."""
    begin_BC = layout.sinks + jnp.maximum(chosen, 0) * layout.block
    slots_BCZ = begin_BC[..., None] + jnp.arange(layout.block)
    batch, kv_heads = store.k.shape[:2]
    slots_B1E = slots_BCZ.reshape(batch, 1, -1)  # [B, 1, C * Z]
    slots_BKE = jnp.broadcast_to(slots_B1E, (batch, kv_heads, slots_B1E.shape[2]))
    keys = gather_slots(store.k, slots_BKE, ctx)
    lengths_B = jnp.full_like(valid, keys.shape[2])
    mass_BKE = attention_mass(q, keys, lse, lengths_B, Reduction(ctx.scale, valid))
    mass_BE = ctx.psum_heads(jnp.sum(mass_BKE, axis=1))
    mass_BC = jnp.sum(mass_BE.reshape(slots_BCZ.shape), axis=2)
    return jnp.where(chosen >= 0, mass_BC, 0.0)
