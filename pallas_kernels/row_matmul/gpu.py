"""x @ w of a few rows on Hopper: a Mosaic GPU kernel that streams the matrix.

The outputs are the rows of a wgmma and the rows x its columns, of which 8 or 16 are the fewest:
out.T = w.T @ x.T, with w as it lies in memory. The matrix is cut into tiles of 64 or 128 outputs
and some inputs, numbered along the inputs first, and every worker (one block of threads) takes an
equal run of consecutive tiles. A worker whose run ends within a block of outputs has a part of
their sums. The parts, at most a few of an output, are added in float32 by what follows: XLA, which
fuses that, or the next product. One warpgroup copies and multiplies, for a product takes a third of
the time of its copy; the copies of a worker's next tiles are always under way.

Of one or two rows with a source (`sources`) the rows are not copied. The warpgroup reads the parts
of each tile by ordinary loads, while the tile's weights are under way, and stores the result to
shared memory. All 8 columns of the product hold the same row, or the last of two: only rows that
count are read. The parts that a worker reads are about as many bytes as 8 rows of bfloat16, and
come from the L2 cache. Not measured yet.

Roofline: the bytes of w. On an H200, one row, bfloat16: 4096 x 28672 in 55 us (4.2 TB/s), 14336 x
4096 in 28 us, 4096 x 4096 in 9.2 us, 2048 x 2048 in 3.6 us: some 2 us, in which the first tiles
come, and 4.4 TB/s from there. Rejected: 64 outputs a tile, 8 or 16 KiB a tile, 1, 3 or 4 workers a
processor (all within 4%); an equal number of blocks of threads for every block of outputs (27.9 us
a matrix on average in place of 26.6: the last ones run alone). Also rejected, for the three
products after attention and the small kernels between them, 8B shape, in a loop over layers:

- One persistent kernel, whose workers wait for each other at semaphores between the products while
  their next tiles come: 111 us a layer in place of 107.
- To bring the first 25 MB of the next matrix into the L2 cache while the last tiles are multiplied:
  110 us in place of 104, as if they were read twice.
"""

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from pallas_kernels import hopper
from pallas_kernels.row_matmul.sources import Gated, Scaled, Source, Sums

# Registers: two outputs of a row in a thread, so that the transpose is stored as it lies; and one
# number an output.
_TRANSPOSED = plgpu.Layout.WGMMA_TRANSPOSED
_LINE = _TRANSPOSED.reduce(1)
# Tiles in flight, elements of a tile, outputs of a tile where they are many, and workers of a
# processor.
_STAGES, _TILE, _WIDE, _WORKERS = 3, 16384, 128, 2


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The static arguments of the kernel: tiles of `width` outputs and `depth` inputs.

    Attributes:
      rows: whole tiles of rows, of which the first `valid` count.
      share: tiles of a worker.
      form: the source without its arrays; None where the rows lie as they are multiplied.
    """

    valid: int
    rows: int
    inputs: int
    outputs: int
    width: int
    share: int
    dtype: Any
    form: Any
    interpret: Any

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
        """The most workers that have tiles of one block of outputs; others have one less."""
        blocks = range(self.outputs // self.width)
        return max(self.last_part(block * self.steps) for block in blocks) + 1

    def last_part(self, first: Any) -> Any:
        """The last part of a block of outputs, by the block's first tile."""
        div = lax.div if isinstance(first, Array) else operator.floordiv
        return div(first + (self.steps - 1), self.share) - div(first, self.share)


def unsupported(dtype: Any, w: Array) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    reason = hopper.unsupported_device()
    if reason is not None:
        return reason
    if dtype not in hopper.DTYPES:
        return f"wgmma takes bfloat16 and float16, not {dtype}"
    depth = _TILE // hopper.ROWS
    if w.shape[0] % depth or w.shape[1] % hopper.ROWS:
        return f"{w.shape[0]} inputs are no multiple of {depth} or {w.shape[1]} outputs none of 64"
    return None


def row_matmul(
    x: Float[Array, "R D"], w: Float[Array, "D N"], *, dtype: Any, interpret: Any = None
) -> Float[Array, "R N"]:
    """See the public function."""
    rows = x.shape[0]
    x = jnp.pad(x, ((0, -rows % hopper.TILE_ROWS), (0, 0)))
    return _products([x], w, _job_of(rows, w, None, interpret)).total().astype(dtype)


def row_sums(source: Source, w: Float[Array, "D N"], *, interpret: Any = None) -> Sums:
    """See the public function."""
    arrays, form = jax.tree.flatten(source)
    return _products(arrays, w, _job_of(source.shape[0], w, form, interpret))


def _job_of(rows: int, w: Array, form: Any, interpret: Any) -> _Job:
    inputs, outputs = w.shape
    wide = not outputs % _WIDE and outputs // _WIDE >= hopper.processors()
    workers = hopper.processors() * _WORKERS
    return _Job(
        valid=rows,
        rows=rows + -rows % hopper.TILE_ROWS,
        inputs=inputs,
        outputs=outputs,
        width=_WIDE if wide else hopper.ROWS,
        share=pl.cdiv(inputs * outputs // _TILE, workers),
        dtype=w.dtype,
        form=form,
        interpret=interpret,
    )


def _products(arrays: Sequence[Array], w: Array, job: _Job) -> Sums:
    """The parts of every output's sum; `arrays` are the source's, or whole tiles of rows."""
    kernel = plgpu.kernel(
        functools.partial(_kernel, job=job),
        out_type=jax.ShapeDtypeStruct((job.parts, job.rows, job.outputs), jnp.float32),
        scratch_types=dict(
            w_ring=hopper.tiled(_STAGES, job.depth, job.width, dtype=job.dtype),
            x_ring=hopper.tiled(_STAGES, job.rows, job.depth, dtype=job.dtype),
            ready=plgpu.Barrier(num_arrivals=2 if job.form is None else 1, num_barriers=_STAGES),
        ),
        grid=(pl.cdiv(job.tiles, job.share),),
        grid_names=("worker",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=job.interpret,
        kernel_name="row_matmul",
    )
    return Sums(kernel(w, *arrays), job.valid)


def _kernel(w_ref, *refs, job: _Job, w_ring, x_ring, ready) -> None:
    *source_refs, out_ref = refs
    worker = lax.axis_index("worker")
    begin = worker * job.share
    end = jnp.minimum(begin + job.share, job.tiles)
    halves = range(0, job.width, hopper.ROWS)

    def copy(tile) -> None:
        slot = lax.rem(tile - begin, _STAGES)
        outputs = pl.ds(lax.div(tile, job.steps) * job.width, job.width)
        inputs = pl.ds(lax.rem(tile, job.steps) * job.depth, job.depth)
        plgpu.copy_gmem_to_smem(w_ref.at[inputs, outputs], w_ring.at[slot], ready.at[slot])
        if job.form is None:
            x_ref = source_refs[0]
            plgpu.copy_gmem_to_smem(x_ref.at[:, inputs], x_ring.at[slot], ready.at[slot])

    def make(tile) -> None:
        """The rows' inputs of a tile, from the source."""
        slot, first = lax.rem(tile - begin, _STAGES), lax.rem(tile, job.steps) * job.depth
        source = jax.tree.unflatten(job.form, source_refs)
        chunks = range(0, job.depth, hopper.ROWS)
        # All that is read is asked for before the first of it is needed.
        for chunk, rows in zip(
            chunks, [_rows(source, first + c, job) for c in chunks], strict=True
        ):
            place = x_ring.at[slot, :, pl.ds(chunk, hopper.ROWS)]
            place.transpose((1, 0))[...] = rows
        plgpu.commit_smem()

    def multiply(tile, sums) -> None:
        slot = lax.rem(tile - begin, _STAGES)
        if job.form is not None:
            make(tile)
        plgpu.barrier_wait(ready.at[slot])
        for first, acc in zip(halves, sums, strict=True):
            matrix = w_ring.at[slot, :, pl.ds(first, hopper.ROWS)]
            plgpu.wgmma(acc, matrix.transpose((1, 0)), x_ring.at[slot].transpose((1, 0)))
        plgpu.wgmma_wait(0)

        @pl.when(tile + _STAGES < end)
        def _():
            # All warps have read the slot.
            plgpu.commit_smem()
            copy(tile + _STAGES)

    for ahead in range(min(_STAGES, job.share)):
        pl.when(begin + ahead < end)(functools.partial(copy, begin + ahead))

    @pl.loop(lax.div(begin, job.steps), lax.div(end - 1, job.steps) + 1)
    def _block(block):
        first = block * job.steps
        tiles = jnp.maximum(first, begin), jnp.minimum(first + job.steps, end)

        def summed(*sums) -> list[Array]:
            pl.loop(*tiles)(lambda tile: multiply(tile, sums))
            return [acc[...] for acc in sums]

        each = plgpu.WGMMAAccumulatorRef((hopper.ROWS, job.rows), jnp.float32)
        part, last = worker - lax.div(first, job.share), job.last_part(first)
        for half, found in zip(halves, pl.run_scoped(summed, *[each] * len(halves)), strict=True):
            outputs = pl.ds(block * job.width + half, hopper.ROWS)
            found = plgpu.layout_cast(found, _TRANSPOSED)
            hopper.store_little(found, out_ref.at[part, :, outputs].transpose((1, 0)))
            # Where a block has a part less, that one is 0.
            missing = (part == last) & (last < job.parts - 1)
            pl.when(missing)(functools.partial(_clear, out_ref.at[job.parts - 1, :, outputs]))


def _clear(ref: Any) -> None:
    nothing = hopper.full(ref.shape[::-1], 0.0, layout=_TRANSPOSED)
    hopper.store_little(nothing, ref.transpose((1, 0)))


def _rows(source: Any, first: Any, job: _Job) -> Array:
    """64 inputs of all rows, from input `first` on: [64,R8], those that do not count as any."""
    shape = hopper.ROWS, job.rows
    rows = [_row(source, row, first).astype(job.dtype) for row in range(job.valid)]
    found, *others = (lax.broadcast_in_dim(row, shape, [0]) for row in rows)
    if others:
        number = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_TRANSPOSED)
        for row, other in enumerate(others, 1):
            found = jnp.where(number == row, other, found)
    return found


def _row(source: Any, row: int, first: Any) -> Float[Array, " 64"]:
    """64 inputs of a row, in float32 or as they are stored. As the source's `value` in sources."""

    def load(ref: Any, *index: Any, begin: Any = first) -> Array:
        part = ref.at[(*index, pl.ds(begin, hopper.ROWS))]
        return plgpu.load(part, layout=_LINE, optimized=False)

    def total(sums: Sums, begin: Any) -> Array:
        parts = [load(sums.parts, part, row, begin=begin) for part in range(len(sums))]
        return functools.reduce(jnp.add, parts)

    if isinstance(source, Scaled):
        x = load(source.x, row).astype(jnp.float32)
        if source.added is not None:
            added = total(source.added, first).astype(source.x.dtype)
            x = (x + added.astype(jnp.float32)).astype(source.x.dtype).astype(jnp.float32)
        return x * load(source.scale).astype(jnp.float32)
    if isinstance(source, Gated):
        factor = source.factor[row]
        inputs = source.both.parts.shape[2] // 2
        gate, up = (
            (total(source.both, begin) * factor).astype(source.dtype).astype(jnp.float32)
            for begin in (first, first + inputs)
        )
        return gate / (1 + jnp.exp(-gate)) * up
    return load(source, row)
