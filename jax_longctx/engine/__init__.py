"""Prefill, questions, sampling and decoding over any method."""

from jax_longctx.engine.context import Context, Progress
from jax_longctx.engine.engine import Engine
from jax_longctx.engine.sampling import Sampling

__all__ = ["Context", "Engine", "Progress", "Sampling"]
