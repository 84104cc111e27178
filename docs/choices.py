"""The table behind `--method auto`, jax_longctx/choices.json, from committed results.

Quality is of docs/results/methods-suite.json: the facts found of two retrieval tasks together, at
each length, as a multiple of the trained length. Bytes of a decode step are of method-memory.json,
its time, where it was taken, of decode-independent.json; both as shares of full attention's. The
table holds all methods of the suite but those in `LEFT_OUT`.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jax_longctx.evaluation.intervals import wilson

QUALITY, MEMORY, STEPS = "methods-suite", "method-memory", "decode-independent"
TASKS = ("passkey", "niah_single")
# Full attention is the default, two spread a text over devices, one shows what others could reach.
LEFT_OUT = ("full", "ring", "star", "ideal-topk")


def made(results: Mapping[str, Any]) -> str:
    """The table's text, from `tables.read_results`."""
    quality = results[QUALITY]
    said = re.search(r"trained to ([\d,]+) tokens", quality.model)
    if said is None:
        raise SystemExit(f"{QUALITY}.json: 'model' does not name the length it was trained to")
    trained = int(said[1].replace(",", ""))
    reads = {row["method"]: row["read_bytes"] for row in results[MEMORY].rows}
    steps = {row["method"]: row["ms_131k"] for row in results[STEPS].rows}
    rows = [row for row in quality.rows if row["task"] in TASKS]
    names = [name for name in dict.fromkeys(row["method"] for row in rows) if name not in LEFT_OUT]
    methods = []
    for name in names:
        # Dynamic NTK is full attention with another rotary base.
        cost = "full" if name not in reads and name == "dynamic-ntk" else name
        if cost not in reads:
            raise SystemExit(f"{MEMORY}.json has no row of {name}, which {QUALITY}.json has")
        own = [row for row in rows if row["method"] == name]
        settings = dict(pair.split("=") for pair in own[0]["settings"].split(",") if pair)
        lengths = sorted({row["length"] for row in own})
        timed = steps.get(cost)
        methods.append(
            {
                "name": name,
                "settings": settings,
                "found": [found(own, length, trained) for length in lengths],
                "read": round(reads[cost] / reads["full"], 4),
                "step": None if timed is None else round(timed / steps["full"], 3),
            }
        )
    about = f"Written by docs/choices.py from docs/results: {QUALITY}, {MEMORY}, {STEPS}."
    head = json.dumps({"about": about, "model": quality.model}, indent=2).removesuffix("\n}")
    lines = ",\n".join(f"    {json.dumps(entry)}" for entry in methods)
    return f'{head},\n  "methods": [\n{lines}\n  ]\n}}\n'


def found(rows: Sequence[dict[str, Any]], length: int, trained: int) -> dict[str, Any]:
    """What a method found at one length, over all tasks."""
    here = [row for row in rows if row["length"] == length]
    count = sum(row["n"] for row in here)
    right = round(sum(row["score"] * row["n"] for row in here) / 100)
    interval = [round(100 * end, 1) for end in wilson(right, count)]
    share = round(100 * right / count, 1)
    return {"ratio": length / trained, "share": share, "n": count, "interval": interval}
