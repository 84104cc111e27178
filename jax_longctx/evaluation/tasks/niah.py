"""Needles in a haystack: made-up facts at known depths of a running text.

After Kamradt's test (one needle, a grid of depths and lengths) and OpenCompass's NeedleBench, which
ReAttention uses. Those hide the same few sentences in essays, and a language model judges the
answers. Here every prompt has its own facts, the text is Python's documentation or the user's, an
answer is right where it names the place, and the needle stands between two sentences. As in
NeedleBench's multi-needle test, `niah_multi` puts all needles into one prompt, at evenly spaced
depths, and asks for all of them.
"""

import dataclasses
import random

from jax_longctx.errors import ConfigError
from jax_longctx.evaluation.haystack import open_haystack
from jax_longctx.evaluation.metrics import clean, needlebench, rouge, string_match_all
from jax_longctx.evaluation.tasks.task import Count, Sample, Task, fixed
from jax_longctx.evaluation.tasks.words import ADJECTIVES, NOUNS, invented_name
from jax_longctx.settings import at_least

ONE = (
    "Read the following text closely. Among other things it says where something is kept; "
    "that will be asked for at the end.\n\n"
)
SEVERAL = (
    "Read the following text closely. Here and there it says where something is kept; "
    "all of these places will be asked for at the end.\n\n"
)


@dataclasses.dataclass(frozen=True)
class Fact:
    """A thing of a place, and where it is kept: `the copper bell of Velmart`, `a mossy chest`."""

    thing: str
    where: str

    @property
    def stem(self) -> str:
        """The sentence up to the place."""
        return f"The {self.thing} is kept in"

    @property
    def sentence(self) -> str:
        """The whole sentence."""
        return f"{self.stem} the {self.where}."


def draw_facts(draw: random.Random, number: int, text: str) -> list[Fact]:
    """Facts without common words, whose places do not occur in `text`."""
    adjectives = draw.sample(ADJECTIVES, 2 * number)
    nouns = draw.sample(NOUNS, len(NOUNS))
    # If the text held the place's words, an answer could be right by chance.
    low, facts = text.lower(), []
    for _ in range(number):
        first, second = adjectives.pop(), adjectives.pop()
        thing = f"{first} {nouns.pop()} of {invented_name(draw)}"
        where = f"{second} {nouns.pop()}"
        while where in low:
            where = f"{second} {nouns.pop()}"
        facts.append(Fact(thing, where))
    return facts


@dataclasses.dataclass(frozen=True, kw_only=True)
class NiahSingle(Task):
    """Needle in a haystack: where one thing is kept, hidden at every depth of a text.

    Attributes:
      haystack: `topics` (Python's documentation), `noise`, or the path of a text.
      depths: how many depths, evenly spaced from the text's start to its end, taken in turn.
    """

    name: str = fixed("niah_single")
    metric: str = fixed("names the place")
    needs: str = fixed("rapidfuzz")

    haystack: str = "topics"
    depths: int = 11
    max_new: int = 32

    def sample(self, count: Count, draw: random.Random, index: int, tokens: int) -> Sample:
        """A fact at the next depth in turn."""
        haystack = open_haystack(self.haystack, count)
        (fact,) = draw_facts(draw, 1, haystack.text)
        query, stem = f"\n\nWhere is the {fact.thing} kept?", f"\n\n{fact.stem} the"
        depth = (index % self.depths) / max(self.depths - 1, 1)
        filled = haystack.fill(
            [(depth, fact.sentence)],
            tokens=self.room(count, query + stem, tokens),
            start=draw.randrange(len(haystack.pieces)),
            head=ONE,
        )
        (at,) = filled.depths
        return self.made(count, index, filled, query, stem, (fact.where,), depth=depth, at=at)

    def parts(self, answer: str, sample: Sample) -> dict[str, float]:
        """ROUGE of the answer's first line against the place; NeedleBench's score."""
        first, place = next(iter(clean(answer).splitlines()), ""), sample.outputs[0] + "."
        stem = sample.answer_prefix.strip()
        nearness = needlebench(f"{stem} {first}", sample.outputs[0], f"{stem} {place}")
        return {**rouge(first, place), "needlebench": nearness}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NiahMulti(Task):
    """Needles in a haystack: where several things are kept, asked for all together.

    Attributes:
      haystack: `topics` (Python's documentation), `noise`, or the path of a text.
      needles: how many, at depths evenly spaced from the text's start to its end.
    """

    name: str = fixed("niah_multi")
    metric: str = fixed("share of the places named")

    haystack: str = "topics"
    needles: int = 11
    max_new: int = 250

    def __post_init__(self):
        super().__post_init__()
        at_least(2, self, "needles")
        if self.needles > 50:
            raise ConfigError(f"needles must be at most 50, got {self.needles}")

    def sample(self, count: Count, draw: random.Random, index: int, tokens: int) -> Sample:
        """A fact at each depth."""
        haystack = open_haystack(self.haystack, count)
        depths = [i / (self.needles - 1) for i in range(self.needles)]
        facts = draw_facts(draw, self.needles, haystack.text)
        things = [f"the {fact.thing}" for fact in facts]
        query = (
            f"\n\nWhere are these kept: {', '.join(things[:-1])}, and {things[-1]}? "
            "Say it in one sentence for each, in this order."
        )
        stem = f"\n\n{facts[0].stem} the"
        filled = haystack.fill(
            [(depth, fact.sentence) for depth, fact in zip(depths, facts, strict=True)],
            tokens=self.room(count, query + stem, tokens),
            start=draw.randrange(len(haystack.pieces)),
            head=SEVERAL,
        )
        at = list(filled.depths)
        places = (fact.where for fact in facts)
        return self.made(count, index, filled, query, stem, places, depths=depths, at=at)

    def parts(self, answer: str, sample: Sample) -> dict[str, float]:
        """Whether all places are named, and each one by its depth in percent."""
        depths = sample.meta["depths"]
        named = {
            f"depth {100 * depth:.0f}%": string_match_all(clean(answer), (place,))
            for depth, place in zip(depths, sample.outputs, strict=True)
        }
        return {"all": 100.0 * all(named.values()), **named}
