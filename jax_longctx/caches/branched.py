"""Rows over one context: its keys and values once for all of them, and what each row added.

A row's slots below `split` are the context's, in the context's own buffers. The slots from there on
are the row's own: the end of the context, copied, then its question and its answer. So the split
may lie where it suits: at a whole page, and before the last tokens that a method treats apart.

Attention over the shared slots takes the queries of all rows together, so that keys and values are
read once for all. Each row's own slots follow, and the parts merge by log-sum-exp. Nothing is
written to the shared slots.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches.append_only import AppendCache, Store
from jax_longctx.caches.paged import Ways, attended
from jax_longctx.contract import QKV, Attended, LayerContext, SlotLayout
from jax_longctx.sharding import Leaf, axes_field, described, leaf_axes
from pallas_kernels.common import AnyCache, merge
from pallas_kernels.decode_attention import decode_attention, shared_decode_attention
from pallas_kernels.plane import part_of
from pallas_kernels.sparse_decode_attention import Shared


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeysValues:
    """The keys and values, [1, K, S, H], of a context's `AppendCache`, which rows share."""

    k: AnyCache = axes_field("batch", "kv_heads", "slots", None, in_place=True)
    v: AnyCache = axes_field("batch", "kv_heads", "slots", None, in_place=True)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Branched:
    """A part of a cache whose rows go on from one context.

    Attributes:
      shared: the context's, of one row. Entries below the split count. None while the context has
        it.
      own: the rows', of the entries from the split on: entry s is their entry s - split.
      split_at: how many entries (slots, or pages) the rows share. Nothing writes it.
    """

    shared: Any
    own: Any
    split_at: Any = axes_field(None, in_place=True)

    @property
    def split(self) -> Int[Array, " 1"]:
        """How many entries the rows share."""
        return part_of(self.split_at)

    def with_own(self, own: Any) -> Any:
        """The same with other entries of the rows' own."""
        return dataclasses.replace(self, own=own)

    # Of a context's part, whose arrays all have entries unless a class says otherwise: what rows
    # share, the part with that, and the part as a row's own from `split` on.

    def of_part(self, part: Any) -> Any:
        return part

    def into_part(self, part: Any) -> Any:
        return self.shared

    def beyond(self, part: Any, split: Any) -> Any:
        return part


# What a part becomes whose rows share its first entries, by its class.
_BRANCHED: dict[type, type[Branched]] = {}


def parting[T: type](kind: type) -> Callable[[T], T]:
    """Marks a `Branched` as what `kind` becomes, a dataclass of arrays with slots or pages."""

    def mark(branched: T) -> T:
        _BRANCHED[kind] = branched
        return branched

    return mark


@parting(AppendCache)
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BranchedStore(Branched, Store):
    """An `AppendCache` of rows that go on from one context, whose part is `KeysValues`."""

    def of_part(self, part: AppendCache) -> KeysValues:
        return KeysValues(part.k, part.v)

    def into_part(self, part: AppendCache) -> AppendCache:
        return dataclasses.replace(part, k=self.shared.k, v=self.shared.v)

    def beyond(self, part: AppendCache, split: Any) -> AppendCache:
        return dataclasses.replace(part, length=part.length - split)

    @property
    def length(self) -> Int[Array, " B"]:
        """The slots of each row, shared and own."""
        return self.own.length + self.split

    @property
    def position(self) -> Int[Array, " B"]:
        return self.own.position

    @property
    def sizes(self) -> tuple[int, ...]:
        """Those that a cache for these rows would have, at most."""
        rows, heads, room, width = self.own.sizes
        return rows, heads, self.shared.k.shape[2] + room, width

    def append(
        self,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        valid: Int[Array, " B"],
        ctx: LayerContext,
    ) -> "BranchedStore":
        return self.with_own(self.own.append(k, v, valid, ctx))

    def attend(self, new: QKV, valid: Int[Array, " B"], ctx: LayerContext) -> tuple[Attended, Any]:
        """One new token of each row."""
        q, k, v = new
        store, scale = self.append(k, v, valid, ctx), ctx.scale
        shared, own = store.shared, store.own
        held = ctx.slots(shared.k.shape[2]).below(store.split)
        parts = [
            shared_decode_attention(q, shared.k, shared.v, held, scale=scale),
            decode_attention(q, own.k, own.v, own.held(ctx), scale=scale),
        ]
        return ctx.seq_merge(*merge(parts)), store

    def attend_pages(
        self, q: Float[Array, "B 1 N H"], ways: Ways, ctx: LayerContext, prior: Any = None
    ) -> tuple[Array, ...]:
        k, v, split = self.shared.k, self.shared.v, self.split
        if ctx.seq_size > 1:
            split = ctx.slots(k.shape[2]).below(split)
        buffers = self.own.k, self.own.v
        return attended(q, buffers, ways, ctx, prior, Shared(k, v, split))


def split_of(length: int, own: int, layout: SlotLayout) -> int:
    """Where rows part from a context of `length` tokens, whose last `own` each has for itself.

    Behind the split a shard's slots are those of the rows' own entries, and no page is cut.
    """
    return max(length - own, 0) // layout.turn * layout.turn


def _parts(node: Any) -> bool:
    return isinstance(node, (*_BRANCHED, Branched))


def _slots(caches: Any) -> int:
    """Slots of the first array that has some."""
    arrays = zip(jax.tree.leaves(caches), leaf_axes(caches), strict=True)
    return next(x.shape[axes.index("slots")] for x, axes in arrays if "slots" in axes)


def branches(caches: Any, rows: int, room: int, split: Any) -> Any:
    """Empty caches of rows over a context that has these caches (shapes will do).

    Every store, and all digests of pages, become `Branched` with `room` slots for each row, without
    the shared arrays. Any other array gets `rows` rows.
    """
    slots = _slots(caches)

    def array(leaf: Any, about: Leaf) -> Array:
        shape = list(leaf.shape)
        for axis, name in enumerate(about.axes):
            if name == "batch":
                shape[axis] = rows
            elif name in ("slots", "pages"):
                shape[axis] = room * shape[axis] // slots
        return jnp.zeros(shape, leaf.dtype)

    def node(part: Any, axes: Any) -> Any:
        if not _parts(part):
            return array(part, axes)
        own = jax.tree.map(array, part, axes)
        first, about = jax.tree.leaves(part)[0], jax.tree.leaves(axes)[0]
        entries = first.shape[next(i for i, x in enumerate(about.axes) if x in ("slots", "pages"))]
        layers = first.shape[: about.axes.index("batch")]
        made = _BRANCHED[type(part)]
        return made(None, own, jnp.full((*layers, 1), split // (slots // entries), jnp.int32))

    return jax.tree.map(node, caches, described(caches), is_leaf=_parts)


def with_context(branched: Any, caches: Any) -> Any:
    """`branches` with the shared arrays of the context's caches."""

    def node(branch: Any, part: Any) -> Any:
        if not _parts(branch):
            return branch
        return dataclasses.replace(branch, shared=branch.of_part(part))

    return jax.tree.map(node, branched, caches, is_leaf=_parts)


def without_context(branched: Any, caches: Any) -> tuple[Any, Any]:
    """`with_context` undone: the rows' part, and the context's caches.

    The shared arrays were donated to a program and came back as others, in the same buffers. What
    rows do not share is as it was in `caches`.
    """

    def alone(branch: Any) -> Any:
        return dataclasses.replace(branch, shared=None) if _parts(branch) else branch

    def node(part: Any, branch: Any) -> Any:
        return branch.into_part(part) if _parts(part) else part

    rows = jax.tree.map(alone, branched, is_leaf=_parts)
    return rows, jax.tree.map(node, caches, branched, is_leaf=_parts)


def branch_of(
    branch: Branched,
    axes: Any,
    part: Any,
    row: Int[Array, ""],
    place: Int[Array, ""],
    layout: SlotLayout,
) -> Branched:
    """The rows with row `row` of `part` copied, beyond the split, to `place`.

    The entries from the split on are copied, as many as there is room for. `axes` has the logical
    axes of each array of `branch`, as `Leaf`s.
    """
    split = jnp.asarray(branch.split_at).reshape(-1)[0]

    def put(old: Array, about: Leaf, new: Array) -> Array:
        batch = about.axes.index("batch")
        new = jax.lax.dynamic_slice_in_dim(new, row, 1, batch)
        for axis, name in enumerate(about.axes):
            if name in ("slots", "pages"):
                new = layout.from_entry(new, axis, split, old.shape[axis])
        return jax.lax.dynamic_update_slice_in_dim(old, new, place, batch)

    return branch.with_own(jax.tree.map(put, branch.own, axes.own, branch.beyond(part, split)))
