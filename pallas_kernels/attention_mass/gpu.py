"""Attention mass on Hopper: a key's probabilities are summed in the registers that compute them.

Keys are the rows of the wgmma and queries its columns. A thread holds parts of a key's row, so that
the sum over queries is elementwise on registers, [64,8] a warpgroup, and crosses lanes only after
the last query. Three warpgroups keep 64 keys each in shared memory while a fourth streams all
queries of the group past them with their log-sum-exps; exponentials of one warpgroup overlap the
matmuls of the others. Queries that do not count have an infinite log-sum-exp.

Work items (192 keys of a head) are dealt to the workers in turn, one worker a multiprocessor. The
next item's keys are copied while this one's last queries are in use. Items beyond a row's length
are only zeroed. For the squares of a group's mean probability the heads of 8 queries are side by
side in a step, so that the mean is elementwise on registers too. Shared memory: keys 2 x 48 KiB,
queries 2 x 32 KiB. Bytes moved: k once, the queries once an item (from the L2 cache), 4 bytes a key
out.

Roofline: tensor cores, 2 T S N H operations. There is one exponential a score besides; the special
function units do a tile's in the time of its matmul. On an H200, 512 queries of 32 heads against
131,072 keys of 8 heads of 128, bfloat16: 0.97 ms, 569 TFLOP/s (XLA's form 9.8 ms; a matmul of 8192
cubed reaches 650 to 790); the maximum over heads with a causal mask 1.15 ms; 32 queries 0.098 ms
(XLA 0.75); one query 0.076 (0.072).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from pallas_kernels import hopper
from pallas_kernels.attention_mass.reference import Masses, Reduction
from pallas_kernels.common import Cache, PerQuery, PerRow, Queries, factor_of
from pallas_kernels.quantised import AnyStored

# Columns of a wgmma's result that one thread quad holds side by side: sums are kept for each.
_LANES = 8
# Query rows of a step where there are few: at least 32 float32, since TMA writes to multiples of
# 128 bytes.
_FEW_QUERIES = (32, 64)
# Warpgroups of 64 keys, keys of one work item, query rows of a step at most, steps in flight.
_WARPGROUPS, _QUERIES, _STAGES = 3, 128, 2
_TILE = hopper.ROWS * _WARPGROUPS


@dataclass(frozen=True, kw_only=True)
class _Args:
    """The kernel's static arguments."""

    parts: int  # runs of query rows that are reduced on their own before they are combined
    queries: int  # rows of a step
    steps: int  # of a part
    group: int  # heads that count
    how: Reduction


class _Item(NamedTuple):
    """A tile of a head's keys, all scalars of the kernel.

    Attributes:
      head: counted over all rows.
      filled: slots of the row.
      before: the worker's items with keys before this one.
    """

    row: Any
    head: Any
    tile: Any
    filled: Any
    before: Any


def unsupported(q: Array, k: AnyStored, how: Reduction) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    if k.shape[2] % hopper.TILE_ROWS:
        return f"{k.shape[2]} slots are not whole tiles of {hopper.TILE_ROWS}"
    group = q.shape[2] // k.shape[1]
    if how.squares and _QUERIES % (group * _LANES):
        return f"squares of a group of {group}: {_QUERIES} rows do not hold whole groups of queries"
    return hopper.unsupported(q)


def attention_mass(
    q: Queries, k: Cache, lse: PerQuery, lengths: PerRow, how: Reduction, interpret: Any = None
) -> Masses:
    """The mass of every slot below its row's length and 0 elsewhere; see the public function."""
    queries, group = q.shape[1], q.shape[2] // k.shape[1]
    if how.over_group == "first":
        q, lse, group = q[:, :, ::group], lse[:, :, ::group], 1
    # For a sum all heads of a group are one run of rows.
    parts = group if how.over_group == "max" else 1
    if how.squares:
        # Of whole blocks of queries.
        queries = pl.cdiv(queries, _LANES) * _LANES
    rows = queries * group // parts
    tiles = [n for n in _FEW_QUERIES if not how.squares or n % (group * _LANES) == 0]
    tile = next((n for n in tiles if n >= rows), _QUERIES)
    args = _Args(parts=parts, queries=tile, steps=pl.cdiv(rows, tile), group=group, how=how)
    rows = _rows(q, lse, k.shape, args)
    found = _mass(*rows, k, lengths.astype(jnp.int32), args, interpret)
    return found[0], found[1] if how.squares else None


def _rows(
    q: Queries, lse: PerQuery, cache: tuple[int, ...], args: _Args
) -> tuple[Float[Array, "X R H"], Float[Array, "X R"], Int[Array, "X R"]]:
    """Query rows of every kv head, head by head, each part padded to whole tiles.

    For squares block by block of 8 queries, and head by head within it.

    Beside them log2 of their softmax's denominator, infinite for rows that do not count, and the
    last slot that they see.
    """
    (batch, kv_heads, slots, _), queries = cache, q.shape[1]
    counted_BT1 = (jnp.arange(queries) < args.how.valid[:, None])[..., None]
    counts_BTN = counted_BT1 & (lse > -jnp.inf)
    # Rows that do not count may hold anything, NaN included.
    q = jnp.where(counts_BTN[..., None], q, 0)
    lse = jnp.where(counts_BTN, lse * hopper.LOG2_E, jnp.inf)
    start = args.how.causal_start
    start = jnp.full((batch,), slots) if start is None else start
    last = jnp.broadcast_to((start[:, None] + jnp.arange(queries))[..., None], lse.shape)
    padded = args.steps * args.queries

    def arrange(x: Array, fill: float) -> Array:
        x_BNT = jnp.swapaxes(x, 1, 2)
        if args.how.squares:
            spare = [(0, 0), (0, 0), (0, -queries % _LANES), *[(0, 0)] * (x.ndim - 3)]
            x_BNT = jnp.pad(x_BNT, spare, constant_values=fill)
            x_XGYL = x_BNT.reshape(-1, args.group, x_BNT.shape[2] // _LANES, _LANES, *x.shape[3:])
            x_BNT = jnp.swapaxes(x_XGYL, 1, 2)  # [X, Y, G, 8], with X = B K
        x_YR = x_BNT.reshape(batch * kv_heads * args.parts, -1, *x.shape[3:])
        widths = [(0, 0), (0, padded - x_YR.shape[1]), *[(0, 0)] * (x_YR.ndim - 2)]
        x_YR = jnp.pad(x_YR, widths, constant_values=fill)
        return x_YR.reshape(batch * kv_heads, args.parts * padded, *x.shape[3:])

    return arrange(q, 0), arrange(lse, jnp.inf), arrange(last.astype(jnp.int32), 0)


def _mass(
    q: Float[Array, "X R H"],
    lse: Float[Array, "X R"],
    last: Int[Array, "X R"],
    k: Cache,
    lengths: PerRow,
    args: _Args,
    interpret: Any,
) -> tuple[Float[Array, "B K S"], ...]:
    """The mass, and the squares where they are asked for."""
    batch, kv_heads, slots, head_dim = k.shape
    heads, tiles = batch * kv_heads, pl.cdiv(slots, _TILE)
    row = plgpu.SMEM((_STAGES, args.queries), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_kernel, args=args),
        out_type=hopper.outputs((heads, tiles * _TILE), *[jnp.float32] * (1 + args.how.squares)),
        scratch_types=dict(
            keys=hopper.tiled(2, _WARPGROUPS, hopper.ROWS, head_dim, dtype=k.dtype),
            queries=hopper.tiled(_STAGES, args.queries, head_dim, dtype=k.dtype),
            lse=row,
            last=plgpu.SMEM(row.shape, jnp.int32),
            keys_ready=plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=2),
            keys_free=plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=2),
            ready=plgpu.Barrier(
                num_arrivals=3 if args.how.causal_start is not None else 2, num_barriers=_STAGES
            ),
            free=plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=_STAGES),
        ),
        grid=(min(hopper.processors(), heads * tiles),),
        grid_names=("worker",),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    found = kernel(lengths, q, lse, last, k)
    return tuple(x[:, :slots].reshape(k.shape[:3]) for x in found)


def _kernel(lengths_ref, q_ref, lse_ref, last_ref, k_ref, *out_refs, args: _Args, **scratch):
    warpgroup = lax.axis_index("warpgroup")
    more, fewer = hopper.registers(_WARPGROUPS)

    @pl.when(warpgroup == _WARPGROUPS)
    def _copies():
        plgpu.set_max_registers(fewer, action="decrease")
        refs = q_ref, lse_ref, last_ref
        work = functools.partial(_fetch, refs, k_ref, scratch, args)
        items = _each_item(lengths_ref, k_ref.shape, work)
        hopper.drain(scratch["keys_free"], items, 2)
        hopper.drain(scratch["free"], items * (args.parts * args.steps), _STAGES)

    @pl.when(warpgroup < _WARPGROUPS)
    def _sums():
        plgpu.set_max_registers(more, action="increase")
        work = functools.partial(_sum, out_refs, scratch, warpgroup, args)
        _each_item(lengths_ref, k_ref.shape, work)


def _each_item(lengths_ref, cache: tuple[int, ...], work: Callable) -> Array:
    """Call work(item) for the worker's tiles; returns the number of items with keys."""
    worker, workers = lax.axis_index("worker"), lax.axis_size("worker")
    batch, kv_heads, slots, _ = cache
    tiles = pl.cdiv(slots, _TILE)

    def item(i, before):
        index = worker + i * workers
        head, tile = lax.div(index, tiles), lax.rem(index, tiles)
        row = lax.div(head, kv_heads)
        filled = lengths_ref[row]
        work(_Item(row, head, tile, filled, before))
        return before + (tile * _TILE < filled).astype(jnp.int32)

    count = lax.div(batch * kv_heads * tiles - 1 - worker, workers) + 1
    return lax.fori_loop(0, count, item, jnp.int32(0))


def _fetch(refs, k_ref, scratch, args: _Args, item: _Item) -> None:
    """Copy the item's keys, and all its head's queries tile by tile."""
    queries = args.queries
    row, head, tile, filled, before = item
    steps = args.parts * args.steps

    @pl.when(tile * _TILE < filled)
    def _():
        half = lax.rem(before, 2)

        @pl.when(before >= 2)
        def _():
            plgpu.barrier_wait(scratch["keys_free"].at[half])

        for part in range(_WARPGROUPS):
            slots = pl.ds(tile * _TILE + part * hopper.ROWS, hopper.ROWS)
            plgpu.copy_gmem_to_smem(
                k_ref.at[row, lax.rem(head, k_ref.shape[1]), slots],
                scratch["keys"].at[half, part],
                scratch["keys_ready"].at[half],
            )

        @pl.loop(0, steps)
        def _step(i):
            step = before * steps + i
            slot = lax.rem(step, _STAGES)

            @pl.when(step >= _STAGES)
            def _():
                plgpu.barrier_wait(scratch["free"].at[slot])

            names = (
                ("queries", "lse", "last")
                if args.how.causal_start is not None
                else ("queries", "lse")
            )
            for ref, name in zip(refs, names, strict=False):
                source = ref.at[head, pl.ds(i * queries, queries)]
                ready = scratch["ready"].at[slot]
                plgpu.copy_gmem_to_smem(source, scratch[name].at[slot], ready)


def _sum(out_refs, scratch, warpgroup, args: _Args, item: _Item) -> None:
    """The mass of the warpgroup's 64 keys of the item, and their squares."""
    _, head, tile, filled, before = item
    first = tile * _TILE + warpgroup * hopper.ROWS
    rows = pl.ds(first, hopper.ROWS)
    column = plgpu.Layout.WGMMA.reduce(1)

    @pl.when(tile * _TILE < filled)
    def _():
        half = lax.rem(before, 2)
        keys = scratch["keys"].at[half, warpgroup]
        plgpu.barrier_wait(scratch["keys_ready"].at[half])

        def add_part(part, total):
            step = (before * args.parts + part) * args.steps
            return jnp.maximum(total, _sum_queries(scratch, keys, first, step, args)[0])

        if args.parts == 1:
            totals = _sum_queries(scratch, keys, first, before * args.steps, args)
        else:
            total = hopper.full((hopper.ROWS,), 0.0, layout=column)
            totals = [lax.fori_loop(0, args.parts, add_part, total)]
        plgpu.barrier_arrive(scratch["keys_free"].at[half])
        slot = plgpu.broadcasted_iota(jnp.int32, (hopper.ROWS,), 0, layout=column) + first
        for out_ref, total in zip(out_refs, totals, strict=True):
            # Beyond the length lies anything finite, whose exponential may be infinite.
            out_ref[head, rows] = jnp.where(slot < filled, total, 0.0)

    @pl.when(tile * _TILE >= filled)
    def _():
        for out_ref in out_refs:
            out_ref[head, rows] = hopper.full((hopper.ROWS,), 0.0, layout=column)


def _sum_queries(scratch, keys, first, begin, args: _Args) -> list[Array]:
    """The sum of the 64 keys' probabilities over one part of the query rows.

    And the sum of the squares of the group's mean, where the args has them.
    """
    queries = args.queries

    def step(i, state):
        slot = lax.rem(begin + i, _STAGES)
        plgpu.barrier_wait(scratch["ready"].at[slot])
        s = hopper.product(keys, scratch["queries"].at[slot].transpose((1, 0)))
        across = plgpu.Layout.WGMMA.reduce(0)
        lse = plgpu.load(scratch["lse"].at[slot], layout=across)
        exponent = s * (factor_of(args.how.scale) * hopper.LOG2_E) - lax.broadcast_in_dim(
            lse, s.shape, [1]
        )
        p = jnp.exp2(exponent)
        if args.how.causal_start is not None:
            last = plgpu.load(scratch["last"].at[slot], layout=across)
            seen = hopper.iota(s.shape, 0)
            p = jnp.where(seen + first <= lax.broadcast_in_dim(last, s.shape, [1]), p, 0.0)
        plgpu.barrier_arrive(scratch["free"].at[slot])
        kept, *squares = state
        columns = [p[:, lane : lane + _LANES] for lane in range(0, queries, _LANES)]
        if not args.how.squares:
            return [functools.reduce(jnp.add, columns, kept)]
        for at in range(0, len(columns), args.group):
            total = functools.reduce(jnp.add, columns[at : at + args.group])
            mean = total * (1 / args.group)
            kept, squares = kept + total, [squares[0] + mean * mean]
        return [kept, *squares]

    empty = [hopper.full((hopper.ROWS, _LANES), 0.0)] * (1 + args.how.squares)
    kept = lax.fori_loop(0, args.steps, step, empty)
    return [x.sum(axis=1) for x in kept]
