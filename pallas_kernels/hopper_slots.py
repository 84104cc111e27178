"""Streaming attention of the Mosaic GPU kernels with the slots as rows of the products.

`hopper_rows` has the queries as the 64 rows of a wgmma, of which a group's queries use few. Here a
block's slots are the rows and the queries the columns, of which 8 are the fewest: the logits are
keys @ q.T, and the weighted values values.T @ weights.T. So products and softmax of one query take
an eighth of the time. Keys and values in 8 bits become 16 bits in registers, on their way to the
product (`hopper_bits`), and the scales multiply the rows of logits and weights.

Two warpgroups take blocks in turn, each with its own largest logits and sums, so that one's waits
are the other's work. At the end of a piece the second hands its sums to the first, which merges and
writes them. The weights pass through shared memory, as the second operand of a wgmma must.

Of 128 slots in int8 with heads of 128 a multiprocessor gets a block in some 2,000 cycles. A warp
takes 830 instructions for it, 520 of them to convert, which are some 1,200 cycles of its scheduler;
of shared memory 450 cycles. On an H200 a step of full attention over 131,072 tokens in int8, 8B
shape, takes 6.47 ms, with XLA's form 38.1. Rejected: keys and values in 16 bits like this. A step
takes 8.37 ms in place of 8.46 under full attention, but 6.00 in place of 5.36 under Quest.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper, hopper_bits
from pallas_kernels.common import MASKED
from pallas_kernels.hopper import LOG2_E
from pallas_kernels.hopper_stream import BLOCK, Reader, Stream, scaled
from pallas_kernels.quantised import SCALES

# Warpgroups that attend, and the registers of their threads and of those that copy.
READERS, REGISTERS = 2, (224, 56)
# Shared memory of a block of threads, what of it a kernel has for other things, and the most blocks
# in flight.
_SHARED_BYTES, _OTHER_BYTES, _MOST_STAGES = 232_448, 8192, 6
_SCALE_BYTES = jnp.dtype(SCALES).itemsize

# Weighted values [H,N], the largest logit of each column (in units of log 2) [N], and the sums of
# weights over every 64th row [64,N].
Carry = tuple[Array, Array, Array]


def stages(stream: Stream) -> int:
    """Blocks in flight: as many as shared memory holds, and the same warpgroup's in each place."""
    head_dim, rows, itemsize = stream.head_dim, stream.tile_rows, jnp.dtype(stream.dtype).itemsize
    each = sum(
        BLOCK * (head_dim * jnp.dtype(x).itemsize + _SCALE_BYTES * scaled(x)) for x in stream.stored
    )
    # Weights, queries, the next head's queries, and sums that are handed on.
    weights = READERS * rows * BLOCK * itemsize
    queries = (2 if rows == hopper.TILE_ROWS else 1) * rows * head_dim * itemsize
    handed = rows * 4 * (head_dim + 4 * READERS + 3)
    found = (_SHARED_BYTES - _OTHER_BYTES - weights - queries - handed) // each
    return min(found // READERS * READERS, _MOST_STAGES)


def scratch(stream: Stream, copies: int = 1) -> dict[str, Any]:
    """Rings of keys and of values as `hopper_rows` has, scales, and what `attend` needs.

    Args:
      copies: those that fill a block of keys or values, without its scales.
    """
    number, head_dim, rows = stages(stream), stream.head_dim, stream.tile_rows
    parts = []
    for kind in stream.stored:
        ready = plgpu.Barrier(num_arrivals=copies + scaled(kind), num_barriers=number)
        ring = hopper.tiled(number, BLOCK, head_dim, dtype=kind)
        scales = plgpu.SMEM((number, BLOCK), SCALES) if scaled(kind) else None
        parts.append((ring, ready, plgpu.Barrier(num_barriers=number), scales))
    rings, ready, free, scales = zip(*parts, strict=True)
    return dict(
        rings=rings,
        ready=ready,
        free=free,
        scales=scales,
        weights=hopper.tiled(READERS, rows, BLOCK, dtype=stream.dtype),
        across=plgpu.SMEM((READERS, 4, rows), jnp.float32),
        handed=plgpu.SMEM((head_dim, rows), jnp.float32),
        handed_sums=plgpu.SMEM((2, rows), jnp.float32),
        handing=plgpu.Barrier(),
        taken=plgpu.Barrier(),
        lse_tile=plgpu.SMEM((rows,), jnp.float32),
    )


def attend(
    me: Reader,
    blocks: tuple[Any, Any],
    q: Any,
    *,
    mask: Callable[[Array, Array], Array],
    ahead: Any = None,
) -> Carry:
    """Attend to this warpgroup's share of the blocks first <= j < last, as they come.

    Args:
      q: [N,H] in shared memory, for 8 bits `hopper_bits.in_column_order`.
      mask: makes block j's logits [slots,N] -inf where they are not seen.
      ahead: block j is step `ahead` + j of the rings; None is 0.
    """
    (reader, scratch, stream), ahead = me, 0 if ahead is None else ahead
    interpreted = stream.interpret is not None
    rings, ready, free = (scratch[name] for name in ("rings", "ready", "free"))
    places, block, head_dim = rings[0].shape
    scales = scratch["scales"]
    weights, across = scratch["weights"].at[reader], scratch["across"].at[reader]
    first, last = blocks
    first = first + lax.rem(reader + READERS - lax.rem(ahead + first, READERS), READERS)
    columns = q.shape[0]

    def step(i: Array, carry: Carry) -> Carry:
        acc, top, totals = carry
        j = first + i * READERS
        slot = lax.rem(ahead + j, places)
        plgpu.barrier_wait(ready[0].at[slot])
        keys = rings[0].at[slot]
        if scales[0] is not None:
            keys = hopper_bits.rows_of(keys, q.dtype, interpreted)
        nothing = hopper.full((block, columns), 0.0)
        s = hopper.add_product(nothing, keys, q.transpose((1, 0)), interpreted)
        s = _times(s, scales[0], slot)
        plgpu.barrier_arrive(free[0].at[slot])
        logits = mask(s * (stream.scale * LOG2_E), j)
        new_top = jnp.maximum(top, hopper_bits.over_rows(logits, across, "max", interpreted))
        shrink = jnp.exp2(top - new_top)
        p = jnp.exp2(logits - lax.broadcast_in_dim(new_top, logits.shape, [1]))
        totals = totals * lax.broadcast_in_dim(shrink, totals.shape, [1])
        for row in range(0, block, hopper.ROWS):
            totals = totals + p[row : row + hopper.ROWS]
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [1])
        plgpu.barrier_wait(ready[1].at[slot])
        p = _times(p, scales[1], slot).astype(q.dtype)
        weights.transpose((1, 0))[...] = plgpu.layout_cast(p, plgpu.Layout.WGMMA_TRANSPOSED)
        values = rings[1].at[slot]
        if scales[1] is not None:
            values = hopper_bits.columns_of(values, q.dtype, interpreted)
            plgpu.barrier_arrive(free[1].at[slot])
        else:
            values = values.transpose((1, 0))
        plgpu.commit_smem()
        acc = hopper.add_product(acc, values, weights.transpose((1, 0)), interpreted)
        if scales[1] is None:
            plgpu.barrier_arrive(free[1].at[slot])
        return acc, new_top, totals

    sums = plgpu.Layout.WGMMA.reduce(0)
    start = (
        hopper.full((head_dim, columns), 0.0),
        hopper.full((columns,), MASKED, layout=sums),
        hopper.full((hopper.ROWS, columns), 0.0),
    )
    mine = lax.div(jnp.maximum(last - first + READERS - 1, 0), READERS)
    return lax.fori_loop(0, mine, step, start)


def _times(x: Array, scales: Any, slot: Array) -> Array:
    """A block's rows times its slots' scales, where there are any."""
    if scales is None:
        return x
    mine = plgpu.load(scales.at[slot], layout=plgpu.Layout.WGMMA.reduce(1))
    return x * lax.broadcast_in_dim(mine.astype(jnp.float32), x.shape, [0])


def write(me: Reader, carry: Carry, out_ref: Any, lse_ref: Any, *, number: Any) -> None:
    """Merge the warpgroups' results and begin to write: all call this for every piece.

    Args:
      out_ref, lse_ref: [N,H] and [N] in global memory.
      number: of the piece, from 0.
    """
    reader, scratch, stream = me
    interpreted = stream.interpret is not None
    acc, top, totals = carry
    total = hopper_bits.over_rows(totals, scratch["across"].at[reader], "sum", interpreted)
    handed, sums = scratch["handed"], scratch["handed_sums"]

    @pl.when(reader == 1)
    def _hand():
        pl.when(number > 0)(functools.partial(plgpu.barrier_wait, scratch["taken"]))
        handed[...] = acc
        sums.at[0][...] = top
        sums.at[1][...] = total
        # The next piece's maximum takes the place of this sum.
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["handing"])

    @pl.when(reader == 0)
    def _merge():
        plgpu.barrier_wait(scratch["handing"])
        other = plgpu.load(handed, layout=plgpu.Layout.WGMMA)
        columns = plgpu.Layout.WGMMA.reduce(0)
        other_top, other_total = (plgpu.load(sums.at[i], layout=columns) for i in range(2))
        plgpu.barrier_arrive(scratch["taken"])
        new_top = jnp.maximum(top, other_top)
        mine, its = jnp.exp2(top - new_top), jnp.exp2(other_top - new_top)
        both = total * mine + other_total * its
        some = both > 0
        both = jnp.where(some, both, 1.0)
        mine, its = (lax.broadcast_in_dim(x / both, acc.shape, [1]) for x in (mine, its))
        out = acc * mine + other * its
        if scratch["scales"][1] is not None:
            out = hopper_bits.in_row_order(out, interpreted)
        else:
            out = plgpu.layout_cast(out, plgpu.Layout.WGMMA_TRANSPOSED)
        hopper.store_little(out, out_ref.transpose((1, 0)))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        lse = jnp.where(some, new_top / LOG2_E + jnp.log(both), -jnp.inf)
        scratch["lse_tile"][...] = lse
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(scratch["lse_tile"], lse_ref)


def write_logits(me: Reader, logits: Array, ref: Any) -> None:
    """Write a block's logits [slots,N] to `ref` [N,slots]."""
    hopper.store_transposed(logits, ref)


def finish(me: Reader, pieces: Any) -> None:
    """Wait for all writes and all hands: each warpgroup calls this after its last piece."""
    taken = me.scratch["taken"]
    pl.when((me.number == 1) & (pieces > 0))(functools.partial(plgpu.barrier_wait, taken))
    plgpu.wait_smem_to_gmem(0)
