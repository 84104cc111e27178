"""The tables of a report, as cells for its page and as Markdown."""

import dataclasses
import math
from collections.abc import Sequence

from jax_longctx.evaluation.config import PublishedTable
from jax_longctx.evaluation.specs import Spec
from jax_longctx.evaluation.summary import (
    BASE,
    SCORE,
    Estimate,
    Group,
    Measure,
    Row,
    Score,
    Summary,
)
from jax_longctx.gone import current
from jax_longctx.memory import shown_bytes
from jax_longctx.methods import make_method, settings_of

NOTHING = "\N{EN DASH}"
TIMES = "\N{MULTIPLICATION SIGN}"
# Below this score of full attention, a method's score says little about the method.
ENOUGH = 90


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a table.

    Attributes:
      text: the number or name.
      notes: shown smaller below it.
      kind: "", or the CSS class "weak" (says little), "theirs" (a paper's own number) or "name".
    """

    text: str
    notes: tuple[str, ...] = ()
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """Columns and rows; the first cell of a row names it. `note` explains the numbers."""

    title: str
    head: list[Cell]
    rows: list[list[Cell]]
    note: str = ""


def _name(text: str, *notes: str) -> Cell:
    return Cell(text, notes, "name")


def score_table(group: Group, summary: Summary) -> Table:
    """Methods by tasks at one length."""
    tasks = [task for task in group.tasks if any(group.score(m, task) for m in group.methods)]
    bases = {task: group.score(BASE, task) for task in tasks}
    weak = {task for task, base in bases.items() if base is None or base.mean < ENOUGH}
    head = [_name("method"), Cell("mean")]
    for task in tasks:
        notes = (_count(group, task), summary.metrics[task], *(["†"] if task in weak else []))
        head.append(Cell(task, tuple(note for note in notes if note)))
    rows = []
    for method in group.methods:
        mean = group.means.get(method)
        row = [_name(method), Cell(NOTHING if mean is None else f"{mean:.1f}")]
        for task in tasks:
            row.append(_score_cell(group.scores.get((method, task)), task in weak))
        rows.append(row)
    return Table(f"At {group.length:,} tokens", head, rows)


def _count(group: Group, task: str) -> str:
    """`n = 50`, or a range where methods have different numbers of prompts."""
    found = [group.score(method, task) for method in group.methods]
    counts = [score.count for score in found if score]
    low, high = min(counts, default=0), max(counts, default=0)
    return f"n = {low}" if low == high else f"n = {low} to {high}"


def _score_cell(score: Score | None, weak: bool) -> Cell:
    kind = "weak" if weak else ""
    refused = (f"{score.refused} refused",) if score and score.refused else ()
    found = score and score.score
    if not found:
        return Cell(NOTHING, refused, kind)
    notes = [*_interval(found.value, ".0f"), *_difference(found.difference, "+.0f"), *refused]
    return Cell(f"{found.value.mean:.0f}", tuple(notes), kind)


def _interval(found: Estimate, form: str) -> list[str]:
    """The interval as text; nothing for a single value, which has none."""
    return [] if math.isnan(found.low) else [f"[{found.low:{form}}, {found.high:{form}}]"]


def _difference(found: Estimate | None, form: str) -> list[str]:
    if found is None:
        return []
    sign = "▼ " if found.high < 0 else "▲ " if found.low > 0 else ""
    return [" ".join([f"{sign}{found.mean:{form}}", *_interval(found, form)])]


def cost_table(group: Group) -> Table:
    """Bytes and seconds of a row under each method at one length."""
    base = group.costs.get(BASE)
    names = ("cache while answering", "read by a step", "first token", "next tokens")
    rows = []
    for method in group.methods:
        cost = group.costs[method]
        rows.append(
            [
                _name(method),
                _bytes(cost.resident, base and base.resident),
                _bytes(cost.read, base and base.read),
                _seconds(cost.first_token, base and base.first_token),
                _seconds(cost.token, base and base.token),
                Cell(NOTHING if cost.rows is None else str(cost.rows)),
            ]
        )
    head = [_name("method"), *map(Cell, (*names, "rows a batch"))]
    return Table(f"At {group.length:,} tokens", head, rows)


def _bytes(value: float | None, base: float | None) -> Cell:
    return Cell(NOTHING) if value is None else Cell(shown_bytes(int(value)), _times(value, base))


def _seconds(value: float | None, base: float | None) -> Cell:
    if value is None:
        return Cell(NOTHING)
    shown = f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"
    return Cell(shown, _times(value, base))


def _times(value: float, base: float | None) -> tuple[str, ...]:
    return (f"{TIMES} {value / base:.2f}",) if base else ()


def other_tables(group: Group) -> list[Table]:
    """One table for each measure except the score."""
    names = dict.fromkeys(name for cell in group.scores.values() for name in cell.others)
    tables = []
    for name in names:
        tasks = [
            task
            for task in group.tasks
            if any(name in group.scores[key].others for key in group.scores if key[1] == task)
        ]
        rows = []
        for method in group.methods:
            cells = (group.scores.get((method, task)) for task in tasks)
            found = [None if cell is None else cell.others.get(name) for cell in cells]
            if any(found):
                rows.append([_name(method), *map(_measure, found)])
        head = [_name("method"), *map(Cell, tasks)]
        tables.append(Table(f"{name} at {group.length:,} tokens", head, rows))
    return tables


def _measure(found: Measure | None) -> Cell:
    if found is None:
        return Cell(NOTHING)
    notes = [*_interval(found.value, ".4g"), *_difference(found.difference, "+.3g")]
    return Cell(f"{found.value.mean:.4g}", (*notes, f"n = {found.value.count}"))


def published_table(published: PublishedTable, summary: Summary) -> Table:
    """A paper's results, and below each method our rows with exactly its settings."""
    rows = []
    for name, theirs in published.rows.items():
        figures = (Cell(f"{value:g}", kind="theirs") for value in theirs["values"])
        rows.append([_name(f"{name}, theirs"), *figures])
        spec = Spec.parse(theirs["method"])
        for group in summary.groups:
            wanted = settings_of(make_method(spec.name, spec.at(group.length)))
            for label in group.methods:
                cells = [_ours(group, label, task) for task in published.tasks]
                same = current(group.settings[label]) == wanted
                if same and any(c.text != NOTHING for c in cells):
                    rows.append([_name(f"{label}, ours", f"{group.length:,} tokens"), *cells])
    head = [_name("method"), *map(Cell, published.tasks)]
    return Table(published.title, head, rows, published.note)


def _ours(group: Group, label: str, task: str) -> Cell:
    """Our score on the task of that name, with any text or settings."""
    for (method, shown), score in group.scores.items():
        if method == label and shown.split()[0].split("@")[0] == task:
            return _score_cell(score, False)
    return Cell(NOTHING)


def refused_table(summary: Summary) -> Table:
    """Prompts that were not run under a method, and the reasons."""
    rows = [
        [_name(method), _name(task), Cell(f"{length:,}"), Cell(str(count)), _name(reason)]
        for (method, task, length, reason), count in summary.refused.items()
    ]
    head = [_name("method"), _name("task"), Cell("tokens"), Cell("prompts"), _name("why")]
    return Table("Refused", head, rows)


def answered(rows: Sequence[Row]) -> list[Row]:
    """The rows that have an answer, prompt after prompt."""
    found = [row for row in rows if "answer" in row]
    tasks = list(dict.fromkeys(row["task_label"] for row in found))
    return sorted(found, key=lambda r: (tasks.index(r["task_label"]), r["length"], r["index"]))


def kinds(row: Row) -> dict[str, str]:
    """Task, length, method and outcome of a row, by which a reader filters."""
    right = "100" if row["measures"][SCORE] >= 100 else "below 100"
    told = {"task": row["task_label"], "tokens": f"{row['length']:,}"}
    return told | {"method": row["label"], "score": right}


def answers_text(rows: Sequence[Row]) -> str:
    """Each prompt's question and right answers, then a line for each method's answer."""
    lines, last = [], ""
    for row in answered(rows):
        # Rows of earlier versions have no question.
        asked = " ".join(row.get("prompt", {}).get("question", "").split())
        prompt = f"{row['task_label']} {row['index']} at {row['length']:,} tokens: {asked}"
        if prompt != last:
            lines += ["", prompt, f"    right: {' | '.join(row['outputs'])}"]
            last = prompt
        score, answer = row["measures"][SCORE], " ".join(row["answer"].split())
        lines.append(f"    {score:3.0f} {row['label']}: {answer}")
    return "\n".join([*lines, "", ""])


def table_text(table: Table) -> str:
    """Head, rule and rows; a cell's notes follow its figure."""
    rule = "|".join(["---", *("---:" for _ in table.head[1:])])
    lines = [_line(table.head), f"|{rule}|", *map(_line, table.rows)]
    return "\n".join(lines)


def _line(cells: Sequence[Cell]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(cell: Cell) -> str:
    figure = f"*{plain(cell.text)}*" if cell.kind == "theirs" else plain(cell.text)
    return " ".join([figure, *map(plain, cell.notes)])


def plain(text: str) -> str:
    """The text with Markdown's signs escaped, on one line."""
    for sign in "\\|*_`":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
