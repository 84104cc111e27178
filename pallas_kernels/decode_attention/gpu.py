"""Attention of one or a few queries to a long cache on Hopper: a Mosaic GPU kernel.

All filled blocks of 128 slots of all rows and kv heads form one list, of which every worker (one
block of threads a multiprocessor) takes an equal run, whatever the rows' lengths are: a worker may
end one head and begin the next. To begin a head takes time too and counts as a block, or workers
with many short rows would be the last. The mean and log-sum-exp of each piece are merged by a small
reduction (split attention as in Flash-Decoding). One warpgroup copies blocks of keys and values by
TMA into rings in shared memory, three blocks deep, and the next head's queries beside those in use,
and does not stop where a head ends; the other computes, and does not wait for what it writes. The
queries of a kv head's group are the rows of one wgmma, so that keys and values
are read once for all of them; of its 64 rows one query of a group fills G, which costs tensor core
time that nothing waits for. Empty capacity is not read; slots beyond a length must hold finite
values.

Shared memory: q 16 KiB and 2 for the next one's, rings 192 KiB, 9 KiB on the way out. Registers:
weighted values [64,H], logits [64,128], float32. Bytes moved: k and v of the filled slots; partial
results 0.5 MB.

Roofline: memory. On an H200 (copy 4.13 TB/s), 32 query heads over 8 kv heads of 128, bfloat16,
medians of calls in a device loop, measured before a worker stopped waiting for what it writes and
for the next head's queries, and before beginning a head counted: 1 x 131,072 slots 0.136 ms, 96% of
the copy (XLA's form 0.170, cuDNN 0.133); 8 x 16,384 0.156 ms (0.166, 0.136); 1 x 32,768 0.052 ms
(0.032, 0.042); eight rows of 64 to 16,384 slots, 41% of the capacity, 0.091 ms (0.167, 0.066) where
their bytes allow 0.054. Two blocks of threads a multiprocessor with half the ring each were slower
at every size, blocks of 64 slots as well.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from pallas_kernels import hopper
from pallas_kernels import hopper_attention as streaming
from pallas_kernels.common import window_start
from pallas_kernels.tuning import configured, shape_class

_BASE, _LOW, _HIGH, _STEPS = range(4)  # columns of the plan
_MAX_BATCH = 240  # lines of the plan that find place in shared memory


@dataclass(frozen=True, kw_only=True)
class Config:
    """Slots of one step, steps in flight, blocks of threads on a multiprocessor, and how many steps
    it takes to begin a head."""

    block: int = 128
    stages: int = 3
    per_processor: int = 1
    begin: int = 1


# What `bench kernels --tune` tries, the default first.
CONFIGS = (
    Config(),
    *(Config(begin=begin) for begin in (0, 2, 4)),
    *(Config(block=64, stages=6, begin=begin) for begin in (1, 2)),
)


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What the kernel knows when it is compiled."""

    batch: int
    kv_heads: int
    rows: int
    head_dim: int
    group: int
    dtype: Any
    windowed: bool
    scale: float
    workers: int
    config: Config
    interpreted: bool

    @property
    def tile_rows(self) -> int:
        """Rows read and written: whole tiles."""
        return pl.cdiv(self.rows, hopper.TILE_ROWS) * hopper.TILE_ROWS

    @property
    def q_tiles(self) -> int:
        """Heads whose queries are in shared memory: the next one's too where there is room."""
        return 2 if self.tile_rows == hopper.TILE_ROWS else 1


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A run of one head's blocks, all scalars of the kernel.

    Blocks `first` to `last` of row `row`, head `head`; slots low <= s < high count; block j is
    the worker's step ahead + j; it is the worker's piece `number`; its results are part `part`.
    """

    row: Any
    head: Any
    part: Any
    low: Any
    high: Any
    first: Any
    last: Any
    ahead: Any
    number: Any


def unsupported(q: Array, k: Array) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    rows = q.shape[1] * q.shape[2] // k.shape[1]
    if rows > hopper.ROWS:
        return f"{rows} queries for one kv head, at most {hopper.ROWS}"
    if k.shape[2] % hopper.TILE_ROWS:
        return f"{k.shape[2]} slots are not whole tiles of {hopper.TILE_ROWS}"
    if k.shape[0] > _MAX_BATCH:
        return f"{k.shape[0]} rows, at most {_MAX_BATCH}"
    return hopper.unsupported(q)


def decode_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    query_start: Int[Array, " B"] | None = None,
    slot_start: Int[Array, ""] | int = 0,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Every query of row b sees the slots below lengths[b], and within the window if there is one.

    Slot s stands at position slot_start + s, query t at query_start[b] + t.
    """
    low_B = jnp.zeros_like(lengths)
    if window is not None:
        # The first slot that query 0 sees; query t sees from t slots later.
        low_B = window_start(query_start) - slot_start - window + 1
    q_BKRH = hopper.pack_rows(q, k.shape[1])
    if config is None:
        batch, kv_heads, rows, head_dim = q_BKRH.shape
        shapes = dict(head_dim=head_dim, rows=rows, heads=batch * kv_heads, slots=k.shape[2])
        config = configured("decode_attention", shape_class(**shapes), CONFIGS)
    job = _Job(
        batch=k.shape[0],
        kv_heads=k.shape[1],
        rows=q_BKRH.shape[2],
        head_dim=k.shape[3],
        group=q.shape[2] // k.shape[1],
        dtype=k.dtype,
        windowed=window is not None,
        scale=scale,
        workers=hopper.processors() * config.per_processor,
        config=config,
        interpreted=interpret is not None,
    )
    plan = _plan(low_B, lengths, job)
    out_BKRH, lse_BKR = _merge(*_partials(q_BKRH, k, v, plan, job, interpret), plan, job)
    return (
        hopper.unpack_rows(out_BKRH.astype(q.dtype), q.shape[1]),
        hopper.unpack_rows(lse_BKR, q.shape[1]),
    )


def _plan(low: Int[Array, " B"], high: Int[Array, " B"], job: _Job) -> Int[Array, "Q 4"]:
    """A line a row: its first step among the steps of all rows and heads, its slots, its steps.

    The steps of a head are those to begin it and its blocks. The last line holds the number of all
    steps.
    """
    # A later query's window begins later: with low below 0 as well.
    blocks = pl.cdiv(high, job.config.block) - jnp.maximum(low, 0) // job.config.block
    steps = jnp.where((high > low) & (blocks > 0), job.config.begin + blocks, 0)
    before = jnp.arange(job.batch + 1)[:, None] > jnp.arange(job.batch)
    base = job.kv_heads * jnp.sum(jnp.where(before, steps, 0), axis=1)
    columns = [jnp.pad(x, (0, 1)) for x in (low, high, steps)]
    return jnp.stack([base, *columns], axis=1).astype(jnp.int32)


def _partials(
    q: Float[Array, "B K R H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    plan: Int[Array, "Q 4"],
    job: _Job,
    interpret: Any,
) -> tuple[Float[Array, "P R8 H"], Float[Array, "P M"]]:
    """The attention of every worker to its piece of every head it visits.

    The piece of worker w of head h of row b is part w + b K + h, for the pieces follow each other
    in that order and no two share a sum; parts without a piece are not written.
    """
    parts = job.workers + job.batch * job.kv_heads
    stages = job.config.stages
    ring = hopper.tiled(stages, job.config.block, job.head_dim, dtype=job.dtype)
    kernel = plgpu.kernel(
        functools.partial(_kernel, job=job),
        out_type=(
            jax.ShapeDtypeStruct((parts, job.tile_rows, job.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((parts, hopper.ROWS), jnp.float32),
        ),
        scratch_types=dict(
            plan=plgpu.SMEM(plan.shape, jnp.int32),
            # The tiles of 64 rows overlap: of each the first rows count.
            q_tiles=hopper.tiled(
                hopper.ROWS + (job.q_tiles - 1) * job.tile_rows, job.head_dim, dtype=job.dtype
            ),
            rings=(ring, ring),
            planned=plgpu.Barrier(),
            asked=plgpu.Barrier(num_barriers=job.q_tiles),
            answered=plgpu.Barrier(num_barriers=job.q_tiles),
            ready=(plgpu.Barrier(num_barriers=stages), plgpu.Barrier(num_barriers=stages)),
            free=(plgpu.Barrier(num_barriers=stages), plgpu.Barrier(num_barriers=stages)),
            **streaming.out_scratch(job.tile_rows),
        ),
        grid=(job.workers,),
        grid_names=("worker",),
        num_threads=2,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    return kernel(plan, streaming.pad_rows(q), k, v)


def _kernel(plan_ref, q_ref, k_ref, v_ref, out_ref, lse_ref, *, job: _Job, **scratch):
    role, plan, planned = lax.axis_index("role"), scratch["plan"], scratch["planned"]

    @pl.when(role == 1)
    def _copies():
        plgpu.set_max_registers(56, action="decrease")
        plgpu.copy_gmem_to_smem(plan_ref, plan, planned)
        plgpu.barrier_wait(planned)
        work = functools.partial(_fetch, (q_ref, k_ref, v_ref), job, scratch)
        pieces, steps = _each_piece(plan, job, work)
        hopper.drain(scratch["answered"], pieces, job.q_tiles)
        for free in scratch["free"]:
            hopper.drain(free, steps, job.config.stages)

    @pl.when(role == 0)
    def _attention():
        plgpu.set_max_registers(208, action="increase")
        plgpu.barrier_wait(planned)
        _each_piece(plan, job, functools.partial(_attend, (out_ref, lse_ref), job, scratch))
        streaming.written()


def _each_piece(plan, job: _Job, work: Callable) -> tuple[Array, Array]:
    """Call work(piece) for every head with a block in this worker's run of steps, in order.

    Returns the number of its pieces and of their blocks.
    """
    worker = lax.axis_index("worker")
    share = lax.div(plan[job.batch, _BASE] + (job.workers - 1), job.workers)
    begin = worker * share

    def row(b: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
        base, steps = plan[b, _BASE], plan[b, _STEPS]
        first = jnp.maximum(begin, base)
        last = jnp.minimum(begin + share, plan[b + 1, _BASE])

        def head(h: Array, done: tuple[Array, Array]) -> tuple[Array, Array]:
            start = base + h * steps
            block = lax.div(jnp.maximum(plan[b, _LOW], 0), job.config.block)
            # A head's first steps are those to begin it.
            runs = [
                jnp.maximum(x - start - job.config.begin, 0)
                for x in (jnp.maximum(first, start), jnp.minimum(last, start + steps))
            ]
            pieces, blocks = done
            piece = _Piece(
                row=b,
                head=h,
                part=worker + b * job.kv_heads + h,
                low=plan[b, _LOW],
                high=plan[b, _HIGH],
                first=runs[0] + block,
                last=runs[1] + block,
                ahead=blocks - runs[0] - block,
                number=pieces,
            )
            pl.when(runs[1] > runs[0])(lambda: work(piece))
            return pieces + (runs[1] > runs[0]).astype(jnp.int32), blocks + runs[1] - runs[0]

        # Of a row that has no steps, or none in this run, no head.
        each = jnp.maximum(steps, 1)
        heads = lax.div(first - base, each), lax.div(last - 1 - base, each) + 1
        return lax.fori_loop(jnp.where(last > first, heads[0], heads[1]), heads[1], head, done)

    return lax.fori_loop(0, job.batch, row, (jnp.int32(0), jnp.int32(0)))


def _fetch(refs, job: _Job, scratch: dict, piece: _Piece) -> None:
    """Copy the piece's queries, and its blocks of keys and values, as there is room for them."""
    q_ref, *caches = refs
    tile = lax.rem(piece.number, job.q_tiles)

    @pl.when(piece.number >= job.q_tiles)
    def _():
        plgpu.barrier_wait(scratch["answered"].at[tile])

    place = scratch["q_tiles"].at[pl.ds(tile * job.tile_rows, job.tile_rows)]
    head = piece.row * job.kv_heads + piece.head
    plgpu.copy_gmem_to_smem(q_ref.at[head], place, scratch["asked"].at[tile])

    @pl.loop(piece.first, piece.last)
    def _step(j):
        step = piece.ahead + j
        slot = lax.rem(step, job.config.stages)
        block = (piece.row, piece.head, pl.ds(j * job.config.block, job.config.block))
        for ref, ring, full, empty in zip(
            caches, scratch["rings"], scratch["ready"], scratch["free"], strict=True
        ):

            @pl.when(step >= job.config.stages)
            def _(empty=empty):
                plgpu.barrier_wait(empty.at[slot])

            plgpu.copy_gmem_to_smem(ref.at[block], ring.at[slot], full.at[slot])


def _attend(refs, job: _Job, scratch: dict, piece: _Piece) -> None:
    """The attention to the piece's slots, to the piece's part."""
    out_ref, lse_ref = refs
    rings, ready, free = scratch["rings"], scratch["ready"], scratch["free"]
    tile = lax.rem(piece.number, job.q_tiles)
    queries = scratch["q_tiles"].at[pl.ds(tile * job.tile_rows, hopper.ROWS)]
    plgpu.barrier_wait(scratch["asked"].at[tile])

    def step(j, carry):
        slot = lax.rem(piece.ahead + j, job.config.stages)
        plgpu.barrier_wait(ready[0].at[slot])

        def scored():
            plgpu.barrier_arrive(free[0].at[slot])
            plgpu.barrier_wait(ready[1].at[slot])

        carry = streaming.step(
            carry,
            queries,
            rings[0].at[slot],
            rings[1].at[slot],
            scale=job.scale,
            mask=lambda s: _mask(s, j * job.config.block, piece, job),
            scored=scored,
            interpreted=job.interpreted,
        )
        plgpu.barrier_arrive(free[1].at[slot])
        return carry

    carry = lax.fori_loop(piece.first, piece.last, step, streaming.start(job.head_dim))
    plgpu.barrier_arrive(scratch["answered"].at[tile])
    out, lse = streaming.finish(carry)
    tiles = {name: scratch[name] for name in streaming.out_scratch(job.tile_rows)}
    streaming.write(out, lse, out_ref.at[piece.part], lse_ref.at[piece.part], **tiles)


def _mask(s: Array, slot: Array, piece: _Piece, job: _Job) -> Array:
    """-inf where a column's slot, counted from `slot`, is not seen by the row's query."""
    column = functools.partial(
        plgpu.broadcasted_iota, jnp.int32, s.shape, layout=plgpu.Layout.WGMMA
    )
    slots = column(1) + slot
    seen = slots < piece.high
    if job.windowed:
        low = piece.low if job.rows == job.group else piece.low + lax.div(column(0), job.group)
        seen = seen & (slots >= low)
    return jnp.where(seen, s, -jnp.inf)


def _merge(
    out: Float[Array, "P R8 H"],
    lse: Float[Array, "P M"],
    plan: Int[Array, "Q 4"],
    job: _Job,
) -> tuple[Float[Array, "B K R H"], Float[Array, "B K R"]]:
    """Every head's parts by their log-sum-exp; a head without any is 0 and -inf."""
    share = jnp.maximum(pl.cdiv(plan[-1, _BASE], job.workers), 1)
    head = jnp.arange(job.kv_heads)
    steps_BK = jnp.broadcast_to(plan[:-1, _STEPS, None], (job.batch, job.kv_heads))
    start_BK = plan[:-1, _BASE, None] + steps_BK * head
    first_BK = start_BK // share
    # All heads of a row are as long: with K of them none is in more than 1/K of the workers.
    part = jnp.arange(job.workers // job.kv_heads + 2)
    at_BKP = first_BK[..., None] + jnp.arange(first_BK.size).reshape(*first_BK.shape, 1) + part
    begin_BKP = (first_BK[..., None] + part) * share
    # Where a worker's run ends before the head's first block nothing is written.
    mine_BKP = (begin_BKP < (start_BK + steps_BK)[..., None]) & (steps_BK > 0)[..., None]
    mine_BKP &= begin_BKP + share > (start_BK + job.config.begin)[..., None]
    mine_BKP1 = mine_BKP[..., None]
    lse = jnp.where(mine_BKP1, lse.at[at_BKP, : job.rows].get(mode="clip"), -jnp.inf)
    # Parts that were not written may hold anything.
    out = jnp.where(mine_BKP1[..., None], out.at[at_BKP, : job.rows].get(mode="clip"), 0.0)
    return streaming.merge_parts(out, lse, 2)
