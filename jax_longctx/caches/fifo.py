"""A partial cache: a few chosen tokens of a row, then the new ones, in place of the worst.

Each kv head has its own list of chosen tokens, the first to leave first; new tokens are pushed
behind. The i-th of all these lies in slot
i modulo `limit`, so a push writes one slot in place. With limit = budget + 1 that is the slot of
the token that left before: a step appends its token, then reads budget + 1 tokens. Under a limit
that is never reached the cache grows. Rows may have different budgets. The `first` of all tokens
may never leave: the others then lie in the slots behind them, modulo the limit less `first`.

A push writes no token index: pushed tokens follow each other in the text, so the list and three
numbers a row give the token of each slot.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches.append_only import AppendCache, write_rows
from jax_longctx.caches.reading import gather_stored
from jax_longctx.contract import Attended, CacheShape, LayerContext
from jax_longctx.sharding import OwnAxis, axes_field
from pallas_kernels.common import AnyCache, Scale
from pallas_kernels.decode_attention import decode_attention

# Slots of a tile of the attention kernels.
GRANULE = 128

# Of each row, or the same for all.
Count = int | Int[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FifoCache:
    """The token in each slot, its key (rotated) and value, whole on every shard.

    Attributes:
      chosen: index in the text of M tokens, the first to leave first, -1 beyond `count`.
      count: chosen tokens of each row, the same for all its heads.
      pushed: tokens that came after them.
      position: index of the next token.
      k, v: slot c is valid when `c < length(limit)[b]`; other slots hold garbage. None for a list
        alone, before `filled`.
      chosen_axis: the logical axis of M, `share` where budgets are shares of the slots.
      slots_axis: the slots' logical axis: `room` where no token leaves, else `chosen_axis`.
      first: tokens that never leave.
    """

    chosen: Int[Array, "B K M"] = axes_field("batch", "kv_heads", OwnAxis("chosen_axis"))
    count: Int[Array, " B"] = axes_field("batch")
    pushed: Int[Array, " B"] = axes_field("batch")
    position: Int[Array, " B"] = axes_field("batch")
    k: AnyCache | None = axes_field("batch", "kv_heads", OwnAxis("slots_axis"), None, in_place=True)
    v: AnyCache | None = axes_field("batch", "kv_heads", OwnAxis("slots_axis"), None, in_place=True)
    chosen_axis: Literal["room", "share", "budget"] = dataclasses.field(
        default="budget", metadata={"static": True}
    )
    slots_axis: Literal["room", "share", "budget"] = dataclasses.field(
        default="room", metadata={"static": True}
    )
    first: int = dataclasses.field(default=0, metadata={"static": True})

    @property
    def capacity(self) -> int:
        """Slots of the buffers."""
        return 0 if self.k is None else self.k.shape[2]

    def read(self, q: Float[Array, "B 1 N H"], limit: Count, scale: Scale) -> Attended:
        """The newest token's attention over the buffers; q is rotated."""
        assert self.k is not None and self.v is not None
        return decode_attention(q, self.k, self.v, self.length(limit), scale=scale)

    def step_bytes(self, tokens: int) -> int:
        """Bytes that a decode step reads: the buffers, whatever they hold."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.k, self.v)))

    @property
    def number(self) -> Int[Any, " B"]:
        """Tokens of each row so far, those that left included."""
        return self.count + self.pushed

    def length(self, limit: Count) -> Int[Array, " B"]:
        """Number of slots that hold a token."""
        return jnp.minimum(self.number, limit)

    def push(
        self,
        k: Float[Array, "B 1 K H"],
        v: Float[Array, "B 1 K H"],
        valid: Int[Array, " B"],
        limit: Count,
    ) -> "FifoCache":
        """Adds one token to each row in place; a row with `valid[b]` 0 keeps its tokens."""
        later_B = self.first + (self.number - self.first) % (limit - self.first)
        slot_B = jnp.where(self.number < self.first, self.number, later_B)
        return dataclasses.replace(
            self,
            pushed=self.pushed + valid,
            position=self.position + valid,
            k=None if self.k is None else write_rows(self.k, k, slot_B, valid),
            v=None if self.v is None else write_rows(self.v, v, slot_B, valid),
        )

    def tokens(self, limit: Count, slots: int) -> Int[Array, "B K C"]:
        """Index in the text of the token in each of the first `slots`, -1 where there is none."""
        slots_C = jnp.arange(slots)
        turn_B1 = jnp.broadcast_to(limit - self.first, self.count.shape)[:, None]
        turns_BC = (self.number[:, None] - 1 - slots_C) // turn_B1
        # The newest of all tokens that were pushed into the slot.
        number_BC = slots_C + turn_B1 * jnp.where(slots_C < self.first, 0, turns_BC)
        later_BC = (self.position - self.pushed - self.count)[:, None] + number_BC
        size = self.chosen.shape[2]
        chosen_BKC = jnp.pad(self.chosen, ((0, 0), (0, 0), (0, max(slots - size, 0))))
        listed_B1C = (number_BC < self.count[:, None])[:, None]
        tokens_BKC = jnp.where(listed_B1C, chosen_BKC[..., :slots], later_BC[:, None])
        held_BC = slots_C < self.length(limit)[:, None]
        return jnp.where(held_BC[:, None], tokens_BKC, -1)

    def filled(
        self, store: AppendCache, limit: Count, capacity: int, ctx: LayerContext
    ) -> "FifoCache":
        """With the tokens' keys and values, as the store has them, in `capacity` slots, on every
        shard.

        A list for each query head reads its kv head's; heads of one group lie side by side.
        """
        slots_BXC = self.tokens(limit, capacity)
        batch, lists, _ = slots_BXC.shape
        slots_BKE = slots_BXC.reshape(batch, store.k.shape[1], -1)  # [B, K, X / K * C]
        k, v = (
            jax.tree.map(
                lambda part: part.reshape(batch, lists, capacity, *part.shape[3:]),
                gather_stored(x, slots_BKE, ctx),
            )
            for x in (store.k, store.v)
        )
        return dataclasses.replace(self, k=k, v=v)


def empty_fifo_cache(shape: CacheShape, size: int, axis: Literal["budget", "share"]) -> FifoCache:
    """A list of `size` tokens, none chosen yet, and buffers in whole tiles.

    A token leaves for each that is pushed beyond the list's size.
    """
    heads = (shape.batch, shape.num_kv_heads)
    chosen = jnp.full((*heads, size), -1, jnp.int32)
    # An array for each field: a donated buffer may be named once.
    counts = (jnp.zeros((shape.batch,), jnp.int32) for _ in range(3))
    k, v = (shape.empty_slots(padded(size + 1)) for _ in range(2))
    return FifoCache(chosen, *counts, k=k, v=v, chosen_axis=axis, slots_axis=axis)


def padded(capacity: int) -> int:
    """The capacity in whole tiles."""
    return -(-capacity // GRANULE) * GRANULE
