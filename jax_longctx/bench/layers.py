"""Timing some layers of a shape, and one alone, in place of all: they compile in a fraction of it.

Layers are alike. The difference of both times is the time of the layers between them, what remains
is fixed (embedding, head, the host), and the whole is scaled from both.
"""

import dataclasses
from typing import Any

from jax_longctx.errors import InputError
from jax_longctx.models.config import ModelConfig

__all__ = ["check_layers", "cut", "first_layers", "scaled"]


def check_layers(config: ModelConfig, layers: int | None) -> int:
    """How many layers are timed. Raises InputError unless the shape has as many, and two."""
    timed = config.num_layers if layers is None else layers
    if not 2 <= timed <= config.num_layers:
        raise InputError(f"--layers must be from 2 to {config.num_layers}, got {layers}")
    return timed


def first_layers(config: ModelConfig, params: Any, layers: int) -> tuple[ModelConfig, Any]:
    """The shape and its weights with the first layers alone."""
    kept = {name: params["layers"][name] for name in map(str, range(layers))}
    return cut(config, layers), {**params, "layers": kept}


def cut(config: ModelConfig, layers: int) -> ModelConfig:
    """The shape with its first layers alone."""
    return dataclasses.replace(config, num_layers=layers, windows=config.windows[:layers])


def scaled(name: str, seconds: dict[int, float], layers: int) -> dict[str, float]:
    """Seconds of all `layers`, from those of as many, or of some and of one."""
    most = max(seconds)
    if most == layers:
        return {name: seconds[most]}
    each = (seconds[most] - seconds[1]) / (most - 1)
    whole = seconds[most] + (layers - most) * each
    return {name: whole, f"{name}_layer": each, f"{name}_fixed": seconds[1] - each}
