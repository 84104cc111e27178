"""Passkey retrieval: a five-digit number in a text that says nothing (Mohtashami and Jaggi 2023).

As their landmark attention, section 4.2, and Quest's and CItruS's evaluations ask it: a sentence
that gives the number twice stands at a known depth of short sentences, repeated; the first number
of the answer counts. Prompts differ in number, depth and the sentence the text begins with. Our
words are our own, the text is whole sentences (theirs may be cut in the middle of one), and the
number has always five digits, as CItruS has it.
"""

import dataclasses
from collections.abc import Iterator

from jax_longctx.evaluation.haystack import open_haystack, source_name
from jax_longctx.evaluation.metrics import clean, exact_first_int
from jax_longctx.evaluation.passkey import SENTENCE, STEM
from jax_longctx.evaluation.tasks.task import (
    Count,
    PlainTask,
    Sample,
    at_least,
    context_room,
    fixed,
    make_sample,
    sample_draw,
)

__all__ = ["Passkey"]

INTRO = (
    "One fact in the following text matters, and nothing else in it does. "
    "Look for it and keep it in mind: it will be asked for at the end.\n\n"
)
QUESTION = "\n\nWhat is the pass key?"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passkey(PlainTask):
    """A five-digit number hidden in a text: is it found at every depth?

    Attributes:
      haystack: `noise`, `topics` (Python's documentation), or the path of a text.
      depths: how many depths, evenly spaced from the text's start to its end, taken in turn.
    """

    name: str = fixed("passkey")
    metric: str = fixed("first number is the key")

    haystack: str = "noise"
    depths: int = 11
    max_new: int = 10

    def __post_init__(self):
        at_least(1, depths=self.depths, max_new=self.max_new)

    @property
    def label(self) -> str:
        """`passkey`, or with a text in place of noise `passkey@topics`."""
        return (
            self.name if self.haystack == "noise" else f"{self.name}@{source_name(self.haystack)}"
        )

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """See `Task`."""
        haystack = open_haystack(self.haystack, count)
        room = context_room(count, QUESTION + STEM, self.max_new, tokens)
        for index in range(trials):
            draw = sample_draw(self.name, seed, tokens, index)
            key = str(draw.randint(10_000, 99_999))
            depth = (index % self.depths) / max(self.depths - 1, 1)
            filled = haystack.fill(
                [(depth, SENTENCE.format(key=key))],
                tokens=room,
                start=draw.randrange(len(haystack.pieces)),
                head=INTRO,
            )
            yield make_sample(
                count,
                index=index,
                context=filled.text,
                tokens=filled.tokens,
                query=QUESTION,
                answer_prefix=STEM,
                outputs=(key,),
                max_new=self.max_new,
                meta={"depth": depth, "at": filled.before[0] / filled.around},
            )

    def score(self, answer: str, sample: Sample) -> float:
        """100 where the answer's first number is the key."""
        return exact_first_int(clean(answer, self.stop), sample.outputs[0])
