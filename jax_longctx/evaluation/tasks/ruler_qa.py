"""RULER's question answering: documents that answer a question, among many that do not.

Hsieh et al. 2024, section 3. `qa_1` asks SQuAD's questions, `qa_2` HotpotQA's, which need two
documents. The other documents are first those of the same topic (paragraphs of the same article, or
HotpotQA's own distractors), then any others, all in a drawn order. They are repeated where they do
not suffice, as in Star's copy.

The files are the user's: `file=dev-v2.0.json`, `file=hotpot_dev_distractor_v1.json`. Without a file
the questions come from `qa_syn`, and the label says so.

`qa_syn` is an encyclopaedia of invented people and towns, generated from a seed. Its questions need
one document (in which town was somebody born) or two (on which river does that town lie). It
replaces SQuAD and HotpotQA where their files are missing; its scores compare with neither.
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
from jax_longctx.evaluation.metrics import clean, string_match_part, token_f1
from jax_longctx.evaluation.tasks.files import texts
from jax_longctx.evaluation.tasks.task import Count, Sample, Task, fixed
from jax_longctx.evaluation.tasks.words import NOUNS, distinct, invented_name

QA_SYN = "qa_syn"
PEOPLE = 3000
TOWNS = 600


@dataclasses.dataclass(frozen=True)
class Question:
    """A question, its right answers, and its documents by number.

    Attributes:
      answers: each of them is right.
      gold: documents that answer the question.
      near: documents of the same topic, the first distractors.
    """

    text: str
    answers: tuple[str, ...]
    gold: tuple[int, ...]
    near: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class QuestionSet:
    """Distinct documents and the questions about them."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]


@functools.lru_cache(maxsize=4)
def read_questions(source: str, hops: int) -> QuestionSet:
    """The set of a file, or `qa_syn` with questions that need `hops` documents.

    Raises:
      InputError: the file has neither format, or no question with an answer.
    """
    if source == QA_SYN:
        return _made_up(hops)
    advice = "give qa_syn, or a JSON file as SQuAD or HotpotQA publish theirs"
    try:
        data = json.loads(read_file(source, advice))
        read = _squad(data["data"]) if isinstance(data, Mapping) else _hotpot(data)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{source} holds no questions: {error!r}; {advice}") from error
    if not read.questions:
        raise InputError(f"{source} holds no question that has an answer; {advice}")
    return read


def _number(documents: dict[str, int], text: str) -> int:
    """The number of a document, a new one for a new document."""
    return documents.setdefault(text, len(documents))


def _squad(articles: Sequence[Mapping[str, Any]]) -> QuestionSet:
    """SQuAD 1.1 and 2.0: articles of paragraphs with questions; unanswerable ones are left out."""
    documents, questions = dict[str, int](), []
    for article in articles:
        numbers = [_number(documents, each["context"]) for each in article["paragraphs"]]
        for number, paragraph in zip(numbers, article["paragraphs"], strict=True):
            near = tuple(dict.fromkeys(other for other in numbers if other != number))
            for entry in paragraph["qas"]:
                listed = texts([answer["text"] for answer in entry["answers"]])
                answers = tuple(dict.fromkeys(listed))
                if answers and not entry.get("is_impossible"):
                    questions.append(Question(entry["question"], answers, (number,), near))
    return QuestionSet(tuple(documents), tuple(questions))


def _hotpot(entries: Sequence[Mapping[str, Any]]) -> QuestionSet:
    """HotpotQA: questions with ten paragraphs (title, sentences); two of them hold the facts."""
    documents, questions = dict[str, int](), []
    for entry in entries:
        facts = {title for title, _ in entry["supporting_facts"]}
        numbers = {
            title: _number(documents, f"{title}\n{''.join(sentences)}")
            for title, sentences in entry["context"]
        }
        gold = tuple(number for title, number in numbers.items() if title in facts)
        near = tuple(number for title, number in numbers.items() if title not in facts)
        answers = tuple(texts([entry["answer"]]))
        questions.append(Question(entry["question"], answers, gold, near))
    return QuestionSet(tuple(documents), tuple(questions))


def _made_up(hops: int) -> QuestionSet:
    """`qa_syn`, generated from a fixed seed."""
    draw = random.Random(QA_SYN)
    names = list(itertools.islice(distinct(lambda: invented_name(draw)), 2 * TOWNS))
    towns, rivers, places = names[:TOWNS], names[TOWNS:], set(names)
    found = distinct(lambda: f"{invented_name(draw)} {invented_name(draw)}")
    people = list(itertools.islice((n for n in found if places.isdisjoint(n.split())), PEOPLE))
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
        """A drawn question, its documents, and others that fill the prompt."""
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
        line = next(iter(clean(answer).splitlines()), "")
        return {"f1": max(token_f1(line, gold) for gold in sample.outputs)}


def _others(read: QuestionSet, question: Question, draw: random.Random) -> list[int]:
    """Numbers of the documents that do not answer the question, `near` ones first."""
    known = {*question.gold, *question.near}
    far = [number for number in range(len(read.documents)) if number not in known]
    draw.shuffle(far)
    if not question.near and not far:
        raise InputError("all documents of the file answer the question; give one that has others")
    return [*question.near, *far]
