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
from jax_longctx.sharding import tree_shardings

__all__ = ["Footprint", "answering_caches", "footprint", "read_bytes", "staged_caches"]


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


def footprint(
    setup: programs.Setup, *, batch: int, context: int, reserve: int, per_device: bool = False
) -> Footprint:
    """The caches of `batch` rows of `context` tokens, with `reserve` for question and answer.

    `per_device` gives the bytes on each device of the mesh; `read` is of all devices always.
    """
    local = functools.partial(_on_a_device, setup) if per_device else lambda caches: caches
    empty = _empty(setup, batch, context, reserve)
    kept = _finished(setup, empty, "context", reserve)
    peak = _bytes(local(empty)) + _not_in_place(local(empty), local(kept))
    answering = kept
    if setup.method.info.shrinks:
        answering = _finished(setup, kept, "question", bucket(reserve))
        peak = max(peak, _bytes(local(kept)) + _bytes(local(answering)))
    read = read_bytes(setup, answering, context)
    return Footprint(peak, _bytes(local(answering)), _bytes(local(kept)), read)


def answering_caches(
    setup: programs.Setup, batch: int, context: int, reserve: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Shapes of every layer's empty cache, and of the one that an answer is read from."""
    empty, _, answering = staged_caches(setup, batch, context, reserve)
    return empty, answering


def staged_caches(
    setup: programs.Setup, batch: int, context: int, reserve: int
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Shapes of every layer's cache: empty, after the context, and while answering."""
    empty = _empty(setup, batch, context, reserve)
    kept = answering = _finished(setup, empty, "context", reserve)
    if setup.method.info.shrinks:
        answering = _finished(setup, kept, "question", bucket(reserve))
    return empty, kept, answering


def _empty(setup: programs.Setup, batch: int, context: int, reserve: int) -> tuple[Any, ...]:
    slots = bucket(context + reserve + 1, setup.mesh.shape["seq"])
    return programs.abstract_caches(setup, batch, slots, reserve)


def read_bytes(setup: programs.Setup, caches: tuple[Any, ...], length: int) -> int:
    """What a decode step reads of all layers' caches (shapes will do) at context `length`."""
    return sum(setup.method.read_bytes(_hollow(cache), length) for cache in caches)


def _on_a_device(setup: programs.Setup, caches: tuple[Any, ...]) -> list[jax.ShapeDtypeStruct]:
    """The shards of one device, as shapes."""
    leaves = jax.tree.leaves(caches)
    shardings = jax.tree.leaves(tree_shardings(setup.mesh, caches))
    return [
        jax.ShapeDtypeStruct(sharding.shard_shape(leaf.shape), leaf.dtype)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    ]


def _finished(setup: programs.Setup, caches: Any, stage: Stage, reserve: int) -> tuple[Any, ...]:
    """Shapes after `finish`; layers that are alike are traced once."""
    found: dict[Any, Any] = {}

    def finished(window: int | None, cache: Any) -> Any:
        leaves, structure = jax.tree.flatten(cache)
        key = (window, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key in found:
            return found[key]
        total = jax.ShapeDtypeStruct((leaves[0].shape[0],), jnp.int32)
        finish = functools.partial(
            programs.finish_layer, setup, window, stage=stage, reserve=reserve
        )
        found[key] = jax.eval_shape(finish, cache, total)
        return found[key]

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
