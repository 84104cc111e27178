"""The best keys of a few queries on Hopper, as while decoding: keys are the rows of the matmul.

With one query a kv head has G rows of the 64 that a wgmma takes, so here the queries are its
columns, 8 of them, and keys its rows. A thread then holds a few scores of every tile, and each
place of the [64,8] result keeps its own sorted list of the `count` best (score, slot) so far:
with no second look at any key. When all keys of a block of threads are through, its lists are
merged over the 64 rows: of those that tie with the best that stands first in any, the lowest slot
leaves its list, `count` times. What the splits found is ranked by comparing each with each.

Grid: heads, and splits of the keys over the processors. One warpgroup copies tiles of 128 keys as
they lie, the other computes. Shared memory: queries 2 KiB, ring of 5 tiles 160 KiB.

Roofline: the bytes of k. Checked on an H200, not timed there yet; in its stead `gpu.py`'s search
read the 268 MB of 8 heads and 131,072 keys in 63 us, and took 25 more to choose blocks, score their
keys once more and rank them, in 15 launches.
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
from jaxtyping import Float, Int

from pallas_kernels import hopper
from pallas_kernels.topk_scores.lists import insert

# Queries of a kv head at most: the columns of the smallest wgmma.
QUERIES = 8
# Keys of a copy, and of a product.
TILE = 128
_HALVES = TILE // hopper.ROWS
_STAGES = 5
_LAST = np.int32(2**31 - 1)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What the kernel knows when it is compiled."""

    kv_heads: int
    count: int
    splits: int


def best_keys(
    q: Float[Array, "B K R H"],
    k: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
    tolerance: Float[Array, "B K R"],
    count: int,
    interpret: Any = None,
) -> tuple[Float[Array, "B K R C"], Int[Array, "B K R C"]]:
    """Scores and slots of the `count` best keys of every query, best first; R at most 8.

    As the door has it: ties to the lowest slot, -inf and -1 where there are fewer, NaN absent.
    """
    batch, kv_heads, rows, head_dim = q.shape
    heads = batch * kv_heads
    splits = min(max(hopper.processors() // heads, 1), k.shape[2] // TILE)
    spare = (0, 0), (0, 0), (0, QUERIES - rows)
    q = jnp.pad(q, (*spare, (0, 0))).reshape(heads, QUERIES, head_dim)
    tolerances = jnp.pad(tolerance, spare).reshape(heads, QUERIES)
    shape = heads, splits, count, QUERIES
    kernel = plgpu.kernel(
        functools.partial(_kernel, job=_Job(kv_heads=kv_heads, count=count, splits=splits)),
        out_type=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            jax.ShapeDtypeStruct(shape, jnp.int32),
        ),
        scratch_types=dict(
            queries=hopper.tiled(QUERIES, head_dim, dtype=q.dtype),
            ring=hopper.tiled(_STAGES, TILE, head_dim, dtype=k.dtype),
            ready=plgpu.Barrier(num_barriers=_STAGES),
            free=plgpu.Barrier(num_barriers=_STAGES),
            loaded=plgpu.Barrier(),
        ),
        grid=(heads, splits),
        grid_names=("head", "split"),
        num_threads=2,
        thread_name="role",
        interpret=interpret,
    )
    bounds = jnp.stack([start, stop], axis=1).astype(jnp.int32)
    found = kernel(bounds, q, k, tolerances)
    values, slots = (
        jnp.moveaxis(x, 3, 1).reshape(batch, kv_heads, QUERIES, -1)[:, :, :rows] for x in found
    )
    return _ranked(values, slots, count, tolerance)


def _ranked(
    values: Float[Array, "*R E"],
    slots: Int[Array, "*R E"],
    count: int,
    tolerance: Float[Array, "*R"],
) -> tuple[Float[Array, "*R C"], Int[Array, "*R C"]]:
    """The first `count` by the best value that each ties with, then by slot; -1 is no slot."""
    above = (values + tolerance[..., None])[..., :, None]
    tied = jnp.where(values[..., None, :] <= above, values[..., None, :], -jnp.inf)
    ranks = jnp.max(tied, axis=-1)
    value, rival = ranks[..., :, None], ranks[..., None, :]
    slot, its_slot = slots[..., :, None], slots[..., None, :]
    entry = jnp.arange(values.shape[-1])
    # Absent ones are alike: their places tell them apart.
    earlier = (its_slot < slot) | ((its_slot == slot) & (entry < entry[:, None]))
    ahead = (rival > value) | ((rival == value) & earlier)
    rank = jnp.sum(ahead, axis=-1, dtype=jnp.int32)[..., None, :]
    mine = rank == jnp.arange(count)[:, None]
    best = jnp.sum(jnp.where(mine, values[..., None, :], 0.0), axis=-1)
    return best, jnp.sum(jnp.where(mine, slots[..., None, :], 0), axis=-1)


def _kernel(
    bounds_ref,
    q_ref,
    k_ref,
    tolerance_ref,
    value_ref,
    slot_ref,
    *,
    job: _Job,
    queries,
    ring,
    ready,
    free,
    loaded,
) -> None:
    head, split = lax.axis_index("head"), lax.axis_index("split")
    role = lax.axis_index("role")
    more, fewer = hopper.registers(1)
    row = lax.div(head, job.kv_heads)
    low, high = bounds_ref[row, 0], bounds_ref[row, 1]
    first = lax.div(low, TILE)
    tiles = jnp.maximum(lax.div(high + (TILE - 1), TILE) - first, 0)
    share = lax.div(tiles + (job.splits - 1), job.splits)
    begin = first + jnp.minimum(split * share, tiles)
    end = first + jnp.minimum((split + 1) * share, tiles)

    @pl.when(role == 1)
    def _copies():
        plgpu.set_max_registers(fewer, action="decrease")
        keys = k_ref.at[row, lax.rem(head, job.kv_heads)]

        @pl.loop(0, end - begin)
        def _step(i):
            place = lax.rem(i, _STAGES)

            @pl.when(i >= _STAGES)
            def _():
                plgpu.barrier_wait(free.at[place])

            tile = keys.at[pl.ds((begin + i) * TILE, TILE)]
            plgpu.copy_gmem_to_smem(tile, ring.at[place], ready.at[place])

        hopper.drain(free, end - begin, _STAGES)

    @pl.when(role == 0)
    def _rank():
        plgpu.set_max_registers(more, action="increase")
        plgpu.copy_gmem_to_smem(q_ref.at[head], queries, loaded)
        plgpu.barrier_wait(loaded)
        across = plgpu.Layout.WGMMA.reduce(0)
        tolerance = plgpu.load(tolerance_ref.at[head], layout=across, optimized=False)
        tolerance = lax.broadcast_in_dim(tolerance, (hopper.ROWS, QUERIES), [1])
        run, bounds = (begin, end), (low, high)
        lists = _lists(queries, ring, ready, free, run, bounds, tolerance, job.count)
        for j, (value, slot) in enumerate(_merged(lists, tolerance)):
            value_ref[head, split, j] = value
            slot_ref[head, split, j] = slot


def _lists(
    queries, ring, ready, free, run, bounds, tolerance: Array, count: int
) -> list[tuple[Array, Array]]:
    """Each place's best scores among the tiles of `run`, and their slots."""
    shape = hopper.ROWS, QUERIES
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA)
    empty = hopper.full(shape, -jnp.inf), hopper.full(shape, -1, jnp.int32)
    begin, end = run

    def step(i, lists):
        place = lax.rem(i, _STAGES)
        plgpu.barrier_wait(ready.at[place])
        scores = [
            hopper.product(
                ring.at[place, pl.ds(half * hopper.ROWS, hopper.ROWS)],
                queries.transpose((1, 0)),
            )
            for half in range(_HALVES)
        ]
        plgpu.barrier_arrive(free.at[place])
        for half, score in enumerate(scores):
            slot = row + (begin + i) * TILE + half * hopper.ROWS
            score = jnp.where((slot >= bounds[0]) & (slot < bounds[1]), score, -jnp.inf)
            lists = insert(lists, score, slot, tolerance)
        return lists

    return lax.fori_loop(0, end - begin, step, [empty] * count)


def _merged(lists: list[tuple[Array, Array]], tolerance: Array) -> list[tuple[Array, Array]]:
    """The best of all places' lists in order, [8] scores and slots each, as many as a list has."""
    shape = hopper.ROWS, QUERIES
    merged = []
    for left in reversed(range(len(lists))):
        value, slot = lists[0]
        best = lax.broadcast_in_dim(value.max(axis=0), shape, [1])
        lowest = jnp.where(value >= best - tolerance, slot, _LAST).min(axis=0)
        gone = slot == lax.broadcast_in_dim(lowest, shape, [1])
        its_value = jnp.where(gone, value, -jnp.inf).max(axis=0)
        merged.append((its_value, jnp.where(its_value > -jnp.inf, lowest, -1)))
        lists = [
            (
                jnp.where(gone, lists[j + 1][0], lists[j][0]),
                jnp.where(gone, lists[j + 1][1], lists[j][1]),
            )
            for j in range(left)
        ]
    return merged
