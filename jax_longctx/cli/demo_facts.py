"""The demo's text: facts drawn anew, hidden in running English, and the rule that scores answers.

Three facts of different kinds are drawn: a code, a hiding place, a keeper's name, a password, a
favourite fruit, a train's departure. Each is one sentence and a paragraph of its own, in another
third of the text, and none among the newest tokens, which every method reads. The text around them
is the documentation that CPython ships, begun at a drawn sentence.

A question ends in the first words of the fact's sentence. So small a model answers a question best
where it has only to go on. Its answer is what it says from its first word to the end of that line
or sentence (`first_words`). It is right where it holds the drawn words (`Fact.is_right`).
"""

import dataclasses
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

from jax_longctx.evaluation.haystack import Haystack

FACTS = 3
# Shares of the text between which each fact stands.
DEPTHS = ((0.03, 0.28), (0.34, 0.58), (0.62, 0.85))

_WORDS: dict[str, Sequence[Any]] = {
    "adjective": "copper silver wooden green broken painted velvet marble".split(),
    "thing": "lamp violin clock mirror kettle compass globe teapot".split(),
    "place": "greenhouse attic bakery stable chapel cellar laundry boathouse".split(),
    "town": "Bergen Lisbon Dakar Oslo Quito Riga Tampere Ghent Malaga Zadar".split(),
    "name": "Marta Oliver Ingrid Samuel Yusuf Clara Hugo Nadia Pavel Leonor".split(),
    "surname": "Okafor Lindqvist Moreau Castillo Petrov Tanaka Byrne Novak".split(),
    "animal": "otter falcon badger heron lynx walrus gecko magpie".split(),
    "colour": "purple crimson golden orange turquoise scarlet".split(),
    "fruit": "mango papaya apricot raspberry pear pineapple quince fig".split(),
    "code": range(10_000, 100_000),
    "hour": range(1, 12),
    "minute": range(10, 60),
}
# Kinds of facts: the question, the sentence up to the truth, and the truth.
KINDS = (
    ("What is the code of the {adjective} safe?", "The code of the {adjective} safe is", "{code}"),
    (
        "Where is the {adjective} {thing} hidden?",
        "The {adjective} {thing} is hidden in the",
        "{place}",
    ),
    (
        "Who keeps the lighthouse of {town}?",
        "The keeper of the {town} lighthouse is called",
        "{name} {surname}",
    ),
    (
        "What is the password of the {town} library?",
        "The password of the {town} library is",
        "{colour} {animal}",
    ),
    ("What is {name}'s favourite fruit?", "{name}'s favourite fruit is the", "{fruit}"),
    (
        "When does the night train to {town} leave?",
        "The night train to {town} leaves at",
        "{hour}:{minute}",
    ),
)


@dataclasses.dataclass(frozen=True)
class Fact:
    """Something that only the text says.

    Attributes:
      question: the text of the question.
      opening: the sentence up to the truth.
      truth: the words that were drawn.
    """

    question: str
    opening: str
    truth: str

    @property
    def sentence(self) -> str:
        """What stands in the text."""
        return f"{self.opening} {self.truth}."

    @property
    def asked(self) -> str:
        """What the model is given after the text."""
        return f"\n\nQuestion: {self.question}\nAnswer: {self.opening}"

    def is_right(self, answer: str) -> bool:
        """Whether the answer holds the truth: its words whole and in order, in any case."""
        words = r"\s+".join(map(re.escape, self.truth.split()))
        return re.search(rf"(?<!\w){words}(?!\w)", answer, re.IGNORECASE) is not None


class _Drawn(dict[str, Any]):
    """Words by their kind, each drawn when it is first asked for."""

    def __init__(self, draw: random.Random):
        super().__init__()
        self._draw = draw

    def __missing__(self, kind: str) -> Any:
        return self.setdefault(kind, self._draw.choice(_WORDS[kind]))


def fact_of(kind: tuple[str, str, str], draw: random.Random) -> Fact:
    """A fact of one of `KINDS`."""
    words = _Drawn(draw)
    return Fact(*(text.format_map(words) for text in kind))


@dataclasses.dataclass(frozen=True)
class Story:
    """A text and the facts in it.

    Attributes:
      tokens: of the text, with the token that begins it.
      places: of each fact, the tokens before its sentence.
    """

    text: str
    tokens: int
    facts: tuple[Fact, ...]
    places: tuple[int, ...]


def first_words(said: str) -> str:
    """An answer's first words, to the end of their line or sentence; empty where there are none."""
    found = re.search(r"\w[^\n.]*", said)
    return "" if found is None else found[0].strip()


def draw_facts(draw: random.Random) -> tuple[Fact, ...]:
    """Facts of different kinds."""
    return tuple(fact_of(kind, draw) for kind in draw.sample(KINDS, FACTS))


def write_story(
    haystack: Haystack, encode: Callable[[str], list[int]], draw: random.Random, tokens: int
) -> Story:
    """A text of at most `tokens` tokens that hides drawn facts at drawn depths.

    Args:
      encode: tokens of a text as the model is given it, with the one that begins a text.

    Raises:
      LengthError: the facts leave no room for any text.
    """
    facts = draw_facts(draw)
    needles = [
        (draw.uniform(*span), fact.sentence) for span, fact in zip(DEPTHS, facts, strict=True)
    ]
    start = draw.randrange(len(haystack.pieces))
    # One token begins the text.
    text = haystack.fill(needles, tokens=tokens - 1, start=start).text
    places = tuple(len(encode(text[: text.index(fact.sentence)])) for fact in facts)
    return Story(text, len(encode(text)), facts, places)
