"""The best keys of every query on Hopper: a matmul that keeps running lists of the best.

Many queries. The keys are cut into blocks of 16. Only the `count` blocks with the largest maxima
can hold one of the `count` best keys, since each of them holds a key that is at least as good as
all keys of the other blocks (ties: lower block, lower slots). So a first kernel keeps, for every
query, the best blocks and their maxima. A second kernel scores the keys of these blocks again, and
they are ranked exactly (`gpu_rescore`). Scores stay in registers.

A tile of 128 keys is laid out block-minor in shared memory (column c is key c // 8 of block c % 8).
So the maximum over a block is taken elementwise among the registers of one thread: no shuffle, one
operation a score. Every place of the resulting [64,8] keeps its own sorted list of `count`
(maximum, block) pairs. Every tile updates it by compares and selects, without branches, so the time
does not depend on the data. After the last tile a row's 8 lists become one, in registers. Sixteen
copies of 8 keys each make a tile. Only tiles that `start` or `stop` cuts are masked.

Grid: tiles of 128 query rows (the queries of one kv head's group, query-major), heads, and splits
of the keys where rows are few. Two warpgroups of 64 rows take turns on the tensor cores; a third
copies. Shared memory: queries 32 KiB, ring of 5 tiles 160 KiB. Registers: scores [64,128] and
lists.

A few queries, as in decoding (up to 8 a kv head). One query would use only G of the 64 rows of a
wgmma, so here the queries are its 8 columns, and the keys its rows. A thread holds a few scores of
every tile, and each place of the [64,8] result keeps its own sorted list of the `count` best
(score, slot) so far, so no key is scored twice. When a block of threads has seen all its keys, it
merges its lists over the 64 rows, in `count` rounds: among the entries that tie with the best, the
one with the lowest slot leaves its list. A second launch ranks the results of the splits
(`gpu_ties`). Grid: heads, and splits of the keys over the processors. One warpgroup copies tiles of
128 keys as they lie, the other computes. Shared memory: queries 2 KiB, ring of 5 tiles 160 KiB.

Roofline: tensor cores, 2 T S N H operations, for many queries; the bytes of k for one. On an H200,
512 queries of 32 heads over 8 kv heads of 128, bfloat16, the 4 best, whole calls: of 8,192 keys
0.123 ms, 131,072 1.00 ms (550 TFLOP/s, where a matmul of 8192 cubed reaches 650 to 790), 1,048,576
7.5 ms (585). Of the 1.00 ms the first kernel takes 0.91. Updating the lists is the bound: 1 best
takes 0.89 ms, 8 best 1.28. With the kernel for a few queries a step of ReAttention over 131,072
tokens, 8B shape, takes 7.89 ms, with the search for many in its place 8.59.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import FragmentedArray
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Float, Int

from pallas_kernels import hopper
from pallas_kernels.common import Bounds, Cache, PerQuery, Queries, pack_rows, unpack_rows
from pallas_kernels.quantised import AnyStored
from pallas_kernels.topk_scores import gpu_ties
from pallas_kernels.topk_scores.gpu_rescore import (
    BLOCK,
    LAST,
    Lists,
    Ranked,
    Rows,
    Tolerances,
    best_keys,
)

# Keys of a tile, of whose blocks the best score alone is ranked. A thread of a wgmma holds columns
# c and c + 1 of every 8: with the keys of a tile laid out block-minor, the maximum over a block is
# taken among one thread's registers.
_TILE = 128
_LANES = _TILE // BLOCK
# Each list entry takes 8 registers of every thread.
_MAX_COUNT = 8
# Warpgroups of 64 query rows where there are more rows than that, and tiles of keys in flight.
_WARPGROUPS, _STAGES = 2, 5
# Queries of a kv head that are few: the columns of the smallest wgmma.
_QUERIES = 8
_HALVES = _TILE // hopper.ROWS
# Elementwise operations of the compiler's own are private to JAX (as of 0.11.2).
_POINTWISE = hasattr(FragmentedArray, "_pointwise")


def unsupported(q: Array, k: AnyStored, count: int) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    if count > _MAX_COUNT:
        return f"{count} best, at most {_MAX_COUNT} lists fit the registers"
    if k.shape[2] % _TILE:
        return f"{k.shape[2]} slots are not a multiple of {_TILE}"
    return hopper.unsupported(q)


def topk_scores(
    q: Queries,
    k: Cache,
    bounds: Bounds,
    tolerance: PerQuery,
    *,
    count: int,
    interpret: Any = None,
) -> tuple[Float[Array, "B T N C"], Int[Array, "B T N C"]]:
    """The `count` best slots of [start, stop) within [0, S]; see the public function."""
    q_BKRH = pack_rows(q, k.shape[1])
    tolerance_BKR = pack_rows(tolerance[..., None], k.shape[1])[..., 0]
    # Apart, as they come from the program: to join them would be a launch.
    start, stop = bounds
    given = q_BKRH, k, (start.astype(jnp.int32), stop.astype(jnp.int32)), tolerance_BKR
    if q_BKRH.shape[2] <= _QUERIES:
        values, slots = _best_of_few(*given, count, interpret)
    else:
        values, slots = best_keys(*given, _best_blocks(*given, count, interpret), interpret)
    return unpack_rows(values, q.shape[1]), unpack_rows(slots, q.shape[1])


def _splits(k: Cache, row_tiles: int) -> int:
    """Parts of the keys: as many as give the processors work that the rows leave idle."""
    heads = k.shape[0] * k.shape[1]
    return min(max(hopper.processors() // (heads * row_tiles), 1), k.shape[2] // _TILE)


def _choose(
    values: Float[Array, "*R E"], ids: Int[Array, "*R E"], count: int, tolerance: Float[Array, "*R"]
) -> Ranked:
    """The best entries in order, ties to the lowest id; -1 where there is nothing above -inf.

    For few rows: it takes `count` passes of one small kernel each; a sort takes longer.
    """
    chosen, tolerances = [], jnp.broadcast_to(tolerance[..., None], values.shape)
    for _ in range(count):
        value, one, _ = lax.reduce(
            (values, ids, tolerances),
            (np.float32(-np.inf), LAST, np.float32(0)),
            _better,
            (values.ndim - 1,),
        )
        chosen.append((value, jnp.where(value > -jnp.inf, one, -1)))
        values = jnp.where(ids == one[..., None], -jnp.inf, values)
    best, slots = (jnp.stack(x, axis=-1) for x in zip(*chosen, strict=True))
    return best, slots


def _better(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
    (value, number, tolerance), (its_value, its_number, its_tolerance) = one, other
    # Both are equal, except that a reduction begins with 0.
    tolerance = jnp.maximum(tolerance, its_tolerance)
    above, below = value - tolerance > its_value, its_value - tolerance > value
    first = above | (~below & (number < its_number))
    return jnp.where(first, value, its_value), jnp.where(first, number, its_number), tolerance


def _best_blocks(
    q: Rows, k: Cache, bounds: Bounds, tolerance: Tolerances, count: int, interpret: Any
) -> Int[Array, "B K C R"]:
    """The numbers of the blocks that hold every query's best keys, then -1."""
    batch, kv_heads, rows, head_dim = q.shape
    warpgroups = _WARPGROUPS if rows > hopper.ROWS else 1
    row_tiles = pl.cdiv(rows, hopper.ROWS * warpgroups)
    padded, splits = row_tiles * hopper.ROWS * warpgroups, _splits(k, row_tiles)
    spare = (0, 0), (0, 0), (0, padded - rows)
    q = jnp.pad(q, (*spare, (0, 0)))
    # Block-minor: one copy takes key i of each of a tile's 8 blocks.
    k = k.reshape(batch, kv_heads, -1, _LANES, BLOCK, head_dim)
    kernel = plgpu.kernel(
        functools.partial(_blocks_kernel, count=count, plain_max=interpret is not None),
        out_type=hopper.outputs((batch * kv_heads, splits, count, padded), jnp.float32, jnp.int32),
        scratch_types=dict(
            q_tiles=hopper.tiled(warpgroups, hopper.ROWS, head_dim, dtype=k.dtype),
            ring=hopper.tiled(_STAGES, _TILE, head_dim, dtype=k.dtype),
            ready=plgpu.Barrier(num_arrivals=BLOCK, num_barriers=_STAGES),
            free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=_STAGES),
            loaded=plgpu.Barrier(num_barriers=warpgroups),
        ),
        grid=(row_tiles, batch * kv_heads, splits),
        grid_names=("rows", "head", "split"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="topk_blocks",
    )
    shape = batch, kv_heads, -1, padded
    found = kernel(*bounds, q, k, jnp.pad(tolerance, spare))
    values, ids = (x.reshape(shape)[..., :rows] for x in found)
    if splits == 1:
        return ids
    # [B,K,R,C] of the splits' lists.
    values, ids = (jnp.swapaxes(x, 2, 3) for x in (values, ids))
    return jnp.swapaxes(_choose(values, ids, count, tolerance)[1], 2, 3)


def _blocks_kernel(*refs, count: int, plain_max: bool, q_tiles, ring, **barriers) -> None:
    *bound_refs, q_ref, k_ref, tolerance_ref, values_ref, ids_ref = refs
    head, split = lax.axis_index("head"), lax.axis_index("split")
    warpgroup, warpgroups = lax.axis_index("warpgroup"), q_tiles.shape[0]
    more, fewer = hopper.registers(warpgroups)
    row = lax.div(head, k_ref.shape[1])
    where = row, lax.rem(head, k_ref.shape[1])
    bounds, begin, end = _run_of_split(bound_refs, row, split)

    @pl.when(warpgroup == warpgroups)
    def _copies():
        plgpu.set_max_registers(fewer, action="decrease")
        keys = k_ref.at[where]

        def copy(i, slot):
            for key in range(BLOCK):
                plgpu.copy_gmem_to_smem(
                    keys.at[begin + i, :, key],
                    ring.at[slot, pl.ds(key * _LANES, _LANES)],
                    barriers["ready"].at[slot],
                )

        hopper.copy_ahead(end - begin, barriers["free"], _STAGES, copy)

    @pl.when(warpgroup < warpgroups)
    def _rank():
        plgpu.set_max_registers(more, action="increase")
        first = lax.axis_index("rows") * (warpgroups * hopper.ROWS) + warpgroup * hopper.ROWS
        rows = pl.ds(first, hopper.ROWS)
        q_tile, loaded = q_tiles.at[warpgroup], barriers["loaded"].at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[(*where, rows)], q_tile, loaded)
        plgpu.barrier_wait(loaded)
        column = plgpu.Layout.WGMMA.reduce(1)
        tolerance = plgpu.load(tolerance_ref.at[(*where, rows)], layout=column, optimized=False)
        tolerance = lax.broadcast_in_dim(tolerance, (hopper.ROWS, _LANES), [0])
        lane = hopper.iota((hopper.ROWS, _LANES), 1)
        empty = hopper.full(lane.shape, -jnp.inf), hopper.full(lane.shape, -1, jnp.int32)

        def step(i, lists):
            slot = lax.rem(i, _STAGES)
            plgpu.barrier_wait(barriers["ready"].at[slot])
            s = hopper.product(q_tile, ring.at[slot].transpose((1, 0)))
            plgpu.barrier_arrive(barriers["free"].at[slot])
            first = (begin + i) * _TILE
            inside = (first >= bounds[0]) & (first + _TILE <= bounds[1])
            s = lax.cond(inside, lambda s: s, lambda s: _mask(s, first, bounds), s)
            return _insert(lists, _fold(s, plain_max), lane + (begin + i) * _LANES, tolerance)

        # Per query and lane of a tile the best blocks.
        lists = lax.fori_loop(0, end - begin, step, [empty] * count)
        for j, found in enumerate(_merged(lists, tolerance, axis=1)):
            for ref, x in zip((values_ref, ids_ref), found, strict=True):
                ref[head, split, j, rows] = x


def _run_of_split(bound_refs, row, split) -> tuple[tuple[Array, Array], Array, Array]:
    """The row's bounds, and the split's first tile of keys and the one after its last."""
    splits = lax.axis_size("split")
    low, high = (ref[row] for ref in bound_refs)
    first = lax.div(low, _TILE)
    tiles = jnp.maximum(lax.div(high + (_TILE - 1), _TILE) - first, 0)
    share = lax.div(tiles + (splits - 1), splits)
    begin = first + jnp.minimum(split * share, tiles)
    return (low, high), begin, first + jnp.minimum((split + 1) * share, tiles)


def _mask(s: Array, first: Array, bounds: tuple[Array, Array]) -> Array:
    column = hopper.iota(s.shape, 1)
    # Column c is key c // 8 of block c % 8.
    slot = first + (column & (_LANES - 1)) * BLOCK + (column >> (_LANES.bit_length() - 1))
    return jnp.where((slot >= bounds[0]) & (slot < bounds[1]), s, -jnp.inf)


def _fold(s: Array, plain: bool) -> Array:
    """The best score of each of the tile's blocks, [64,8]; NaN loses to every number."""
    shape = hopper.ROWS, _LANES
    columns = [slice(first, first + _LANES) for first in range(0, _TILE, _LANES)]
    if plain or not _POINTWISE:
        best = hopper.full(shape, -jnp.inf)
        for column in columns:
            best = jnp.where(s[:, column] > best, s[:, column], best)
        return best

    # `jnp.maximum` keeps NaN, and a compare and a select are two operations: PTX's max is neither.
    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct(shape, jnp.float32, layout=plgpu.Layout.WGMMA),
    )
    def fold(_, scores):
        parts = [scores[:, column] for column in columns]
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [a._pointwise(arith.maxnumf, b) for a, b in pairs]
        return parts[0]

    best = fold(s)  # pyright: ignore[reportCallIssue]
    return jnp.where(best > -jnp.inf, best, -jnp.inf)


def _insert(lists: Lists, value: Array, number: Array, tolerance: Array) -> Lists:
    """Insert (value, number) after the last entry that it does not beat by the tolerance.

    Every place of an array in registers has its own sorted list. Only compares and selects are
    used, so the time does not depend on the data. NaN is never inserted.
    """
    value_less = value - tolerance
    better = [value_less > listed for listed, _ in lists]
    # A listed value may be above the one before it, by at most the tolerance.
    for j in reversed(range(len(lists) - 1)):
        better[j] &= better[j + 1]
    result = []
    for j, (listed, its_number) in enumerate(lists):
        new_value, new_number = value, number
        if j:
            new_value = jnp.where(better[j - 1], lists[j - 1][0], value)
            new_number = jnp.where(better[j - 1], lists[j - 1][1], number)
        new = (new_value, listed), (new_number, its_number)
        result.append(tuple(jnp.where(better[j], x, old) for x, old in new))
    return result


def _best_of_few(
    q: Rows, k: Cache, bounds: Bounds, tolerance: Tolerances, count: int, interpret: Any
) -> Ranked:
    """Scores and slots of the `count` best keys of every query, best first; R at most 8.

    As `topk_scores` has it: ties to the lowest slot, -inf and -1 where there are fewer, NaN absent.
    """
    batch, kv_heads, rows, head_dim = q.shape
    heads, splits = batch * kv_heads, _splits(k, 1)
    spare = (0, 0), (0, 0), (0, _QUERIES - rows), (0, 0)
    q, tolerance = jnp.pad(q, spare).reshape(heads, _QUERIES, head_dim), tolerance.reshape(-1, rows)
    listed = splits * count
    shape = heads, gpu_ties.room(listed, _QUERIES), _QUERIES
    kernel = plgpu.kernel(
        functools.partial(_few_kernel, count=count),
        out_type=hopper.outputs(shape, jnp.float32, jnp.int32),
        scratch_types=dict(
            queries=hopper.tiled(_QUERIES, head_dim, dtype=q.dtype),
            ring=hopper.tiled(_STAGES, _TILE, head_dim, dtype=k.dtype),
            ready=plgpu.Barrier(num_barriers=_STAGES),
            free=plgpu.Barrier(num_barriers=_STAGES),
            loaded=plgpu.Barrier(),
        ),
        grid=(heads, splits),
        grid_names=("head", "split"),
        num_threads=2,
        thread_name="role",
        interpret=interpret,
        kernel_name="topk_of_few",
    )
    listed_values, listed_slots = kernel(*bounds, q, k, tolerance)
    how = listed, count, tolerance, interpret
    values, slots = gpu_ties.ranked_lists(listed_values, listed_slots, *how)
    shape = batch, kv_heads, rows, count
    return values.reshape(shape), slots.reshape(shape)


def _few_kernel(*refs, count: int, queries, ring, **barriers) -> None:
    *bound_refs, q_ref, k_ref, tolerance_ref, values_ref, slots_ref = refs
    head, split = lax.axis_index("head"), lax.axis_index("split")
    role = lax.axis_index("role")
    more, fewer = hopper.registers(1)
    row = lax.div(head, k_ref.shape[1])
    bounds, begin, end = _run_of_split(bound_refs, row, split)
    ready, free, loaded = (barriers[name] for name in ("ready", "free", "loaded"))

    @pl.when(role == 1)
    def _copies():
        plgpu.set_max_registers(fewer, action="decrease")
        keys = k_ref.at[row, lax.rem(head, k_ref.shape[1])]

        def copy(i, place):
            tile = keys.at[pl.ds((begin + i) * _TILE, _TILE)]
            plgpu.copy_gmem_to_smem(tile, ring.at[place], ready.at[place])

        hopper.copy_ahead(end - begin, free, _STAGES, copy)

    @pl.when(role == 0)
    def _rank():
        plgpu.set_max_registers(more, action="increase")
        plgpu.copy_gmem_to_smem(q_ref.at[head], queries, loaded)
        plgpu.barrier_wait(loaded)
        shape = hopper.ROWS, _QUERIES
        key, query = (hopper.iota(shape, axis) for axis in (0, 1))
        tolerance = hopper.full(shape, 0.0)
        for i in range(tolerance_ref.shape[1]):
            tolerance = jnp.where(query == i, tolerance_ref[head, i], tolerance)
        empty = hopper.full(shape, -jnp.inf), hopper.full(shape, -1, jnp.int32)

        def step(i, lists):
            place = lax.rem(i, _STAGES)
            plgpu.barrier_wait(ready.at[place])
            halves = [pl.ds(half * hopper.ROWS, hopper.ROWS) for half in range(_HALVES)]
            scores = [hopper.product(ring.at[place, x], queries.transpose((1, 0))) for x in halves]
            plgpu.barrier_arrive(free.at[place])
            for half, score in enumerate(scores):
                slot = key + (begin + i) * _TILE + half * hopper.ROWS
                score = jnp.where((slot >= bounds[0]) & (slot < bounds[1]), score, -jnp.inf)
                lists = _insert(lists, score, slot, tolerance)
            return lists

        # Each place's best scores among the split's tiles, and their slots.
        lists = lax.fori_loop(0, end - begin, step, [empty] * count)
        for j, found in enumerate(_merged(lists, tolerance, axis=0)):
            for ref, x in zip((values_ref, slots_ref), found, strict=True):
                hopper.store_little(x, ref.at[head, split * count + j])


def _merged(lists: Lists, tolerance: Array, axis: int) -> Lists:
    """The best of the lists of all places along an axis, in order, as many as a list has.

    [8] scores and numbers each for axis 0, [64] for axis 1.
    """
    shape = hopper.ROWS, _QUERIES
    merged = []
    for left in reversed(range(len(lists))):
        value, number = lists[0]
        best = lax.broadcast_in_dim(value.max(axis=axis), shape, [1 - axis])
        lowest = jnp.where(value >= best - tolerance, number, LAST).min(axis=axis)
        gone = number == lax.broadcast_in_dim(lowest, shape, [1 - axis])
        its_value = jnp.where(gone, value, -jnp.inf).max(axis=axis)
        merged.append((its_value, jnp.where(its_value > -jnp.inf, lowest, -1)))
        lists = [
            tuple(jnp.where(gone, x, y) for x, y in zip(lists[j + 1], lists[j], strict=True))
            for j in range(left)
        ]
    return merged
