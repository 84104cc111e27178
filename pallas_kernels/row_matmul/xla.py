"""`row_matmul` as one matmul of the compiler's."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from pallas_kernels.dispatch import platform
from pallas_kernels.quantised_matrix import AnyMatrix, QuantisedMatrix

# Rows up to which a GPU multiplies weights in 8 bits and adds, without them as floats in memory. A
# fusion of XLA's does two rows at once.
_FEW = 4


def row_matmul(x: Float[Array, "R D"], w: AnyMatrix, *, dtype: DTypeLike) -> Float[Array, "R N"]:
    """See the public function."""
    rows, gpu = x.shape[0], platform() == "gpu"
    if isinstance(w, QuantisedMatrix):
        if gpu and rows <= _FEW:
            x, values = x.astype(jnp.float32), w.values.astype(jnp.float32)
            sums = jnp.stack([jnp.sum(row[:, None] * values, axis=0) for row in x])
        else:
            sums = jnp.dot(x, w.values.astype(x.dtype), preferred_element_type=jnp.float32)
        return (sums * w.scales).astype(dtype)
    if gpu and rows == 1 and x.dtype != dtype:
        # XLA would write w in float32 before it multiplies one row to a float32 result.
        x = jnp.pad(x, ((0, 1), (0, 0)))
    return jnp.dot(x, w, preferred_element_type=dtype)[:rows]
