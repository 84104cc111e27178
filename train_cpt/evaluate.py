"""Checkpoints under inference methods on one split of a prepared data set, as a table."""

import hashlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jax_longctx.engine import Engine
from jax_longctx.errors import InputError
from jax_longctx.evaluation.perplexity import perplexity, score_texts
from jax_longctx.methods import settings_of
from jax_longctx.models.checkpoint import load_params, read_manifest, tokenizer_folder
from jax_longctx.models.storage import sha256_of
from jax_longctx.settings import parse_mesh
from jax_longctx.sharding import make_mesh
from jax_longctx.text import Tokenizer
from train_cpt.data import MANIFEST, Windows, open_windows
from train_cpt.data import read_manifest as read_data_manifest
from train_cpt.perplexity import drop_interval, parse_method

__all__ = ["evaluate", "markdown", "tokenizer_digest"]

Watch = Callable[[str], Callable[[int, int], None]]


def tokenizer_digest(checkpoint: Path) -> str:
    """What a checkpoint's tokenizer is known by in data sets.

    Raises:
      CheckpointError: there is no checkpoint, or it has no tokenizer.
    """
    tokenizer = tokenizer_folder(checkpoint, read_manifest(checkpoint))
    Tokenizer.load(tokenizer)
    return sha256_of(tokenizer / "tokenizer.json")


def evaluate(
    checkpoints: Sequence[Path],
    methods: Sequence[str],
    data: Path,
    *,
    split: str,
    tail: int,
    count: int,
    batch: int,
    chunk: int,
    dtype: str | None = None,
    mesh: str = "",
    watch: Watch = lambda doing: lambda done, total: None,
) -> dict[str, Any]:
    """Mean losses of the last tokens of texts, by checkpoint and method; JSON-able.

    Args:
      methods: as `train_cpt.perplexity.parse_method` takes them.
      count: texts of the split, at even distances.
      batch, chunk: texts, and tokens of each, that are read together.
      dtype: of weights and caches; each checkpoint's own unless given.
      watch: told what is being done, gives back what to call with (done, total) scored tokens.

    Returns:
      `runs`, a record for each checkpoint and method: their names, `settings`, and `losses`, the
      mean loss in nats of every text's last tokens; and what was evaluated on what.

    Raises:
      LongctxError: a checkpoint, a method, the data or the mesh does not fit.
    """
    made = [parse_method(spec) for spec in methods]
    sizes: dict[str, Any] = dict(parse_mesh(mesh))
    on = make_mesh(**sizes)
    length = read_data_manifest(data).length
    texts = _spaced(_opened(checkpoints, data, split, length), count, split)
    runs = []
    for checkpoint in checkpoints:
        manifest = read_manifest(checkpoint)
        params = load_params(checkpoint, on, dtype)
        for spec, method in zip(methods, made, strict=True):
            engine = Engine(manifest.config, params, method, on, chunk=chunk)
            progress = watch(f"{checkpoint.name}, {spec}")
            how: dict[str, Any] = {"through": "decode", "score": tail, "batch": batch}
            losses = score_texts(engine, texts, **how, progress=progress).losses
            names = {"checkpoint": str(checkpoint), "source": manifest.source, "method": spec}
            means = losses.mean(axis=1, dtype=np.float64).tolist()
            runs.append({**names, "settings": settings_of(method)["settings"], "losses": means})
    return {
        "data": str(data),
        "data_set": hashlib.sha256((data / MANIFEST).read_bytes()).hexdigest(),
        "split": split,
        "length": length,
        "tail": tail,
        "texts": len(texts),
        "chunk": chunk,
        "dtype": dtype,
        "device": on.devices.flat[0].device_kind,
        "jax": jax.__version__,
        "runs": runs,
    }


def _opened(checkpoints: Sequence[Path], data: Path, split: str, length: int) -> Windows:
    """The texts, which must be of every checkpoint's tokenizer."""
    opened = [
        open_windows(data, split, length=length, tokenizer=tokenizer_digest(checkpoint))
        for checkpoint in checkpoints
    ]
    return opened[0]


def _spaced(windows: Windows, count: int, split: str) -> np.ndarray:
    if not 1 <= count <= len(windows):
        raise InputError(
            f"the {split} split has {len(windows)} texts, asked for {count}; ask for fewer (at "
            f"least one) or prepare more documents"
        )
    return np.stack([windows[number * len(windows) // count] for number in range(count)])


def markdown(result: dict[str, Any]) -> str:
    """Methods by checkpoints: perplexities, and what the last fell by since the first."""
    names = list(dict.fromkeys(run["checkpoint"] for run in result["runs"]))
    methods = list(dict.fromkeys(run["method"] for run in result["runs"]))
    found = {(run["checkpoint"], run["method"]): np.array(run["losses"]) for run in result["runs"]}
    head = ["method", *names]
    if len(names) > 1:
        head += ["fell by, nats", f"more than `{methods[0]}`"]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    base = (found[names[0], methods[0]], found[names[-1], methods[0]])
    for method in methods:
        losses = [found[name, method] for name in names]
        cells = [f"`{method}`", *(f"{perplexity(loss):.3f}" for loss in losses)]
        if len(names) > 1:
            cells.append(_interval(*drop_interval(losses[0], losses[-1])))
            than = drop_interval(losses[0], losses[-1], base)
            cells.append("-" if method == methods[0] else _interval(*than))
        lines.append(" | ".join(cells))
    table = "\n".join(f"| {line} |" for line in lines)
    return (
        f"{table}\n\nPerplexity of the last {result['tail']} of {result['length']:,} tokens, "
        f"{result['texts']} texts of the {result['split']} split; intervals are 95%, paired "
        f"bootstrap over texts.\n"
    )


def _interval(estimate: float, low: float, high: float) -> str:
    if math.isnan(low):
        return f"{estimate:+.4f}"
    return f"{estimate:+.4f} [{low:+.4f}, {high:+.4f}]"
