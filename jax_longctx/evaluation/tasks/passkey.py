"""Passkey retrieval: a five-digit number in a text that says nothing (Mohtashami and Jaggi 2023).

As in landmark attention (section 4.2) and in the evaluations of Quest and CItruS, a sentence that
gives the number twice stands at a known depth of repeated short sentences, and the first number of
the answer counts. Prompts differ in the number, its depth and the sentence that begins the text.
Unlike theirs, the wording is our own and no sentence is cut; the number always has five digits, as
in CItruS.
"""

import dataclasses
import random

from jax_longctx.errors import ConfigError
from jax_longctx.evaluation.haystack import Fitted, Haystack, open_haystack
from jax_longctx.evaluation.metrics import clean, exact_first_int
from jax_longctx.evaluation.tasks.task import Count, Sample, Task, fixed

SENTENCE = "The pass key is {key}. Remember it. {key} is the pass key."
STEM = "\n\nThe pass key is"
INTRO = (
    "One fact in the following text matters, and nothing else in it does. "
    "Look for it and keep it in mind: it will be asked for at the end.\n\n"
)
QUESTION = "\n\nWhat is the pass key?"


def hide_key(
    haystack: Haystack, draw: random.Random, *, tokens: int, depth: float, head: str
) -> tuple[str, Fitted]:
    """A random key, and a text of at most `tokens` tokens from a random place on that hides it."""
    key = str(draw.randint(10_000, 99_999))
    start = draw.randrange(len(haystack.pieces))
    needles = [(depth, SENTENCE.format(key=key))]
    return key, haystack.fill(needles, tokens=tokens, start=start, head=head)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passkey(Task):
    """A five-digit number hidden in a text: is it found at every depth?

    Attributes:
      haystack: `noise`, `topics` (Python's documentation), or the path of a text.
      depths: how many depths, evenly spaced from the text's start to its end, taken in turn.
      at: depths from 0 to 1 in place of these, as `0.1/0.9`.
    """

    name: str = fixed("passkey")
    metric: str = fixed("first number is the key")
    published: str = fixed("noise")

    haystack: str = "noise"
    depths: int = 11
    at: str = ""
    max_new: int = 10

    def __post_init__(self):
        super().__post_init__()
        try:
            right = all(0 <= depth <= 1 for depth in self._depths())
        except ValueError:
            right = False
        if not right:
            raise ConfigError(f"at must be depths from 0 to 1, as 0.1/0.9, got {self.at!r}")

    def _depths(self) -> list[float]:
        if self.at:
            return [float(depth) for depth in self.at.split("/")]
        return [i / max(self.depths - 1, 1) for i in range(self.depths)]

    def sample(self, count: Count, draw: random.Random, index: int, tokens: int) -> Sample:
        """A key at the next depth in turn."""
        depths, room = self._depths(), self.room(count, QUESTION + STEM, tokens)
        depth, haystack = depths[index % len(depths)], open_haystack(self.haystack, count)
        key, filled = hide_key(haystack, draw, tokens=room, depth=depth, head=INTRO)
        (at,) = filled.depths
        return self.made(count, index, filled, QUESTION, STEM, (key,), depth=depth, at=at)

    def score(self, answer: str, sample: Sample) -> float:
        """100 where the answer's first number is the key."""
        return exact_first_int(clean(answer, self.stop), sample.outputs[0])
