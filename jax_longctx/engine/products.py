"""How a layer's hidden states are multiplied with its weights, on a mesh and on one GPU."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import ACTIVATIONS, Hidden, Norm, Products, sums_of_squares
from jax_longctx.sharding import AnyMesh, weight_sharding
from pallas_kernels.quantised_matrix import AnyMatrix, matrix_of
from pallas_kernels.row_matmul import row_matmul, row_sums
from pallas_kernels.row_matmul.rows import Added, Gated, Sums, added, gated, shape_of


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
    spread: bool = False

    def placed(self, x: Array, *axes: str | None) -> Array:
        if not self.spread:
            axes = tuple(None if axis == "tokens" else axis for axis in axes)
        return jax.lax.with_sharding_constraint(x, weight_sharding(self.mesh, axes, x.shape))


def gathers_weights(config: ModelConfig, mesh: AnyMesh, tokens: int) -> bool:
    """Whether a layer gathers its weights for spread tokens, so many on a shard, or the tokens.

    Of S shards a device receives (S - 1) / S of a layer's weights, divided over `tensor`. Or it
    receives S - 1 times the hidden states of its own tokens: before the projections and the MLP to
    gather them, and after each to add up its own tokens' results.
    """
    weights = 2 * config.model_dim * (config.num_heads + config.num_kv_heads) * config.head_dim
    weights += 3 * config.model_dim * config.mlp_dim
    own = weights / (mesh.shape["seq"] * mesh.shape["tensor"])
    return own < 4 * tokens * config.model_dim


# Whether what comes between two products of one row (sums, residual, norm, gate) is computed by the
# second one's kernel, not by kernels of XLA's between them. Not measured.
CHAINED = False


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unfinished:
    """Hidden states of one row: x and what is to be added."""

    x: Float[Array, "1 1 D"]
    sums: Sums

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape


@dataclasses.dataclass(frozen=True)
class FewRows(Products):
    """Products of at most `MAX_ROWS` rows by the kernel `row_matmul`, on one GPU.

    Attributes:
      chained: whether those of one row are `CHAINED`. The model's norms are "rms" then.
    """

    mesh: AnyMesh
    chained: bool = False

    def of(self, x: Array, w: AnyMatrix, axes: int = 1) -> Array:
        return self._product(x, w, axes, x.dtype)

    def normed(self, norm: Norm, x: Hidden, w: AnyMatrix) -> tuple[Array, Array]:
        if isinstance(x, Unfinished):
            assert norm.factor is not None
            x, sums, squares = self._added(norm, x, w)
            # One by one, so that XLA adds them up where it multiplies.
            y = sums.whole() * norm.factor(functools.reduce(jnp.add, list(squares)))
            return x, y.astype(x.dtype).reshape(1, 1, *w.shape[1:])
        if x.dtype == jnp.float16 or norm.factor is None:
            # float16 may not hold a product of the scale and x without the norm.
            return super().normed(norm, x, w)
        # The norm's factor is applied after the product, so that the product need not wait for it.
        # Without the barrier XLA would fuse the residual sums into the factor's reduction, which
        # runs in one block of threads.
        squares = sums_of_squares(jax.lax.optimization_barrier(x))
        y = self._product(norm.scale[...] * x, w, 1, jnp.float32)
        factor = norm.factor(squares).reshape(*x.shape[:2], *[1] * (y.ndim - 2))
        return x, (y * factor).astype(x.dtype)

    def gated(
        self, norm: Norm, x: Hidden, w: AnyMatrix, activation: str, bias: Array | None
    ) -> tuple[Array, Any]:
        if not isinstance(x, Unfinished) or bias is not None:
            return super().gated(norm, x, w, activation, bias)
        x, sums, squares = self._added(norm, x, w)
        run = ACTIVATIONS[activation]
        return x, Gated(sums, squares, x.shape[-1], norm.eps, run, x.dtype)

    def added(self, x: Array, y: Any, w: AnyMatrix, bias: Array | None, axes: int = 1) -> Hidden:
        chained = self.chained and x.shape[:2] == (1, 1) and x.dtype != jnp.float16
        if chained and bias is None:
            return Unfinished(x, self._sums(y if isinstance(y, Gated) else y.reshape(1, -1), w))
        if isinstance(y, Gated):
            y = gated(y)[None]
        return super().added(x, y, w, bias, axes)

    def whole(self, x: Hidden) -> Array:
        return added(x.x[0], x.sums)[None] if isinstance(x, Unfinished) else x

    def _added(self, norm: Norm, x: Unfinished, w: AnyMatrix) -> tuple[Array, Sums, Array]:
        """x, added up; the product of x and the norm's scale with w; the sum of x's squares."""
        after = self._sums(Added(x.x[0], x.sums, norm.scale[...]), w)
        return after.x[None], after.sums, after.squares

    def _sums(self, rows: Any, w: AnyMatrix) -> Any:
        return self._on_mesh(row_sums, rows, matrix_of(w, shape_of(rows)[1]))

    def _product(self, x: Array, w: AnyMatrix, axes: int, dtype: Any) -> Array:
        rows, inputs = x.shape[0] * x.shape[1], math.prod(x.shape[2:])
        multiply = functools.partial(row_matmul, dtype=dtype)
        y = self._on_mesh(multiply, x.reshape(rows, inputs), matrix_of(w, inputs))
        return y.reshape(*x.shape[:2], *w.shape[axes:])

    def _on_mesh(self, multiply: Any, rows: Any, w: Any) -> Any:
        whole = PartitionSpec()
        how = {"in_specs": whole, "out_specs": whole, "check_vma": False}
        return jax.shard_map(multiply, mesh=self.mesh, **how)(rows, w)
