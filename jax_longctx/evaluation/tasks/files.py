"""LongBench, L-Eval and InfiniteBench from the files that their authors publish, as JSON lines.

Nothing is fetched: the files are the user's. Prompts come in the file's order, each as long as it
is. One that is longer than the tokens asked for is given all the same, its length says so, and
whoever runs it refuses it: no text is cut.

LongBench (Bai et al. 2023) names its data set in every line, InfiniteBench (Zhang et al. 2024) by
the file's name, L-Eval (An et al. 2023) says how a line is to be scored. The prompts' words are
ours; the metrics and the lengths of answers are theirs. Where they use a package that is not here,
the nearest of our own is taken and its name says so: Chinese is cut into characters instead of
words, and ROUGE is `metrics.rouge`. All scores are 0 to 100.
"""

import dataclasses
import functools
import itertools
import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """The best score with any right answer, of the answer's part that counts."""
    return lambda answer, outputs, choices: max(one(cut(answer), gold) for gold in outputs)


def _rouge_l(answer: str, gold: str) -> float:
    return rouge(answer, gold)["rouge_l"]


def _by_character(one: Callable[[str, str], float]) -> Score:
    return _best(lambda answer, gold: one(_characters(answer), _characters(gold)))


def _classified(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    """Shared among the classes that the first line names, but for parts of the right one's name."""
    line, best = _first_line(answer), 0.0
    for gold in outputs:
        named = [name for name in choices if name in line and not (name in gold and name != gold)]
        if gold in named:
            best = max(best, 100 / len(named))
    return best


def _numbered(answer: str, gold: str) -> float:
    """The share of the answer's numbers that are the right one."""
    numbers, right = re.findall(r"\d+", answer), re.search(r"\d+", gold)
    return 100 * numbers.count(right[0]) / len(numbers) if numbers and right else 0.0


def _code(answer: str, gold: str) -> float:
    """How like the first line of code is but for indentation; comments and fences are left out."""
    from rapidfuzz import fuzz

    lines = [line.strip() for line in answer.split("\n")]
    code = next((each for each in lines if each and not re.search("[`#]|//", each)), "")
    return fuzz.ratio(code, gold.strip()) if code else 0.0


def _first_number(answer: str, gold: str) -> float:
    found = re.search(_NUMBER, answer)
    return 100.0 * (found is not None and float(found[0]) == float(gold))


def _last_number(answer: str, gold: str) -> float:
    """As worked exercises end in their result; thousands may be parted by commas."""
    ours, right = (re.findall(_NUMBER, text.replace(",", "")) for text in (answer, gold))
    return 100.0 * bool(ours and right and float(ours[-1]) == float(right[-1]))


def _running(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    """The share of the right numbers that the answer begins with, up to its first wrong one."""
    pairs = zip(re.findall(r"-?\d+", answer), outputs, strict=False)
    right = itertools.takewhile(lambda pair: int(pair[0]) == int(pair[1]), pairs)
    return 100 * len(list(right)) / len(outputs)


def choice_letters(answer: str) -> str:
    """The options that an answer begins by naming, sorted: `The answer is (D) and B` gives `BD`."""
    found = _CHOICE.match(answer.strip())
    return "".join(sorted(set(re.findall("[A-H]", found[1])))) if found else ""


def _chosen(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    """The right option by its letter, or where no letter is named by its text."""
    line = _first_line(answer)
    letters = choice_letters(line)
    golden = {"".join(sorted(set(re.findall("[A-Z]", gold)))) for gold in outputs}
    if choices:
        numbers = [choices.index(gold) for gold in outputs if gold in choices]
        golden = {_LETTERS[number] for number in numbers}
        named = [text for text in choices if text.lower() in line.lower()]
        if not letters or named:
            return 100.0 * any(named == [gold] for gold in outputs)
    return 100.0 * (letters in golden and letters != "")


# Behind each name: what the score is, as tables say it.
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
    "last number": _best(_last_number),
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
    """

    name: str = fixed("longbench")
    metric: str = fixed("the data set's own")
    needs: str = fixed("rapidfuzz")

    file: str = ""
    answer_tokens: int | None = None

    @property
    def max_new(self) -> int:
        """What was asked for, or the most that the authors grant an answer of the file."""
        if self.answer_tokens is not None:
            return self.answer_tokens
        return max(record.max_new for record in read_records(self.name, self.file))

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """The file's first prompts, whatever the seed and as long as they are. See `Task`."""
        for index, record in enumerate(read_records(self.name, self.file)[:trials]):
            meta = {
                "dataset": record.dataset,
                "metric": record.metric,
                "choices": list(record.choices),
            }
            context = Fitted(1, record.context, count(record.context))
            yield self.made(
                count, index, context, record.query, "\n\nAnswer:", record.outputs, **meta
            )

    def score(self, answer: str, sample: Sample) -> float:
        """By the metric of the prompt's data set, named in its facts."""
        metric, choices = sample.meta["metric"], sample.meta["choices"]
        return SCORES[metric](answer, sample.outputs, choices)

    def parts(self, answer: str, sample: Sample) -> dict[str, float]:
        """The score under its metric's name."""
        return {sample.meta["metric"]: self.score(answer, sample)}
