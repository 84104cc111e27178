"""Attention of one query to chosen pages on TPUs: a Mosaic kernel that copies pages by their ids.

Grid: (row of the batch, list of pages, block of list entries), the last two in order; rows may be
split over a chip's cores. The lists are prefetched scalars. A step starts the copies of the next
step's pages, of its own list or the next one, from where they lie in the cache to one of two
buffers in VMEM, then waits for its own and attends to them as one block of keys; nothing
gathered is written to memory. VMEM: those buffers of keys and values, 512 slots each and about
0.5 MiB in all, and the running maximum, sum and output of the softmax.

Which slots of a page count comes as a row of ones and zeros beside the lists (4 bytes a slot, 1% of
its keys and values). Blocks beyond a list's last entry are skipped; an entry of -1 within the list
copies page 0 and counts for nothing. Values that do not count are replaced by 0 page by page, only
in blocks that have any, which a prefetched scalar says.

Bytes moved: keys and values of the listed pages, once for each list. Roofline: those bytes over the
bandwidth; with pages of 16 a copy is 4 KiB, and starting it costs the scalar unit tens of cycles.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from pallas_kernels.common import MASKED
from pallas_kernels.tpu_common import SCALARS, SUBLANES, matmul, slots_minor, unsupported_keys

# Slots of a block: large enough that its copies take longer than a grid step's fixed cost.
_BLOCK = 512


def unsupported(
    q: Array, k: Array, pages: Array, page_size: int, prior: Array | None
) -> str | None:
    """Why the kernel cannot run these arguments, or None."""
    head_dim, slots = k.shape[3], k.shape[2]
    rows = SUBLANES.get(k.dtype.itemsize, 1)
    if prior is not None:
        return "a prior's logits lie along the lanes, where a page is no whole vector"
    if slots_minor(head_dim):
        return f"head dim {head_dim}: slots lie along the lanes, where a page is no whole vector"
    if page_size % rows or slots % page_size:
        return f"pages of {page_size} of {slots} slots are not whole tiles of {rows}"
    if pages.size > SCALARS:
        return f"lists of {pages.size} pages in all, at most {SCALARS} fit scalar memory"
    return unsupported_keys(q)


def sparse_decode_attention(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    pages: Int[Array, "B X C"],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
    *,
    page_size: int,
    scale: float,
    prior: Float[Array, "B N S"] | None = None,
    block: int | None = None,
    interpret: pltpu.InterpretParams | bool = False,
) -> tuple[Array, ...]:
    """Slot s counts where its page is listed and start[b] <= s < stop[b].

    Args:
      block: list entries of a block; None takes as many as make a few hundred slots.
      interpret: parameters of the interpreter that runs the kernel on other platforms.
    """
    reason = unsupported(q, k, pages, page_size, prior)
    if reason is not None:
        raise NotImplementedError(f"sparse_decode_attention: {reason}")
    (batch, _, heads, head_dim), (_, lists, entries) = q.shape, pages.shape
    block = block or min(max(_BLOCK // page_size, 1), entries)
    blocks = -(-entries // block)
    spare = [(0, 0), (0, 0), (0, blocks * block - entries)]
    pages = jnp.pad(pages.astype(jnp.int32), spare, constant_values=-1)
    slots_BXCZ = pages[..., None] * page_size + jnp.arange(page_size)
    start_B111, stop_B111 = (x[:, None, None, None] for x in (start, stop))
    held_BXCZ = (slots_BXCZ >= start_B111) & (slots_BXCZ < stop_B111) & (pages >= 0)[..., None]
    used_BX = jnp.max(jnp.where(pages >= 0, jnp.arange(1, pages.shape[2] + 1), 0), axis=2)
    whole_BXJ = jnp.all(held_BXCZ.reshape(batch, lists, blocks, -1), axis=3)
    scalars = (pages, used_BX, whole_BXJ, start, stop)

    rows = heads // lists
    slots = block * page_size
    queries_spec = pl.BlockSpec((1, 1, rows, head_dim), lambda b, x, j, *_: (b, x, 0, 0))
    buffer = pltpu.VMEM((2, slots, head_dim), k.dtype)
    out_BXRH, lse_BXR1 = pl.pallas_call(
        partial(_kernel, scale=scale, page_size=page_size, group=lists // k.shape[1]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, lists, blocks),
            in_specs=[
                queries_spec,
                pl.BlockSpec((1, 1, 1, slots), lambda b, x, j, *_: (b, x, 0, j)),
                *[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            ],
            out_specs=[
                queries_spec,
                pl.BlockSpec((1, 1, rows, 1), lambda b, x, j, *_: (b, x, 0, 0)),
            ],
            scratch_shapes=[
                *[buffer] * 2,
                pltpu.SemaphoreType.DMA((2, 2)),
                *[pltpu.VMEM((rows, 1), jnp.float32)] * 2,
                pltpu.VMEM((rows, head_dim), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((batch, lists, rows, head_dim), q.dtype),
            jax.ShapeDtypeStruct((batch, lists, rows, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * pages.size * page_size * rows * head_dim,
            transcendentals=pages.size * page_size * rows,
            bytes_accessed=2 * pages.size * page_size * head_dim * k.dtype.itemsize,
        ),
        interpret=interpret,
        name="sparse_decode_attention",
    )(
        *(x.reshape(-1).astype(jnp.int32) for x in scalars),
        q.reshape(batch, lists, rows, head_dim),
        held_BXCZ.reshape(batch, lists, 1, -1).astype(jnp.float32),
        *(k, v),
    )
    return out_BXRH.reshape(q.shape), lse_BXR1.reshape(q.shape[:3])


def _kernel(
    pages,  # [B * X * C] the lists, C a whole number of blocks
    used,  # [B * X] entries up to the last that is not -1
    whole,  # [B * X * J] whether every slot of the block counts
    start,  # [B]
    stop,  # [B]
    q,  # [1, 1, R, H]
    held,  # [1, 1, 1, M] 1 for slots that count, else 0
    k,  # [B, K, S, H] in memory
    v,
    out,
    lse,
    k_buffer,  # [2, M, H]
    v_buffer,
    arrived,  # [2, 2] semaphores of the buffers, k's and v's
    top,  # [R, 1] the softmax
    total,
    acc,  # [R, H]
    *,
    scale: float,
    page_size: int,
    group: int,
):
    b, x, j = (pl.program_id(axis) for axis in range(3))
    lists, blocks = pl.num_programs(1), pl.num_programs(2)
    block = held.shape[3] // page_size
    step = x * blocks + j  # of the row
    caches = (k, k_buffer), (v, v_buffer)

    def list_of(step):
        return b * lists + step // blocks

    def entry(step, i):
        return pages[(b * lists * blocks + step) * block + i]

    def is_used(step):
        return step % blocks * block < used[list_of(step)]

    def fetch(step):
        head = step // blocks // group

        def page(i, _):
            at = pl.ds(pl.multiple_of(jnp.maximum(entry(step, i), 0) * page_size, page_size), page_size)
            to = pl.ds(pl.multiple_of(i * page_size, page_size), page_size)
            for which, (cache, buffer) in enumerate(caches):
                pltpu.make_async_copy(
                    cache.at[b, head, at], buffer.at[step % 2, to], arrived.at[which, step % 2]
                ).start()

        lax.fori_loop(0, block, page, None)

    @pl.when((step == 0) & is_used(step))
    def _():
        fetch(step)

    following = jnp.minimum(step + 1, lists * blocks - 1)

    @pl.when((step < following) & is_used(following))
    def _():
        fetch(following)

    @pl.when(j == 0)
    def _():
        top[...] = jnp.full_like(top, MASKED)
        total[...] = jnp.zeros_like(total)
        acc[...] = jnp.zeros_like(acc)

    def blank(i, _):
        """Replace the values of page i that do not count: 0 x NaN is NaN."""
        first = entry(step, i) * page_size
        rows = step % 2, pl.ds(pl.multiple_of(i * page_size, page_size), page_size)
        slots_ZH = first + lax.broadcasted_iota(jnp.int32, (page_size, v.shape[3]), 0)
        counts = (slots_ZH >= start[b]) & (slots_ZH < stop[b]) & (first >= 0)
        values = v_buffer[rows].astype(jnp.float32)
        v_buffer[rows] = jnp.where(counts, values, 0).astype(v_buffer.dtype)

    @pl.when(is_used(step))
    def _():
        for which, (_, buffer) in enumerate(caches):
            # Waits for as many bytes as the whole buffer has.
            copy = buffer.at[step % 2]
            pltpu.make_async_copy(copy, copy, arrived.at[which, step % 2]).wait()

        @pl.when(whole[b * lists * blocks + step] == 0)
        def _():
            lax.fori_loop(0, block, blank, None)

        seen = held[0, 0] > 0
        values = v_buffer[step % 2]
        scores_RM = scale * matmul(q[0, 0], k_buffer[step % 2], (1, 1))
        scores_RM = jnp.where(seen, scores_RM, MASKED)
        old = top[...]
        new = jnp.maximum(old, jnp.max(scores_RM, axis=1, keepdims=True))
        weights_RM = jnp.where(seen, jnp.exp(scores_RM - new), 0)
        shrink = jnp.exp(old - new)
        total[...] = shrink * total[...] + jnp.sum(weights_RM, axis=1, keepdims=True)
        acc[...] = shrink * acc[...] + matmul(weights_RM.astype(values.dtype), values, (1, 0))
        top[...] = new

    @pl.when(j == blocks - 1)
    def _():
        some = total[...] > 0
        safe = jnp.where(some, total[...], 1)
        out[0, 0] = (acc[...] / safe).astype(out.dtype)
        lse[0, 0] = jnp.where(some, top[...] + jnp.log(safe), -jnp.inf)
