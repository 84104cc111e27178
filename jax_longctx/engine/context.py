"""A prefilled context, and how far a prefill has come."""

import dataclasses
from typing import Any

import jax

from jax_longctx.errors import InputError

__all__ = ["Context", "Progress"]


@dataclasses.dataclass(frozen=True)
class Progress:
    """Tokens read so far, of all rows, and the seconds it took."""

    done: int
    total: int
    seconds: float


@dataclasses.dataclass
class Context:
    """A prefilled context: a handle for `Engine.stream`; the engine alone changes it.

    Attributes:
      rows: the context's token ids, padding rows included.
      batch: rows that are the caller's (the rest pads the mesh's data axis).
      slots: capacity of the cache in tokens.
      reserve: slots that are free for a question and its answer.
      total: each row's total length, as rotary embedding sees it.
      caches: one a layer; None while a question over an append-only method borrows them.
      questions: the questions it was read for, where the method needs them at prefill.
      answering_bytes: what the newest answer's caches held, over all devices.
    """

    rows: list[list[int]]
    batch: int
    slots: int
    reserve: int
    total: jax.Array
    caches: tuple[Any, ...] | None
    questions: list[list[int]] | None = None
    answering_bytes: int = 0

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row) for row in self.rows[: self.batch]]

    @property
    def resident_bytes(self) -> int:
        """Bytes the caches hold, over all devices."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.usable_caches()))

    def usable_caches(self) -> tuple[Any, ...]:
        """The caches. Raises InputError while they are lent out, or when they were lost."""
        if self.caches is None:
            raise InputError(
                "this context is answering another question (finish or close that first), or was "
                "given up for its last one"
            )
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.caches)):
            raise InputError("this context was lost to an interruption; prefill it again")
        return self.caches
