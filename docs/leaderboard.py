"""docs/results/leaderboard.json: a row a method and length, from RULER on real models.

    python docs/leaderboard.py            # writes it; needs the other results only

Quality is the mean of the five tasks that every length has. Its interval is made of the tasks' own
(MOVER: Zou and Donner 2008). Bytes are counted from the shapes of the caches, for the same model,
settings and length.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from sum_rows import write
from tables import DOCS, read_results

from jax_longctx.engine.capacity import footprint, setup_of
from jax_longctx.evaluation.specs import Spec
from jax_longctx.methods import make_method
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.presets import PRESETS
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh

PATH = DOCS / "results/leaderboard.json"
SOURCES = ("ruler-lengths", "ruler-13-tasks", "ruler-small")
TASKS = ("niah_single_2", "niah_multikey_1", "niah_multikey_2", "vt", "fwe")
# Words, layers, width, MLP, heads of queries, of keys and values of the two models.
SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
)
MODELS = {"1.5B": (28, 1536, 8960, 12, 2), "0.5B": (24, 896, 4864, 14, 2)}
TRAINED = 32768
# Room for question and answer.
RESERVE = 256


def shape_of(size: str) -> ModelConfig:
    """The shape of Qwen2.5-Coder of that size, as its config.json has it."""
    sizes = dict(zip(SIZES, MODELS[size], strict=True))
    layers = {"layer_types": ["full_attention"] * sizes["num_hidden_layers"]}
    more = {"vocab_size": 151936, "max_position_embeddings": TRAINED, "tie_word_embeddings": True}
    return ModelConfig.from_hf(PRESETS["qwen2-7b"] | sizes | layers | more)


def specs(commands: Sequence[str]) -> dict[str, Spec]:
    """The methods of `eval run` commands with the last settings that they give, by name."""
    found = [Spec.parse(text) for line in commands for text in re.findall(r"-m (\S+)", line)]
    return {spec.name: spec for spec in found}


def mean(rows: Sequence[Mapping[str, Any]]) -> tuple[float, list[float]]:
    """The mean of the rows' scores and its interval."""
    scores = [row["score"] for row in rows]
    middle = sum(scores) / len(scores)
    ends = [row["interval"] for row in rows]
    below, above = (
        math.sqrt(sum((row["score"] - end[side]) ** 2 for row, end in zip(rows, ends, strict=True)))
        / len(rows)
        for side in (0, 1)
    )
    return round(middle, 1), [round(middle - below, 1), round(middle + above, 1)]


def rows_of(results: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`method`, `settings`, `model`, `length`, `score`, `interval`, `n` and bytes; the best first.

    A method at a length needs all five tasks; of several settings the last counts.
    """
    made = []
    for name in SOURCES:
        result = results[name]
        size = next(size for size in MODELS if size in result.model)
        given = specs(result.command)
        own = [row for row in result.rows if row["task"] in TASKS]
        for method, length in dict.fromkeys((row["method"], row["length"]) for row in own):
            cells = [row for row in own if (row["method"], row["length"]) == (method, length)]
            cells = [row for row in cells if row["settings"] == cells[-1]["settings"]]
            if len(cells) < len(TASKS):
                continue
            score, interval = mean(cells)
            spec = given[method]
            made.append(
                {
                    "method": method,
                    "settings": ",".join(f"{key}={value}" for key, value in spec.settings),
                    "model": size,
                    "length": length,
                    "score": score,
                    "interval": interval,
                    "n": sum(row["n"] for row in cells),
                    **cost(spec, size, length),
                }
            )
    at = {(row["model"], row["method"]): row["score"] for row in made if row["length"] == 16384}

    def order(row: dict[str, Any]) -> tuple[int, float, str, int]:
        size, name = row["model"], row["method"]
        return list(MODELS).index(size), -at[size, name], name, row["length"]

    return sorted(made, key=order)


def cost(spec: Spec, size: str, length: int) -> dict[str, int]:
    """Bytes of the caches at their largest and while answering, and what a step reads of them."""
    made = make_method(spec.name, spec.at(length))
    run = RunSpec(method=made, mesh=make_mesh(), dtype="bfloat16")
    found = footprint(setup_of(shape_of(size), run), batch=1, context=length, reserve=RESERVE)
    return {"peak_bytes": found.peak, "cache_bytes": found.resident, "read_bytes": found.read}


def main() -> None:
    """Write the file, with all its fields but the rows as they are."""
    rows = rows_of(read_results())
    kept = json.loads(PATH.read_text(encoding="utf-8"))
    kept.pop("rows", None)
    write(PATH, kept, rows)


if __name__ == "__main__":
    main()
