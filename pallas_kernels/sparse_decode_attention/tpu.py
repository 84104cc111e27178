"""Attention of one query to chosen pages on TPUs: a Mosaic kernel that copies pages by their ids.

Grid: (row of the batch, list of pages, block of list entries), the last two in order; rows may be
split over a chip's cores. The lists are prefetched scalars. A step starts the copies of the next
step's pages, of its own list or the next one, from the cache to one of two buffers in VMEM. Then it
waits for its own pages and attends to them as one block of keys. Nothing that is gathered is
written to memory. VMEM: those buffers of keys and values, 1024 slots each and about 1 MiB in all,
and the running maximum, sum and output of the softmax.

A row of numbers beside the lists says for which queries a slot counts: the kv head whose rows see
it, or -1 (4 bytes a slot, 1% of its keys and values). The flat list of a row (Ada-KV) is one list
of all query heads, in which every row sees its own head's slots. The prior's queries (RESA) are
further rows, for which nothing more is read. Blocks beyond a list's last entry are skipped. An
entry of -1 within the list copies page 0 and counts for nothing. Values that do not count are
replaced by 0 page by page, only in blocks that have any, as a prefetched scalar says.

Bytes moved: keys and values of the listed pages, once for each list. Roofline: those bytes over the
bandwidth.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float

from pallas_kernels import tpu_common as tpu
from pallas_kernels.common import AnyCache, Scale, capped, factor_of
from pallas_kernels.quantised import AnyStored, coded
from pallas_kernels.sparse_decode_attention.lists import Pages, entries_of, results_of, rows_of

# Slots of a block: large enough that its copies take longer than a grid step's fixed cost.
_BLOCK = 1024
# Pages whose copies are started in one iteration: the scalar unit prepares some beside others.
_UNROLLED = 8


def unsupported(q: Array, k: AnyStored, v: AnyStored, entries: Array, page_size: int) -> str | None:
    """Why the kernel cannot run these arguments, or None."""
    if coded(k, v):
        return "it reads no keys and values in int8"
    head_dim, slots = k.shape[3], k.shape[2]
    rows = tpu.SUBLANES.get(k.dtype.itemsize, 1)
    if tpu.slots_minor(head_dim):
        return f"head dim {head_dim}: slots lie along the lanes, where a page is no whole vector"
    if page_size % rows or slots % page_size:
        return f"pages of {page_size} of {slots} slots are not whole tiles of {rows}"
    if 4 * page_size * head_dim * k.dtype.itemsize > tpu.VMEM_BYTES:
        return f"two buffers of a page of {page_size} slots do not fit vector memory"
    if entries.size > tpu.SCALARS:
        return f"lists of {entries.size} pages in all, at most {tpu.SCALARS} fit scalar memory"
    return tpu.unsupported_keys(q)


def sparse_decode_attention(
    q: Float[Array, "B 1 N H"],
    k: AnyCache,
    v: AnyCache,
    pages: Pages,
    *,
    scale: Scale,
    prior: Float[Array, "B 1 N H"] | None = None,
    block: int | None = None,
    interpret: pltpu.InterpretParams | bool = False,
) -> tuple[Array, ...]:
    """The listed slots' attention, as in `reference`.

    Args:
      block: list entries of a block; None takes as many as make a few hundred slots.
      interpret: parameters of the interpreter that runs the kernel on other platforms.
    """
    kv_heads, slots, head_dim = k.shape[1:]
    pages_of_head = slots // pages.size
    listed, reader_BXCZ = _listed(pages, kv_heads, pages_of_head, block)
    batch, lists, blocks = listed[2].shape
    taken = listed[0].shape[2] // blocks * pages.size
    # The kernel knows an entry of -1 by its slots, which stand before slot 0.
    scalars = (*listed, jnp.maximum(pages.start, 0), pages.stop, tpu.first_row(k))
    # One axis of all slots of a row, as entries number their pages.
    k_stored, v_stored = (tpu.as_stored(x).reshape(-1, kv_heads * slots, head_dim) for x in (k, v))
    group = None if pages.heads is None else q.shape[2] // kv_heads
    args = _Args(pages.size, scale, pages_of_head, kv_heads, group)
    rows = rows_of(q, prior, lists)

    def by_list(b, x, j, *_):
        return b, x, 0, 0

    rows_spec = pl.BlockSpec((1, 1, rows.shape[2], head_dim), by_list)
    lse = jax.ShapeDtypeStruct((*rows.shape[:3], 1), jnp.float32)
    buffer = pltpu.VMEM((2, taken, head_dim), k.dtype)
    read = batch * lists * blocks * taken
    out_BXMH, lse_BXM1 = tpu.call(
        partial(_kernel, args=args),
        [x.reshape(-1) for x in scalars],
        [
            (rows, rows_spec),
            (
                reader_BXCZ.reshape(batch, lists, 1, -1),
                pl.BlockSpec((1, 1, 1, taken), lambda b, x, j, *_: (b, x, 0, j)),
            ),
            *((x, pl.BlockSpec(memory_space=pl.ANY)) for x in (k_stored, v_stored)),
        ],
        [
            (jax.ShapeDtypeStruct(rows.shape, jnp.float32), rows_spec),
            (lse, pl.BlockSpec((1, 1, rows.shape[2], 1), by_list)),
        ],
        [
            *[buffer, buffer],
            pltpu.SemaphoreType.DMA((2, 2)),
            *tpu.Softmax.scratch(rows.shape[2], head_dim),
        ],
        grid=((batch,), (lists, blocks)),
        cost=(
            4 * read * rows.shape[2] * head_dim,
            read * rows.shape[2],
            2 * read * head_dim * k.dtype.itemsize,
        ),
        interpret=interpret,
        name="sparse_decode_attention",
        # The ids are within the cache (see above), and checks are two thirds of a copy's start.
        disable_bounds_checks=True,
    )
    return results_of(out_BXMH, lse_BXM1[..., 0], q)


def _listed(
    pages: Pages, kv_heads: int, pages_of_head: int, block: int | None
) -> tuple[tuple[Array, Array, Array], Float[Array, "B X C Z"]]:
    """The entries in whole blocks, how many a list uses, and whether every slot of a block counts.

    And for each slot the kv head whose rows see it, -1 for none; without heads 0.
    """
    entries = entries_of(pages, kv_heads, pages_of_head)
    batch, lists, length = entries.shape
    block = block or min(max(_BLOCK // pages.size, 1), length)
    blocks = -(-length // block)
    spare = [(0, 0), (0, 0), (0, blocks * block - length)]
    entries = jnp.pad(entries, spare, constant_values=-1)
    owner_BXC, page_BXC = jnp.divmod(entries, pages_of_head)
    slots_BXCZ = page_BXC[..., None] * pages.size + jnp.arange(pages.size)
    start_B111, stop_B111 = (x[:, None, None, None] for x in (pages.start, pages.stop))
    held_BXCZ = (slots_BXCZ >= start_B111) & (slots_BXCZ < stop_B111) & (entries >= 0)[..., None]
    used_BX = jnp.max(jnp.where(entries >= 0, jnp.arange(1, entries.shape[2] + 1), 0), axis=2)
    whole_BXJ = jnp.all(held_BXCZ.reshape(batch, lists, blocks, -1), axis=3)
    reader_BXC1 = (jnp.zeros_like(owner_BXC) if pages.heads is None else owner_BXC)[..., None]
    reader_BXCZ = jnp.where(held_BXCZ, reader_BXC1, -1).astype(jnp.float32)
    return (entries, used_BX, whole_BXJ), reader_BXCZ


@dataclass(frozen=True)
class _Args:
    """The kernel's static arguments."""

    page_size: int
    scale: Scale
    pages_of_head: int
    kv_heads: int
    group: int | None  # query heads of a kv head in a flat list; None for lists of one head


@dataclass(frozen=True)
class _Steps:
    """A batch row's steps: its lists one after another, block by block, and their pages' copies."""

    row: Array
    origin: Array  # the caches' row of batch row 0
    lists: Array | int
    blocks: Array | int
    block: int  # entries
    page_size: int
    pages: Any  # [B * X * C] the lists' entries, C a whole number of blocks
    used: Any  # [B * X] entries up to the last that is not -1
    caches: tuple[tuple[Any, Any], ...]  # k and v in memory, [B,K*S,H], and their buffers
    arrived: Any  # semaphores, [cache, buffer]

    def number(self, step: Array) -> Array:
        """The step's number among all rows' steps."""
        return self.row * self.lists * self.blocks + step

    def is_used(self, step: Array) -> Array:
        used = self.used[self.row * self.lists + step // self.blocks]
        return step % self.blocks * self.block < used

    def page(self, step: Array, i: Array) -> Array:
        return self.pages[self.number(step) * self.block + i]

    def rows_of(self, i: Array | int) -> pl.Slice:
        """Where a buffer, or the cache, holds page i."""
        start = i * self.page_size
        if not isinstance(start, int):
            start = pl.multiple_of(start, self.page_size)
        return pl.ds(start, self.page_size)

    def fetch(self, step: Array) -> None:
        """Start copying the step's pages into its buffer; for -1 page 0 is copied."""
        buffer_at = step % 2
        first = self.number(step) * self.block

        def copy_page(i: Array | int) -> None:
            at = self.rows_of(jnp.maximum(self.pages[first + i], 0))
            for which, (cache, buffer) in enumerate(self.caches):
                pltpu.make_async_copy(
                    cache.at[self.origin + self.row, at],
                    buffer.at[buffer_at, self.rows_of(i)],
                    self.arrived.at[which, buffer_at],
                ).start()

        def copy_pages(j: Array, _: None) -> None:
            for i in range(_UNROLLED):
                copy_page(j * _UNROLLED + i)

        lax.fori_loop(0, self.block // _UNROLLED, copy_pages, None)
        for i in range(self.block // _UNROLLED * _UNROLLED, self.block):
            copy_page(i)

    def wait(self, step: Array) -> None:
        for which, (_, buffer) in enumerate(self.caches):
            # A copy of the whole buffer waits for as many bytes as all its pages have.
            whole = buffer.at[step % 2]
            pltpu.make_async_copy(whole, whole, self.arrived.at[which, step % 2]).wait()


def _kernel(scalars, inputs, outputs, scratch, *, args: _Args) -> None:
    # `whole` [B * X * J] is whether every slot of the block counts; start and stop [B]; `first` [1]
    # the caches' row of batch row 0.
    pages, used, whole, start, stop, first = scalars
    # q [1, 1, R, H]; `readers` [1, 1, 1, M] the kv head whose rows see a slot, -1 for none, without
    # heads 0; k and v [B, K * S, H] in memory, or the rows of all layers.
    q, readers, k, v = inputs
    k_buffer, v_buffer, arrived, *softmax = scratch  # [2, M, H] each buffer
    b, x, j = (pl.program_id(axis) for axis in range(3))
    lists, blocks = pl.num_programs(1), pl.num_programs(2)
    page_size = args.page_size
    block = readers.shape[3] // page_size
    caches = (k, k_buffer), (v, v_buffer)
    steps = _Steps(b, first[0], lists, blocks, block, page_size, pages, used, caches, arrived)
    running = tpu.Softmax(*softmax)
    step = x * blocks + j
    following = jnp.minimum(step + 1, lists * blocks - 1)
    pl.when((step == 0) & steps.is_used(step))(lambda: steps.fetch(step))
    pl.when((step < following) & steps.is_used(following))(lambda: steps.fetch(following))
    pl.when(j == 0)(running.clear)

    def blank(i: Array, _: None) -> None:
        """Replace the values of page i that do not count: 0 x NaN is NaN."""
        at = step % 2, steps.rows_of(i)
        begin = lax.rem(steps.page(step, i), args.pages_of_head) * page_size
        slots_ZH = begin + lax.broadcasted_iota(jnp.int32, (page_size, v.shape[2]), 0)
        counts = (slots_ZH >= start[b]) & (slots_ZH < stop[b])
        values = v_buffer[at].astype(jnp.float32)  # masks have the layout of 32-bit numbers
        v_buffer[at] = jnp.where(counts, values, 0).astype(v_buffer.dtype)

    @pl.when(steps.is_used(step))
    def _():
        steps.wait(step)
        cut = whole[steps.number(step)] == 0
        pl.when(cut)(lambda: lax.fori_loop(0, block, blank, None))
        scores_RM = factor_of(args.scale) * tpu.matmul(q[0, 0], k_buffer[step % 2], (1, 1))
        scores_RM = capped(scores_RM, args.scale)
        running.add(
            scores_RM, _seen(readers[0, 0], q.shape[2], args), v_buffer[step % 2], minor=False
        )

    pl.when(j == blocks - 1)(lambda: running.write(*(ref.at[0, 0] for ref in outputs)))


def _seen(readers: Float[Array, "1 Z"], rows: int, args: _Args) -> Array:
    """Which slots every row sees: [1,Z] where all see the same, else [rows,Z]."""
    if args.group is None:
        return readers >= 0
    row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    # The prior's queries follow the queries.
    head = row % (args.group * args.kv_heads) // args.group
    return readers == head.astype(jnp.float32)
