"""The base of all evaluation tasks: prompts of a given length, and scores of answers.

A task is a frozen dataclass of its settings. It draws prompts from a seed, with an exact number of
tokens of the model's own tokenizer, so every method gets the same text. It scores answers without a
model.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jax_longctx.evaluation.haystack import Fitted, source_name
from jax_longctx.evaluation.metrics import clean, string_match_all
from jax_longctx.settings import at_least

# Tokens of a text, without special tokens.
Count = Callable[[str], int]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt and its right answers.

    Without a chat template the prompt is `context + query + answer_prefix`: query and answer prefix
    begin with the white space before them. A chat template has its own white space and takes them
    without theirs.

    Attributes:
      index: number of the prompt, within one length and seed.
      context: everything before the question: the instructions and the text to search.
      query: the question, which methods that need one at prefill are given.
      answer_prefix: the start of the answer, which the model continues; it follows the answer
        header of a chat template.
      outputs: the right answers.
      length: tokens of the context with a beginning-of-text token, of query and answer prefix
        together, counted apart from the context, and room for the answer. At most the requested
        length; tokens of a chat template are not counted.
      meta: facts of the draw, JSON values, such as the requested `depth` (0 to 1) of a hidden
        sentence and `at`, where it was put.
    """

    index: int
    context: str
    query: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int
    meta: dict[str, Any]


def fixed(value: Any) -> Any:
    """A field that describes the task and is not a setting."""
    return dataclasses.field(default=value, metadata={"fixed": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of prompt. A subclass has its settings as fields and defines `sample`.

    Settings that are whole numbers are at least 1.

    Attributes:
      name: on the command line.
      metric: meaning of the score, for the head of a table.
      stop: strings that end an answer.
      published: the haystack of the published task, which the label leaves out.
      needs: a package of the extra `eval` that the scores need.
    """

    name: str = fixed("")
    metric: str = fixed("")
    stop: tuple[str, ...] = fixed(())
    published: str = fixed("")
    needs: str = fixed("")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = self.__dict__.get(field.name)
            if isinstance(value, int) and not isinstance(value, bool):
                at_least(1, self, field.name)

    @property
    def usual_trials(self) -> int:
        """Prompts of a run that names no number."""
        return 20

    def check(self) -> None:
        """Raises InputError where a file that it reads cannot be used; nothing by default."""

    @property
    def max_new(self) -> int:
        """Most tokens of an answer."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """Name in tables; a text or file other than the published one follows an @."""
        source = getattr(self, "haystack", "") or getattr(self, "file", "")
        return self.name if source in ("", self.published) else f"{self.name}@{source_name(source)}"

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """`trials` prompts of at most `tokens` tokens, the same ones for the same arguments.

        Prompt `i` depends on the seed and `i` alone, not on `trials`. Prompts of a user's file are
        never cut: there may be fewer than `trials`, and `length` may exceed `tokens`.

        Raises:
          LengthError: `tokens` are too few for the task, or more than it can fill.
          InputError: the text or file that the task reads cannot be used.
        """
        for index in range(trials):
            draw = random.Random(f"{self.name}/{seed}/{tokens}/{index}")
            yield self.sample(count, draw, index, tokens)

    def sample(self, count: Count, draw: random.Random, index: int, tokens: int) -> Sample:
        """The prompt of that index; `draw` is its own random generator."""
        raise NotImplementedError

    def room(self, count: Count, asked: str, tokens: int) -> int:
        """Tokens that are left for the context of a prompt of `tokens` tokens."""
        return tokens - 1 - count(asked) - self.max_new

    def made(
        self,
        count: Count,
        index: int,
        context: Fitted,
        query: str,
        answer_prefix: str,
        outputs: Iterable[str],
        **meta: Any,
    ) -> Sample:
        """A sample with its length counted."""
        length = 1 + context.tokens + count(query + answer_prefix) + self.max_new
        return Sample(index, context.text, query, answer_prefix, tuple(outputs), length, meta)

    def score(self, answer: str, sample: Sample) -> float:
        """Score of the model's answer from 0 to 100.

        By default the share of the right answers that it contains.
        """
        return string_match_all(clean(answer, self.stop), sample.outputs)

    def parts(self, answer: str, sample: Sample) -> dict[str, float]:
        """Further scores of the answer by name, from 0 to 100; none by default."""
        return {}
