"""How a layer's hidden states are multiplied with its weights, on a mesh and on one GPU."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import Norm, Products, rms_factor, sums_of_squares
from jax_longctx.sharding import AnyMesh, ParamInfo, weight_sharding
from pallas_kernels.quantised_matrix import AnyMatrix, matrix_of
from pallas_kernels.row_matmul import row_matmul


@dataclasses.dataclass(frozen=True)
class Divided(Products):
    """Products with weights that are divided over `seq` too.

    Each device multiplies with its own part of the weights. The parts of queries, keys and values
    are gathered over `seq`, as attention needs them. The output projection's sum and the MLP's are
    over `seq` and `tensor` at once.

    Attributes:
      spread: whether the tokens are spread over `seq`. They are gathered for the products.
    """

    mesh: AnyMesh

    @property
    def tokens(self) -> str | None:
        return None

    def weight_spec(self, info: ParamInfo) -> PartitionSpec:
        return info.sharding(self.mesh).spec

    def placed(self, x: Array, *axes: str | None) -> Array:
        if not self.spread:
            axes = tuple(None if axis == "tokens" else axis for axis in axes)
        return jax.lax.with_sharding_constraint(x, weight_sharding(self.mesh, axes, x.shape))


def gathers_weights(config: ModelConfig, mesh: AnyMesh, tokens: int) -> bool:
    """Whether a layer gathers its weights, or its spread tokens: `tokens` on a shard.

    Of S shards a device receives (S - 1) / S of a layer's weights, divided over `tensor`. Or it
    receives S - 1 times the hidden states of its own tokens: before the projections and the MLP to
    gather them, and after each to add up its own tokens' results.
    """
    weights = 2 * config.model_dim * (config.num_heads + config.num_kv_heads) * config.head_dim
    count = 1 if config.experts is None else config.experts.count
    weights += 3 * config.model_dim * config.mlp_dim * count
    own = weights / (mesh.shape["seq"] * mesh.shape["tensor"])
    return own < 4 * tokens * config.model_dim


@dataclasses.dataclass(frozen=True)
class FewRows(Products):
    """Products of at most `MAX_ROWS` rows by the kernel `row_matmul`, on one GPU."""

    mesh: AnyMesh

    def of(self, x: Array, w: AnyMatrix, axes: int = 1) -> Array:
        return self._product(x, w, axes, x.dtype)

    def normed(self, norm: Norm | None, x: Array, w: AnyMatrix) -> Array:
        gain = None if norm is None else norm.gain
        if x.dtype == jnp.float16 or norm is None or gain is None:
            # float16 may not hold a product of the scale and x without the norm.
            return super().normed(norm, x, w)
        # The norm's factor is applied after the product, so that the product need not wait for it.
        # Without the barrier XLA would fuse the residual sums into the factor's reduction, which
        # runs in one block of threads.
        squares = sums_of_squares(jax.lax.optimization_barrier(x))
        y = self._product((gain * x).astype(x.dtype), w, 1, jnp.float32)
        factor = rms_factor(squares, x.shape[-1], norm.eps)
        return (y * factor.reshape(*x.shape[:2], *[1] * (y.ndim - 2))).astype(x.dtype)

    def _product(self, x: Array, w: AnyMatrix, axes: int, dtype: Any) -> Array:
        rows, inputs = x.shape[0] * x.shape[1], math.prod(x.shape[2:])
        how = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "check_vma": False}
        multiply = functools.partial(row_matmul, dtype=dtype)
        run = jax.shard_map(multiply, mesh=self.mesh, **how)
        y = run(x.reshape(rows, inputs), matrix_of(w, inputs))
        return y.reshape(*x.shape[:2], *w.shape[axes:])
