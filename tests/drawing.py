"""Random arrays for the tests."""

from typing import Any

import jax
import numpy as np

__all__ = ["normal"]


def normal(*shape: int, seed: int = 0, dtype: Any = np.float32) -> jax.Array:
    """Normal numbers, drawn by numpy: JAX would compile a program for each shape."""
    drawn = np.random.default_rng(seed).standard_normal(shape, np.float32)
    return jax.device_put(drawn.astype(jax.numpy.dtype(dtype)))
