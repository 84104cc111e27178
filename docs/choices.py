"""The table behind `--method auto`, jax_longctx/choices.json, from committed results.

Scores are of two models, the first of which counts where it was measured: Qwen2.5-Coder-1.5B
within its trained length by leaderboard.json and beyond it by reach.json, SmolLM2-135M by the two
retrieval tasks of methods-suite.json. Bytes of a decode step are of leaderboard.json at `LENGTH`
tokens, its time, where it was taken, of decode-steps.json; both as shares of full attention's.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax_longctx.evaluation.intervals import wilson

BOARD, REACH, QUALITY, STEPS = "leaderboard", "reach", "methods-suite", "decode-steps"
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
    reads = {row["method"]: row["read_bytes"] for row in board if row["length"] == LENGTH}
    steps = {
        row["method"]: 1 / row["speedup"]
        for row in results[STEPS].rows
        if (row["context"], row["batch"]) == (131072, 1)
    }
    # Dynamic NTK is full attention with another rotary base.
    reads["dynamic-ntk"], steps["dynamic-ntk"] = reads["full"], steps["full"]
    methods: dict[tuple[str, ...], dict[str, Any]] = {}
    for model, rows in parts:
        for name, given in dict.fromkeys((row["method"], row["settings"]) for row in rows):
            if name in LEFT_OUT:
                continue
            own = [row for row in rows if (row["method"], row["settings"]) == (name, given)]
            entry = methods.setdefault(
                (name, given, model["name"]),
                {
                    "name": name,
                    "model": model["name"],
                    "settings": dict(pair.split("=") for pair in given.split(",") if pair),
                    "found": [],
                    "read": round(reads[name] / reads["full"], 4),
                    "step": round(steps[name], 3) if name in steps else None,
                },
            )
            entry["found"] += found(own, model["trained"])
    about = f"Written by docs/choices.py from docs/results: {BOARD}, {REACH}, {QUALITY}, {STEPS}."
    return (
        f'{{\n  "about": {json.dumps(about)},\n  "models": [\n{_lines(MODELS)}\n  ],\n'
        f'  "methods": [\n{_lines(methods.values())}\n  ]\n}}\n'
    )


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
