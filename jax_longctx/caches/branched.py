"""Rows over one context: its keys and values once for all of them, and what each row added.

A row's slots below `split` are the context's, in the context's own buffers. The slots from there on
are the row's own: the end of the context, copied, then its question and its answer. So the split
may lie where it suits: at a whole page, and before the last tokens that a method treats apart.

Attention over the shared slots takes the queries of all rows together, so that keys and values are
read once for all. Each row's own slots follow, and the parts merge by log-sum-exp. Nothing is
written to the shared slots.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches.append_only import AppendCache, write_rows
from jax_longctx.contract import Attended, LayerContext
from jax_longctx.sharding import Leaf, axes_field, axes_of
from pallas_kernels.common import merge
from pallas_kernels.decode_attention import decode_attention, shared_decode_attention
from pallas_kernels.plane import Plane

# The split is a multiple of this, which pages divide.
GRANULE = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BranchedCache:
    """Keys and values of rows that go on from one context; a store like `AppendCache`.

    Attributes:
      shared_k, shared_v: the context's; the slots below `split` count. None while the context has
        them.
      own_k, own_v: slot s of row b, from `split` on, is entry s - split.
      split: how many slots the rows share.
      length, position: of each row, as `AppendCache` has them.
    """

    shared_k: Float[Array, "1 K S H"] | Plane | None = axes_field(
        None, "kv_heads", "slots", None, in_place=True
    )
    shared_v: Float[Array, "1 K S H"] | Plane | None = axes_field(
        None, "kv_heads", "slots", None, in_place=True
    )
    own_k: Float[Array, "B K R H"] | Plane = axes_field(
        "batch", "kv_heads", "room", None, in_place=True
    )
    own_v: Float[Array, "B K R H"] | Plane = axes_field(
        "batch", "kv_heads", "room", None, in_place=True
    )
    split: Int[Array, " 1"] = axes_field(None)
    length: Int[Array, " B"] = axes_field("batch")
    position: Int[Array, " B"] = axes_field("batch")

    @property
    def store(self) -> "BranchedCache":
        """Itself, as `AppendCache.store`."""
        return self

    def appended(
        self, k: Float[Array, "B T K H"], v: Float[Array, "B T K H"], valid: Int[Array, " B"]
    ) -> "BranchedCache":
        """The cache with each row's first `valid[b]` tokens; a row with none is as it was."""
        at_B = self.length - self.split
        return dataclasses.replace(
            self,
            own_k=write_rows(self.own_k, k, at_B, valid),
            own_v=write_rows(self.own_v, v, at_B, valid),
            length=self.length + valid,
            position=self.position + valid,
        )

    def attended(self, q: Float[Array, "B 1 N H"], ctx: LayerContext) -> Attended:
        """Every row's (rotated) query against all its tokens."""
        assert self.shared_k is not None and self.shared_v is not None
        size = self.shared_k.shape[2]
        held = jnp.clip(self.split - ctx.seq_offset(size), 0, size)
        # The shards of the slots share the context; each has the rows' own slots whole.
        shared = ctx.seq_merge(
            *shared_decode_attention(q, self.shared_k, self.shared_v, held, scale=ctx.scale)
        )
        own_B = self.length - self.split
        return merge([shared, decode_attention(q, self.own_k, self.own_v, own_B, scale=ctx.scale)])


def split_of(length: int, own: int) -> int:
    """Where rows part from a context of `length` tokens, whose last `own` each has for itself."""
    return max(length - own, 0) // GRANULE * GRANULE


def _is_store(node: Any) -> bool:
    return isinstance(node, AppendCache | BranchedCache)


def _leaves_axes(tree: Any) -> Any:
    return axes_of(tree, lambda axes: Leaf(axes, in_place=False))


def branches(caches: Any, rows: int, room: int, split: int) -> Any:
    """Empty caches of rows over a context that has these caches (shapes will do).

    Every `AppendCache` becomes a `BranchedCache` with `room` slots for each row, without the shared
    arrays. Any other array gets `rows` rows.
    """

    def node(cache: Any, axes: Any) -> Any:
        if not isinstance(cache, AppendCache):
            at = axes.axes.index("batch")
            shape = (*cache.shape[:at], rows, *cache.shape[at + 1 :])
            return jnp.zeros(shape, cache.dtype)
        # Of stacked layers one axis more comes first.
        *layers, _, heads, _, width = cache.k.shape
        own_k, own_v = (
            jnp.zeros((*layers, rows, heads, room, width), cache.k.dtype) for _ in range(2)
        )
        length, position = (jnp.zeros((*layers, rows), jnp.int32) for _ in range(2))
        where = jnp.full((*layers, 1), split, jnp.int32)
        return BranchedCache(None, None, own_k, own_v, where, length, position)

    return jax.tree.map(node, caches, _leaves_axes(caches), is_leaf=_is_store)


def with_context(branched: Any, caches: Any) -> Any:
    """`branches` with the shared arrays of the context's caches."""

    def node(branch: Any, cache: Any) -> Any:
        if not isinstance(branch, BranchedCache):
            return branch
        return dataclasses.replace(branch, shared_k=cache.k, shared_v=cache.v)

    return jax.tree.map(node, branched, caches, is_leaf=_is_store)


def without_context(branched: Any, caches: Any) -> tuple[Any, Any]:
    """`with_context` undone: the rows' part, and the context's caches with the shared arrays.

    They were donated to a program and came back as other arrays, in the same buffers.
    """

    def alone(branch: Any) -> Any:
        if not isinstance(branch, BranchedCache):
            return branch
        return dataclasses.replace(branch, shared_k=None, shared_v=None)

    def node(cache: Any, branch: Any) -> Any:
        if not isinstance(cache, AppendCache):
            return cache
        return dataclasses.replace(cache, k=branch.shared_k, v=branch.shared_v)

    rows = jax.tree.map(alone, branched, is_leaf=_is_store)
    return rows, jax.tree.map(node, caches, branched, is_leaf=_is_store)


def branch_of(
    branched: BranchedCache, cache: AppendCache, row: Int[Array, ""], place: Int[Array, ""]
) -> BranchedCache:
    """The rows' part with that of row `row` of `cache`, a continued context, at `place`.

    Its tokens from the split on are copied; their slots must be as many as are own, at most.
    """

    def one(x: Array, axis: int) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, row, 1, axis)

    def put(old: Array, new: Array, axis: int) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new, place, axis)

    layers = branched.split.ndim - 1
    split = branched.split.reshape(-1)[0]

    def own(old: Any, x: Any) -> Array:
        size, slots = old.shape[-2], x.shape[-2]
        if slots < size:
            x = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, size - slots), (0, 0)])
        # A slice that would pass the end begins earlier; rolling brings its tokens to the front.
        start = jnp.minimum(split, x.shape[-2] - size)
        run = jax.lax.dynamic_slice_in_dim(one(x, layers), start, size, x.ndim - 2)
        return put(old, jnp.roll(run, start - split, axis=-2), layers)

    counts = {
        name: put(getattr(branched, name), one(getattr(cache, name), layers), layers)
        for name in ("length", "position")
    }
    own_k, own_v = own(branched.own_k, cache.k), own(branched.own_v, cache.v)
    return dataclasses.replace(branched, own_k=own_k, own_v=own_v, **counts)
