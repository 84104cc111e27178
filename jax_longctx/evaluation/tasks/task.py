"""What every evaluation task says: prompts of a given length, and what an answer is worth.

A task is a frozen dataclass of its settings. It draws prompts from a seed, exact in tokens of the
model's own tokenizer, so that a method never sees another text than the next one; and it scores
answers without a model.
"""

import dataclasses
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from jax_longctx.errors import ConfigError
from jax_longctx.evaluation.haystack import Filled, Fitted, source_name
from jax_longctx.evaluation.metrics import clean, string_match_all

# Tokens of a text, without special tokens.
Count = Callable[[str], int]


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt and what a right answer to it holds.

    `context + query + answer_prefix`, joined as they are, is the prompt of a model without a chat
    template: query and answer prefix begin with the white space that parts them from what is
    before. A chat template sets its own white space and takes them without theirs.

    Attributes:
      index: its number among the prompts of one length and seed.
      context: everything before the question: the task's words and the text to search.
      query: the question, which methods that need one at prefill are given.
      answer_prefix: the start of the answer, which the model continues; it stands after the
        template's answer header where there is one.
      outputs: the right answers.
      length: tokens of the context with a beginning-of-text token, of query and answer prefix
        together, counted apart from the context, and room for the answer: at most what was asked
        for. A template's own tokens are not in it.
      meta: facts of the draw, JSON values: `depth` (asked, 0 to 1) and `at` (where it came to
        be) of one hidden sentence, the key.
    """

    index: int
    context: str
    query: str
    answer_prefix: str
    outputs: tuple[str, ...]
    length: int
    meta: dict[str, Any]


def fixed(value: Any) -> Any:
    """A field that says what the task is, and is none of its settings."""
    return dataclasses.field(default=value, metadata={"fixed": True})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of prompt: a subclass has its settings as fields and says how one sample is drawn.

    Settings that are whole numbers are at least 1.

    Attributes:
      name: on the command line.
      metric: what a score means, for the head of a table.
      stop: strings that end an answer.
      published: the text of the published task, which the label does not name.
      needs: a package of the extra `eval` that its scores need.
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
                at_least(1, **{field.name: value})

    @property
    def max_new(self) -> int:
        """Most tokens of an answer."""
        raise NotImplementedError

    @property
    def label(self) -> str:
        """In tables: the name, and behind an @ the text or file that is not the published one."""
        source = getattr(self, "haystack", "") or getattr(self, "file", "")
        return self.name if source in ("", self.published) else f"{self.name}@{source_name(source)}"

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """`trials` prompts of at most `tokens` tokens, the same ones for the same arguments.

        Prompt `i` depends on the seed and `i` alone, not on how many are drawn. A task whose
        prompts come from a user's file has at most as many as the file, each as long as it is:
        one that is longer than `tokens` says so by its length and is never cut.

        Raises:
          LengthError: `tokens` are too few for the task's words, or more than it can fill.
          InputError: the text or file that the task reads cannot be used.
        """
        for index in range(trials):
            draw = random.Random(f"{self.name}/{seed}/{tokens}/{index}")
            yield self.sample(count, draw, index, tokens)

    def sample(self, count: Count, draw: random.Random, index: int, tokens: int) -> Sample:
        """The prompt of that index, from its own random numbers."""
        raise NotImplementedError

    def room(self, count: Count, asked: str, tokens: int) -> int:
        """How many of a prompt's `tokens` are left for its context."""
        return tokens - 1 - count(asked) - self.max_new

    def made(
        self,
        count: Count,
        index: int,
        context: Filled | Fitted,
        query: str,
        answer_prefix: str,
        outputs: Iterable[str],
        **meta: Any,
    ) -> Sample:
        """A sample with its length counted."""
        length = 1 + context.tokens + count(query + answer_prefix) + self.max_new
        return Sample(index, context.text, query, answer_prefix, tuple(outputs), length, meta)

    def score(self, answer: str, sample: Sample) -> float:
        """What the answer, as the model gave it, is worth, from 0 to 100.

        The share of the right answers that it names, unless the task says otherwise.
        """
        return string_match_all(clean(answer, self.stop), sample.outputs)

    def parts(self, answer: str, sample: Sample) -> dict[str, float]:
        """Further figures of the same answer by name, from 0 to 100; most tasks have none."""
        return {}


def at_least(least: float, **values: float) -> None:
    """Raises ConfigError where one of the settings is smaller."""
    for name, value in values.items():
        if not value >= least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
