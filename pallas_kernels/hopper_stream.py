"""What both forms of streaming attention on Hopper share: static arguments, and rings of blocks.

The kernels of decode attention, dense and sparse, attend to blocks of 128 slots as these come into
shared memory. In `hopper_rows` the queries are the rows of the products, in `hopper_slots` the
slots. Each form has the functions `scratch`, `attend`, `write`, `write_logits` and `finish`, and
says how many warpgroups attend (`READERS`); another one copies.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper

# Slots of a block.
BLOCK = 128


@dataclass(frozen=True, kw_only=True)
class Stream:
    """How the query rows of a head, or of a list, attend to their blocks.

    Attributes:
      dtype: of the queries.
      stored: dtypes of keys and of values.
      out_rows: of the buffer through which `hopper_rows` writes, at most.
    """

    rows: int
    head_dim: int
    dtype: Any
    stored: tuple[Any, Any]
    scale: float
    interpret: Any
    out_rows: int = 80

    @property
    def by_slots(self) -> bool:
        """Whether the slots are the rows of the products: where keys or values have 8 bits."""
        return any(map(scaled, self.stored))

    @property
    def slots_axis(self) -> int:
        """The axis of the logits along which the slots lie."""
        return 0 if self.by_slots else 1

    @property
    def tile_rows(self) -> int:
        """Rows read and written: whole tiles."""
        return pl.cdiv(self.rows, hopper.TILE_ROWS) * hopper.TILE_ROWS

    @property
    def operand_rows(self) -> int:
        """Rows that a product takes; rows beyond `tile_rows` may hold anything."""
        return self.tile_rows if self.by_slots else hopper.ROWS


class Reader(NamedTuple):
    """A warpgroup that attends: its number below READERS, and its references."""

    number: Array
    scratch: dict[str, Any]
    stream: Stream


def scaled(kind: Any) -> bool:
    """Whether keys or values of this dtype have 8 bits, and scales."""
    return jnp.dtype(kind).itemsize == 1


def fill(
    scratch: dict,
    refs: Sequence,
    scale_refs: Sequence,
    step: Array,
    copy: Callable,
    copy_scales: Callable,
) -> None:
    """Copy a step's keys and values, and the scales there are, once their place is free.

    Args:
      copy, copy_scales: called with (ref, place, ready).
    """
    slot, left = lax.rem(step, scratch["rings"][0].shape[0]), iter(scale_refs)
    places = (scratch[name] for name in ("rings", "ready", "free", "scales"))
    for ref, ring, ready, free, scales in zip(refs, *places, strict=True):
        pl.when(step >= ring.shape[0])(functools.partial(plgpu.barrier_wait, free.at[slot]))
        copy(ref, ring.at[slot], ready.at[slot])
        if scales is not None:
            copy_scales(next(left), scales.at[slot], ready.at[slot])


def drain(scratch: dict, steps: Array) -> None:
    """Wait until the last of `steps` copied blocks have been used."""
    for free in scratch["free"]:
        hopper.drain(free, steps, scratch["rings"][0].shape[0])
