"""Prompts of an evaluation in tokens, drawn from its tasks."""

import array
import dataclasses
import functools
import hashlib
from collections.abc import Sequence

from jax_longctx.errors import LengthError
from jax_longctx.evaluation.tasks import Sample, Task
from jax_longctx.text import PromptLayout, PromptText, Tokenizer

# Characters of either end of a text that a row shows.
SHOWN = 300


def shortened(text: str) -> str:
    """The text's ends, and how many characters are left out between them."""
    left = len(text) - 2 * SHOWN
    return text if left <= 0 else f"{text[:SHOWN]} [... {left:,} characters ...] {text[-SHOWN:]}"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One sample in tokens: the context, with a beginning-of-text token, and the question.

    Attributes:
      question: the sample's query and the start of its answer, tokenised on their own. Methods that
        need the question at prefill get all of it.
      sha256: of the text, context and question.
      refused: why the prompt is not run.
    """

    sample: Sample
    context: Sequence[int]
    question: Sequence[int]
    sha256: str
    refused: str | None = None


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The prompts of one task and length; `refused` says why prompts are missing."""

    task: Task
    prompts: list[Prompt]
    refused: str | None = None

    def sizes(self) -> tuple[int, int]:
        """Most tokens of a context, and of a question with its answer, without refused prompts."""
        usable = [prompt for prompt in self.prompts if prompt.refused is None]
        longest = max((len(prompt.context) for prompt in usable), default=0)
        asked = max((len(prompt.question) for prompt in usable), default=0)
        return longest, asked + self.task.max_new


def draw(
    task: Task, tokenizer: Tokenizer, layout: PromptLayout, *, tokens: int, trials: int, seed: int
) -> Drawn:
    """`trials` prompts of at most `tokens` tokens, the layout's tokens and the answer included.

    In a chat layout the start of the answer follows the answer header. A task with prompts of a
    file may have fewer than `trials`, and longer ones, which are refused.

    Raises:
      InputError: the text or file that the task reads cannot be used.
    """

    def count(text: str) -> int:
        return len(tokenizer.encode(text, begins=True))

    # Questions over one text share its tokens.
    encoded = functools.cache(functools.partial(_encoded, tokenizer, layout))
    own = PromptText(layout.before), PromptText(layout.after)
    room = tokens - sum(len(tokenizer.encode(text)) for text in own)
    prompts: list[Prompt] = []
    try:
        for sample in task.samples(count, tokens=room, trials=trials, seed=seed):
            question = PromptText.of("", sample.query, layout.after, sample.answer_prefix)
            text = f"{layout.before}{sample.context}\0{question}"
            prompts.append(
                Prompt(
                    sample,
                    encoded(sample.context),
                    array.array("i", tokenizer.encode(question)),
                    hashlib.sha256(text.encode()).hexdigest(),
                    _refused(sample.length, room),
                )
            )
    except LengthError as error:
        return Drawn(task, prompts, " ".join(str(error).split()))
    return Drawn(task, prompts)


def _encoded(tokenizer: Tokenizer, layout: PromptLayout, context: str) -> Sequence[int]:
    text = PromptText.of(layout.before, context, templated=layout.templated)
    # Four bytes a token; a list takes eight and an object for each number.
    return array.array("i", tokenizer.encode(text, bos=True))


def _refused(length: int, room: int) -> str | None:
    if length <= room:
        return None
    return f"the prompt has {length:,} tokens, {room:,} were asked for; it is not cut"
