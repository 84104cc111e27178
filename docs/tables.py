"""The tables and pictures of the documentation, from committed results.

`docs/results/NAME.json` holds one experiment each. `docs/templates` holds Jinja templates that look
figures up in them. Two pages are whole templates; in README a template fills the lines between
`<!-- NAME -->` and `<!-- /NAME -->`. The papers' figures are those of `research/published.toml`.
"""

import dataclasses
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import drawing
import jinja2

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PUBLISHED = ROOT / "research/published.toml"
KINDS = ("quality", "speed", "memory")
INTERVAL = "{score} [{interval[0]}, {interval[1]}]"

Row = Mapping[str, Any]


class ResultError(ValueError):
    """A result file that lacks something, in one line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """One experiment, as its file has it.

    Attributes:
      name: the file's name without its suffix.
      title: its heading.
      about: what was measured.
      kind: `quality` (scores, perplexity, errors), `speed` or `memory`.
      model: model or shape, dtype.
      hardware: the devices in words.
      software: the libraries with their versions.
      date: the day of the revision.
      revision: the commit, or which commit made which rows.
      command: commands that make it.
      command_note: where the figures were not made by exactly these commands, why.
      baseline: what it is compared with, in the same run.
      limit: the best that could be reached.
      older_prompts: whether pass keys were asked with the prompts before those of the task
        `passkey` now.
      findings: what follows from it.
      notes: conditions that a reader must know.
      tables: pivots: `index`, `columns`, optionally `split` (keys of the rows), `cell` (a format)
        and `head`.
      columns: of a flat table: `key`, `head`, optionally `format`.
      picture: the file drawn from it.
      rows: the measurements.
    """

    name: str
    title: str
    about: str
    kind: str
    model: str
    hardware: str
    software: str
    date: str
    revision: str
    command: list[str]
    baseline: str
    limit: str
    rows: list[dict]
    command_note: str = ""
    older_prompts: bool = False
    findings: str = ""
    notes: list[str] = dataclasses.field(default_factory=list)
    tables: list[dict] = dataclasses.field(default_factory=list)
    columns: list[dict] = dataclasses.field(default_factory=list)
    picture: str = ""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            needed = each.default is each.default_factory is dataclasses.MISSING
            if needed and not getattr(self, each.name):
                raise ResultError(f"{self.name}.json has an empty {each.name!r}; fill it in")
        if self.kind not in KINDS:
            raise ResultError(f"{self.name}.json has kind {self.kind!r}; expected one of {KINDS}")
        if not re.fullmatch(r"20\d\d-\d\d-\d\d( and 20\d\d-\d\d-\d\d)*", self.date):
            raise ResultError(f"{self.name}.json has date {self.date!r}; expected YYYY-MM-DD")
        if not self.tables and not self.columns:
            raise ResultError(f"{self.name}.json has neither 'tables' nor 'columns'; say one")
        if self.kind == "quality" and not all(row.get("n") for row in self.rows):
            raise ResultError(f"{self.name}.json has a row without 'n', the number of samples")
        bare = [row for row in self.rows if not any(key.endswith("interval") for key in row)]
        if self.kind == "quality" and bare and not any("interval" in note for note in self.notes):
            raise ResultError(
                f"{self.name}.json has a row without an interval; add it, or a note that says why"
            )


def parse_result(name: str, found: Mapping[str, Any]) -> Result:
    """A result from what its file holds.

    Raises:
      ResultError: a field is missing, unknown or empty.
    """
    try:
        return Result(name=name, **found)
    except TypeError as error:
        raise ResultError(f"{name}.json: {error}") from None


def read_results(folder: Path = DOCS / "results") -> dict[str, Result]:
    """Every result of a folder, by name."""
    paths = sorted(folder.glob("*.json"))
    return {
        path.stem: parse_result(path.stem, json.loads(path.read_text(encoding="utf-8")))
        for path in paths
    }


def label(row: Row) -> str:
    """A method with its settings, as `-m` takes it."""
    return row["method"] + (f":{row['settings']}" if row.get("settings") else "")


def shown(value: Any) -> str:
    """A value of a key: numbers from 1,000 on with separators, lists with commas."""
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    return str(value)


def size(count: int) -> str:
    """Bytes in MiB, or GiB from 1 GiB on."""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; a `|` in a cell is escaped."""
    lines = [heads, ["---"] * len(heads), *rows]
    cells = [[cell.replace("|", r"\|").replace("\n", " ") for cell in line] for line in lines]
    return "\n".join(re.sub(r"\|  (?=\|)", "| ", f"| {' | '.join(line)} |") for line in cells)


FORMATS: dict[str, Callable[[Any], str]] = {
    "bytes": size,
    "ms": lambda seconds: f"{1e3 * seconds:.2f} ms",
}


def flat_table(columns: Sequence[Mapping[str, Any]], rows: Sequence[Row]) -> str:
    """One line a row; a format may name other keys of its row."""

    def cell(column: Mapping[str, Any], row: Row) -> str:
        value: Any = label(row) if column["key"] == "label" else row.get(column["key"])
        if value is None:
            return ""
        if "format" not in column:
            return shown(value)
        if column["format"] in FORMATS:
            return FORMATS[column["format"]](value)
        return column["format"].format(value, **row).replace("``", "")

    heads = [column["head"] for column in columns]
    return markdown(heads, [[cell(column, row) for column in columns] for row in rows])


def pivot(
    rows: Sequence[Row], *, index: str, columns: str, head: str = "method", cell: str = INTERVAL
) -> str:
    """One line an `index`, one column a value of the key `columns`; what was not run is empty."""

    def name(row: Row) -> str:
        return label(row) if index == "label" else str(row[index])

    across = list(dict.fromkeys(row[columns] for row in rows))
    cells = {(name(row), row[columns]): cell.format(**row) for row in rows}
    lines = [
        [f"`{one}`", *(cells.get((one, other), "") for other in across)]
        for one in dict.fromkeys(map(name, rows))
    ]
    heads = [shown(one) if isinstance(one, int) else f"`{one}`" for one in across]
    return markdown([head, *heads], lines)


def tables_of(result: Result) -> str:
    """All tables of a result."""
    made = [flat_table(result.columns, result.rows)] if result.columns else []
    for spec in result.tables:
        options = {key: value for key, value in spec.items() if key != "split"}
        if "split" not in spec:
            made.append(pivot(result.rows, **options))
            continue
        key = spec["split"]
        for value in dict.fromkeys(row[key] for row in result.rows):
            part = [row for row in result.rows if row[key] == value]
            made.append(pivot(part, **options, head=f"{shown(value)} tokens"))
    return "\n\n".join(made)


def samples(result: Result) -> str:
    """The number of samples of a cell, where no column says it."""
    counts = {row["n"] for row in result.rows if "n" in row}
    if not counts or any(column["key"] == "n" for column in result.columns):
        return ""
    if len(counts) == 1:
        return f"n = {counts.pop()} a cell."
    by_task = dict.fromkeys((row["n"], row.get("task")) for row in result.rows)
    once = len(by_task) == len({task for _, task in by_task})
    if once or not all("length" in row for row in result.rows):
        return f"n by task: {', '.join(f'{n} in `{task}`' for n, task in by_task)}."
    by_length = sorted({(row["length"], row["n"]) for row in result.rows})
    return f"n by length: {', '.join(f'{n} at {length:,}' for length, n in by_length)} tokens."


def lookup(results: Mapping[str, Result]) -> Callable[..., dict]:
    """The function `row(name, key=value, ...)` of templates; `spec` is a method with settings."""

    def row(name: str, /, **where: Any) -> dict:
        if name not in results:
            raise ResultError(f"docs/results/{name}.json is not there; a template names it")
        known = [
            ({"spec": label(row)} if "spec" in where else {}) | row for row in results[name].rows
        ]
        rows = [row for row in known if all(row.get(key) == where[key] for key in where)]
        if len(rows) != 1:
            raise ResultError(f"{name}.json has {len(rows)} rows with {where}; expected one")
        return rows[0]

    return row


def paper_value(title: str, row: str, task: str) -> str:
    """A figure of `published.toml`, of the table whose title ends with `title`."""
    tables = tomllib.loads(PUBLISHED.read_text(encoding="utf-8"))["table"]
    (table,) = (table for table in tables if table["title"].endswith(title))
    return str(table["rows"][row]["values"][table["tasks"].index(task)])


def environment(results: Mapping[str, Result]) -> jinja2.Environment:
    """Templates with the results, and functions that look figures up."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(DOCS / "templates"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.globals |= {
        "results": results,
        "row": lookup(results),
        "paper": paper_value,
        "tables_of": tables_of,
        "samples": samples,
        "text": lambda name: (DOCS / name).read_text(encoding="utf-8"),
    }
    made.filters |= {"shown": shown, "size": size}
    return made


def page(name: str, results: Mapping[str, Result]) -> str:
    """The page that a template of this name is."""
    return environment(results).get_template(f"{name}.j2").render()


def readme(results: Mapping[str, Result]) -> str:
    """README with what stands between its markers written anew."""
    jinja = environment(results)

    def filled(match: re.Match[str]) -> str:
        body = jinja.get_template(f"{match['name']}.md.j2").render().strip("\n")
        return f"{match['open']}\n\n{body}\n\n{match['close']}"

    pattern = r"(?P<open><!-- (?P<name>[\w-]+) -->)\n.*?(?P<close><!-- /(?P=name) -->)"
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(pattern, filled, text, flags=re.DOTALL)


def fingerprint(result: Result) -> str:
    """A digest of a result's rows: a picture carries that of the rows it was drawn from."""
    return hashlib.sha256(json.dumps(result.rows, sort_keys=True).encode()).hexdigest()


def draw_depths(result: Result, path: Path) -> None:
    """A heat map a method: the share found by depth (down) and length (across)."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(map(label, result.rows)))
    parts = {name: [row for row in result.rows if label(row) == name] for name in names}
    widths = [len(part) for part in parts.values()]
    figure, axes = pyplot.subplots(
        1, len(names), figsize=(13, 3.4), width_ratios=widths, sharey=True, layout="constrained"
    )
    for ax, (name, part) in zip(axes, parts.items(), strict=True):
        depths = len(part[0]["by_depth"])
        grid = [[row["by_depth"][depth] for row in part] for depth in range(depths)]
        ax.imshow(grid, vmin=0, vmax=100, cmap="cividis", aspect="auto")
        for down, line in enumerate(grid):
            for across, value in enumerate(line):
                ink = "black" if value > 50 else "white"
                ax.text(across, down, value, ha="center", va="center", fontsize=7, color=ink)
        ax.set_title(name.replace(":", "\n").replace(",", " "), fontsize=8)
        ax.set_xticks(range(len(part)), [f"{row['length'] // 1024}K" for row in part], fontsize=7)
        ticks = [f"{100 * depth / (depths - 1):.0f}%" for depth in range(depths)]
        ax.set_yticks(range(depths), ticks, fontsize=7)
    axes[0].set_ylabel("depth of the pass key", fontsize=8)
    figure.supxlabel("tokens of text", fontsize=8)
    figure.colorbar(axes[0].images[0], ax=list(axes), label="found, %")
    figure.savefig(path, dpi=120, metadata={"Description": fingerprint(result)})
    pyplot.close(figure)


def draw(result: Result, path: Path) -> None:
    """The result's picture: rows by depth as heat maps, scores over bytes, times as bars."""
    if "by_depth" in result.rows[0]:
        draw_depths(result, path)
        return
    if "read_bytes" in result.rows[0]:
        shown = [row for row in result.rows if row["model"] == "1.5B" and row["length"] == 16384]
        title = "RULER at 16,384 tokens, Qwen2.5-Coder-1.5B-Instruct, 95% intervals"
        drawing.draw_board(shown, path, title=title, description=fingerprint(result))
        return
    drawing.draw(result.rows, path, title=result.hardware, description=fingerprint(result))


def stale_pictures(results: Mapping[str, Result]) -> dict[Path, Result]:
    """The pictures that were not drawn from the rows as they are."""
    wanted = {DOCS / one.picture: one for one in results.values() if one.picture}
    return {
        path: result
        for path, result in wanted.items()
        if not path.is_file() or fingerprint(result).encode() not in path.read_bytes()
    }
