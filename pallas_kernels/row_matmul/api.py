"""x @ w of a few rows x, bound by the bytes of w.

Implementations: `xla` on every platform, `gpu` (Mosaic), `reference` for tests.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from pallas_kernels import dispatch
from pallas_kernels.row_matmul import gpu, reference, xla
from pallas_kernels.row_matmul.sources import Source, Sums, dtype_of, value_of

# With more rows a matmul of the compiler's is as quick.
MAX_ROWS = 16
# Of more rows the kernel would read a source's arrays for longer than the matrix.
MAX_SOURCE_ROWS = 2


def row_matmul(
    x: Float[Array, "R D"],
    w: Float[Array, "D N"],
    *,
    dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "R N"]:
    """x @ w, summed in float32.

    Args:
      x: at most 16 rows.
      dtype: of the result; None is x's.
      implementation: "xla", "gpu" or "reference"; None picks by platform and shape.

    Raises:
      ValueError: the shapes or dtypes do not fit, or there are too many rows.
    """
    _check("row_matmul", x.shape, x.dtype, w, MAX_ROWS)
    run = dispatch.select(
        "row_matmul",
        implementation,
        f"{x.dtype} {x.shape[1]} to {w.shape[1]}",
        xla=xla.row_matmul,
        gpu=dispatch.Kernel(gpu.row_matmul, lambda: gpu.unsupported(x.dtype, w)),
        reference=reference.row_matmul,
    )
    return run(x, w, dtype=x.dtype if dtype is None else dtype)


def row_sums(source: Source, w: Float[Array, "D N"], *, implementation: str | None = None) -> Sums:
    """The product of a source's rows with w, summed in float32, in parts.

    What follows a product is done by the next one (see `sources`), or by the compiler to its total.

    Args:
      source: at most 2 rows.
      implementation: "xla", "gpu" or "reference"; None picks by platform and shape.

    Raises:
      ValueError: the shapes or dtypes do not fit, or there are too many rows.
    """
    dtype = dtype_of(source)
    _check("row_sums", source.shape, dtype, w, MAX_SOURCE_ROWS)
    run = dispatch.select(
        "row_sums",
        implementation,
        f"{dtype} {w.shape[0]} to {w.shape[1]}",
        xla=functools.partial(_whole, xla.row_matmul),
        gpu=dispatch.Kernel(gpu.row_sums, lambda: gpu.unsupported(dtype, w)),
        reference=functools.partial(_whole, reference.row_matmul),
    )
    return run(source, w)


def _whole(multiply: Callable[..., Array], source: Source, w: Array) -> Sums:
    """A product that is one part."""
    product = multiply(value_of(source), w, dtype=jnp.float32)
    return Sums(product[None], len(product))


def _check(name: str, shape: tuple[int, ...], dtype: Any, w: Array, most: int) -> None:
    if len(shape) != 2 or w.ndim != 2 or shape[1] != w.shape[0] or dtype != w.dtype:
        raise ValueError(f"{name}: {dtype}{shape} does not fit {w.dtype}{w.shape}")
    if not 0 < shape[0] <= most:
        raise ValueError(f"{name}: {shape[0]} rows; expected 1 to {most}")
