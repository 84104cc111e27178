"""Rows whose answers have a form, or penalties by count: what the engine adds to their batch.

Which tokens a form allows next depends on the tokens that its row has chosen. The host finds that
out and gives the device a bit for each token. So a batch with such a row comes back to the host for
each token. `jax_longctx.forms` makes forms of JSON schemas.

A batch without such rows has the programs that it would have if there were neither.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import jax
import numpy as np
from jaxtyping import Int, UInt32

from jax_longctx.engine.sampling import RowValues
from jax_longctx.errors import InputError
from jax_longctx.settings import Sampling


class Form(Protocol):
    """The form of one row's answer, and where the answer stands in it."""

    def allowed(self) -> UInt32[np.ndarray, " U"]:
        """The tokens that may come next, at least one, as in `RowValues`.

        Raises:
          InputError: the form cannot go on.
        """
        ...

    def take(self, tokens: Sequence[int]) -> None:
        """Takes tokens that the row has chosen."""
        ...


# Makes forms of `Sampling.form`.
MakesForms = Callable[[str], Form]


def form_of(makes: MakesForms | None, sampling: Sampling) -> Form | None:
    """The form of a row that begins. InputError where it is refused, or nothing makes forms."""
    if sampling.form is None:
        return None
    if makes is None:
        raise InputError("a form needs the tokenizer; ask with LongContext, or set Engine.forms")
    return makes(sampling.form)


def with_bounds(
    values: RowValues,
    samplings: Mapping[int, Sampling],
    masks: Mapping[int, UInt32[np.ndarray, " U"]],
) -> RowValues:
    """The values with penalties by count, and with what forms allow next, where rows have any.

    Args:
      samplings: by row; rows that are not named have neither.
      masks: `Form.allowed` of the rows that have one.
    """
    rows = len(values.limit)
    if any(sampling.counted for sampling in samplings.values()):
        counted = np.zeros((rows, 2), np.float32)
        for row, each in samplings.items():
            counted[row] = each.presence_penalty, each.frequency_penalty
        values = dataclasses.replace(values, counted=jax.device_put(counted))
    if masks:
        words = len(next(iter(masks.values())))
        allowed = np.full((rows, words), np.iinfo(np.uint32).max, np.uint32)
        for row, mask in masks.items():
            allowed[row] = mask
        values = dataclasses.replace(values, allowed=jax.device_put(allowed))
    return values


class Bounds:
    """Forms and penalties of rows that begin together, of one sampling.

    Attributes:
      forms: where each row stands, by row.
    """

    def __init__(self, makes: MakesForms | None, sampling: Sampling, rows: int):
        made = [form_of(makes, sampling) for _ in range(rows)]
        self.forms = {row: form for row, form in enumerate(made) if form is not None}
        self._samplings = dict.fromkeys(range(rows), sampling)

    def of(self, values: RowValues) -> RowValues:
        """`with_bounds` for the next token."""
        masks = {row: form.allowed() for row, form in self.forms.items()}
        return with_bounds(values, self._samplings, masks)

    def take(self, tokens: list[list[int]]) -> list[list[int]]:
        """Takes each row's tokens, and returns them."""
        for row, form in self.forms.items():
            form.take(tokens[row])
        return tokens


def counts_of(
    tokens: Mapping[int, Sequence[int]], rows: int, vocabulary: int
) -> Int[np.ndarray, "B V"]:
    """How often each token is in the answers so far, by row."""
    counts = np.zeros((rows, vocabulary), np.int32)
    for row, chosen in tokens.items():
        np.add.at(counts[row], np.asarray(chosen, np.int64), 1)
    return counts
