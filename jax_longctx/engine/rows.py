"""One row of a running batch: what it is to answer, what it has chosen, and its values."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from jax_longctx.engine.decode import NOT_FINITE
from jax_longctx.engine.sampling import MOST_LOGPROBS, Choices, Form, RowValues, sampling_values
from jax_longctx.errors import InputError
from jax_longctx.settings import Sampling

# Tokens that end an answer take that many columns, or a multiple: few programs are compiled.
STOP_COLUMNS = 16

# Why a row ended: a token of its `stop_ids`, its `max_tokens`, logits that are no numbers, or a
# form that cannot go on.
Reason = Literal["stop", "length", "not finite", "no form"]
# What is told of the answers that could not be given.
FAULTS: dict[Reason, str] = {
    "not finite": NOT_FINITE,
    "no form": "the form has become too complex amid the answer; give a simpler one",
}


@dataclasses.dataclass(frozen=True)
class Ask:
    """What a row of a running batch is to answer.

    Attributes:
      sampling: the row's own; one seed, or a tuple of one.
      max_tokens: most tokens of the answer.
      stop_ids: tokens that end it.
      logprobs: None for none; n for the chosen token and the n most likely ones.
    """

    question: Sequence[int]
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    max_tokens: int = 128
    stop_ids: Sequence[int] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        if not len(self.question):
            raise InputError("the question is empty; it needs at least one token")
        if self.max_tokens < 1:
            raise InputError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MOST_LOGPROBS:
            raise InputError(f"logprobs must be from 0 to {MOST_LOGPROBS}, got {self.logprobs}")


@dataclasses.dataclass(frozen=True)
class Chosen:
    """A token of an answer.

    Attributes:
      logprob: its natural-log probability under the model's own logits, before penalty and
        temperature; None where none is wanted.
      best: the most likely tokens and their log-probabilities, the likeliest first.
    """

    token: int
    logprob: float | None = None
    best: Sequence[tuple[int, float]] = ()


@dataclasses.dataclass
class Row:
    """A row that is being answered.

    Attributes:
      index: of the batch's arrays; in a fitted batch another than its place.
      slots: that it needs; 0 where caches have no size that follows from them.
      tokens: that it has chosen.
      form: of its answer, if any.
    """

    ask: Ask
    index: int
    slots: int
    tokens: list[int]
    form: Form | None

    def take(self, chosen: Sequence[Chosen]) -> None:
        """Takes the row's next tokens."""
        new = [each.token for each in chosen]
        self.tokens += new
        if self.form is not None:
            self.form.take(new)


def values_of(ask: Ask) -> RowValues:
    return with_stops(
        sampling_values(
            ask.sampling.of_rows(1),
            1,
            max_tokens=ask.max_tokens,
            stop_ids=ask.stop_ids,
            logprobs=ask.logprobs is not None,
        )
    )


def with_stops(values: RowValues) -> RowValues:
    """The values with whole `STOP_COLUMNS`."""
    columns = -(-max(values.stops.shape[1], 1) // STOP_COLUMNS) * STOP_COLUMNS
    return dataclasses.replace(values, stops=widened(values.stops, columns))


def widened(stops: Any, columns: int) -> Any:
    return np.pad(stops, ((0, 0), (0, columns - stops.shape[1])), constant_values=-1)


def chosen_of(choices: Choices, row: int, ask: Ask) -> list[Chosen]:
    """What a row has chosen in a block."""
    token = np.asarray(choices.token)[row]
    columns = np.flatnonzero(token >= 0)
    if ask.logprobs is None:
        return [Chosen(int(token[column])) for column in columns]
    own, best, likely = (
        np.asarray(x)[row] for x in (choices.logprob, choices.best, choices.best_logprob)
    )
    found = []
    for x in columns:
        pairs = zip(best[x, : ask.logprobs], likely[x, : ask.logprobs], strict=True)
        ranked = tuple((int(token), float(logprob)) for token, logprob in pairs)
        found.append(Chosen(int(token[x]), float(own[x]), ranked))
    return found
