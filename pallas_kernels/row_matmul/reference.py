"""The definition of `row_matmul`."""

import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from pallas_kernels.quantised_matrix import AnyMatrix, QuantisedMatrix


def row_matmul(x: Float[Array, "R D"], w: AnyMatrix, *, dtype: DTypeLike) -> Float[Array, "R N"]:
    """See the public function."""
    values, scales = (w.values, w.scales) if isinstance(w, QuantisedMatrix) else (w, 1)
    wide = values.astype(jnp.float32) * scales
    product = jnp.sum(x.astype(jnp.float32)[:, :, None] * wide, axis=1)
    return product.astype(dtype)
