"""The records of LongBench, L-Eval and InfiniteBench files, as their authors publish them.

All are JSON lines. LongBench (Bai et al. 2023) names its data set in every line, InfiniteBench
(Zhang et al. 2024) by the file's name, L-Eval (An et al. 2023) says how a line is to be scored. The
prompts' words are ours; the metrics and the lengths of answers are theirs (see `file_scores`).
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jax_longctx.errors import InputError
from jax_longctx.evaluation.haystack import read_file

__all__ = ["FORMATS", "Record", "read_records"]

QA = "Answer the question from the text above. Give the answer alone, as short as it can be."
SUMMARY = "Write a summary of the text above."
CODE = "Write the next line of the code above."
CHOICE = "Answer the question about the text above with the letter of the right option."


@dataclasses.dataclass(frozen=True)
class Record:
    """A prompt of a file and how its answer is scored.

    Attributes:
      metric: a name of `SCORES`.
      choices: classes or options, where the data set has such.
      max_new: most tokens of an answer, as the authors have it.
      dataset: the data set's name.
    """

    context: str
    query: str
    outputs: tuple[str, ...]
    metric: str
    choices: tuple[str, ...]
    max_new: int
    dataset: str


# Data set -> words of the task, metric, most tokens of an answer (LongBench's own settings).
LONGBENCH: dict[str, tuple[str, str, int]] = {
    "narrativeqa": (QA, "token F1", 128),
    "qasper": (QA, "token F1", 128),
    "multifieldqa_en": (QA, "token F1", 64),
    "multifieldqa_zh": (QA, "character F1", 64),
    "hotpotqa": (QA, "token F1", 32),
    "2wikimqa": (QA, "token F1", 32),
    "musique": (QA, "token F1", 32),
    "dureader": (QA, "character ROUGE-L", 128),
    "gov_report": (SUMMARY, "ROUGE-L", 512),
    "qmsum": ("Answer with a summary of what the text above says of it.", "ROUGE-L", 512),
    "multi_news": (SUMMARY, "ROUGE-L", 512),
    "vcsum": (SUMMARY, "character ROUGE-L", 512),
    "trec": ("Give the kind of the question, as in the examples above.", "class named", 64),
    "triviaqa": (QA, "token F1 of the first line", 32),
    "samsum": ("Summarise the dialogue as in the examples.", "ROUGE-L of the first line", 128),
    "lsht": ("Give the class of the text, as in the examples above.", "class named", 64),
    "passage_count": (
        "How many different paragraphs are above? Give the number alone.",
        "share of numbers",
        32,
    ),
    "passage_retrieval_en": (
        "Which paragraph above is this a summary of? Name it as Paragraph and its number.",
        "share of numbers",
        32,
    ),
    "passage_retrieval_zh": (
        "Which paragraph above is this a summary of? Name it as it is named above.",
        "share of numbers",
        32,
    ),
    "lcc": (CODE, "likeness of code", 64),
    "repobench-p": (CODE, "likeness of code", 64),
}

# File name -> the same for InfiniteBench.
INFINITEBENCH: dict[str, tuple[str, str, int]] = {
    "passkey": ("Find what is asked for in the text above.", "first number", 6),
    "number_string": ("Find what is asked for in the text above.", "first number", 12),
    "kv_retrieval": ("Find the value in the data above.", "contained", 50),
    "longbook_qa_eng": (QA, "token F1", 40),
    "longbook_qa_chn": (QA, "character F1", 40),
    "longbook_sum_eng": (SUMMARY, "ROUGE-L", 1200),
    "longbook_choice_eng": (CHOICE, "option chosen", 40),
    "longdialogue_qa_eng": ("Which name is masked in the text above?", "contained", 40),
    "code_debug": (CHOICE, "option chosen", 5),
    "code_run": ("Give the number that the call returns.", "first number", 5),
    "math_find": ("Find the number in the list above.", "first number", 3),
    "math_calc": (
        "Give the values after every step of the sum above, from the left, as numbers alone.",
        "numbers before the first wrong one",
        30_000,
    ),
}

# How a line of L-Eval wants to be scored -> our metric; `exam` depends on the right answer.
LEVAL = {"f1": "token F1", "rouge": "ROUGE-L", "human": "ROUGE-L", "LLM": "ROUGE-L"}


def _asked(task: str, text: str, choices: tuple[str, ...] = ()) -> str:
    options = "".join(
        f"\n{letter}. {each}" for letter, each in zip(_LETTERS, choices, strict=False)
    )
    return "\n\n" + "\n\n".join(part for part in (task, text.strip() + options) if part)


_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _longbench(line: Mapping[str, Any], path: Path) -> Iterator[Record]:
    dataset = line["dataset"].removesuffix("_e")
    task, metric, max_new = LONGBENCH[dataset]
    # Of code the input is its last part, and stands before the words.
    code = f"\n{line['input']}".rstrip() + _asked(task, "")
    yield Record(
        context=line["context"].strip(),
        query=code if task == CODE else _asked(task, line["input"]),
        outputs=tuple(line["answers"]),
        metric=metric,
        choices=tuple(line["all_classes"] or ()),
        max_new=max_new,
        dataset=dataset,
    )


def _leval(line: Mapping[str, Any], path: Path) -> Iterator[Record]:
    for instruction, output in zip(line["instructions"], line["outputs"], strict=True):
        metric = LEVAL.get(line["evaluation"]) or _exam_metric(line["evaluation"], output)
        yield Record(
            context=line["input"].strip(),
            query=_asked("", instruction),
            outputs=(output,),
            metric=metric,
            choices=(),
            max_new=512,
            dataset=path.stem,
        )


def _exam_metric(evaluation: str, output: str) -> str:
    """An exam's answers are letters of options, numbers, or words."""
    if evaluation != "exam":
        raise KeyError(evaluation)
    bare = output.strip()
    if set(bare) <= set(_LETTERS + "(), "):
        return "option chosen"
    return "last number" if any(letter.isdigit() for letter in bare) else "contained"


def _infinitebench(line: Mapping[str, Any], path: Path) -> Iterator[Record]:
    task, metric, max_new = INFINITEBENCH[path.stem]
    answer = line["answer"]
    outputs = answer if isinstance(answer, list) else [answer]
    choices = tuple(line.get("options") or ())
    yield Record(
        context=line["context"].strip(),
        query=_asked(task, line["input"], choices),
        outputs=tuple(map(str, outputs)),
        metric=metric,
        choices=choices,
        max_new=max_new,
        dataset=path.stem,
    )


FORMATS: dict[str, Callable[[Mapping[str, Any], Path], Iterator[Record]]] = {
    "longbench": _longbench,
    "leval": _leval,
    "infinitebench": _infinitebench,
}


@functools.lru_cache(maxsize=4)
def read_records(name: str, file: str) -> tuple[Record, ...]:
    """The prompts of a file of that format, in its order.

    Raises:
      InputError: no file was given, or it holds something else; the line is named.
    """
    advice = f"give the {name} file as its authors publish it, in JSON lines"
    if not file:
        raise InputError(f"{name} reads a file of yours: set file=PATH; {advice}")
    records, path = [], Path(file)
    for number, line in enumerate(read_file(file, advice).splitlines(), start=1):
        try:
            found = list(FORMATS[name](json.loads(line), path)) if line.strip() else []
            if not all(record.context and record.outputs for record in found):
                raise ValueError("no context, or no answer")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{file}, line {number}: {error!r}; {advice}") from error
        records += found
    return tuple(records)
