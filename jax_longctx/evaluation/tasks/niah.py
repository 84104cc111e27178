"""Needles in a haystack: made-up facts at known depths of a running text.

After Kamradt's test (one needle, a grid of depths and lengths; here also several) and OpenCompass's
NeedleBench, which ReAttention uses. Theirs hide few sentences, always the same, in essays, and let
a language model judge; here every prompt has facts of its own, the text is Python's documentation
or the user's, an answer is right where it names the place, and the sentence goes to a border of
sentences. Of NeedleBench's multi-needle test, all needles stand in one prompt, at evenly spaced
depths, and are asked for together.
"""

import dataclasses
from collections.abc import Iterator

from jax_longctx.errors import ConfigError
from jax_longctx.evaluation.haystack import open_haystack, source_name
from jax_longctx.evaluation.metrics import clean, needlebench, rouge, string_match_all
from jax_longctx.evaluation.tasks.facts import draw_facts
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

__all__ = ["NiahMulti", "NiahSingle"]

ONE = (
    "Read the following text closely. Among other things it says where something is kept; "
    "that will be asked for at the end.\n\n"
)
SEVERAL = (
    "Read the following text closely. Here and there it says where something is kept; "
    "all of these places will be asked for at the end.\n\n"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NiahSingle(PlainTask):
    """Needle in a haystack: where one thing is kept, hidden at every depth of a text.

    Attributes:
      haystack: `topics` (Python's documentation), `noise`, or the path of a text.
      depths: how many depths, evenly spaced from the text's start to its end, taken in turn.
    """

    name: str = fixed("niah_single")
    metric: str = fixed("names the place")

    haystack: str = "topics"
    depths: int = 11
    max_new: int = 32

    def __post_init__(self):
        at_least(1, depths=self.depths, max_new=self.max_new)

    @property
    def label(self) -> str:
        """With the text's name."""
        return f"{self.name}@{source_name(self.haystack)}"

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """See `Task`."""
        haystack = open_haystack(self.haystack, count)
        for index in range(trials):
            draw = sample_draw(self.name, seed, tokens, index)
            (fact,) = draw_facts(draw, 1, haystack.text)
            query, stem = f"\n\nWhere is the {fact.thing} kept?", f"\n\n{fact.stem} the"
            depth = (index % self.depths) / max(self.depths - 1, 1)
            filled = haystack.fill(
                [(depth, fact.sentence)],
                tokens=context_room(count, query + stem, self.max_new, tokens),
                start=draw.randrange(len(haystack.pieces)),
                head=ONE,
            )
            yield make_sample(
                count,
                index=index,
                context=filled.text,
                tokens=filled.tokens,
                query=query,
                answer_prefix=stem,
                outputs=(fact.where,),
                max_new=self.max_new,
                meta={"depth": depth, "at": filled.before[0] / filled.around},
            )

    def score(self, answer: str, sample: Sample) -> float:
        """100 where the answer names the place."""
        return string_match_all(clean(answer), sample.outputs)

    def parts(self, answer: str, sample: Sample) -> dict[str, float]:
        """ROUGE of the answer's first line and the place; NeedleBench's score of the sentence."""
        lines = clean(answer).splitlines()
        first, place = lines[0] if lines else "", sample.outputs[0] + "."
        stem = sample.answer_prefix.strip()
        nearness = needlebench(f"{stem} {first}", sample.outputs[0], f"{stem} {place}")
        return {**rouge(first, place), "needlebench": nearness}


@dataclasses.dataclass(frozen=True, kw_only=True)
class NiahMulti(PlainTask):
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
        at_least(2, needles=self.needles)
        at_least(1, max_new=self.max_new)
        if self.needles > 50:
            raise ConfigError(f"needles must be at most 50, got {self.needles}")

    @property
    def label(self) -> str:
        """With the text's name."""
        return f"{self.name}@{source_name(self.haystack)}"

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """See `Task`."""
        haystack = open_haystack(self.haystack, count)
        depths = [i / (self.needles - 1) for i in range(self.needles)]
        for index in range(trials):
            draw = sample_draw(self.name, seed, tokens, index)
            facts = draw_facts(draw, self.needles, haystack.text)
            things = [f"the {fact.thing}" for fact in facts]
            query = (
                f"\n\nWhere are these kept: {', '.join(things[:-1])}, and {things[-1]}? "
                "Say it in one sentence for each, in this order."
            )
            stem = f"\n\n{facts[0].stem} the"
            filled = haystack.fill(
                [(depth, fact.sentence) for depth, fact in zip(depths, facts, strict=True)],
                tokens=context_room(count, query + stem, self.max_new, tokens),
                start=draw.randrange(len(haystack.pieces)),
                head=SEVERAL,
            )
            yield make_sample(
                count,
                index=index,
                context=filled.text,
                tokens=filled.tokens,
                query=query,
                answer_prefix=stem,
                outputs=(fact.where for fact in facts),
                max_new=self.max_new,
                meta={"depths": depths, "at": [n / filled.around for n in filled.before]},
            )

    def score(self, answer: str, sample: Sample) -> float:
        """The share of the places that the answer names."""
        return string_match_all(clean(answer), sample.outputs)

    def parts(self, answer: str, sample: Sample) -> dict[str, float]:
        """Whether all are named, and which, by depth in percent."""
        depths = sample.meta["depths"]
        named = {
            f"depth {100 * depth:.0f}%": string_match_all(clean(answer), (place,))
            for depth, place in zip(depths, sample.outputs, strict=True)
        }
        return {"all": 100.0 * all(named.values()), **named}
