"""The past as units of `block_size` tokens, each known by one key a query head.

The memory of InfLLM (section 3.2). A row's text is cut at

    [sinks | unit 0 | unit 1 | ... | remainder | window]
    0    n_init                            n - n_local    n tokens read

and a unit is packed once all its tokens have left the window. A unit's representative is the mean
of the `repr_topk` keys that received most attention from the queries within whose window they
stood; each query head has its own. A ring keeps what each token has received until its unit is
packed, in slot j mod M for token j.

Keys lie in an append-only cache before rotary embedding. Representatives are sharded like pages of
the cache; the ring is whole on every shard.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import Reads, Rewinding, Store, empty_store, numbers, write_run
from jax_longctx.contract import CacheShape, LayerContext
from jax_longctx.parts.voted_keys import tie_tolerance
from jax_longctx.sharding import axes_field
from pallas_kernels.common import AnyCache, quotient
from pallas_kernels.topk_scores import tied_top_k

# Each shard's capacity is a multiple of it.
GRANULE = 128


@dataclasses.dataclass(frozen=True)
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
    def page(self) -> int:
        """Tokens of a page. Units and first tokens are made of pages."""
        return math.gcd(self.sinks, self.block, GRANULE)

    @property
    def row_tokens(self) -> int:
        """Slots of the cache for each row of `units`: a block where that divides capacities."""
        return math.gcd(self.block, GRANULE)

    def units(self, read: Int[Array, " B"]) -> Int[Array, " B"]:
        """Units that are packed once `read` tokens have been read."""
        return quotient(jnp.maximum(read - self.window - self.sinks, 0), self.block)

    def completed(self, begin: Int[Array, " B"], tokens: int) -> Int[Array, "B U Z"]:
        """The tokens of each unit that the next `tokens` tokens from begin[b] on may complete."""
        units_BU = self.units(begin)[:, None] + jnp.arange(-(-tokens // self.block))
        return self.sinks + (units_BU * self.block)[..., None] + jnp.arange(self.block)


class Packed(NamedTuple):
    """What units are packed from: their U * Z tokens.

    Attributes:
      received: what they have received.
      keys: as cached; zeros for other shards'.
    """

    received: Float[Array, "B N E"]
    keys: Float[Array, "B K E H"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class UnitMemory(Rewinding):
    """Every key and value of a row, and the representatives of its units.

    Attributes:
      store: keys before rotary embedding, and values.
      units: each unit's representative key by query head, [B, N, P, H]; rows beyond the packed
        ones are garbage.
      received: the ring of what tokens not packed yet have received, float32.
      context_received: the ring at the end of the context.
    """

    store: Store
    units: AnyCache = axes_field("batch", "heads", "pages", None, in_place=True)
    received: Float[Array, "B N M"] = axes_field("batch", "heads", None)
    context_received: Float[Array, "B N M"] = axes_field("batch", "heads", None)

    def pack(
        self,
        begin: Int[Array, " B"],
        packed: Packed,
        layout: Layout,
        representatives: int,
        ctx: LayerContext,
    ) -> "UnitMemory":
        """Packs the units that the newest tokens, from begin[b] on, complete."""
        batch, heads, _ = packed.received.shape
        first_B = layout.units(begin)
        new_B = layout.units(self.store.length) - first_B
        received = packed.received.reshape(batch, heads, -1, layout.block)
        most = received.shape[2]
        # By comparisons, which are one kernel where a sort would be several.
        one, other, index_Z = received[..., None], received[..., None, :], jnp.arange(layout.block)
        ahead = (other > one) | ((other == one) & (index_Z < index_Z[:, None]))
        best_BNUZ = jnp.sum(ahead, axis=-1) < representatives
        # Each head takes its own of all keys of a unit; other shards' keys are zeros here.
        kv_heads, width = packed.keys.shape[1::2]
        keys_BK1UZH = packed.keys.astype(jnp.float32).reshape(batch, kv_heads, 1, most, -1, width)
        taken = best_BNUZ.reshape(batch, kv_heads, -1, most, layout.block, 1)
        sums_BKGUH = jnp.sum(jnp.where(taken, keys_BK1UZH, 0.0), axis=4)
        units_BNUH = ctx.psum_seq(sums_BKGUH.reshape(batch, heads, most, width)) / representatives
        units_BUNH = jnp.swapaxes(units_BNUH, 1, 2)
        units = write_run(self.units, units_BUNH, first_B, new_B, ctx)
        return dataclasses.replace(self, units=units)


def empty_unit_memory(shape: CacheShape, layout: Layout, chosen: int) -> UnitMemory:
    """A memory for `shape.slots` tokens, of which a query attends `chosen` units at most."""
    heads = (shape.batch, shape.num_heads)
    units = jnp.zeros((*heads, shape.slots // layout.row_tokens, shape.head_dim), shape.dtype)
    # An array for each field: a donated buffer may be named once.
    rings = (jnp.zeros((*heads, layout.ring), jnp.float32) for _ in range(2))
    page = layout.page
    reads = Reads(
        page=page,
        first=layout.sinks,
        newest=layout.window + layout.block,
        chosen=chosen * (layout.block // page),
        chunk=layout.chunk,
        apart=False,
    )
    return UnitMemory(empty_store(shape, reads), units, *rings)


def best_units(
    query: Float[Array, "B N H"],
    units: AnyCache,
    packed: Int[Array, " B"],
    count: int,
    ctx: LayerContext,
) -> Int[Array, "B 1 C"]:
    """The C = min(count, P) units of largest dot product with the query, best first; then -1.

    The product is summed over all heads of the model. Ties go to the older unit. Units of equal
    tokens have representatives that differ by rounding alone, so close products tie (`voted_keys`).
    """
    # A fused multiply and sum: a matmul of mixed dtypes would copy the representatives.
    wide, number = numbers(units).astype(jnp.float32), min(count, units.shape[2])
    query = query.astype(jnp.float32)[:, :, None]
    scores_BNP = jnp.sum(query * wide, -1)
    scores_B1P = ctx.psum_heads(jnp.sum(scores_BNP, axis=1, keepdims=True))
    ids_P = ctx.seq_offset(units.shape[2]) + jnp.arange(units.shape[2])
    held_B1P = ids_P < packed[:, None, None]
    squares_B1 = ctx.psum_seq(jnp.sum(scores_B1P**2, axis=-1, where=held_B1P))
    usual_B1 = jnp.sqrt(squares_B1 / jnp.maximum(packed, 1)[:, None])
    tolerance_B1 = tie_tolerance(units.dtype) * usual_B1
    scores_B1P = jnp.where(held_B1P, scores_B1P, -jnp.inf)
    values, at = tied_top_k(scores_B1P, number, tolerance_B1)
    ids_B1C = at if ctx.seq_size == 1 else ids_P[jnp.maximum(at, 0)]
    if ctx.seq_size > 1 and count:
        # Shards in order: of equals the older unit still comes first.
        values, ids = ctx.gather_seq(values, -1), ctx.gather_seq(ids_B1C, -1)
        values, at = tied_top_k(values, min(count, values.shape[-1]), tolerance_B1)
        ids_B1C = jnp.take_along_axis(ids, jnp.maximum(at, 0), axis=-1)
        ids_B1C = jnp.where(at < 0, -1, ids_B1C)
    return ids_B1C
