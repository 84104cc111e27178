"""Losses of the last tokens of texts under an inference method: Table 5 of the RefreshKV paper.

Xu et al. 2025, section 6. Of a text of L + S tokens the first L are read as a prompt, whose last
token is the question; the last S are then fed one by one through the method's decode path, each the
text's own, whatever the model would have said. The prompt's end predicts the first of them, and
each step the next: S losses a text.

Two checkpoints are compared on the same texts. The perplexity of a method is exp of the mean loss
over all texts and tokens. How much it fell is in nats a token, and so is by how much more it fell
than that of the first method; the intervals are of a paired bootstrap over texts: each resample
takes the same texts for all methods and both checkpoints (Efron 1979, percentiles).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jax_longctx.contract import Prompt, Segment, decode_segment, step_variant
from jax_longctx.engine import Engine, programs
from jax_longctx.engine.capacity import bucket
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.methods import make_method

__all__ = ["drop_interval", "parse_method", "perplexity", "tail_losses"]

RESAMPLES = 10_000


def parse_method(spec: str) -> Any:
    """The method of `"refreshkv:schedule=fixed,stride=10"`; raises ConfigError as `make_method`."""
    name, _, settings = spec.partition(":")
    pairs = [pair.partition("=") for pair in settings.split(",") if pair]
    if bad := [key for key, equals, value in pairs if not (key and equals and value)]:
        raise ConfigError(f"method {spec!r} is not understood at {bad[0]!r}; expected KEY=VALUE")
    return make_method(name, {key: value for key, _, value in pairs})


def tail_losses(
    engine: Engine,
    texts: Int[np.ndarray, "n T"],
    *,
    tail: int,
    batch: int,
    progress: Callable[[int, int], None] | None = None,
) -> Float[np.ndarray, "n S"]:
    """Loss in nats of each of the last `tail` tokens of every text, as the method decodes them.

    Args:
      batch: texts that are read together.
      progress: called with (texts done, texts in all).

    Raises:
      InputError: there is no text, or nothing is left of one before its last tokens.
      CapacityError: the caches of a batch do not fit.
    """
    count, length = texts.shape
    if not count or not 1 <= tail < length:
        raise InputError(
            f"{count} texts of {length} tokens leave nothing to score the last {tail} tokens of; "
            f"give texts that are longer than these, and at least one of each"
        )
    losses = np.zeros((count, tail), np.float32)
    for start in range(0, count, batch):
        rows = texts[start : start + batch]
        # The last batch is filled up with its last text: one shape for all.
        padded = np.concatenate([rows, np.repeat(rows[-1:], batch - len(rows), axis=0)])
        losses[start : start + batch] = _batch_losses(engine, padded, tail)[: len(rows)]
        if progress is not None:
            progress(min(start + batch, count), count)
    return losses


def _batch_losses(engine: Engine, texts: np.ndarray, tail: int) -> np.ndarray:
    setup, prompt = engine.setup, texts.shape[1] - tail
    questions = texts[:, prompt - 1 : prompt].tolist()
    context = engine.prefill(
        texts[:, : prompt - 1].tolist(),
        reserve=1 + tail,
        questions=questions,
        # As training saw them.
        total=[texts.shape[1]] * len(texts),
    )
    caches, total, filled = context.usable_caches(), context.total, len(context.rows)
    texts = np.concatenate([texts, np.repeat(texts[-1:], filled - len(texts), axis=0)])
    questions = texts[:, prompt - 1 : prompt].tolist()
    logits: Any = jnp.zeros((filled, setup.config.vocab_size), jnp.float32)
    for segment in engine.method.segments(Prompt("question", engine.chunk, question=questions)):
        caches, logits = programs.run_segment(
            setup, engine.params, caches, segment, total, logits, "last"
        )
    if engine.method.info.shrinks:
        caches = programs.finish_question(setup, caches, total, reserve=bucket(tail + 1))
    losses = []
    for at in range(prompt, texts.shape[1]):
        # Nothing is waited for: the losses are read when all steps are queued.
        losses.append(_token_losses(setup, logits, texts[:, at]))
        if at + 1 < texts.shape[1]:
            segment = _step(texts[:, at], step_variant(engine.method, at + 1 - prompt))
            caches, logits = programs.run_segment(
                setup, engine.params, caches, segment, total, logits, "last"
            )
    return np.stack([np.asarray(column) for column in losses], axis=1)


def _step(tokens: np.ndarray, variant: str) -> Segment:
    """A decode step of the tokens that the texts go on with."""
    rows = len(tokens)
    arrays = (tokens[:, None], np.ones((rows, 1), np.int32), np.zeros(rows, bool))
    # They become JAX arrays at the `jit` border.
    return decode_segment(*cast(tuple[Any, Any, Any], arrays), variant)


@functools.partial(jax.jit, static_argnums=0)
def _token_losses(
    setup: programs.Setup, logits: Float[Array, "B V"], tokens: Int[Array, " B"]
) -> Float[Array, " B"]:
    chosen = jnp.take_along_axis(logits, tokens[:, None], axis=1)[:, 0]
    losses = jax.nn.logsumexp(logits, axis=1) - chosen
    # Every process reads them.
    return jax.lax.with_sharding_constraint(losses, NamedSharding(setup.mesh, PartitionSpec()))


def perplexity(losses: Sequence[float] | np.ndarray) -> float:
    """exp of the mean loss."""
    return float(np.exp(np.mean(losses)))


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
    rng = np.random.default_rng(seed)
    means = np.array(
        [np.mean(rng.choice(drops, len(drops))) for _ in range(RESAMPLES if len(drops) > 1 else 1)]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return float(np.mean(drops)), float(low), float(high)
