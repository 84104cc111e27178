"""The past as units of `block_size` tokens, each known by one key a query head.

The memory of InfLLM (section 3.2), as pure functions of arrays. A row's text is cut at

    [sinks | unit 0 | unit 1 | ... | remainder | window]
    0    n_init                            n - n_local    n tokens read

where a unit is packed once all its tokens have left the window. Which token lies where follows
from n alone. A unit is represented by the mean of the `repr_topk` keys that received most, from
the queries within whose window they stood; each query head has its own. What a token has received
so far is kept in a ring, slot j mod M for token j, until its unit is packed.

Keys lie in an append-only cache before rotary embedding. Over sharded slots a unit's
representative lies on the shard of the cache's pages, its keys wherever they lie; the ring is
whole on every shard.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import AppendCache, empty_append_cache, gather_slots, write_run
from jax_longctx.contract import CacheShape, LayerContext
from jax_longctx.parts import ties
from jax_longctx.parts.unit_cache import Room, UnitCache, empty_unit_cache, note_step
from jax_longctx.sharding import axes_field
from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.topk_scores import tied_top_k

__all__ = [
    "BlockMemory",
    "Layout",
    "best_units",
    "empty_block_memory",
    "keep_received",
    "note_units",
    "pack",
]

# Capacities are multiples of it, on every shard of the slots.
GRANULE = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes in tokens; see the module's docstring."""

    sinks: int
    window: int
    block: int
    chunk: int

    @property
    def ring(self) -> int:
        """M: the window, a chunk behind it, and up to a unit not packed yet before it."""
        return self.window + self.block + self.chunk - 1

    @property
    def row_tokens(self) -> int:
        """Slots of the cache for each row of `units`: a block where that divides capacities."""
        return math.gcd(self.block, GRANULE)

    def units(self, read: Int[Array, " B"]) -> Int[Array, " B"]:
        """Units that are packed once `read` tokens have been read."""
        return jnp.maximum((read - self.window - self.sinks) // self.block, 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BlockMemory:
    """Every key and value of a row, and what its units are chosen by.

    Attributes:
      store: keys before rotary embedding, and values.
      host: an account of units that would be loaded; None without one.
      units: each unit's representative key by query head; rows beyond the packed ones are garbage.
      received: the ring of what tokens not packed yet have received, float32.
      context_received: the ring at the end of the context.
    """

    store: AppendCache
    host: UnitCache | None
    units: Float[Array, "B N P H"] = axes_field("batch", "heads", "pages", None)
    received: Float[Array, "B N M"] = axes_field("batch", "heads", None)
    context_received: Float[Array, "B N M"] = axes_field("batch", "heads", None)

    def end_context(self) -> "BlockMemory":
        """Remembers where the context ends, so that `rewind` can return there."""
        return dataclasses.replace(
            self, store=self.store.end_context(), context_received=self.received
        )

    def rewind(self) -> "BlockMemory":
        """The memory at the end of the context; later units become garbage."""
        received = jnp.array(self.context_received, copy=True)
        return dataclasses.replace(self, store=self.store.rewind(), received=received)


def empty_block_memory(shape: CacheShape, layout: Layout, room: Room | None = None) -> BlockMemory:
    """A memory for `shape.slots` tokens, with an account of units that `room` makes load."""
    heads = (shape.batch, shape.num_heads)
    rows = shape.slots // layout.row_tokens
    return BlockMemory(
        empty_append_cache(shape),
        None if room is None else empty_unit_cache(shape.batch, rows),
        jnp.zeros((*heads, rows, shape.head_dim), shape.dtype),
        jnp.zeros((*heads, layout.ring), jnp.float32),
        jnp.zeros((*heads, layout.ring), jnp.float32),
    )


def best_units(
    query: Float[Array, "B N H"],
    units: Float[Array, "B N P H"],
    packed: Int[Array, " B"],
    count: int,
    ctx: LayerContext,
    *,
    each_head: bool,
) -> Int[Array, "B X C"]:
    """The units of largest dot product with the query, best first, ties to the older; then -1.

    The product is summed over all heads of the model, X = 1 list for all of them, or with
    `each_head` every head has its own, X = N. There are C = min(count, P) entries. Units of equal
    tokens have equal representatives but for rounding: products that close are ties (`ties`).
    """
    # A fused multiply and sum: a matmul of mixed dtypes would copy the representatives.
    scores_BXP = jnp.sum(query.astype(jnp.float32)[:, :, None] * units.astype(jnp.float32), -1)
    if not each_head:
        scores_BXP = ctx.psum_heads(jnp.sum(scores_BXP, axis=1, keepdims=True))
    ids_P = ctx.seq_offset(units.shape[2]) + jnp.arange(units.shape[2])
    held_B1P = ids_P < packed[:, None, None]
    squares_BX = jnp.sum(scores_BXP**2, axis=-1, where=held_B1P)
    squares_BX = ctx.psum_seq(squares_BX) if ctx.seq_size > 1 else squares_BX
    usual_BX = jnp.sqrt(squares_BX / jnp.maximum(packed, 1)[:, None])
    tolerance_BX = ties.tolerance(units.dtype) * usual_BX
    scores_BXP = jnp.where(held_B1P, scores_BXP, -jnp.inf)
    values, at = tied_top_k(scores_BXP, min(count, units.shape[2]), tolerance_BX)
    ids_BXC = ids_P[at]
    if ctx.seq_size > 1:
        # Shards in order, so that among equals the older unit still comes first.
        values, ids = ctx.gather_seq(values, -1), ctx.gather_seq(ids_BXC, -1)
        values, at = tied_top_k(values, min(count, values.shape[-1]), tolerance_BX)
        ids_BXC = jnp.take_along_axis(ids, at, axis=-1)
    return jnp.where(values > -jnp.inf, ids_BXC, -1)


def note_units(
    memory: BlockMemory,
    store: AppendCache,
    chosen: Int[Array, "B 1 C"],
    seen_by: tuple[Float[Array, "B T N H"], Float[Array, "B T N"], Int[Array, " B"]],
    layout: Layout,
    room: Room,
    ctx: LayerContext,
) -> UnitCache:
    """The account of units after a segment attended those that were chosen.

    Args:
      memory, store: without the segment's tokens, and with them.
      seen_by: queries at the constant distance, the log-sum-exp of their whole attention, and how
        many of them count.
    """
    assert memory.host is not None
    listed_BC, (q, lse, valid_B), mass_BC = chosen[:, 0], seen_by, None
    if room.policy == "lru-s":
        mass_BC = _unit_mass(q, lse, store, listed_BC, valid_B, layout, ctx)
    packed_B = layout.units(memory.store.length)
    return note_step(memory.host, listed_BC, mass_BC, packed_B, valid_B > 0, room, ctx)


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
    mass_BKE = attention_mass(q, keys, lse, lengths_B, scale=ctx.scale, valid=valid)
    mass_BE = ctx.psum_heads(jnp.sum(mass_BKE, axis=1))
    mass_BC = jnp.sum(mass_BE.reshape(slots_BCZ.shape), axis=2)
    return jnp.where(chosen >= 0, mass_BC, 0.0)


def keep_received(
    ring: Float[Array, "B N M"],
    begin: Int[Array, " B"],
    valid: Int[Array, " B"],
    seen: tuple[Float[Array, "B N X"], Int[Array, " B"], Int[Array, " B"]],
    new: Float[Array, "B N T"] | None,
    ctx: LayerContext,
) -> Float[Array, "B N M"]:
    """The ring after `valid[b]` tokens from token begin[b] on have joined.

    Args:
      seen: (amounts, first, number): this shard's amounts of tokens first[b], first[b] + 1, ...
        of which number[b] count; they may include the new ones.
      new: amounts of the new tokens, the same on every shard, unless `seen` has them.
    """
    slot_M = jnp.arange(ring.shape[2])

    def by_slot(amounts: Array, first: Array, number: Array) -> Array:
        index_BM = (slot_M - first[:, None]) % ring.shape[2]
        at_BM = jnp.minimum(index_BM, amounts.shape[2] - 1)
        picked = jnp.take_along_axis(amounts, at_BM[:, None], axis=2)
        return jnp.where((index_BM < number[:, None])[:, None], picked, 0.0)

    joins_BM = (slot_M - begin[:, None]) % ring.shape[2] < valid[:, None]
    added = by_slot(*seen)
    added = ctx.psum_seq(added) if ctx.seq_size > 1 else added
    if new is not None:
        added = added + by_slot(new, begin, valid)
    # Where a new token takes its slot lies what a packed one had received.
    return jnp.where(joins_BM[:, None], 0.0, ring) + added


def pack(
    memory: BlockMemory,
    begin: Int[Array, " B"],
    tokens: int,
    layout: Layout,
    representatives: int,
    ctx: LayerContext,
) -> Float[Array, "B N P H"]:
    """`units` with those that the newest tokens, at most `tokens` from begin[b] on, completed."""
    store, ring = memory.store, memory.received
    batch, heads, size = ring.shape
    first_B = layout.units(begin)
    new_B = layout.units(store.length) - first_B
    most = -(-tokens // layout.block)
    start_BU = layout.sinks + (first_B[:, None] + jnp.arange(most)) * layout.block
    token_BUZ = start_BU[..., None] + jnp.arange(layout.block)
    slot_B1E = (token_BUZ % size).reshape(batch, 1, -1)  # [B, 1, U * Z]
    received = jnp.take_along_axis(ring, slot_B1E, axis=2)
    received = received.reshape(batch, heads, most, layout.block)
    best_BNUR = jax.lax.top_k(received, representatives)[1]
    slots = start_BU[:, None, :, None] + best_BNUR
    # Heads of one group side by side: they choose among the same keys.
    slots_BKC = slots.reshape(batch, store.k.shape[1], -1)
    keys = gather_slots(store.k, slots_BKC, ctx).astype(jnp.float32)
    keys = keys.reshape(*best_BNUR.shape, -1)  # [B, N, U, R, H]
    units_BUNH = jnp.swapaxes(jnp.mean(keys, axis=3), 1, 2)
    return write_run(memory.units, units_BUNH, first_B, new_B, ctx)
