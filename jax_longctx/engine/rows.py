"""Token rows as callers give them: checked, and padded to the mesh."""

from collections.abc import Sequence

import numpy as np

from jax_longctx.errors import InputError

__all__ = ["Rows", "check_questions", "checked_rows"]

Rows = Sequence[Sequence[int]]


def checked_rows(rows: Rows, vocab_size: int, data_shards: int) -> list[list[int]]:
    """The rows as lists, with empty ones added to fill the mesh's data axis.

    Raises:
      InputError: no rows, or a token id outside the vocabulary.
    """
    if not len(rows):
        raise InputError("no rows given; expected at least one")
    for b, row in enumerate(rows):
        ids = np.asarray(row, np.int64)
        bad = ids[(ids < 0) | (ids >= vocab_size)]
        if bad.size:
            raise InputError(
                f"row {b} holds token id {bad[0]}, the model's vocabulary is 0..{vocab_size - 1}; "
                f"use the tokenizer that belongs to the checkpoint"
            )
    return [*map(list, rows), *([] for _ in range(-len(rows) % data_shards))]


def check_questions(questions: Rows, count: int) -> None:
    """Raises InputError unless there is one question, not empty, for each of `count` contexts."""
    if len(questions) != count:
        raise InputError(f"{count} contexts need as many questions, {len(questions)} given")
    for row, question in enumerate(questions):
        if not len(question):
            raise InputError(f"question {row} is empty; it needs at least one token")
