"""RULER's aggregation: the most common words of a list, and of a text in code.

Hsieh et al. 2024, section 3. `cwe` (common words extraction) numbers a list of words in which ten
stand ten times as often as the others, after a solved short list; `fwe` (frequent words extraction)
draws words of six letters so that the i-th most frequent has a share of i^-2 / zeta(2), writes dots
for the most frequent, and asks for the three behind it.

What differs from the published tasks: the words of prompts and lists, which when English runs out
are invented; `cwe` grows by a word of the list at a time; `fwe` is never longer than what was asked
for, the answer's room included.
"""

import dataclasses
import math
import random
import string
from collections.abc import Callable, Iterator, Sequence

from jax_longctx.errors import ConfigError, LengthError
from jax_longctx.evaluation.fitting import most_units
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
from jax_longctx.evaluation.tasks.words import word_stream

__all__ = ["CommonWords", "FrequentWords"]

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
# Shorter lists repeat their words less.
SHORT = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonWords(PlainTask):
    """RULER's common words extraction: the words that a long list repeats most.

    Attributes:
      words: how many common words there are.
      common, other: how often the list has a common word and any other; None for the paper's 30 and
        3, in prompts of less than 4096 tokens 6 and 1.
    """

    name: str = fixed("cwe")
    metric: str = fixed("share of the common words named")

    words: int = 10
    common: int | None = None
    other: int | None = None
    max_new: int = 120

    def __post_init__(self):
        at_least(1, words=self.words, max_new=self.max_new)
        if (self.common is None) != (self.other is None):
            raise ConfigError("common and other go together: give both or neither")
        if self.common is not None and self.other is not None:
            at_least(1, other=self.other)
            if self.common <= self.other:
                raise ConfigError(
                    f"common must be more than other = {self.other}, got {self.common}"
                )

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """See `Task`."""
        short = tokens < SHORT
        common = self.common or (6 if short else 30)
        other = self.other or (1 if short else 3)
        query, prefix = (text.format(number=self.words) for text in (COMMON, COMMON_ARE))
        for index in range(trials):
            draw = sample_draw(self.name, seed, tokens, index)
            stream = word_stream(draw)
            shown = [next(stream) for _ in range(2 * self.words if short else 4 * self.words)]
            answer = _numbered(shown[: self.words])
            example = _common_list(draw, shown, self.words, *((3, 1) if short else (10, 3)))
            head = f"{LIST}{example}{query}{prefix} {answer}\n\n\n{LIST}"
            listed, context = _growing(draw, stream, head, self.words, common, other)
            room = context_room(count, query + prefix, self.max_new, tokens)
            fitted = most_units(count, context, room, fewest=self.words)
            yield make_sample(
                count,
                index=index,
                context=fitted.text,
                tokens=fitted.tokens,
                query=query,
                answer_prefix=prefix,
                outputs=listed[: self.words],
                max_new=self.max_new,
                meta={"words": self.words + fitted.units, "common": common, "other": other},
            )

    def score(self, answer: str, sample: Sample) -> float:
        """The share of the common words that the answer names."""
        return string_match_all(clean(answer), sample.outputs)


def _growing(
    draw: random.Random,
    stream: Iterator[str],
    head: str,
    number: int,
    common: int,
    other: int,
) -> tuple[list[str], Callable[[int], str]]:
    """Words that `number` common ones begin, and the text with so many others beside them."""
    listed = [next(stream) for _ in range(number)]
    order = draw.random()

    def context(others: int) -> str:
        while len(listed) < number + others:
            listed.append(next(stream))
        chosen = listed[: number + others]
        return head + _common_list(random.Random(order), chosen, number, common, other)

    return listed, context


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
class FrequentWords(PlainTask):
    """RULER's frequent words extraction: the words a coded text has most of.

    Attributes:
      alpha: how fast frequencies fall with rank: as rank to the power of -alpha.
    """

    name: str = fixed("fwe")
    metric: str = fixed("share of the frequent words named")

    alpha: float = 2.0
    max_new: int = 50

    def __post_init__(self):
        at_least(1, max_new=self.max_new)
        if not 1 < self.alpha < math.inf:
            raise ConfigError(f"alpha must be more than 1, got {self.alpha}")

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """See `Task`."""
        query, prefix = FREQUENT.format(number=3), FREQUENT_ARE.format(number=3)
        room = context_room(count, query + prefix, self.max_new, tokens)
        for index in range(trials):
            draw = sample_draw(self.name, seed, tokens, index)
            coded = _coded_words(draw, max(tokens // 50, 5))
            counts, context = _coded_text(draw, coded, self.alpha)
            fitted = most_units(count, context, room)
            ranks = counts(fitted.units)
            if ranks[3] == ranks[4]:
                raise LengthError(
                    f"{tokens} tokens are too few for three words that are more frequent than the "
                    "rest; ask for more"
                )
            yield make_sample(
                count,
                index=index,
                context=fitted.text,
                tokens=fitted.tokens,
                query=query,
                answer_prefix=prefix,
                outputs=coded[1:4],
                max_new=self.max_new,
                meta={"counts": ranks[:5]},
            )

    def score(self, answer: str, sample: Sample) -> float:
        """The share of the frequent words that the answer names."""
        return string_match_all(clean(answer), sample.outputs)


def _coded_text(
    draw: random.Random, coded: Sequence[str], alpha: float
) -> tuple[Callable[[int], list[int]], Callable[[int], str]]:
    """How often each rank comes up among so many words, and the text of them."""
    order, scale = draw.random(), _zeta(alpha)
    shares = [rank**-alpha / scale for rank in range(1, len(coded) + 1)]

    def counts(number: int) -> list[int]:
        return [math.floor(number * share) for share in shares]

    def context(number: int) -> str:
        pairs = zip(["...", *coded[1:]], counts(number), strict=True)
        text = [word for word, times in pairs for _ in range(times)]
        random.Random(order).shuffle(text)
        return CODE + " ".join(text)

    return counts, context


def _coded_words(draw: random.Random, number: int) -> list[str]:
    """Distinct words of six small letters."""
    words: dict[str, None] = {}
    while len(words) < number:
        words["".join(draw.choices(string.ascii_lowercase, k=6))] = None
    return list(words)


def _zeta(alpha: float) -> float:
    """Riemann's zeta function for alpha > 1: a sum, and the integral of its rest."""
    terms = 10_000
    rest = (terms + 0.5) ** (1 - alpha) / (alpha - 1)
    return math.fsum(n**-alpha for n in range(1, terms + 1)) + rest
