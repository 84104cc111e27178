"""The tiny model of the command line's tests, and a task that fits it."""

import pytest

from jax_longctx.evaluation.tasks import TASKS
from tests.jax_longctx.cli.conftest import loads, run, tiny, tokenizer_folder
from tests.jax_longctx.evaluation.small_task import SmallTask

__all__ = ["loads", "run", "small", "tiny", "tokenizer_folder"]


@pytest.fixture
def small(monkeypatch):
    """The task `small`, known by name."""
    monkeypatch.setitem(TASKS, "small", SmallTask())
