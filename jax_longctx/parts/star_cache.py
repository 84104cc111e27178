"""What Star keeps while it reads the context: the blocks' keys, and each shard's anchor."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.contract import CacheShape, Method
from jax_longctx.parts import star_blocks
from jax_longctx.parts.adopting import Remembering
from jax_longctx.sharding import axes_field

__all__ = ["StarCache", "empty_star_cache", "with_queries"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StarCache:
    """Phase 1: each shard fills its own slots.

    Attributes:
      decode: what phase 2 reads; its store's slot s is the text's token s.
      filled: tokens of the text that a shard has read, from its first slot on.
      anchor_k, anchor_v: the anchor's keys (rotated) and values, on each shard its own.
      anchored: how many of them there are.
      queries: sum of the rotated queries that a shard has read, where phase 2 wants to know.
    """

    decode: Any
    filled: Int[Array, "B X"] = axes_field("batch", "shards")
    anchor_k: Float[Array, "B K A H"] = axes_field("batch", "kv_heads", "own_slots", None)
    anchor_v: Float[Array, "B K A H"] = axes_field("batch", "kv_heads", "own_slots", None)
    anchored: Int[Array, "B X"] = axes_field("batch", "shards")
    queries: Float[Array, "B X N H"] | None = axes_field("batch", "shards", "heads", None)


class Reader(star_blocks.Blocks, Protocol):
    """Star's blocks, and the method of its second phase."""

    @property
    def decode(self) -> Method: ...


def empty_star_cache(star: Reader, shape: CacheShape) -> StarCache:
    """Room for whole blocks on every shard, nothing read."""
    each = star_blocks.blocks_each(star, shape.slots, shape.shards)
    slots = dataclasses.replace(shape, slots=each * star.block * shape.shards)
    # One slot where there is no anchor: arrays without elements cannot be donated.
    size = max(star.anchor_size, 1) * shape.shards
    anchors = (shape.batch, shape.num_kv_heads, size, shape.head_dim)
    counts = (shape.batch, shape.shards)
    queries = None
    if isinstance(star.decode, Remembering):
        queries = jnp.zeros((*counts, shape.num_heads, shape.head_dim), jnp.float32)
    return StarCache(
        star.decode.init_cache(slots),
        jnp.zeros(counts, jnp.int32),
        jnp.zeros(anchors, shape.dtype),
        jnp.zeros(anchors, shape.dtype),
        jnp.zeros(counts, jnp.int32),
        queries,
    )


def with_queries(
    total: Float[Array, "B X N H"] | None, q: Float[Array, "B T N H"], valid: Int[Array, " B"]
) -> Float[Array, "B X N H"] | None:
    """The sum with each row's first `valid[b]` queries; None where nobody wants to know."""
    if total is None:
        return None
    read_BT11 = (jnp.arange(q.shape[1]) < valid[:, None])[..., None, None]
    return total + jnp.sum(jnp.where(read_BT11, q.astype(jnp.float32), 0.0), axis=1)[:, None]
