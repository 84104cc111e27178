"""Many prompts and questions from JSON lines to JSON lines, resumable after a kill."""

from jax_longctx.batch.answering import BatchOptions
from jax_longctx.batch.run import BatchProgress, run_batch

__all__ = ["BatchOptions", "BatchProgress", "run_batch"]
