"""Streaming attention of the Mosaic GPU kernels with the queries as rows of the products.

All query heads of a kv head are rows of one wgmma, so that keys and values are read once for the
whole group. A wgmma always takes 64 rows; one query uses G of them.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from pallas_kernels import hopper
from pallas_kernels.common import MASKED
from pallas_kernels.hopper import LOG2_E, ROWS
from pallas_kernels.hopper_stream import BLOCK, Reader, Stream

# Warpgroups that attend, and blocks in flight.
READERS, _STAGES = 1, 3
# Columns of a result that are copied out together.
_COLUMNS = 32

# Weighted values [64,H], largest logit (in units of log 2) and sum of weights [64], in registers.
Carry = tuple[Array, Array, Array]


def scratch(stream: Stream, copies: int = 1) -> dict[str, Any]:
    """Two rings in shared memory, of keys and of values, their barriers, and room for results.

    Every slot of a ring has two barriers: the `copies` that fill it arrive at `ready`, and its
    reader at `free`.

    Results leave in windows of 64 rows, which overlap: of each the first rows, whole tiles, count.
    """
    rows = stream.tile_rows
    ring = hopper.tiled(_STAGES, BLOCK, stream.head_dim, dtype=stream.dtype)
    ready = plgpu.Barrier(num_arrivals=copies, num_barriers=_STAGES)
    free = plgpu.Barrier(num_barriers=_STAGES)
    windows = max(w for w in (4, 2, 1) if w == 1 or ROWS + (w - 1) * rows <= stream.out_rows)
    return dict(
        rings=(ring, ring),
        ready=(ready, ready),
        free=(free, free),
        scales=(None, None),
        out_tile=hopper.tiled(ROWS + (windows - 1) * rows, _COLUMNS, dtype=jnp.float32),
        lse_tile=plgpu.SMEM((ROWS,), jnp.float32),
    )


def attend(
    me: Reader,
    blocks: tuple[Any, Any],
    q: Any,
    *,
    mask: Callable[[Array, Array], Array],
    ahead: Any = None,
) -> Carry:
    """Attend to the blocks first <= j < last, as their keys and values come into the rings.

    Args:
      q: [64,H] in shared memory; rows that are not wanted may hold anything.
      mask: makes block j's logits [64,slots] -inf where they are not seen.
      ahead: block j is step `ahead` + j of the rings; None is 0.
    """
    rings, ready, free = (me.scratch[name] for name in ("rings", "ready", "free"))
    scale, interpreted = me.stream.scale * LOG2_E, me.stream.interpret is not None

    def step(j: Array, carry: Carry) -> Carry:
        acc, top, total = carry
        slot = lax.rem(j if ahead is None else ahead + j, _STAGES)
        plgpu.barrier_wait(ready[0].at[slot])
        s = hopper.product(q, rings[0].at[slot].transpose((1, 0)))
        logits = mask(s * scale, j)
        new_top = jnp.maximum(top, logits.max(axis=1))
        shrink = jnp.exp2(top - new_top)
        p = jnp.exp2(logits - lax.broadcast_in_dim(new_top, s.shape, [0]))
        total = total * shrink + p.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
        p = p.astype(q.dtype)
        plgpu.barrier_arrive(free[0].at[slot])
        plgpu.barrier_wait(ready[1].at[slot])
        acc = hopper.add_product(acc, p, rings[1].at[slot], interpreted)
        plgpu.barrier_arrive(free[1].at[slot])
        return acc, new_top, total

    sums = plgpu.Layout.WGMMA.reduce(1)
    nothing = (
        hopper.full((ROWS, rings[0].shape[-1]), 0.0),
        hopper.full((ROWS,), MASKED, layout=sums),
        hopper.full((ROWS,), 0.0, layout=sums),
    )
    return lax.fori_loop(*blocks, step, nothing)


def _attended(carry: Carry) -> tuple[Float[Array, "R H"], Float[Array, " R"]]:
    """The mean of the values and the natural log-sum-exp; 0 and -inf where nothing was seen."""
    acc, top, total = carry
    some = total > 0
    total = jnp.where(some, total, 1.0)
    out = acc / lax.broadcast_in_dim(total, acc.shape, [0])
    return out, jnp.where(some, top / LOG2_E + jnp.log(total), -jnp.inf)


def write(me: Reader, carry: Carry, out_ref: Any, lse_ref: Any, *, number: Any) -> None:
    """Begin to write the first rows of the output, as many as `out_ref` has, and all log-sum-exps.

    `finish` waits until all is there. The next call waits for this one only as long as it must.
    """
    out, lse = _attended(carry)
    lse_tile = me.scratch["lse_tile"]
    _write_rows(out, out_ref, me.scratch["out_tile"])
    # The copies of earlier pieces have left `lse_tile` too: `_write_rows` has waited for them.
    lse_tile[...] = lse
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(lse_tile, lse_ref)


def write_logits(me: Reader, logits: Array, ref: Any) -> None:
    """Begin to write the first rows of a block's logits, as many as `ref` [R,slots] has."""
    _write_rows(logits, ref, me.scratch["out_tile"])


def finish(me: Reader, pieces: Any) -> None:
    """Wait for all writes; needed before a kernel ends."""
    plgpu.wait_smem_to_gmem(0)


def _write_rows(x: Array, ref: Any, tile: Any) -> None:
    """Begin to write the first rows of x [64,M], as many as `ref` [R,M] has.

    Registers are stored to shared memory 64 rows at a time. Where few rows count, the windows of
    several pieces of columns overlap. A piece overwrites only rows of earlier pieces that do not
    count, so that no piece waits until another has been copied out.
    """
    rows, all_columns = ref.shape
    windows = (tile.shape[0] - ROWS) // rows + 1
    for first in range(0, all_columns, windows * _COLUMNS):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        columns = range(first, min(first + windows * _COLUMNS, all_columns), _COLUMNS)
        for i, column in enumerate(columns):
            place = tile.at[pl.ds(i * rows, ROWS)]
            place[...] = x[:, column : column + _COLUMNS]
            # For all warps: this piece must be stored before the next one overwrites its end.
            plgpu.commit_smem()
        for i, column in enumerate(columns):
            plgpu.copy_smem_to_gmem(
                tile.at[pl.ds(i * rows, rows)], ref.at[:, pl.ds(column, _COLUMNS)]
            )
