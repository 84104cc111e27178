"""Prefill, questions, sampling and decoding over any method."""

from jax_longctx.engine.engine import Context, Engine, Progress
from jax_longctx.engine.running import Chosen, Request, RunningBatch
from jax_longctx.settings import Sampling

__all__ = ["Chosen", "Context", "Engine", "Progress", "Request", "RunningBatch", "Sampling"]
