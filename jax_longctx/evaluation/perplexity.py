"""Perplexity of long texts under a method, by the protocols of the papers.

Perplexity is exp of the mean negative log-likelihood (nll, in nats) of the scored tokens, each
given all before it as the method keeps or reads it. Where methods differ is in what is scored and
how it is fed (`jax_longctx.engine.forced`):

- P1 (RefreshKV, Table 1 and Fig. 3): of 16,384 tokens the last 256 are decoded one by one;
- P2 (RefreshKV, Table 5): the same with the last 50;
- P3 (CItruS, Figs. 7 and 9 to 12): a stream, every token scored as the text is read in the
  method's chunks, perplexity over windows of 8,192 tokens;
- P4: the same with windows of 4,096, for ReAttention: flat beyond the trained length or not;
- P5: the last 256 tokens as one question behind the context, for Star Attention, whose phase 1
  reads the context alone.

P1 and P2 count the scored tokens in the length. No token's prediction has the help of later ones:
methods whose chunks choose together what they attend (ReAttention, InfLLM) are decoded token by
token also in P3 and P4, unless `ahead` asks for what the chunks give, which is then marked.

Intervals are of a bootstrap over texts, and differences are paired: every method reads the same
texts.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jaxtyping import Float, Int

from jax_longctx.engine import Engine
from jax_longctx.engine.scoring import States, Through, forced_states, gathered
from jax_longctx.errors import InputError

__all__ = ["PROTOCOLS", "Protocol", "Scores", "perplexity", "score_texts", "windows"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Protocol:
    """What is scored of a text, and how it is fed.

    Attributes:
      through: as `forced_states` takes it.
      length: tokens of a text, the scored ones among them.
      score: how many of the last tokens are scored; None for all but the first.
      window: scored tokens that a point of a curve over positions has.
      stream: whether texts may run on from one document to the next.
    """

    through: Through
    length: int
    score: int | None
    window: int
    stream: bool = False


PROTOCOLS = {
    "P1": Protocol(through="decode", length=16384, score=256, window=16),
    "P2": Protocol(through="decode", length=16384, score=50, window=10),
    "P3": Protocol(through="context", length=65536, score=None, window=8192, stream=True),
    "P4": Protocol(through="context", length=65536, score=None, window=4096, stream=True),
    "P5": Protocol(through="question", length=16384, score=256, window=16),
}


@dataclasses.dataclass(frozen=True)
class Scores:
    """What a method makes of texts.

    Attributes:
      losses: nll in nats of every text's scored tokens.
      through: how they were fed.
      ahead: whether the method's chunks chose together, so that they are no predictions.
      read_seconds, score_seconds: of each batch, before its first scored states and from then on.
    """

    losses: Float[np.ndarray, "n S"]
    through: Through
    ahead: bool
    read_seconds: list[float]
    score_seconds: list[float]


def score_texts(
    engine: Engine,
    texts: Int[np.ndarray, "n T"],
    *,
    through: Through,
    score: int | None = None,
    batch: int = 1,
    question: Sequence[int] = (),
    ahead: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Scores:
    """Losses of the last `score` tokens of every text (None: all but the first).

    Args:
      through: how they are fed; `decode` where the method would look ahead, unless `ahead`.
      batch: texts that are read together.
      question: what methods that need one at prefill read the text for, with `through="context"`.
      progress: called with (scored tokens, scored tokens in all).

    Raises:
      InputError: no texts, or nothing is left of one before its scored tokens.
      CapacityError: a batch's caches do not fit.
    """
    count, length = texts.shape
    scored = length - 1 if score is None else score
    if batch < 1:
        raise InputError(f"a batch has at least one text, got {batch}")
    if not count or not 1 <= scored < length:
        raise InputError(
            f"{count} texts of {length} tokens leave nothing to score the last {scored} tokens of; "
            f"give texts that are longer than these, and at least one of each"
        )
    looks = engine.method.info.looks_ahead
    through = "decode" if looks and not ahead else through
    found = Scores(np.zeros((count, scored), np.float32), through, looks and ahead, [], [])
    asked = [list(question)] * batch if question and through == "context" else None
    for start in range(0, count, batch):
        rows = texts[start : start + batch]
        # The last batch is filled up with its last text: one shape for all.
        padded = np.concatenate([rows, np.repeat(rows[-1:], batch - len(rows), axis=0)])
        begun = time.perf_counter()
        states = forced_states(
            engine,
            padded[:, : length - scored].tolist(),
            padded[:, length - scored :].tolist(),
            through=through,
            questions=asked,
            ahead=ahead,
        )
        first = next(states)
        first.hidden.block_until_ready()
        read = time.perf_counter()
        pieces = itertools.chain([first], states)
        if progress is not None:
            pieces = _told(pieces, len(rows), start * scored, count * scored, progress)
        likelihoods = gathered(engine, pieces, len(rows))
        found.read_seconds.append(read - begun)
        found.score_seconds.append(time.perf_counter() - read)
        found.losses[start : start + batch] = -np.stack([row.logprobs for row in likelihoods])
    return found


def _told(
    states: Iterator[States], rows: int, done: int, total: int, progress: Callable[[int, int], None]
) -> Iterator[States]:
    """The pieces; each is told of once the next is asked for."""
    for piece in states:
        yield piece
        done += int(np.sum(piece.targets[:rows] >= 0))
        progress(done, total)


def perplexity(losses: Sequence[float] | np.ndarray) -> float:
    """exp of the mean loss."""
    return float(np.exp(np.mean(losses)))


def windows(
    losses: Float[np.ndarray, "n S"], *, first: int, window: int
) -> list[tuple[int, int, list[float]]]:
    """Mean losses over windows of positions: (first position, last position, one a text).

    Windows begin at multiples of `window` behind `first`, the position of the first scored token.
    """
    ends = range(0, losses.shape[1], window)
    parts = [losses[:, at : at + window] for at in ends]
    return [
        (first + at, first + at + part.shape[1] - 1, part.mean(1, dtype=np.float64).tolist())
        for at, part in zip(ends, parts, strict=True)
    ]
