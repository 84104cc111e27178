"""The tiny model of the command line's tests, and a task that fits it."""

import pytest

from jax_longctx.evaluation import runner
from jax_longctx.evaluation.tasks import TASKS
from tests.jax_longctx.cli.conftest import checkpoint, loads, run, source, tiny, tokenizer_folder
from tests.jax_longctx.evaluation.small_task import SmallTask

__all__ = ["checkpoint", "computed", "loads", "run", "small", "source", "tiny", "tokenizer_folder"]


@pytest.fixture
def small(monkeypatch):
    """The task `small`, known by name."""
    monkeypatch.setitem(TASKS, "small", SmallTask())


@pytest.fixture
def computed(monkeypatch):
    """The batches that are computed: how many prompts each has."""
    sizes = []
    answer = runner.answer_batch

    def counted(model, engine, work):
        sizes.append(len(work.contexts))
        return answer(model, engine, work)

    monkeypatch.setattr(runner, "answer_batch", counted)
    return sizes
