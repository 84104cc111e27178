"""Random weights that both sides of a comparison fill in: only numpy, no stored arrays.

A tensor depends on the seed, its name and its shape alone, not on the order of the others.
"""

import zlib
from collections.abc import Mapping, Sequence

import numpy as np

__all__ = ["random_state", "random_tokens"]

# What a weight's uniform distribution is scaled to: its standard deviation times sqrt(fan in).
# Queries and keys are large, so that attention is uneven and depends on positions.
GAINS = {"q_proj": 1.6, "k_proj": 1.6, "lm_head": 2.0}


def random_state(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, np.ndarray]:
    """A float32 state dict of these names and shapes."""
    return {name: _tensor(name, tuple(shape), seed) for name, shape in shapes.items()}


def random_tokens(count: int, vocab: int, seed: int) -> np.ndarray:
    """Token ids of a prompt."""
    return np.random.default_rng([seed, 1]).integers(0, vocab, count)


def _tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    # Of standard deviation 1. `random` is the bit generator's own output, in every numpy.
    values = (rng.random(shape) * 2 - 1) * 3**0.5
    if "norm" in name:
        values = 1 + 0.3 * values
    elif name.endswith("bias"):
        values = 0.3 * values
    elif "embed" in name:
        # Small, so that what the layers add decides, also where this is the head too.
        values = 0.3 * values
    else:
        gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
        values = gain * values / shape[-1] ** 0.5
    return values.astype(np.float32)
