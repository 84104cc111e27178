"""Runs of `eval perplexity` as rows of a report: a text a row, its nats a token by position."""

from collections.abc import Mapping
from typing import Any

from jax_longctx.evaluation.perplexity_report import label

__all__ = ["perplexity_rows"]


def perplexity_rows(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of one run; methods are paired by the number of the text.

    A method that chose by the scored tokens themselves is marked with an asterisk.

    Raises:
      KeyError, TypeError: `run` is no record of `eval perplexity`.
    """
    name = label(dict(run)) + ("*" if run["ahead"] else "")
    common = {
        "label": name,
        "task_label": f"perplexity {run['protocol']}",
        "length": run["length"],
        "method": {"name": run["method"], "settings": run["settings"]},
        "task": {"name": "perplexity", "settings": {"protocol": run["protocol"]}},
        "metric": f"nats a token of {run['score']:,}",
        "rows": run["batch"],
        **{key: run[key] for key in ("device", "mesh", "versions")},
    }
    return [
        common
        | {
            "index": index,
            # Runs of one file read the same texts.
            "prompt_sha256": f"text {index}",
            "measures": {"nats a token": mean},
            "curves": {
                "perplexity": [
                    [(first + last) / 2, losses[index], last - first + 1]
                    for first, last, losses in run["windows"]
                ]
            },
        }
        for index, mean in enumerate(run["means"])
    ]
