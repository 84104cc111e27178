"""The tiny model of the command line's tests, and a task that fits it."""

import dataclasses

import pytest

from jax_longctx.errors import LengthError
from jax_longctx.evaluation import runner
from jax_longctx.evaluation.tasks import TASKS, Sample, Task
from tests.jax_longctx.cli.conftest import checkpoint, loads, run, source, tiny, tokenizer_folder

__all__ = ["checkpoint", "computed", "loads", "run", "small", "source", "tiny", "tokenizer_folder"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmallTask(Task):
    """Counts the letters of an answer of a tiny random model: it is scored, if by no sense."""

    name: str = dataclasses.field(default="small", metadata={"fixed": True})
    metric: str = dataclasses.field(default="letters", metadata={"fixed": True})
    # A score may be anything from 0 to 100.
    graded: bool = False
    # Prompts, as long as they are, as if from a file; 0 for as many as asked for.
    stored: int = 0
    # Times that the question is repeated.
    asks: int = 1
    max_new: int = 4

    def __post_init__(self):
        """No setting is too small."""

    def samples(self, count, *, tokens, trials, seed):
        if tokens < 40:
            raise LengthError(f"{tokens} tokens are too few for small; ask for 40 at least")
        for index in range(min(trials, self.stored) if self.stored else trials):
            # Each is of another length than the next.
            context = "Rain falls. " * (1 + index % 3) + f"The key is {seed * 1000 + index}."
            query, prefix = "\nWhich key?" * self.asks, "\nIt is"
            length = 1 + count(context) + count(query + prefix) + self.max_new
            if self.stored and index == 1:
                length = tokens + 1
            meta = {"depth": index % 2 / 2}
            yield Sample(index, context, query, prefix, (str(index),), length, meta)

    def score(self, answer, sample):
        letters = len(answer) + sample.index
        return 10.0 * (letters % 11) if self.graded else 100.0 * (letters % 2)

    def parts(self, answer, sample):
        return {"length": float(len(answer))}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(TASKS, "small", SmallTask())


@pytest.fixture
def computed(monkeypatch):
    """The batches that are computed: how many questions each has."""
    sizes, answer = [], runner.answer_batch
    monkeypatch.setattr(
        runner,
        "answer_batch",
        lambda *given: sizes.append(sum(map(len, given[2].questions))) or answer(*given),
    )
    return sizes
