"""Random arrays for the tests, and what is computed of them."""

import functools
from typing import Any

import jax
import numpy as np

__all__ = ["computed", "normal"]


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    """Normal numbers, drawn by numpy: JAX would compile a program for each shape."""
    drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jax.device_put(drawn.astype(jax.numpy.dtype(dtype)))


def computed(function: Any, *arguments: Any, **options: Any) -> Any:
    """Results in numpy of one program, where operations one by one would be many."""
    return jax.device_get(jax.jit(functools.partial(function, **options))(*arguments))
