"""`expert_matmul` as a loop over the blocks, each one matmul of the compiler's.

A turn reads one matrix, as a slice that the compiler may read in place. On a GPU the products of
single rows are one fusion, whose reduction reads the chosen matrices.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import dispatch
from pallas_kernels.quantised_matrix import AnyMatrix, QuantisedMatrix


def expert_matmul(
    x: Float[Array, "X R D"], w: AnyMatrix, experts: Int[Array, " U"], count: Int[Array, ""]
) -> Float[Array, "U R N"]:
    """See the public function."""
    if x.shape[1] == 1 and dispatch.platform() == "gpu":
        return _one_row(x, w, experts)

    def of(array: Any, index: Any) -> Any:
        return jax.lax.dynamic_index_in_dim(array, index, keepdims=False)

    def turn(block: Any, y: Array) -> Array:
        rows = of(x, block if len(x) > 1 else 0)
        matrix = jax.tree.map(lambda part: of(part, of(experts, block)), w)
        if isinstance(matrix, QuantisedMatrix):
            product = matrix.product(rows, 1)
        else:
            product = jnp.dot(rows, matrix)
        return jax.lax.dynamic_update_index_in_dim(y, product, block, 0)

    y = jnp.zeros((len(experts), x.shape[1], w.shape[2]), x.dtype)
    return jax.lax.fori_loop(0, count, turn, y)


def _one_row(x: Array, w: AnyMatrix, experts: Array) -> Array:
    """Of all blocks: those that are not used cost their bytes."""

    def products(values: Array) -> Array:
        rows = x[:, 0, :, None].astype(jnp.float32)
        return jnp.sum(rows * values[experts].astype(jnp.float32), axis=1)[:, None]

    if isinstance(w, QuantisedMatrix):
        return (products(w.values) * w.scales[experts]).astype(x.dtype)
    return products(w).astype(x.dtype)
