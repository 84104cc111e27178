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

A matrix in 8 bits comes in tiles of as many numbers, of half the bytes, with more of them in
flight. The warpgroup turns a tile into the dtype of the rows, exactly, in the registers that wgmma
takes its first operand from (`hopper_bits`). The scales multiply the sums outside. While one worker
of a processor converts, the other's copies and products go on. A multiprocessor gets a tile in some
950 cycles. The conversion takes 450 of each of its schedulers. Not measured.

The one row of `row_sums` may be made of an earlier product's sums. Every worker makes the inputs of
its next tile in registers, from the L2 cache, while that tile comes. Some workers also write the
sum, which is the next residual, and the sums of its squares. Not measured.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from pallas_kernels import hopper, hopper_bits
from pallas_kernels.quantised_matrix import AnyMatrix, QuantisedMatrix
from pallas_kernels.row_matmul.rows import Added, AfterNorm, Gated, Sums, dtype_of, shape_of

# Tiles in flight, elements of a tile, outputs of a tile where they are many, and workers of a
# processor.
_STAGES, _TILE, _WIDE, _WORKERS = 3, 16384, 128, 2
# Tiles in flight of 8 bits, and workers of a processor.
_STAGES_8, _WORKERS_8 = 5, 2
# Rows that are made here are one, for every worker makes them. A tile of it has 8 equal rows, of
# which each thread has 4 numbers.
_ROW = plgpu.Layout.TILED(
    fragmented_array.Tiling(((hopper.TILE_ROWS, 64), (2, 64), (4,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)
# Numbers of a row that one worker adds up and squares.
_PIECE = 512


@dataclass(frozen=True, kw_only=True)
class _Made:
    """How the one row is made of an earlier product's sums.

    Attributes:
      scaled: whether the sums have scales.
      size, eps, activation: of `Gated`; of `Added` there is no activation.
    """

    scaled: bool
    size: int = 0
    eps: float = 0.0
    activation: Any = None

    def given(self, rows: Added | Gated) -> list[Array]:
        """The kernel's arguments."""
        scales = [] if rows.sums.scales is None else [rows.sums.scales]
        if isinstance(rows, Gated):
            return [rows.sums.parts, *scales, rows.squares]
        return [rows.sums.parts, *scales, rows.x, rows.scale]


def _made(rows: Added | Gated) -> _Made:
    scaled = rows.sums.scales is not None
    if isinstance(rows, Added):
        return _Made(scaled=scaled)
    return _Made(scaled=scaled, size=rows.size, eps=rows.eps, activation=rows.activation)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The static arguments of the kernel: tiles of `width` outputs and `depth` inputs.

    Attributes:
      share: tiles of a worker.
      stages: tiles in flight.
      dtype: of the rows, and of the tiles that are multiplied.
      stored: of the matrix.
      filled: whether parts that no worker has become zeros, so that all can be added up.
      made: how the row is made; None where rows are given.
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
    filled: bool = False
    made: _Made | None = None

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

    @property
    def piece(self) -> int:
        """Numbers of a row that one worker adds up and squares."""
        return math.gcd(self.inputs, _PIECE)

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
    (parts_PRN,) = _products([hopper.whole_rows(x, interpret)[0]], w, job)
    found = job.parts_of(np.arange(job.outputs) // job.width)
    # Parts that were not written may hold anything.
    some = np.arange(job.parts)[:, None, None] < found
    sums_RN = jnp.sum(jnp.where(some, parts_PRN[:, : x.shape[0]], 0), axis=0)
    return (sums_RN * w.scales if isinstance(w, QuantisedMatrix) else sums_RN).astype(dtype)


def row_sums(rows: Any, w: AnyMatrix, *, interpret: Any = None) -> Any:
    """See the public function."""
    scales = w.scales if isinstance(w, QuantisedMatrix) else None
    if isinstance(rows, Array):
        job = _job(rows.shape, rows.dtype, w, interpret, filled=True)
        (parts,) = _products([hopper.whole_rows(rows, interpret)[0]], w, job)
        return Sums(parts, scales, rows.shape[0])
    made = _made(rows)
    job = _job(shape_of(rows), dtype_of(rows), w, interpret, filled=True, made=made)
    parts, *beside = _products(made.given(rows), w, job)
    sums = Sums(parts, scales, 1)
    return AfterNorm(sums, *beside) if beside else sums


def _job(shape: tuple[int, ...], dtype: Any, w: AnyMatrix, interpret: Any, **more: Any) -> _Job:
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
        **more,
    )


def _products(given: list[Array], w: AnyMatrix, job: _Job) -> Any:
    """The parts of every output's sum, in float32; of `Added` rows their sums and squares too."""
    out_type = [jax.ShapeDtypeStruct((job.parts, job.rows, job.outputs), jnp.float32)]
    if job.made is not None and job.made.activation is None:
        out_type += [
            jax.ShapeDtypeStruct((1, job.inputs), job.dtype),
            jax.ShapeDtypeStruct((job.inputs // job.piece,), jnp.float32),
        ]
    kernel = plgpu.kernel(
        functools.partial(_kernel, job=job),
        out_type=out_type,
        scratch_types=dict(
            w_ring=hopper.tiled(job.stages, job.depth, job.width, dtype=job.stored),
            # Of a row that is made here, the tile that is multiplied and the next one.
            x_ring=hopper.tiled(
                2 if job.made else job.stages, job.rows, job.depth, dtype=job.dtype
            ),
            ready=plgpu.Barrier(num_arrivals=1 if job.made else 2, num_barriers=job.stages),
        ),
        grid=(pl.cdiv(job.tiles, job.share),),
        grid_names=("worker",),
        compiler_params=plgpu.CompilerParams(approx_math=job.made is not None),
        interpret=job.interpret,
        kernel_name="row_matmul",
    )
    return kernel(*given, w.values if isinstance(w, QuantisedMatrix) else w)


def _kernel(*refs, job: _Job, w_ring, x_ring, ready) -> None:
    given = 2 if job.made is None else 3 + job.made.scaled + (job.made.activation is None)
    (*given_refs, w_ref), (out_ref, *beside) = refs[:given], refs[given:]
    worker = lax.axis_index("worker")
    begin = worker * job.share
    end = jnp.minimum(begin + job.share, job.tiles)
    interpreted = job.interpret is not None

    def inputs_of(tile) -> Any:
        return pl.ds(lax.rem(tile, job.steps) * job.depth, job.depth)

    def copy(tile) -> None:
        slot = lax.rem(tile - begin, job.stages)
        outputs = pl.ds(lax.div(tile, job.steps) * job.width, job.width)
        inputs = inputs_of(tile)
        plgpu.copy_gmem_to_smem(w_ref.at[inputs, outputs], w_ring.at[slot], ready.at[slot])
        if job.made is None:
            (x_ref,) = given_refs
            rows = hopper.first_rows(x_ref, job.rows, worker)
            plgpu.copy_gmem_to_smem(x_ref.at[rows, inputs], x_ring.at[slot], ready.at[slot])

    def place(tile) -> Any:
        """Where the rows for a tile lie."""
        return x_ring.at[lax.rem(tile - begin, x_ring.shape[0])]

    def make_row(tile) -> None:
        """Those of the inputs of a tile, beside the ones that are being multiplied."""
        row = made.numbers(inputs_of(tile), _ROW.reduce(0))
        equal = lax.broadcast_in_dim(row, (job.rows, job.depth), (1,))
        place(tile)[...] = plgpu.layout_cast(equal, _ROW)

    def waited(tile) -> tuple[Any, Any]:
        """The tile and the rows for it."""
        slot = lax.rem(tile - begin, job.stages)
        if job.made is not None:
            plgpu.commit_smem()
        plgpu.barrier_wait(ready.at[slot])
        return w_ring.at[slot], place(tile).transpose((1, 0))

    def go_on(tile) -> None:
        """Begin what comes after a product."""

        @pl.when(tile + job.stages < end)
        def _():
            # All warps have read the slot.
            plgpu.commit_smem()
            copy(tile + job.stages)

        if job.made is not None:
            pl.when(tile + 1 < end)(functools.partial(make_row, tile + 1))

    def sums(tiles: tuple[Array, Array]) -> list[Array]:
        """Those of the tiles, 64 outputs each."""

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

    def sums_of_8_bits(tiles: tuple[Array, Array]) -> list[Array]:
        """Those of the tiles, all outputs."""

        def multiply(tile, acc) -> Array:
            matrix, rows = waited(tile)
            matrix = hopper_bits.columns_of(matrix, job.dtype, interpreted)
            acc = hopper.add_product(acc, matrix, rows, interpreted)
            go_on(tile)
            return acc

        found = lax.fori_loop(*tiles, multiply, hopper.full((job.width, job.rows), 0.0))
        return [hopper_bits.in_row_order(found, interpreted)]

    for ahead in range(min(job.stages, job.share)):
        pl.when(begin + ahead < end)(functools.partial(copy, begin + ahead))
    if job.made is not None:
        made = _Row(job, given_refs)
        if beside:
            made.write(worker, *beside)
        make_row(begin)

    @pl.loop(lax.div(begin, job.steps), lax.div(end - 1, job.steps) + 1)
    def _block(block):
        first = block * job.steps
        tiles = jnp.maximum(first, begin), jnp.minimum(first + job.steps, end)
        part = worker - lax.div(first, job.share)
        outputs = block * job.width
        for found in (sums_of_8_bits if job.eight_bits else sums)(tiles):
            # Some outputs of a row lie in a thread, so that the transpose is stored as they lie.
            place = out_ref.at[part, :, pl.ds(outputs, found.shape[0])]
            hopper.store_little(found, place.transpose((1, 0)))
            outputs += found.shape[0]
        if not job.filled:
            return

        # Who has the block's last tile fills the parts that nobody has.
        @pl.loop(jnp.where(tiles[1] == first + job.steps, part + 1, job.parts), job.parts)
        def _fill(absent):
            place = out_ref.at[absent, :, pl.ds(block * job.width, job.width)]
            place[...] = jnp.zeros(place.shape, jnp.float32)


class _Row:
    """The row that a kernel makes of an earlier product's sums."""

    def __init__(self, job: _Job, refs: list[Any]):
        assert job.made is not None
        self.job, self.made = job, job.made
        self.parts_ref, *others = refs
        self.scales_ref = others.pop(0) if self.made.scaled else None
        if self.made.activation is None:
            self.x_ref, self.scale_ref = others
            return
        (squares_ref,) = others
        squares = [squares_ref[i] for i in range(squares_ref.shape[0])]
        mean = functools.reduce(jnp.add, squares) / self.made.size
        self.factor = lax.rsqrt(mean + self.made.eps)

    def numbers(self, columns: Any, layout: Any) -> Array:
        """What is multiplied, of these columns."""
        if self.made.activation is None:
            scale = self._load(self.scale_ref.at[columns], layout)
            return self._rounded(scale * self.added(columns, layout))
        further = pl.ds(columns.start + self.job.inputs, columns.size)
        gate, up = (
            self._rounded(self._sums(each, layout) * self.factor).astype(jnp.float32)
            for each in (columns, further)
        )
        gate = self._rounded(self.made.activation(gate)).astype(jnp.float32)
        return self._rounded(gate * up)

    def added(self, columns: Any, layout: Any) -> Array:
        """The sum of `Added`, rounded, in float32."""
        sums = self._rounded(self._sums(columns, layout)).astype(jnp.float32)
        x = self._load(self.x_ref.at[0, columns], layout)
        return self._rounded(x + sums).astype(jnp.float32)

    def write(self, worker: Array, x_ref: Any, squares_ref: Any) -> None:
        """Writes the sum and its squares' sums, each worker its part."""
        size = self.job.piece
        layout = plgpu.Layout.WG_STRIDED((size,), vec_size=size // 128)

        @pl.loop(worker, squares_ref.shape[0], step=pl.cdiv(self.job.tiles, self.job.share))
        def _piece(piece):
            columns = pl.ds(piece * size, size)
            x = self.added(columns, layout)
            x_ref[0, columns] = self._rounded(x)
            squares_ref[piece] = (x * x).sum()

    def _sums(self, columns: Any, layout: Any) -> Array:
        each = [
            self._load(self.parts_ref.at[part, 0, columns], layout)
            for part in range(self.parts_ref.shape[0])
        ]
        sums = functools.reduce(jnp.add, each)
        if self.scales_ref is None:
            return sums
        return sums * self._load(self.scales_ref.at[0, columns], layout)

    def _load(self, ref: Any, layout: Any) -> Array:
        return plgpu.load(ref, layout=layout, optimized=False).astype(jnp.float32)

    def _rounded(self, x: Array) -> Array:
        return x.astype(self.job.dtype)
