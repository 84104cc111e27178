"""Attention of a chunk to listed blocks of a cache on Hopper: a Mosaic GPU kernel.

Work: a block of threads takes 128 queries of one head and goes over their list. Two warpgroups
attend, 64 queries each, and take turns: while one computes its softmax, the other's products run. A
third one reads the list and copies blocks of keys and values by TMA from where they lie in the
cache, `_STAGES` ahead. Lists ascend, so that only the last block may pass a row's length: it alone
is masked. Lists differ in length; the GPU hands the next 128 queries to a multiprocessor that is
done, and neighbours read the same kv head.

Shared memory: queries 32 KiB, later the output; keys and values 64 KiB a stage. Registers of a
thread: output and logits, 64 float32 each. Bytes moved: queries, outputs, and 64 KiB of keys and
values for each listed block, most of them from the L2 cache.

Roofline: matrix throughput, 4 * 128 * 128 * H operations a listed block. On an H200, 8192 queries
of 32 heads over 122,880 slots of 8 heads of 128, bfloat16: all blocks 27.1 ms, 609 TFLOP/s (cuDNN's
dense attention 28.9 ms, 570); half of them at random 14.0 ms, three tenths 8.7, a tenth 2.9.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.common import Attended, Cache, PerRow, Queries
from pallas_kernels.sparse_prefill_attention.reference import BLOCK, Blocks

# Blocks of keys and values in shared memory; warpgroups that attend.
_STAGES, _READERS = 2, 2
_ROWS, _SUM = hopper.ROWS, plgpu.Layout.WGMMA.reduce(1)


def unsupported(q: Array) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    return hopper.unsupported(q)


def sparse_prefill_attention(
    q: Queries,
    k: Cache,
    v: Cache,
    lengths: PerRow,
    blocks: Blocks,
    *,
    scale: float,
    interpret: Any = None,
) -> Attended:
    """Every query of row b sees the slots below lengths[b] of the blocks that are listed for it."""
    batch, queries, heads, width = q.shape
    tiles, most = blocks.listed.shape[2:]
    q = jnp.pad(q, ((0, 0), (0, tiles * BLOCK - queries), (0, 0), (0, 0)))
    kernel = plgpu.kernel(
        functools.partial(
            _kernel, factor=scale * hopper.LOG2_E, tiles=tiles, interpreted=interpret is not None
        ),
        out_type=(
            jax.ShapeDtypeStruct(q.shape, q.dtype),
            jax.ShapeDtypeStruct((batch, heads, tiles * BLOCK), jnp.float32),
        ),
        scratch_types=dict(
            queries=hopper.tiled(_READERS, _ROWS, width, dtype=q.dtype),
            keys=hopper.tiled(_STAGES, BLOCK, width, dtype=q.dtype),
            values=hopper.tiled(_STAGES, BLOCK, width, dtype=q.dtype),
            lse=plgpu.SMEM((_READERS, _ROWS), jnp.float32),
            asked=plgpu.Barrier(num_barriers=_READERS),
            keys_ready=plgpu.Barrier(num_barriers=_STAGES),
            values_ready=plgpu.Barrier(num_barriers=_STAGES),
            keys_free=plgpu.Barrier(num_arrivals=_READERS, num_barriers=_STAGES),
            values_free=plgpu.Barrier(num_arrivals=_READERS, num_barriers=_STAGES),
            turn=plgpu.Barrier(num_arrivals=_READERS),
        ),
        grid=(batch * heads * tiles,),
        grid_names=("item",),
        num_threads=_READERS + 1,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="sparse_prefill_attention",
    )
    listed, counts = blocks.listed.reshape(-1, most), blocks.count.reshape(-1)
    out, lse = kernel(lengths.astype(jnp.int32), counts, listed, q, k, v)
    return out[:, :queries], jnp.swapaxes(lse, 1, 2)[:, :queries]


def _kernel(
    lengths_ref, counts_ref, lists_ref, q_ref, k_ref, v_ref, out_ref, lse_ref, *, factor: float,
    tiles: int, interpreted: bool, **scratch,
):  # fmt: skip
    item, role = lax.axis_index("item"), lax.axis_index("role")
    heads = q_ref.shape[2]
    row, head = lax.div(item, heads * tiles), lax.rem(lax.div(item, tiles), heads)
    steps = counts_ref[item]
    more, fewer = hopper.registers(_READERS)

    @pl.when(role == _READERS)
    def _copies():
        plgpu.set_max_registers(fewer, action="decrease")
        kv_head = lax.div(head, heads // k_ref.shape[1])

        @pl.loop(0, steps)
        def _step(i):
            slot = lax.rem(i, _STAGES)
            block = row, kv_head, pl.ds(lists_ref[item, i] * BLOCK, BLOCK)
            for ref, name in ((k_ref, "keys"), (v_ref, "values")):
                free = scratch[f"{name}_free"].at[slot]
                pl.when(i >= _STAGES)(functools.partial(plgpu.barrier_wait, free))
                ready = scratch[f"{name}_ready"].at[slot]
                plgpu.copy_gmem_to_smem(ref.at[block], scratch[name].at[slot], ready)

        for name in ("keys", "values"):
            hopper.drain(scratch[f"{name}_free"], steps, _STAGES)

    @pl.when(role < _READERS)
    def _attention():
        plgpu.set_max_registers(more, action="increase")
        first = lax.rem(item, tiles) * BLOCK + role * _ROWS
        mine = row, pl.ds(first, _ROWS), head
        queries, lse = scratch["queries"].at[role], scratch["lse"].at[role]
        plgpu.copy_gmem_to_smem(q_ref.at[mine], queries, scratch["asked"].at[role])
        plgpu.barrier_wait(scratch["asked"].at[role])
        last = lists_ref[item, jnp.maximum(steps - 1, 0)]
        held = lengths_ref[row] - last * BLOCK
        acc, top, total = _attend(queries, steps, held, role, factor, interpreted, scratch)
        some = total > 0
        divisor = jnp.where(some, total, 1.0)
        queries[...] = (acc / lax.broadcast_in_dim(divisor, acc.shape, [0])).astype(out_ref.dtype)
        lse[...] = jnp.where(some, top * (1 / hopper.LOG2_E) + jnp.log(divisor), -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(queries, out_ref.at[mine])
        plgpu.copy_smem_to_gmem(lse, lse_ref.at[row, head, pl.ds(first, _ROWS)])
        plgpu.wait_smem_to_gmem(0)


def _attend(queries, steps, held, role, factor, interpreted, scratch) -> tuple[Array, Array, Array]:
    """Values weighted by 2^(factor q.k - top), that top, and the weights' sum, of 64 queries.

    Args:
      steps: listed blocks.
      held: slots of the last one that count.
    """
    turn = scratch["turn"]

    def change() -> None:
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(turn)

    def step(i, carry, masked=False):
        acc, top, total = carry
        slot = lax.rem(i, _STAGES)

        def logits(acc_ref):
            plgpu.wgmma(acc_ref, queries, scratch["keys"].at[slot].transpose((1, 0)))
            change()
            return acc_ref[...]

        s = pl.run_scoped(logits, plgpu.WGMMAAccumulatorRef((_ROWS, BLOCK), jnp.float32))
        plgpu.barrier_arrive(scratch["keys_free"].at[slot])
        if masked:
            s = jnp.where(hopper.iota(s.shape, 1) < held, s, -jnp.inf)
        new_top = jnp.maximum(top, s.max(axis=1) * factor)
        decay = jnp.exp2(top - new_top)
        p = jnp.exp2(s * factor - lax.broadcast_in_dim(new_top, s.shape, [0]))
        acc = acc * lax.broadcast_in_dim(decay, acc.shape, [0])
        total = total * decay + p.sum(axis=1)
        weights = p.astype(queries.dtype)
        # What follows belongs to the other warpgroup's softmax: nothing of this one moves there.
        acc, total, new_top, weights = lax.optimization_barrier((acc, total, new_top, weights))
        plgpu.barrier_arrive(turn)
        plgpu.barrier_wait(scratch["values_ready"].at[slot])
        plgpu.barrier_wait(turn)
        values = scratch["values"].at[slot]

        def wait_for_keys() -> None:
            @pl.when(i + 1 < steps)
            def _():
                plgpu.barrier_wait(scratch["keys_ready"].at[lax.rem(i + 1, _STAGES)])

        if interpreted:  # JAX's interpreter has wgmma only of shared memory
            acc = hopper.add_product(acc, weights, values, interpreted)
            wait_for_keys()
        else:

            def weighted(acc_ref):
                plgpu.wgmma(acc_ref, weights, values)
                wait_for_keys()

            start: Any = plgpu.WGMMAAccumulatorRef.init(acc)
            acc = pl.run_state(weighted)(start)
        plgpu.barrier_arrive(scratch["values_free"].at[slot])
        return acc, new_top, total

    empty = (
        hopper.full(queries.shape, 0.0),
        hopper.full((_ROWS,), -jnp.inf, layout=_SUM),
        hopper.full((_ROWS,), 0.0, layout=_SUM),
    )

    @pl.when(steps > 0)
    def _():
        plgpu.barrier_wait(scratch["keys_ready"].at[0])

    # The second warpgroup is half a step behind the first.
    pl.when(role == 1)(change)
    carry = lax.fori_loop(0, steps - 1, step, empty)
    last = functools.partial(step, masked=True)
    carry = lax.fori_loop(jnp.maximum(steps - 1, 0), steps, last, carry)
    pl.when(role == 0)(change)
    return carry
