"""Where the slots of a cache lie: which shard of `seq` holds a slot, and at which index.

Slots are numbered in the text's order. They lie over the shards in one of two ways:

- in stripes: runs of `STRIPE` slots (or the largest common divisor of that and a shard's slots) are
  dealt to the shards in turn. While a text is read, every shard holds as many filled slots as any
  other, up to a stripe;
- in blocks: each shard holds one run of slots. That is a single stripe of all its slots.

Either way the indices of a shard ascend with its slots, and the slots below a number are the first
ones of each shard. So a kernel that takes a count, or a range, of valid slots needs no mask.

The same holds for the pages of a cache, which divide a stripe: entries stand for both here. Nothing
else knows the layout. `SlotLayout` has what is done to whole arrays, outside of `shard_map`, and
`OwnSlots` what a method asks inside of it (`LayerContext.slots`).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

# Slots of a stripe: pages divide it, kernels tile by it, and shards hold a multiple of it.
STRIPE = 128


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """The layout of all caches of an engine.

    Along a dealt axis an array holds the entries of shard 0, then those of shard 1 and so on.

    Attributes:
      shards: shards of the slots.
      stripe: slots of a stripe; None for blocks.
    """

    shards: int = 1
    stripe: int | None = None

    @property
    def in_stripes(self) -> bool:
        """Whether the order of an array is another one than the text's."""
        return self.stripe is not None and self.shards > 1

    def resized(self, x: Array, axis: int, size: int) -> Array:
        """`x` with `size` entries along `axis`: the last ones are cut, or zeros follow."""
        runs = self.shards if self.in_stripes else 1
        return self._each_run(x, axis, runs, lambda run, at: _resized(run, at, size // runs))

    def from_entry(self, x: Array, axis: int, start: Int[Array, ""], size: int) -> Array:
        """`size` entries from `start` on, as entries 0, 1, ...; those beyond `x` hold anything.

        In stripes `start` is a multiple of the stripes of all shards (`turn`).
        """
        runs = self.shards if self.in_stripes else 1
        return self._each_run(
            x, axis, runs, lambda run, at: _from_entry(run, at, start // runs, size // runs)
        )

    @property
    def turn(self) -> int:
        """Slots after which the shards' indices begin alike."""
        return STRIPE * self.shards

    def own(self, size: int, page: int, shard: Any) -> "OwnSlots":
        """The `size` entries of a shard, each a page of so many slots."""
        stripe = size if self.stripe is None else math.gcd(self.stripe, size * page) // page
        return OwnSlots(size, self.shards, shard, stripe)

    def in_order(self, x: Array, axis: int, slots: int) -> Array:
        """An array of the cache with `slots` slots, its entries along `axis` as in the text."""
        if not self.in_stripes:
            return x
        turns, stripe = self._turns(x.shape[axis], slots)
        apart = x.reshape(*x.shape[:axis], self.shards, turns, stripe, *x.shape[axis + 1 :])
        return jnp.swapaxes(apart, axis, axis + 1).reshape(x.shape)

    def dealt(self, x: Array, axis: int, slots: int) -> Array:
        """`in_order` undone."""
        if not self.in_stripes:
            return x
        turns, stripe = self._turns(x.shape[axis], slots)
        apart = x.reshape(*x.shape[:axis], turns, self.shards, stripe, *x.shape[axis + 1 :])
        return jnp.swapaxes(apart, axis, axis + 1).reshape(x.shape)

    def _turns(self, entries: int, slots: int) -> tuple[int, int]:
        """How often each shard's turn comes, and the entries of a stripe."""
        assert self.stripe is not None
        stripe = math.gcd(self.stripe, slots // self.shards) * entries // slots
        return entries // (stripe * self.shards), stripe

    def _each_run(self, x: Array, axis: int, runs: int, change: Any) -> Array:
        """`change(run, axis of its entries)` of each shard's entries, all at once."""
        if runs == 1:
            return change(x, axis)
        apart = x.reshape(*x.shape[:axis], runs, -1, *x.shape[axis + 1 :])
        changed = change(apart, axis + 1)
        return changed.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])


def _resized(x: Array, axis: int, size: int) -> Array:
    if size <= x.shape[axis]:
        return jax.lax.slice_in_dim(x, 0, size, axis=axis)
    more = size - x.shape[axis]
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)])


def _from_entry(x: Array, axis: int, start: Int[Array, ""], size: int) -> Array:
    x = _resized(x, axis, max(size, x.shape[axis]))
    # A slice that would pass the end begins earlier; rolling brings its entries to the front.
    first = jnp.minimum(start, x.shape[axis] - size)
    return jnp.roll(jax.lax.dynamic_slice_in_dim(x, first, size, axis), first - start, axis)


@dataclasses.dataclass(frozen=True)
class OwnSlots:
    """A shard's entries (slots or pages) of one axis, inside `shard_map`.

    Attributes:
      size: how many it has.
      shards, shard: number of shards, and which of them this is.
      stripe: entries of a stripe; `size` in blocks.
    """

    size: int
    shards: int
    shard: Any
    stripe: int

    @property
    def in_blocks(self) -> bool:
        """Whether this shard's entries are one run of the text's."""
        return self.stripe == self.size or self.shards == 1

    @property
    def offset(self) -> Int[Array, ""] | int:
        """The first entry of this shard's block."""
        assert self.in_blocks
        return self.shard * self.size if self.shards > 1 else 0

    def below(self, entry: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """How many of this shard's entries lie before `entry`, which may be any number."""
        if self.shards == 1:
            return jnp.clip(entry, 0, self.size)
        turn = self.stripe * self.shards
        part = jnp.clip(entry % turn - self.shard * self.stripe, 0, self.stripe)
        return jnp.clip(entry // turn * self.stripe + part, 0, self.size)

    def find(self, entry: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
        """Entries as indices on this shard; -1 for those of other shards, and for no entries."""
        if self.in_blocks:
            local = entry - self.offset
            return jnp.where((entry >= 0) & (local >= 0) & (local < self.size), local, -1)
        turn = self.stripe * self.shards
        local = entry // turn * self.stripe + entry % self.stripe
        mine = (entry >= 0) & (entry // self.stripe % self.shards == self.shard)
        return jnp.where(mine & (local < self.size), local, -1)

    def at(self, local: Int[Any, "*shape"]) -> Int[Array, "*shape"]:
        """The entries at indices of this shard; indices from `size` on go on alike."""
        if self.in_blocks:
            return self.offset + local
        turns = local // self.stripe * self.shards + self.shard
        return turns * self.stripe + local % self.stripe

    def most(self, run: int) -> int:
        """How many of `run` consecutive entries this shard has at most."""
        if self.in_blocks:
            return min(run, self.size)
        touched = -(-(run - 1) // self.stripe) + 1
        return min(run, -(-touched // self.shards) * self.stripe, self.size)

    def whole(self, x: Array, axis: int) -> Array:
        """All shards' arrays along an axis of these entries, in the text's order, on each."""
        if self.shards == 1:
            return x
        if self.in_blocks:
            return jax.lax.all_gather(x, "seq", axis=axis, tiled=True)
        apart = x.reshape(*x.shape[:axis], -1, self.stripe, *x.shape[axis + 1 :])
        every = jax.lax.all_gather(apart, "seq", axis=axis + 1)  # [.., turns, shards, stripe, ..]
        return every.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    def own(self, x: Array, axis: int) -> Array:
        """This shard's entries of an array that all shards hold whole, in the text's order."""
        if self.shards == 1:
            return x
        if self.in_blocks:
            return jax.lax.dynamic_slice_in_dim(x, self.offset, self.size, axis)
        apart = x.reshape(*x.shape[:axis], -1, self.shards, self.stripe, *x.shape[axis + 1 :])
        mine = jax.lax.dynamic_index_in_dim(apart, self.shard, axis + 1, keepdims=False)
        return mine.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])
