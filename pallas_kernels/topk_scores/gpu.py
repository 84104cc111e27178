"""The best keys of every query on Hopper: a matmul that keeps running lists of the best blocks.

The keys are cut into blocks of 16. Only the `count` blocks of the largest maxima can hold one of
the `count` best keys, for each of them holds a key at least as good as all outside (ties: lower
block, lower slots). So the kernel keeps, for every query, the best blocks and their maxima; the
keys of those few are scored once more (`gpu_rescore.py`) and ranked exactly. Scores never leave
registers.

A tile of 128 keys is laid out block-minor in shared memory (column c is key c // 8 of block c % 8),
so that the maximum over a block is taken elementwise among the registers of one thread: no shuffle,
one operation a score. A lane of 8 keeps its own sorted list of `count` (maximum, block) pairs,
updated for every tile by compares and selects, without branches: the time does not depend on the
data. Sixteen copies of 8 keys each make a tile; only tiles that `start` or `stop` cuts are masked.

Grid: tiles of 128 query rows (the queries of one kv head's group, query-major), heads, and splits
of the keys where rows are few. Two warpgroups of 64 rows take turns on the tensor cores; a third
copies. Shared memory: queries 32 KiB, ring of 5 tiles 160 KiB. Registers: scores [64,128] and
lists.

Roofline: tensor cores, 2 T S N H operations, for many queries; the bytes of k for one. On an H200,
512 queries of 32 heads over 8 kv heads of 128, bfloat16, the 4 best, whole calls: of 8,192 keys
0.123 ms, 131,072 1.00 ms (550 TFLOP/s, where a matmul of 8192 cubed reaches 650 to 790), 1,048,576
7.5 ms (585). Of the 1.00 ms the kernel is 0.91 and rescoring 0.08. The lists' upkeep limits it: 1
best takes 0.89 ms, 8 best 1.28. With 4 tiles in flight instead of 5 the kernel took 1.02 ms; with a
compare and a select for the maximum (`jnp.maximum` would keep NaN) 0.1 ms more. Of up to
8 queries a kv head, as while decoding, `gpu_few.py` takes care.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import arith
from jaxtyping import Float, Int

from pallas_kernels import hopper
from pallas_kernels.topk_scores import gpu_few
from pallas_kernels.topk_scores.gpu_rescore import BLOCK, block_scores
from pallas_kernels.topk_scores.lists import insert
from pallas_kernels.tuning import configured, shape_class

# Keys of a step, and of a block whose best score alone is ranked. A thread of a wgmma holds columns
# c and c + 1 of every 8: with the keys of a tile laid out block-minor, the maximum over a block is
# taken among one thread's registers.
TILE = 128
_LANES = TILE // BLOCK
_NO_ID = np.int32(2**31 - 1)
# Each list entry takes 8 registers of every thread.
_MAX_COUNT = 8


@dataclass(frozen=True, kw_only=True)
class Config:
    """Warpgroups of 64 query rows, tiles of keys in flight."""

    warpgroups: int = 2
    stages: int = 5


# What `bench kernels --tune` tries, the default first.
CONFIGS = tuple(
    Config(warpgroups=n, stages=stages) for n, stages in ((2, 5), (1, 5), (1, 6), (2, 4), (3, 4))
)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What the kernel knows when it is compiled."""

    batch: int
    kv_heads: int
    row_tiles: int
    head_dim: int
    dtype: Any
    count: int
    splits: int
    config: Config
    interpreted: bool

    @property
    def tile_rows(self) -> int:
        return hopper.ROWS * self.config.warpgroups


def unsupported(q: Array, k: Array, count: int, tile_best: int | None) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    if tile_best is not None:
        return "it ranks keys, not tiles' best"
    if count > _MAX_COUNT:
        return f"{count} best, at most {_MAX_COUNT} lists fit the registers"
    if k.shape[2] % TILE:
        return f"{k.shape[2]} slots are not a multiple of {TILE}"
    return hopper.unsupported(q)


def topk_scores(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
    tolerance: Float[Array, "B T N"],
    *,
    count: int,
    tile_best: int | None = None,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T N C"], Int[Array, "B T N C"]]:
    """The `count` best slots of [start, stop) within [0, S]; see the door's docstring."""
    if tile_best is not None:
        raise NotImplementedError(f"topk_scores: {unsupported(q, k, count, tile_best)}")
    q_BKRH = hopper.pack_rows(q, k.shape[1])
    tolerance_BKR = hopper.pack_rows(tolerance[..., None], k.shape[1])[..., 0]
    rows = q_BKRH.shape[2]
    if rows <= gpu_few.QUERIES:
        found = gpu_few.best_keys(q_BKRH, k, start, stop, tolerance_BKR, count, interpret)
        values, slots = (hopper.unpack_rows(x, q.shape[1]) for x in found)
        return values, slots
    if config is None:
        heads = k.shape[0] * k.shape[1]
        shapes = dict(head_dim=k.shape[3], rows=rows, heads=heads, slots=k.shape[2], best=count)
        config = configured("topk_scores", shape_class(**shapes), CONFIGS)
    if rows <= hopper.ROWS:
        config = Config(warpgroups=1, stages=config.stages)
    row_tiles = pl.cdiv(rows, hopper.ROWS * config.warpgroups)
    blocks = k.shape[0] * k.shape[1] * row_tiles
    job = _Job(
        batch=k.shape[0],
        kv_heads=k.shape[1],
        row_tiles=row_tiles,
        head_dim=k.shape[3],
        dtype=k.dtype,
        count=count,
        # Where the rows leave processors idle, the keys are cut too.
        splits=min(max(hopper.processors() // blocks, 1), k.shape[2] // TILE),
        config=config,
        interpreted=interpret is not None,
    )
    values, ids = _best_blocks(q_BKRH, k, start, stop, tolerance_BKR, job, interpret)
    _, ids = _choose(values, ids, count, tolerance_BKR)
    values, slots = _best_keys(q_BKRH, k, start, stop, tolerance_BKR, ids, interpret)
    return hopper.unpack_rows(values, q.shape[1]), hopper.unpack_rows(slots, q.shape[1])


def _best_keys(
    q: Float[Array, "B K R H"],
    k: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
    tolerance: Float[Array, "B K R"],
    blocks: Int[Array, "B K R C"],
    interpret: Any,
) -> tuple[Float[Array, "B K R C"], Int[Array, "B K R C"]]:
    """The best keys of the listed blocks, as many as there are blocks; -1 lists none."""
    scores = block_scores(q, k, jnp.maximum(blocks, 0), interpret)
    slots = blocks[..., None] * BLOCK + jnp.arange(BLOCK)
    low, high = (x[:, None, None, None, None] for x in (start, stop))
    some = (blocks[..., None] >= 0) & (slots >= low) & (slots < high)
    flat = (*blocks.shape[:3], -1)
    # A score of NaN makes its slot absent.
    scores = jnp.where(some & (scores > -jnp.inf), scores, -jnp.inf)
    return _choose(scores.reshape(flat), slots.reshape(flat), blocks.shape[3], tolerance)


def _choose(
    values: Float[Array, "*R E"], ids: Int[Array, "*R E"], count: int, tolerance: Float[Array, "*R"]
) -> tuple[Float[Array, "*R C"], Int[Array, "*R C"]]:
    """The best entries in order, ties to the lowest id; -1 where there is nothing above -inf.

    As many passes as entries are asked for: one small kernel each, where a sort takes longer.
    """
    chosen, tolerances = [], jnp.broadcast_to(tolerance[..., None], values.shape)
    for _ in range(count):
        value, one, _ = lax.reduce(
            (values, ids, tolerances),
            (np.float32(-np.inf), _NO_ID, np.float32(0)),
            _better,
            (values.ndim - 1,),
        )
        chosen.append((value, jnp.where(value > -jnp.inf, one, -1)))
        values = jnp.where(ids == one[..., None], -jnp.inf, values)
    best, slots = (jnp.stack(x, axis=-1) for x in zip(*chosen, strict=True))
    return best, slots


def _better(one: tuple[Array, ...], other: tuple[Array, ...]) -> tuple[Array, ...]:
    (value, number, tolerance), (its_value, its_number, its_tolerance) = one, other
    # The same, but in what a reduction begins with.
    tolerance = jnp.maximum(tolerance, its_tolerance)
    above, below = value - tolerance > its_value, its_value - tolerance > value
    first = above | (~below & (number < its_number))
    return jnp.where(first, value, its_value), jnp.where(first, number, its_number), tolerance


def _best_blocks(
    q: Float[Array, "B K R H"],
    k: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
    tolerance: Float[Array, "B K R"],
    job: _Job,
    interpret: Any,
) -> tuple[Float[Array, "B K R E"], Int[Array, "B K R E"]]:
    """Lists of blocks for every query, their best scores and numbers, that hold the best."""
    rows, padded = q.shape[2], job.row_tiles * job.tile_rows
    spare = (0, 0), (0, 0), (0, padded - rows)
    q, tolerance = jnp.pad(q, (*spare, (0, 0))), jnp.pad(tolerance, spare)
    # Block-minor: one copy takes key i of each of a tile's 8 blocks.
    k = k.reshape(*k.shape[:2], -1, _LANES, BLOCK, job.head_dim)
    bounds = jnp.stack([start, stop], axis=1)
    shape = job.batch * job.kv_heads, job.splits, job.count, padded, _LANES
    stages, warpgroups = job.config.stages, job.config.warpgroups
    kernel = plgpu.kernel(
        functools.partial(_kernel, job=job),
        out_type=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        ),
        scratch_types=dict(
            q_tiles=hopper.tiled(warpgroups, hopper.ROWS, job.head_dim, dtype=job.dtype),
            ring=hopper.tiled(stages, TILE, job.head_dim, dtype=job.dtype),
            ready=plgpu.Barrier(num_arrivals=BLOCK, num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            loaded=plgpu.Barrier(num_barriers=warpgroups),
        ),
        grid=(job.row_tiles, job.batch * job.kv_heads, job.splits),
        grid_names=("rows", "head", "split"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    lists = kernel(bounds.astype(jnp.int32), q, k, tolerance)
    flat = job.batch, job.kv_heads, padded, -1
    values, ids = (jnp.moveaxis(x, 3, 1).reshape(flat)[:, :, :rows] for x in lists)
    return values, ids


def _kernel(
    bounds_ref,
    q_ref,
    k_ref,
    tolerance_ref,
    value_ref,
    block_ref,
    *,
    job: _Job,
    q_tiles,
    ring,
    **barriers,
) -> None:
    head, split = lax.axis_index("head"), lax.axis_index("split")
    warpgroup = lax.axis_index("warpgroup")
    more, fewer = hopper.registers(job.config.warpgroups)
    row = lax.div(head, job.kv_heads)
    where = row, lax.rem(head, job.kv_heads)
    low, high = bounds_ref[row, 0], bounds_ref[row, 1]
    first = lax.div(low, TILE)
    tiles = jnp.maximum(lax.div(high + (TILE - 1), TILE) - first, 0)
    share = lax.div(tiles + (job.splits - 1), job.splits)
    begin = first + jnp.minimum(split * share, tiles)
    end = first + jnp.minimum((split + 1) * share, tiles)

    @pl.when(warpgroup == job.config.warpgroups)
    def _copies():
        plgpu.set_max_registers(fewer, action="decrease")
        _fetch(k_ref.at[where], ring, barriers, begin, end, job)

    @pl.when(warpgroup < job.config.warpgroups)
    def _rank():
        plgpu.set_max_registers(more, action="increase")
        rows = pl.ds(lax.axis_index("rows") * job.tile_rows + warpgroup * hopper.ROWS, hopper.ROWS)
        q_tile, loaded = q_tiles.at[warpgroup], barriers["loaded"].at[warpgroup]
        plgpu.copy_gmem_to_smem(q_ref.at[(*where, rows)], q_tile, loaded)
        plgpu.barrier_wait(loaded)
        column = plgpu.Layout.WGMMA.reduce(1)
        tolerance = plgpu.load(tolerance_ref.at[(*where, rows)], layout=column, optimized=False)
        tolerance = lax.broadcast_in_dim(tolerance, (hopper.ROWS, _LANES), [0])
        lists = _best(q_tile, ring, barriers, begin, end, (low, high), tolerance, job)
        for j, (value, block) in enumerate(lists):
            value_ref[head, split, j, rows] = value
            block_ref[head, split, j, rows] = block


def _fetch(k_ref, ring, barriers, begin, end, job: _Job) -> None:
    @pl.loop(0, end - begin)
    def _step(i):
        slot = lax.rem(i, job.config.stages)

        @pl.when(i >= job.config.stages)
        def _():
            plgpu.barrier_wait(barriers["free"].at[slot])

        for key in range(BLOCK):
            plgpu.copy_gmem_to_smem(
                k_ref.at[begin + i, :, key],
                ring.at[slot, pl.ds(key * _LANES, _LANES)],
                barriers["ready"].at[slot],
            )

    hopper.drain(barriers["free"], end - begin, job.config.stages)


def _best(
    q_tile, ring, barriers, begin, end, bounds, tolerance: Array, job: _Job
) -> list[tuple[Array, Array]]:
    """The running lists after all tiles: per query and lane of a tile the best blocks."""
    shape = hopper.ROWS, _LANES
    lane = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
    empty = hopper.full(shape, -jnp.inf), hopper.full(shape, -1, jnp.int32)

    def step(i, lists):
        slot = lax.rem(i, job.config.stages)
        plgpu.barrier_wait(barriers["ready"].at[slot])
        s = hopper.product(q_tile, ring.at[slot].transpose((1, 0)))
        plgpu.barrier_arrive(barriers["free"].at[slot])
        first = (begin + i) * TILE
        inside = (first >= bounds[0]) & (first + TILE <= bounds[1])
        s = lax.cond(inside, lambda s: s, lambda s: _mask(s, first, bounds), s)
        best = _fold(s, job)
        return insert(lists, best, lane + (begin + i) * _LANES, tolerance)

    return lax.fori_loop(0, end - begin, step, [empty] * job.count)


def _mask(s: Array, first: Array, bounds: tuple[Array, Array]) -> Array:
    column = plgpu.broadcasted_iota(jnp.int32, s.shape, 1, layout=plgpu.Layout.WGMMA)
    # Column c is key c // 8 of block c % 8.
    slot = first + (column & (_LANES - 1)) * BLOCK + (column >> (_LANES.bit_length() - 1))
    return jnp.where((slot >= bounds[0]) & (slot < bounds[1]), s, -jnp.inf)


def _fold(s: Array, job: _Job) -> Array:
    """The best score of each of the tile's blocks, [64,8]; NaN loses to every number."""
    shape = hopper.ROWS, _LANES
    columns = [slice(first, first + _LANES) for first in range(0, TILE, _LANES)]
    if job.interpreted:
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
