"""The definition of `row_matmul`."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float


def row_matmul(
    x: Float[Array, "R D"], w: Float[Array, "D N"], *, dtype: DTypeLike
) -> Float[Array, "R N"]:
    """See the public function."""
    product = jnp.sum(x.astype(jnp.float32)[:, :, None] * w.astype(jnp.float32), axis=1)
    return product.astype(dtype)
