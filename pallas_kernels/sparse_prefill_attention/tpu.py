"""Attention of a chunk to listed blocks of a cache on TPUs: a Mosaic kernel that copies blocks.

Grid: (row of the batch, query head, 128 queries), any of them on either core of a chip. A step has
its list in scalar memory and goes over it, four blocks at once: the copies of the next four, from
where they lie in the cache, run while it attends to these. Lists ascend, so that only the last
block may pass a row's length: the last four alone are masked. A last turn of fewer blocks copies
the last one again.

VMEM: two buffers of four blocks of keys and of values, 512 KiB for a head dim of 128 in bfloat16,
and the scores [128, 512] in float32. Bytes moved: queries, outputs, and 64 KiB of keys and values
for each listed block. Roofline: those bytes over the bandwidth: 128 operations a byte are fewer
than the matrix units do in its time (240 on v5e, 166 on v5p, 560 on v6e).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_common as tpu
from pallas_kernels.common import (
    AnyCache,
    Attended,
    PerRow,
    Queries,
    Scale,
    capped,
    factor_of,
)
from pallas_kernels.sparse_prefill_attention.reference import BLOCK, Blocks

# Blocks of a turn; entries of a list, of which scalar memory holds two.
_TOGETHER, _ENTRIES = 4, 2**15


def unsupported(q: Array, blocks: Blocks) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    entries, lists = blocks.listed.shape[3], blocks.count.size
    if entries > _ENTRIES or lists > tpu.SCALARS:
        return (
            f"{lists} lists of {entries} blocks; at most {tpu.SCALARS} of {_ENTRIES} fit scalar "
            "memory"
        )
    return tpu.unsupported_keys(q)


def sparse_prefill_attention(
    q: Queries,
    k: AnyCache,
    v: AnyCache,
    lengths: PerRow,
    blocks: Blocks,
    *,
    scale: Scale,
    interpret: pltpu.InterpretParams | bool = False,
) -> Attended:
    """Every query of row b sees the slots below lengths[b] of the blocks that are listed for it."""
    (batch, queries, heads, head_dim), tiles = q.shape, blocks.count.shape[2]
    q = jnp.pad(q, ((0, 0), (0, tiles * BLOCK - queries), (0, 0), (0, 0)))
    q_BNTH = jnp.swapaxes(q, 1, 2)
    rows = pl.BlockSpec((1, 1, BLOCK, head_dim), lambda b, n, y, *_: (b, n, y, 0))
    # A list for each step, whose last two axes are whole.
    listed = blocks.listed.reshape(batch * heads * tiles, 1, -1)
    lists = pl.BlockSpec(
        (1, 1, listed.shape[2]),
        lambda b, n, y, *_: ((b * heads + n) * tiles + y, 0, 0),
        memory_space=pltpu.SMEM,
    )
    width = _TOGETHER * BLOCK
    turn = (2, head_dim, width) if tpu.slots_minor(head_dim) else (2, width, head_dim)
    read = listed.size * BLOCK * head_dim
    out, lse = tpu.call(
        partial(_kernel, scale=scale),
        (lengths, blocks.count.reshape(-1), tpu.first_row(k)),
        [
            (q_BNTH, rows),
            (listed.astype(jnp.int32), lists),
            *((tpu.as_stored(x), pl.BlockSpec(memory_space=pl.ANY)) for x in (k, v)),
        ],
        [
            (jax.ShapeDtypeStruct(q_BNTH.shape, q.dtype), rows),
            (
                jax.ShapeDtypeStruct((batch, heads, 1, tiles * BLOCK), jnp.float32),
                pl.BlockSpec((1, 1, 1, BLOCK), lambda b, n, y, *_: (b, n, 0, y)),
            ),
        ],
        [
            *[pltpu.VMEM(turn, k.dtype)] * 2,
            pltpu.SemaphoreType.DMA((2, 2)),
            *tpu.Softmax.scratch(BLOCK, head_dim),
            pltpu.VMEM((BLOCK, 1), jnp.float32),
        ],
        grid=((batch, heads, tiles), ()),
        cost=(4 * read * BLOCK, listed.size * BLOCK * BLOCK, 2 * read * k.dtype.itemsize),
        interpret=interpret,
        name="sparse_prefill_attention",
    )
    return jnp.swapaxes(out, 1, 2)[:, :queries], jnp.swapaxes(lse[:, :, 0], 1, 2)[:, :queries]


def _kernel(scalars, inputs, outputs, scratch, *, scale: Scale) -> None:
    # `counts` [B * N * Y]; `first` [1] the caches' row of batch row 0.
    lengths, counts, first = scalars
    # q [1, 1, 128, H]; the list [1, 1, C]; k and v [B, K, S, H] in memory, or [B, K, H, S].
    q, listed, *caches = inputs
    # The buffers [2, Z, H], or [2, H, Z].
    *buffers, arrived, top, total, acc, lse = scratch
    b, n, y = (pl.program_id(axis) for axis in range(3))
    heads, tiles = pl.num_programs(1), pl.num_programs(2)
    kv_head = n // (heads // caches[0].shape[1])
    count = counts[(b * heads + n) * tiles + y]
    turns = pl.cdiv(count, _TOGETHER)
    minor = tpu.slots_minor(q.shape[3])
    running = tpu.Softmax(top, total, acc)
    running.clear()

    def slots(number: Any) -> tuple[Any, ...]:
        at = pl.ds(pl.multiple_of(number * BLOCK, BLOCK), BLOCK)
        return (slice(None), at) if minor else (at, slice(None))

    def fetch(turn: Array) -> None:
        for i in range(_TOGETHER):
            block = listed[0, 0, jnp.minimum(turn * _TOGETHER + i, count - 1)]
            for which, (cache, buffer) in enumerate(zip(caches, buffers, strict=True)):
                pltpu.make_async_copy(
                    cache.at[first[0] + b, kv_head, *slots(block)],
                    buffer.at[turn % 2, *slots(i)],
                    arrived.at[which, turn % 2],
                ).start()

    def attend(turn: Array, held: Array | None) -> None:
        """Adds a turn's blocks, of which the first `held` slots count, or all."""
        for which, buffer in enumerate(buffers):
            # It waits for as many bytes as all copies have.
            whole = buffer.at[turn % 2]
            pltpu.make_async_copy(whole, whole, arrived.at[which, turn % 2]).wait()
        keys, values = (buffer[turn % 2] for buffer in buffers)
        scores = factor_of(scale) * tpu.matmul(q[0, 0], keys, (1, 0 if minor else 1))
        seen = None
        if held is not None:
            seen = lax.broadcasted_iota(jnp.int32, (1, scores.shape[1]), 1) < held
        running.add(capped(scores, scale), seen, values, minor=minor)

    @pl.when(count > 0)
    def _():
        fetch(jnp.int32(0))

        def step(turn: Array, _: None) -> None:
            fetch(turn + 1)
            attend(turn, None)

        lax.fori_loop(0, turns - 1, step, None)
        of_last = lengths[b] - listed[0, 0, count - 1] * BLOCK
        before = (count - 1 - (turns - 1) * _TOGETHER) * BLOCK
        attend(turns - 1, before + jnp.minimum(of_last, BLOCK))

    running.write(outputs[0].at[0, 0], lse)
    # A column becomes a row: 128 lanes of it are one vector.
    outputs[1][0, 0] = jnp.broadcast_to(lse[...], (BLOCK, BLOCK)).T[:1]
