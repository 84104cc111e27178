"""HTML to TSV: a page's records as rows of a table, scored as LongProc scores them.

After LongProc (Ye et al. 2025), which RefreshKV uses: a long page, a long answer, every row of it
from another place. LongProc's pages are real ones and belong to others; `html_tsv_syn`'s are made
up (see `html_pages`), so its scores compare with no published ones. `score_table` is LongProc's
scorer.
"""

import csv
import dataclasses
import functools
import re
import string
from collections.abc import Iterator, Sequence

from jax_longctx.errors import ConfigError, LengthError
from jax_longctx.evaluation.fitting import most_units
from jax_longctx.evaluation.tasks.html_pages import Page
from jax_longctx.evaluation.tasks.task import (
    Count,
    PlainTask,
    Sample,
    at_least,
    context_room,
    fixed,
    make_sample,
    sample_draw,
)

__all__ = ["HtmlTsv", "score_table"]

INTRO = "Below is the source of a web page that lists records. It is to be made a table of.\n\n"
FORMAT = (
    "Write the {what} of the page above as tab-separated values with the columns {columns}. One "
    "line a record, in the page's order. Where the page leaves a value blank write N/A. Keep "
    "values as the page has them, currency signs included, without tags. Write nothing else."
)
_FENCED = re.compile(r"```tsv([\s\S]*)```")
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class HtmlTsv(PlainTask):
    """HTML to TSV: a made-up page's records as a table.

    Attributes:
      output: about how many tokens the right table has; the page has the rest.
      filtered: whether only some records are asked for.
    """

    name: str = fixed("html_tsv_syn")
    metric: str = fixed("F1 of rows")
    stop: tuple[str, ...] = fixed(("\n```",))

    output: int = 500
    filtered: bool = False
    max_new: int = 600

    def __post_init__(self):
        at_least(1, output=self.output, max_new=self.max_new)
        if self.max_new < self.output:
            raise ConfigError(
                f"max_new must be at least output = {self.output}, got {self.max_new}"
            )

    def samples(self, count: Count, *, tokens: int, trials: int, seed: int) -> Iterator[Sample]:
        """See `Task`."""
        for index in range(trials):
            draw = sample_draw(self.name, seed, tokens, index)
            page = Page(draw, self.filtered)
            header = "\t".join(page.columns)
            what = "records" if page.condition is None else f"records whose {page.condition}"
            query = "\n\n" + FORMAT.format(what=what, columns=", ".join(page.columns))
            prefix = f"\n\n```tsv\n{header}"
            room = context_room(count, query + prefix, self.max_new, tokens)

            records = _most_records(count, page, self.output, room)
            if not page.rows(records):
                raise LengthError(f"{tokens} tokens are too few for a record; ask for more")
            fitted = most_units(count, functools.partial(_source, page, records), room, fewest=0)
            yield make_sample(
                count,
                index=index,
                context=fitted.text,
                tokens=fitted.tokens,
                query=query,
                answer_prefix=prefix,
                outputs=(_table([page.columns, *page.rows(records)]),),
                max_new=self.max_new,
                meta={"layout": page.layout, "records": records},
            )

    def score(self, answer: str, sample: Sample) -> float:
        """F1 of rows, in any order."""
        return self._scores(answer, sample)["f1"]

    def parts(self, answer: str, sample: Sample) -> dict[str, float]:
        """Precision and recall."""
        scores = self._scores(answer, sample)
        return {"precision": scores["precision"], "recall": scores["recall"]}

    def _scores(self, answer: str, sample: Sample) -> dict[str, float]:
        return score_table(sample.answer_prefix.strip() + answer, sample.outputs[0])


def _source(page: Page, records: int, extra: int) -> str:
    """The context: the page with so many records and pieces of boilerplate."""
    return f"{INTRO}```html\n{page.text(records, extra)}\n```"


def _most_records(count: Count, page: Page, output: int, room: int) -> int:
    """How many records a table of at most `output` tokens, and a page of `room` tokens, have."""
    rows = most_units(count, lambda n: _table([page.columns, *page.rows(n)]), output).units
    return most_units(count, lambda n: _source(page, n, 0), room, limit=rows).units


def _table(rows: Sequence[Sequence[str]]) -> str:
    return "\n".join("\t".join(cells) for cells in rows)


def score_table(answer: str, gold: str) -> dict[str, float]:
    """LongProc's `f1`, `precision` and `recall` of the rows of a table in tab-separated values.

    The table is what stands between "```tsv" and the last "```"; behind the former where no fence
    closes it; without one the whole answer. Its first line is the header, of which only the width
    counts. A last row of another width is dropped, any other such row is all "N/A". Cells are
    compared without case, punctuation, articles and white space; rows in any order, and one row
    may match several. Tables of different widths, or without rows, score 0.
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
    """The rows behind the header, their cells normalised; none where the text is no table."""
    try:
        header, *rows = csv.reader(text.strip().split("\n"), delimiter="\t")
    except (csv.Error, ValueError):
        return []
    if rows and len(rows[-1]) != len(header):
        rows = rows[:-1]
    whole = [row if len(row) == len(header) else ["N/A"] * len(header) for row in rows]
    return [tuple(map(_normalized, row)) for row in whole]


def _normalized(cell: str) -> str:
    bare = "".join(letter for letter in cell.lower() if letter not in string.punctuation)
    return "".join(_ARTICLES.sub(" ", bare).split())
