"""Made-up facts to hide: what is kept where."""

import dataclasses
import random

from jax_longctx.evaluation.tasks.words import ADJECTIVES, NOUNS, invented_name

__all__ = ["Fact", "draw_facts"]


@dataclasses.dataclass(frozen=True)
class Fact:
    """A thing of a place, and where it is kept: `the copper bell of Velmart`, `a mossy chest`."""

    thing: str
    where: str

    @property
    def stem(self) -> str:
        """The sentence up to where it is kept."""
        return f"The {self.thing} is kept in"

    @property
    def sentence(self) -> str:
        """The whole."""
        return f"{self.stem} the {self.where}."


def draw_facts(draw: random.Random, number: int, text: str) -> list[Fact]:
    """Facts that share no word with each other, kept where `text` says nothing of."""
    adjectives = draw.sample(ADJECTIVES, 2 * number)
    nouns = draw.sample(NOUNS, len(NOUNS))
    # Two words that meet in the text would make an answer that is right by chance.
    low, facts = text.lower(), []
    for _ in range(number):
        first, second = adjectives.pop(), adjectives.pop()
        thing = f"{first} {nouns.pop()} of {invented_name(draw)}"
        where = f"{second} {nouns.pop()}"
        while where in low:
            where = f"{second} {nouns.pop()}"
        facts.append(Fact(thing, where))
    return facts
