"""Perplexities of several methods on the same texts: a Markdown table, and curves over positions.

A run is a JSON-able record: `method`, `given` settings, `question`, `ahead`, `score` (tokens),
`means` (nll of every text), `windows` (first and last position, nll of every text there),
`read_seconds` and `score_seconds` of every batch, and `batch`.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jax_longctx.evaluation.intervals import bootstrap
from jax_longctx.evaluation.perplexity import perplexity

__all__ = ["label", "markdown", "plot", "shown_interval"]

# Told apart without colours by their dashes and marks; colours after Okabe and Ito 2008.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DASHES = ("-", "--", "-.", ":")
MARKS = "osD^vP*X"
AHEAD = " \\*"


def label(run: dict[str, Any]) -> str:
    """A method, the settings that were given, and the question that it read the text for."""
    parts = [run["method"], *(f"{key}={value}" for key, value in run["given"].items())]
    if run.get("question"):
        parts.append(f"({run['question']})")
    return " ".join(parts)


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """One line a run: perplexity with its interval, against full attention, and the time it took.

    Differences are to the first run by full attention, on the same texts; "-" without one.
    """
    head = ["method", "perplexity", "mean of texts", "of full attention's", "nats a token more"]
    head += ["read, s", "scored, ms a token"]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    base = next((run for run in runs if run["method"] == "full"), None)
    for run in runs:
        means = np.array(run["means"])
        pooled, low, high = map(_exp, bootstrap(means))
        name = f"`{label(run)}`" + (AHEAD if run["ahead"] else "")
        cells = [name, shown_interval(pooled, low, high, ".3f"), f"{_exp(means).mean():.3f}"]
        if base is None or run is base:
            cells += ["-", "-"]
        else:
            more = bootstrap(means - np.array(base["means"]))
            ratio, least, most = map(_exp, more)
            cells += [shown_interval(ratio, least, most, ".4f"), shown_interval(*more, "+.4f")]
        tokens = run["batch"] * run["score"]
        cells += [f"{_typical(run['read_seconds']):.1f}"]
        cells += [f"{1000 * _typical(run['score_seconds']) / tokens:.2f}"]
        lines.append(" | ".join(cells))
    table = "\n".join(f"| {line} |" for line in lines) + "\n"
    notes = [_scope(runs[0])] if runs else []
    if any(run["ahead"] for run in runs):
        notes.append(
            "\\* tokens that were read together chose together what they attend: not predictions."
        )
    return "\n".join([table, *notes]) + "\n"


def _exp(value: Any) -> Any:
    return np.exp(np.asarray(value, np.float64))


def shown_interval(value: float, low: float, high: float, form: str) -> str:
    """`1.5 [1.2, 1.8]` in a number format; the value alone where the ends are NaN."""
    if math.isnan(low):
        return f"{value:{form}}"
    return f"{value:{form}} [{low:{form}}, {high:{form}}]"


def _typical(seconds: Sequence[float]) -> float:
    """The median of the batches; without the first, which compiles, where there are others."""
    return float(np.median(seconds[1:] or seconds))


def _scope(run: dict[str, Any]) -> str:
    texts = len(run["means"])
    kind = "95% by a paired bootstrap over texts" if texts > 1 else "one text has no interval"
    return (
        f"{run['protocol']}: {run['score']:,} of {run['length']:,} tokens scored, n = {texts} "
        f"texts; {kind}. Times are medians of batches of {run['batch']}."
    )


def plot(runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Perplexity over the position of the scored tokens, and its ratio to full attention's."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot, ticker

    base = next((run for run in runs if run["method"] == "full"), None)
    panels = 1 if base is None or len(runs) == 1 else 2
    figure, axes = pyplot.subplots(
        panels, 1, figsize=(8, 3.6 * panels), squeeze=False, sharex=True, layout="constrained"
    )
    for number, run in enumerate(runs):
        at, curve = _curve(run)
        style = {
            "color": COLOURS[number % len(COLOURS)],
            "linestyle": DASHES[number % len(DASHES)],
            "marker": MARKS[number % len(MARKS)],
            "markersize": 4,
            "label": label(run) + ("*" if run["ahead"] else ""),
        }
        axes[0][0].plot(at, curve, **style)
        if panels == 2 and base is not None:
            axes[1][0].plot(at, np.array(curve) / np.array(_curve(base)[1]), **style)
    axes[0][0].set_ylabel("perplexity")
    axes[0][0].set_yscale("log")
    # Plain numbers; those between powers of ten where few of these are in sight.
    axes[0][0].yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axes[0][0].yaxis.set_minor_formatter(ticker.LogFormatter())
    axes[0][0].legend(fontsize=7)
    if panels == 2:
        axes[1][0].set_ylabel("ratio to full attention")
    axes[-1][0].set_xlabel("position of the scored tokens")
    for axis in axes[:, 0]:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _curve(run: dict[str, Any]) -> tuple[list[float], list[float]]:
    """The middle of every window and the perplexity in it, pooled over texts."""
    at = [(first + last) / 2 for first, last, _ in run["windows"]]
    return at, [perplexity(losses) for _, _, losses in run["windows"]]
