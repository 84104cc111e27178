"""L-Eval (An et al. 2023) from the files that its authors publish: their prompts, their scores.

The wording is of the script for an open chat model, `Baselines/llama2-chat-test.py` with
`LEval_config.py` of OpenLMLab/LEval at cd34b05; its system message begins the prompt. Scores are
those of `Evaluation/auto_eval.py` there. The name of the file chooses both, as it does there.

- `coursera`, `quality`, `tpo`: the options named; a part of the right ones counts 25.
- `gsm100`: the number behind "The answer is", or else the last one.
- `codeU`, `topic_retrieval_longchat`: the right words are in the answer, or in the part of it that
  gives the output.
- `sci_fi`: each statement is judged twice, by the document (`loyalty`) and by what the model knows
  (`fact`); a prompt for each.
- Open tasks: F1 of words, or ROUGE-L. Lines that a person or a model must judge are left out.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from jax_longctx.evaluation.metrics import normalize, rouge, token_f1
from jax_longctx.evaluation.tasks.files import FileTask, Record, texts
from jax_longctx.evaluation.tasks.task import Sample, fixed

LONG = "Now you are given a very long document. Please follow the instruction "
CHOOSE = f"{LONG}based on this document. For multi-choice questions, there "
LETTER = "Please only provide the letter corresponding to the answer (like A or "
EXAM = (
    f"{CHOOSE}is only a sinlge correct option. {LETTER}B) when answering. For other questions, "
    "please directly give the concise and accurate answer. "
)
OPEN = (
    f"{LONG}after this document. These instructions may include summarizing a document, answering "
    "questions based on the document, or writing a required paragraph. "
)
# A part of an exam's file name -> metric, and the system message.
EXAMS = {
    "gsm": (
        "number",
        "Given several question answer pairs, you need to follow a similar format to answer the "
        "last question. Make sure the response is end with The answer is _ . ",
    ),
    "topic": (
        "text",
        "Below is a record of our previous conversation on many different topics. You are the "
        "ASSISTANT, and I am the USER. At the beginning of each topic, the USER will say 'I would "
        "like to discuss the topic of <TOPIC>'. Memorize each <TOPIC>. At the end of the record, I "
        "will ask you to retrieve the first/second/third topic names. Now the record start. ",
    ),
    "coursera": (
        "all options",
        f"{CHOOSE}could be a sinlge correct option or multiple correct options. {LETTER}AB) when "
        "answering. ",
    ),
    "codeU": (
        "output of code",
        "Now you are given a code base consisting of a large amount of functions and the "
        "corresponding comments. In the end, I will call some functions defined in the code base. "
        "Please carefully read these codes and comments and answer the question.",
    ),
    "sci_fi": (
        "loyalty",
        "Now you are given a scientific fiction. I will ask you some questions and the answer "
        'should be "True" or "False". Notice that you should answer the question based on the '
        "evidence in the document instead of your background knowledge.",
    ),
    "quality": ("option", EXAM),
    "tpo": ("option", EXAM),
    "": ("text", EXAM),
}
# Exams whose prompt is the document and the question alone.
BARE = ("number", "text", "output of code")
DIRECTLY = ".  Please directly give the answer without any additional output or explanation "
WORLD = "based on the world described in the document."
KNOWN = "based on the real-world knowledge and facts up until your last training"
ALONE = "Please directly answer without any additional output or explanation. \nAnswer:"


def records(entry: Mapping[str, Any], dataset: str) -> Iterable[Record]:
    """The prompts of a line of the file `dataset`."""
    kind = entry["evaluation"]
    if kind in ("human", "LLM"):
        return
    metric, system = {"f1": ("token F1", OPEN), "rouge": ("ROUGE-L", OPEN)}.get(kind, ("", ""))
    if kind == "exam":
        metric, system = EXAMS[next(part for part in EXAMS if part in dataset)]
    elif not metric:
        raise KeyError(kind)
    bare = metric in BARE and system != EXAM
    document = system + ("" if bare else "Document is as follows. ") + entry["input"]
    prefix = "\nAnswer:" if kind == "exam" and not bare else ""
    listed = entry["instructions"], entry["outputs"]
    for instruction, output in zip(*map(texts, listed), strict=True):
        asked = f" \nQuestion: {instruction}{DIRECTLY}"
        if bare:
            asked = f"\n\n{instruction}"
        elif kind != "exam":
            words = len(output.split())
            asked = f" Instruction: {instruction} \nAnswer this question with {words} words."
        right, _, fact = output.partition("[fact:") if metric == "loyalty" else (output, "", "")
        yield Record(document, asked, (right,), metric, (), 512, dataset, prefix)
        if metric == "loyalty":
            known = instruction.replace(WORLD, KNOWN)
            yield Record(known, ALONE, (fact.strip()[:-1],), "fact", (), 512, dataset, "")


def exact_match(answer: str, gold: str) -> float:
    """L-Eval's exact match.

    Where `gold` is letters of options, 100 for the same, 25 where all of the answer's are among
    them. Else 100 for the same number, or where the answer contains `gold`, ignoring spaces.
    """
    ours, right = normalize(answer, lower=False), normalize(gold, lower=False)
    if set(right) <= set("ABCD"):
        return 100.0 if ours == right else 25.0 * (set(ours) <= set(right))
    try:
        return 100.0 * (float(answer) == float(gold))
    except ValueError:
        return 100.0 * (gold.lower().replace(" ", "") in answer.lower().replace(" ", ""))


def options(answer: str, *, several: bool) -> str:
    """The letters of the options that an answer names; A where it names none.

    Without `several`, the first of the letters A to D anywhere. With it, the letters at the start
    if there are two, else with those that stand before a space, full stop or bracket.
    """
    if not answer.strip():
        return "None"
    if answer in "ABCD":
        return answer
    if not several:
        found = re.search("[A-D]", answer)
        return found[0] if found else "A"
    rest = answer.lstrip("ABCD")
    begun = set(answer[: len(answer) - len(rest)])
    if len(answer) - len(rest) > 1:
        return "".join(sorted(begun))
    rest = rest.partition("Question")[0]
    named = begun | set(re.findall(r"[A-D](?=[\s.)])", rest))
    run = re.search("[A-D]+", rest)
    return "".join(sorted(named)) or (run[0] if run else "A")


def _chosen(answer: str, gold: str, *, several: bool = False) -> float:
    right = re.sub("[^A-D]", "", gold.split()[0]) or "A"
    return exact_match(options(answer, several=several), right)


def number(answer: str) -> str:
    """The digits before the point of the number behind "The answer is", or of the last number."""
    found = re.search(r"The answer is (\S+)", answer)
    words = [found[1]] if found else answer.partition("\n\n")[0].split(" ")
    numbers = [word for word in words if found or any(map(str.isdigit, word))]
    return "".join(filter(str.isdigit, numbers[-1].partition(".")[0])) if numbers else ""


def _bare_code(text: str) -> str:
    text = re.sub(r",|'|\\", "", re.sub(r"\s+", " ", text)).replace(".0", "")
    return text.replace("] [", "][").replace("[ [", "[[").replace("] ]", "]]")


def _output(answer: str, gold: str) -> float:
    """By the words that may give the output: as many as the right one has, and three."""
    text, most = _bare_code(answer), len(gold.split()) + 3
    for words in ("will be", "of the code", "is", "would be", "the value of", "the result of"):
        text = text.replace(words, "")
    _, found, last = text.replace("printed", "").rpartition("the final output")
    words = re.split(r"\s+", last)
    return exact_match(" ".join(words[:most] if found else words[-most:]), _bare_code(gold))


def _verdict(answer: str, gold: str) -> float:
    """100 where the first word that holds `true` or `false` holds the right one."""
    words = answer.lower().split()
    said = (mark for word in words for mark in ("true", "false") if mark in word)
    return 100.0 * (next(said, "") == gold.strip().lower())


SCORES: dict[str, Callable[[str, str], float]] = {
    "option": _chosen,
    "all options": functools.partial(_chosen, several=True),
    "number": lambda answer, gold: exact_match(number(answer), number(gold)),
    "output of code": _output,
    "text": exact_match,
    "loyalty": _verdict,
    "fact": _verdict,
    "token F1": token_f1,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LEval(FileTask):
    """L-Eval's own file: its prompts, its metrics."""

    name: str = fixed("leval")

    def parse(self, entry: Mapping[str, Any], path: Path) -> Iterable[Record]:
        """The prompts of a line. See `records`."""
        return records(entry, path.stem)

    def measures(self, answer: str, sample: Sample) -> dict[str, float]:
        """The score by the prompt's metric; ROUGE-1 and -2 beside ROUGE-L."""
        metric, (gold,) = sample.meta["metric"], sample.outputs
        if metric != "ROUGE-L":
            return {metric: SCORES[metric](answer, gold)}
        # The words of the package `rouge-score`, without stemming.
        scores = rouge(*(re.sub("[^a-z0-9]+", " ", text.lower()) for text in (answer, gold)))
        return {f"ROUGE-{name}": scores[f"rouge_{name.lower()}"] for name in ("L", "1", "2")}
