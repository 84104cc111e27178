"""RULER's question answering: the documents that answer a question, among many that do not.

Hsieh et al. 2024, section 3. `qa_1` asks SQuAD's questions, `qa_2` HotpotQA's, which take two
documents. Beside those that answer stand others about the same (paragraphs of the same article, or
the ones HotpotQA itself puts there), then any, in a drawn order. A set that is used up starts over,
as in Star's copy.

The files are the user's: `file=dev-v2.0.json`, `file=hotpot_dev_distractor_v1.json`. Without one
the questions are `qa_syn`'s, made up, and the label says so.
"""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from typing import Literal

from jax_longctx.errors import InputError
from jax_longctx.evaluation.fitting import most_units
from jax_longctx.evaluation.haystack import source_name
from jax_longctx.evaluation.metrics import best_token_f1, clean, string_match_part
from jax_longctx.evaluation.tasks.qa_sets import QA_SYN, Question, QuestionSet, read_questions
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

__all__ = ["RulerQA", "ruler_qa_tasks"]

INTRO = "Some of the documents below answer a question that comes after them.\n\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RulerQA(PlainTask):
    """RULER's questions about documents: is the one that answers found among the others?

    Attributes:
      file: `qa_syn`, made up, or the path of a JSON file as SQuAD or HotpotQA publish theirs.
      hops: how many documents a question of `qa_syn` takes.
    """

    name: str = fixed("qa_1")
    metric: str = fixed("names an answer")

    file: str = QA_SYN
    hops: Literal[1, 2] = 1
    max_new: int = 32

    def __post_init__(self):
        at_least(1, max_new=self.max_new)

    @property
    def label(self) -> str:
        """With the name of the set."""
        return f"{self.name}@{source_name(self.file)}"

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """See `Task`."""
        read = read_questions(self.file, self.hops)
        for index in range(trials):
            draw = sample_draw(self.name, seed, tokens, index)
            question = draw.choice(read.questions)
            query = f"\n\nAnswer in a few words from the documents above: {question.text}"
            prefix = "\n\nAnswer:"
            others, order = _others(read, question, draw), draw.random()
            room = context_room(count, query + prefix, self.max_new, tokens)
            text = _Text(read, question, others, order)
            fitted = most_units(count, text, room, fewest=0)
            yield make_sample(
                count,
                index=index,
                context=fitted.text,
                tokens=fitted.tokens,
                query=query,
                answer_prefix=prefix,
                outputs=question.answers,
                max_new=self.max_new,
                meta={"documents": fitted.units + len(question.gold)},
            )

    def score(self, answer: str, sample: Sample) -> float:
        """100 where the answer names one of the right ones."""
        return string_match_part(clean(answer), sample.outputs)

    def parts(self, answer: str, sample: Sample) -> dict[str, float]:
        """F1 of the words of the answer's first line."""
        lines = clean(answer).splitlines()
        return {"f1": best_token_f1(lines[0] if lines else "", sample.outputs)}


def _others(read: QuestionSet, question: Question, draw: random.Random) -> list[int]:
    """Numbers of all documents that do not answer, near ones first."""
    known = {*question.gold, *question.near}
    far = [number for number in range(len(read.documents)) if number not in known]
    draw.shuffle(far)
    if not question.near and not far:
        raise InputError("all documents of the file answer the question; give one that has others")
    return [*question.near, *far]


@dataclasses.dataclass(frozen=True)
class _Text:
    """The introduction and the documents, with so many others beside those that answer."""

    read: QuestionSet
    question: Question
    others: list[int]
    order: float

    def __call__(self, number: int) -> str:
        others = itertools.islice(itertools.cycle(self.others), number)
        chosen = [*self.question.gold, *others]
        random.Random(self.order).shuffle(chosen)
        documents = (
            f"Document {i}:\n{self.read.documents[n].strip()}"
            for i, n in enumerate(chosen, start=1)
        )
        return INTRO + "\n\n".join(documents)


def ruler_qa_tasks() -> tuple[RulerQA, RulerQA]:
    """`qa_1`, of one document, and `qa_2`, of two."""
    return RulerQA(), RulerQA(name="qa_2", hops=2)
