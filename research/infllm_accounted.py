"""InfLLM with a count of the units that would be loaded if most of them lay on the host.

InfLLM, section 3.3 (cache management): the device has room for a fixed number of units. For each
chunk and each generated token, chosen units that are absent are loaded (misses), and of the others
those leave that were chosen longest ago; of equals the older unit. All units are on the device
here, so outputs do not change; the counts say how often a smaller device would have waited.
Counting continues from question to question.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import where_rows
from jax_longctx.contract import QKV, Attended, CacheShape, LayerContext, method
from jax_longctx.methods.infllm import InfLLM
from jax_longctx.parts.unit_memory import UnitMemory
from jax_longctx.sharding import axes_field
from pallas_kernels.select_large_k import select_mask


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UnitAccount:
    """The account of one layer.

    Attributes:
      resident: units on the device.
      key: the step at which each resident unit was last chosen; float32.
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
    """

    max_cached_block: int = 32

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(0, "max_cached_block")
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
        limits = self.layout.units(cache.store.length), self.max_cached_block
        account = note_step(cache.account, chosen[:, 0], *limits, ctx)
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
    packed: Int[Array, " B"],
    room: int,
    ctx: LayerContext,
) -> UnitAccount:
    """The account after all rows attended the `chosen` units, -1 for none.

    Args:
      packed: number of units; entries beyond are garbage.
      room: units that the device holds.
    """
    resident, key = ctx.gather_seq(account.resident, 1), ctx.gather_seq(account.key, 1)
    units_P = jnp.arange(resident.shape[1])
    wanted = jnp.any(chosen[..., None] == units_P, axis=1)
    resident = resident & (units_P < packed[:, None])
    hits_B, all_B = (jnp.sum(x, axis=1, dtype=jnp.int32) for x in (wanted & resident, wanted))
    ranked = jnp.where(wanted, jnp.inf, jnp.where(resident, key, -jnp.inf))
    # Flipped: of equals the mask takes the first, which must be the newest unit.
    stays = jnp.flip(select_mask(jnp.flip(ranked, axis=1), room), axis=1)
    key = jnp.where(wanted, (account.steps + 1)[:, None].astype(jnp.float32), key)
    own = account.key.shape[1]
    stays, key = (
        jax.lax.dynamic_slice_in_dim(x, ctx.seq_index * own, own, axis=1) for x in (stays, key)
    )
    hits_B, misses_B = account.hits + hits_B, account.misses + all_B - hits_B
    return UnitAccount(stays, key, account.steps + 1, hits_B, misses_B)
