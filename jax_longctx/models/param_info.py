"""Shape, logical axes and stored form of a parameter."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding

from jax_longctx.settings import StoredForm
from jax_longctx.sharding import AnyMesh, weight_sharding
from pallas_kernels.quantised_matrix import QuantisedMatrix


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """Shape and logical axes (see `jax_longctx.sharding.RULES`) of one parameter."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]

    def sharding(self, mesh: AnyMesh) -> NamedSharding:
        """How an engine on `mesh` holds it."""
        return weight_sharding(mesh, self.axes, self.shape)

    @property
    def inputs(self) -> tuple[int, ...]:
        """The axes that a matrix contracts; none of a bias or a scale."""
        first, count = self.axes[0], len(self.axes)
        if first == "vocab":
            return (1,)
        if first == "heads" and count == 3:
            return (0, 1)
        if first == "experts":
            return (count - 2,) if count > 2 else ()
        return (0,) if first in ("embed", "mlp") and count > 1 else ()

    @property
    def in_8_bits(self) -> bool:
        """Whether 8-bit weights are so here: of the layers' matrices.

        The table of an embedding and of the head is read as it is: a step reads one row of the one,
        and the other's errors go straight into the logits. A router is small, and its errors would
        change which experts are chosen.
        """
        return bool(self.inputs) and self.axes[0] != "vocab" and self.axes[-1] != "experts"

    @property
    def of_scales(self) -> "ParamInfo":
        """Of the scales of this matrix in 8 bits."""
        shape, axes = [*self.shape], [*self.axes]
        for axis in self.inputs:
            shape[axis], axes[axis] = 1, None
        return ParamInfo(tuple(shape), tuple(axes))

    def abstract(self, mesh: AnyMesh, dtype: Any, weights: StoredForm | None = None) -> Any:
        """Shapes of it on `mesh`, in the 8-bit form where there is one and it has one."""
        sharding = self.sharding(mesh)
        if weights is None or not self.in_8_bits:
            return jax.ShapeDtypeStruct(self.shape, dtype, sharding=sharding)
        scales = self.of_scales
        return QuantisedMatrix(
            jax.ShapeDtypeStruct(self.shape, jnp.int8, sharding=sharding),
            jax.ShapeDtypeStruct(scales.shape, jnp.float32, sharding=scales.sharding(mesh)),
            jnp.dtype(dtype),
        )


def info_of(leaf: Any) -> ParamInfo:
    """Of a leaf of `abstract_model`'s state."""
    return ParamInfo(tuple(leaf.shape), leaf.get_metadata("axes"))


def param(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    """Only its shape counts: `init_params` makes random values, the loader reads stored ones."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes)
