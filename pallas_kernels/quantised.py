"""`Quantised`: keys or values in int8, with a scale for each token of each head.

x is stored as round(x / scale); scale is the largest magnitude of the token's head over 127. Scales
are bfloat16, rounded up, so that no value passes 127: their rounding costs step width, under 1%,
and no error of its own. A number is off by at most scale / 2. A token of H numbers takes H + 2
bytes: for H = 128 that is 0.508 of bfloat16.

A value that is not finite makes its scale so, and all numbers of that token come back as NaN.
"""

import dataclasses
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
class Coded:
    """Numbers in few bits and their scales; they stand for an array of `dtype`."""

    values: Any
    scales: Any
    dtype: Any = dataclasses.field(metadata={"static": True})

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
class Quantised(Coded):
    """Keys or values of a cache in 8 bits; it stands for an array [B, K, S, H] of `dtype`.

    Attributes:
      values: [B, K, S, H], int8.
      scales: [B, K, S], bfloat16.
      dtype: what reads return.
    """

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any) -> "Quantised":
        """Zeros."""
        return cls(jnp.zeros(shape, jnp.int8), jnp.zeros(shape[:-1], SCALES), jnp.dtype(dtype))

    def holding(self, x: Float[Array, "*B H"]) -> "Quantised":
        """x in this form."""
        return dataclasses.replace(quantise(x), dtype=self.dtype)

    def numbers(self) -> Float[Array, "*B H"]:
        """All of it as an array."""
        wide = self.values.astype(jnp.float32) * self.scales.astype(jnp.float32)[..., None]
        return wide.astype(self.dtype)


# The forms of keys and values beside arrays, by the names of `--kv`. Operations whose kernels read
# another one know its class; all else asks it here.
FORMS = {"int8": Quantised}


def empty(shape: tuple[int, ...], dtype: Any, form: str | None) -> Any:
    """Zeros of that shape in this form, as an array where it is None."""
    return jnp.zeros(shape, dtype) if form is None else FORMS[form].empty(shape, dtype)


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


def coded(*arrays: Any) -> bool:
    """Whether any of these is in few bits."""
    return any(isinstance(x, Coded) for x in arrays)


def stored_as(like: Any, x: Shaped[Array, "*B H"]) -> Any:
    """x as `like` stores keys or values, in its form or as an array of its dtype."""
    return like.holding(x) if coded(like) else x.astype(like.dtype)


def dequantised(x: Any) -> Any:
    """Keys or values as numbers; anything else unchanged. Not for whole caches."""
    return x.numbers() if coded(x) else x


def apart(x: Any) -> tuple[Any, Any]:
    """What is stored of keys or values: the numbers, and the scales, None for an array."""
    return (x.values, x.scales) if coded(x) else (x, None)


def joined_as(like: Any, numbers: Any, scales: Any) -> Any:
    """`apart` undone, in the form of `like`."""
    return numbers if scales is None else dataclasses.replace(like, values=numbers, scales=scales)


def parts_of(*stored: Any) -> tuple[list[Any], list[Any]]:
    """The numbers of keys and values, and the scales where there are any."""
    pairs = [apart(x) for x in stored]
    return [x for x, _ in pairs], [scales for _, scales in pairs if scales is not None]


# What a cache may hold as its keys or values.
AnyStored = Array | Plane | Quantised
