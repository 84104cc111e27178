"""RULER's question answering: the documents that answer a question, among many that do not.

Hsieh et al. 2024, section 3. `qa_1` asks SQuAD's questions, `qa_2` HotpotQA's, which take two
documents. Beside those that answer stand others about the same (paragraphs of the same article, or
the ones HotpotQA itself puts there), then any, in a drawn order. A set that is used up starts over,
as in Star's copy.

The files are the user's: `file=dev-v2.0.json`, `file=hotpot_dev_distractor_v1.json`. Without one
the questions are `qa_syn`'s, made up, and the label says so.

`qa_syn` is an encyclopaedia of people and towns that never were, written by rule from a seed: its
questions need one document (in which town somebody was born) or two (on which river the town lies).
It stands in for SQuAD and HotpotQA where neither is at hand, and its scores compare with neither's.
"""

import dataclasses
import functools
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jax_longctx.errors import InputError
from jax_longctx.evaluation.haystack import most_units, read_file
from jax_longctx.evaluation.metrics import best_token_f1, clean, string_match_part
from jax_longctx.evaluation.tasks.task import Count, Sample, Task, fixed
from jax_longctx.evaluation.tasks.words import NOUNS, invented_name

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


def _number(documents: dict[str, int], text: str) -> int:
    """The document's own; different documents have different ones."""
    return documents.setdefault(text, len(documents))


def _squad(articles: Sequence[Mapping[str, Any]]) -> QuestionSet:
    """SQuAD 1.1 and 2.0: articles of paragraphs with questions; those without answers are left."""
    documents, questions = dict[str, int](), []
    for article in articles:
        numbers = [_number(documents, each["context"]) for each in article["paragraphs"]]
        for number, paragraph in zip(numbers, article["paragraphs"], strict=True):
            near = tuple(dict.fromkeys(other for other in numbers if other != number))
            for entry in paragraph["qas"]:
                answers = tuple(dict.fromkeys(answer["text"] for answer in entry["answers"]))
                if answers and not entry.get("is_impossible"):
                    questions.append(Question(entry["question"], answers, (number,), near))
    return QuestionSet(tuple(documents), tuple(questions))


def _hotpot(entries: Sequence[Mapping[str, Any]]) -> QuestionSet:
    """HotpotQA: questions with ten paragraphs each, title and sentences, two the facts'."""
    documents, questions = dict[str, int](), []
    for entry in entries:
        facts = {title for title, _ in entry["supporting_facts"]}
        numbers = {
            title: _number(documents, f"{title}\n{''.join(sentences)}")
            for title, sentences in entry["context"]
        }
        gold = tuple(number for title, number in numbers.items() if title in facts)
        near = tuple(number for title, number in numbers.items() if title not in facts)
        questions.append(Question(entry["question"], (entry["answer"],), gold, near))
    return QuestionSet(tuple(documents), tuple(questions))


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


INTRO = "Some of the documents below answer a question that comes after them.\n\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RulerQA(Task):
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

    def sample(self, count: Count, draw: random.Random, index: int, tokens: int) -> Sample:
        """A drawn question, its documents, and as many others as there is room for."""
        read = read_questions(self.file, self.hops)
        question = draw.choice(read.questions)
        query = f"\n\nAnswer in a few words from the documents above: {question.text}"
        prefix = "\n\nAnswer:"
        others, order = _others(read, question, draw), draw.random()

        def context(number: int) -> str:
            chosen = [*question.gold, *itertools.islice(itertools.cycle(others), number)]
            random.Random(order).shuffle(chosen)
            return INTRO + "\n\n".join(
                f"Document {i}:\n{read.documents[n].strip()}" for i, n in enumerate(chosen, start=1)
            )

        fitted = most_units(count, context, self.room(count, query + prefix, tokens), fewest=0)
        documents = fitted.units + len(question.gold)
        return self.made(count, index, fitted, query, prefix, question.answers, documents=documents)

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
