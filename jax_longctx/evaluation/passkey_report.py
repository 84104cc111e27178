"""Results of passkey runs as a Markdown table and as a heatmap over length and depth."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax_longctx.evaluation.intervals import wilson
from jax_longctx.evaluation.passkey import summary

__all__ = ["heatmap", "label", "markdown"]


def label(run: dict[str, Any]) -> str:
    """A method and the settings that were given: `citrus budget=1024`."""
    return " ".join([run["method"], *(f"{key}={value}" for key, value in run["given"].items())])


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """Methods by lengths: the share found in percent, its 95% Wilson interval, and n."""
    lengths = sorted({row["length"] for run in runs for row in run["rows"]})
    head = ["method", *(f"{length:,}" for length in lengths)]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for run in runs:
        counts = summary(run["rows"])
        cells = [_cell(*counts[length]) if length in counts else "-" for length in lengths]
        lines.append(" | ".join([f"`{label(run)}`", *cells]))
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def _cell(right: int, count: int) -> str:
    low, high = wilson(right, count)
    return f"{100 * right / count:.0f} [{100 * low:.0f}, {100 * high:.0f}] n={count}"


def heatmap(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """One panel a method, the share found by length (across) and depth (down), as a PNG."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(runs), figsize=(1.2 + 3.2 * len(runs), 4), squeeze=False, layout="constrained"
    )
    image = None
    for axis, run in zip(axes[0], runs, strict=True):
        lengths = sorted({row["length"] for row in run["rows"]})
        depths = sorted({row["depth"] for row in run["rows"]})
        grid = [[_share(run["rows"], length, depth) for length in lengths] for depth in depths]
        image = axis.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        for y, line in enumerate(grid):
            for x, share in enumerate(line):
                colour = "black" if share > 0.6 else "white"
                axis.text(
                    x, y, f"{100 * share:.0f}", ha="center", va="center", color=colour, size=7
                )
        axis.set_title(label(run), size=9)
        axis.set_xticks(range(len(lengths)), [f"{n // 1024}K" for n in lengths], size=8)
        axis.set_yticks(range(len(depths)), [f"{100 * d:.0f}%" for d in depths], size=8)
        axis.set_xlabel("tokens of text")
    axes[0][0].set_ylabel("depth of the pass key")
    if image is not None:
        figure.colorbar(image, ax=axes[0].tolist(), label="share found")
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _share(rows: Sequence[dict[str, Any]], length: int, depth: float) -> float:
    found = [row["right"] for row in rows if (row["length"], row["depth"]) == (length, depth)]
    return sum(found) / len(found) if found else float("nan")
