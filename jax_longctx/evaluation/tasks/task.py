"""What every evaluation task says: prompts of a given length, and what an answer is worth.

A task is a frozen dataclass of its settings. It draws prompts from a seed, exact in tokens of the
model's own tokenizer, so that a method never sees another text than the next one; and it scores
answers without a model.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Protocol, runtime_checkable

__all__ = ["Count", "Sample", "Task"]

# Tokens of a text, without special tokens.
Count = Callable[[str], int]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt and what a right answer to it holds.

    Attributes:
      index: its number among the prompts of one length and seed.
      context: everything before the question: the task's words and the text to search.
      query: the question, which methods that need one at prefill are given.
      answer_prefix: the start of the answer, which the model continues; it stands after the
        template's answer header where there is one.
      outputs: the right answers.
      length: tokens of context, query and answer prefix, with a beginning-of-text token and room
        for the answer: at most what was asked for.
      meta: facts of the draw, JSON values: a depth, a key.
    """

    index: int
    context: str
    query: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int
    meta: dict[str, Any]


@runtime_checkable
class Task(Protocol):
    """A kind of prompt.

    Attributes:
      name: in tables and on the command line.
      metric: what a score means, for the head of a table.
      max_new: most tokens of an answer.
      stop: strings that end an answer.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    max_new: int
    stop: tuple[str, ...]

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """`trials` prompts of at most `tokens` tokens, the same ones for the same arguments.

        Prompt `i` depends on the seed and `i` alone, not on how many are drawn.

        Raises:
          InputError: `tokens` are too few for the task's words.
        """
        ...

    def score(self, answer: str, sample: Sample) -> float:
        """What the answer is worth, from 0 to 100."""
        ...
