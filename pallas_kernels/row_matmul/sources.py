"""What `row_sums` multiplies: rows as they are, or what is made of earlier products on the way.

Between two products of a layer lie a sum of parts and a few elementwise operations. As a kernel of
their own they take longer to launch than to run, and the next product waits for them. A source says
what they are, and the product's kernel does them as it reads.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float


@functools.partial(jax.tree_util.register_dataclass, data_fields=["parts"], meta_fields=["rows"])
@dataclasses.dataclass(frozen=True)
class Sums:
    """A product [R,N] whose sums are in parts, float32. Rows from R on may hold anything."""

    parts: Float[Array, "P X N"]
    rows: int

    def __len__(self) -> int:
        return self.parts.shape[0]

    def total(self) -> Float[Array, "R N"]:
        """The product, in float32."""
        return jnp.sum(self.parts[:, : self.rows], axis=0)


@functools.partial(jax.tree_util.register_dataclass)
@dataclasses.dataclass(frozen=True)
class Scaled:
    """scale * x, or scale * (x + added): a residual connection and a norm without its factor."""

    x: Float[Array, "R D"]
    added: Sums | None
    scale: Float[Array, " D"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    def value(self) -> Float[Array, "R D"]:
        x = self.x
        return self.scale * (x if self.added is None else x + self.added.total().astype(x.dtype))


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["both", "factor"], meta_fields=["dtype"]
)
@dataclasses.dataclass(frozen=True)
class Gated:
    """silu(gate) * up, where gate and up are the halves of both * factor.

    Attributes:
      dtype: of the result.
    """

    both: Sums
    factor: Float[Array, " R"]
    dtype: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return self.both.rows, self.both.parts.shape[2] // 2

    def value(self) -> Float[Array, "R D"]:
        both = (self.both.total() * self.factor[:, None]).astype(self.dtype)
        gate, up = jnp.split(both, 2, axis=1)
        return jax.nn.silu(gate) * up


Source = Array | Scaled | Gated


def dtype_of(source: Source) -> Any:
    """The dtype of the rows that are multiplied."""
    return source.x.dtype if isinstance(source, Scaled) else source.dtype


def value_of(source: Source) -> Float[Array, "R D"]:
    """The rows that are multiplied."""
    return source if isinstance(source, Array) else source.value()
