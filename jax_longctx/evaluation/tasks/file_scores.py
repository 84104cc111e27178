"""How the published long-text benchmarks score answers: LongBench's, L-Eval's, InfiniteBench's.

Where they use a package that is not here, the nearest of our own is taken and its name says so:
Chinese is cut into characters instead of words, ROUGE is `metrics.rouge`, and the likeness of code
is by longest common subsequence, as rapidfuzz's ratio. All give 0 to 100.
"""

import re
from collections.abc import Callable, Sequence

from jax_longctx.evaluation.metrics import (
    best_token_f1,
    common_subsequence,
    normalize,
    rouge,
    string_match_part,
)

__all__ = ["SCORES", "choice_letters", "score_file_answer"]

# Punctuation of Chinese texts, which `normalize` does not know.
_CHINESE_MARKS = re.compile(
    "[\u3000-\u303f\uff00-\uff0f\uff1a-\uff20\u2018-\u201f\u2026\u2014\u00b7]"
)
_CHOICE = re.compile(
    r"\W*(?i:(?:the\s+)?(?:right\s+|correct\s+)?(?:answers?|options?)\s*(?:is|are)?\W*)?"
    r"((?:[A-H]{1,8}(?![A-Za-z'])[\s,;.()]*(?:and\s+)?\(?)+)"
)

Score = Callable[[str, Sequence[str], Sequence[str]], float]


def _first_line(answer: str) -> str:
    return answer.strip().partition("\n")[0]


def _characters(text: str) -> list[str]:
    return [letter for letter in _CHINESE_MARKS.sub("", normalize(text)) if not letter.isspace()]


def _f1(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    return best_token_f1(answer, outputs)


def _line_f1(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    return best_token_f1(_first_line(answer), outputs)


def _character_f1(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    ours = " ".join(_characters(answer))
    return best_token_f1(ours, [" ".join(_characters(gold)) for gold in outputs])


def _rouge_l(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    return max(rouge(answer, gold)["rouge_l"] for gold in outputs)


def _line_rouge_l(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    return _rouge_l(_first_line(answer), outputs, choices)


def _character_rouge_l(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    ours = " ".join(_characters(answer))
    return _rouge_l(ours, [" ".join(_characters(gold)) for gold in outputs], choices)


def _classified(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    """Shared among the classes that the first line names, but for parts of the right one's name."""
    line, best = _first_line(answer), 0.0
    for gold in outputs:
        named = [name for name in choices if name in line and not (name in gold and name != gold)]
        if gold in named:
            best = max(best, 100 / len(named))
    return best


def _numbered(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    """The share of the answer's numbers that are the right one."""
    numbers = re.findall(r"\d+", answer)
    golden = [re.search(r"\d+", gold) for gold in outputs]
    rights = [found[0] for found in golden if found]
    return max((100 * numbers.count(gold) / len(numbers) for gold in rights if numbers), default=0)


def _code(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    """How like the first line of code is but for indentation; comments and fences are left out."""
    lines = [line.strip() for line in answer.split("\n")]
    code = next((each for each in lines if each and not re.search("[`#]|//", each)), "")
    return max(
        200 * common_subsequence(code, gold.strip()) / max(len(code) + len(gold.strip()), 1)
        for gold in outputs
    )


def _first_number(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    found = re.search(r"-?\d+(?:\.\d+)?", answer)
    return 100.0 * (found is not None and float(found[0]) in [float(gold) for gold in outputs])


def _last_number(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    """As worked exercises end in their result; thousands may be parted by commas."""
    found = re.findall(r"-?\d+(?:\.\d+)?", answer.replace(",", ""))
    gold = [re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", "")) for text in outputs]
    return 100.0 * any(g and found and float(found[-1]) == float(g[-1]) for g in gold)


def _running(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    """The share of the right numbers that the answer begins with, up to its first wrong one."""
    right = 0
    for ours, gold in zip(re.findall(r"-?\d+", answer), outputs, strict=False):
        if int(ours) != int(gold):
            break
        right += 1
    return 100 * right / len(outputs)


def _contained(answer: str, outputs: Sequence[str], choices: Sequence[str]) -> float:
    return string_match_part(answer, outputs)


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
        golden = {"ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number] for number in numbers}
        named = [text for text in choices if text.lower() in line.lower()]
        if not letters or named:
            return 100.0 * any(named == [gold] for gold in outputs)
    return 100.0 * (letters in golden and letters != "")


# Behind each name: what the score is, as tables say it.
SCORES: dict[str, Score] = {
    "token F1": _f1,
    "token F1 of the first line": _line_f1,
    "character F1": _character_f1,
    "ROUGE-L": _rouge_l,
    "ROUGE-L of the first line": _line_rouge_l,
    "character ROUGE-L": _character_rouge_l,
    "class named": _classified,
    "share of numbers": _numbered,
    "likeness of code": _code,
    "first number": _first_number,
    "last number": _last_number,
    "numbers before the first wrong one": _running,
    "contained": _contained,
    "option chosen": _chosen,
}


def score_file_answer(
    metric: str, answer: str, outputs: Sequence[str], choices: Sequence[str]
) -> float:
    """The score of that name, of the answer as the model gave it."""
    return SCORES[metric](answer, outputs, choices)
