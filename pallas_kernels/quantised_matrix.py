"""`QuantisedMatrix`: a weight in int8, with a scale for each of its outputs.

w is stored as round(w / scale); scale is the largest magnitude of the output's column over 127, in
float32. A product multiplies with the numbers, which bfloat16, float16 and float32 hold exactly,
sums in float32 and multiplies each output by its scale. So its only error is in the stored
numbers: scale / 2 at most.

Scales have the axes of the matrix, of size 1 along its inputs. So both arrays are stacked, joined,
cut and divided over devices by the same code.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxtyping import Float

from pallas_kernels.quantised import MOST, Coded

# A column whose scale is smaller becomes zeros: the scale's inverse would not be finite.
TINY = float(np.finfo(np.float32).tiny)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantisedMatrix(Coded):
    """A weight in 8 bits; it stands for an array of `dtype`.

    Attributes:
      values: int8, in the weight's shape.
      scales: float32; of size 1 along the axes of inputs.
      dtype: of the weight that was stored, and of products.
    """

    def product(self, x: Float[Array, "..."], axes: int) -> Float[Array, "..."]:
        """The last `axes` axes of x with as many first ones of the weight, in x's dtype.

        The numbers are brought to x's dtype, exactly, as the product reads them or just before.
        """
        # Sums over devices are sent as they come out of the product, so not in float32 where the
        # numbers may be as large as x's dtype holds. float16 holds too little.
        kind = jnp.float32 if x.dtype == jnp.float16 else x.dtype
        sums = jnp.tensordot(x, self.values.astype(x.dtype), axes, preferred_element_type=kind)
        return (sums * self.scales.reshape(self.shape[axes:])).astype(x.dtype)

    def __getitem__(self, index: Any) -> "QuantisedMatrix":
        """Itself, for `[...]`: a module reads its parameters so."""
        if index is not Ellipsis:
            raise TypeError("a QuantisedMatrix has no parts; take those of `values` and `scales`")
        return self


# A weight that products take.
AnyMatrix = Array | QuantisedMatrix


def quantise_matrix(
    w: Float[Array, "..."] | Float[np.ndarray, "..."], inputs: Sequence[int]
) -> QuantisedMatrix:
    """The 8-bit form of a weight, in arrays of JAX or of numpy as `w` is.

    On a CPU both have the same bits.

    Args:
      inputs: the axes that a product sums over.
    """
    xp: Any = w.__array_namespace__()
    wide = w.astype(jnp.float32)
    # Products, for compilers turn a division by what is constant along an axis into one.
    scales = xp.max(xp.abs(wide), axis=tuple(inputs), keepdims=True) * np.float32(1 / MOST)
    values = xp.round(wide * (1.0 / xp.where(scales < TINY, 1.0, scales)))
    return QuantisedMatrix(xp.clip(values, -MOST, MOST).astype(jnp.int8), scales, w.dtype)


def matrix_of(w: AnyMatrix, inputs: int) -> Any:
    """The weight as [inputs, outputs]."""
    if isinstance(w, QuantisedMatrix):
        scales = w.scales.reshape(1, -1)
        return QuantisedMatrix(w.values.reshape(inputs, -1), scales, w.dtype)
    return w.reshape(inputs, -1)


def floats_of(w: AnyMatrix) -> Array:
    """The weight as an array of its dtype."""
    if isinstance(w, QuantisedMatrix):
        return (w.values.astype(jnp.float32) * w.scales).astype(w.dtype)
    return w
