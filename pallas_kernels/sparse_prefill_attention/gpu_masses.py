"""The masses of blocks of keys for rows of queries on Hopper: a matrix product that is not stored.

A block of threads multiplies 128 rows of queries with 256 of keys. One warpgroup copies pieces of
64 columns of both by TMA, `_STAGES` ahead; two multiply 64 rows each. From their registers goes the
log of the sum of e^score of each block of keys, 8 rows at least. Tiles that begin beyond
a row's length are left out.

Roofline: matrix throughput, 2 M R X operations for M rows of queries and R of keys, X numbers each.
On an H200, 8 heads of 2048 rows over 7680 rows of 2048 numbers: 0.93 ms, 555 TFLOP/s (XLA 1.79).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float

from pallas_kernels import hopper
from pallas_kernels.common import Cache, PerRow
from pallas_kernels.sparse_prefill_attention.reference import BLOCK

_STAGES, _COLUMNS, _READERS = 4, 64, 2
_QUERIES, _KEYS, _LEAST = _READERS * hopper.ROWS, 256, 8


def unsupported(q: Array, stride: int) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    if stride * _LEAST > BLOCK:
        return f"stride {stride} leaves {BLOCK // stride} rows of keys a block, at least {_LEAST}"
    return hopper.unsupported_numbers(q)


def block_masses(
    q: Float[Array, "B K M X"],
    keys: Cache,
    lengths: PerRow,
    *,
    scale: float,
    stride: int,
    interpret: Any = None,
) -> Float[Array, "B K C M"]:
    """See the public function."""
    (batch, kv_heads, rows, width), of_block = q.shape, BLOCK // stride
    heads, slots = batch * kv_heads, keys.shape[2]
    q = jnp.pad(q.reshape(heads, rows, width), ((0, 0), (0, -rows % _QUERIES), (0, 0)))
    tiles = q.shape[1] // _QUERIES, pl.cdiv(slots // stride, _KEYS)
    blocks = tiles[1] * _KEYS // of_block
    kernel = plgpu.kernel(
        functools.partial(_kernel, factor=scale * hopper.LOG2_E, tiles=tiles, of_block=of_block),
        out_type=jax.ShapeDtypeStruct((heads, blocks, q.shape[1]), jnp.float32),
        scratch_types=dict(
            queries=hopper.tiled(_STAGES, _QUERIES, _COLUMNS, dtype=q.dtype),
            keys=hopper.tiled(_STAGES, _KEYS, _COLUMNS, dtype=q.dtype),
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            free=plgpu.Barrier(num_arrivals=_READERS, num_barriers=_STAGES),
        ),
        grid=(heads * tiles[0] * tiles[1],),
        grid_names=("item",),
        num_threads=_READERS + 1,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
        kernel_name="block_masses",
    )
    counts = jnp.repeat(pl.cdiv(lengths.astype(jnp.int32), stride), kv_heads)
    found = kernel(counts, q, keys.reshape(heads, -1, width))[:, : slots // BLOCK, :rows]
    # Tiles that begin beyond a length were left out.
    begins = jnp.arange(slots // BLOCK) * BLOCK < lengths[:, None]
    found = found.reshape(batch, kv_heads, -1, rows)
    return jnp.where(begins[:, None, :, None], found, -jnp.inf)


def _kernel(
    counts_ref, q_ref, keys_ref, out_ref, *, factor: float, tiles: tuple[int, int], of_block: int,
    **scratch,
):  # fmt: skip
    item, role = lax.axis_index("item"), lax.axis_index("role")
    # Rows of queries change first: all of a head's are in the L2 cache.
    row_tile, rest = lax.rem(item, tiles[0]), lax.div(item, tiles[0])
    head, key_tile = lax.div(rest, tiles[1]), lax.rem(rest, tiles[1])
    first, steps = key_tile * _KEYS, q_ref.shape[2] // _COLUMNS
    held = counts_ref[head] - first
    more, fewer = hopper.registers(_READERS)

    @pl.when((held > 0) & (role == _READERS))
    def _copies():
        plgpu.set_max_registers(fewer, action="decrease")
        rows = pl.ds(row_tile * _QUERIES, _QUERIES)

        def copy(step, slot):
            columns, ready = pl.ds(step * _COLUMNS, _COLUMNS), scratch["ready"].at[slot]
            plgpu.copy_gmem_to_smem(
                q_ref.at[head, rows, columns], scratch["queries"].at[slot], ready
            )
            plgpu.copy_gmem_to_smem(
                keys_ref.at[head, pl.ds(first, _KEYS), columns], scratch["keys"].at[slot], ready
            )

        hopper.copy_ahead(jnp.int32(steps), scratch["free"], _STAGES, copy)

    @pl.when((held > 0) & (role < _READERS))
    def _masses():
        plgpu.set_max_registers(more, action="increase")
        mine = pl.ds(role * hopper.ROWS, hopper.ROWS)

        def multiply(acc_ref):
            @pl.loop(0, steps)
            def _step(step):
                slot = lax.rem(step, _STAGES)
                plgpu.barrier_wait(scratch["ready"].at[slot])
                keys = scratch["keys"].at[slot].transpose((1, 0))
                plgpu.wgmma(acc_ref, scratch["queries"].at[slot, mine], keys)
                plgpu.wgmma_wait(1)

                @pl.when(step > 0)
                def _():
                    plgpu.barrier_arrive(scratch["free"].at[lax.rem(step - 1, _STAGES)])

            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(scratch["free"].at[(steps - 1) % _STAGES])
            return acc_ref[...]

        accumulator = plgpu.WGMMAAccumulatorRef((hopper.ROWS, _KEYS), jnp.float32)
        s = pl.run_scoped(multiply, accumulator) * factor
        s = jnp.where(hopper.iota(s.shape, 1) < held, s, -jnp.inf)
        rows = pl.ds(row_tile * _QUERIES + role * hopper.ROWS, hopper.ROWS)
        for number in range(_KEYS // of_block):
            block = s[:, number * of_block : (number + 1) * of_block]
            top = block.max(axis=1)
            # Of a block without keys nothing is read.
            safe = jnp.where(top > -jnp.inf, top, 0.0)
            total = jnp.exp2(block - lax.broadcast_in_dim(safe, block.shape, [0])).sum(axis=1)
            lse = safe * (1 / hopper.LOG2_E) + jnp.log(total)
            out_ref[head, key_tile * (_KEYS // of_block) + number, rows] = lse
