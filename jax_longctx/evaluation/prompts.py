"""A task's samples as the token rows that every method is given."""

import array
import dataclasses
import hashlib
from collections.abc import Sequence

from jax_longctx.errors import LengthError
from jax_longctx.evaluation.tasks import Sample, Task
from jax_longctx.text import PromptLayout, Tokenizer

__all__ = ["Drawn", "Prompt", "draw"]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One sample in tokens: the context, with a beginning-of-text token, and what is asked of it.

    Attributes:
      question: the sample's query and the start of its answer, tokenised on their own; methods
        that need the question while they read are given it whole.
      sha256: of the text, context and question.
      refused: why no method is given it.
    """

    sample: Sample
    context: Sequence[int]
    question: Sequence[int]
    sha256: str
    refused: str | None = None


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The prompts of one task and length; `refused` says why those that are missing are."""

    task: Task
    prompts: list[Prompt]
    refused: str | None = None

    @property
    def usable(self) -> list[Prompt]:
        """Those that are not refused."""
        return [prompt for prompt in self.prompts if prompt.refused is None]

    @property
    def reserve(self) -> int:
        """Tokens that question and answer take at most."""
        return max((len(prompt.question) for prompt in self.usable), default=0) + self.task.max_new

    @property
    def longest(self) -> int:
        """Tokens of the longest context."""
        return max((len(prompt.context) for prompt in self.usable), default=0)


def draw(
    task: Task, tokenizer: Tokenizer, layout: PromptLayout, *, tokens: int, trials: int, seed: int
) -> Drawn:
    """`trials` prompts of at most `tokens` tokens, the layout's own words and the answer included.

    With a chat's layout the start of the answer stands after the header of the answer. A task
    whose prompts come from a file may have fewer, and longer ones, which are refused.

    Raises:
      InputError: the text or file that the task reads cannot be used.
    """

    def count(text: str) -> int:
        return len(tokenizer.encode(text))

    room = tokens - count(layout.before) - count(layout.after)
    prompts: list[Prompt] = []
    try:
        for sample in task.samples(count, tokens=room, trials=trials, seed=seed):
            prompts.append(_prompt(sample, tokenizer, layout, room))
    except LengthError as error:
        return Drawn(task, prompts, " ".join(str(error).split()))
    return Drawn(task, prompts)


def _prompt(sample: Sample, tokenizer: Tokenizer, layout: PromptLayout, room: int) -> Prompt:
    context = layout.before + sample.context
    question = sample.query + layout.after + sample.answer_prefix
    refused = None
    if sample.length > room:
        refused = f"the prompt has {sample.length:,} tokens, {room:,} were asked for; it is not cut"
    return Prompt(
        sample,
        # Four bytes a token: a list would take eight, and keep every number beside.
        array.array("i", tokenizer.encode(context, bos=True)),
        array.array("i", tokenizer.encode(question)),
        hashlib.sha256(f"{context}\0{question}".encode()).hexdigest(),
        refused,
    )
