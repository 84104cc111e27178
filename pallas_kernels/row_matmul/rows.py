"""What a product's rows may be made of: sums of an earlier product that are not added up yet."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike
from jaxtyping import Float

from pallas_kernels.quantised_matrix import AnyMatrix


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sums:
    """A product as its kernel leaves it: the parts of its sums.

    Attributes:
      parts: [P,R8,N], float32; rows beyond the product's may hold anything.
      scales: [1,N], which multiply the sums; None for 1.
      rows: of the product.
    """

    parts: Float[Array, "P R8 N"]
    scales: Float[Array, "1 N"] | None
    rows: int = field(metadata={"static": True})

    def whole(self) -> Float[Array, "R N"]:
        """The product, in float32."""
        sums = jnp.sum(self.parts[:, : self.rows], axis=0)
        return sums if self.scales is None else sums * self.scales


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Added:
    """x + sums, whose product with `scale`, rounded to x's dtype, is what is multiplied.

    Attributes:
      scale: [D], of a norm whose factor multiplies the product.
    """

    x: Float[Array, "R D"]
    sums: Sums
    scale: Float[Array, " D"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Gated:
    """activation(gate) * up of sums [R, 2 F], which a norm's factor multiplies.

    Attributes:
      squares: [S], float32: sums of squares of the one row that was normed, of `size` numbers.
      dtype: of what is multiplied; gate and up are rounded to it before.
    """

    sums: Sums
    squares: Float[Array, " S"]
    size: int = field(metadata={"static": True})
    eps: float = field(metadata={"static": True})
    activation: Callable[[Array], Array] = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})


class AfterNorm(NamedTuple):
    """A product of `Added` rows.

    Attributes:
      x: the rows, not multiplied by the norm's scale.
      squares: [S], float32: sums of squares of the row's numbers, to add up.
    """

    sums: Sums
    x: Float[Array, "R D"]
    squares: Float[Array, " S"]


def added(x: Float[Array, "R D"], sums: Sums) -> Float[Array, "R D"]:
    """x + sums."""
    return x + sums.whole().astype(x.dtype)


def gated(rows: Gated) -> Float[Array, "R F"]:
    """activation(gate) * up."""
    factor = jax.lax.rsqrt(jnp.sum(rows.squares) / rows.size + rows.eps)
    both = (rows.sums.whole() * factor).astype(rows.dtype)
    gate, up = jnp.split(both, 2, axis=1)
    return rows.activation(gate) * up


def dtype_of(rows: Any) -> DTypeLike:
    """The dtype of what is multiplied."""
    return rows.x.dtype if isinstance(rows, Added) else rows.dtype


def shape_of(rows: Any) -> tuple[int, ...]:
    """The shape of what is multiplied."""
    if isinstance(rows, Gated):
        return rows.sums.rows, rows.sums.parts.shape[2] // 2
    return rows.x.shape if isinstance(rows, Added) else rows.shape


def of_products(rows: Any, w: AnyMatrix, *, product: Callable[..., Array]) -> Any:
    """`row_sums` by a function for whole products."""
    if isinstance(rows, Added):
        x = added(rows.x, rows.sums)
        squares = jnp.sum(jnp.square(x.astype(jnp.float32))).reshape(1)
        sums = of_products(rows.scale * x, w, product=product)
        return AfterNorm(sums, x, squares)
    if isinstance(rows, Gated):
        rows = gated(rows)
    # The scales of 8 bits are in the product.
    return Sums(product(rows, w, dtype=jnp.float32)[None], None, rows.shape[0])
