"""How far a method is from full attention on the same tokens: what it predicts, what it attends.

Both read the same text and are fed the same last tokens (P1 of `evaluation.perplexity`). For every
scored token: KL(full || method) of the two next-token distributions, in nats, and whether their
most likely tokens are the same.

Of attention, for the newest queries in every layer and query head, with p full attention's weights
and A the tokens that the method gives any weight to (`evaluation.attended`): the mass of p that A
holds; how many of the k largest p are in A; how many tokens A has; and the entropy
-sum w ln w of the method's own weights w, at most ln |A|. Each method's queries are its own: what
was lost in a layer shows in the next.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.engine import Engine, programs
from jax_longctx.engine.scoring import by_columns, forced_states
from jax_longctx.errors import InputError
from jax_longctx.evaluation.attended import attention_weights, shows_weights

__all__ = [
    "attention_agreement",
    "attention_measures",
    "divergences",
    "recall",
    "scored_states",
    "top_tokens",
]


def scored_states(
    engine: Engine, texts: Int[np.ndarray, "n T"], *, score: int, asked: int = 1, batch: int = 1
) -> Float[np.ndarray, "n S D"]:
    """Final hidden states that predict the last `score` tokens of each text, decoded one by one.

    Args:
      asked: tokens before them that are the question.
      batch: texts that are read together.

    Raises:
      InputError: texts too short for that.
    """
    count, length = texts.shape
    if not (count and batch >= 1 and score >= 1 and asked >= 1 and score + asked < length):
        raise InputError(
            f"{count} texts of {length} tokens do not hold {score} to score behind a question of "
            f"{asked} and some text; ask for fewer, at least one of each"
        )
    found = []
    prompt = length - score
    for start in range(0, count, batch):
        rows = texts[start : start + batch]
        padded = np.concatenate([rows, np.repeat(rows[-1:], batch - len(rows), axis=0)])
        states = forced_states(
            engine,
            padded[:, : prompt - asked].tolist(),
            padded[:, prompt:].tolist(),
            questions=padded[:, prompt - asked : prompt].tolist(),
        )
        pieces: list[list[np.ndarray]] = [[] for _ in rows]
        for piece in states:
            hidden = np.asarray(piece.hidden.astype(jnp.float32))
            for b, row in enumerate(pieces):
                row.append(hidden[b, piece.targets[b] >= 0])
        found += [np.concatenate(row) for row in pieces]
    return np.stack(found)


@functools.partial(jax.jit, static_argnums=0)
def _compare(
    setup: programs.Setup, params: Any, full: Float[Array, "B T D"], other: Float[Array, "B T D"]
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    model = programs.bound_model(setup.config, params)

    def compare(full_BXD: Array, other_BXD: Array) -> tuple[Array, Array]:
        p_BXV, q_BXV = (
            jax.nn.log_softmax(model.logits(hidden.astype(setup.dtype)), axis=-1)
            for hidden in (full_BXD, other_BXD)
        )
        kl_BX = jnp.sum(jnp.exp(p_BXV) * (p_BXV - q_BXV), axis=-1)
        return kl_BX, jnp.argmax(p_BXV, axis=-1) == jnp.argmax(q_BXV, axis=-1)

    return by_columns(setup, compare, full, other)


def divergences(
    engine: Engine, full: Float[np.ndarray, "n S D"], other: Float[np.ndarray, "n S D"]
) -> tuple[Float[np.ndarray, "n S"], Bool[np.ndarray, "n S"]]:
    """KL(full || other) in nats of the next-token distributions, and whether their best agree.

    `engine` gives the model that both states are of.
    """
    pairs = [
        _compare(engine.setup, engine.params, one[None], two[None])
        for one, two in zip(full, other, strict=True)
    ]
    kl, same = (np.concatenate([np.asarray(pair[i]) for pair in pairs]) for i in range(2))
    return kl, same


def top_tokens(weights: Float[np.ndarray, "*R S"], count: int) -> Bool[np.ndarray, "*R S"]:
    """Which are the `count` largest of each row; the earliest of those that are alike."""
    order = np.argsort(-weights, axis=-1, kind="stable")[..., :count]
    chosen = np.zeros(weights.shape, bool)
    np.put_along_axis(chosen, order, True, axis=-1)
    return chosen


def recall(
    wanted: Bool[np.ndarray, "*R S"], attended: Bool[np.ndarray, "*R S"]
) -> Float[np.ndarray, "*R"]:
    """Share of the wanted tokens that are attended, row by row; a row wants at least one."""
    return np.sum(wanted & attended, axis=-1) / np.sum(wanted, axis=-1)


def attention_measures(
    full: Float[np.ndarray, "L N Q S"], other: Float[np.ndarray, "L N Q S"], *, top: int
) -> dict[str, list[float]]:
    """Means over heads and queries, by layer: `mass`, `recall`, `attended`, `entropy`.

    Args:
      full: full attention's weights on the same text.
      top: k of the recall.
    """
    attended = other > 0
    total = np.sum(other, axis=-1, keepdims=True)
    share = other / np.where(total > 0, total, 1)
    logs = np.log(np.where(attended, share, 1))
    # Before the k-th token there are fewer than k.
    wanted = top_tokens(full, top) & (full > 0)
    measures = {
        "mass": np.sum(full * attended, axis=-1) / np.sum(full, axis=-1),
        "recall": recall(wanted, attended),
        "attended": np.sum(attended, axis=-1),
        "entropy": -np.sum(share * logs, axis=-1),
    }
    return {
        name: np.mean(values, axis=(1, 2), dtype=np.float64).tolist()
        for name, values in measures.items()
    }


def attention_agreement(
    full: Engine,
    engines: Sequence[Engine],
    texts: Int[np.ndarray, "n T"],
    *,
    top: int,
    progress: Callable[[int, int], None] | None = None,
    **options: Any,
) -> list[list[dict[str, list[float]]] | None]:
    """`attention_measures` of every engine and text against `full`, an engine of full attention.

    None for an engine whose method shows no weights. `options` are those of `attention_weights`.

    Args:
      progress: called with (texts read, texts in all), a text anew for each engine.
    """
    found = [[] if shows_weights(engine) else None for engine in engines]
    done, total = 0, len(texts) * (1 + sum(part is not None for part in found))
    for text in texts.tolist():
        exact = attention_weights(full, text, **options)
        for engine, records in zip([None, *engines], [None, *found], strict=True):
            if engine is not None and records is not None:
                weights = attention_weights(engine, text, **options)
                records.append(attention_measures(exact, weights, top=top))
            if progress is not None and (engine is None or records is not None):
                done += 1
                progress(done, total)
    return found
