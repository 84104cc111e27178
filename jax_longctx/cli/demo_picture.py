"""The demo's picture: what ReAttention read while it answered, and where the facts stand."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from jax_longctx.evaluation.plots import Plot, drawing

# Tokens of a bar: as many as ReAttention reads around one.
BIN = 32
_CHOSEN, _ALWAYS, _ASKED, _OTHER = "#0072b2", "#b8d4e8", "#d55e00", "#999999"


@dataclasses.dataclass(frozen=True)
class Look:
    """One question, and where the method looked.

    Attributes:
      shares: of the answer's steps and all layers, the share that read each token of the text.
      right: whether the answer was.
    """

    question: str
    answer: str
    right: bool
    shares: Float[np.ndarray, " T"]


def picture(looks: Sequence[Look], places: Sequence[int]) -> Plot:
    """A panel for each question: shares by position, the asked fact's place and the others'.

    Args:
      places: of each question's fact, the tokens before it.
    """
    from matplotlib.figure import Figure

    with drawing():
        figure = Figure(figsize=(9.0, 1.0 + 1.5 * len(looks)), layout="constrained")
        axes = figure.subplots(len(looks), 1, sharex=True, squeeze=False)[:, 0]
        for number, (axis, look) in enumerate(zip(axes, looks, strict=True)):
            _panel(axis, look, places, number)
        axes[-1].set_xlabel("position in the text (tokens)")
        figure.supylabel("how often it was read (100%: by every layer at every step)", fontsize=9)
    return Plot("where ReAttention looked", "", figure)


def _panel(axis: Any, look: Look, places: Sequence[int], number: int) -> None:
    tokens = len(look.shares)
    edges = np.arange(0, tokens, BIN)
    widths = np.diff(np.append(edges, tokens))
    heights = np.add.reduceat(look.shares, edges) / widths
    # The first and the newest tokens: they are not chosen, every scope holds them.
    always = heights > 0.999
    axis.bar(edges, heights, widths, align="edge", color=np.where(always, _ALWAYS, _CHOSEN))
    for other, place in enumerate(places):
        asked, late = other == number, place > 0.85 * tokens
        axis.axvline(
            place,
            color=_ASKED if asked else _OTHER,
            linestyle="-" if asked else ":",
            linewidth=1.2,
            zorder=0.5,
        )
        axis.annotate(
            "the fact" if asked else "another fact",
            (place, 1.0),
            # A line for each: labels of close facts would overlap.
            xytext=(-3 if late else 3, -2 - 11 * sorted(places).index(place)),
            textcoords="offset points",
            horizontalalignment="right" if late else "left",
            verticalalignment="top",
            fontsize=8,
            color=_ASKED if asked else "#666666",
        )
    if always[-1]:
        newest = edges[np.flatnonzero(~always).max(initial=-1) + 1]
        axis.annotate(
            "always\nread",
            ((newest + tokens) / 2, 0.25),
            horizontalalignment="center",
            verticalalignment="center",
            fontsize=8,
            color="#333333",
        )
    axis.set_xlim(0, tokens)
    axis.set_ylim(0, 1)
    axis.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
    mark = "right" if look.right else "wrong"
    axis.set_title(f"{look.question}  ReAttention: {look.answer} ({mark})", loc="left")
