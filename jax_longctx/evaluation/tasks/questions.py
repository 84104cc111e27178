"""Questions of one's own about texts of one's own, from JSON lines.

    {"question": "Who tells it?", "file": "book.txt", "answers": ["Ishmael"]}
    {"question": "When?", "text": "It was in 1851.", "pattern": "18\\d\\d"}
    {"question": "Where?", "files": ["a.txt", "b.txt"], "answers": "At sea", "choices":
     ["At sea", "On land"]}

Files are documents as `ask` reads them, relative to the folder of the JSON lines. Questions over
one text may follow in any order. A prompt asks for an answer as short as it can be, or for the
letter of a choice; a line's `instruction` says something else in place of that, and may be empty.

Answers are compared after SQuAD's normalisation: lower case, without punctuation, articles and
double spaces. The scores of a line depend on what it has:

- `answers`: `contained`, 100 where one of them stands in the model's answer, with no other letter
  or digit of ASCII beside it; then `exact match` and `token F1`, the best over the right answers,
  of the first line of the model's answer.
- `pattern`: `pattern found`, 100 where the regular expression matches anywhere in the model's
  answer as it is.
- `choices`, with `answers` among them: `option chosen`, by its letter or its text.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_longctx.evaluation.metrics import normalize
from jax_longctx.evaluation.tasks.files import (
    CHOICE,
    QA,
    SCORES,
    FileTask,
    Record,
    asked,
    read_records,
    texts,
)
from jax_longctx.evaluation.tasks.task import Sample, fixed
from jax_longctx.text.documents import Joined, log, read_documents

SOURCES = ("text", "file", "files")
KEYS = ("question", *SOURCES, "answers", "pattern", "choices", "instruction")
MOST_CHOICES = 8
# Several questions may name a file beside others; what was left out of it is told once.
_note = functools.cache(log.warning)


def _only(entry: Mapping[str, Any], *names: str) -> str:
    """The one of these keys that the line has."""
    given = [name for name in names if name in entry]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise ValueError(f"give one of {', '.join(names)}; the line has {found}")
    return given[0]


def _text(entry: Mapping[str, Any], folder: Path) -> str:
    """The text that a line asks about."""
    source = _only(entry, *SOURCES)
    if source == "text":
        (text,) = texts([entry["text"]])
        return text.strip()
    names = texts([entry["file"]] if source == "file" else entry["files"])
    return _read(folder, tuple(names))


@functools.cache
def _read(folder: Path, names: Sequence[str]) -> str:
    """The documents of the files, each under its name where there are several."""
    found = read_documents([folder / name for name in names], _note)
    # Prompts do not depend on where the folder lies.
    named = [dataclasses.replace(each, name=os.path.relpath(each.name, folder)) for each in found]
    return Joined.of(named).text.strip()


def contained(answer: str, gold: str) -> float:
    """100 where the normalised answer has the normalised `gold` as whole words."""
    words = rf"(?<![a-z0-9]){re.escape(normalize(gold))}(?![a-z0-9])"
    return 100.0 * bool(re.search(words, normalize(answer)))


def exact_match(answer: str, gold: str) -> float:
    """100 where the first line of the answer is `gold`, both normalised."""
    return 100.0 * (normalize(answer.strip().partition("\n")[0]) == normalize(gold))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Questions(FileTask):
    """Your own questions about your own texts: JSON lines, see docs/guides/evaluate.md."""

    name: str = fixed("questions")
    metric: str = fixed("contained, matched or chosen")
    needs: str = fixed("")
    advice: str = fixed(
        'give JSON lines such as {"question": "Who?", "file": "book.txt", "answers": ["Ann"]}'
    )

    @property
    def usual_trials(self) -> int:
        """All of the file."""
        return len(read_records(self))

    def parse(self, entry: Any, path: Path) -> Iterable[Record]:
        """The prompt of a line."""
        if not isinstance(entry, dict) or "question" not in entry:
            raise ValueError("it is no JSON object with a question")
        if unknown := sorted(set(entry) - set(KEYS)):
            raise ValueError(f"unknown key {unknown[0]!r}; known: {', '.join(KEYS)}")
        (question,), context = texts([entry["question"]]), _text(entry, path.parent)
        kind, choices = _only(entry, "answers", "pattern"), tuple(texts(entry.get("choices", [])))
        if len(choices) > MOST_CHOICES:
            raise ValueError(f"it has {len(choices)} choices; give {MOST_CHOICES} at most")
        given = entry[kind]
        outputs = tuple(texts([given] if isinstance(given, str) else given))
        if kind == "pattern":
            metric, (pattern,) = "pattern found", outputs
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"pattern is no regular expression: {error}") from error
        elif choices:
            metric = "option chosen"
            if not set(outputs) <= set(choices):
                raise ValueError("answers must be among choices")
        else:
            metric = "contained"
            if blank := [each for each in outputs if not normalize(each)]:
                raise ValueError(
                    f"the answer {blank[0]!r} is punctuation or an article alone; give a pattern"
                )
        # Not as the start of the answer: behind a chat template's header models end there.
        if "instruction" in entry:
            (instruction,) = texts([entry["instruction"]], blank=True)
            query = asked(instruction.strip(), question, choices)
        else:
            query = asked(CHOICE if choices else QA, question, choices) + "\n\nAnswer:"
        yield Record(context, query, outputs, metric, choices, 64, path.stem, "")

    def measures(self, answer: str, sample: Sample) -> dict[str, float]:
        """The score by what the line has, then exact match and F1 of its answers."""
        metric, outputs = sample.meta["metric"], sample.outputs
        if metric == "pattern found":
            return {metric: 100.0 * bool(re.search(outputs[0], answer))}
        if metric == "option chosen":
            return {metric: SCORES[metric](answer, outputs, sample.meta["choices"])}
        return {
            "contained": max(contained(answer, gold) for gold in outputs),
            "exact match": max(exact_match(answer, gold) for gold in outputs),
            "token F1": SCORES["token F1 of the first line"](answer, outputs, ()),
        }
