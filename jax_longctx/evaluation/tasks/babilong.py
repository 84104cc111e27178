"""BABILong: the facts of a small story, spread over a long text that has nothing to do with it.

Kuratov et al. 2024, and Star Attention's setting of it (five kinds of questions, scored by labels).
Facts keep their order; where each stands is drawn, several may stand together. Worked examples of
the same kind come before the text.

What differs from the published set: the facts are simulated (see `small_worlds`), in other words
and with other text (Python's documentation or the user's, not novels: the label names it), which is
made of whole sentences. The answer is cut where the model goes on to another question, which Star's
scorer means to do.
"""

import dataclasses
import functools
import random
from collections.abc import Iterator, Sequence

from jax_longctx.evaluation.haystack import open_haystack, source_name
from jax_longctx.evaluation.tasks.small_worlds import LABELS, RANGES, Story, draw_story
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

__all__ = ["Babilong", "babilong_tasks", "label_score"]

INTRO = (
    "A few facts are spread over the text in the context below, which is about other things. "
    "Answer the question behind it from those facts alone, in the order in which they stand: "
    "what comes later holds. Answer in one word.\n\n"
)
SHOWN = "<example>\n{facts}\nQuestion: {question}\nAnswer: {answer}\n</example>\n\n"
ASKED = "\n</context>\n\nQuestion: {question}"
EXAMPLES = 2
# Facts are at most this share of a prompt's tokens.
SHARE = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Babilong(PlainTask):
    """BABILong: questions about a small story whose facts are spread over a long text.

    Attributes:
      haystack: `topics` (Python's documentation), `noise`, or the path of a text.
    """

    name: str = fixed("babilong_qa1")
    metric: str = fixed("names the answer and no other")
    stop: tuple[str, ...] = fixed(("Question",))
    kind: str = fixed("qa1")

    haystack: str = "topics"
    max_new: int = 32

    def __post_init__(self):
        at_least(1, max_new=self.max_new)

    @property
    def label(self) -> str:
        """With the text's name."""
        return f"{self.name}@{source_name(self.haystack)}"

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """See `Task`."""
        haystack = open_haystack(self.haystack, count)
        head = f"{INTRO}{_examples(self.kind)}<context>\n"
        for index in range(trials):
            draw = sample_draw(self.name, seed, tokens, index)
            story = self._story(count, draw, tokens)
            query = ASKED.format(question=story.question)
            prefix = "\n\nAnswer:"
            depths = sorted(draw.random() for _ in story.facts)
            filled = haystack.fill(
                list(zip(depths, story.facts, strict=True)),
                tokens=context_room(count, query + prefix, self.max_new, tokens),
                start=draw.randrange(len(haystack.pieces)),
                head=head,
                inline=True,
            )
            yield make_sample(
                count,
                index=index,
                context=filled.text,
                tokens=filled.tokens,
                query=query,
                answer_prefix=prefix,
                outputs=(story.answer,),
                max_new=self.max_new,
                meta={"facts": list(story.facts), "question": story.question, "depths": depths},
            )

    def _story(self, count: Count, draw: random.Random, tokens: int) -> Story:
        """A story that leaves room for other text."""
        fewest, most = RANGES[self.kind]
        while True:
            story = draw_story(self.kind, draw, draw.randint(fewest, most))
            if count(" ".join(story.facts)) <= SHARE * tokens or most == fewest:
                return story
            most = max(fewest, len(story.facts) - 1)

    def score(self, answer: str, sample: Sample) -> float:
        """100 where the answer names the right label, and no other but the question's own."""
        for stop in self.stop:
            answer = answer.partition(stop)[0]
        return label_score(answer, sample.outputs[0], sample.meta["question"], LABELS[self.kind])


@functools.cache
def _examples(kind: str) -> str:
    """Stories of the kind with few facts, always the same."""
    draw = random.Random(f"examples of {kind}")
    fewest, most = RANGES[kind]
    stories = [draw_story(kind, draw, min(fewest + i + 2, most)) for i in range(EXAMPLES)]
    return "".join(
        SHOWN.format(facts=" ".join(each.facts), question=each.question, answer=each.answer)
        for each in stories
    )


def label_score(answer: str, gold: str, question: str, labels: Sequence[str]) -> float:
    """100 where `gold` is the one label that the answer names beside those of the question.

    Of the answer counts what stands before its first full stop and before any tag of an example or
    a context, in any case of letters (BABILong's metric, as Star Attention uses it).
    """
    text = answer.lower().partition(".")[0].partition("<context>")[0].partition("<example>")[0]
    asked = question.lower()
    named = {label.lower() for label in labels if label.lower() in text}
    return 100.0 * (named - {label for label in named if label in asked} == {gold.lower()})


def babilong_tasks() -> tuple[Babilong, ...]:
    """The five kinds of Star Attention's evaluation."""
    return tuple(Babilong(name=f"babilong_{kind}", kind=kind) for kind in RANGES)
