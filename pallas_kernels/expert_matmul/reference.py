"""The definition of `expert_matmul`."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels.quantised_matrix import AnyMatrix, QuantisedMatrix


def expert_matmul(
    x: Float[Array, "X R D"], w: AnyMatrix, experts: Int[Array, " U"], count: Int[Array, ""]
) -> Float[Array, "U R N"]:
    """See the public function; blocks after `count` are zeros."""
    values, scales = (w.values, w.scales) if isinstance(w, QuantisedMatrix) else (w, 1)
    wide_EDN = values.astype(jnp.float32) * scales
    product = jnp.sum(x.astype(jnp.float32)[:, :, :, None] * wide_EDN[experts][:, None], axis=2)
    used = jnp.arange(len(experts)) < count
    return jnp.where(used[:, None, None], product, 0).astype(x.dtype)
