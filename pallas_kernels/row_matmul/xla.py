"""`row_matmul` as one matmul of the compiler's."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float


def row_matmul(
    x: Float[Array, "R D"], w: Float[Array, "D N"], *, dtype: DTypeLike
) -> Float[Array, "R N"]:
    """See the public function."""
    return jnp.dot(x, w, preferred_element_type=dtype)
