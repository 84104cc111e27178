"""`row_matmul` as one matmul of the compiler's."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from pallas_kernels.dispatch import platform

# Of fewer rows XLA for GPUs converts the whole matrix to float32 where the result is float32.
_LEAST_ROWS = 8


def row_matmul(
    x: Float[Array, "R D"], w: Float[Array, "D N"], *, dtype: DTypeLike
) -> Float[Array, "R N"]:
    """See the public function."""
    rows = x.shape[0]
    if platform() == "gpu":
        x = jnp.pad(x, ((0, max(_LEAST_ROWS - rows, 0)), (0, 0)))
    return jnp.dot(x, w, preferred_element_type=dtype)[:rows]
