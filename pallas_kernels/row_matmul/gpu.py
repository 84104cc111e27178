"""x @ w of a few rows on Hopper: a Mosaic GPU kernel that streams the matrix.

The outputs are the rows of a wgmma and the rows x its columns, of which 8 or 16 are the fewest:
out.T = w.T @ x.T, with w as it lies in memory. The matrix is cut into tiles of 64 or 128 outputs
and some inputs, numbered along the inputs first, and every worker (one block of threads) takes an
equal run of consecutive tiles. A worker whose run ends within a block of outputs has a part of
their sums. The parts, at most a few of an output, are added outside, in float32, where XLA fuses
that with what follows. One warpgroup copies and multiplies, for a product takes a third of the time
of its copy; the copies of a worker's next tiles are always under way.

Roofline: the bytes of w. On an H200, one row, bfloat16: 4096 x 28672 in 55 us (4.2 TB/s), 14336 x
4096 in 28 us, 4096 x 4096 in 9.2 us, 2048 x 2048 in 3.6 us: some 2 us, in which the first tiles
come, and 4.4 TB/s from there. Rejected: other tiles and
numbers of workers (within 4%); as many blocks of threads for every block of outputs (27.9 us a
matrix in place of 26.6, for the last ones run alone). And, around the three products after
attention, 8B shape: one persistent kernel (111 us a layer in place of 107); programmatic dependent
launch, without which XLA's CUDA graphs launch custom calls; the first 25 MB of the next matrix
brought into the L2 cache (110 us in place of 104); rows made from the sums of the product before
(revision fab2a37: on an H100 a step of the 1B shape takes 1.45 ms in place of 1.42, of the 8B shape
over 32,768 tokens 7.63 in place of 7.48).

A matrix in 8 bits comes in tiles of as many numbers, of half the bytes, with more of them in
flight. The warpgroup turns a tile into the dtype of the rows, exactly, in the registers that wgmma
takes its first operand from (`hopper_bits`). The scales multiply the sums outside. While one worker
of a processor converts, the other's copies and products go on. On an H200 a step of an 8B shape
over 4,096 tokens takes 3.20 ms with int8 weights, with XLA's form 17.1; of 16 rows 4.41 and 10.9.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from pallas_kernels import hopper, hopper_bits
from pallas_kernels.quantised_matrix import AnyMatrix, QuantisedMatrix

# Tiles in flight, of 16 bits and of 8; elements of a tile at most, outputs of one where they are
# many, and workers of a processor.
_STAGES, _STAGES_8, _TILE, _WIDE, _WORKERS = 3, 5, 16384, 128, 2


def unsupported(x: Array | jax.ShapeDtypeStruct, w: AnyMatrix) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    reason, (inputs, outputs) = hopper.unsupported_numbers(x), w.shape[-2:]
    if reason is None and (inputs % hopper.ROWS or outputs % hopper.ROWS):
        reason = f"{inputs} inputs or {outputs} outputs are no multiple of {hopper.ROWS}"
    return reason


def row_matmul(
    x: Float[Array, "R D"], w: AnyMatrix, *, dtype: Any, interpret: Any = None
) -> Float[Array, "R N"]:
    """See the public function."""
    parts = row_parts(x, w, interpret=interpret)
    # Parts that were not written may hold anything.
    some = np.arange(parts.array.shape[0])[:, None, None] < parts.found()
    sums_RN = jnp.sum(jnp.where(some, parts.array[:, : parts.rows], 0), axis=0)
    return (sums_RN * w.scales if isinstance(w, QuantisedMatrix) else sums_RN).astype(dtype)


class Parts(NamedTuple):
    """Parts of the sums of a product, before scales of 8 bits.

    Attributes:
      array: [P, R8, N] in float32: of some rows more.
      rows: of the product.
      width: outputs of a block, of each of which as many parts were written.
      steps: tiles of a block.
      share: tiles of a worker.
    """

    array: Float[Array, "P R8 N"]
    rows: int
    width: int
    steps: int
    share: int

    def found(self) -> Int[np.ndarray, " N"]:
        """How many parts of each output were written."""
        first = np.arange(self.array.shape[2] // self.width) * self.steps
        last = first + self.steps - 1
        return np.repeat(last // self.share - first // self.share + 1, self.width)


def row_parts(x: Float[Array, "R D"], w: AnyMatrix, *, interpret: Any = None) -> Parts:
    """x @ w as the kernel leaves it."""
    (rows, _), (inputs, outputs) = x.shape, w.shape
    eight_bits = isinstance(w, QuantisedMatrix)
    stored = w.values if isinstance(w, QuantisedMatrix) else w
    # The rows of a tile fill lines of 128 bytes.
    wide = not outputs % _WIDE and (eight_bits or outputs // _WIDE >= hopper.processors())
    width, stages = _WIDE if wide else hopper.ROWS, _STAGES_8 if eight_bits else _STAGES
    depth = tile_depth(inputs, _TILE // width)
    tiles, padded = inputs * outputs // (depth * width), rows + -rows % hopper.TILE_ROWS
    share = pl.cdiv(tiles, hopper.processors() * _WORKERS)
    # Workers have tiles of each block of outputs, which has `steps`.
    steps = inputs // depth
    most = max(-(-(at + steps) // share) - at // share for at in range(0, tiles, steps))
    kernel = plgpu.kernel(
        functools.partial(_kernel, share=share, interpreted=interpret is not None),
        out_type=jax.ShapeDtypeStruct((most, padded, outputs), jnp.float32),
        scratch_types=dict(
            w_ring=hopper.tiled(stages, depth, width, dtype=stored.dtype),
            x_ring=hopper.tiled(stages, padded, depth, dtype=x.dtype),
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ),
        grid=(pl.cdiv(tiles, share),),
        grid_names=("worker",),
        interpret=interpret,
        kernel_name="row_matmul",
    )
    return Parts(kernel(hopper.whole_rows(x, interpret)[0], stored), rows, width, steps, share)


def tile_depth(inputs: int, most: int) -> int:
    """Inputs of a tile: the most that divide all, in steps of 64; a copy has 256 at most."""
    return max(n for n in range(64, min(most, 256) + 1, 64) if not inputs % n)


def _kernel(*refs, share: int, interpreted: bool, w_ring, x_ring, ready) -> None:
    x_ref, w_ref, out_ref = refs
    worker = lax.axis_index("worker")
    stages, depth, width = w_ring.shape
    steps = w_ref.shape[0] // depth
    begin = worker * share
    end = jnp.minimum(begin + share, w_ref.size // (depth * width))

    def copy(tile) -> None:
        slot = lax.rem(tile - begin, stages)
        outputs = pl.ds(lax.div(tile, steps) * width, width)
        inputs = pl.ds(lax.rem(tile, steps) * depth, depth)
        plgpu.copy_gmem_to_smem(w_ref.at[inputs, outputs], w_ring.at[slot], ready.at[slot])
        rows = hopper.first_rows(x_ref, x_ring.shape[1], worker)
        plgpu.copy_gmem_to_smem(x_ref.at[rows, inputs], x_ring.at[slot], ready.at[slot])

    def waited(tile) -> tuple[Any, Any]:
        """The tile and the rows for it."""
        slot = lax.rem(tile - begin, stages)
        plgpu.barrier_wait(ready.at[slot])
        return w_ring.at[slot], x_ring.at[slot].transpose((1, 0))

    def go_on(tile) -> None:
        """Begin the work after a product."""

        @pl.when(tile + stages < end)
        def _():
            # All warps have read the slot.
            plgpu.commit_smem()
            copy(tile + stages)

    for ahead in range(min(stages, share)):
        pl.when(begin + ahead < end)(functools.partial(copy, begin + ahead))
    how = (width, x_ring.shape[1]), w_ref.dtype, x_ref.dtype, interpreted

    @pl.loop(lax.div(begin, steps), lax.div(end - 1, steps) + 1)
    def _block(block):
        first = block * steps
        tiles = jnp.maximum(first, begin), jnp.minimum(first + steps, end)
        part = worker - lax.div(first, share)
        outputs = block * width
        for found in tile_sums(tiles, waited, go_on, *how):
            # Some outputs of a row lie in a thread, so that the transpose is stored as they lie.
            place = out_ref.at[part, :, pl.ds(outputs, found.shape[0])]
            hopper.store_little(found, place.transpose((1, 0)))
            outputs += found.shape[0]


def tile_sums(
    tiles: tuple[Array, Array],
    waited: Callable,
    go_on: Callable,
    shape: tuple[int, int],
    stored: Any,
    dtype: Any,
    interpreted: bool,
) -> list[Array]:
    """The sums over the tiles: 64 outputs each, or of 8 bits all together.

    Args:
      waited: gives a tile and the rows for it, once they are there.
      go_on: called with a tile that has been read.
      shape: outputs and rows.
      stored: the dtype of the tiles; `dtype` is that of the rows.
    """
    if jnp.dtype(stored).itemsize == 1:
        return _sums_of_8_bits(tiles, waited, go_on, shape, dtype, interpreted)

    def summed(*sums) -> list[Array]:
        @pl.loop(*tiles)
        def _multiply(tile):
            matrix, rows = waited(tile)
            for i, acc in enumerate(sums):
                outputs = matrix.at[:, pl.ds(i * hopper.ROWS, hopper.ROWS)]
                plgpu.wgmma(acc, outputs.transpose((1, 0)), rows)
            plgpu.wgmma_wait(0)
            go_on(tile)

        return [acc[...] for acc in sums]

    acc = plgpu.WGMMAAccumulatorRef((hopper.ROWS, shape[1]), jnp.float32)
    found = pl.run_scoped(summed, *[acc] * (shape[0] // hopper.ROWS))
    return [plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED) for x in found]


def _sums_of_8_bits(
    tiles: tuple[Array, Array],
    waited: Callable,
    go_on: Callable,
    shape: tuple[int, int],
    dtype: Any,
    interpreted: bool,
) -> list[Array]:
    def multiply(tile, acc) -> Array:
        matrix, rows = waited(tile)
        matrix = hopper_bits.columns_of(matrix, dtype, interpreted)
        acc = hopper.add_product(acc, matrix, rows, interpreted)
        go_on(tile)
        return acc

    found = lax.fori_loop(*tiles, multiply, hopper.full(shape, 0.0))
    return [hopper_bits.in_row_order(found, interpreted)]
