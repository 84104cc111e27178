"""What methods that rank tokens by an observation window share: pooling and the window itself."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.errors import ConfigError
from jax_longctx.models.config import ModelConfig

__all__ = ["Pool", "check_kernel", "pooled_scores", "refuse_windows"]

Pool = Literal["max", "avg"]


def pooled_scores(
    mass: Float[Array, "B K S"], length: Int[Array, " B"], window: int, kernel: int, pool: Pool
) -> Float[Array, "B K S"]:
    """Scores of each row's first `length[b]` tokens, -inf for the slots beyond.

    All but the last `window` tokens are scored by their mass (at most 1) pooled over `kernel`
    neighbours among themselves: the maximum, or the sum over `kernel`, so that missing neighbours
    count as zeros. The last `window` come before all others, the newest first.
    """
    slots_S = jnp.arange(mass.shape[2])
    newest_BS = slots_S - (length - window)[:, None]
    mass = jnp.where((newest_BS < 0)[:, None], mass, 0.0)
    half = kernel // 2
    how = ((1, 1, kernel), (1, 1, 1), ((0, 0), (0, 0), (half, half)))
    if pool == "max":
        # No mass is below zero, so that zeros beyond the ends are as good as -inf.
        scores = jax.lax.reduce_window(mass, -jnp.inf, jax.lax.max, *how)
    else:
        scores = jax.lax.reduce_window(mass, 0.0, jax.lax.add, *how) / kernel
    scores = jnp.where((newest_BS >= 0)[:, None], (2.0 + newest_BS)[:, None], scores)
    return jnp.where((slots_S < length[:, None])[:, None], scores, -jnp.inf)


def check_kernel(name: str, kernel: int) -> None:
    """Raises ConfigError unless the pool's kernel has a centre."""
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigError(f"{name}: kernel must be odd and at least 1, got {kernel}")


def refuse_windows(name: str, config: ModelConfig) -> None:
    """Raises ConfigError for a model that hides by a sliding window what the method keeps."""
    windows = [window for window in config.windows if window is not None]
    if windows:
        raise ConfigError(
            f"{name}: this model has layers with a sliding window of {min(windows)} tokens, "
            f"which the method does not support; use --method full"
        )
