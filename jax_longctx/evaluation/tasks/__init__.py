"""Evaluation tasks: prompts drawn offline from a seed, and their scores."""

from jax_longctx.evaluation.tasks.task import Count, Sample, Task

__all__ = ["Count", "Sample", "Task"]
