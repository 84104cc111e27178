"""Statistics of a run's rows by method, task and length, for the report."""

import dataclasses
import itertools
import re
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jax_longctx.evaluation.intervals import bootstrap, mean_interval, paired_interval

# Label of the method that the others are compared with.
BASE = "full"
SCORE = "score"

Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean with its 95% interval, of `count` values."""

    mean: float
    low: float
    high: float
    count: int


@dataclasses.dataclass(frozen=True)
class Measure:
    """Mean of a measure, and difference from full attention on the same prompts."""

    value: Estimate
    difference: Estimate | None


@dataclasses.dataclass(frozen=True)
class Score:
    """One method on one task at one length.

    Attributes:
      score: from 0 to 100; None where every prompt was refused.
      others: further measures, by name.
      refused: number of refused prompts.
    """

    score: Measure | None
    others: dict[str, Measure]
    refused: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """Medians over the rows of one method at one length; None where nothing was measured.

    Attributes:
      resident, read: bytes of a row's caches while answering, and those a decode step reads.
      first_token, token: seconds in batches that compiled nothing.
      rows: most rows of such a batch.
    """

    resident: float | None
    read: float | None
    first_token: float | None
    token: float | None
    rows: int | None


@dataclasses.dataclass(frozen=True)
class Group:
    """The results of one length: scores by (method, task), costs by method.

    Attributes:
      settings: `{"name", "settings"}` of each method, by its label.
    """

    length: int
    methods: list[str]
    tasks: list[str]
    scores: dict[tuple[str, str], Score]
    costs: dict[str, Cost]
    settings: dict[str, dict[str, Any]]

    def score(self, method: str, task: str) -> Estimate | None:
        """Mean score of that method on that task, if there is one."""
        cell = self.scores.get((method, task))
        return cell.score.value if cell and cell.score else None

    @property
    def means(self) -> dict[str, float]:
        """Means over tasks of the methods that have a score on every scored task."""
        scored = [t for t in self.tasks if any(self.score(method, t) for method in self.methods)]
        means = {}
        for method in self.methods:
            own = [found for task in scored if (found := self.score(method, task)) is not None]
            if scored and len(own) == len(scored):
                means[method] = statistics.fmean(found.mean for found in own)
        return means


@dataclasses.dataclass(frozen=True)
class Summary:
    """The results of all lengths.

    Attributes:
      metrics: meaning of each task's score.
      refused: number of refused prompts by (method, task, length, reason).
    """

    groups: list[Group]
    methods: list[str]
    metrics: dict[str, str]
    refused: dict[tuple[str, str, int, str], int]


# The value of a setting that is a path, unlike a share `L/8` or a pattern of heads `10/01`.
_PATH = re.compile(r"=([^=]*/[^/=>]*[^/=>\d][^/=>]*)(?= [\w.]+=| > |$)")


def with_short_labels(rows: Sequence[Row]) -> list[Row]:
    """The rows with files' names in place of their paths in the labels of methods and tasks.

    Folders stay as far as they tell files of one name apart.
    """
    for key in ("label", "task_label"):
        labels = {row[key] for row in rows}
        short = {label: _shortened(label, labels - {label}) for label in labels}
        rows = [{**row, key: short[row[key]]} for row in rows]
    return [*rows]


def _shortened(label: str, others: Collection[str]) -> str:
    def cut(label: str, parts: int) -> str:
        return _PATH.sub(lambda path: "=" + "/".join(path[1].split("/")[-parts:]), label)

    alike = ({cut(other, parts) for other in others} for parts in itertools.count(1))
    return next(cut(label, n) for n, each in enumerate(alike, 1) if cut(label, n) not in each)


def summarise(rows: Sequence[Row]) -> Summary:
    """The summary of rows; methods and tasks stay in the order of the rows."""
    lengths = sorted({row["length"] for row in rows})
    refused = Counter(
        (row["label"], row["task_label"], row["length"], row["refused"])
        for row in rows
        if "refused" in row
    )
    return Summary(
        groups=[_group(length, [r for r in rows if r["length"] == length]) for length in lengths],
        methods=_ordered(row["label"] for row in rows),
        metrics={row["task_label"]: row["metric"] for row in rows},
        refused=refused,
    )


def _group(length: int, rows: Sequence[Row]) -> Group:
    methods = _ordered(row["label"] for row in rows)
    tasks = _ordered(row["task_label"] for row in rows)
    cells: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row["label"], row["task_label"]), []).append(row)
    scores = {
        (method, task): _score(own, cells.get((BASE, task), []) if method != BASE else [])
        for (method, task), own in cells.items()
    }
    return Group(
        length,
        methods,
        tasks,
        scores,
        {method: _cost([row for row in rows if row["label"] == method]) for method in methods},
        {row["label"]: row["method"] for row in rows},
    )


def _score(rows: Sequence[Row], base: Sequence[Row]) -> Score:
    names = _ordered(name for row in rows for name in row.get("measures", {}))
    found = {name: _measure(rows, base, name) for name in names}
    return Score(found.pop(SCORE, None), found, sum("refused" in row for row in rows))


def _measure(rows: Sequence[Row], base: Sequence[Row], name: str) -> Measure:
    """Scores have intervals for right and wrong answers, other measures by bootstrap."""
    mine, theirs = _by_prompt(rows, name), _by_prompt(base, name)
    shared = [prompt for prompt in mine if prompt in theirs]
    first, second = ([values[prompt] for prompt in shared] for values in (mine, theirs))
    values, more = list(mine.values()), np.subtract(first, second)
    if name == SCORE:
        found = statistics.fmean(values), *mean_interval(values)
        apart = (float(more.mean()), *paired_interval(first, second)) if shared else None
    else:
        found = bootstrap(np.asarray(values, np.float64))
        apart = bootstrap(more) if shared else None
    difference = None if apart is None else Estimate(*apart, len(shared))
    return Measure(Estimate(*found, len(values)), difference)


def _by_prompt(rows: Sequence[Row], name: str) -> dict[tuple[int, str], float]:
    """Values of a measure by (number, hash) of the prompt."""
    return {
        (row["index"], row["prompt_sha256"]): row["measures"][name]
        for row in rows
        if name in row.get("measures", {})
    }


def _cost(rows: Sequence[Row]) -> Cost:
    done = [row for row in rows if "seconds" in row]
    warm = [row for row in done if not row["compiled"]]
    return Cost(
        _median(row["bytes"]["resident"] for row in done),
        _median(row["bytes"]["read"] for row in done),
        _median(row["seconds"]["first_token"] for row in warm),
        _median(row["seconds"]["token"] for row in warm),
        max((row["rows"] for row in warm), default=None),
    )


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ordered(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
