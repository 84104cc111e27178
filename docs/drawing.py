"""A picture of rows of `bench decode`: measured bars beside limits."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jax_longctx.errors import InputError
from jax_longctx.files import save_figure
from jax_longctx.settings import named_text

Row = Mapping[str, Any]


def draw(rows: Sequence[Row], path: Path, *, title: str = "", description: str = "") -> None:
    """Draws a panel for each batch and context, or for each context, and a bar for each method.

    A bar is the time of a step, or tokens a second a device. The black line on it is the limit.

    Args:
      rows: those that failed are left out.
      description: kept in the PNG's metadata.

    Raises:
      InputError: every row failed.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels: dict[str, list[Row]] = {}
    for row in rows:
        if "seconds" in row:
            panels.setdefault(_panel(row), []).append(row)
    if not panels:
        raise InputError(f"nothing to draw in {path}: no row has a time")
    most = max(map(len, panels.values()))
    figure, axes = pyplot.subplots(
        1,
        len(panels),
        figsize=(1.5 + 4.5 * len(panels), 1.2 + 0.34 * most),
        squeeze=False,
        layout="constrained",
    )
    for ax, (name, part) in zip(axes[0], panels.items(), strict=True):
        bars = [_bar(row) for row in part]
        across = max(max(value, limit) for value, limit, _ in bars)
        for down, (value, limit, note) in enumerate(bars):
            ax.barh(down, value, height=0.7, color="#93c5fd")
            ax.plot([limit, limit], [down - 0.35, down + 0.35], color="black", linewidth=2)
            ax.text(max(value, limit) + across / 60, down, note, va="center", fontsize=7)
        ax.set_yticks(range(len(part)), [method_label(row) for row in part], fontsize=8)
        ax.invert_yaxis()
        ax.set_xlim(0, across * 1.3)
        ax.set_title(name, fontsize=9)
        ax.set_xlabel(_unit(part[0]), fontsize=8)
        ax.tick_params(axis="x", labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title, fontsize=9)
    save_figure(figure, path, dpi=120, metadata={"Description": description})
    pyplot.close(figure)


def method_label(row: Row) -> str:
    """A method with its settings; these are a dictionary, or text as `-m` takes it."""
    settings = row.get("settings") or ""
    if isinstance(settings, Mapping):
        return named_text(row["method"], settings)
    return row["method"] + (f":{settings}" if settings else "")


def _panel(row: Row) -> str:
    context = f"{row['context']:,} tokens"
    return context if "limit_tokens_per_second" in row else f"{row['batch']} x {context}"


def _unit(row: Row) -> str:
    if "limit_tokens_per_second" in row:
        return "tokens a second a device; line: what bytes allow"
    return "milliseconds a step; line: what bytes allow"


def _bar(row: Row) -> tuple[float, float, str]:
    """The bar's length, the limit and the note beside it."""
    if "limit_tokens_per_second" in row:
        speed = row["tokens_per_second"]
        return speed, row["limit_tokens_per_second"], f"{speed:,.0f}, {row['batch']} rows"
    milliseconds = row["seconds"] * 1e3
    return milliseconds, row["limit_seconds"] * 1e3, f"{milliseconds:.2f}, {row['share']:.0%}"


def draw_board(rows: Sequence[Row], path: Path, *, title: str, description: str) -> None:
    """Score over the bytes that a step reads, and over those of the cache, a point a method.

    Bars are 95% intervals.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(13, 6.5), sharey=True, layout="constrained")
    panels = {"read_bytes": "MiB that a decode step reads", "peak_bytes": "MiB of the cache"}
    for ax, (key, name) in zip(axes, panels.items(), strict=True):
        sizes = [row[key] / 2**20 for row in rows]
        left, right = min(sizes) / 1.3, max(sizes) * 1.6
        across = [math.log(size / left) / math.log(right / left) for size in sizes]
        for row, (x, y), size in zip(rows, _places(rows, across), sizes, strict=True):
            low, high = row["interval"]
            score, colour = row["score"], "#1d4ed8" if row["method"] == "full" else "#64748b"
            ends = [[score - low], [high - score]]
            ax.errorbar(size, score, ends, fmt="o", ms=5, lw=0.7, color=colour)
            ax.annotate(
                row["method"],
                (size, score),
                (x, y),
                textcoords="axes fraction",
                fontsize=8,
                va="center",
                color=colour,
                arrowprops={"arrowstyle": "-", "lw": 0.5, "color": "#94a3b8", "shrinkB": 4},
            )
        ax.set_xscale("log", base=2)
        ticks = [2**power for power in range(20) if left < 2**power < right]
        ax.set_xticks(ticks, [f"{tick}" for tick in ticks], fontsize=8)
        ax.set_xlim(left, right)
        ax.set_ylim(0, 100)
        ax.set_xlabel(name, fontsize=9)
        ax.grid(alpha=0.2)
        ax.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("mean score of five tasks", fontsize=9)
    figure.suptitle(title, fontsize=10)
    save_figure(figure, path, dpi=110, metadata={"Description": description})
    pyplot.close(figure)


def _places(rows: Sequence[Row], across: Sequence[float]) -> list[tuple[float, float]]:
    """Where names of points begin, in shares of the panel: near, on no bar and no other name."""
    taken = [
        (x - 0.006, row["interval"][0] / 100, x + 0.006, row["interval"][1] / 100)
        for row, x in zip(rows, across, strict=True)
    ]
    found = []
    steps = [0.03 * step * sign for step in range(30) for sign in (1, -1)]
    for row, x in zip(rows, across, strict=True):
        wide = 0.0125 * len(row["method"])
        boxes = [
            (begin, row["score"] / 100 + up - 0.014, begin + wide, row["score"] / 100 + up + 0.014)
            for up in steps
            for begin in (x + 0.02, x - 0.02 - wide)
        ]
        free = (
            box
            for box in boxes
            if 0 <= box[0] and box[2] <= 1 and 0 <= box[1] and box[3] <= 1
            if not any(
                box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
                for other in taken
            )
        )
        box = next(free, boxes[0])
        taken.append(box)
        found.append((box[0], (box[1] + box[3]) / 2))
    return found
