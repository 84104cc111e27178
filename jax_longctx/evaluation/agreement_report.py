"""Agreement with full attention as a Markdown table.

A run is a JSON-able record: `method` and `given` settings; `kl` and `same`, means of every text;
`attention`, a record of every text with `mass`, `recall`, `attended` and `entropy` by layer, or
None; and of all `length`, `score`, `queries`, `top`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from jax_longctx.evaluation.intervals import bootstrap
from jax_longctx.evaluation.perplexity_report import label, shown_interval

__all__ = ["markdown"]


def markdown(runs: Sequence[dict[str, Any]]) -> str:
    """One line a run: divergence, agreement, and what of full attention's weights is attended."""
    top = runs[0]["top"]
    head = ["method", "KL, nats", "same best token, %", "attended tokens", "mass kept, %"]
    head += [f"recall of the best {top}, %", "entropy, nats"]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for run in runs:
        cells = [f"`{label(run)}`", shown_interval(*bootstrap(np.array(run["kl"])), ".4f")]
        cells.append(shown_interval(*bootstrap(100 * np.array(run["same"])), ".1f"))
        if run["attention"] is None:
            cells += ["-"] * 4
        else:
            cells += [
                f"{_mean(run, 'attended'):,.1f}",
                f"{100 * _mean(run, 'mass'):.2f}",
                f"{100 * _mean(run, 'recall'):.1f}",
                f"{_mean(run, 'entropy'):.3f}",
            ]
        lines.append(" | ".join(cells))
    table = "\n".join(f"| {line} |" for line in lines)
    run = runs[0]
    note = (
        f"{len(run['kl'])} texts of {run['length']:,} tokens, the last {run['score']} decoded; "
        f"intervals: 95%, bootstrap over texts. "
    )
    if any(run["attention"] is not None for run in runs):
        note += (
            f"Attention: means over layers, heads and the newest {run['queries']} queries; mass "
            f"and recall are of full attention's own weights."
        )
    return f"{table}\n\n{note.rstrip()}\n"


def _mean(run: dict[str, Any], name: str) -> float:
    return float(np.mean([text[name] for text in run["attention"]]))
