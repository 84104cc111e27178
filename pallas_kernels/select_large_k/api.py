"""The exact k best of S scores in slot order, for k too large for a list kept sorted.

Score descending, and of equal scores the lowest slot, as `lax.top_k` has it; -inf and NaN are never
chosen, +inf always (within k), and -0.0 equals 0.0. Implementations: `xla` on every platform, `gpu`
(Mosaic), `reference` (a sort) for tests.
"""

import functools
import math

import jax.numpy as jnp
from jax import Array
from jaxtyping import Bool, Float, Int

from pallas_kernels import dispatch, hopper
from pallas_kernels.select_large_k import gpu, reference, xla


def select_large_k(
    scores: Float[Array, "*R S"],
    k: Int[Array, "*R"] | int,
    *,
    size: int,
    least: float = -math.inf,
    implementation: str | None = None,
) -> Int[Array, "*R C"]:
    """The slots of each row's k best scores, ascending, then -1 up to C = size.

    Fewer than k slots come back where fewer are finite or +inf.

    Args:
      k: how many, for all rows or each; taken as 0 below 0, and as `size` above it in an array.
      size: the static length of the result, which may exceed S.
      least: a number that no score but -inf is below. Where it is near them, the kernel for short
        rows counts less often.
      implementation: "xla", "gpu" or "reference"; None picks by platform.

    Raises:
      ValueError: a Python int k is larger than size.
    """
    if isinstance(k, int) and k > size:
        raise ValueError(f"select_large_k: k {k} does not fit size {size}")
    return _select("select_large_k", scores, k, size, implementation, least)


def in_one_launch(slots: int, size: int) -> bool:
    """Whether one kernel lists `size` of `slots` scores: a Hopper GPU, short rows."""
    if dispatch.platform() != "gpu" or not gpu.short(slots, size):
        return False
    return hopper.unsupported_device() is None


def select_mask(
    scores: Float[Array, "*R S"], k: Int[Array, "*R"] | int, *, implementation: str | None = None
) -> Bool[Array, "*R S"]:
    """Whether a slot is among its row's k best scores; k as in `select_large_k`, but unbounded."""
    return _select("select_mask", scores, k, None, implementation)


def _select(
    operation: str,
    scores: Array,
    k: Array | int,
    size: int | None,
    asked: str | None,
    least: float = -math.inf,
) -> Array:
    """The slots, `size` of a row, or the mask over all of them if None."""
    run = dispatch.select(
        operation,
        asked,
        f"{scores.shape[-1]} {scores.dtype} scores",
        xla=xla.select,
        gpu=dispatch.Kernel(
            functools.partial(gpu.select, least=least),
            lambda: gpu.unsupported(scores, size),
        ),
        reference=reference.select,
    )
    k = jnp.broadcast_to(jnp.asarray(k, jnp.int32), scores.shape[:-1])
    return run(scores, k if size is None else jnp.minimum(k, size), size)
