"""`Quantised`: keys or values in int8, with a scale for each token of each head.

x is stored as round(x / scale); scale is the largest magnitude of the token's head over 127. Scales
are bfloat16, rounded up, so that no value passes 127: their rounding costs step width, under 1%,
and no error of its own. A number is off by at most scale / 2. A token of H numbers takes H + 2
bytes: for H = 128 that is 0.508 of bfloat16.

A value that is not finite makes its scale so, and all numbers of that token come back as NaN.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Shaped

from pallas_kernels.plane import Plane

# The largest magnitude that is stored.
MOST = 127.0
SCALES = jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class EightBits:
    """Numbers in 8 bits and their scales; they stand for an array of `dtype`."""

    values: Any
    scales: Any
    dtype: Any = dataclasses.field(metadata={"static": True})

    def map(self, change: Callable[..., Any], *others: Any) -> Any:
        """The same with `change` of values and scales, beside the same parts of `others`."""
        values: Shaped[Any, ...] = change(self.values, *(other.values for other in others))
        scales: Shaped[Any, ...] = change(self.scales, *(other.scales for other in others))
        return dataclasses.replace(self, values=values, scales=scales)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return len(self.values.shape)

    @property
    def size(self) -> int:
        """Numbers, without the scales."""
        return self.values.size

    @property
    def nbytes(self) -> int:
        """Values and scales."""
        return sum(x.size * jnp.dtype(x.dtype).itemsize for x in (self.values, self.scales))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantised(EightBits):
    """Keys or values of a cache in 8 bits; it stands for an array [B, K, S, H] of `dtype`.

    Attributes:
      values: [B, K, S, H], int8.
      scales: [B, K, S], bfloat16.
      dtype: what reads return.
    """


def quantise(x: Float[Array, "*B H"]) -> Quantised:
    """The 8-bit form of an array whose last axis is a token's head."""
    wide = x.astype(jnp.float32)
    scales = _rounded_up(jnp.max(jnp.abs(wide), axis=-1) / MOST)
    divisor = scales.astype(jnp.float32)[..., None]
    values = jnp.round(wide / jnp.where(divisor == 0, 1.0, divisor))
    return Quantised(jnp.clip(values, -MOST, MOST).astype(jnp.int8), scales, x.dtype)


def _rounded_up(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """The least bfloat16 that is no smaller than x, which is not negative."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    upper = ((bits + jnp.uint32(0xFFFF)) >> 16).astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(upper, SCALES)


def stored_as(like: Any, x: Float[Array, "*B H"]) -> Any:
    """x as `like` stores keys or values: `Quantised`, or an array of its dtype."""
    if isinstance(like, Quantised):
        return dataclasses.replace(quantise(x), dtype=like.dtype)
    return x.astype(like.dtype)


def dequantised(x: Any) -> Any:
    """A `Quantised` as numbers; anything else unchanged. Not for whole caches."""
    if not isinstance(x, Quantised):
        return x
    wide = x.values.astype(jnp.float32) * x.scales.astype(jnp.float32)[..., None]
    return wide.astype(x.dtype)


def parts_of(*stored: Any) -> tuple[list[Any], list[Any]]:
    """The arrays and numbers of keys and values, and the scales where there are any."""
    numbers = [x.values if isinstance(x, Quantised) else x for x in stored]
    return numbers, [x.scales for x in stored if isinstance(x, Quantised)]


# What a cache may hold as its keys or values.
AnyStored = Array | Plane | Quantised
