"""Tasks of the files that benchmarks publish: LongBench and InfiniteBench, and a base of others.

Nothing is downloaded: the files are the user's. Prompts come in the file's order and are not cut;
the runner refuses those that are longer than requested.

LongBench (Bai et al. 2023) names its data set in every line, InfiniteBench (Zhang et al. 2024) by
the file's name. The instructions are ours, the metrics and the lengths of answers are theirs. Two
metrics stand in for packages that are not used here: Chinese is split into characters instead of
words, and ROUGE is `metrics.rouge`. All scores are 0 to 100. `leval` and `longproc` have their own
prompts.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from jax_longctx.errors import InputError
from jax_longctx.evaluation.haystack import Fitted, read_file
from jax_longctx.evaluation.metrics import normalize, rouge, string_match_part, token_f1
from jax_longctx.evaluation.tasks.task import Count, Sample, Task, fixed

_LETTERS = string.ascii_uppercase
QA = "Answer the question from the text above. Give the answer alone, as short as it can be."
SUMMARY = "Write a summary of the text above."
CODE = "Write the next line of the code above."
PARAGRAPHS = "How many different paragraphs are above? Give the number alone."
SUMMED = "Which paragraph above is this a summary of? Name it as"
CHOICE = "Answer the question about the text above with the letter of the right option."


@dataclasses.dataclass(frozen=True)
class Record:
    """A prompt of a file and how its answer is scored.

    Attributes:
      metric: a name of `SCORES`.
      choices: classes or options, where the data set has such.
      max_new: most tokens of an answer, as the authors have it.
      dataset: the data set's name.
      answer_prefix: the start of the answer.
    """

    context: str
    query: str
    outputs: tuple[str, ...]
    metric: str
    choices: tuple[str, ...]
    max_new: int
    dataset: str
    answer_prefix: str = "\n\nAnswer:"


# Data set -> instruction, metric, most tokens of an answer (LongBench's own settings).
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
    "passage_count": (PARAGRAPHS, "share of numbers", 32),
    "passage_retrieval_en": (f"{SUMMED} Paragraph and its number.", "share of numbers", 32),
    "passage_retrieval_zh": (f"{SUMMED} it is named above.", "share of numbers", 32),
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

# Metrics whose right answers are numbers.
NUMBERS = ("first number", "numbers before the first wrong one")


def asked(task: str, text: str, choices: tuple[str, ...] = ()) -> str:
    """The end of a prompt: what is to be done, the question, and its options by letters."""
    options = "".join(
        f"\n{letter}. {each}" for letter, each in zip(_LETTERS, choices, strict=False)
    )
    return "\n\n" + "\n\n".join(part for part in (task, text.strip() + options) if part)


def texts(value: Any, *, blank: bool = False) -> list[str]:
    """`value`, a list of texts; none may be blank without `blank`. Raises ValueError."""
    if isinstance(value, list) and all(
        isinstance(text, str) and (blank or text.strip()) for text in value
    ):
        return value
    kind = "texts" if blank else "texts that are not blank"
    raise ValueError(f"expected a list of {kind}, got {value!r:.80}")


def _of_dataset(
    known: Mapping[str, tuple[str, str, int]],
    dataset: str,
    line: Mapping[str, Any],
    answers: Any,
    choices: Any,
    options: tuple[str, ...] = (),
) -> list[Record]:
    task, metric, max_new = known[dataset]
    outputs, classes = tuple(texts(answers)), tuple(texts(choices or []))
    if metric in NUMBERS and not all(math.isfinite(float(each)) for each in outputs):
        raise ValueError(f"expected finite numbers, got {outputs!r:.80}")
    query = asked(task, line["input"], options)
    if task == CODE:
        # The input is the last part of the code, so the task comes after it.
        query = f"\n{line['input']}".rstrip() + asked(task, "")
    return [Record(line["context"].strip(), query, outputs, metric, classes, max_new, dataset)]


def _longbench(line: Mapping[str, Any], path: Path) -> list[Record]:
    dataset = line["dataset"].removesuffix("_e")
    return _of_dataset(LONGBENCH, dataset, line, line["answers"], line["all_classes"])


def _infinitebench(line: Mapping[str, Any], path: Path) -> list[Record]:
    answer, options = line["answer"], texts(line.get("options") or [])
    listed = answer if isinstance(answer, list) else [answer]
    outputs = [str(each) if isinstance(each, int | float) else each for each in listed]
    return _of_dataset(INFINITEBENCH, path.stem, line, outputs, options, tuple(options))


# What reading an entry of another form raises.
_DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)

FORMATS: dict[str, Callable[[Mapping[str, Any], Path], list[Record]]] = {
    "longbench": _longbench,
    "infinitebench": _infinitebench,
}


@functools.lru_cache(maxsize=4)
def read_records(task: "FileTask") -> tuple[Record, ...]:
    """The prompts of the task's file, JSON lines or one JSON array, in its order.

    Raises:
      InputError: no file was given, one of its entries is not of the format, or none has a prompt.
    """
    advice = task.advice or f"give the {task.name} file as its authors publish it"
    if not task.file:
        raise InputError(f"{task.name} reads a file of yours: set file=PATH; {advice}")
    found, path = [], Path(task.file)
    text = read_file(task.file, advice)
    kind, number = "entry" if text.lstrip().startswith("[") else "line", 0
    try:
        for entry in json.loads(text) if kind == "entry" else text.split("\n"):
            number += 1
            if isinstance(entry, str) and not entry.strip():
                continue
            read = list(task.parse(json.loads(entry) if isinstance(entry, str) else entry, path))
            if not all(record.context and record.outputs for record in read):
                raise ValueError("no context, or no answer")
            found += read
    except (InputError, *_DAMAGED) as error:
        # A reader that checks what it reads says it in words.
        said = error if task.advice or isinstance(error, InputError) else repr(error)
        raise InputError(f"{task.file}, {kind} {number}: {said}; {advice}") from error
    if not found:
        raise InputError(f"{task.file} has no prompt that is scored; {advice}")
    return tuple(found)


# Punctuation of Chinese texts, which `normalize` does not know.
_CHINESE_MARKS = re.compile(
    "[\u3000-\u303f\uff00-\uff0f\uff1a-\uff20\u2018-\u201f\u2026\u2014\u00b7]"
)
_CHOICE = re.compile(
    r"\W*(?i:(?:the\s+)?(?:right\s+|correct\s+)?(?:answers?|options?)\s*(?:is|are)?\W*)?"
    r"((?:[A-H]{1,8}(?![A-Za-z'])[\s,;.()]*(?:and\s+)?\(?)+)"
)
_NUMBER = r"-?\d+(?:\.\d+)?"

# (the answer, right answers, classes or options) -> 0 to 100.
Score = Callable[[str, Sequence[str], Sequence[str]], float]


def _first_line(answer: str) -> str:
    return answer.strip().partition("\n")[0]


def _characters(text: str) -> str:
    bare = _CHINESE_MARKS.sub("", normalize(text))
    return " ".join(letter for letter in bare if not letter.isspace())


def _best(one: Callable[[str, str], float], cut: Callable[[str], str] = str) -> Score:
    """The best score against any right answer; `cut` selects the part of the answer that counts."""
    return lambda answer, outputs, choices: max(one(cut(answer), gold) for gold in outputs)


def _rouge_l(answer: str, gold: str) -> float:
    return rouge(answer, gold)["rouge_l"]


def _by_character(one: Callable[[str, str], float]) -> Score:
    return _best(lambda answer, gold: one(_characters(answer), _characters(gold)))


def _classified(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    """100 / n where the first line names n classes, the right one among them.

    A class whose name is part of the right one's is not counted.
    """
    line, best = _first_line(answer), 0.0
    for gold in outputs:
        named = [name for name in choices if name in line and not (name in gold and name != gold)]
        if gold in named:
            best = max(best, 100 / len(named))
    return best


def _numbered(answer: str, gold: str) -> float:
    """Share of the answer's numbers that equal the right one."""
    numbers, right = re.findall(r"\d+", answer), re.search(r"\d+", gold)
    return 100 * numbers.count(right[0]) / len(numbers) if numbers and right else 0.0


def _code(answer: str, gold: str) -> float:
    """Similarity of the first line of code, without indentation, comments and code fences."""
    from rapidfuzz import fuzz

    lines = [line.strip() for line in answer.split("\n")]
    code = next((each for each in lines if each and not re.search("[`#]|//", each)), "")
    return fuzz.ratio(code, gold.strip()) if code else 0.0


def _first_number(answer: str, gold: str) -> float:
    found = re.search(_NUMBER, answer)
    return 100.0 * (found is not None and float(found[0]) == float(gold))


def _running(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    """Share of the right numbers that come before the answer's first wrong one."""
    pairs = zip(re.findall(r"-?\d+", answer), outputs, strict=False)
    right = itertools.takewhile(lambda pair: Decimal(pair[0]) == Decimal(pair[1]), pairs)
    return 100 * len(list(right)) / len(outputs)


def choice_letters(answer: str) -> str:
    """Letters of the options at the start of an answer: `The answer is (D) and B` gives `BD`."""
    found = _CHOICE.match(answer.strip())
    return "".join(sorted(set(re.findall("[A-H]", found[1])))) if found else ""


def _chosen(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    """100 for the right option, by its letter or, without a letter, by its text."""
    line = _first_line(answer)
    letters = choice_letters(line)
    golden = {"".join(sorted(set(re.findall("[A-Z]", gold)))) for gold in outputs}
    if choices:
        numbers = [choices.index(gold) for gold in outputs if gold in choices]
        golden = {_LETTERS[number] for number in numbers}
        named = [text.lower() for text in choices if text.lower() in line.lower()]
        # `100` names the option `10` no more.
        named = [text for text in named if not any(text in each for each in named if text != each)]
        if not letters or named:
            return 100.0 * any(named == [gold.lower()] for gold in outputs)
    return 100.0 * (letters in golden and letters != "")


# Metrics by the names that tables show.
SCORES: dict[str, Score] = {
    "token F1": _best(token_f1),
    "token F1 of the first line": _best(token_f1, _first_line),
    "character F1": _by_character(token_f1),
    "ROUGE-L": _best(_rouge_l),
    "ROUGE-L of the first line": _best(_rouge_l, _first_line),
    "character ROUGE-L": _by_character(_rouge_l),
    "class named": _classified,
    "share of numbers": _best(_numbered),
    "likeness of code": _best(_code),
    "first number": _best(_first_number),
    "numbers before the first wrong one": _running,
    "contained": lambda answer, outputs, choices: string_match_part(answer, outputs),
    "option chosen": _chosen,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileTask(Task):
    """A published benchmark's own file: its prompts, its metric.

    Attributes:
      file: the path of a file in the format.
      answer_tokens: most tokens of an answer; None for the authors' own of the data set.
      advice: the end of errors about the file.
    """

    name: str = fixed("longbench")
    metric: str = fixed("the data set's own")
    needs: str = fixed("rapidfuzz")
    advice: str = fixed("")

    file: str = ""
    answer_tokens: int | None = None

    @property
    def max_new(self) -> int:
        """The setting, or the authors' largest limit of any data set in the file."""
        if self.answer_tokens is not None:
            return self.answer_tokens
        return max(record.max_new for record in read_records(self))

    def check(self) -> None:
        """Reads the file."""
        read_records(self)

    def parse(self, entry: Mapping[str, Any], path: Path) -> Iterable[Record]:
        """The prompts of an entry of the file at `path`."""
        return FORMATS[self.name](entry, path)

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """The file's first prompts, uncut and independent of the seed. See `Task`."""
        counted = functools.cache(count)
        for index, record in enumerate(read_records(self)[:trials]):
            meta: dict[str, Any] = {"dataset": record.dataset, "metric": record.metric}
            meta["choices"] = list(record.choices)
            context, outputs = Fitted(record.context, counted(record.context)), record.outputs
            asked = record.query, record.answer_prefix
            yield self.made(count, index, context, *asked, outputs, **meta)

    def measures(self, answer: str, sample: Sample) -> dict[str, float]:
        """The score by the metric of the prompt's data set, then further ones, by their names."""
        metric, choices = sample.meta["metric"], sample.meta["choices"]
        return {metric: SCORES[metric](answer, sample.outputs, choices)}

    def score(self, answer: str, sample: Sample) -> float:
        """The first of `measures`."""
        return next(iter(self.measures(answer, sample).values()))

    def parts(self, answer: str, sample: Sample) -> dict[str, float]:
        """The scores under their metrics' names."""
        return self.measures(answer, sample)
