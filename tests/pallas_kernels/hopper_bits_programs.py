"""Compiles small kernels of `hopper_bits` for an H200 that need not be there.

`python -m tests.pallas_kernels.hopper_bits_programs` in a process that finds JAX's CUDA plugin,
with `MOSAIC_GPU_DUMP_TO` and `MOSAIC_GPU_DUMP_PTX`: one file of PTX for each name of `KERNELS`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper, hopper_bits
from tests.gpu_plugin import compiler
from tests.jax_longctx.engine.gpu_programs import H200

# Name: what runs, rows and columns of the matrix in shared memory, the floats' dtype.
KERNELS: dict[str, tuple[str, int, int, str]] = {
    f"{what}_{columns}_{dtype}": (what, 256 if columns == 64 else 128, columns, dtype)
    for what in ("rows", "columns")
    for columns in (64, 128)
    for dtype in ("bfloat16", "float16")
}
KERNELS |= {
    f"{what}_{columns}": (what, 64, columns, "bfloat16")
    for what in ("order", "over", "weights")
    for columns in (64, 128)
}


def outputs(what: str, rows: int, columns: int, dtype: str) -> jax.ShapeDtypeStruct:
    shape = {"rows": (rows, columns), "columns": (columns, rows), "over": (columns, 8)}
    kind = jnp.float32 if what in ("order", "over") else dtype
    return jax.ShapeDtypeStruct(shape.get(what, (8, columns)), kind)


def kernel(name: str) -> Any:
    what, rows, columns, dtype = KERNELS[name]
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


def main() -> None:
    compiled = compiler(H200)
    for name, (_, rows, columns, _) in KERNELS.items():
        compiled(kernel(name), ((columns, 8), jnp.float32), ((rows, columns), jnp.int8))


if __name__ == "__main__":
    main()
