"""The report of a run: one self-contained HTML page, and Markdown with PNG plots.

DIR/report.html    everything, without links to other files or addresses
DIR/report.md      the same tables, with the plots of DIR/plots/
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jax_longctx.evaluation.config import research
from jax_longctx.evaluation.plots import Plot, curves, heatmaps, pareto
from jax_longctx.evaluation.summary import Row, Summary, summarise
from jax_longctx.evaluation.tables import (
    ENOUGH,
    TIMES,
    Table,
    answered,
    cost_table,
    kinds,
    other_tables,
    plain,
    published_table,
    refused_table,
    score_table,
    table_text,
)
from jax_longctx.files import file_errors, read_json, write_whole

ABOUT = "about.json"
PICTURES = "plots"
About = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, a note, and optional tables and plots."""

    title: str
    note: str = ""
    tables: list[Table] = dataclasses.field(default_factory=list)
    plots: list[Plot] = dataclasses.field(default_factory=list)

    @property
    def id(self) -> str:
        """Its anchor in the page."""
        return self.title.lower().replace(" ", "-").replace("'", "")


def make_sections(rows: Sequence[Row], summary: Summary, published: Sequence[str]) -> list[Section]:
    """The sections that are not empty; `published` names papers whose results are shown."""
    scores = [score_table(group, summary) for group in summary.groups]
    fronts = [plot for group in summary.groups if (plot := pareto(group)) is not None]
    tables = research().PUBLISHED if published else ()
    theirs = [published_table(table, summary) for table in tables if table.paper in published]
    sections = [
        Section(
            "Scores",
            "Out of 100, with 95% intervals: Wilson's where every answer is right or wrong, else "
            "of a bootstrap. Below it, the difference from full attention on the same prompts "
            "with the interval of the pairs: ▼ or ▲ where that leaves out 0. † full attention is "
            f"not known to reach {ENOUGH} there, so the column says little about the methods.",
            # A table without columns of tasks has no scores.
            [table for table in scores if len(table.head) > 2],
        ),
        Section(
            "Quality against cost",
            "Mean score over the tasks against what a method costs. Up and to the left is better; "
            "the line joins the methods that no other beats in both.",
            plots=fronts,
        ),
        Section(
            "Costs",
            "Medians over rows. Bytes are one row's keys, values and what goes with them. Seconds "
            "are a whole batch's, from batches in which nothing was compiled; \N{EN DASH} where "
            f"there was none. {TIMES} is a multiple of full attention.",
            [cost_table(group) for group in summary.groups],
        ),
        Section(
            "By depth",
            "Mean score by where in the prompt the answer stands, 0% its start.",
            plots=heatmaps(rows),
        ),
        Section(
            "Further measures",
            "Means with 95% intervals of a bootstrap.",
            [table for group in summary.groups for table in other_tables(group)],
            curves(rows),
        ),
        Section(
            "The papers' own figures",
            "Figures in italics are theirs, of other models, prompts and texts than ours: compare "
            "the differences between methods, not a row of theirs with one of ours.",
            theirs,
        ),
        Section(
            "Refused",
            "Prompts that were not answered; none was cut to fit.",
            [refused_table(summary)] if summary.refused else [],
        ),
    ]
    return [section for section in sections if section.tables or section.plots]


def write_about(folder: Path, about: About) -> None:
    """Writes the fields that rows do not have: `title`, `about`, `published`."""
    write_whole(json.dumps(about, indent=1), folder / ABOUT)


def read_about(folder: Path) -> About:
    """Reads the fields of `write_about`; empty if there is no such file."""
    path = folder / ABOUT
    return cast(About, read_json(path)) if path.exists() else {}


def write_report(folder: Path, rows: Sequence[Row], about: About) -> Summary:
    """Writes `report.html`, `report.md` and `plots/` of these rows."""
    summary = summarise(rows)
    sections = make_sections(rows, summary, about.get("published", ()))
    title, words = about.get("title") or "Evaluation", about.get("about", "")
    with file_errors(f"{folder / PICTURES} cannot be written"):
        (folder / PICTURES).mkdir(parents=True, exist_ok=True)
    for plot in (plot for section in sections for plot in section.plots):
        write_whole(plot.png(), folder / PICTURES / plot.file)
    from jinja2 import Environment, PackageLoader

    facts = {"title": title, "about": words, "facts": _facts(rows), "sections": sections}
    facts["answers"] = found = [(row, kinds(row)) for row in answered(rows)]
    names = found[0][1] if found else ()
    facts["filters"] = {name: list(dict.fromkeys(of[name] for _, of in found)) for name in names}
    for name in ("report.html", "report.md"):
        pages = Environment(
            loader=PackageLoader("jax_longctx.evaluation"),
            autoescape=name.endswith(".html"),
            trim_blocks=name.endswith(".md"),
            keep_trailing_newline=True,
        )
        pages.filters |= {"plain": plain, "text": table_text}
        write_whole(pages.get_template(name).render(facts, pictures=PICTURES), folder / name)
    return summary


def _facts(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Names and values of the run's facts; several values are joined."""

    def several(key: str) -> str:
        return ", ".join(dict.fromkeys(shown(row[key]) for row in rows if row.get(key)))

    def shown(value: Any) -> str:
        if isinstance(value, Mapping):
            return ", ".join(f"{name} {each}" for name, each in value.items())
        return str(value)

    facts = [
        ("model", several("checkpoint")),
        *((key, several(key)) for key in ("dtype", "device", "mesh")),
        ("prompts", "chat template" if rows[0].get("chat") else "plain completion"),
        ("seed", ", ".join(dict.fromkeys(str(row["seed"]) for row in rows if "seed" in row))),
        ("versions", several("versions")),
        ("rows", f"{len(rows):,}"),
    ]
    return [(name, value) for name, value in facts if value]
