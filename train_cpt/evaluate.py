"""Losses of texts' last tokens: during training, and of checkpoints under inference methods.

The comparison of checkpoints is Table 5 of Xu et al. 2025, "RefreshKV", section 6. A text has L + S
tokens. The first L are the prompt, whose last token is the question. The last S tokens of the text,
not those that the model predicts, are fed one by one through the method's decode path
(`jax_longctx.evaluation.perplexity`), which gives S losses a text.

Two checkpoints are compared on the same texts. The perplexity of a method is exp of the mean loss
over all texts and tokens. The fall of the loss, and how far it exceeds that of the first method,
are in nats a token. Intervals are of a paired bootstrap over texts: each resample takes the same
texts for all methods and both checkpoints.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jax_longctx.engine import Engine
from jax_longctx.errors import InputError
from jax_longctx.evaluation.intervals import bootstrap
from jax_longctx.evaluation.perplexity import (
    perplexity,
    pipe_table,
    score_texts,
    shown_interval,
)
from jax_longctx.evaluation.specs import Spec
from jax_longctx.files import sha256_of
from jax_longctx.methods import make_method, settings_of
from jax_longctx.models.storage import load_params, read_manifest, tokenizer_folder
from jax_longctx.run_spec import RunSpec
from jax_longctx.text import Tokenizer
from train_cpt.data import MANIFEST, Windows, open_windows
from train_cpt.data import read_manifest as read_data_manifest
from train_cpt.step import TrainSetup, inference_shardings, place_texts, text_losses

Watch = Callable[[str], Callable[[int, int], None]]


def parse_method(spec: str) -> Any:
    """Parses a method such as `"refreshkv:schedule=fixed,stride=10"`.

    Raises:
      InputError: the text has another form.
      ConfigError: the method or one of its settings does not exist.
    """
    parsed = Spec.parse(spec)
    return make_method(parsed.name, dict(parsed.settings))


def drop_interval(
    before: Float[np.ndarray, " n"],
    after: Float[np.ndarray, " n"],
    than: tuple[np.ndarray, np.ndarray] | None = None,
) -> tuple[float, float, float]:
    """The fall of the mean loss: (estimate, lower, upper), 95% by a bootstrap over texts.

    Args:
      before, after: mean loss of each text.
      than: the same for another method, whose fall is subtracted.
    """
    drops = before - after
    if than is not None:
        drops = drops - (than[0] - than[1])
    return bootstrap(drops)


def dev_losses(
    setup: TrainSetup,
    params: Any,
    dev: Windows,
    *,
    rows: int,
    texts: int,
    last: int = 0,
    methods: Sequence[str] = (),
) -> dict[str, float]:
    """The metrics of an evaluation.

    Args:
      params: float32 master weights, as in the training state.
      rows: texts of a batch.
      texts: number of texts, rounded down to whole batches.
      last: last tokens of each text that are scored; 0 for the pattern's tail, or for all but the
        first token where the pattern has none.
      methods: inference methods that also decode these tokens.

    Returns:
      `dev_loss`, the mean loss in nats under the training pattern, and `dev_perplexity/METHOD`.
    """
    count = min(len(dev), texts) // rows
    last = last or setup.pattern.tail or len(dev[0]) - 1
    losses = [
        float(text_losses(setup, params, place_texts(setup.mesh, dev, numbers[None])[0], last))
        for numbers in np.arange(count * rows).reshape(count, rows)
    ]
    found = {"dev_loss": float(np.mean(losses))}
    if methods:
        # The master weights in the compute dtype, sharded as in a training pass.
        cast = functools.partial(jax.tree.map, lambda leaf: leaf.astype(jnp.dtype(setup.dtype)))
        weights = jax.jit(cast, out_shardings=inference_shardings(setup))(params)
    for spec in methods:
        engine = Engine(setup.config, weights, RunSpec(method=parse_method(spec), mesh=setup.mesh))
        tokens = dev[: count * rows].astype(np.int32)
        scores = score_texts(engine, tokens, through="decode", score=last, batch=rows)
        found[f"dev_perplexity/{spec}"] = perplexity(scores.losses)
    return found


def tokenizer_digest(checkpoint: Path) -> str:
    """The fingerprint of a checkpoint's tokenizer in data sets.

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
    run: RunSpec,
    watch: Watch = lambda doing: lambda done, total: None,
) -> dict[str, Any]:
    """Mean losses of the last tokens of texts, by checkpoint and method; JSON-able.

    Args:
      methods: for `parse_method`.
      tail: last tokens of a text that are scored.
      count: texts of the split, evenly spaced.
      batch: texts of a batch.
      run: how the models run; its method is not read.
      watch: called with a description of each run; returns a function of (done, total) tokens.

    Returns:
      `runs`, a record for each checkpoint and method: their names, `settings`, and `losses`, the
      mean loss in nats of each text's last tokens; and the data, settings and device.

    Raises:
      LongctxError: a checkpoint, a method, the data or the mesh does not fit.
    """
    made = [parse_method(spec) for spec in methods]
    run = dataclasses.replace(run, mesh=run.devices())
    length = read_data_manifest(data).length
    # All checkpoints must have the tokenizer of the data.
    known_as = [tokenizer_digest(checkpoint) for checkpoint in checkpoints]
    opened = [open_windows(data, split, length=length, tokenizer=name) for name in known_as]
    if not 1 <= count <= len(opened[0]):
        raise InputError(
            f"the {split} split has {len(opened[0])} texts, asked for {count}; ask for fewer (at "
            f"least one) or prepare more documents"
        )
    texts = opened[0][np.arange(count) * len(opened[0]) // count].astype(np.int32)
    runs = []
    for checkpoint in checkpoints:
        manifest = read_manifest(checkpoint)
        params = load_params(checkpoint, run)
        for name, method in zip(methods, made, strict=True):
            engine = Engine(manifest.config, params, dataclasses.replace(run, method=method))
            progress = watch(f"{checkpoint.name}, {name}")
            how: dict[str, Any] = {"through": "decode", "score": tail, "batch": batch}
            losses = score_texts(engine, texts, **how, progress=progress).losses
            names = {"checkpoint": str(checkpoint), "source": manifest.source, "method": name}
            means = losses.mean(axis=1, dtype=np.float64).tolist()
            runs.append({**names, "settings": settings_of(method)["settings"], "losses": means})
    return {
        "data": str(data),
        "data_set": sha256_of(data / MANIFEST),
        "split": split,
        "length": length,
        "tail": tail,
        "texts": len(texts),
        "chunk": run.chunk,
        "dtype": run.dtype,
        "device": run.mesh.devices.flat[0].device_kind,
        "jax": jax.__version__,
        "runs": runs,
    }


def markdown(result: dict[str, Any]) -> str:
    """A table of perplexities, methods by checkpoints, with the fall from first to last."""
    names = list(dict.fromkeys(run["checkpoint"] for run in result["runs"]))
    methods = list(dict.fromkeys(run["method"] for run in result["runs"]))
    found = {(run["checkpoint"], run["method"]): np.array(run["losses"]) for run in result["runs"]}
    head = ["method", *names]
    if len(names) > 1:
        head += ["fell by, nats", f"more than `{methods[0]}`"]
    lines = []
    base = (found[names[0], methods[0]], found[names[-1], methods[0]])
    for method in methods:
        losses = [found[name, method] for name in names]
        cells = [f"`{method}`", *(f"{perplexity(loss):.3f}" for loss in losses)]
        if len(names) > 1:
            cells.append(shown_interval(*drop_interval(losses[0], losses[-1]), "+.4f"))
            than = drop_interval(losses[0], losses[-1], base)
            cells.append("-" if method == methods[0] else shown_interval(*than, "+.4f"))
        lines.append(cells)
    return (
        f"{pipe_table(head, lines)}\n"
        f"Perplexity of the last {result['tail']} of {result['length']:,} tokens, "
        f"{result['texts']} texts of the {result['split']} split; intervals are 95%, paired "
        f"bootstrap over texts.\n"
    )
