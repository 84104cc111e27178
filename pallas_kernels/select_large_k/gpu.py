"""The k best of S scores on Hopper: Mosaic GPU kernels for short rows and for long ones.

XLA's form is bound by its launches, three a digit. For short lists of at most 16,384 scores one
launch does all, with a block of threads a row (`hopper_best`).

For long rows a kernel finds the border of the k best. A cluster of 8 blocks of threads takes a row.
Every block keeps an eighth of the row's keys in registers (rows of up to 131,072 scores;
longer ones are read again from the L2 cache in every pass). A pass decides two bits: each block
counts its keys that reach the three candidates and writes the counts; after a barrier of the
cluster it reads the counts of all. Each pass has counts of its own, so one barrier a pass is
enough. The search ends where exactly k keys reach a candidate, which with few ties is before the
last bits. The chosen slots are then found as in XLA's form.

Work: 9 operations a key in each of at most 16 passes; 8 rows use 64 multiprocessors. Roofline:
reading the scores once, which takes far less time than the 16 exchanges.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int, UInt32

from pallas_kernels import hopper, hopper_best
from pallas_kernels.select_large_k import xla

# Blocks of threads of a cluster: as many as every Hopper GPU lets work together.
_TILES = 8
_DIGIT = 2  # bits that a pass decides
_PASSES = 32 // _DIGIT
_THREADS = 128
# Keys of one load of a thread, and those that it can keep in registers.
_VECTOR, _KEPT = 4, 128
_SIGN = 1 << 31
# Counts of a block: 32 bytes, so that no two blocks write to the same sector of the cache.
_SECTOR = 8

# On an H200, 8 rows: 55 us against 145 of XLA's form for 131,072 scores, but 48 against 22 for
# 32,768. With many rows XLA's form is faster below this number too.
_LEAST = 65_536
# The longest rows that a block of threads keeps in its registers.
_SHORT = 16_384


def unsupported(scores: Float[Array, "*R S"], size: int | None) -> str | None:
    """Why XLA's form is preferred for these scores on this device, or None."""
    slots = scores.shape[-1]
    if slots < _LEAST and not (size is not None and short(slots, size)):
        return (
            f"XLA's form is faster below {_LEAST:,} scores, but for short lists of at most "
            f"{_SHORT:,}"
        )
    return hopper.unsupported_device()


def short(slots: int, size: int) -> bool:
    """Whether one launch lists `size` of `slots` scores."""
    return slots <= _SHORT and hopper_best.unsupported(slots, size) is None


def select(
    scores: Float[Array, "*R S"],
    k: Int[Array, "*R"],
    size: int | None,
    *,
    least: float = -math.inf,
    interpret: Any = None,
) -> Array:
    """See `xla.select`; no score but -inf is below `least`."""
    slots = scores.shape[-1]
    if size is not None and short(slots, size):
        return _listed(scores, k, size, least, interpret)
    border = functools.partial(_kth_best, interpret=interpret)
    return xla.chosen_by(border, xla.ordered(scores), k, size)


def _listed(
    scores: Float[Array, "*R S"], k: Int[Array, "*R"], size: int, least: float, interpret: Any
) -> Int[Array, "*R C"]:
    """The lists in one launch."""
    slots = scores.shape[-1]
    shape = hopper_best.tiled_shape(slots)
    spare = [(0, 0)] * k.ndim + [(0, math.prod(shape) - slots)]
    rows = jnp.pad(scores.astype(jnp.float32), spare).reshape(-1, 1, 1, *shape)
    k_R = k.reshape(-1).astype(jnp.int32)
    bounds = jnp.zeros_like(k_R), jnp.full_like(k_R, slots), k_R
    lists = hopper_best.choose(rows, bounds, slots, size, interpret, least=least)
    return lists.reshape(*k.shape, size)


def _kth_best(
    key: UInt32[Array, "R S"], k: Int[Array, " R"], interpret: Any = None
) -> UInt32[Array, " R"]:
    """A number that at least k keys reach and at most k pass; 0 where there are fewer keys."""
    rows, slots = key.shape
    share = pl.cdiv(slots, _TILES)
    chunks = pl.cdiv(share, _THREADS * _KEPT)
    whole = _THREADS * _VECTOR
    chunk = pl.cdiv(pl.cdiv(share, chunks), whole) * whole
    spare = _TILES * chunks * chunk - slots
    # Keys of 0 reach no candidate. Signed numbers of the same order: what a kernel compares.
    key = jnp.pad(key, ((0, 0), (0, spare))) ^ jnp.uint32(_SIGN)
    tiles = lax.bitcast_convert_type(key, jnp.int32).reshape(rows, _TILES, chunks, chunk)
    kernel = plgpu.kernel(
        functools.partial(_kernel, chunks=chunks, chunk=chunk),
        out_type=(
            jax.ShapeDtypeStruct((rows, _PASSES, _TILES, _SECTOR), jnp.int32),
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        ),
        scratch_types=dict(barrier=plgpu.ClusterBarrier(collective_axes=("tile",))),
        grid=(rows,),
        grid_names=("row",),
        cluster=(_TILES,),
        cluster_names=("tile",),
        interpret=interpret,
        kernel_name="select_large_k",
    )
    _, border = kernel(tiles, k.astype(jnp.int32))
    return lax.bitcast_convert_type(border, jnp.uint32) ^ jnp.uint32(_SIGN)


def _kernel(key_ref, k_ref, counts_ref, border_ref, *, barrier, chunks: int, chunk: int):
    """Find a row's border; a block of threads has `chunks` chunks of `chunk` keys each."""
    row, tile = lax.axis_index("row"), lax.axis_index("tile")
    k = k_ref[row]
    values = range(1, 1 << _DIGIT)

    def load(i: Array | int) -> Array:
        layout = plgpu.Layout.WG_STRIDED((chunk,), vec_size=_VECTOR)
        return plgpu.load(key_ref.at[row, tile, i], layout=layout)

    kept = load(0) if chunks == 1 else None

    def count(candidates: list[Array]) -> tuple[Array, ...]:
        """How many of this block's keys reach each candidate."""

        def of(keys: Array) -> tuple[Array, ...]:
            return tuple(jnp.sum((keys >= x).astype(jnp.int32)) for x in candidates)

        if kept is not None:
            return of(kept)

        def add(i: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
            return tuple(x + y for x, y in zip(sums, of(load(i)), strict=True))

        return lax.fori_loop(0, chunks, add, tuple(jnp.int32(0) for _ in candidates))

    def decide(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        step, found, _ = state
        shift = 32 - _DIGIT * (step + 1)
        counts = count([found + (jnp.int32(value) << shift) for value in values])
        for value, number in zip(values, counts, strict=True):
            counts_ref[row, step, tile, value] = number
        hopper.fence_cluster()
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        hopper.fence_cluster()
        digit, exact = jnp.int32(0), jnp.bool_(False)
        for value in values:
            reach = jnp.int32(0)
            for other in range(_TILES):
                reach = reach + counts_ref[row, step, other, value]
            digit = digit + (reach >= k).astype(jnp.int32)
            exact = exact | (reach == k)
        return step + 1, found + (digit << shift), exact

    # The smallest signed number stands for the key 0.
    start = jnp.int32(0), jnp.int32(-_SIGN), jnp.bool_(False)
    _, found, _ = lax.while_loop(lambda s: (s[0] < _PASSES) & ~s[2], decide, start)
    border_ref[row] = found
