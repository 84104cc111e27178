"""Many prompts and questions from JSON lines to JSON lines, resumable after a kill."""

from jax_longctx.batch.run import BatchOptions, BatchProgress, run_batch

__all__ = ["BatchOptions", "BatchProgress", "run_batch"]
