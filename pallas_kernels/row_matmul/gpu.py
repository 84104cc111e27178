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
come, and 4.4 TB/s from there. Rejected: 64 outputs a tile, 8 or 16 KiB a tile, 1, 3 or 4 workers a
processor (all within 4%); an equal number of blocks of threads for every block of outputs (27.9 us
a matrix on average in place of 26.6: the last ones run alone). Also rejected, for the three
products after attention and the small kernels between them, 8B shape, in a loop over layers:

- One persistent kernel, whose workers wait for each other at semaphores between the products while
  their next tiles come: 111 us a layer in place of 107.
- Programmatic dependent launch, the first tiles of the matrix on their way before the kernels ahead
  end: XLA's CUDA graphs launch kernels of custom calls without it. In streams, where it works, a
  step of 32 layers takes 5.78 ms in place of 6.08, and 5.51 in graphs without it.
- To bring the first 25 MB of the next matrix into the L2 cache while the last tiles are multiplied:
  110 us in place of 104, as if they were read twice.
- To make the row from the sums of the product before it, residual, norm and gate included, with 42
  kernels in four layers in place of 60 (revision fab2a37). On an H100 a step of the 1B shape takes
  1.45 ms in place of 1.42, of the 8B shape over 32,768 tokens 7.63 in place of 7.48.

A matrix in 8 bits comes in tiles of as many numbers, of half the bytes, with more of them in
flight. The warpgroup turns a tile into the dtype of the rows, exactly, in the registers that wgmma
takes its first operand from (`hopper_bits`). The scales multiply the sums outside. While one worker
of a processor converts, the other's copies and products go on. On an H200 a step of an 8B shape
over 4,096 tokens takes 3.20 ms with int8 weights, with XLA's form 17.1; of 16 rows 4.41 and 10.9.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from pallas_kernels import hopper, hopper_bits
from pallas_kernels.quantised_matrix import AnyMatrix, QuantisedMatrix

# Tiles in flight, elements of a tile, outputs of a tile where they are many, and workers of a
# processor.
_STAGES, _TILE, _WIDE, _WORKERS = 3, 16384, 128, 2
# Tiles in flight of 8 bits, and workers of a processor.
_STAGES_8, _WORKERS_8 = 5, 2


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The static arguments of the kernel: tiles of `width` outputs and `depth` inputs.

    Attributes:
      share: tiles of a worker.
      stages: tiles in flight.
      dtype: of the rows, and of the tiles that are multiplied.
      stored: of the matrix.
    """

    rows: int
    inputs: int
    outputs: int
    width: int
    share: int
    stages: int
    dtype: Any
    stored: Any
    interpret: Any

    @property
    def eight_bits(self) -> bool:
        return jnp.dtype(self.stored).itemsize == 1

    @property
    def depth(self) -> int:
        return _TILE // self.width

    @property
    def steps(self) -> int:
        """Tiles of a block of outputs."""
        return self.inputs // self.depth

    @property
    def tiles(self) -> int:
        return self.outputs // self.width * self.steps

    @property
    def parts(self) -> int:
        """The most workers that have tiles of one block of outputs."""
        return int(self.parts_of(np.arange(self.outputs // self.width)).max())

    def parts_of(self, block: Any) -> Any:
        """How many workers have tiles of a block of outputs."""
        first = block * self.steps
        return (first + self.steps - 1) // self.share - first // self.share + 1


def unsupported(x: Array | jax.ShapeDtypeStruct, w: AnyMatrix) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    reason = hopper.unsupported_device()
    if reason is not None:
        return reason
    if x.dtype not in hopper.DTYPES:
        return f"wgmma takes bfloat16 and float16, not {x.dtype}"
    depth = _TILE // hopper.ROWS
    if w.shape[0] % depth or w.shape[1] % hopper.ROWS:
        return f"{w.shape[0]} inputs are no multiple of {depth} or {w.shape[1]} outputs none of 64"
    return None


def row_matmul(
    x: Float[Array, "R D"], w: AnyMatrix, *, dtype: Any, interpret: Any = None
) -> Float[Array, "R N"]:
    """See the public function."""
    job = _job(x.shape, x.dtype, w, interpret)
    parts_PRN = _products(hopper.whole_rows(x, interpret)[0], w, job)
    found = job.parts_of(np.arange(job.outputs) // job.width)
    # Parts that were not written may hold anything.
    some = np.arange(job.parts)[:, None, None] < found
    sums_RN = jnp.sum(jnp.where(some, parts_PRN[:, : x.shape[0]], 0), axis=0)
    return (sums_RN * w.scales if isinstance(w, QuantisedMatrix) else sums_RN).astype(dtype)


def _job(shape: tuple[int, ...], dtype: Any, w: AnyMatrix, interpret: Any) -> _Job:
    rows, (inputs, outputs) = shape[0], w.shape
    eight_bits = isinstance(w, QuantisedMatrix)
    # The rows of a tile fill lines of 128 bytes.
    wide = not outputs % _WIDE and (eight_bits or outputs // _WIDE >= hopper.processors())
    workers = hopper.processors() * (_WORKERS_8 if eight_bits else _WORKERS)
    return _Job(
        rows=rows + -rows % hopper.TILE_ROWS,
        inputs=inputs,
        outputs=outputs,
        width=_WIDE if wide else hopper.ROWS,
        share=pl.cdiv(inputs * outputs // _TILE, workers),
        stages=_STAGES_8 if eight_bits else _STAGES,
        dtype=dtype,
        stored=w.values.dtype if isinstance(w, QuantisedMatrix) else w.dtype,
        interpret=interpret,
    )


def _products(rows: Array, w: AnyMatrix, job: _Job) -> Float[Array, "P R8 N"]:
    """The parts of every output's sum, in float32."""
    kernel = plgpu.kernel(
        functools.partial(_kernel, job=job),
        out_type=jax.ShapeDtypeStruct((job.parts, job.rows, job.outputs), jnp.float32),
        scratch_types=dict(
            w_ring=hopper.tiled(job.stages, job.depth, job.width, dtype=job.stored),
            x_ring=hopper.tiled(job.stages, job.rows, job.depth, dtype=job.dtype),
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=job.stages),
        ),
        grid=(pl.cdiv(job.tiles, job.share),),
        grid_names=("worker",),
        interpret=job.interpret,
        kernel_name="row_matmul",
    )
    return kernel(rows, w.values if isinstance(w, QuantisedMatrix) else w)


def _kernel(x_ref, w_ref, out_ref, *, job: _Job, w_ring, x_ring, ready) -> None:
    worker = lax.axis_index("worker")
    begin = worker * job.share
    end = jnp.minimum(begin + job.share, job.tiles)
    sums = _sums_of_8_bits if job.eight_bits else _sums

    def copy(tile) -> None:
        slot = lax.rem(tile - begin, job.stages)
        outputs = pl.ds(lax.div(tile, job.steps) * job.width, job.width)
        inputs = pl.ds(lax.rem(tile, job.steps) * job.depth, job.depth)
        plgpu.copy_gmem_to_smem(w_ref.at[inputs, outputs], w_ring.at[slot], ready.at[slot])
        rows = hopper.first_rows(x_ref, job.rows, worker)
        plgpu.copy_gmem_to_smem(x_ref.at[rows, inputs], x_ring.at[slot], ready.at[slot])

    def waited(tile) -> tuple[Any, Any]:
        """The tile and the rows for it."""
        slot = lax.rem(tile - begin, job.stages)
        plgpu.barrier_wait(ready.at[slot])
        return w_ring.at[slot], x_ring.at[slot].transpose((1, 0))

    def go_on(tile) -> None:
        """Begin what comes after a product."""

        @pl.when(tile + job.stages < end)
        def _():
            # All warps have read the slot.
            plgpu.commit_smem()
            copy(tile + job.stages)

    for ahead in range(min(job.stages, job.share)):
        pl.when(begin + ahead < end)(functools.partial(copy, begin + ahead))

    @pl.loop(lax.div(begin, job.steps), lax.div(end - 1, job.steps) + 1)
    def _block(block):
        first = block * job.steps
        tiles = jnp.maximum(first, begin), jnp.minimum(first + job.steps, end)
        part = worker - lax.div(first, job.share)
        outputs = block * job.width
        for found in sums(tiles, waited, go_on, job):
            # Some outputs of a row lie in a thread, so that the transpose is stored as they lie.
            place = out_ref.at[part, :, pl.ds(outputs, found.shape[0])]
            hopper.store_little(found, place.transpose((1, 0)))
            outputs += found.shape[0]


def _sums(tiles: tuple[Array, Array], waited: Callable, go_on: Callable, job: _Job) -> list[Array]:
    """The sums over the tiles, 64 outputs each.

    Args:
      waited: gives a tile and the rows for it, once they are there.
      go_on: called with a tile that has been read.
    """

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

    acc = plgpu.WGMMAAccumulatorRef((hopper.ROWS, job.rows), jnp.float32)
    found = pl.run_scoped(summed, *[acc] * (job.width // hopper.ROWS))
    return [plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED) for x in found]


def _sums_of_8_bits(
    tiles: tuple[Array, Array], waited: Callable, go_on: Callable, job: _Job
) -> list[Array]:
    """As `_sums`, all outputs together."""
    interpreted = job.interpret is not None

    def multiply(tile, acc) -> Array:
        matrix, rows = waited(tile)
        matrix = hopper_bits.columns_of(matrix, job.dtype, interpreted)
        acc = hopper.add_product(acc, matrix, rows, interpreted)
        go_on(tile)
        return acc

    found = lax.fori_loop(*tiles, multiply, hopper.full((job.width, job.rows), 0.0))
    return [hopper_bits.in_row_order(found, interpreted)]
