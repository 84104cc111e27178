"""How a layer's hidden states are multiplied with its weights, on a mesh and on one GPU.

The weights are divided over `tensor` and `seq` (`sharding.weight_sharding`). Tokens that every
shard of `seq` has (decode steps, chunks of prefill, questions) are multiplied in place, with each
device's own part of the weights. Of tokens that are spread over `seq` (`Segment.spread`), either
the tokens are gathered for each product, or the weights, a layer's at a time: what is fewer bytes.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array

from jax_longctx.contract import WEIGHT_PLACES
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import Norm, Products, parts_info, rms_factor, sums_of_squares
from jax_longctx.sharding import (
    AnyMesh,
    ParamInfo,
    info_of,
    logical_spec,
    mesh_axes,
    on_devices,
    weight_sharding,
    weight_spec,
)
from pallas_kernels.peers import AllPeers, gather_over, row_matmul_over
from pallas_kernels.quantised_matrix import AnyMatrix, matrix_of
from pallas_kernels.row_matmul import row_matmul


@dataclasses.dataclass(frozen=True)
class Divided(Products):
    """Products with each device's own part of the weights, and all tokens, gathered if spread.

    The parts of queries, keys and values are gathered over `seq`, as attention needs them. The
    output projection's sum and the MLP's are over `seq` and `tensor` at once.
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
    """Products of at most `MAX_ROWS` rows a device by the kernel `row_matmul`, on GPUs.

    Each device multiplies with its own part of the weights, as in `Divided`.

    Attributes:
      peers: what sums and gathers over axes of the mesh go through (`Setup.peers`).
    """

    mesh: AnyMesh
    peers: AllPeers = dataclasses.field(default_factory=dict, compare=False)

    def weight_spec(self, info: ParamInfo) -> PartitionSpec:
        return weight_spec(self.mesh, info.axes, info.shape)

    def of(self, x: Array, weight: nnx.Param, axes: int = 1) -> Array:
        return self._product(x, weight, axes)

    def normed(self, norm: Norm | None, x: Array, weight: nnx.Param) -> Array:
        gain = None if norm is None else norm.gain
        if x.dtype == jnp.float16 or norm is None or gain is None:
            # float16 may not hold a product of the scale and x without the norm.
            return super().normed(norm, x, weight)
        # The norm's factor is applied after the product, so that the product need not wait for it.
        # Without the barrier XLA would fuse the residual sums into the factor's reduction, which
        # runs in one block of threads.
        squares = sums_of_squares(jax.lax.optimization_barrier(x))
        factor = rms_factor(squares, x.shape[-1], norm.eps)
        return self._product((gain * x).astype(x.dtype), weight, 1, factor)

    def _product(
        self, x: Array, weight: nnx.Param, axes: int, factor: Array | None = None
    ) -> Array:
        """The product times `factor` [B,T,1], in x's dtype."""
        w, info = weight[...], info_of(weight)
        spec = self.weight_spec(info)
        summed, out = mesh_axes(self.mesh, spec[:axes]), [*spec[axes:]]
        # Attention needs whole heads.
        whole = info.axes[-1] == "head_dim" and bool(mesh_axes(self.mesh, spec[-1:]))
        if whole:
            out[-1] = None

        def multiply(x: Array, w: AnyMatrix, factor: Array | None, peers: AllPeers) -> Array:
            rows, inputs = x.shape[0] * x.shape[1], math.prod(x.shape[2:])
            given = x.reshape(rows, inputs), matrix_of(w, inputs)
            if summed:
                y = row_matmul_over(summed, *given, peers, WEIGHT_PLACES.index(info.axes[0]))
            else:
                y = row_matmul(*given, dtype=x.dtype if factor is None else jnp.float32)
            y = y.reshape(*x.shape[:2], *w.shape[axes:])
            if factor is not None:
                y = y * factor.reshape(*x.shape[:2], *[1] * (y.ndim - 2))
            y = y.astype(x.dtype)
            if whole:
                y = jnp.moveaxis(gather_over("seq", y, peers, WEIGHT_PLACES.index("embed")), 0, -2)
                y = y.reshape(*y.shape[:-2], -1)
            return y

        rows = logical_spec(("batch", None))
        specs = jax.tree.map(self.weight_spec, parts_info(w, info))
        away = PartitionSpec(self.mesh.axis_names)
        in_specs = PartitionSpec(*rows, *spec[:axes]), specs, rows, away
        run = on_devices(self.mesh, multiply, in_specs, PartitionSpec(*rows, *out))
        return run(x, w, factor, self.peers)
