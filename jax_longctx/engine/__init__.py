"""Prefill, questions, sampling and decoding over any method."""

from jax_longctx.engine.engine import Engine
from jax_longctx.engine.prefill import Context, Keep, Progress
from jax_longctx.engine.programs import Lengths, compile_ahead
from jax_longctx.engine.rows import Ask, Chosen
from jax_longctx.engine.running import RunningBatch
from jax_longctx.settings import Sampling

__all__ = [
    "Ask",
    "Chosen",
    "Context",
    "Engine",
    "Keep",
    "Lengths",
    "Progress",
    "RunningBatch",
    "Sampling",
    "compile_ahead",
]
