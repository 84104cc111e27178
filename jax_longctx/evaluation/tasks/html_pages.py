"""Web pages with a table's worth of records in them: as a table, as nested blocks, as lists.

What a page says besides is what pages are full of: navigation, scripts, advertisements, comments, a
footer. Names of classes are drawn for each page, so that they say nothing; the words for boxes and
menus are not used for records, and records' elements are used for nothing else.
"""

import dataclasses
import html
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from jax_longctx.evaluation.tasks.words import ADJECTIVES, NOUNS, VERBS, invented_name

__all__ = ["BLANK", "LAYOUTS", "Condition", "Page"]

# What a blank cell is in a table of results.
BLANK = "N/A"
LAYOUTS: tuple[Literal["table", "blocks", "list"], ...] = ("table", "blocks", "list")
_BLANK_SHARE = 0.04
# Each column's values; all but `Name` may be left out of a page.
_COLUMNS: dict[str, Callable[[random.Random], str]] = {
    "Price": lambda draw: f"${draw.randrange(500, 50_000) / 100:.2f}",
    "Rating": lambda draw: f"{draw.randrange(10, 51) / 10:.1f}",
    "City": lambda draw: invented_name(draw),
    "Date": lambda draw: (
        f"{draw.randrange(1990, 2025)}-{draw.randrange(1, 13):02}-{draw.randrange(1, 29):02}"
    ),
    "SKU": lambda draw: f"{draw.choice(NOUNS)[:2].upper()}-{draw.randrange(1000, 10_000)}",
    "Stock": lambda draw: str(draw.randrange(0, 900)),
}
_NUMBERS = ("Price", "Rating", "Stock")


@dataclasses.dataclass(frozen=True)
class Condition:
    """Which rows are asked for: those whose number is below a bound, or at least it."""

    column: str
    below: bool
    bound: float

    def holds(self, value: str) -> bool:
        """Whether a cell's number does; a blank one never does."""
        if value == BLANK:
            return False
        return (float(value.lstrip("$")) < self.bound) == self.below

    def __str__(self) -> str:
        return f"{self.column} is {'below' if self.below else 'at least'} {self.bound:g}"


class Page:
    """Records of one schema, as many as are asked for, in a page as long as is asked for.

    Attributes:
      columns: the schema, `Name` first.
      layout: how records are written.
      condition: which rows are asked for, where not all.
    """

    def __init__(self, draw: random.Random, filtered: bool):
        # Records and the rest are drawn apart: how much there is of one moves nothing of the other.
        self._draw, self._words = draw, random.Random(draw.random())
        others = draw.sample(list(_COLUMNS), draw.randrange(2, 6))
        if filtered and not set(others) & set(_NUMBERS):
            others[0] = draw.choice(_NUMBERS)
        self.columns = ["Name", *others]
        self.layout = draw.choice(LAYOUTS)
        self.condition = self._drawn_condition() if filtered else None
        self._classes = draw.sample(range(100, 1000), 20)
        self._title = f"{draw.choice(ADJECTIVES)} {draw.choice(NOUNS)} shop".title()
        self._names: set[str] = set()
        self._records: list[list[str]] = []
        self._boilerplate: list[str] = []

    def _drawn_condition(self) -> Condition:
        column = self._draw.choice([name for name in self.columns if name in _NUMBERS])
        values = sorted(float(_COLUMNS[column](self._draw).lstrip("$")) for _ in range(9))
        return Condition(column, self._draw.random() < 0.5, values[4])

    def records(self, number: int) -> list[list[str]]:
        """The cells of the first records of the page."""
        while len(self._records) < number:
            name = f"{self._draw.choice(ADJECTIVES)} {self._draw.choice(NOUNS)}".title()
            if name in self._names:
                name = f"{name} {len(self._names)}"
            self._names.add(name)
            cells = [_COLUMNS[column](self._draw) for column in self.columns[1:]]
            blank = [self._draw.random() < _BLANK_SHARE for _ in cells]
            cells = [BLANK if b else cell for b, cell in zip(blank, cells, strict=True)]
            self._records.append([name, *cells])
        return self._records[:number]

    def rows(self, number: int) -> list[list[str]]:
        """The records among them that are asked for."""
        if self.condition is None:
            return self.records(number)
        at = self.columns.index(self.condition.column)
        return [cells for cells in self.records(number) if self.condition.holds(cells[at])]

    def text(self, number: int, extra: int) -> str:
        """The page with so many records and pieces of boilerplate, half of these behind."""
        while len(self._boilerplate) < extra:
            self._boilerplate.append(self._piece())
        around = self._boilerplate[:extra]
        half = (extra + 1) // 2
        body = "\n".join((*around[:half], self._written(number), *around[half:]))
        return (
            f"<!DOCTYPE html>\n<html>\n<head><title>{self._title}</title></head>\n"
            f"<body>\n{body}\n</body>\n</html>"
        )

    def _written(self, number: int) -> str:
        write = {"table": _as_table, "blocks": _as_blocks, "list": _as_list}[self.layout]
        cells = [
            ["" if cell == BLANK else html.escape(cell) for cell in cells]
            for cells in self.records(number)
        ]
        return "\n".join(write(self.columns, cells, [f"c{each}" for each in self._classes]))

    def _piece(self) -> str:
        """One more piece of what pages are full of."""
        draw = self._words
        one, two = draw.choice(NOUNS), draw.choice(VERBS)
        style = f"b{draw.randrange(100, 1000)}"
        kinds = (
            f'<nav class="{style}"><a href="/{one}">{one.title()}</a> '
            f'<a href="/{two}">{two.title()}</a></nav>',
            f'<script>window.{style} = {{"{one}": {draw.randrange(1000)}}};</script>',
            f'<aside class="{style}">{two.title()} a {draw.choice(ADJECTIVES)} {one}!</aside>',
            f"<!-- {two} {one} {draw.randrange(1000)} -->",
            f'<p class="{style}">We {two} every {one} with care.</p>',
            f'<img src="/{one}/{draw.randrange(1000)}.png" alt="{one}" class="{style}">',
        )
        return draw.choice(kinds)


def _as_table(
    columns: Sequence[str], records: Sequence[Sequence[str]], classes: Sequence[str]
) -> Iterator[str]:
    yield f'<table class="{classes[0]}">'
    yield "<tr>" + "".join(f"<th>{column}</th>" for column in columns) + "</tr>"
    for cells in records:
        inner = "".join(
            f'<td class="{style}">{cell}</td>'
            for style, cell in zip(classes[2:], cells, strict=False)
        )
        yield f'<tr class="{classes[1]}">{inner}</tr>'
    yield "</table>"


def _as_blocks(
    columns: Sequence[str], records: Sequence[Sequence[str]], classes: Sequence[str]
) -> Iterator[str]:
    for name, *cells in records:
        yield f'<div class="{classes[0]}"><h3 class="{classes[1]}">{name}</h3>'
        for style, column, cell in zip(classes[2:], columns[1:], cells, strict=False):
            yield f'<div class="{style}"><b>{column}:</b> <span>{cell}</span></div>'
        yield "</div>"


def _as_list(
    columns: Sequence[str], records: Sequence[Sequence[str]], classes: Sequence[str]
) -> Iterator[str]:
    for cells in records:
        yield f'<dl class="{classes[0]}">'
        for style, column, cell in zip(classes[1:], columns, cells, strict=False):
            yield f'<dt>{column}</dt><dd class="{style}">{cell}</dd>'
        yield "</dl>"
