"""Attention of one or a few queries to a long cache on Hopper: a Mosaic GPU kernel.

Work: the filled blocks of 128 slots of all rows and kv heads form one list, and every worker (one
block of threads a multiprocessor) takes an equal run of it, whatever the rows' lengths are. So a
worker may end one head and begin the next. To begin a head takes time too and counts as one block;
otherwise workers with many short rows would finish last. A second launch merges the pieces of each
head by their log-sum-exp (split attention as in Flash-Decoding).

One warpgroup copies blocks of keys and values by TMA into rings in shared memory, and the next
head's queries beside those in use; it does not stop where a head ends. Others compute
(`hopper_stream`) and do not wait for their writes. Empty capacity is not read. Slots beyond a
length must hold finite values.

Shared memory: q 16 KiB and 2 for the next head's, rings 192 KiB, 9 KiB for results. Registers:
weighted values [64,H], logits [64,128], float32. Bytes moved: k and v of the filled slots; partial
results 0.5 MB.

Roofline: memory. On an H200 (copy 4.07 TB/s), 32 query heads over 8 kv heads of 128, bfloat16,
medians of calls in a device loop: 1 x 131,072 slots 0.135 ms, 97% of the copy (XLA's form 0.152,
cuDNN 0.132); 8 x 16,384 0.138 ms (0.150, 0.132); 1 x 32,768 0.037 ms, 90% (0.040, 0.032); eight
rows of 64 to 16,384 slots, 41% of the capacity, 0.056 ms (0.143, 0.064), where their bytes allow
0.054. Rejected, slower at every size: two blocks of threads a multiprocessor with half the ring
each, and blocks of 64 slots.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from pallas_kernels import hopper, hopper_bits, hopper_slots, hopper_stream
from pallas_kernels.common import (
    Attended,
    PerQuery,
    PerRow,
    Queries,
    Stored,
    Window,
    pack_rows,
    unpack_rows,
)
from pallas_kernels.decode_attention.gpu_plan import (
    MAX_BATCH,
    Args,
    FewLines,
    Piece,
    each_piece,
    part_of,
    plan_of,
)
from pallas_kernels.hopper_stream import BLOCK
from pallas_kernels.quantised import AnyStored, Quantised, coded, parts_of

# The merge: threads of a block, each with one channel of one row or two, and the most pieces that
# registers hold.
_MERGE_THREADS, _MERGE_MOST = 128, 40
_MERGE_LAYOUT = plgpu.Layout.WG_STRIDED((_MERGE_THREADS,), vec_size=1)


def unsupported(q: Array, k: AnyStored, v: AnyStored | None = None) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    rows = q.shape[1] * q.shape[2] // k.shape[1]
    if rows > hopper.ROWS:
        return f"{rows} queries for one kv head, at most {hopper.ROWS}"
    if k.shape[2] % hopper.TILE_ROWS:
        return f"{k.shape[2]} slots are not whole tiles of {hopper.TILE_ROWS}"
    if coded(k, v) and k.shape[2] % BLOCK:
        return f"{k.shape[2]} slots of int8 are not whole blocks of {BLOCK}"
    if k.shape[0] > MAX_BATCH:
        return f"{k.shape[0]} rows, at most {MAX_BATCH}"
    return hopper.unsupported(q)


def unsupported_logits(q: Array, k: AnyStored, v: AnyStored) -> str | None:
    """Why `attend_with_logits` cannot run these arguments, or None."""
    rows = q.shape[2] // k.shape[1]
    if rows > hopper.TILE_ROWS:
        return f"logits of {rows} queries for one kv head, at most {hopper.TILE_ROWS}"
    if k.shape[2] % BLOCK:
        return f"{k.shape[2]} slots are not whole blocks of {BLOCK}"
    return unsupported(q, k, v)


def decode_attention(
    q: Queries,
    k: Stored,
    v: Stored,
    lengths: PerRow,
    *,
    scale: float,
    window: Window | None = None,
    interpret: Any = None,
) -> Attended:
    """Every query of row b sees the slots below lengths[b], within the window if there is one."""
    low_B = None
    if window is not None:
        # The first slot that query 0 sees; query t sees from t slots later.
        low_B = window.query_start - window.slot_start - window.size + 1
    out, lse, _ = _attention(q, k, v, (low_B, lengths), scale, interpret, logits=False)
    return out, lse


def attend_with_logits(
    q: Float[Array, "B 1 N H"],
    k: Stored,
    v: Stored,
    lengths: PerRow,
    *,
    scale: float,
    interpret: Any = None,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"], Float[Array, "B N S"]]:
    """`decode_attention` and its logits, which are undefined at and beyond the lengths.

    The group's rows of each product are written while the kernel waits for the next block: 32 bytes
    a slot and head, beside the 512 that it reads.
    """
    return _attention(q, k, v, (None, lengths), scale, interpret, logits=True)


def _attention(
    q: Array,
    k: Stored,
    v: Stored,
    bounds: tuple[PerRow | None, PerRow],
    scale: float,
    interpret: Any,
    *,
    logits: bool,
) -> tuple[Queries, PerQuery, Any]:
    """Output, log-sum-exp, and the logits [B,N,S] or None.

    Args:
      bounds: the first slot that each row's query 0 sees, None for 0; and the one after the last.
    """
    low, high = bounds
    batch, kv_heads, slots, head_dim = k.shape
    numbers, scales = parts_of(k, v)
    stream = hopper_stream.Stream(
        rows=q.shape[1] * q.shape[2] // kv_heads,
        head_dim=head_dim,
        dtype=q.dtype,
        stored=(numbers[0].dtype, numbers[1].dtype),
        scale=scale,
        interpret=interpret,
        # A block's logits leave at once.
        out_rows=96 if logits else 80,
    )
    args = Args(
        batch=batch,
        kv_heads=kv_heads,
        blocks=pl.cdiv(slots, BLOCK),
        group=q.shape[2] // kv_heads,
        workers=hopper.processors(),
        windowed=low is not None,
        logits=logits,
        stream=stream,
    )
    if args.few:
        # A launch less. Without a window every row begins at 0.
        plan = tuple(x.astype(jnp.int32) for x in bounds if x is not None)
    else:
        plan = (plan_of(jnp.zeros_like(high) if low is None else low, high, args),)
    q_rows = pack_rows(q, kv_heads)
    if isinstance(k, Quantised):
        q_rows = hopper_bits.in_column_order(q_rows)
    out, lse, *found = _partials(q_rows, (*numbers, *scales), plan, args)
    out_BKRH, lse_BKR = _merged(out, lse, plan, args, q.dtype)
    out = unpack_rows(out_BKRH.astype(q.dtype), q.shape[1])
    lse = unpack_rows(lse_BKR, q.shape[1])
    if not logits:
        return out, lse, None
    logits_BKGS = found[0].reshape(batch, kv_heads, stream.tile_rows, -1)[:, :, : stream.rows]
    return out, lse, logits_BKGS.reshape(batch, q.shape[2], slots)


def _partials(
    q: Float[Array, "B K R H"], caches: tuple[Any, ...], plan: tuple[Array, ...], args: Args
) -> Sequence[Array]:
    """The attention of every worker to its piece of every head it visits.

    Means [P,R8,H], log-sum-exps [P,M] and, where the args has them, logits [B K,R8,S].

    Worker w writes its piece of head h of row b to part w + b K + h. Pieces follow each other in
    that order, so no two have the same sum. Parts without a piece are not written.

    Args:
      caches: the numbers of keys and values, then the scales of those in 8 bits.
    """
    stream, parts = args.stream, args.workers + args.batch * args.kv_heads
    logits = args.batch * args.kv_heads, stream.tile_rows, caches[0].shape[2]
    # Tiles of 64 rows overlap: of each the first rows count.
    q_rows = stream.operand_rows + (args.q_tiles - 1) * stream.tile_rows
    kernel = plgpu.kernel(
        functools.partial(_kernel, args=args),
        out_type=(
            jax.ShapeDtypeStruct((parts, stream.tile_rows, stream.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((parts, stream.operand_rows), jnp.float32),
            *([jax.ShapeDtypeStruct(logits, jnp.float32)] if args.logits else []),
        ),
        scratch_types=dict(
            **({} if args.few else dict(plan=plgpu.SMEM(plan[0].shape, jnp.int32))),
            q_tiles=hopper.tiled(q_rows, stream.head_dim, dtype=stream.dtype),
            planned=plgpu.Barrier(),
            asked=plgpu.Barrier(num_barriers=args.q_tiles),
            answered=plgpu.Barrier(num_arrivals=args.form.READERS, num_barriers=args.q_tiles),
            **args.form.scratch(stream),
        ),
        grid=(args.workers,),
        grid_names=("worker",),
        num_threads=1 + args.form.READERS,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=stream.interpret,
        kernel_name="decode_attention",
    )
    return kernel(*plan, hopper.pad_rows(q), *caches)


def _kernel(*refs, args: Args, **scratch):
    first = 2 if args.few and args.windowed else 1
    plan_refs, q_ref, refs = refs[:first], refs[first], refs[first + 1 :]
    given = len(refs) - (3 if args.logits else 2)
    caches, out_refs = refs[:given], refs[given:]
    role, planned = lax.axis_index("role"), scratch["planned"]
    plan: Any = FewLines.of(plan_refs, args) if args.few else scratch["plan"]
    readers = args.form.READERS
    more, fewer = hopper_slots.REGISTERS if args.stream.by_slots else (208, 56)

    def wait_for_plan() -> None:
        if not args.few:
            plgpu.barrier_wait(planned)

    @pl.when(role == readers)
    def _copies():
        plgpu.set_max_registers(fewer, action="decrease")
        if not args.few:
            plgpu.copy_gmem_to_smem(plan_refs[0], plan, planned)
        wait_for_plan()
        work = functools.partial(_fetch, (q_ref, *caches), args, scratch)
        pieces, steps = each_piece(plan, args, work)
        hopper.drain(scratch["answered"], pieces, args.q_tiles)
        hopper_stream.drain(scratch, steps)

    @pl.when(role < readers)
    def _attention():
        plgpu.set_max_registers(more, action="increase")
        wait_for_plan()
        me = hopper_stream.Reader(role, scratch, args.stream)
        attend = functools.partial(_attend, out_refs, args, me)
        args.form.finish(me, each_piece(plan, args, attend)[0])


def _fetch(refs, args: Args, scratch: dict, piece: Piece) -> None:
    """Copy the piece's queries, and its blocks of keys and values, as there is room for them."""
    q_ref, *caches = refs
    tile = lax.rem(piece.number, args.q_tiles)

    @pl.when(piece.number >= args.q_tiles)
    def _():
        plgpu.barrier_wait(scratch["answered"].at[tile])

    rows = args.stream.tile_rows
    place = scratch["q_tiles"].at[pl.ds(tile * rows, rows)]
    head = piece.row * args.kv_heads + piece.head
    plgpu.copy_gmem_to_smem(q_ref.at[head], place, scratch["asked"].at[tile])

    @pl.loop(piece.first, piece.last)
    def _step(j):
        step = piece.ahead + j
        block = (piece.row, piece.head, pl.ds(j * BLOCK, BLOCK))

        def copy(ref, place, ready):
            plgpu.copy_gmem_to_smem(ref.at[block], place, ready)

        hopper_stream.fill(scratch, caches[:2], caches[2:], step, copy, copy)


def _attend(refs, args: Args, me: hopper_stream.Reader, piece: Piece) -> None:
    """Attend to the piece's slots, and write the result to the piece's part."""
    scratch, stream = me.scratch, args.stream
    out_ref, lse_ref, *logits_ref = refs
    tile = lax.rem(piece.number, args.q_tiles)
    queries = scratch["q_tiles"].at[pl.ds(tile * stream.tile_rows, stream.operand_rows)]
    plgpu.barrier_wait(scratch["asked"].at[tile])

    def mask(s: Array, j: Array) -> Array:
        s = _mask(s, j * BLOCK, piece, args)
        for ref in logits_ref:
            head = piece.row * args.kv_heads + piece.head
            place = ref.at[head, :, pl.ds(j * BLOCK, BLOCK)]
            args.form.write_logits(me, s * (1 / hopper.LOG2_E), place)
        return s

    blocks = piece.first, piece.last
    carry = args.form.attend(me, blocks, queries, mask=mask, ahead=piece.ahead)
    plgpu.barrier_arrive(scratch["answered"].at[tile])
    part = out_ref.at[piece.part], lse_ref.at[piece.part]
    args.form.write(me, carry, *part, number=piece.number)


def _mask(s: Array, slot: Array, piece: Piece, args: Args) -> Array:
    """-inf where a slot, counted from `slot`, is not seen by the query."""
    axis = args.stream.slots_axis
    slots = hopper.iota(s.shape, axis) + slot
    seen = slots < piece.high
    if args.windowed:
        low = (
            piece.low
            if args.stream.rows == args.group
            else piece.low + lax.div(hopper.iota(s.shape, 1 - axis), args.group)
        )
        seen = seen & (slots >= low)
    return jnp.where(seen, s, -jnp.inf)


def _merged(
    out: Float[Array, "P R8 H"],
    lse: Float[Array, "P M"],
    plan: tuple[Array, ...],
    args: Args,
    dtype: Any,
) -> tuple[Float[Array, "B K R H"], Float[Array, "B K R"]]:
    """Every head's parts by their log-sum-exp; a head without any is 0 and -inf."""
    heads, parts = args.batch * args.kv_heads, args.parts
    rows, head_dim = args.stream.rows, args.stream.head_dim
    if parts <= _MERGE_MOST:
        together = _MERGE_THREADS // head_dim
        groups = pl.cdiv(rows, together)
        kernel = plgpu.kernel(
            functools.partial(_merge_kernel, args=args, together=together),
            out_type=(
                jax.ShapeDtypeStruct((heads, groups, _MERGE_THREADS), dtype),
                jax.ShapeDtypeStruct((heads, groups * together), jnp.float32),
            ),
            grid=(heads, groups),
            grid_names=("head", "group"),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            interpret=args.stream.interpret,
            kernel_name="merge_decode_attention",
        )
        out, lse = kernel(*plan, out.reshape(out.shape[0], -1, _MERGE_THREADS), lse)
        out, lse = out.reshape(heads, -1, head_dim)[:, :rows], lse[:, :rows]
    else:
        lines = FewLines.of(plan, args) if args.few else plan[0]
        at_XP, mine_XP = part_of(lines, jnp.arange(heads)[:, None], jnp.arange(parts), args)
        mine_XP1 = mine_XP[..., None]
        lse = jnp.where(mine_XP1, lse.at[at_XP, :rows].get(mode="clip"), -jnp.inf)
        # Parts that were not written may hold anything.
        out = jnp.where(mine_XP1[..., None], out.at[at_XP, :rows].get(mode="clip"), 0.0)
        out, lse = hopper.merge_parts(out, lse, 1)
    shape = args.batch, args.kv_heads
    return out.reshape(*shape, *out.shape[1:]), lse.reshape(*shape, -1)


def _merge_kernel(*refs, args: Args, together: int) -> None:
    """The pieces of a head's attention as one: a block of threads takes `together` query rows.

    It reads its pieces' log-sum-exps and means, which are few and lie in the L2 cache. Their
    weights stay in registers. XLA's form takes four launches: 9 us for 8 heads of 4 queries on an
    H200.
    """
    *plan_refs, out_ref, lse_ref, merged_ref, total_ref = refs
    plan = FewLines.of(plan_refs, args) if args.few else plan_refs[0]
    head, group = lax.axis_index("head"), lax.axis_index("group")
    shape, last = (_MERGE_THREADS,), out_ref.shape[0] - 1
    thread = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_MERGE_LAYOUT)
    mine = [lax.div(thread, args.stream.head_dim) == i for i in range(together)]
    means, lses = [], []
    for i in range(args.parts):
        piece, there = part_of(plan, head, i, args)
        at = jnp.minimum(piece, last)
        there = jnp.broadcast_to(there, shape)
        mean = plgpu.load(out_ref.at[at, group], layout=_MERGE_LAYOUT)
        means.append(jnp.where(there, mean, 0.0))
        its_lse = jnp.broadcast_to(lse_ref[at, group * together], shape)
        for row in range(1, together):
            other = jnp.broadcast_to(lse_ref[at, group * together + row], shape)
            its_lse = jnp.where(mine[row], other, its_lse)
        lses.append(jnp.where(there, its_lse, -jnp.inf))
    merged, found = _weighed(means, lses)
    merged_ref[head, group] = merged.astype(merged_ref.dtype)
    for row in range(together):
        total_ref[head, group * together + row] = jnp.where(mine[row], found, -jnp.inf).max()


def _weighed(means: Sequence[Array], lses: Sequence[Array]) -> tuple[Array, Array]:
    """Of every thread's channel the merged mean and its log-sum-exp; 0 and -inf without any.

    A part that is absent has log-sum-exp -inf and a finite mean.
    """
    top = functools.reduce(jnp.maximum, lses)
    some = top > -jnp.inf
    top = jnp.where(some, top, 0.0)
    weights = [jnp.exp(x - top) for x in lses]
    total = jnp.where(some, functools.reduce(jnp.add, weights), 1.0)
    weighted = [mean * weight for mean, weight in zip(means, weights, strict=True)]
    merged = functools.reduce(jnp.add, weighted) / total
    return merged, jnp.where(some, top + jnp.log(total), -jnp.inf)
