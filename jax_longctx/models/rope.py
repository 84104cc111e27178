"""Rotary position embedding: a pure function of positions and the row's total length.

Rotate-half convention: channel i is paired with channel i + H/2 and turned by position * f_i.
The kinds of `RopeConfig.kind` differ in the frequencies f_i and in a factor on cos and sin:

- `default`: f_i = theta^(-2i/H) (Su et al. 2021, section 3.2.2);
- `linear`: f_i / factor (Chen et al. 2023, position interpolation);
- `dynamic`: theta grows with the total length beyond the trained one (NTK-aware scaling);
- `llama3`: low frequencies divided by the factor, high ones kept, a ramp between (Llama 3.1);
- `yarn`: a ramp over channels between interpolated and kept frequencies, and an attention
  temperature as a factor on cos and sin (Peng et al. 2023, sections 3.2 to 3.4).

Angles are float32 whatever the model's dtype.
"""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_longctx.errors import ConfigError
from jax_longctx.models.config import RopeConfig
from pallas_kernels.dispatch import platform


def rope_angles(
    config: RopeConfig, head_dim: int, positions: Int[Any, "#B T"], total: Int[Array, " B"]
) -> tuple[Float[Any, "#B T F"], Float[Any, "#B T F"]]:
    """cos and sin at `positions`, float32, yarn's attention factor folded in.

    Args:
      positions: of a numpy array the angles are numpy arrays, made once, when a program is
        traced. XLA would make them anew in every turn of a loop over layers.
      total: each row's total length, fixed before its first chunk; only `dynamic` reads it.
    """
    if config.kind == "dynamic":
        frequency = _dynamic_frequencies(config, head_dim, total)[:, None, :]  # [B, 1, H/2]
        positions = jnp.asarray(positions)
    else:
        frequency = rope_frequencies(config, head_dim)
    # NumPy's functions, where nothing is traced: XLA would compile a program for each of them.
    cosine, sine = (np.cos, np.sin) if isinstance(positions, np.ndarray) else (jnp.cos, jnp.sin)
    angle_BTF = positions[..., None].astype(np.float32) * frequency
    factor = np.float32(attention_factor(config))
    return cosine(angle_BTF) * factor, sine(angle_BTF) * factor


def apply_rope(
    x: Float[Array, "B T N H"], cos: Float[Any, "#B T F"], sin: Float[Any, "#B T F"]
) -> Float[Array, "B T N H"]:
    """`x` rotated, computed in float32 and returned in its own dtype."""
    if platform() == "gpu":
        # Elementwise but for an order: XLA fuses it with what follows, which a concatenation ends.
        halves = x.astype(jnp.float32).reshape(*x.shape[:-1], 2, -1)  # [B, T, N, 2, F]
        cos, sin = cos[:, :, None, None], sin[:, :, None, None]
        signs = np.array([[-1.0], [1.0]], np.float32)
        turned = halves * cos + jnp.flip(halves, axis=-2) * (sin * signs)
        return turned.reshape(x.shape).astype(x.dtype)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def rope_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """The H/2 frequencies of every kind but `dynamic`, float32."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    base = config.theta**-exponent
    if config.kind == "linear":
        base = base / config.factor
    elif config.kind == "llama3":
        base = _llama3(config, base)
    elif config.kind == "yarn":
        base = _yarn(config, head_dim, base)
    elif config.kind != "default":
        raise ConfigError(f"rope kind {config.kind!r} has no fixed frequencies")
    return base.astype(np.float32)


def _dynamic_frequencies(config: RopeConfig, head_dim: int, total: Array) -> Array:
    length_B1 = jnp.maximum(total, config.trained_length).astype(jnp.float32)[:, None]
    stretch_B1 = config.factor * length_B1 / config.trained_length - (config.factor - 1)
    theta_B1 = config.theta * stretch_B1 ** (head_dim / (head_dim - 2))
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    return theta_B1**-exponent


def _llama3(config: RopeConfig, base: np.ndarray) -> np.ndarray:
    """Frequencies whose wavelength exceeds the trained length are divided by the factor."""
    turns = config.trained_length * base / (2 * math.pi)
    width = config.high_freq_factor - config.low_freq_factor
    keep = np.clip((turns - config.low_freq_factor) / width, 0.0, 1.0)
    return base * (keep + (1 - keep) / config.factor)


def _yarn(config: RopeConfig, head_dim: int, base: np.ndarray) -> np.ndarray:
    """Channels that turn often over the trained length keep their frequency."""

    def channel(turns: float) -> float:
        ratio = config.trained_length / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    low, high = channel(config.beta_fast), channel(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0.0, 1.0)
    return base / config.factor * ramp + base * (1 - ramp)


def attention_factor(config: RopeConfig) -> float:
    """What cos and sin are multiplied by; 1 for every kind but `yarn`."""
    if config.kind != "yarn":
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor

    def temperature(scale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * scale * math.log(config.factor) + 1.0

    if config.mscale and config.mscale_all_dim:
        return temperature(config.mscale) / temperature(config.mscale_all_dim)
    return temperature(1.0)
