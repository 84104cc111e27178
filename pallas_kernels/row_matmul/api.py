"""x @ w of a few rows x, bound by the bytes of w, which may be in 8 bits.

Implementations: `xla` on every platform, `gpu` (Mosaic), `reference` for tests.
"""

from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from pallas_kernels import dispatch
from pallas_kernels.quantised import coded
from pallas_kernels.quantised_matrix import AnyMatrix
from pallas_kernels.row_matmul import gpu, reference, xla

# With more rows a matmul of the compiler's is as quick.
MAX_ROWS = 16


def row_matmul(
    x: Float[Array, "R D"],
    w: AnyMatrix,
    *,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "R N"]:
    """x @ w, summed in float32.

    Args:
      x: at most 16 rows.
      w: [D, N]; a `QuantisedMatrix` has a scale for each output.
      dtype: of the result; None is x's.
      implementation: "xla", "gpu" or "reference"; None picks by platform and shape.

    Raises:
      ValueError: the shapes or dtypes do not fit, or there are too many rows.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0] or x.dtype != w.dtype:
        raise ValueError(f"row_matmul: {x.dtype}{x.shape} does not fit {w.dtype}{w.shape}")
    if not 0 < x.shape[0] <= MAX_ROWS:
        raise ValueError(f"row_matmul: {x.shape[0]} rows; expected 1 to {MAX_ROWS}")
    run = dispatch.select(
        "row_matmul",
        implementation,
        f"{x.dtype} {x.shape[1]} to {w.shape[1]}" + ", weights in int8" * coded(w),
        xla=xla.row_matmul,
        gpu=dispatch.Kernel(gpu.row_matmul, lambda: gpu.unsupported(x, w)),
        reference=reference.row_matmul,
    )
    return run(x, w, dtype=x.dtype if dtype is None else dtype)
