"""`expert_matmul` on Hopper: a Mosaic GPU kernel that streams the chosen matrices.

As in `row_matmul`, the outputs are the rows of a wgmma and a block's rows its columns: out.T =
w.T @ x.T. A piece of work is a block with 64 or 128 of its outputs and all inputs, or a part of
them where there are few pieces. The workers, two blocks of threads on each processor, take pieces
in turn, and the copies of a worker's next tiles are under way over the borders of its pieces. How
many pieces there are follows from the blocks that are used. The sums over the parts of the inputs
and the scales of 8 bits are applied outside.

Roofline: the bytes of the chosen matrices; of large blocks the products. On an H200 a step of
gpt-oss-20b's shape over 32,768 tokens takes 3.45 ms, with XLA's form 18.86; of Qwen3-30B-A3B's in
int8 4.31 and 11.36, with eight rows over 8,192 tokens 6.24 and 26.28. That reads 32,768 tokens in
1.18 s, with XLA's form in 8.65.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from pallas_kernels import hopper
from pallas_kernels.quantised_matrix import AnyMatrix, QuantisedMatrix
from pallas_kernels.row_matmul import gpu
from pallas_kernels.row_matmul.gpu import tile_depth, tile_sums

# Elements of a matrix's tile at most, outputs of one, and workers of a processor.
_TILE, _WIDTHS, _WORKERS = 8192, (128, hopper.ROWS), 2
# Bytes of shared memory for a worker's tiles, and tiles in flight at most.
_RING, _STAGES = 98_304, 8
# Rows of a block. Bytes of a matrix for each row of a part: a twelfth of them is the part's own.
_ROWS, _PART = 128, 96


def unsupported(x: Array | jax.ShapeDtypeStruct, w: AnyMatrix) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    reason = gpu.unsupported(x, w)
    if reason is None and x.shape[1] > _ROWS:
        reason = f"a block has {x.shape[1]} rows, more than {_ROWS}"
    return reason


def expert_matmul(
    x: Float[Array, "X R D"],
    w: AnyMatrix,
    experts: Int[Array, " U"],
    count: Int[Array, ""],
    *,
    interpret: Any = None,
) -> Float[Array, "U R N"]:
    """See the public function."""
    (_, rows, inputs), (*_, outputs), blocks = x.shape, w.shape, len(experts)
    coded = isinstance(w, QuantisedMatrix)
    stored = w.values if coded else w
    workers, padded = hopper.processors() * _WORKERS, rows + -rows % hopper.TILE_ROWS
    # A sum's part is written and read in float32.
    most = inputs * stored.dtype.itemsize // (_PART * padded)
    width, depth, parts = _division((blocks, inputs, outputs), workers, most)
    each = depth * (width * stored.dtype.itemsize + padded * x.dtype.itemsize)
    stages = min(_RING // each, _STAGES)
    summed = parts > 1 or coded
    kernel = plgpu.kernel(
        functools.partial(_kernel, parts=parts, interpreted=interpret is not None),
        out_type=jax.ShapeDtypeStruct(
            (parts, blocks, padded, outputs), jnp.float32 if summed else x.dtype
        ),
        scratch_types=dict(
            w_ring=hopper.tiled(stages, depth, width, dtype=stored.dtype),
            x_ring=hopper.tiled(stages, padded, depth, dtype=x.dtype),
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        ),
        grid=(min(workers, parts * blocks * outputs // width),),
        grid_names=("worker",),
        interpret=interpret,
        kernel_name="expert_matmul",
    )
    out_PURN = kernel(hopper.whole_rows(x, interpret), stored, experts, count[None])
    y_URN = out_PURN[0] if parts == 1 else jnp.sum(out_PURN, axis=0)
    y_URN = y_URN[:, :rows]
    return (y_URN * w.scales[experts] if isinstance(w, QuantisedMatrix) else y_URN).astype(x.dtype)


def _division(shape: tuple[int, int, int], workers: int, most: int) -> tuple[int, int, int]:
    """Outputs and inputs of a tile, and parts of the inputs, that keep the workers busy.

    Args:
      shape: blocks, inputs, outputs.
      most: parts that their sums' bytes allow.
    """
    blocks, inputs, outputs = shape
    found = []
    for width in _WIDTHS:
        depth = tile_depth(inputs, _TILE // width)
        steps, pieces = inputs // depth, blocks * outputs // width
        for parts in range(1, max(most, 1) + 1):
            if outputs % width == 0 and steps % parts == 0:
                turns = -(-pieces * parts // workers)
                found.append((turns * (steps // parts) * depth * width, parts, -width, depth))
    _, parts, width, depth = min(found)
    return -width, depth, parts


def _kernel(*refs, parts: int, interpreted: bool, w_ring, x_ring, ready) -> None:
    x_ref, w_ref, experts_ref, count_ref, out_ref = refs
    worker, workers = lax.axis_index("worker"), lax.axis_size("worker")
    stages, depth, width = w_ring.shape
    steps = w_ref.shape[1] // depth // parts
    across = w_ref.shape[2] // width
    pieces = count_ref[0] * (across * parts)
    # Tiles of all of this worker's pieces, one piece after another.
    end = lax.div(pieces - worker + workers - 1, workers) * steps

    def place(piece) -> tuple[Any, Any, Any]:
        """Block, part and outputs of the worker's piece of that number."""
        number = worker + piece * workers
        block, rest = lax.div(number, across * parts), lax.rem(number, across * parts)
        return block, lax.div(rest, across), pl.ds(lax.rem(rest, across) * width, width)

    def copy(tile) -> None:
        slot = lax.rem(tile, stages)
        block, part, outputs = place(lax.div(tile, steps))
        inputs = pl.ds((part * steps + lax.rem(tile, steps)) * depth, depth)
        matrix = w_ref.at[experts_ref[block], inputs, outputs]
        plgpu.copy_gmem_to_smem(matrix, w_ring.at[slot], ready.at[slot])
        rows = hopper.first_rows(x_ref, x_ring.shape[1], worker)
        its = x_ref.at[block if x_ref.shape[0] > 1 else 0, rows, inputs]
        plgpu.copy_gmem_to_smem(its, x_ring.at[slot], ready.at[slot])

    def waited(tile) -> tuple[Any, Any]:
        """The tile and the rows for it."""
        slot = lax.rem(tile, stages)
        plgpu.barrier_wait(ready.at[slot])
        return w_ring.at[slot], x_ring.at[slot].transpose((1, 0))

    def go_on(tile) -> None:
        """Begin the work after a product."""

        @pl.when(tile + stages < end)
        def _():
            # All warps have read the slot.
            plgpu.commit_smem()
            copy(tile + stages)

    for ahead in range(stages):
        pl.when(ahead < end)(functools.partial(copy, ahead))

    @pl.loop(0, lax.div(end, steps))
    def _piece(piece):
        block, part, outputs = place(piece)
        tiles = piece * steps, (piece + 1) * steps
        first = outputs.start
        shape = width, x_ring.shape[1]
        for found in tile_sums(tiles, waited, go_on, shape, w_ref.dtype, x_ref.dtype, interpreted):
            its = out_ref.at[part, block, :, pl.ds(first, found.shape[0])]
            hopper.store_little(found.astype(out_ref.dtype), its.transpose((1, 0)))
            first += found.shape[0]
