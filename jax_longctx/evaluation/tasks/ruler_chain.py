"""RULER's variable tracking: which variables come to hold a value, through a chain of assignments.

Hsieh et al. 2024, section 3 (multi-hop tracing). `VAR A = 12345` stands in the noise, further on
`VAR B = VAR A`, and so on; all names of the chain are asked for. A solved small one stands before
the text as an example. More chains than one are there to mislead.

What differs from the published task: the words; prompts as long as whole sentences allow; the
example is made anew for each prompt, as in Star's copy.
"""

import dataclasses
import random
import string
from collections.abc import Iterator

from jax_longctx.errors import ConfigError
from jax_longctx.evaluation.haystack import Haystack, open_haystack
from jax_longctx.evaluation.metrics import clean, string_match_all
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

__all__ = ["VariableTracking"]

INTRO = "Variables are assigned in the text below, among words that say nothing. Follow them.\n\n"
EXAMPLE_TOKENS = 500


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableTracking(PlainTask):
    """RULER's variable tracking: the names that a value is handed on to.

    Attributes:
      chains: how many values are handed on; the first one is asked for.
      hops: how often each is handed on, to one more variable every time.
    """

    name: str = fixed("vt")
    metric: str = fixed("share of the variables named")

    chains: int = 1
    hops: int = 4
    max_new: int = 30

    def __post_init__(self):
        at_least(1, chains=self.chains, hops=self.hops, max_new=self.max_new)
        if self.chains * (self.hops + 1) > 500:
            raise ConfigError(
                f"chains * (hops + 1) must be at most 500, got {self.chains * (self.hops + 1)}"
            )

    @property
    def label(self) -> str:
        """`vt`: its noise is the published task's kind."""
        return self.name

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """See `Task`."""
        haystack = open_haystack("noise", count)
        for index in range(trials):
            draw = sample_draw(self.name, seed, tokens, index)
            known, value = draw.sample(range(10_000, 99_999), 2)
            # The example is never more than a part of a short prompt.
            example, _, names = self._text(
                haystack, draw, known, 3, min(EXAMPLE_TOKENS, tokens // 4), INTRO
            )
            solved = "".join((example, *self._asked(known), " ", " ".join(names)))
            query, prefix = self._asked(value)
            context, size, names = self._text(
                haystack,
                draw,
                value,
                5,
                context_room(count, query + prefix, self.max_new, tokens),
                f"{solved}\n\n\n{INTRO}",
            )
            yield make_sample(
                count,
                index=index,
                context=context,
                tokens=size,
                query=query,
                answer_prefix=prefix,
                outputs=names,
                max_new=self.max_new,
                meta={"value": value},
            )

    def _asked(self, value: int) -> tuple[str, str]:
        """The question and the start of its answer."""
        query = f"\n\nWhich variables hold the value {value} in the text above?"
        return query, f"\n\n{self.hops + 1} variables hold the value {value}:"

    def _text(
        self,
        haystack: Haystack,
        draw: random.Random,
        value: int,
        letters: int,
        room: int,
        head: str,
    ) -> tuple[str, int, list[str]]:
        """Noise with the chains in it, its tokens, and the names that hold the value."""
        names = _names(draw, self.chains * (self.hops + 1), letters)
        others = draw.sample([n for n in range(10_000, 99_999) if n != value], self.chains - 1)
        statements, asked = [], []
        for start in (value, *others):
            chain = [names.pop() for _ in range(self.hops + 1)]
            asked = asked or chain
            values = [str(start), *(f"VAR {before}" for before in chain)]
            lines = [f"VAR {name} = {held}" for name, held in zip(chain, values, strict=False)]
            # The chains mix; each keeps its order.
            statements += zip(sorted(draw.random() for _ in lines), lines, strict=True)
        filled = haystack.fill(
            sorted(statements),
            tokens=room,
            start=draw.randrange(len(haystack.pieces)),
            head=head,
        )
        return filled.text, filled.tokens, asked

    def score(self, answer: str, sample: Sample) -> float:
        """The share of the variables that the answer names."""
        return string_match_all(clean(answer), sample.outputs)


def _names(draw: random.Random, number: int, letters: int) -> list[str]:
    """Distinct names of capitals."""
    names: dict[str, None] = {}
    while len(names) < number:
        names["".join(draw.choices(string.ascii_uppercase, k=letters))] = None
    return list(names)
