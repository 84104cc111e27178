"""Values of a Hugging Face config, each checked when it is read."""

import math
from collections.abc import Mapping
from typing import Any

from jax_longctx.errors import ConfigError


def need(config: Mapping[str, Any], key: str) -> Any:
    """A value that must be there. Raises ConfigError where it is not."""
    value = config.get(key)
    if value is None:
        raise ConfigError(
            f"the model's config lacks {key!r}; it cannot be guessed, add it from the source"
        )
    return value


def size(config: Mapping[str, Any], key: str) -> int:
    """A whole number above 0. Raises ConfigError where it is none."""
    value = need(config, key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"config.json: {key!r} must be a whole number above 0, got {value!r}")
    return value


def number(config: Mapping[str, Any], key: str) -> float:
    """A finite number. Raises ConfigError where it is none."""
    value = need(config, key)
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ConfigError(f"config.json: {key!r} must be a finite number, got {value!r}")
    return float(value)
