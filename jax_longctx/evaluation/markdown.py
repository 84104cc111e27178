"""A report's tables as Markdown."""

from collections.abc import Sequence

from jax_longctx.evaluation.sections import Section
from jax_longctx.evaluation.tables import Cell, Table

__all__ = ["document", "table_text"]


def document(
    title: str,
    about: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[Section],
    pictures: str,
) -> str:
    """The whole report; plots lie in the folder `pictures` beside it."""
    parts = [f"# {title}", about.strip(), "\n".join(f"- {name}: {value}" for name, value in facts)]
    for section in sections:
        if section.tables or section.plots:
            parts += [f"## {section.title}", section.note]
        for table in section.tables:
            parts += [f"### {table.title}", table.note, table_text(table)]
        for plot in section.plots:
            parts += [f"![{_plain(plot.caption)}]({pictures}/{plot.file})", plot.caption]
    return "\n\n".join(part for part in parts if part) + "\n"


def table_text(table: Table) -> str:
    """Head, rule and rows; a cell's notes follow its figure."""
    rule = "|".join(["---", *("---:" for _ in table.head[1:])])
    lines = [_line(table.head), f"|{rule}|", *map(_line, table.rows)]
    return "\n".join(lines)


def _line(cells: Sequence[Cell]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(cell: Cell) -> str:
    figure = f"*{_plain(cell.text)}*" if cell.kind == "theirs" else _plain(cell.text)
    return " ".join([figure, *map(_plain, cell.notes)])


def _plain(text: str) -> str:
    """Text that is no markup of a table."""
    for sign in "\\|*_`":
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())
