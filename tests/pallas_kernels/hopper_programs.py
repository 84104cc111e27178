"""Compiles kernels of `hopper_bits`, `hopper_best` and `gpu_ties` for an H200 that may be absent.

`python -m tests.pallas_kernels.hopper_programs` in a process that finds JAX's CUDA plugin, with
`MOSAIC_GPU_DUMP_TO` and `MOSAIC_GPU_DUMP_PTX`: one file of PTX for each name of `BITS`, `BEST` and
`TIES`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper, hopper_best, hopper_bits, hopper_warps
from pallas_kernels.topk_scores import gpu_ties
from tests.gpu_plugin import compiler
from tests.jax_longctx.engine.gpu_programs import H200

# Name: what runs, rows and columns of the matrix in shared memory, the floats' dtype.
BITS: dict[str, tuple[str, int, int, str]] = {
    f"{what}_{columns}_{dtype}": (what, 256 if columns == 64 else 128, columns, dtype)
    for what in ("rows", "columns")
    for columns in (64, 128)
    for dtype in ("bfloat16", "float16")
}
BITS |= {
    f"{what}_{columns}": (what, 64, columns, "bfloat16")
    for what in ("order", "over", "weights")
    for columns in (64, 128)
}


def outputs(what, rows, columns, dtype):
    shape = {"rows": (rows, columns), "columns": (columns, rows), "over": (columns, 8)}
    kind = jnp.float32 if what in ("order", "over") else dtype
    return jax.ShapeDtypeStruct(shape.get(what, (8, columns)), kind)


def from_bits(name):
    what, rows, columns, dtype = BITS[name]
    found = outputs(what, rows, columns, dtype)

    def body(x_ref, w_ref, out_ref, w, across, weights, ready):
        plgpu.copy_gmem_to_smem(w_ref, w, ready)
        plgpu.barrier_wait(ready)
        if what in ("rows", "columns"):
            run = hopper_bits.rows_of if what == "rows" else hopper_bits.columns_of
            hopper.store_little(run(w, jnp.dtype(dtype), False), out_ref)
            return
        x = plgpu.load(x_ref, layout=plgpu.Layout.WGMMA, optimized=False)
        if what == "order":
            out = hopper_bits.in_row_order(x, False)
            hopper.store_little(out, out_ref.transpose((1, 0)))
        elif what == "over":
            sums = hopper_bits.over_rows(x, across, "sum", False)
            hopper.store_little(jax.lax.broadcast_in_dim(sums, x.shape, [1]), out_ref)
        else:
            # As `hopper_slots` hands weights to the product.
            x = plgpu.layout_cast(x.astype(dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            weights.transpose((1, 0))[...] = x
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(weights, out_ref)
            plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=found,
        scratch_types=dict(
            w=hopper.tiled(rows, columns, dtype=jnp.int8),
            across=plgpu.SMEM((4, 8), jnp.float32),
            weights=hopper.tiled(8, columns, dtype=dtype),
            ready=plgpu.Barrier(),
        ),
        kernel_name=name,
    )


# Name: tiles of a row of scores, places of its list, and the gap in the row.
BEST: dict[str, tuple[int, int, tuple[int, int] | None]] = {
    "best_one": (1, 64, None),
    "best_few": (2, 20, None),
    "best_gap": (2, 64, (1000, 1408)),
    # More than registers hold.
    "best_many": (5, 512, None),
}
# Name: what runs, and the shapes and dtypes of its arguments.
TIES: dict[str, tuple[Any, list[tuple[tuple[int, ...], Any]]]] = {
    "tied_best": (
        lambda tolerance, scores, **how: gpu_ties.tied_best(scores, 4, tolerance, **how),
        [((2,), jnp.float32), ((2, 1536), jnp.float32)],
    ),
    "ranked_lists": (
        lambda tolerance, values, slots, **how: gpu_ties.ranked_lists(
            *(values, slots, 60, 4, tolerance), **how
        ),
        [((2, 4), jnp.float32), ((2, 64, 8), jnp.float32), ((2, 64, 8), jnp.int32)],
    ),
}


def best(name):
    """Of first, last and k [3] and scores [T,64,64] the list, which is the second of two."""
    tiles, places, gap = BEST[name]

    def body(bounds_ref, scores_ref, list_ref, **scratch):
        bounds = bounds_ref[0], bounds_ref[1], bounds_ref[2]

        def scores(i):
            return hopper_best.load(scores_ref.at[i])

        edges = None if gap is None else tuple(map(jnp.int32, gap))
        row = hopper_best.Row(tiles, scores, bounds, edges)
        hopper_best.best(row, list_ref.at[1], scratch, False)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, places), jnp.int32),
        scratch_types=hopper_warps.scratch(tiles),
        kernel_name=name,
    )


def main():
    compiled = compiler(H200)
    for name, (_, rows, columns, _) in BITS.items():
        compiled(from_bits(name), ((columns, 8), jnp.float32), ((rows, columns), jnp.int8))
    for name, (tiles, _, _) in BEST.items():
        compiled(best(name), ((3,), jnp.int32), ((tiles, 64, 64), jnp.float32))
    for run, shapes in TIES.values():
        compiled(run, *shapes)


if __name__ == "__main__":
    main()
