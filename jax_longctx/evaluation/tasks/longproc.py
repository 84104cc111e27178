"""LongProc (Ye et al. 2025) from the files that its authors publish: their prompts, their scores.

A file is `DATASET_SIZE.json` as in princeton-pli/LongProc at 78e873a, in its folder, with the
wording in `prompts.yaml` and the pages of `html_to_tsv` beside it. Answers may have 1,024, 3,072 or
9,216 tokens, as in the authors' example. Scores are those of `longproc_data.py`: F1 of rows;
whether the equations of `<Solution>` reach the target; whether the lines of `<Route>`, or those
that begin with a hyphen, are right; whether a program gives the right output for ten inputs.
Partial scores are the share of lines up to the first wrong one, as the authors count them.
Countdown's searches are made here, as there: the files' own are not used. `travel_planning` was not
at hand.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import operator
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_longctx.errors import ConfigError
from jax_longctx.evaluation.haystack import read_file
from jax_longctx.evaluation.metrics import normalize
from jax_longctx.evaluation.tasks.files import FileTask, Record, texts
from jax_longctx.evaluation.tasks.html_tsv import score_table
from jax_longctx.evaluation.tasks.task import Sample, fixed

MAX_NEW = {"0.5k": 1024, "2k": 3072, "8k": 9216}
# Numbers and targets of the two problems that countdown's prompt solves.
SHOWN = (((40, 19, 23, 7), 29), ((9, 16, 6, 18), 12))
# Intermediate results from here on are dropped.
LARGEST = 2000
OPERATORS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}
TESTS = 10
LIBRARIES = (
    "cstdio iostream vector algorithm numeric cmath cstring set map queue stack list fstream "
    "climits cassert iomanip sstream bitset"
).split()
BESIDE = "keep it beside LongProc's file"
SEARCH = "# Search Procedure"
FOUND = "Now we have found the target"
PARTIAL = "up to the first error"
_FILLER = re.compile(
    r"\b(on|in|at|step|thinks|think|believes|believe|is|are|of|location|know|knows|belief)"
    r"\b"
)


def wording(folder: Path) -> str:
    """The template in `prompts.yaml` of a folder: one block of text under one key."""
    text = read_file(str(folder / "prompts.yaml"), BESIDE)
    return re.sub("^  ", "", text.partition("|-\n")[2], flags=re.MULTILINE).rstrip("\n")


def search(numbers: Sequence[int], target: int) -> str:
    """The search for `target` by depth, as an answer writes it, and the solution that it finds.

    Raises:
      ValueError: there is none, or there are not four numbers.
      TypeError: one of the numbers is not whole.
    """
    log: list[str] = []
    whole, end = [*map(operator.index, numbers)], operator.index(target)
    equations = _search(whole, end, 0, log) if len(whole) == 4 else []
    if len(equations) != 3:
        raise ValueError(f"no way from {list(numbers)} to {target}")
    one, two, three = equations
    return (
        "\n".join([SEARCH, *log]) + f"\n\n{FOUND}, let's trace back the solution:\n"
        f"Final step: {three}\nThe step before: {two}\nThe first step: {one}\n\n"
        f"Output the solution in the required format:\n"
        f"<Solution>\n{one}\n{two}\n{three}\n</Solution>\n"
    )


def _search(numbers: list[int], target: int, depth: int, log: list[str]) -> list[str]:
    """The equations from `numbers` to `target`, or none; writes the search to `log`."""
    pairs = list(itertools.combinations(range(len(numbers)), 2))
    state = f"number set: {numbers}, target: {target}"
    if len(numbers) == 2:
        log[-1] += f" Current {state}, just two numbers left."
    else:
        listed = [(numbers[i], numbers[j]) for i, j in pairs]
        state += f". Options for choosing two numbers: {listed}."
        if log:
            log[-1] += f" Current {state}"
        else:
            log.append(f"Initial {state}")
        depth += 1
    for i, j in pairs:
        left = [number for k, number in enumerate(numbers) if k not in (i, j)]
        if left:
            log.append(
                f"{' ' * depth}|- Pick two numbers ({numbers[i]}, {numbers[j]}) (numbers left: "
                f"{left}). Try possible operations."
            )
        low, high = sorted((numbers[i], numbers[j]))
        for sign in OPERATORS:
            equation, value, end = _tried(high, sign, low, None if left else target)
            log.append(f"{' ' * (depth + 1)}|- Try {equation}.{end}")
            if not end:
                log[-1] += f" Add {value} to the number set."
                if found := _search([value, *left], target, depth + 1, log):
                    return [equation, *found]
            elif end.endswith("found!"):
                return [equation]
    return []


def _tried(a: int, sign: str, b: int, target: int | None) -> tuple[str, int, str]:
    """An equation, its value, and why the search ends there; `target` for the last two numbers."""
    if sign == "/" and not b:
        return f"{a} / {b} (invalid operation)", 0, " drop this branch."
    exact = OPERATORS[sign](a, b)
    value = int(exact)
    if exact != value:
        return f"{a} / {b} = {exact:.1f}", 0, f" {exact:.1f} is a decimal, drop this branch."
    equation, end = f"{a} {sign} {b} = {value}", ""
    if value >= LARGEST:
        end = f" {value} exceeds the maximum intermediate result, drop this branch."
    elif target is not None:
        end = f" Evaluate {value} == {value}, target found!"
        if value != target:
            end = f" Evaluate {value} != {target}, drop this branch."
    return equation, value, end


def _tagged(answer: str, tag: str) -> str | None:
    start, end = answer.find(f"<{tag}>"), answer.find(f"</{tag}>")
    return None if -1 in (start, end) else answer[start + len(tag) + 2 : end].strip()


def _solves(equations: str, numbers: Sequence[int], target: int) -> bool:
    """Whether three lines `a + b = c` use the numbers up and end in the target."""
    left, lines = list(numbers), equations.split("\n")
    if len(lines) != 3:
        return False
    for line in lines:
        try:
            terms, result = line.split("=")
            sign = next(each for each in OPERATORS if each in terms)
            a, b = map(int, terms.split(sign))
            value = int(result)
            if OPERATORS[sign](a, b) != value:
                return False
            left.remove(a)
            left.remove(b)
        except (ValueError, StopIteration, ArithmeticError):
            return False
        left.append(value)
    return left[0] == target


def _agreed(search: str, gold: str) -> float:
    """The place of the first line that does another thing than `gold`, as a share of its lines.

    Lines that do the same have the same terms, and drop a branch both or neither.
    """

    def act(line: str) -> tuple[str, bool]:
        terms = line if "Pick two numbers" in line else line.partition("=")[0]
        return terms, "drop this branch" in line

    (first, *ours), (begun, *right) = search.split("\n"), gold.split("\n")
    if first != begun:
        return 0.0
    same = _agreeing([*map(act, ours)], [*map(act, right)])
    return 100 * min(same, len(ours) - 1, len(right) - 1) / len(right)


def _countdown(answer: str, sample: Sample) -> dict[str, float]:
    gold = sample.outputs[0].partition(FOUND)[0].removeprefix(SEARCH).strip()
    *numbers, target = map(int, re.findall(r"\d+", gold.partition(". ")[0]))
    found = _tagged(answer, "Solution")
    if found is not None and _solves(found, numbers, target):
        return {"accuracy": 100.0, PARTIAL: 100.0}
    _, searched, ours = answer.rpartition(SEARCH)
    return {"accuracy": 0.0, PARTIAL: _agreed(ours.strip(), gold) if searched else 0.0}


def _route(answer: str, sample: Sample) -> dict[str, float]:
    gold, found = sample.outputs[0].strip(), _tagged(answer, "Route")
    if found is None or found == gold:
        return dict.fromkeys(("accuracy", PARTIAL), 100.0 * (found == gold))
    # The first wrong line counts too.
    ours, right = found.split("\n"), gold.split("\n")
    same = min(_agreeing(ours, right) + 1, len(ours), len(right))
    return {"accuracy": 0.0, PARTIAL: 100 * same / len(right)}


def _agreeing(ours: Sequence[Any], right: Sequence[Any]) -> int:
    """How many lines agree before the first that does not."""
    pairs = zip(ours, right, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def _beliefs(text: str) -> list[str]:
    """The lines that begin with a hyphen, normalised; of indented lines the first alone counts."""
    hyphened = (line for line in text.splitlines() if line.strip().startswith("-"))
    lines = "\n".join(hyphened).strip().split("\n")
    bare = (normalize(line.replace("\u2019", "")) for line in lines if line.startswith("-"))
    return [said for said in (" ".join(_FILLER.sub(" ", line).split()) for line in bare) if said]


def _tracked(answer: str, sample: Sample) -> dict[str, float]:
    ours, gold = _beliefs(answer), _beliefs(sample.outputs[0])
    accuracy = 100.0 * (ours == gold)
    return {"accuracy": accuracy, PARTIAL: 100 * _agreeing(ours, gold) / len(gold)}


def _table(answer: str, sample: Sample) -> dict[str, float]:
    return score_table(answer, sample.outputs[0])


def _program(answer: str, sample: Sample) -> dict[str, float]:
    code = re.search(r"```cpp([\s\S]*)```", answer.replace("```c++", "```cpp"))
    right = code is not None and runs_right(code[1], sample.meta["choices"][0])
    return {"accuracy": 100.0 * right}


@functools.lru_cache(maxsize=1)
def runs_right(code: str, tests: str) -> bool:
    """Whether a C++ program compiles and prints the right lines; runs it on this machine.

    Args:
      tests: JSON, pairs of the lines of the input and of the output.
    """
    source = "".join(f"#include <{name}>\n" for name in LIBRARIES) + "using namespace std;\n" + code
    with tempfile.TemporaryDirectory() as folder:
        command = ["g++", "-std=c++11", "-O", "-x", "c++", "-", "-o", f"{folder}/a"]
        written = source.encode(errors="replace")
        made = subprocess.run(command, input=written, capture_output=True, check=False)
        return not made.returncode and all(
            _prints(Path(folder), "\n".join([*given, ""]), "\n".join([*right, ""]))
            for given, right in json.loads(tests)[:TESTS]
        )


def _prints(folder: Path, given: str, right: str) -> bool:
    # At most 32 MiB of output, in three seconds.
    limited = ["sh", "-c", "ulimit -f 65536; exec ./a > out 2> /dev/null"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        subprocess.run(limited, cwd=folder, input=given.encode(), timeout=3, check=False)
        return (folder / "out").read_bytes() == right.encode()
    return False


# Data set -> scores by name, and where its prompt is divided into context and question.
DATASETS: dict[str, tuple[Callable[[str, Sample], dict[str, float]], str]] = {
    "html_to_tsv": (_table, "\n\n[TARGET INFORMATION]"),
    "countdown": (_countdown, "\n\n[Problem]"),
    "path_traversal": (_route, "\n\nNow find the route"),
    "tom_tracking": (_tracked, "\n\n[QUESTION]"),
    "pseudo_to_code": (_program, "\n\n[CODE]:"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongProc(FileTask):
    """LongProc's own file: its prompts, its metrics.

    Attributes:
      run_code: whether programs that the model writes may run on this machine (`pseudo_to_code`).
    """

    name: str = fixed("longproc")

    run_code: bool = False

    def parse(self, entry: Mapping[str, Any], path: Path) -> Iterable[Record]:
        """The prompt of an entry.

        Raises:
          ConfigError: the data set or its size is not read; or the model's programs must run, and
            may not or cannot.
        """
        dataset, _, size = path.stem.rpartition("_")
        if dataset not in DATASETS or size not in MAX_NEW:
            known = f"{', '.join(DATASETS)} in sizes {', '.join(MAX_NEW)}"
            raise ConfigError(f"{path.name} is not read; read are {known}")
        fields, gold, tests = _fields(entry, dataset, path.parent)
        if tests and not (self.run_code and shutil.which("g++")):
            raise ConfigError(
                f"{dataset} compiles programs that the model writes with g++ and runs them here: "
                f"install g++ and set run_code=true"
            )
        divided = DATASETS[dataset][1]
        before, found, after = wording(path.parent).partition(divided)
        if not found:
            raise ValueError(f"prompts.yaml has no {divided.strip()!r}")
        context, query = before.format(**fields), (divided + after).format(**fields)
        metric = "f1" if dataset == "html_to_tsv" else "accuracy"
        yield Record(context, query, (gold,), metric, tests, MAX_NEW[size], dataset, "")

    def measures(self, answer: str, sample: Sample) -> dict[str, float]:
        """F1, precision and recall of rows; or accuracy, and a partial one."""
        return DATASETS[sample.meta["dataset"]][0](answer, sample)


def _fields(
    entry: Mapping[str, Any], dataset: str, folder: Path
) -> tuple[dict[str, Any], str, tuple[str, ...]]:
    """What the template takes, the right answer, and the tests of a program."""
    if dataset == "html_to_tsv":
        page = read_file(str(folder / entry["html_path"]), BESIDE)
        (gold,) = texts([entry["gt"]])
        if not score_table(gold, gold)["f1"]:
            raise ValueError("its table has no rows")
        return {**entry, "html_str": page}, gold, ()
    if dataset == "countdown":
        shown = "\n\n".join(
            f"# Example\nNumbers: {list(numbers)}\nTarget: {target}\n\n{search(numbers, target)}"
            for numbers, target in SHOWN
        )
        return {**entry, "demonstration": shown}, search(entry["nums"], entry["target"]), ()
    if dataset == "path_traversal":
        (gold,), (first, last) = texts([entry["answer_nl"]]), texts(entry["question_repr"])
        cities = {"city_context": entry["context_nl"], "src_city": first, "dst_city": last}
        return cities, gold, ()
    if dataset == "tom_tracking":
        (gold,) = texts([entry["solution"]])
        if not _beliefs(gold):
            raise ValueError("its solution has no beliefs")
        return dict(entry), gold, ()
    lines = {"pseudocode": "\n".join(texts(entry["pseudocode_lines"], blank=True))}
    tests = [[texts(each, blank=True) for each in pair] for pair in entry["testcases"]]
    if not tests or any(len(pair) != 2 for pair in tests):
        raise ValueError("its tests are not pairs of lines of input and output")
    return lines, "\n".join(texts(entry["code_lines"], blank=True)), (json.dumps(tests[:TESTS]),)
