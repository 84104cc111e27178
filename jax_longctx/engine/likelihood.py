"""How likely given text is under a method: log-probabilities of its tokens."""

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.engine import programs
from jax_longctx.engine.distributed import to_host
from jax_longctx.engine.forced import States, Through, forced_states, read_text
from jax_longctx.engine.rows import Rows, checked_rows
from jax_longctx.errors import InputError

if TYPE_CHECKING:
    from jax_longctx.engine.engine import Engine

__all__ = ["Likelihood", "all_logits", "by_columns", "gathered", "loglikelihoods", "token_scores"]

# Most logits at a time: 64 MiB of float32.
LOGITS = 1 << 24


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """Of one row's continuation.

    Attributes:
      logprobs: natural log-probability of each token, given everything before it.
      greedy: whether it was the most likely one (the lowest id, of several alike).
    """

    logprobs: Float[np.ndarray, " n"]
    greedy: Bool[np.ndarray, " n"]

    @property
    def total(self) -> float:
        """Log-probability of the whole continuation."""
        return float(np.sum(self.logprobs, dtype=np.float64))

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have written it."""
        return bool(np.all(self.greedy))


def loglikelihoods(
    engine: "Engine",
    contexts: Rows,
    continuations: Rows,
    *,
    through: Through = "decode",
    questions: Rows | None = None,
    total: Sequence[int] | None = None,
    ahead: bool = False,
) -> list[Likelihood]:
    """The continuations' likelihoods; arguments and errors are those of `forced_states`."""
    options: Any = {"through": through, "questions": questions, "total": total, "ahead": ahead}
    return gathered(
        engine, forced_states(engine, contexts, continuations, **options), len(contexts)
    )


def gathered(engine: "Engine", states: Iterable[States], rows: int) -> list[Likelihood]:
    """The likelihoods of the first `rows` rows' targets, from all of their states."""
    found: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in range(rows)]

    def keep(targets: np.ndarray, scores: tuple[Array, Array]) -> None:
        logprobs, greedy = map(np.asarray, scores)
        for b, row in enumerate(found):
            counts = targets[b] >= 0
            row.append((logprobs[b, counts], greedy[b, counts]))

    queued = None
    for piece in states:
        if np.all(piece.targets < 0):
            # Nothing to read; the queue on the device still stays short.
            piece.hidden.block_until_ready()
            continue
        scores = token_scores(engine.setup, engine.params, piece.hidden, piece.targets)
        # One piece computes while the next is dispatched.
        if queued is not None:
            keep(*queued)
        queued = piece.targets, scores
    if queued is not None:
        keep(*queued)
    return [Likelihood(*map(np.concatenate, zip(*row, strict=True))) for row in found]


def all_logits(
    engine: "Engine", rows: Rows, total: Sequence[int] | None = None
) -> list[np.ndarray]:
    """float32 logits `[length, V]` of every token of each row; see `Engine.score`."""
    if engine.method.info.needs_question:
        raise InputError("this method reads a text for a question; it cannot score one alone")
    padded = checked_rows(rows, engine.config.vocab_size, engine.mesh.shape["data"])
    lengths = [*(total or map(len, rows))] + [0] * (len(padded) - len(rows))
    pieces: list[list[np.ndarray]] = [[] for _ in rows]
    for segment, logits in read_text(engine, padded, lengths, None, "all"):
        block, valid = to_host(logits), segment.chunk_lengths
        for b in range(len(rows)):
            pieces[b].append(block[b, : int(valid[b])])
    return [np.concatenate(piece) for piece in pieces]


@functools.partial(jax.jit, static_argnums=0)
def token_scores(
    setup: programs.Setup,
    params: Any,
    hidden: Float[Array, "B T D"],
    targets: Int[Any, "B T"],
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Log-probability of every target, and whether it is the most likely token.

    Logits are made of a few columns at a time: `[B, T, V]` is never in memory.
    """
    model = programs.model_of(setup.config, params)

    def score(hidden_BXD: Array, targets_BX: Array) -> tuple[Array, Array]:
        logits_BXV = model.logits(hidden_BXD)
        tokens_V = jnp.arange(logits_BXV.shape[-1])
        # A sum over the vocabulary is one over its shards; a gather would need all of them.
        chosen_BX = jnp.sum(jnp.where(tokens_V == targets_BX[..., None], logits_BXV, 0.0), axis=-1)
        logprob_BX = chosen_BX - jax.nn.logsumexp(logits_BXV, axis=-1)
        return logprob_BX, jnp.argmax(logits_BXV, axis=-1) == targets_BX

    return by_columns(setup, score, hidden, targets)


def by_columns(setup: programs.Setup, function: Any, *arrays: Array) -> Any:
    """`function` of arrays `[B, T, ...]`, results `[B, T]`, over blocks of a few columns.

    As many columns as have `LOGITS` logits; what comes back is the same on all devices.
    """
    batch, columns = arrays[0].shape[:2]
    size = min(columns, max(1, LOGITS // (batch * setup.config.vocab_size)))
    blocks = -(-columns // size)

    def cut(array: Array) -> Array:
        widths = [(0, 0), (0, blocks * size - columns)] + [(0, 0)] * (array.ndim - 2)
        split = jnp.pad(array, widths).reshape(batch, blocks, size, *array.shape[2:])
        return jnp.moveaxis(split, 1, 0)  # [blocks, B, size, ...]

    found = jax.lax.map(lambda block: function(*block), tuple(map(cut, arrays)))
    everywhere = NamedSharding(setup.mesh, PartitionSpec())
    whole = jax.tree.map(
        lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, blocks * size)[:, :columns], found
    )
    return jax.lax.with_sharding_constraint(whole, jax.tree.map(lambda _: everywhere, whole))
