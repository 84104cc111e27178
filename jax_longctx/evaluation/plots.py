"""The plots of a report, as SVG in the page's own text colour, and as PNG.

Colours are Okabe and Ito's, which colour-blind people can distinguish. No plot depends on colour
alone: points have shapes, cells have numbers, curves have dashes.
"""

import dataclasses
import io
import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from jax_longctx.evaluation.summary import BASE, SCORE, Group, Row

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9")
_MARKERS = "osD^vPX<>"
_DASHES = ("-", "--", "-.", ":")
# Placeholders for the page's own colours, replaced in the SVG; no palette has them.
_INK, _PAPER = "#010203", "#fdfefc"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "jax_longctx",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9.5,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
}
PANELS_ACROSS = 4


@dataclasses.dataclass(frozen=True)
class Plot:
    """A figure (of matplotlib) and its caption."""

    name: str
    caption: str
    figure: Any

    @property
    def file(self) -> str:
        """File name of the PNG."""
        return f"{_slug(self.name)}.png"

    def svg(self) -> str:
        """The drawing, with `currentColor` for ink and ids that are unique in a page."""
        buffer = io.StringIO()
        with drawing():
            self.figure.savefig(buffer, format="svg", metadata={"Date": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :].replace(_INK, "currentColor")
        text = text.replace(_PAPER, "var(--paper, #fff)")
        prefix = _slug(self.name)
        return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{prefix}-", text)

    def png(self) -> bytes:
        """The drawing on white."""
        buffer = io.BytesIO()
        with drawing():
            self.figure.savefig(buffer, format="png", dpi=150, facecolor="white")
        return buffer.getvalue()


def _slug(name: str) -> str:
    return re.sub(r"\W+", "-", name)


def drawing() -> Any:
    """A context with this module's matplotlib style."""
    import matplotlib

    matplotlib.use("agg")
    return matplotlib.rc_context(_STYLE)


def panels(count: int, across: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure, and as many axes in rows of `across`."""
    from matplotlib.figure import Figure

    across = min(count, across)
    down = math.ceil(count / across)
    figure = Figure(figsize=(width * across + 1.0, height * down + 0.4), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    for axis in axes[count:]:
        axis.remove()
    return figure, axes[:count]


def heatmaps(rows: Sequence[Row]) -> list[Plot]:
    """Mean scores by depth of the answer in the prompt, for tasks whose rows have a depth.

    One panel a method, with lengths across and depths down. If all rows have one length, one panel
    with depths across and methods down.
    """
    plots = []
    scored = [r for r in rows if SCORE in r.get("measures", {}) and "depth" in r.get("meta", {})]
    for task in dict.fromkeys(row["task_label"] for row in scored):
        own = [row for row in scored if row["task_label"] == task]
        with drawing():
            plots.append(_heatmap(task, own))
    return plots


def _heatmap(task: str, rows: Sequence[Row]) -> Plot:
    lengths = sorted({row["length"] for row in rows})
    depths = sorted({_percent(row) for row in rows})
    methods = list(dict.fromkeys(row["label"] for row in rows))
    if len(lengths) == 1:
        figure, (axis,) = panels(1, 1, 1.6 + 0.55 * len(depths), 0.8 + 0.26 * len(methods))
        _cells(axis, rows, methods, depths, lambda row: (row["label"], _percent(row)))
        axis.set_yticks(range(len(methods)), methods)
        axis.set_xticks(range(len(depths)), [f"{depth}%" for depth in depths])
        axis.set_xlabel("depth")
        shown = f"{task} at {lengths[0]:,} tokens: mean score by method and depth"
        return Plot(f"heatmap {task}", shown, figure)
    figure, axes = panels(len(methods), PANELS_ACROSS, 2.6, 0.9 + 0.24 * len(depths))
    for axis, method in zip(axes, methods, strict=True):
        own = [row for row in rows if row["label"] == method]
        _cells(axis, own, depths, lengths, lambda row: (_percent(row), row["length"]))
        axis.set_title(method)
        axis.set_xticks(range(len(lengths)), [_tokens(length) for length in lengths])
        axis.set_yticks(range(len(depths)), [f"{depth}%" for depth in depths])
    return Plot(
        f"heatmap {task}", f"{task}: mean score by length (across) and depth (down)", figure
    )


def _percent(row: Row) -> int:
    return round(100 * row["meta"]["depth"])


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 and count % 1024 == 0 else f"{count:,}"


def _cells(axis: Any, rows: Sequence[Row], down: Sequence[Any], across: Sequence[Any], key: Any):
    """Means as shades with numbers; cells without rows stay empty."""
    found: dict[Any, list[float]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row["measures"][SCORE])
    means = {place: statistics.fmean(scores) for place, scores in found.items()}
    grid = [[means.get((y, x), math.nan) for x in across] for y in down]
    axis.imshow(grid, vmin=0, vmax=100, cmap="cividis", aspect="auto")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    for (y, line), (x, _) in itertools.product(enumerate(grid), enumerate(across)):
        if not math.isnan(line[x]):
            colour = "black" if line[x] > 60 else "white"
            axis.text(x, y, f"{line[x]:.0f}", ha="center", va="center", color=colour, size=7.5)


def pareto(group: Group) -> Plot | None:
    """Mean score against memory and against time; None if there is nothing to draw."""
    drawn: dict[str, dict[str, tuple[float, float]]] = {}
    for label, name, scale in (
        ("cache of a row while answering, MiB", "resident", 2**-20),
        ("read of it by a decode step, MiB", "read", 2**-20),
        ("time of a decode step, ms", "token", 1000),
    ):
        for method, mean in group.means.items():
            if cost := getattr(group.costs[method], name):
                drawn.setdefault(label, {})[method] = (scale * cost, mean)
    if not drawn:
        return None
    with drawing():
        figure, axes = panels(len(drawn), 3, 3.2, 3.0)
        for axis, (label, points) in zip(axes, drawn.items(), strict=True):
            _points(axis, points, group.methods)
            axis.set_xlabel(label)
            axis.grid(alpha=0.25, linewidth=0.5, color=_INK)
        axes[0].set_ylabel("mean score")
        handles, labels = axes[0].get_legend_handles_labels()
        columns = min(4, max(1, len(labels)))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns)
        lines = math.ceil(len(labels) / columns)
        figure.set_figheight(figure.get_figheight() + 0.2 * lines)
    return Plot(f"pareto {group.length}", f"At {group.length:,} tokens.", figure)


def _points(axis: Any, points: Mapping[str, tuple[float, float]], methods: Sequence[str]) -> None:
    """One marker a method, the same in all panels, and the line of the best."""
    from matplotlib import ticker

    for index, method in enumerate(methods):
        if method not in points:
            continue
        style = {"marker": _MARKERS[index % len(_MARKERS)], "color": _COLOURS[index % 6], "s": 34}
        if method == BASE:
            style = {"marker": "*", "color": _INK, "s": 90}
        axis.scatter(*points[method], label=method, linewidths=0, zorder=3, **style)
    front = best_of(list(points.values()))
    axis.plot(*zip(*front, strict=True), color=_INK, linewidth=0.8, drawstyle="steps-post")
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    axis.set_ylim(-4, 104)


def best_of(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points (cost, score) that beat every cheaper one, in order of cost."""
    front: list[tuple[float, float]] = []
    for cost, score in sorted(set(points), key=lambda point: (point[0], -point[1])):
        if not front or score > front[-1][1]:
            front.append((cost, score))
    return front


def curves(rows: Sequence[Row]) -> list[Plot]:
    """One plot for each curve of the rows over the position in the text, one line a method.

    Points of several rows at one position are averaged, weighted by their tokens.
    """
    plots = []
    found = [row for row in rows if row.get("curves")]
    names = dict.fromkeys(
        (r["task_label"], r["length"], name) for r in found for name in r["curves"]
    )
    for task, length, name in names:
        own = [r for r in found if (r["task_label"], r["length"]) == (task, length)]
        lines: dict[str, dict[float, list[tuple[float, float]]]] = {}
        for row in own:
            for position, value, weight in row["curves"].get(name, ()):
                line = lines.setdefault(row["label"], {})
                line.setdefault(position, []).append((value, weight))
        with drawing():
            plots.append(_curve(f"{task}, {length:,} tokens", name, lines))
    return plots


def _curve(
    title: str, name: str, lines: Mapping[str, Mapping[float, Sequence[tuple[float, float]]]]
) -> Plot:
    from matplotlib import ticker

    figure, (axis,) = panels(1, 1, 6.0, 3.4)
    for index, (method, points) in enumerate(lines.items()):
        places = sorted(points)
        means = [
            sum(value * weight for value, weight in points[place])
            / sum(weight for _, weight in points[place])
            for place in places
        ]
        if name == "perplexity":
            means = [math.exp(mean) for mean in means]
        # Each has its own colour, dashes and markers.
        style = {
            "color": _INK if method == BASE else _COLOURS[index % 6],
            "linestyle": _DASHES[index % 4],
            "marker": _MARKERS[index % 9],
        }
        axis.plot(places, means, label=method, linewidth=1.3, markersize=3.5, **style)
    axis.grid(visible=True, alpha=0.25, linewidth=0.5, color=_INK)
    axis.set(xlabel="position in the text, tokens", ylabel=name, yscale="log")
    # Plain numbers, also between powers of ten if few of these are in range.
    axis.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(ticker.LogFormatter())
    figure.legend(*axis.get_legend_handles_labels(), loc="outside right upper")
    return Plot(f"curve {name} {title}", f"{name} over the position: {title}", figure)
