"""RULER (Hsieh et al. 2024, section 3 and appendix B): needles, chains of variables, words.

Needle tasks: a needle gives a key (two words, or a UUID) a value (a number of seven digits, or a
UUID). The text around it is noise, running text, or other needles. Variants hide several keys
(multikey), give a key several values (multivalue), or ask for several keys (multiquery). Depths are
drawn without repetition from 40 evenly spaced ones, here by tokens.

`vt`, variable tracking: `VAR A = 12345` stands in the noise, further on `VAR B = VAR A`, and so on;
the question asks for all names of the chain. A small solved example stands before the text, another
one in each prompt, as in Star's copy.

`cwe`, common words extraction: a numbered list of words, ten of them ten times as often as the
others, after a short solved list. `fwe`, frequent words extraction: words of six letters, the i-th
most frequent with a share of i^-2 / zeta(2); dots stand for the most frequent, and the question
asks for the next three.

Differences from the published tasks: the wording; the words of keys and lists, which are invented
once English runs out; the running text (Python's documentation or the user's, not essays: the label
names it); and the length. Prompts are as long as whole sentences, lines or words allow, not
multiples of 500 words or 25 lines, and never exceed the requested length, the answer included.
"""

import dataclasses
import itertools
import math
import random
import string
import uuid
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from jax_longctx.errors import ConfigError, LengthError
from jax_longctx.evaluation.haystack import Fitted, Haystack, most_units, open_haystack
from jax_longctx.evaluation.tasks.task import Count, Sample, Task, fixed
from jax_longctx.evaluation.tasks.words import ADJECTIVES, NOUNS, Growing, distinct, word_stream

NEEDLE = "A secret {kind} assigned to {key} is: {value}."
NEEDLES = "needles"
LEVELS = [round(100 * i / 39) for i in range(40)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RulerNiah(Task):
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
        super().__post_init__()
        if self.queries > self.keys:
            raise ConfigError(f"queries must be at most keys = {self.keys}, got {self.queries}")
        if self.keys * self.values > len(LEVELS):
            raise ConfigError(
                f"keys * values must be at most {len(LEVELS)}, got {self.keys * self.values}"
            )

    def sample(self, count: Count, draw: random.Random, index: int, tokens: int) -> Sample:
        """Needles in their text; the question names the first `queries` keys."""
        single = self.queries * self.values == 1
        noun, verb = (self.value, "is") if single else (f"{self.value}s", "are")
        fresh = _fresh(draw)
        keys = [next(fresh[self.key]) for _ in range(self.keys)]
        needles = [(key, next(fresh[self.value])) for key in keys for _ in range(self.values)]
        asked = keys[: self.queries]
        named = _listed(asked)
        draw.shuffle(needles)
        query = f"\n\nWhich secret {noun} {verb} assigned to {named} in the text above?"
        prefix = f"\n\nThe secret {noun} assigned to {named} {verb}:"
        room = self.room(count, query + prefix, tokens)
        values = [value for key in asked for k, value in needles if k == key]
        many = f"one {noun}" if single else "several of them"
        head = (
            f"The text below hides secret {self.value}s{', one or more' * single}. Keep them in "
            f"mind: {many} will be asked for at the end.\n\n"
        )
        sentences = [self._sentence(*needle) for needle in needles]
        if self.haystack == NEEDLES:
            depths = sorted(draw.random() for _ in needles)
            lines: list[str] = []

            def context(number: int) -> str:
                while len(lines) < number:
                    key, value = next(fresh[self.key]), next(fresh[self.value])
                    lines.append(self._sentence(key, value))
                chosen = lines[:number]
                # From the last, so that no insertion moves a later one.
                for depth, sentence in reversed(list(zip(depths, sentences, strict=True))):
                    chosen.insert(int(depth * (number + 1)), sentence)
                return head + "\n".join(chosen)

            text = most_units(count, context, room)
        else:
            depths = [level / 100 for level in sorted(draw.sample(LEVELS, len(needles)))]
            haystack = open_haystack(self.haystack, count)
            text = haystack.fill(
                list(zip(depths, sentences, strict=True)),
                tokens=room,
                start=draw.randrange(len(haystack.pieces)),
                head=head,
                inline=self.haystack != "noise",
            )
        return self.made(count, index, text, query, prefix, values, keys=asked, depths=depths)

    def _sentence(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value, key=key, value=value)


def _fresh(draw: random.Random) -> dict[str, Iterator[str]]:
    """Distinct keys and values of one prompt, by their kind."""

    def words() -> Iterator[str]:
        # The last tenth of all pairs would be slow to hit.
        most = 9 * len(ADJECTIVES) * len(NOUNS) // 10
        yield from itertools.islice(
            distinct(lambda: f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}"), most
        )
        raise LengthError("there are no more keys of two words; set key=uuid, or ask for less")

    return {
        "words": words(),
        "number": distinct(lambda: str(draw.randrange(1_000_000, 10_000_000))),
        "uuid": distinct(lambda: str(uuid.UUID(int=draw.getrandbits(128), version=4))),
    }


def _listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b, and c`."""
    if len(names) <= 2:
        return " and ".join(names)
    return f"{', '.join(names[:-1])}, and {names[-1]}"


def ruler_niah_tasks() -> tuple[RulerNiah, ...]:
    """The eight of the paper's table 6, with its settings."""

    essays: dict[str, Any] = {"published": "essays", "haystack": "topics"}
    needles: dict[str, Any] = {"published": NEEDLES, "haystack": NEEDLES}
    return (
        RulerNiah(),
        RulerNiah(name="niah_single_2", **essays),
        RulerNiah(name="niah_single_3", value="uuid", **essays),
        RulerNiah(name="niah_multikey_1", keys=4, **essays),
        RulerNiah(name="niah_multikey_2", **needles),
        RulerNiah(name="niah_multikey_3", key="uuid", value="uuid", **needles),
        RulerNiah(name="niah_multivalue", values=4, **essays),
        RulerNiah(name="niah_multiquery", keys=4, queries=4, **essays),
    )


TRACKED = "Variables are assigned in the text below, among words that say nothing. Follow them.\n\n"
EXAMPLE_TOKENS = 500
# Variables that hold the value: the first, and four that it is handed on to.
CHAIN = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariableTracking(Task):
    """RULER's variable tracking: the names that a value is handed on to."""

    name: str = fixed("vt")
    metric: str = fixed("share of the variables named")

    max_new: int = 30

    def sample(self, count: Count, draw: random.Random, index: int, tokens: int) -> Sample:
        """A solved example, then the chain."""
        haystack = open_haystack("noise", count)
        known, value = draw.sample(range(10_000, 99_999), 2)
        # At most a quarter of a short prompt.
        size = min(EXAMPLE_TOKENS, tokens // 4)
        example, names = self._text(haystack, draw, known, 3, size, TRACKED)
        solved = "".join((example.text, *self._asked(known), " ", " ".join(names)))
        query, prefix = self._asked(value)
        room = self.room(count, query + prefix, tokens)
        text, names = self._text(haystack, draw, value, 5, room, f"{solved}\n\n\n{TRACKED}")
        return self.made(count, index, text, query, prefix, names, value=value)

    def _asked(self, value: int) -> tuple[str, str]:
        """The question and the start of its answer."""
        query = f"\n\nWhich variables hold the value {value} in the text above?"
        return query, f"\n\n{CHAIN} variables hold the value {value}:"

    def _text(
        self,
        haystack: Haystack,
        draw: random.Random,
        value: int,
        letters: int,
        room: int,
        head: str,
    ) -> tuple[Fitted, list[str]]:
        """Noise with the chain hidden in it, and the names that hold the value."""
        names = list(reversed(_names(draw, CHAIN, string.ascii_uppercase, letters)))
        held = [str(value), *(f"VAR {before}" for before in names)]
        lines = [f"VAR {name} = {each}" for name, each in zip(names, held, strict=False)]
        filled = haystack.fill(
            list(zip(sorted(draw.random() for _ in lines), lines, strict=True)),
            tokens=room,
            start=draw.randrange(len(haystack.pieces)),
            head=head,
        )
        return filled, names


def _names(draw: random.Random, number: int, letters: str, length: int) -> list[str]:
    """`number` distinct names of `length` letters."""
    names = distinct(lambda: "".join(draw.choices(letters, k=length)))
    return list(itertools.islice(names, number))


LIST = (
    "In the numbered list of words below, some words come up more often than others. Find them.\n\n"
)
COMMON = "\n\nWhich {number} words are the most common in the list above?"
COMMON_ARE = "\n\nThe {number} most common words in the list are:"
CODE = (
    "The text below is in code: its words mean nothing and dots stand for one of them. "
    "Count how often each word comes up.\n\n"
)
FREQUENT = (
    "\n\nLeaving out the dots, which {number} words come up most often in the coded text above?"
)
FREQUENT_ARE = "\n\nThe {number} words that come up most often are:"
# Common words of a list, and tokens below which it repeats its words less often.
WORDS, SHORT = 10, 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonWords(Task):
    """RULER's common words extraction: the ten words that a long list repeats most."""

    name: str = fixed("cwe")
    metric: str = fixed("share of the common words named")

    max_new: int = 120

    def sample(self, count: Count, draw: random.Random, index: int, tokens: int) -> Sample:
        """A solved list, and a list that fills the prompt."""
        short = tokens < SHORT
        common, other = (6, 1) if short else (30, 3)
        query, prefix = (text.format(number=WORDS) for text in (COMMON, COMMON_ARE))
        stream = word_stream(draw)
        shown = [next(stream) for _ in range(2 * WORDS if short else 4 * WORDS)]
        answer = _numbered(shown[:WORDS])
        example = _common_list(draw, shown, WORDS, *((3, 1) if short else (10, 3)))
        head = f"{LIST}{example}{query}{prefix} {answer}\n\n\n{LIST}"
        listed = Growing(stream)
        outputs, order = listed(WORDS), draw.random()

        def context(others: int) -> str:
            chosen = listed(WORDS + others)
            return head + _common_list(random.Random(order), chosen, WORDS, common, other)

        room = self.room(count, query + prefix, tokens)
        fitted = most_units(count, context, room, fewest=WORDS)
        meta = {"words": WORDS + fitted.units, "common": common, "other": other}
        return self.made(count, index, fitted, query, prefix, outputs, **meta)


def _common_list(
    draw: random.Random, words: Sequence[str], number: int, common: int, other: int
) -> str:
    """The first `number` words `common` times and the rest `other` times, shuffled and numbered."""
    repeated = [word for word in words[:number] for _ in range(common)]
    repeated += [word for word in words[number:] for _ in range(other)]
    draw.shuffle(repeated)
    return _numbered(repeated)


def _numbered(words: Sequence[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FrequentWords(Task):
    """RULER's frequent words extraction: the words a coded text has most of."""

    name: str = fixed("fwe")
    metric: str = fixed("share of the frequent words named")

    max_new: int = 50

    def sample(self, count: Count, draw: random.Random, index: int, tokens: int) -> Sample:
        """A coded text that fills the prompt."""
        query, prefix = FREQUENT.format(number=3), FREQUENT_ARE.format(number=3)
        coded = _names(draw, max(tokens // 50, 5), string.ascii_lowercase, 6)
        order, scale = draw.random(), math.pi**2 / 6
        shares = [rank**-2.0 / scale for rank in range(1, len(coded) + 1)]

        def counts(number: int) -> list[int]:
            return [math.floor(number * share) for share in shares]

        def context(number: int) -> str:
            pairs = zip(["...", *coded[1:]], counts(number), strict=True)
            text = [word for word, times in pairs for _ in range(times)]
            random.Random(order).shuffle(text)
            return CODE + " ".join(text)

        fitted = most_units(count, context, self.room(count, query + prefix, tokens))
        ranks = counts(fitted.units)
        if ranks[3] == ranks[4]:
            raise LengthError(
                f"{tokens} tokens are too few for three words that are more frequent than the "
                "rest; ask for more"
            )
        return self.made(count, index, fitted, query, prefix, coded[1:4], counts=ranks[:5])
