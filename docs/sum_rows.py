"""Sums the rows of evaluations into a result file of the documentation.

    python docs/sum_rows.py docs/results/leval.json out-full out-quest ... [--head head.json]

The folders hold `rows.jsonl` of `eval run`; a row that is in several counts once. The file keeps
all but its `rows`; a new one takes its other fields from the head. A row of the file is a method on
a task: score, interval, n, and the difference from full attention on the same prompts. A method
with all tasks of a length, if these are three or more, also gets their mean, with an interval by a
bootstrap within tasks.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_longctx.evaluation.intervals import RESAMPLES
from jax_longctx.evaluation.summary import BASE, SCORE, Measure, summarise
from jax_longctx.jobs import lines
from jax_longctx.settings import THEN, parse_named

MEAN = "mean"
Row = dict[str, Any]


def read_rows(folders: Iterable[Path]) -> list[Row]:
    """The rows of the folders, each method, task, length and prompt once, without refused ones."""
    found: dict[tuple[Any, ...], Row] = {}
    for folder in folders:
        for row in lines.read(folder / "rows.jsonl")[1:]:
            key = (row["label"], row["task_label"], row["length"], row["index"])
            if "measures" in row:
                found[key] = row
    return list(found.values())


def summed(rows: Sequence[Row]) -> list[Row]:
    """Of each length a row for each method and task, then the means."""
    made: list[Row] = []
    names = {row["task_label"]: _task(row["task"]) for row in rows}
    for group in summarise(rows).groups:
        scores: dict[tuple[str, str], dict[str, float]] = {}
        for row in rows:
            if row["length"] == group.length:
                own = scores.setdefault((row["label"], row["task_label"]), {})
                own[f"{row['index']}/{row['prompt_sha256']}"] = row["measures"][SCORE]
        for (method, task), cell in group.scores.items():
            if cell.score is not None:
                row = {**_method(method), "length": group.length, "task": names[task]}
                made.append({**row, **_measured(cell.score)})
        for label in group.methods:
            if len(group.tasks) > 2 and all((label, task) in scores for task in group.tasks):
                row = {**_method(label), "length": group.length, "task": MEAN}
                made.append({**row, **_mean(scores, label, group.tasks)})
    return made


def _task(task: Row) -> str:
    """Its name; of one that reads a benchmark's file, the data set."""
    file = task["settings"].get("file")
    return Path(file).stem if file else task["name"]


def _method(label: str) -> Row:
    """The method and the given settings of a row's label, which is `Spec.label`."""
    parts = (part.replace(" ", ":", 1).replace(" ", ",") for part in label.split(THEN))
    name, settings = parse_named(THEN.join(parts))
    return {"method": name, "settings": ",".join(f"{key}={value}" for key, value in settings)}


def _measured(measure: Measure) -> Row:
    value, apart = measure.value, measure.difference
    row: Row = {"score": round(value.mean, 1), "interval": [round(value.low), round(value.high)]}
    row["n"] = value.count
    if apart is not None and apart.count and not np.isnan(apart.low):
        row["difference"] = round(apart.mean, 1)
        row["difference_interval"] = [round(apart.low, 1), round(apart.high, 1)]
    return row


def _mean(scores: dict[tuple[str, str], dict[str, float]], label: str, tasks: Sequence[str]) -> Row:
    own = [np.array(list(scores[label, task].values())) for task in tasks]
    mean, low, high = _bootstrap(own)
    row: Row = {"score": round(mean, 1), "interval": [round(low, 1), round(high, 1)]}
    row["n"] = sum(map(len, own))
    if label != BASE and all((BASE, task) in scores for task in tasks):
        pairs = [(scores[label, task], scores[BASE, task]) for task in tasks]
        apart = [np.array([one[k] - two[k] for k in one if k in two]) for one, two in pairs]
        mean, low, high = _bootstrap(apart)
        row |= {
            "difference": round(mean, 1),
            "difference_interval": [round(low, 1), round(high, 1)],
        }
    return row


def _bootstrap(tasks: Sequence[np.ndarray]) -> tuple[float, float, float]:
    """The mean of the tasks' means, and its 95% interval by resampling each task's prompts."""
    draw = np.random.default_rng(0)
    means = [
        [values[draw.integers(0, len(values), len(values))].mean() for values in tasks]
        for _ in range(RESAMPLES)
    ]
    low, high = np.percentile(np.mean(means, axis=1), [2.5, 97.5])
    return float(np.mean([values.mean() for values in tasks])), float(low), float(high)


def write(path: Path, head: Row, rows: Sequence[Row]) -> None:
    """The file with a row a line."""
    text = json.dumps(head, indent=2, ensure_ascii=False).removesuffix("\n}")
    listed = ",\n".join(f"    {json.dumps(row, ensure_ascii=False)}" for row in rows)
    path.write_text(f'{text},\n  "rows": [\n{listed}\n  ]\n}}\n', encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("file", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--head", type=Path)
    given = parser.parse_args()
    kept = json.loads((given.head or given.file).read_text(encoding="utf-8"))
    kept.pop("rows", None)
    write(given.file, kept, summed(read_rows(given.folders)))
