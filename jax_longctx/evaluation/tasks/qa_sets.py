"""Documents and questions: from a user's file in SQuAD's or HotpotQA's format, or made up.

`qa_syn` is an encyclopaedia of people and towns that never were, written by rule from a seed: its
questions need one document (in which town somebody was born) or two (on which river the town lies).
It stands in for SQuAD and HotpotQA where neither is at hand, and its scores compare with neither's.
"""

import dataclasses
import functools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from jax_longctx.errors import InputError
from jax_longctx.evaluation.haystack import read_file
from jax_longctx.evaluation.tasks.words import NOUNS, invented_name

__all__ = ["QA_SYN", "Question", "QuestionSet", "read_questions"]

QA_SYN = "qa_syn"
PEOPLE = 3000
TOWNS = 600


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, its right answers, and what it is asked of.

    Attributes:
      text: the question.
      answers: any of which is right.
      gold: numbers of the documents that answer it.
      near: numbers of documents about the same, the first to be put beside them.
    """

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class QuestionSet:
    """Documents, all different, and the questions asked of them."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]


@functools.lru_cache(maxsize=4)
def read_questions(source: str, hops: int) -> QuestionSet:
    """The set of a file, or `qa_syn` with questions of one or two documents.

    Raises:
      InputError: the file is none of the two formats, or has no question with an answer.
    """
    if source == QA_SYN:
        return _made_up(hops)
    advice = "give qa_syn, or a JSON file as SQuAD or HotpotQA publish theirs"
    try:
        data = json.loads(read_file(source, advice))
        read = _squad(data["data"]) if isinstance(data, Mapping) else _hotpot(data)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InputError(f"{source} holds no questions: {error!r}; {advice}") from error
    if not read.questions:
        raise InputError(f"{source} holds no question that has an answer; {advice}")
    return read


class _Documents:
    """Different documents by number."""

    def __init__(self):
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    def all(self) -> tuple[str, ...]:
        return tuple(self._numbers)


def _squad(articles: Sequence[Mapping[str, Any]]) -> QuestionSet:
    """SQuAD 1.1 and 2.0: articles of paragraphs with questions; those without answers are left."""
    documents, questions = _Documents(), []
    for article in articles:
        numbers = [documents.number(each["context"]) for each in article["paragraphs"]]
        for number, paragraph in zip(numbers, article["paragraphs"], strict=True):
            near = tuple(dict.fromkeys(other for other in numbers if other != number))
            for entry in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in entry["answers"]))
                if answers and not entry.get("is_impossible"):
                    questions.append(Question(entry["question"], answers, (number,), near))
    return QuestionSet(documents.all(), tuple(questions))


def _hotpot(entries: Sequence[Mapping[str, Any]]) -> QuestionSet:
    """HotpotQA: questions with ten paragraphs each, title and sentences, two the facts'."""
    documents, questions = _Documents(), []
    for entry in entries:
        facts = {title for title, _ in entry["supporting_facts"]}
        numbers = {
            title: documents.number(f"{title}\n{''.join(sentences)}")
            for title, sentences in entry["context"]
        }
        gold = tuple(number for title, number in numbers.items() if title in facts)
        near = tuple(number for title, number in numbers.items() if title not in facts)
        questions.append(Question(entry["question"], (entry["answer"],), gold, near))
    return QuestionSet(documents.all(), tuple(questions))


def _made_up(hops: int) -> QuestionSet:
    """`qa_syn`: always the same people and towns."""
    draw = random.Random(QA_SYN)
    names: dict[str, None] = {}
    while len(names) < 2 * TOWNS:
        names[invented_name(draw)] = None
    towns, rivers = list(names)[:TOWNS], list(names)[TOWNS:]
    people: dict[str, None] = {}
    while len(people) < PEOPLE:
        full = f"{invented_name(draw)} {invented_name(draw)}"
        if not set(full.split()) & names.keys():
            people[full] = None
    documents = [
        f"{town}\n{town} is a town on the river {river}. "
        f"On its coat of arms is a picture of the {draw.choice(NOUNS)}."
        for town, river in zip(towns, rivers, strict=True)
    ]
    questions = []
    for name in people:
        home, year, trade = draw.randrange(TOWNS), draw.randrange(1500, 1950), draw.choice(TRADES)
        number = len(documents)
        documents.append(
            f"{name}\n{name} was born in {towns[home]} in the year {year}. "
            f"The occupation of {name} was {trade}."
        )
        if hops == 2:
            text = f"On which river lies the town where {name} was born?"
            questions.append(Question(text, (rivers[home],), (number, home), ()))
            continue
        for text, answer in (
            (f"In which town was {name} born?", towns[home]),
            (f"In which year was {name} born?", str(year)),
            (f"What was the occupation of {name}?", trade),
        ):
            questions.append(Question(text, (answer,), (number,), ()))
    return QuestionSet(tuple(documents), tuple(questions))


TRADES = (
    "baker beekeeper blacksmith bookbinder brewer carpenter cartographer clockmaker cooper "
    "dyer ferryman fishmonger gardener glassblower goldsmith innkeeper locksmith mason miller "
    "midwife painter potter printer ropemaker saddler sailmaker shepherd surgeon tailor weaver"
).split()
