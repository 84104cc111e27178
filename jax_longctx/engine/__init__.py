"""Prefill, questions, sampling and decoding over any method."""

from jax_longctx.engine.engine import Context, Engine, Progress
from jax_longctx.settings import Sampling

__all__ = ["Context", "Engine", "Progress", "Sampling"]
