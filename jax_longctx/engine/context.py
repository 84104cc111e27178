"""A context, and what feeds texts and questions into its caches."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from jax_longctx.contract import Feed, Method, Segment
from jax_longctx.engine.capacity import held_bytes
from jax_longctx.engine.prefill import Logits, run_segment
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import InputError


@dataclasses.dataclass(frozen=True)
class Progress:
    """Tokens prefilled so far, in all rows, and the seconds."""

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
      caches: one a layer, or one for each run of layers that are alike (see `engine.runs`); None
        while a question over an append-only method borrows them.
      questions: the questions of the prefill, where the method needs them.
      answering_bytes: what the newest answer's caches held, over all devices.
      host_bytes: what they held in the hosts' memory.
      method: the method that prefilled it; no other can ask it. None is not checked.
    """

    rows: list[list[int]]
    batch: int
    slots: int
    reserve: int
    total: jax.Array
    caches: tuple[Any, ...] | None
    questions: list[list[int]] | None = None
    answering_bytes: int = 0
    host_bytes: int = 0
    method: Method | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row) for row in self.rows[: self.batch]]

    @property
    def resident_bytes(self) -> int:
        """Bytes the caches hold, over all devices."""
        return held_bytes(self.usable_caches())[0]

    def usable_caches(self) -> tuple[Any, ...]:
        """The caches. Raises InputError while they are lent out, or when they were lost."""
        if self.caches is None:
            raise InputError(
                "this context is answering another question (finish or close that first), or was "
                "given up for its last one"
            )
        arrays = (leaf for leaf in jax.tree.leaves(self.caches) if isinstance(leaf, jax.Array))
        if any(leaf.is_deleted() for leaf in arrays):
            raise InputError("this context was lost to an interruption; prefill it again")
        return self.caches


@dataclasses.dataclass
class Live:
    """The caches of the question at hand: always the newest, the older ones were donated.

    `whole` are the context's and the question's, where the answer is read from others.
    """

    caches: tuple[Any, ...]
    whole: tuple[Any, ...] | None = None


def prefill_text(
    setup: Setup, params: Any, live: Live, feed: Feed, total: Any, wanted: Logits = "none"
) -> Iterator[tuple[Segment, Any]]:
    """Prefills what is fed; each segment with what `run_segment` returns of it.

    InputError where a segment is `wanted` and does not follow the one before.
    """
    for segment in setup.method.segments(feed):
        if wanted != "none" and segment.spread:
            raise InputError("this method reads a text in parts side by side; it cannot score one")
        kind: Logits = "none" if segment.role == "probe" else wanted
        live.caches, found = run_segment(setup, params, live.caches, segment, total, None, kind)
        yield segment, found


def prefill_question(
    setup: Setup, params: Any, live: Live, rows: list[list[int]], total: Any
) -> Float[Any, "B V"]:
    """Feeds the questions; the logits of each row's first token, zeros of a row without one."""
    logits = jax.device_put(np.zeros((len(rows), setup.config.vocab_size), np.float32))
    for segment in setup.method.segments(setup.feed("question", 0, question=rows)):
        given = setup, params, live.caches, segment, total, logits
        live.caches, logits = run_segment(*given, "last")
    return logits
