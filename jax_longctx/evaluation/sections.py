"""A report's parts in their order: which tables and plots stand under which heading."""

import dataclasses
from collections.abc import Sequence

from jax_longctx.evaluation.plots import Plot, curves, heatmaps, pareto
from jax_longctx.evaluation.published import PUBLISHED
from jax_longctx.evaluation.summary import Row, Summary
from jax_longctx.evaluation.tables import (
    ENOUGH,
    TIMES,
    Table,
    cost_table,
    other_tables,
    published_table,
    refused_table,
    score_table,
)

__all__ = ["Section", "make_sections"]


@dataclasses.dataclass(frozen=True)
class Section:
    """A heading, how to read what follows, and tables and plots, none of which there may be."""

    title: str
    note: str = ""
    tables: list[Table] = dataclasses.field(default_factory=list)
    plots: list[Plot] = dataclasses.field(default_factory=list)


def make_sections(
    rows: Sequence[Row], summary: Summary, published: Sequence[str] = ()
) -> list[Section]:
    """All of a report; `published` names the papers whose figures are shown."""
    scores = [score_table(group, summary) for group in summary.groups]
    fronts = [plot for group in summary.groups if (plot := pareto(group)) is not None]
    theirs = [
        published_table(table, summary) for table in PUBLISHED if table.paper in set(published)
    ]
    return [
        Section(
            "Scores",
            "Out of 100, with 95% intervals: Wilson's where every answer is right or wrong, else "
            "of a bootstrap. Below it, the difference from full attention on the same prompts "
            "with the interval of the pairs: ▼ or ▲ where that leaves out 0. † full attention is "
            f"not known to reach {ENOUGH} there, so the column says little about the methods.",
            # A method's name and its mean alone are no scores.
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
            "Figures in italics are theirs, of other models, prompts and texts than ours: what to "
            "compare is how far apart methods are, not one row with the next.",
            theirs,
        ),
        Section(
            "Refused",
            "Prompts that were not answered; none was cut to fit.",
            [refused_table(summary)] if summary.refused else [],
        ),
    ]
