"""What a method's caches hold in memory, and what a decode step reads of them, from shapes alone.

Nothing is allocated: caches are traced through `init_cache` and `finish`. The bytes are those of
all devices together; a test compares them with the compiled programs' own accounts.
"""

import collections
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_longctx.contract import Stage
from jax_longctx.engine import programs
from jax_longctx.engine.capacity import bucket

__all__ = ["Footprint", "footprint"]


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of all layers' caches.

    Attributes:
      peak: the most at any time from the start of prefill to the answer.
      resident: while answering, when no other question will follow.
      kept: after prefill, when the context is kept for more questions.
      read: what one decode step reads, at the context's length.
    """

    peak: int
    resident: int
    kept: int
    read: int


def footprint(setup: programs.Setup, *, batch: int, context: int, reserve: int) -> Footprint:
    """The caches of `batch` rows of `context` tokens, with `reserve` for question and answer."""
    slots = bucket(context + reserve + 1, setup.mesh.shape["seq"])
    empty = programs.abstract_caches(setup, batch, slots, reserve)
    kept = _finished(setup, empty, "context", reserve)
    peak = _bytes(empty) + _not_in_place(empty, kept)
    answering = kept
    if setup.method.info.shrinks:
        answering = _finished(setup, kept, "question", bucket(reserve))
        peak = max(peak, _bytes(kept) + _bytes(answering))
    read = sum(setup.method.read_bytes(_hollow(cache), context) for cache in answering)
    return Footprint(peak, _bytes(answering), _bytes(kept), read)


def _finished(setup: programs.Setup, caches: Any, stage: Stage, reserve: int) -> tuple[Any, ...]:
    """Shapes after `finish`."""

    def finished(window: int | None, cache: Any) -> Any:
        total = jax.ShapeDtypeStruct((jax.tree.leaves(cache)[0].shape[0],), jnp.int32)
        finish = functools.partial(
            programs.finish_layer, setup, window, stage=stage, reserve=reserve
        )
        return jax.eval_shape(finish, cache, total)

    return tuple(map(finished, setup.config.windows, caches))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _not_in_place(before: Any, after: Any) -> int:
    """Bytes of `after` beyond what the donated buffers of `before` can hold."""

    def shapes(tree: Any) -> collections.Counter[Any]:
        return collections.Counter((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))

    new = shapes(after) - shapes(before)
    return sum(
        count * int(np.prod(shape)) * dtype.itemsize for (shape, dtype), count in new.items()
    )


def _hollow(cache: Any) -> Any:
    """The cache with arrays that have a size and no memory."""
    return jax.tree.map(lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), cache)
