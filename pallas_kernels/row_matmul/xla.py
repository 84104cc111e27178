"""`row_matmul` as one matmul of the compiler's."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from pallas_kernels.quantised_matrix import AnyMatrix, QuantisedMatrix


def row_matmul(x: Float[Array, "R D"], w: AnyMatrix, *, dtype: DTypeLike) -> Float[Array, "R N"]:
    """See the public function."""
    if isinstance(w, QuantisedMatrix):
        sums = jnp.dot(x, w.values.astype(x.dtype), preferred_element_type=jnp.float32)
        return (sums * w.scales).astype(dtype)
    return jnp.dot(x, w, preferred_element_type=dtype)
