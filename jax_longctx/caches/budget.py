"""Budgeted storage: a few tokens of a row, kept in token order, chosen anew as the text goes by.

Slots 0..length-1 hold the kept tokens in ascending order. Each kv head has its own set, all heads
of a row equally many. The buffers are small and whole on every shard of the slots. Where an answer
evicts tokens, their axis is `budget`, which does not grow. Where it only adds tokens, their axis is
`room`, which grows. Choosing gathers from the cache and the newest segment, so a buffer never has
to hold both; appending writes in place.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_longctx.caches.append_only import write_rows
from jax_longctx.caches.host_pages import with_slots
from jax_longctx.caches.marks import Mark
from jax_longctx.caches.reading import numbers
from jax_longctx.contract import QKV, Attended, CacheShape, LayerContext
from jax_longctx.sharding import OwnAxis, axes_field
from pallas_kernels.common import AnyCache, Scale, Stored, merge
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.plane import part_of
from pallas_kernels.prefill_attention import cache_attention, causal_attention
from pallas_kernels.quantised import stored_as
from pallas_kernels.select_large_k import select_large_k

SLOTS = OwnAxis("slots_axis")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BudgetCache:
    """Keys and values of the kept tokens of a row.

    Attributes:
      k, v: slot c is valid when `c < length[b]`; other slots hold garbage. The method stores keys
        before or after rotary embedding.
      token: each kept token's index in the row's text.
      statistics: M running sums of each kept token, float32, or None.
      length: kept tokens of each row, the same for all its heads.
      position: tokens read so far, the index of the next one.
      slots_axis: the logical axis of the slots.
    """

    k: AnyCache = axes_field("batch", "kv_heads", SLOTS, None, in_place=True)
    v: AnyCache = axes_field("batch", "kv_heads", SLOTS, None, in_place=True)
    token: Int[Array, "B K C"] = axes_field("batch", "kv_heads", SLOTS)
    statistics: Float[Array, "B K C M"] | None = axes_field("batch", "kv_heads", SLOTS, None)
    length: Int[Array, " B"] = axes_field("batch")
    position: Int[Array, " B"] = axes_field("batch")
    slots_axis: Literal["room", "budget"] = dataclasses.field(
        default="budget", metadata={"static": True}
    )

    def next_tokens(self, new: int) -> Int[Array, "B K T"]:
        """Indices in the text of the next `new` tokens of each row, for every head."""
        token_BT = self.position[:, None] + jnp.arange(new)
        return jnp.broadcast_to(token_BT[:, None], (*self.token.shape[:2], new))

    @property
    def step_bytes(self) -> int:
        """Bytes that a decode step reads: all, as it ranks all tokens."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    def marked(self, mark: Mark, ctx: LayerContext) -> "BudgetCache":
        """See `caches.marks`."""
        return dataclasses.replace(self, v=mark(self.v, self.token))

    def keys(self, turned: LayerContext | None) -> AnyCache:
        """The keys; with `turned`, which are stored before rotary embedding, at their slots."""
        if turned is None:
            return self.k
        slots = np.arange(self.k.shape[2])[None]
        return jnp.swapaxes(turned.rotate(jnp.swapaxes(numbers(self.k), 1, 2), slots), 1, 2)

    def attend(
        self, new: QKV, scale: Scale, turned: LayerContext | None
    ) -> tuple[Attended, Stored]:
        """Attention of rotated tokens to every slot and, causally, to themselves; and `keys`."""
        q, k, v = new
        past = self.keys(turned)
        to_cache = decode_attention if q.shape[1] == 1 else cache_attention
        earlier = to_cache(q, past, self.v, self.length, scale=scale)
        return merge([earlier, causal_attention(q, k, v, scale=scale)]), part_of(past)

    def in_room(self, room: int, turned: LayerContext | None) -> tuple[Stored, Stored]:
        """`keys` and values in `room` slots, as they are stored."""
        keys: Any = self.keys(turned)
        keys = keys if turned is None else stored_as(self.k, keys)
        return with_slots((keys, self.v), room)

    def append(
        self, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], valid: Int[Array, " B"]
    ) -> "BudgetCache":
        """Appends each row's first `valid[b]` tokens in place; there must be room for them.

        Statistics stay as they are: nothing is chosen any more.
        """
        token_BTK = jnp.swapaxes(self.next_tokens(k.shape[1]), 1, 2)
        return dataclasses.replace(
            self,
            k=write_rows(self.k, k, self.length, valid),
            v=write_rows(self.v, v, self.length, valid),
            token=cast(Array, write_rows(self.token, token_BTK, self.length, valid)),
            length=self.length + valid,
            position=self.position + valid,
        )


def empty_budget_cache(
    shape: CacheShape, capacity: int, statistics: int = 0, *, grows: bool
) -> BudgetCache:
    """A cache of `capacity` empty slots, with `statistics` sums a slot.

    `grows` says that answering adds to it and evicts nothing.
    """
    slots = (shape.batch, shape.num_kv_heads, capacity)
    # None, not an array of size 0: XLA crashes on a donated one that is sharded.
    sums = jnp.zeros((*slots, statistics), jnp.float32) if statistics else None
    return BudgetCache(
        shape.empty_slots(capacity),
        shape.empty_slots(capacity),
        jnp.zeros(slots, jnp.int32),
        sums,
        jnp.zeros((shape.batch,), jnp.int32),
        jnp.zeros((shape.batch,), jnp.int32),
        "room" if grows else "budget",
    )


class Joining(NamedTuple):
    """A segment whose tokens join a cache.

    Attributes:
      k, v: as they are to be stored.
      statistics: of slots and tokens side by side (U = C + T), to be carried along where the cache
        has any.
      count: tokens to keep of the cache and the segment, at most C.
      read: how many tokens of the text this segment held.
    """

    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    statistics: Float[Array, "B K U M"] | None
    count: Int[Array, " B"]
    read: Int[Array, " B"]


def choose(
    cache: BudgetCache, new: Joining, scores: Float[Array, "B K U"], *, one: bool = False
) -> BudgetCache:
    """Keeps each row's best-scored tokens of the cache and the segment, in token order.

    Args:
      scores: of slots and tokens, -inf where there is none; +inf is kept before all others. Among
        equals the older one stays.
      one: T is 1, and at most one slot or the new token leaves. Slots move down by one at most: a
        pass of selects over the cache. Choosing takes some forty dependent passes over the scores,
        too many for each layer of each decode step.
    """
    take = _without_worst(cache, new, scores) if one else _best(cache, scores, new.count)
    return _taken(cache, new, take)


def drop_oldest(
    cache: BudgetCache,
    new: Joining,
    *,
    first: int,
    leaving: Int[Array, " B"],
    after: Any,
    one: bool = False,
) -> BudgetCache:
    """`choose` where all but the `first` tokens leave by age: the oldest `leaving` of each row.

    What stays is known from its place. Nothing is ranked.

    Args:
      after: what is made of the cache as it was. Were tokens moved before, XLA would copy the
        caches of all layers for it.
    """
    leaving, _ = jax.lax.optimization_barrier((leaving, after))
    if one:
        place = jnp.where(leaving > 0, first, cache.k.shape[2] + 1)[:, None]
        return _taken(cache, new, _moved_down(cache, place))
    place_C = jnp.arange(cache.k.shape[2])
    order_BC = place_C + jnp.where(place_C >= first, leaving[:, None], 0)
    length_B1 = cache.length[:, None]
    cached_BC = order_BC < length_B1

    def take(slots: Array, tokens: Array) -> Array:
        def at(array: Array, index_BC: Array) -> Array:
            index = index_BC.reshape(len(index_BC), 1, -1, *[1] * (array.ndim - 3))
            return jnp.take_along_axis(array, jnp.clip(index, 0, array.shape[2] - 1), axis=2)

        mask = cached_BC.reshape(len(cached_BC), 1, -1, *[1] * (slots.ndim - 3))
        return jnp.where(mask, at(slots, order_BC), at(tokens, order_BC - length_B1))

    return _taken(cache, new, take)


def _taken(cache: BudgetCache, new: Joining, take: Callable[[Array, Array], Array]) -> BudgetCache:
    """The cache after `take` has picked from each array's slots and the segment's values."""
    size, statistics = cache.k.shape[2], new.statistics

    def moved(kept: AnyCache, joins: Array) -> Any:
        """Tokens move as they are stored: none is rounded twice."""
        return jax.tree.map(take, part_of(kept), stored_as(kept, jnp.swapaxes(joins, 1, 2)))

    if statistics is not None:
        statistics = take(statistics[:, :, :size], statistics[:, :, size:])
    return BudgetCache(
        moved(cache.k, new.k),
        moved(cache.v, new.v),
        take(cache.token, cache.next_tokens(new.k.shape[1])),
        statistics,
        new.count,
        cache.position + new.read,
        cache.slots_axis,
    )


def _best(cache: BudgetCache, scores: Array, count: Array) -> Callable[[Array, Array], Array]:
    """Gathers the best of slots and tokens."""
    batch, heads, size, _ = cache.k.shape
    flat = scores.reshape(batch * heads, -1)  # [B*K, U]
    slots = select_large_k(flat, jnp.repeat(count, heads), size=size)
    slots_BKC = jnp.maximum(slots, 0).reshape(batch, heads, size)

    def take(slots: Array, tokens: Array) -> Array:
        both = jnp.concatenate([slots, tokens], axis=2)
        index = slots_BKC if both.ndim == 3 else slots_BKC[..., None]
        return jnp.take_along_axis(both, index, axis=2)

    return take


def _without_worst(
    cache: BudgetCache, new: Joining, scores: Array
) -> Callable[[Array, Array], Array]:
    """Moves the slots after the worst down by one, and appends the new token."""
    size = cache.k.shape[2]
    leaves_B = new.count < cache.length + new.read
    # Among the worst the newest leaves: the last in slot order, where the token comes last of all.
    ranked_BKU = jnp.where(scores > -jnp.inf, scores, jnp.inf)
    worst_BK = size - jnp.argmin(jnp.flip(ranked_BKU, axis=2), axis=2)
    return _moved_down(cache, jnp.where(leaves_B[:, None], worst_BK, size + 1))


def _moved_down(cache: BudgetCache, worst_BK: Int[Array, "B _"]) -> Callable[[Array, Array], Array]:
    """Takes the slot of that number out of each head, or the new token; beyond both, nothing."""
    size = cache.k.shape[2]
    moves_BKC = jnp.arange(size) >= worst_BK[..., None]
    newest_BKC = jnp.arange(size) + moves_BKC == cache.length[:, None, None]

    def take(slots: Array, token: Array) -> Array:
        mask = (moves_BKC, newest_BKC)
        moves, newest = mask if slots.ndim == 3 else (m[..., None] for m in mask)
        moved = jnp.where(moves, jnp.roll(slots, -1, axis=2), slots)
        return jnp.where(newest, token, moved).astype(slots.dtype)

    return take
