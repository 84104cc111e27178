"""Where answers were found, at the terminal and as a picture (see `jax_longctx.sources`)."""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich.text import Text

from jax_longctx.evaluation.plots import Plot, drawing
from jax_longctx.sources import Found, Source

# Characters of a passage that are shown on either side of what was read most.
AROUND = 160
# Bars of a panel at most.
BARS = 400
_READ, _ASKED, _OTHER = "#0072b2", "#d55e00", "#999999"


def passages(found: Found) -> Iterator[Text]:
    """The passages as lines: share, place and text, with what was read most in bold."""
    for number, source in enumerate(found.sources, start=1):
        places = [f"page {source.page}"] if source.page is not None else []
        places += [f"characters {source.start:,} to {source.end:,}"]
        named = [] if source.document is None else [source.document]
        yield Text(f"{number}. {100 * source.score:.0f}%  {', '.join(named + places)}")
        yield _excerpt(source)


def _excerpt(source: Source) -> Text:
    """The passage on one line, its middle where it was read most."""
    first, last = source.best[0][0] - AROUND, source.best[-1][1] + AROUND
    begin, end = max(first - source.start, 0), min(last, source.end) - source.start
    shown = Text("   " + "... " * (begin > 0))
    runs = [(a - source.start, b - source.start) for a, b in source.best]
    at = begin
    for a, b in [*runs, (end, end)]:
        shown.append(re.sub(r"\s", " ", source.text[at:a]))
        shown.append(re.sub(r"\s", " ", source.text[a:b]), "bold not dim")
        at = max(at, b)
    return shown.append(" ..." * (end < len(source.text)))


@dataclasses.dataclass(frozen=True)
class Look:
    """An answer, and what it read.

    Attributes:
      title: question and answer.
      marks: places that are named: character, name, and whether it is the one that was asked for.
    """

    title: str
    found: Found
    marks: Sequence[tuple[int, str, bool]] = ()


def picture(looks: Sequence[Look]) -> Plot:
    """A panel for each answer: what it read of the text, by position."""
    from matplotlib.figure import Figure

    with drawing():
        figure = Figure(figsize=(9.0, 1.0 + 1.5 * len(looks)), layout="constrained")
        axes = figure.subplots(len(looks), 1, sharex=True, squeeze=False)[:, 0]
        for axis, look in zip(axes, looks, strict=True):
            _panel(axis, look)
        axes[-1].set_xlabel("position in the text (characters)")
        figure.supylabel("share of what the answer read", fontsize=9)
    return Plot("where answers were found", "", figure)


def _panel(axis: Any, look: Look) -> None:
    found, end = look.found, look.found.edges[-1]
    step = -(-len(found.shares) // BARS)
    edges = np.array([*found.edges[:-1:step], end])
    heights = np.add.reduceat(found.shares, np.arange(0, len(found.shares), step))
    axis.bar(edges[:-1], heights, np.diff(edges), align="edge", color=_READ)
    named = look.marks or [
        (each.start, str(number), True) for number, each in enumerate(found.sources, start=1)
    ]
    for level, (place, name, asked) in enumerate(sorted(named)):
        late, color = place > 0.85 * end, _ASKED if asked else _OTHER
        line = "-" if asked else ":"
        axis.axvline(place, color=color, linestyle=line, linewidth=1.2, zorder=0.5)
        axis.annotate(
            name,
            (place, 1.0),
            # A line for each: labels of close places would overlap.
            xytext=(-3 if late else 3, -2 - 11 * level),
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            horizontalalignment="right" if late else "left",
            verticalalignment="top",
            fontsize=8,
            color=color if asked else "#666666",
        )
    axis.set_xlim(0, end)
    axis.yaxis.set_major_formatter(lambda share, _: f"{100 * share:.0f}%")
    axis.set_title(look.title, loc="left")
