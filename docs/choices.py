"""The table behind `--method auto`, jax_longctx/choices.json, from committed results.

Scores are of two models, the first of which counts where it was measured: Qwen2.5-Coder-1.5B
within its trained length by leaderboard.json and beyond it by reach.json, SmolLM2-135M by the two
retrieval tasks of methods-suite.json. Bytes of a decode step are counted for the 1.5B's shape at
`LENGTH` tokens, its time, where it was taken, is of decode-steps.json or free-pages-speed.json: of
these settings, else of the defaults. Both are shares of full attention's.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from leaderboard import cost

from jax_longctx.evaluation.intervals import wilson
from jax_longctx.evaluation.specs import Spec

BOARD, REACH, QUALITY = "leaderboard", "reach", "methods-suite"
STEPS, PAGES = "decode-steps", "free-pages-speed"
LENGTH = 16384
TASKS = ("passkey", "niah_single")
LARGE = {"name": "Qwen2.5-Coder-1.5B", "family": "qwen2", "trained": 32768}
SMALL = {"name": "SmolLM2-135M", "family": "llama", "trained": 8192}
MODELS = ({**LARGE, "parameters": 1_543_714_304}, {**SMALL, "parameters": 134_515_008})
# Two spread a text over devices; one shows what others could reach. Two have caches no smaller than
# full attention's while they read a text, and reach no further.
LEFT_OUT = ("ring", "star", "ideal-topk", "refreshkv", "snapkv")


def made(results: Mapping[str, Any]) -> str:
    """The table's text, from `tables.read_results`."""
    board = [row for row in results[BOARD].rows if row["model"] == "1.5B"]
    kept = [row for row in results[QUALITY].rows if row["task"] in TASKS]
    parts = ((LARGE, board), (LARGE, results[REACH].rows), (SMALL, kept))
    timed = [row for row in results[PAGES].rows if "speedup" in row] + [
        row for row in results[STEPS].rows if (row["context"], row["batch"]) == (131072, 1)
    ]
    steps = {(row["method"], row.get("settings", "")): 1 / row["speedup"] for row in timed}
    # Dynamic NTK is full attention with another rotary base.
    steps["dynamic-ntk", ""] = steps["full", ""]
    methods: dict[tuple[str, ...], dict[str, Any]] = {}
    for model, rows in parts:
        for name, given in dict.fromkeys((row["method"], row["settings"]) for row in rows):
            if name in LEFT_OUT:
                continue
            own = [row for row in rows if (row["method"], row["settings"]) == (name, given)]
            step = steps.get((name, given), steps.get((name, "")))
            entry = methods.setdefault(
                (name, given, model["name"]),
                {
                    "name": name,
                    "model": model["name"],
                    "settings": dict(pair.split("=") for pair in given.split(",") if pair),
                    "found": [],
                    "read": round(_read(name, given) / _read("full", ""), 4),
                    "step": None if step is None else round(step, 3),
                },
            )
            entry["found"] += found(own, model["trained"])
    names = ", ".join((BOARD, REACH, QUALITY, STEPS, PAGES))
    about = f"Written by docs/choices.py from docs/results: {names}."
    return (
        f'{{\n  "about": {json.dumps(about)},\n  "models": [\n{_lines(MODELS)}\n  ],\n'
        f'  "methods": [\n{_lines(methods.values())}\n  ]\n}}\n'
    )


def _read(name: str, given: str) -> int:
    """Bytes that a decode step reads of its cache."""
    return cost(Spec.parse(f"{name}:{given}" if given else name), "1.5B", LENGTH)["read_bytes"]


def _lines(entries: Iterable[Any]) -> str:
    return ",\n".join(f"    {json.dumps(entry)}" for entry in entries)


def found(rows: Sequence[dict[str, Any]], trained: int) -> list[dict[str, Any]]:
    """What a method scored at each length, over all tasks.

    Rows of one length are shares of right answers, but for the leaderboard's, which are means.
    """
    scores = []
    for length in sorted({row["length"] for row in rows}):
        here = [row for row in rows if row["length"] == length]
        count = sum(row["n"] for row in here)
        share, interval = here[0]["score"], here[0]["interval"]
        if "task" in here[0]:
            right = round(sum(row["score"] * row["n"] for row in here) / 100)
            share = round(100 * right / count, 1)
            interval = [round(100 * end, 1) for end in wilson(right, count)]
        scores.append({"ratio": length / trained, "share": share, "n": count, "interval": interval})
    return scores
