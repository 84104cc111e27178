"""Evaluations during training: losses on texts of the dev split."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_longctx.engine import Engine
from jax_longctx.evaluation.perplexity import perplexity, score_texts
from jax_longctx.models.llama import param_infos
from jax_longctx.sharding import logical_sharding
from train_cpt.data import Windows
from train_cpt.perplexity import parse_method
from train_cpt.processes import own_rows, place_texts
from train_cpt.step import Setup, text_losses

__all__ = ["dev_losses"]


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
        weights = _inference_weights(setup, params)
    for spec in methods:
        engine = Engine(setup.config, weights, parse_method(spec), setup.mesh)
        flat = tokens.reshape(count * rows, -1)
        scores = score_texts(engine, flat, through="decode", score=last, batch=rows)
        found[f"dev_perplexity/{spec}"] = perplexity(scores.losses)
    return found


def _inference_weights(setup: Setup, params: Any) -> Any:
    """The masters in the compute dtype, laid out as inference has them."""
    infos = param_infos(setup.config)

    def sharding(path: Any, _: Any) -> Any:
        name = ".".join(str(entry.key) for entry in path)
        return logical_sharding(setup.mesh, infos[name].axes)

    cast = functools.partial(jax.tree.map, lambda leaf: leaf.astype(jnp.dtype(setup.dtype)))
    shardings = jax.tree_util.tree_map_with_path(sharding, params)
    return jax.jit(cast, out_shardings=shardings)(params)
