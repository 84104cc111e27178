"""HTML to TSV: a page's records as rows of a table, scored as LongProc scores them.

After LongProc (Ye et al. 2025), which RefreshKV uses: a long page and a long answer, each row of it
from another place. LongProc's pages are real and belong to others; those of `html_tsv_syn` are
generated, so its scores compare with no published ones. `score_table` is LongProc's scorer.

A page writes its records as a table, as nested blocks or as lists. The rest is boilerplate:
navigation, scripts, advertisements, comments. Class names are random numbers. Records and
boilerplate use different elements.
"""

import csv
import dataclasses
import html
import random
import re
from collections.abc import Callable
from typing import Literal

from jax_longctx.errors import ConfigError, LengthError
from jax_longctx.evaluation.haystack import most_units
from jax_longctx.evaluation.metrics import normalize
from jax_longctx.evaluation.tasks.task import Count, Sample, Task, fixed
from jax_longctx.evaluation.tasks.words import ADJECTIVES, NOUNS, VERBS, invented_name

# A blank cell in the right table.
BLANK = "N/A"
LAYOUTS: tuple[Literal["table", "blocks", "list"], ...] = ("table", "blocks", "list")
_BLANK_SHARE = 0.04
# Values of the columns beside `Name`; a page has some of them.
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


class Page:
    """A web page of records of one schema; records and boilerplate are drawn as needed.

    Attributes:
      columns: the schema, `Name` first.
      layout: how records are written.
    """

    def __init__(self, draw: random.Random):
        # Two generators, so that the number of records does not change the boilerplate.
        self._draw, self._words = draw, random.Random(draw.random())
        others = draw.sample(list(_COLUMNS), draw.randrange(2, 6))
        self.columns = ["Name", *others]
        self.layout = draw.choice(LAYOUTS)
        self._classes = draw.sample(range(100, 1000), 20)
        self._title = f"{draw.choice(ADJECTIVES)} {draw.choice(NOUNS)} shop".title()
        self._names: set[str] = set()
        self._records: list[list[str]] = []
        self._boilerplate: list[str] = []

    def records(self, number: int) -> list[list[str]]:
        """The cells of the first records of the page."""
        while len(self._records) < number:
            name = f"{self._draw.choice(ADJECTIVES)} {self._draw.choice(NOUNS)}".title()
            if name in self._names:
                name = f"{name} {len(self._names)}"
            self._names.add(name)
            cells = [_COLUMNS[column](self._draw) for column in self.columns[1:]]
            kept = [BLANK if self._draw.random() < _BLANK_SHARE else cell for cell in cells]
            self._records.append([name, *kept])
        return self._records[:number]

    def text(self, number: int, extra: int) -> str:
        """The page with `number` records between `extra` pieces of boilerplate."""
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
        """The records, in the page's layout."""
        columns, styles = self.columns, [f"c{each}" for each in self._classes]
        lines = []
        for record in self.records(number):
            cells = ["" if cell == BLANK else html.escape(cell) for cell in record]
            if self.layout == "table":
                pairs = zip(styles[2:], cells, strict=False)
                inner = "".join(f'<td class="{style}">{cell}</td>' for style, cell in pairs)
                lines.append(f'<tr class="{styles[1]}">{inner}</tr>')
            elif self.layout == "blocks":
                lines.append(f'<div class="{styles[0]}"><h3 class="{styles[1]}">{cells[0]}</h3>')
                for style, column, cell in zip(styles[2:], columns[1:], cells[1:], strict=False):
                    lines.append(f'<div class="{style}"><b>{column}:</b> <span>{cell}</span></div>')
                lines.append("</div>")
            else:
                lines.append(f'<dl class="{styles[0]}">')
                for style, column, cell in zip(styles[1:], columns, cells, strict=False):
                    lines.append(f'<dt>{column}</dt><dd class="{style}">{cell}</dd>')
                lines.append("</dl>")
        if self.layout == "table":
            head = "".join(f"<th>{column}</th>" for column in columns)
            lines = [f'<table class="{styles[0]}">', f"<tr>{head}</tr>", *lines, "</table>"]
        return "\n".join(lines)

    def _piece(self) -> str:
        """A piece of boilerplate."""
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


INTRO = "Below is the source of a web page that lists records. It is to be made a table of.\n\n"
FORMAT = (
    "Write the records of the page above as tab-separated values with the columns {columns}. One "
    "line a record, in the page's order. Where the page leaves a value blank write N/A. Keep "
    "values as the page has them, currency signs included, without tags. Write nothing else."
)
_FENCED = re.compile(r"```tsv([\s\S]*)```")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HtmlTsv(Task):
    """HTML to TSV: a made-up page's records as a table.

    Attributes:
      output: about how many tokens the right table has; the page has the rest.
    """

    name: str = fixed("html_tsv_syn")
    metric: str = fixed("F1 of rows")
    stop: tuple[str, ...] = fixed(("\n```",))

    output: int = 500
    max_new: int = 600

    def __post_init__(self):
        super().__post_init__()
        if self.max_new < self.output:
            raise ConfigError(
                f"max_new must be at least output = {self.output}, got {self.max_new}"
            )

    def sample(self, count: Count, draw: random.Random, index: int, tokens: int) -> Sample:
        """A page of the most records that fit table and prompt, filled with boilerplate."""
        page = Page(draw)
        header = "\t".join(page.columns)
        query = "\n\n" + FORMAT.format(columns=", ".join(page.columns))
        prefix = f"\n\n```tsv\n{header}"
        room = self.room(count, query + prefix, tokens)

        def table(number: int) -> str:
            return "\n".join("\t".join(cells) for cells in [page.columns, *page.records(number)])

        def source(number: int, extra: int) -> str:
            return f"{INTRO}```html\n{page.text(number, extra)}\n```"

        rows = most_units(count, table, self.output).units
        records = most_units(count, lambda n: source(n, 0), room, limit=rows).units
        if records < 1:
            raise LengthError(f"{tokens} tokens are too few for a record; ask for more")
        fitted = most_units(count, lambda extra: source(records, extra), room, fewest=0)
        meta = {"layout": page.layout, "records": records}
        return self.made(count, index, fitted, query, prefix, (table(records),), **meta)

    def score(self, answer: str, sample: Sample) -> float:
        """F1 of rows, in any order."""
        return score_table(sample.answer_prefix.strip() + answer, sample.outputs[0])["f1"]

    def parts(self, answer: str, sample: Sample) -> dict[str, float]:
        """Precision and recall."""
        scores = score_table(sample.answer_prefix.strip() + answer, sample.outputs[0])
        return {"precision": scores["precision"], "recall": scores["recall"]}


def score_table(answer: str, gold: str) -> dict[str, float]:
    """LongProc's `f1`, `precision` and `recall` of the rows of a table in tab-separated values.

    The table is the text between "```tsv" and the last "```", or the end; without "```tsv" it is
    the whole answer. The first line is the header; only its width counts. A last row of another
    width is dropped; any other such row becomes all "N/A". Cells are compared without case,
    punctuation, articles and white space. Rows may come in any order, and one row may match
    several. Tables of different widths, or without rows, score 0.
    """
    found = _FENCED.search(answer)
    inner = found[1] if found else answer.split("```tsv")[1] if "```tsv" in answer else answer
    ours, theirs = _parsed(inner), _parsed(gold)
    if not ours or not theirs or len(ours[0]) != len(theirs[0]):
        return {"f1": 0.0, "precision": 0.0, "recall": 0.0}
    precision = sum(row in theirs for row in ours) / len(ours)
    recall = sum(row in ours for row in theirs) / len(theirs)
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return {"f1": 100 * f1, "precision": 100 * precision, "recall": 100 * recall}


def _parsed(text: str) -> list[tuple[str, ...]]:
    """The rows after the header, with normalised cells; none if the text is not a table."""
    try:
        header, *rows = csv.reader(text.strip().split("\n"), delimiter="\t")
    except (csv.Error, ValueError):
        return []
    if rows and len(rows[-1]) != len(header):
        rows = rows[:-1]
    whole = [row if len(row) == len(header) else ["N/A"] * len(header) for row in rows]
    return [tuple("".join(normalize(cell).split()) for cell in row) for row in whole]
