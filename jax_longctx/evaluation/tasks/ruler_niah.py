"""RULER's eight needle tasks: keys with values, hidden in a text or among needles like them.

Hsieh et al. 2024, section 3 and appendix B. A needle gives a key (two words, or a UUID) its value
(a number of seven digits, or a UUID). The text around is noise, running text, or other needles;
several keys may be hidden and one asked for (multikey), one key may have several values
(multivalue), several keys may be asked for (multiquery).

What differs from the published tasks: the words of prompt and needle; the running text (Python's
documentation or the user's, not essays: the label names it); the words that keys are made of;
prompts are as long as whole sentences or lines allow, not multiples of 500 words or 25 lines. As
there, depths are drawn without repetition from 40 that are evenly spaced, here by tokens.
"""

import dataclasses
import random
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jax_longctx.errors import ConfigError, LengthError
from jax_longctx.evaluation.fitting import most_units
from jax_longctx.evaluation.haystack import open_haystack, source_name
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
from jax_longctx.evaluation.tasks.words import ADJECTIVES, NOUNS

__all__ = ["RulerNiah", "ruler_niah_tasks"]

NEEDLE = "A secret {kind} assigned to {key} is: {value}."
NEEDLES = "needles"
LEVELS = [round(100 * i / 39) for i in range(40)]

Kind = Literal["words", "number", "uuid"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RulerNiah(PlainTask):
    """RULER's needles: the values of keys that are hidden in a text.

    Attributes:
      haystack: `noise`, `topics` (Python's documentation), the path of a text, or `needles`: lines
        like the needle, with other keys.
      key, value: what needles are made of.
      keys: how many keys are hidden; `needles` as haystack hides many more.
      values: how many values each key has.
      queries: how many of the keys are asked for.
      published: the published task's text, for the label: `noise`, `needles` or `essays`.
    """

    name: str = fixed("niah_single_1")
    metric: str = fixed("share of the values named")
    published: str = fixed("noise")

    haystack: str = "noise"
    key: Literal["words", "uuid"] = "words"
    value: Literal["number", "uuid"] = "number"
    keys: int = 1
    values: int = 1
    queries: int = 1
    max_new: int = 128

    def __post_init__(self):
        at_least(1, keys=self.keys, values=self.values, queries=self.queries, max_new=self.max_new)
        if self.queries > self.keys:
            raise ConfigError(f"queries must be at most keys = {self.keys}, got {self.queries}")
        if self.keys * self.values > len(LEVELS):
            raise ConfigError(
                f"keys * values must be at most {len(LEVELS)}, got {self.keys * self.values}"
            )

    @property
    def label(self) -> str:
        """With the text's name where it is not the published task's kind of text."""
        if self.haystack == self.published:
            return self.name
        return f"{self.name}@{source_name(self.haystack)}"

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """See `Task`."""
        single = self.queries * self.values == 1
        noun = self.value if single else f"{self.value}s"
        verb = "is" if single else "are"
        for index in range(trials):
            draw = sample_draw(self.name, seed, tokens, index)
            fresh = _Distinct(draw)
            keys = [fresh(self.key) for _ in range(self.keys)]
            needles = [(key, fresh(self.value)) for key in keys for _ in range(self.values)]
            asked = keys[: self.queries]
            named = _listed(asked)
            draw.shuffle(needles)
            query = f"\n\nWhich secret {noun} {verb} assigned to {named} in the text above?"
            prefix = f"\n\nThe secret {noun} assigned to {named} {verb}:"
            room = context_room(count, query + prefix, self.max_new, tokens)
            hide = self._among_needles if self.haystack == NEEDLES else self._in_text
            context, size, depths = hide(count, draw, fresh, needles, room)
            yield make_sample(
                count,
                index=index,
                context=context,
                tokens=size,
                query=query,
                answer_prefix=prefix,
                outputs=(v for key in asked for k, v in needles if k == key),
                max_new=self.max_new,
                meta={"keys": asked, "depths": depths},
            )

    def _introduction(self) -> str:
        if self.queries * self.values == 1:
            return (
                f"The text below hides secret {self.value}s, one or more. Keep them in mind: "
                f"one {self.value} will be asked for at the end.\n\n"
            )
        return (
            f"The text below hides secret {self.value}s. Keep them in mind: "
            f"several of them will be asked for at the end.\n\n"
        )

    def _sentence(self, needle: tuple[str, str]) -> str:
        return NEEDLE.format(kind=self.value, key=needle[0], value=needle[1])

    def _in_text(
        self,
        count: Count,
        draw: random.Random,
        fresh: "_Distinct",
        needles: Sequence[tuple[str, str]],
        room: int,
    ) -> tuple[str, int, list[float]]:
        haystack = open_haystack(self.haystack, count)
        depths = [level / 100 for level in sorted(draw.sample(LEVELS, len(needles)))]
        filled = haystack.fill(
            list(zip(depths, map(self._sentence, needles), strict=True)),
            tokens=room,
            start=draw.randrange(len(haystack.pieces)),
            head=self._introduction(),
            inline=self.haystack != "noise",
        )
        return filled.text, filled.tokens, depths

    def _among_needles(
        self,
        count: Count,
        draw: random.Random,
        fresh: "_Distinct",
        needles: Sequence[tuple[str, str]],
        room: int,
    ) -> tuple[str, int, list[float]]:
        depths = sorted(draw.random() for _ in needles)
        introduction, lines = self._introduction(), []

        def context(number: int) -> str:
            while len(lines) < number:
                lines.append(self._sentence((fresh(self.key), fresh(self.value))))
            chosen = lines[:number]
            # From the back, so that no sentence moves one that is set in after it.
            for depth, needle in reversed(list(zip(depths, needles, strict=True))):
                chosen.insert(int(depth * (number + 1)), self._sentence(needle))
            return introduction + "\n".join(chosen)

        fitted = most_units(count, context, room)
        return fitted.text, fitted.tokens, depths

    def score(self, answer: str, sample: Sample) -> float:
        """The share of the values that the answer names."""
        return string_match_all(clean(answer), sample.outputs)


class _Distinct:
    """Keys and values of one prompt, no two the same."""

    def __init__(self, draw: random.Random):
        self._draw = draw
        self._seen: set[str] = set()
        # Of all pairs, so many that a new one is soon drawn.
        self._words = 9 * len(ADJECTIVES) * len(NOUNS) // 10

    def __call__(self, kind: Kind) -> str:
        while True:
            text = self._drawn(kind)
            if text not in self._seen:
                self._seen.add(text)
                self._words -= kind == "words"
                return text

    def _drawn(self, kind: Kind) -> str:
        if kind == "number":
            return str(self._draw.randrange(1_000_000, 10_000_000))
        if kind == "uuid":
            return str(uuid.UUID(int=self._draw.getrandbits(128), version=4))
        if self._words == 0:
            raise LengthError("there are no more keys of two words; set key=uuid, or ask for less")
        return f"{self._draw.choice(ADJECTIVES)}-{self._draw.choice(NOUNS)}"


def _listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b, and c`."""
    if len(names) <= 2:
        return " and ".join(names)
    return f"{', '.join(names[:-1])}, and {names[-1]}"


def ruler_niah_tasks() -> tuple[RulerNiah, ...]:
    """The eight of the paper's table 6, with its settings."""

    def essays(name: str, **settings: Any) -> RulerNiah:
        return RulerNiah(name=name, published="essays", haystack="topics", **settings)

    def needles(name: str, **settings: Any) -> RulerNiah:
        return RulerNiah(name=name, published=NEEDLES, haystack=NEEDLES, **settings)

    return (
        RulerNiah(),
        essays("niah_single_2"),
        essays("niah_single_3", value="uuid"),
        essays("niah_multikey_1", keys=4),
        needles("niah_multikey_2"),
        needles("niah_multikey_3", key="uuid", value="uuid"),
        essays("niah_multivalue", values=4),
        essays("niah_multiquery", keys=4, queries=4),
    )
