"""How much of a text's earlier keys sparse reading reads in each head, and the mass that it keeps.

The text is read exactly. Of each chunk the blocks are chosen as `caches.sparse_reading` does, for
several masses. Of each 128 queries the last one's attention is computed whole: the mass that is
kept is what it gives to the chosen blocks and to the chunk's own keys.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jax_longctx.caches import Rewinding, numbers
from jax_longctx.caches.sparse_reading import block_shares, chosen_blocks
from jax_longctx.contract import QKV, CacheShape, LayerContext, Segment, WithCache
from jax_longctx.engine import Engine
from jax_longctx.engine.runs import each_layer
from jax_longctx.parts.appending import Appending
from jax_longctx.settings import Reading
from jax_longctx.sharding import axes_field
from pallas_kernels.common import capped, factor_of, group_heads
from pallas_kernels.sparse_prefill_attention import BLOCK


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CountedCache(Rewinding):
    """Every key and value, and sums of each query head.

    Attributes:
      read: blocks that are chosen, for each mass.
      there: blocks that there are.
      kept: mass that is kept, for each mass.
      queries: of whose masses that is the sum.
    """

    store: Any
    read: Float[Array, "B N M"] = axes_field("batch", "heads", None)
    there: Float[Array, "B N"] = axes_field("batch", "heads")
    kept: Float[Array, "B N M"] = axes_field("batch", "heads", None)
    queries: Float[Array, "B N"] = axes_field("batch", "heads")

    @property
    def position(self) -> Array:
        """Position of each row's next token."""
        return self.store.position


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counting(Appending):
    """Full attention that counts what sparse reading would read, on one device."""

    ways: tuple[Reading, ...]

    stripes = False

    def init_cache(self, shape: CacheShape) -> CountedCache:
        heads, masses = (shape.batch, shape.num_heads), (len(self.ways),)
        sizes = (heads + masses, heads, heads + masses, heads)
        return CountedCache(super().init_cache(shape), *map(jnp.zeros, sizes))

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        (q, k, _), past_B, valid_B = new, cache.store.length, segment.valid_of()
        part, store = super().attend(new, cache.store, segment, ctx)
        after = dataclasses.replace(cache, store=store)
        if segment.role != "context":
            return part, after
        at_BT = cache.position[:, None] + jnp.arange(q.shape[1])
        q, k = ctx.rotate_queries(q, at_BT), ctx.rotate(k, at_BT)
        last_Y = jnp.minimum(jnp.arange(BLOCK - 1, q.shape[1] + BLOCK - 1, BLOCK), q.shape[1] - 1)
        keys, slots_S = numbers(store.k), jnp.arange(store.sizes[2])
        q_BKGYH = group_heads(q[:, last_Y], keys.shape[1])
        s = jnp.einsum("BKGYH,BKSH->BKGYS", q_BKGYH, keys, preferred_element_type=jnp.float32)
        s = capped(factor_of(ctx.scale) * s, ctx.scale)
        seen_BYS = slots_S <= (past_B[:, None] + last_Y)[..., None]
        s = jnp.where(seen_BYS[:, None, None], s, -jnp.inf)
        weights_BNYS = jax.nn.softmax(s).reshape(q.shape[0], q.shape[2], *s.shape[3:])
        counts_BY = (last_Y < valid_B[:, None]) & (past_B > 0)[:, None]
        own_BS = slots_S >= past_B[:, None]
        read, kept = [], []
        for how in self.ways:
            shares = block_shares(q, k, keys, past_B, valid_B, how, ctx)
            chosen = chosen_blocks(shares, past_B, how, ctx) & counts_BY[:, None, :, None]
            read.append(jnp.sum(chosen, axis=(2, 3)))
            within = jnp.repeat(chosen, BLOCK, axis=3) | own_BS[:, None, None]
            mass = jnp.sum(weights_BNYS, axis=3, where=within)
            kept.append(jnp.sum(mass, axis=2, where=counts_BY[:, None]))
        tiles_B1 = jnp.sum(counts_BY, axis=1, keepdims=True)
        there_B1 = tiles_B1 * -(-past_B[:, None] // BLOCK)
        return part, dataclasses.replace(
            after,
            read=cache.read + jnp.stack(read, axis=-1),
            there=cache.there + there_B1,
            kept=cache.kept + jnp.stack(kept, axis=-1),
            queries=cache.queries + tiles_B1,
        )


class Counted(NamedTuple):
    """Of each way, layer and query head the share of blocks that is read, and the mass kept."""

    density: Float[np.ndarray, "M L N"]
    kept: Float[np.ndarray, "M L N"]


def counted(engine: Engine, text: Sequence[int], ways: Sequence[Reading]) -> Counted:
    """Reads a text, of token ids and longer than a chunk, by an engine on one device."""
    context = engine.under(Counting(ways=tuple(ways)), reading=None).prefill([text], reserve=0)
    layers = [x for x in each_layer(context.usable_caches()) if isinstance(x, CountedCache)]

    def mean(total: str, over: str) -> Float[np.ndarray, "M L N"]:
        found = [getattr(each, total)[0] / getattr(each, over)[0][:, None] for each in layers]
        return np.moveaxis(np.asarray(jnp.stack(found)), 2, 0)

    return Counted(mean("read", "there"), mean("kept", "queries"))
