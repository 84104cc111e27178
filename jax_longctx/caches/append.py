"""Append-only storage: every key and value of a row in slots 0..length-1, in token order.

Slots are sharded over the mesh axis `seq` in contiguous runs; a write goes to the shard that owns
the slot and is dropped by the others. Measured with the cache donated (layers unrolled, batch 2,
16,384 slots): the scatter below updates in place, 0.4% of the cache as temporaries on CPU and
compiled for v5e, for one token and for 256.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.contract import CacheShape, LayerContext
from jax_longctx.sharding import axes_field

__all__ = ["AppendCache", "append", "empty_append_cache", "gather_slots", "write_slots"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AppendCache:
    """Keys and values of every token of a row.

    Attributes:
      k, v: slot s of row b is valid when `s < length[b]`; other slots hold garbage.
      length: valid slots of each row.
      position: position of each row's next token.
      context_length, context_position: both as they were at the end of the context.
    """

    k: Float[Array, "B K S H"] = axes_field("batch", "kv_heads", "slots", None)
    v: Float[Array, "B K S H"] = axes_field("batch", "kv_heads", "slots", None)
    length: Int[Array, " B"] = axes_field("batch")
    position: Int[Array, " B"] = axes_field("batch")
    context_length: Int[Array, " B"] = axes_field("batch")
    context_position: Int[Array, " B"] = axes_field("batch")

    def end_context(self) -> "AppendCache":
        """Remembers where the context ends, so that `rewind` can return there."""
        return dataclasses.replace(self, context_length=self.length, context_position=self.position)

    def rewind(self) -> "AppendCache":
        """The cache at the end of the context; shares the buffers, later slots become garbage."""
        return dataclasses.replace(
            self,
            # New arrays: a fork is donated to the next step while the context keeps its own.
            length=jnp.array(self.context_length, copy=True),
            position=jnp.array(self.context_position, copy=True),
        )


def empty_append_cache(shape: CacheShape) -> AppendCache:
    """A cache of `shape.slots` empty slots in the model's dtype."""
    size = (shape.batch, shape.num_kv_heads, shape.slots, shape.head_dim)

    # Four arrays, not one four times: a donated buffer may be named once.
    def zeros() -> Array:
        return jnp.zeros((shape.batch,), jnp.int32)

    return AppendCache(
        jnp.zeros(size, shape.dtype),
        jnp.zeros(size, shape.dtype),
        zeros(),
        zeros(),
        zeros(),
        zeros(),
    )


def write_slots(
    buffer: Float[Array, "B K S H"],
    new: Float[Array, "B T K H"],
    slots: Int[Array, "B T"],
    ctx: LayerContext,
) -> Float[Array, "B K S H"]:
    """Writes `new[b, t]` into global slot `slots[b, t]`; a negative slot is not written.

    In place when `buffer` is donated. Slots of one row must differ.
    """
    local = slots - ctx.seq_offset(buffer.shape[2])
    # JAX wraps negative indices; one past the end is what `drop` drops.
    local = jnp.where((local >= 0) & (slots >= 0), local, buffer.shape[2])

    def write_row(row_KSH: Array, new_TKH: Array, slots_T: Array) -> Array:
        new_KTH = jnp.swapaxes(new_TKH, 0, 1).astype(row_KSH.dtype)
        return row_KSH.at[:, slots_T].set(new_KTH, mode="drop", unique_indices=True)

    return jax.vmap(write_row)(buffer, new, local)


def append(
    cache: AppendCache,
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    valid: Int[Array, " B"],
    ctx: LayerContext,
) -> AppendCache:
    """Appends each row's first `valid[b]` tokens; a row with none is left as it is."""
    step_T = jnp.arange(k.shape[1])
    slots_BT = jnp.where(step_T < valid[:, None], cache.length[:, None] + step_T, -1)
    return dataclasses.replace(
        cache,
        k=write_slots(cache.k, k, slots_BT, ctx),
        v=write_slots(cache.v, v, slots_BT, ctx),
        length=cache.length + valid,
        position=cache.position + valid,
    )


def gather_slots(
    buffer: Float[Array, "B K S H"], slots: Int[Array, "B K C"], ctx: LayerContext
) -> Float[Array, "B K C H"]:
    """The keys or values in global `slots` of each row and kv head, on every shard of the slots.

    Negative slots come back as zeros.
    """
    local = slots - ctx.seq_offset(buffer.shape[2])
    mine = (slots >= 0) & (local >= 0) & (local < buffer.shape[2])
    picked = jnp.take_along_axis(buffer, jnp.where(mine, local, 0)[..., None], axis=2)
    picked = jnp.where(mine[..., None], picked, 0)
    # One shard holds each slot; a sum with zeros is exact.
    return ctx.psum_seq(picked) if ctx.seq_size > 1 else picked
