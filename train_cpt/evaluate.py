"""Losses of texts' last tokens: during training, and of checkpoints under inference methods.

The comparison of checkpoints is Table 5 of Xu et al. 2025, "RefreshKV", section 6. Of a text of L +
S tokens the first L are read as a prompt, whose last token is the question; the last S are then fed
one by one through the method's decode path, each the text's own, whatever the model would have said
(`jax_longctx.evaluation.perplexity`): S losses a text.

Two checkpoints are compared on the same texts. The perplexity of a method is exp of the mean loss
over all texts and tokens. How much it fell is in nats a token, and so is by how much more it fell
than that of the first method; the intervals are of a paired bootstrap over texts: each resample
takes the same texts for all methods and both checkpoints.
"""

import functools
import math
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
from jax_longctx.evaluation.perplexity import perplexity, score_texts
from jax_longctx.evaluation.specs import Spec
from jax_longctx.methods import make_method, settings_of
from jax_longctx.models.checkpoint import load_params, read_manifest, tokenizer_folder
from jax_longctx.models.storage import sha256_of
from jax_longctx.settings import parse_mesh
from jax_longctx.sharding import make_mesh
from jax_longctx.text import Tokenizer
from train_cpt.data import MANIFEST, Windows, open_windows, own_rows
from train_cpt.data import read_manifest as read_data_manifest
from train_cpt.step import Setup, inference_shardings, place_texts, text_losses

Watch = Callable[[str], Callable[[int, int], None]]


def parse_method(spec: str) -> Any:
    """The method of `"refreshkv:schedule=fixed,stride=10"`.

    Raises:
      InputError: it is not written so.
      ConfigError: there is no such method, or not with such settings.
    """
    parsed = Spec.parse(spec)
    return make_method(parsed.name, dict(parsed.settings))


def drop_interval(
    before: Float[np.ndarray, " n"],
    after: Float[np.ndarray, " n"],
    than: tuple[np.ndarray, np.ndarray] | None = None,
    seed: int = 0,
) -> tuple[float, float, float]:
    """How much the mean loss fell: (estimate, lower, upper), 95% by a bootstrap over texts.

    Args:
      before, after: mean loss of every text.
      than: the same of another method; by how much more it fell than that one's.
    """
    drops = before - after
    if than is not None:
        drops = drops - (than[0] - than[1])
    return bootstrap(drops, seed)


def dev_losses(
    setup: Setup,
    params: Any,
    dev: Windows,
    *,
    rows: int,
    texts: int,
    last: int = 0,
    methods: Sequence[str] = (),
) -> dict[str, float]:
    """What an evaluation adds to a line of metrics.

    Args:
      params: float32 masters, as in the training state.
      rows: texts that are read together.
      texts: how many are read, rounded down to whole batches.
      last: tokens of each that are scored; 0 for the pattern's tail, or for all but the first.
      methods: inference methods that also decode them.

    Returns:
      `dev_loss`, the mean loss in nats under the training pattern, and `dev_perplexity/METHOD`.
    """
    count = min(len(dev), texts) // rows
    last = last or setup.pattern.tail or len(dev[0]) - 1
    tokens = np.stack([dev[row] for row in range(count * rows)]).reshape(count, rows, -1)
    own = tokens[:, own_rows(setup.mesh, rows)]
    losses = [
        float(
            text_losses(setup, params, place_texts(setup.mesh, own[number : number + 1])[0], last)
        )
        for number in range(count)
    ]
    found = {"dev_loss": float(np.mean(losses))}
    if methods:
        # The masters in the compute dtype, laid out as inference has them.
        cast = functools.partial(jax.tree.map, lambda leaf: leaf.astype(jnp.dtype(setup.dtype)))
        weights = jax.jit(cast, out_shardings=inference_shardings(setup))(params)
    for spec in methods:
        engine = Engine(setup.config, weights, parse_method(spec), setup.mesh)
        flat = tokens.reshape(count * rows, -1)
        scores = score_texts(engine, flat, through="decode", score=last, batch=rows)
        found[f"dev_perplexity/{spec}"] = perplexity(scores.losses)
    return found


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
      methods: as `parse_method` takes them.
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
    # The texts must be of every checkpoint's tokenizer.
    known_as = [tokenizer_digest(checkpoint) for checkpoint in checkpoints]
    opened = [open_windows(data, split, length=length, tokenizer=name) for name in known_as]
    if not 1 <= count <= len(opened[0]):
        raise InputError(
            f"the {split} split has {len(opened[0])} texts, asked for {count}; ask for fewer (at "
            f"least one) or prepare more documents"
        )
    texts = np.stack([opened[0][number * len(opened[0]) // count] for number in range(count)])
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
        "data_set": sha256_of(data / MANIFEST),
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
