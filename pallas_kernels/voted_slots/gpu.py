"""Votes, spans and the list of slots on Hopper in one launch.

Each block of threads writes a part of a row's list. All of them count the votes, for few votes take
less time than a launch. A thread holds a vote, and compares it with each, one after another, from
shared memory: how often its slot is named, how many slots rank before, the next lower centre, and
the slots of the spans up to its own. A thread then holds a place of the list, and looks through the
spans for the first one that ends behind it.

Roofline: the latency of 5 passes over the votes: 128 of them some 600 cycles each, 2 us in all. In
its place XLA has eight kernels in a row. On an H200 a step of ReAttention over 131,072 tokens, 8B
shape, takes 7.89 ms, with XLA's form 8.09.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Int

from pallas_kernels import hopper
from pallas_kernels.voted_slots.xla import Spans

# Places of a list that a block of threads writes; votes that registers hold.
_PLACES, _MOST = 128, 1024
# Votes of a turn of the loops: that many reads of shared memory overlap.
_TURN = 8
_LAST = 2**31 - 1


def unsupported(votes: int, size: int) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    if votes > _MOST:
        return f"{votes} votes, at most {_MOST}"
    if size % _PLACES:
        return f"lists of {size}, not a multiple of {_PLACES}"
    return hopper.unsupported_device()


def voted_slots(
    named: Int[Array, "B E"],
    stop: Int[Array, " B"],
    length: Int[Array, " B"],
    spans: Spans,
    *,
    slots: int,
    size: int,
    interpret: Any = None,
) -> tuple[Int[Array, "B C"], Int[Array, " B"]]:
    """See the public function."""
    batch, votes = named.shape
    spare = -votes % _PLACES
    named = jnp.pad(named.astype(jnp.int32), ((0, 0), (0, spare)), constant_values=-1)
    numbers = plgpu.SMEM((votes + spare,), jnp.int32)
    names = "named", "votes", "centres", "lows", "sizes", "ends", "shifts"
    kernel = plgpu.kernel(
        functools.partial(_kernel, spans=spans),
        out_type=(
            hopper.outputs((batch, size), jnp.int32)[0],
            hopper.outputs((batch,), jnp.int32)[0],
        ),
        scratch_types={name: numbers for name in names},
        grid=(batch, size // _PLACES),
        grid_names=("row", "block"),
        interpret=interpret,
        kernel_name="voted_slots",
    )
    found = kernel(named, stop.astype(jnp.int32), length.astype(jnp.int32))
    return found[0], found[1]


def _over_votes(scratch: dict, start: Array, add: Callable[..., Array], **stored: Array) -> Array:
    """The sum over all votes i: add(sum, i, ...) with the stored numbers of i."""
    for name, x in stored.items():
        scratch[name][...] = x
    # All warps have stored.
    plgpu.commit_smem()

    def turn(number: Array, total: Array) -> Array:
        for offset in range(_TURN):
            i = number * _TURN + offset
            total = add(total, i, *(scratch[name][i] for name in stored))
        return total

    return lax.fori_loop(0, scratch["named"].shape[0] // _TURN, turn, start)


def _kernel(*refs, spans: Spans, **scratch) -> None:
    named_ref, stop_ref, length_ref, list_ref, number_ref = refs
    kept, span, first, page = spans
    count = named_ref.shape[1]
    row, block = lax.axis_index("row"), lax.axis_index("block")
    stop, length = stop_ref[row], length_ref[row]
    layout = plgpu.Layout.WG_STRIDED((count,), vec_size=1)
    named = plgpu.load(named_ref.at[row], layout=layout)
    entry = plgpu.broadcasted_iota(jnp.int32, named.shape, 0, layout=layout)
    zeros = hopper.full(named.shape, 0, jnp.int32, layout)

    each = functools.partial(_over_votes, scratch)
    # A vote for a slot that an earlier one names counts more than there are votes.
    most = count + 1

    def add_vote(total: Array, i: Array, its: Array) -> Array:
        one = jnp.where(entry > i, jnp.int32(most), jnp.int32(1))
        return total + jnp.where(named == its, one, 0)

    votes = each(zeros, add_vote, named=named)
    votes = jnp.where((named >= 0) & (votes < most), votes, 0)
    stays = votes > 0
    if kept < count:

        def add_ahead(total: Array, i: Array, its_votes: Array) -> Array:
            lower = (its_votes == votes) & (scratch["named"][i] < named)
            return total + jnp.where((its_votes > votes) | lower, 1, 0)

        stays = stays & (each(zeros, add_ahead, votes=votes) < kept)
    centre = jnp.where(stays, named * page + page // 2, -1)

    def next_lower(found: Array, _: Array, its: Array) -> Array:
        return jnp.maximum(found, jnp.where(its < centre, its, -1))

    before = each(zeros - 1, next_lower, centres=centre)
    begin, end = centre - span // 2, before - span // 2 + span
    taken = jnp.maximum(jnp.minimum(end, stop), first)
    low = jnp.maximum(begin, jnp.where(before < 0, first, taken))
    high = jnp.where(centre < 0, low, jnp.minimum(begin + span, stop))
    size = high - low

    def add_size(total: Array, _: Array, its_low: Array, its_size: Array) -> Array:
        return total + jnp.where(its_low <= low, its_size, 0)

    ends = each(zeros, add_size, lows=low, sizes=size)
    near, ends = jnp.sum(size), jnp.where(size > 0, ends, -1)
    own = plgpu.Layout.WG_STRIDED((_PLACES,), vec_size=1)
    place = plgpu.broadcasted_iota(jnp.int32, (_PLACES,), 0, layout=own) + block * _PLACES
    first = jnp.minimum(length, first)
    inner = place - first

    def first_behind(found: Array, _: Array, its_end: Array, its_shift: Array) -> Array:
        return jnp.minimum(found, jnp.where(its_end > inner, its_shift, jnp.int32(_LAST)))

    # What takes a place to its slot ascends with the spans.
    last = hopper.full((_PLACES,), _LAST, jnp.int32, own)
    shift = each(last, first_behind, ends=ends, shifts=high - ends)
    slot = jnp.where(inner < near, inner + shift, inner - near + stop)
    slot = jnp.where(inner < 0, place, slot)
    number = first + near + jnp.maximum(length - stop, 0)
    list_ref[row, pl.ds(block * _PLACES, _PLACES)] = jnp.where(place < number, slot, -1)

    @pl.when(block == 0)
    def _number():
        number_ref[row] = number
