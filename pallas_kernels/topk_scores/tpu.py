"""The best keys of every query on TPUs: one Mosaic kernel, matmul and running lists, streaming.

Grid: (row of the batch, kv head, tile of query rows, block of keys), the keys innermost and in
order. A kv head's rows are its T G queries, so a block of keys serves the whole group. VMEM: two
buffers of a key block, the block's scores in float32, 1 MiB, and the sorted lists of the rows' best
values and slots, which stay in the output blocks while the keys pass by. Many rows lie along the
lanes and the keys down the sublanes; for a few rows it is the other way round.

A block's keys form classes: key i is in class i modulo the number of classes, which fills a few
vectors. One sweep over the scores keeps of every class and row the best score, its key, and the
second best score. Then, as long as any row's best class beats its list's worst entry, that key is
inserted. Block i of keys in random order improves a list count / i times, so all rows together need
one or two insertions. The block is done unless some class had its best inserted and its second best
could follow. Then the bests are removed from the scores, which are swept again, at most `count`
times. Neighbours are in different classes, so that is rare.

Ties: a key beats a list's entry if its score is higher by more than the tolerance, or if neither
score is and its slot is lower. NaN compares false with every score, so it is never kept.

The rows' bounds are prefetched scalars: blocks outside them are not fetched, and only blocks that
a bound cuts through are masked.

Bytes moved: k once for each tile of rows, 8 count for each query. Roofline: 2 T S N H operations,
or the bytes of k for few queries.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from pallas_kernels import tpu_common as tpu
from pallas_kernels.common import (
    AnyCache,
    Bounds,
    PerQuery,
    Queries,
    pack_rows,
    unpack_rows,
)

# Query rows of a tile; how many are few; scores that are computed and swept at once; and keys of a
# block of few rows, where the copy of the keys is the bound.
_ROWS = 512
_FEW_ROWS = 32
_SCORES = 2**18
_FEW_ROWS_KEYS = 4096
# Numbers of the classes' state, classes times rows: four vectors, whose updates do not wait for
# each other.
_STATE = 4096
_NO_SLOT = jnp.iinfo(jnp.int32).max

# For every class and row: the best score, the second best, and the best key's number within its
# class, -1 for none. Laid out as the scores are.
Classes = tuple[Array, Array, Array]


def topk_scores(
    q: Queries,
    k: AnyCache,
    bounds: Bounds,
    tolerance: PerQuery,
    *,
    count: int,
    blocks: tuple[int, int] | None = None,
    interpret: pltpu.InterpretParams | bool = False,
) -> tuple[Float[Array, "B T N C"], Int[Array, "B T N C"]]:
    """The `count` best slots of [start, stop) within [0, S]; see the public function.

    Args:
      blocks: query rows and keys of a block, multiples of 128; None takes the heuristic's.
      interpret: parameters of the interpreter that runs the kernel on other platforms.
    """
    batch, kv_heads, slots, head_dim = k.shape
    start, stop = bounds
    # Queries before heads: a tile of rows is a run of queries with all heads of the group.
    q_BKRH = pack_rows(q, kv_heads)
    rows = q_BKRH.shape[2]
    row_tile, block = blocks or _blocks(rows, slots)
    row_tile = min(row_tile, rows)
    first_B = start // block
    stop_block_B = jnp.where(stop > start, -(-stop // block), first_B)
    tiles = -(-rows // row_tile)
    axis = _key_axis(row_tile)
    # A list fills whole vectors.
    listed = (-(-count // tpu.SUBLANES[4]) * tpu.SUBLANES[4], tpu.LANES)[axis]
    scores, all_lists, some_lists = (
        (x, y) if axis == 0 else (y, x)
        for x, y in ((block, row_tile), (listed, rows), (listed, row_tile))
    )
    tolerance_BKR = pack_rows(tolerance, kv_heads)

    def visited(b, h, r, j, *scalars):
        _, _, first, stop_block = scalars
        return b, h, jnp.minimum(first[b] + j, jnp.maximum(stop_block[b] - 1, 0))

    def rows_of(*sizes: int) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, 1, *sizes), lambda b, h, r, j, *_: (b, h, r, 0) if axis else (b, h, 0, r)
        )

    q_spec = pl.BlockSpec((1, 1, row_tile, head_dim), lambda b, h, r, j, *_: (b, h, r, 0))
    tolerance_spec = rows_of(*((row_tile, 1) if axis else (1, row_tile)))
    lists = tpu.call(
        partial(_kernel, block=block, count=count),
        (start, stop, first_B, stop_block_B, tpu.first_row(k)),
        [
            (q_BKRH, q_spec),
            (tpu.as_stored(k), tpu.key_spec(head_dim, block, visited)),
            (jnp.expand_dims(tolerance_BKR, 2 + axis), tolerance_spec),
        ],
        [
            (jax.ShapeDtypeStruct((batch, kv_heads, *all_lists), dtype), rows_of(*some_lists))
            for dtype in (jnp.float32, jnp.int32)
        ],
        [pltpu.VMEM(scores, jnp.float32)],
        grid=((batch, kv_heads, tiles), (-(-slots // block),)),
        cost=(2 * q.size * slots, 0, k.size * k.dtype.itemsize * tiles),
        interpret=interpret,
        name="topk_scores",
    )
    lists_BKRC = (jnp.moveaxis(x, 2 + axis, 3)[..., :count] for x in lists)
    values, indices = (unpack_rows(x, q.shape[1]) for x in lists_BKRC)
    return jnp.where(values == 0, 0.0, values), indices  # -0 is 0


def _key_axis(row_tile: int) -> int:
    """Where the keys stand in scores, classes and lists: down the sublanes, or along the lanes."""
    return 1 if row_tile <= _FEW_ROWS else 0


def _padded(rows: int) -> int:
    """The rows that a tile takes up in whole vectors."""
    whole = tpu.SUBLANES[4] if _key_axis(rows) else tpu.LANES
    return -(-rows // whole) * whole


def _blocks(rows: int, slots: int) -> tuple[int, int]:
    """Query rows of a tile, cut evenly, and keys of a block."""
    if rows <= _FEW_ROWS:
        return rows, tpu.key_block(slots, _FEW_ROWS_KEYS)
    tiles = -(-rows // _ROWS)
    row_tile = _padded(-(-rows // tiles))
    return row_tile, tpu.key_block(slots, _SCORES // row_tile)


def _kernel(scalars, inputs, outputs, scratch, *, block: int, count: int) -> None:
    # [B] the first slot that counts, the one after the last, and the blocks of both.
    start, stop, first, stop_block, _ = scalars
    # [1, 1, R, H]; [1, 1, Z, H], or [1, 1, H, Z] for narrow heads; [1, 1, 1, R], or [1, 1, R, 1] if
    # the keys are along the lanes.
    q, k, tolerance = inputs
    # [1, 1, C, R] the lists, best first; [1, 1, R, C] if the keys are along the lanes.
    values, indices = outputs
    (scores,) = scratch  # [Z, R] or [R, Z]
    b, j = pl.program_id(0), pl.program_id(3)
    at = first[b] + j
    rows = q.shape[2]
    axis = _key_axis(rows)
    part = math.gcd(block, _SCORES // _padded(rows))
    empty = _no_classes(rows, part)
    lists = values.at[0, 0], indices.at[0, 0]
    search = _Search(axis, part, count, tolerance[0, 0], scores, *lists)

    @pl.when(j == 0)
    def _():
        values[...] = jnp.full_like(values, -jnp.inf)
        indices[...] = jnp.full_like(indices, -1)

    def match(cut: bool):
        def make(i: Array, classes: Classes) -> Classes:
            keys = pl.ds(pl.multiple_of(i * part, part), part)
            minor = tpu.slots_minor(q.shape[3])
            these = k[0, 0, :, keys] if minor else k[0, 0, keys]
            key_dim = 0 if minor else 1
            x = (
                tpu.matmul(q[0, 0], these, (1, key_dim))
                if axis
                else tpu.matmul(these, q[0, 0], (key_dim, 1))
            )
            if cut:
                slots = at * block + i * part + lax.broadcasted_iota(jnp.int32, x.shape, axis)
                x = jnp.where((slots >= start[b]) & (slots < stop[b]), x, -jnp.inf)
            scores[search.along(i * part, part)] = x
            return search.sweep(i, classes)

        def insert(classes: Classes) -> tuple[Classes, Array]:
            return classes, search.insert(classes, at * block)

        def again(carry: tuple[Classes, Array]) -> tuple[Classes, Array]:
            follow = partial(search.sweep, removed=carry[0][2])
            return insert(lax.fori_loop(0, block // part, follow, empty))

        classes = lax.fori_loop(0, block // part, make, empty)
        lax.while_loop(lambda carry: carry[1] > 0, again, insert(classes))

    cut = (at * block < start[b]) | ((at + 1) * block > stop[b])
    pl.when((at < stop_block[b]) & ~cut)(lambda: match(cut=False))
    pl.when((at < stop_block[b]) & cut)(lambda: match(cut=True))


def _no_classes(rows: int, part: int) -> Classes:
    axis = _key_axis(rows)
    number = min(max(_STATE // _padded(rows), (tpu.SUBLANES[4], tpu.LANES)[axis]), part)
    shape = (rows, number) if axis else (number, rows)
    nothing = jnp.full(shape, -jnp.inf)
    return nothing, nothing, jnp.full(shape, -1, jnp.int32)


@dataclass(frozen=True)
class _Search:
    """A block's scores, and the lists of the best that they are matched against."""

    axis: int  # of the keys, in all arrays
    part: int  # keys of a sweep
    count: int
    tolerance: Array
    scores: Any
    values: Any
    indices: Any

    def along(self, start: Array | int, size: int) -> tuple:
        """`size` entries of the key axis, from a multiple of `size` on, and all of the rows."""
        if not isinstance(start, int):
            start = pl.multiple_of(start, size)
        return (slice(None),) * self.axis + (pl.ds(start, size),)

    def sweep(self, i: Array, classes: Classes, removed: Array | None = None) -> Classes:
        """Take part i of the scores into the classes, less the keys of the numbers `removed`."""
        first, second, number = classes
        size = first.shape[self.axis]
        for c in range(self.part // size):
            keys = self.along(i * self.part + c * size, size)
            at = i * (self.part // size) + c
            x = self.scores[keys]
            if removed is not None:
                x = jnp.where(removed == at, -jnp.inf, x)
                self.scores[keys] = x
            # Strict, so that the earliest key wins; false for NaN.
            less = x - self.tolerance
            above_first, above_second = less > first, less > second
            second = jnp.where(above_second, jnp.where(above_first, first, x), second)
            first = jnp.where(above_first, x, first)
            number = jnp.where(above_first, at, number)
        return first, second, number

    def insert(self, classes: Classes, base: Array) -> Array:
        """Insert the classes' best keys that beat a row's worst entry; 1 if others may too, else 0.

        Args:
          base: the slot of the block's first key.
        """
        axis = self.axis
        first, second, number = classes
        keys = base + number * number.shape[axis] + _iota(number, axis)
        keys = jnp.where(number < 0, _NO_SLOT, keys)

        def best_of(left: Array) -> tuple[Array, Array, Array]:
            """Every row's first key that ties with its best, and whether any is to be inserted."""
            ties = left >= jnp.max(left, axis=axis, keepdims=True) - self.tolerance
            key = jnp.min(jnp.where(ties, keys, _NO_SLOT), axis=axis, keepdims=True)
            best = jnp.max(jnp.where(keys == key, left, -jnp.inf), axis=axis, keepdims=True)
            return best, key, _any(self.beats(best, key, *self.worst()))

        def insert_one(carry: tuple[Array, ...]) -> tuple[Array, ...]:
            left, best, key, _ = carry
            values, indices = self.values[...], self.indices[...]
            at = _iota(values, axis)
            # Behind the last entry that it does not beat; the others move down by one.
            beaten = self.beats(best, key, values, indices)
            place = jnp.max(jnp.where(beaten, 0, at + 1), axis=axis, keepdims=True)
            stay, here = at < place, at == place
            for ref, old, new in ((self.values, values, best), (self.indices, indices, key)):
                ref[...] = jnp.where(stay, old, jnp.where(here, new, pltpu.roll(old, 1, axis)))
            left = jnp.where(keys == key, -jnp.inf, left)
            return left, *best_of(left)

        lax.while_loop(lambda carry: carry[3] > 0, insert_one, (first, *best_of(first)))
        # A class may hold another of a row's best if its second could follow its first.
        value, slot = self.worst()
        above, ties = self.compare(first, value)
        listed = above | (ties & (keys <= slot))
        above, ties = self.compare(second, value)
        return _any((second > -jnp.inf) & (above | (ties & listed)))

    def compare(self, value: Array, other: Array) -> tuple[Array, Array]:
        """Whether a value is above the other, and whether they tie."""
        above = value - self.tolerance > other
        return above, ~above & ~(other - self.tolerance > value)

    def beats(self, value: Array, slot: Array, other: Array, other_slot: Array) -> Array:
        above, ties = self.compare(value, other)
        return above | (ties & (slot < other_slot))

    def worst(self) -> tuple[Array, Array]:
        at = (slice(None),) * self.axis + (slice(self.count - 1, self.count),)
        return self.values[at], self.indices[at]


def _iota(x: Array, axis: int) -> Array:
    return lax.broadcasted_iota(jnp.int32, x.shape, axis)


def _any(x: Array) -> Array:
    return jnp.max(jnp.where(x, 1.0, 0.0))
