"""Attention of one query a row to chosen pages on Hopper, copied page by page from the cache.

As in dense decode, one warpgroup copies pages into rings and others attend to blocks of 128 slots
(`hopper_stream`). Where there are fewer lists (of a row and kv head, or query head) than
multiprocessors, each list is cut into pieces, which XLA merges by their log-sum-exp. A piece is
read up to its last page, which the kernel finds: lists may have different lengths. There may be one
list for all heads. Page numbers pass through shared memory. Only blocks with an entry of -1, or
that `start` or `stop` cuts, are masked. Nothing is gathered in global memory.

A group's queries fill few of a wgmma's 64 rows, so the prior's queries (RESA) are further rows and
cost neither bytes nor time. A flat list of (kv head, page) entries (Ada-KV) is attended by the
query heads of all kv heads at once, each masked to its own head's entries.

The slots around the listed ones may be attended in the same launch (`Around`): their pages follow
the listed ones, in slots that these do not count.

Rows may share their first slots (`Shared`). Then a page is copied from the shared cache or from the
row's own, by its number. The rows' lists of one head are neighbours in the grid: a page that
several of them name comes from device memory about once, and from the L2 cache for the others.

Of keys and values in 8 bits the scales of the listed slots are gathered before, since a page's are
fewer bytes than a copy must begin at.

Shared memory: q 16 KiB, rings of 3 blocks 192 KiB, 10 KiB for results, 4 KiB of ids.

Roofline: the bytes of the listed pages. On an H200 (copy 4.05 TB/s), 32 query heads over 8 kv heads
of 128, bfloat16, 256 random pages of 16 of 131,072 slots a head, whole calls: batch 16 0.077 ms,
3.5 TB/s (86% of the copy; XLA's gather 0.328 ms); batch 1 0.0146 ms (0.0200). Rejected: a kernel
that merges the pieces. A step of the 8B shape over 131,072 tokens takes 5.36 ms under Quest in
place of 5.42, 5.83 under InfLLM in place of 5.75, and of 16 rows over one context 8.56 in place of
8.53.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from pallas_kernels import hopper, hopper_bits, hopper_rows, hopper_slots, hopper_stream
from pallas_kernels.common import PerRow, Stored
from pallas_kernels.hopper_stream import BLOCK
from pallas_kernels.quantised import AnyStored, Quantised, parts_of
from pallas_kernels.sparse_decode_attention.lists import (
    Pages,
    Shared,
    entries_of,
    lists_of,
    results_of,
    rows_of,
)

# Pages of a step are the copies that a barrier waits for.
_PAGE_SIZES = (8, 16, 32, 64, 128)
# Page ids of a worker's piece of a list pass through shared memory in lines of 16 bytes, the least
# that TMA copies, and in as many as one copy takes.
_ID_LINE, _ID_LINES = 4, 256


@dataclass(frozen=True, kw_only=True)
class _Args:
    """The kernel's static arguments."""

    batch: int
    lists: int  # of a row
    kv_heads: int
    pages_of_head: int
    shared_pages: int  # of a head, of the slots that rows share; 0 where they share none
    group: int | None  # query heads of a kv head in a flat list; None for lists of one head
    page_size: int
    splits: int
    share: int  # steps of a worker at most
    listed: int  # ids of a list that lie whole in shared memory; 0 where those of a piece do
    before: int  # pages at the row's beginning that follow the listed ones
    after: int  # pages from the bound `stop` on that follow these
    first_page: int  # the page that is listed as 0
    stream: hopper_stream.Stream

    @property
    def form(self) -> Any:
        return hopper_slots if self.stream.by_slots else hopper_rows

    @property
    def slots(self) -> int:
        """Slots of a row, shared and own."""
        return (self.pages_of_head + self.shared_pages) * self.page_size

    @property
    def pages(self) -> int:
        """Pages of a step."""
        return BLOCK // self.page_size


def unsupported(q: Array, k: AnyStored, lists: int, page_size: int, priors: int) -> str | None:
    """Why this kernel cannot run these arguments, or None.

    Args:
      lists: of a row of the batch; 1 if flat.
      priors: 1 with a prior's query, else 0.
    """
    if page_size not in _PAGE_SIZES:
        return f"pages of {page_size} slots are not of {_PAGE_SIZES}"
    if k.shape[2] % page_size:
        return f"{k.shape[2]} slots are not whole pages of {page_size}"
    rows = (1 + priors) * q.shape[2] // lists
    if rows > hopper.ROWS:
        return f"{rows} query rows of a list, at most {hopper.ROWS}"
    return hopper.unsupported(q)


def unsupported_around(listed: int) -> str | None:
    """Why lists of `listed` pages cannot be read with the slots around them, or None."""
    most = _ID_LINE * _ID_LINES
    return f"lists of {listed} pages, at most {most}" if listed > most else None


def sparse_decode_attention(
    q: Float[Array, "B 1 N H"],
    k: Stored,
    v: Stored,
    pages: Pages,
    *,
    scale: float,
    prior: Float[Array, "B 1 N H"] | None = None,
    shared: Shared | None = None,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """The listed slots' attention, as in `reference`."""
    kv_heads, around = k.shape[1], pages.around
    # Ids: pages of the list's head, or entries of a flat list.
    ids = pages.listed
    if pages.heads is not None:
        ids = entries_of(pages, kv_heads, k.shape[2] // pages.size)
    batch, _, length = ids.shape
    lists = lists_of(ids, kv_heads) if pages.heads is None else 1
    rows = rows_of(q, prior, lists)
    caches, scales = parts_of(k, v)
    stream = hopper_stream.Stream(
        rows=rows.shape[2],
        head_dim=k.shape[3],
        dtype=q.dtype,
        stored=(caches[0].dtype, caches[1].dtype),
        scale=scale,
        interpret=interpret,
    )
    args = _Args(
        **_cut_lists(pages, batch * lists, length),
        batch=batch,
        lists=lists,
        kv_heads=kv_heads,
        pages_of_head=k.shape[2] // pages.size,
        shared_pages=0 if shared is None else shared.k.shape[2] // pages.size,
        group=None if pages.heads is None else q.shape[2] // kv_heads,
        page_size=pages.size,
        first_page=pages.first,
        stream=stream,
    )
    # Apart, as they come from the program: to join them would be a launch.
    bounds: tuple[Array, ...] = (pages.start, pages.stop)
    bounds += (pages.stop if around is None else around.length,)
    theirs, their_scales = [], [None] * len(scales)
    if shared is not None:
        bounds += (jnp.broadcast_to(shared.split // pages.size, (batch,)),)
        theirs, their_scales = parts_of(shared.k, shared.v)
    if scales:
        every = jnp.broadcast_to(ids, (batch, lists, length))
        listed = _visited(jnp.where(every < 0, -1, every + pages.first), bounds, args)
        each = zip(scales, their_scales, strict=True)
        scales = [_listed_scales(*both, listed, bounds, args) for both in each]
    if isinstance(k, Quantised):
        rows = hopper_bits.in_column_order(rows)
    room = args.splits * args.share * args.pages if around is None else length + -length % _ID_LINE
    ids = jnp.pad(ids.astype(jnp.int32), ((0, 0), (0, 0), (0, room - length)), constant_values=-1)
    padded_out, padded_lse = _partials(rows, (*caches, *theirs), tuple(scales), ids, bounds, args)
    shape = batch, lists, args.splits
    out = padded_out[:, :, : stream.rows].reshape(*shape, stream.rows, stream.head_dim)
    lse = padded_lse[:, :, : stream.rows].reshape(*shape, stream.rows)
    if args.splits == 1:
        return results_of(out[:, :, 0], lse[:, :, 0], q)
    return results_of(*hopper.merge_parts(out, lse, 2), q)


def _cut_lists(pages: Pages, lists: int, length: int) -> dict[str, int]:
    """The args's numbers of a list's pieces: one worker a processor, and the ids of a piece fit."""
    around, before, after = pages.around, 0, 0
    if around is not None:
        before = pl.cdiv(around.before, pages.size)
        # They may begin at the end of a page.
        after = pl.cdiv(around.after - 1, pages.size) + 1 if around.after else 0
    steps = pl.cdiv((length + before + after) * pages.size, BLOCK)
    splits, whole = max(hopper.processors() // lists, 1), 1
    if around is None:
        splits = max(splits, pl.cdiv(length, _ID_LINE * _ID_LINES))
        # Pieces begin at whole lines of ids.
        whole = max(1, _ID_LINE * pages.size // BLOCK)
    share = pl.cdiv(pl.cdiv(steps, min(splits, steps)), whole) * whole
    listed = 0 if around is None else length
    return dict(
        splits=pl.cdiv(steps, share), share=share, listed=listed, before=before, after=after
    )


def _visited(
    ids: Int[Array, "B X E"], bounds: tuple[PerRow, ...], args: _Args
) -> Int[Array, "B X M"]:
    """Every list's pages in the order of the steps; the entries of a flat list."""
    steps = args.splits * args.share * args.pages
    if args.listed:
        stop_B = jnp.clip(bounds[1], 0, args.slots)
        later = stop_B[:, None] // args.page_size + jnp.arange(args.after)
        before = jnp.broadcast_to(jnp.arange(args.before), (len(later), args.before))
        around = jnp.concatenate([before, later], axis=1)[:, None]
        around = jnp.broadcast_to(around, (*ids.shape[:2], around.shape[2]))
        ids = jnp.concatenate([ids, around], axis=2)
    return jnp.pad(jnp.maximum(ids, 0), ((0, 0), (0, 0), (0, steps - ids.shape[2])))


def _listed_scales(
    own: Array,
    shared: Array | None,
    pages: Int[Array, "B X M"],
    bounds: tuple[PerRow, ...],
    args: _Args,
) -> Float[Array, "Y Z"]:
    """The scales of the slots of every list's pages, as `_fetch` copies these.

    Args:
      own: of the rows' own slots.
      shared: of what the rows share, or None.
    """
    head = (jnp.arange(args.lists) * args.kv_heads // args.lists)[:, None]

    def found(scales: Array, pages: Array, pages_of_head: int) -> Array:
        entries = pages
        if args.group is None:
            entries = head * pages_of_head + jnp.clip(pages, 0, pages_of_head - 1)
        paged = scales.reshape(len(scales), -1, args.page_size)  # [B, K * S / Z, Z]
        entries = entries.reshape(args.batch, -1, 1)
        if len(paged) < args.batch:
            return paged[0][entries[..., 0]]
        return jnp.take_along_axis(paged, entries, axis=1)

    if shared is None:
        return found(own, pages, args.pages_of_head).reshape(args.batch * args.lists, -1)
    first = bounds[3][:, None, None]
    mine = found(own, pages - first, args.pages_of_head)
    theirs = found(shared, pages, args.shared_pages)
    before = (pages < first).reshape(args.batch, -1, 1)
    return jnp.where(before, theirs, mine).reshape(args.batch * args.lists, -1)


def _partials(
    q: Float[Array, "B X M H"],
    caches: tuple[Any, ...],
    scales: tuple[Any, ...],
    ids: Int[Array, "B Z E"],
    bounds: tuple[PerRow, ...],
    args: _Args,
) -> tuple[Float[Array, "Y P M8 H"], Float[Array, "Y P L"]]:
    """The attention of every piece of all Y lists; rows beyond the args's hold anything.

    Args:
      caches: the numbers of keys and values, and of the shared ones.
      scales: of those in 8 bits, of the listed slots.
    """
    batch, stream = q.shape[0], args.stream
    # One axis of all pages of a row, as entries number them.
    paged = [x.reshape(len(x), -1, args.page_size, stream.head_dim) for x in caches]
    q = hopper.whole_rows(q, stream.interpret)
    parts = batch * args.lists, args.splits
    # Each piece's, or all of them.
    ids = ids.reshape(batch * ids.shape[1], 1 if args.listed else args.splits, -1, _ID_LINE)
    kernel = plgpu.kernel(
        functools.partial(_kernel, args=args),
        out_type=(
            jax.ShapeDtypeStruct((*parts, stream.tile_rows, stream.head_dim), jnp.float32),
            jax.ShapeDtypeStruct((*parts, stream.operand_rows), jnp.float32),
        ),
        scratch_types=dict(
            ids=plgpu.SMEM(ids.shape[-2:], jnp.int32),
            q_tile=hopper.tiled(stream.operand_rows, stream.head_dim, dtype=stream.dtype),
            loaded=plgpu.Barrier(num_barriers=2),
            **args.form.scratch(stream, args.pages),
        ),
        grid=parts,
        grid_names=("list", "split"),
        num_threads=1 + args.form.READERS,
        thread_name="role",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=stream.interpret,
        kernel_name="sparse_decode_attention",
    )
    limits = [x.astype(jnp.int32) for x in bounds]
    out, lse = kernel(*limits, ids, q, *paged, *scales)
    return out, lse


def _kernel(*refs, args: _Args, **scratch):
    given = 4 if args.shared_pages else 3
    bound_refs, (ids_ref, q_ref, k_ref, v_ref, *refs) = refs[:given], refs[given:]
    *refs, out_ref, lse_ref = refs
    shared_refs, scale_refs = (refs[:2], refs[2:]) if args.shared_pages else ((), refs)
    each, split, role = (lax.axis_index(name) for name in ("list", "split", "role"))
    if args.shared_pages:
        # The rows' lists of one head are neighbours.
        each = lax.rem(each, args.batch) * args.lists + lax.div(each, args.batch)
    row, index = lax.div(each, args.lists), lax.rem(each, args.lists)
    head = lax.div(index * args.kv_heads, args.lists)
    loaded = scratch["loaded"]
    piece = _Piece(
        ids=scratch["ids"],
        first=split * args.share,
        bounds=[jnp.clip(ref[row], 0, args.slots) for ref in bound_refs[:3]],
        own=bound_refs[3][row] if args.shared_pages else None,
    )

    readers = args.form.READERS
    more, fewer = hopper_slots.REGISTERS if args.stream.by_slots else (232, 40)

    @pl.when(role == readers)
    def _copies():
        plgpu.set_max_registers(fewer, action="decrease")
        # A list of its own, or one for all.
        its_ids = each if ids_ref.shape[0] == args.batch * args.lists else row
        mine = ids_ref.at[its_ids, 0 if args.listed else split]
        plgpu.copy_gmem_to_smem(mine, scratch["ids"], loaded.at[0])
        rows = hopper.first_rows(q_ref, args.stream.tile_rows, each)
        tile = scratch["q_tile"].at[pl.ds(0, args.stream.tile_rows)]
        plgpu.copy_gmem_to_smem(q_ref.at[each, rows], tile, loaded.at[1])
        plgpu.barrier_wait(loaded.at[0])
        scales = [ref.at[each] for ref in scale_refs]
        own, shared = ([x.at[row] for x in (k_ref, v_ref)], [x.at[0] for x in shared_refs])
        refs = list(zip(own, shared or own, strict=True))
        _fetch(refs, scales, piece, head, args, scratch)

    @pl.when(role < readers)
    def _attention():
        plgpu.set_max_registers(more, action="increase")
        plgpu.barrier_wait(loaded.at[1])
        plgpu.barrier_wait(loaded.at[0])
        mask = functools.partial(
            _mask if args.group is None else _mask_own_head, piece=piece, args=args
        )
        me = hopper_stream.Reader(role, scratch, args.stream)
        blocks, part = (0, _steps(piece, args)), (out_ref.at[each, split], lse_ref.at[each, split])
        carry = args.form.attend(me, blocks, scratch["q_tile"], mask=mask)
        args.form.write(me, carry, *part, number=0)
        args.form.finish(me, 1)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A worker's piece of a list, all scalars of the kernel.

    Attributes:
      first: the number of its first step in the list.
      bounds: of the row: start, stop, and the end of the slots around them.
      own: the first page of the row's own; None where rows share none.
    """

    ids: Any
    first: Any
    bounds: Any
    own: Any


def _id(piece: _Piece, step: Array, j: int, args: _Args) -> Array:
    """Id j of a step: a page or a flat list's entry; negative for none."""
    n = step * args.pages + j

    def found(at: Array) -> Array:
        page = piece.ids[lax.div(at, _ID_LINE), lax.rem(at, _ID_LINE)]
        return jnp.where(page < 0, page, page + args.first_page) if args.first_page else page

    if not args.listed:
        return found(n)
    n = n + piece.first * args.pages
    page, extra = n - args.listed, args.before + args.after
    later = lax.div(piece.bounds[1], args.page_size) + page - args.before
    page = jnp.where(page < args.before, page, jnp.where(page < extra, later, -1))
    return jnp.where(n < args.listed, found(jnp.minimum(n, args.listed - 1)), page)


def _seen(piece: _Piece, step: Array, j: int, args: _Args) -> tuple[Any, Any]:
    """The slots of page j of a step that count: from the first up to the second."""
    start, stop, end = piece.bounds
    if not args.listed:
        return start, stop
    page = (piece.first + step) * args.pages + j - args.listed
    first = jnp.where(page < 0, start, jnp.where(page < args.before, 0, stop))
    last = jnp.where(page < 0, stop, jnp.where(page < args.before, start, end))
    return first, last


def _steps(piece: _Piece, args: _Args) -> Array:
    """Steps of this piece up to the last that has a page."""

    def empty(steps: Array) -> Array:
        last = jnp.maximum(steps - 1, 0)
        found = [_id(piece, last, j, args) for j in range(args.pages)]
        return (steps > 0) & (functools.reduce(jnp.maximum, found) < 0)

    return lax.while_loop(empty, lambda steps: steps - 1, jnp.int32(args.share))


def _fetch(
    refs: list, scale_refs: list, piece: _Piece, head: Array, args: _Args, scratch: dict
) -> None:
    """Copy the pages of the steps into the rings; for none listed any page, which is masked.

    Args:
      refs: of keys and of values the row's own, and what rows share.
      scale_refs: those of the list's slots, of keys and of values, where there are any.
    """
    steps = _steps(piece, args)

    @pl.loop(0, steps)
    def _step(i):
        def of_head(page: Array, pages: int) -> Array:
            # A page that is none is masked, whichever it is.
            return head * pages + jnp.minimum(page, pages - 1)

        def copy(refs, place, ready):
            for j in range(args.pages):
                page = jnp.maximum(_id(piece, i, j, args), 0)
                part = place.at[pl.ds(j * args.page_size, args.page_size)]
                if args.group is not None:
                    plgpu.copy_gmem_to_smem(refs[0].at[page], part, ready)
                elif not args.shared_pages:
                    entry = of_head(page, args.pages_of_head)
                    plgpu.copy_gmem_to_smem(refs[0].at[entry], part, ready)
                else:
                    copy_either(refs, page, part, ready)

        def copy_either(refs, page, part, ready):
            own, shared = refs

            @pl.when(page < piece.own)
            def _():
                entry = of_head(page, args.shared_pages)
                plgpu.copy_gmem_to_smem(shared.at[entry], part, ready)

            @pl.when(page >= piece.own)
            def _():
                entry = of_head(page - piece.own, args.pages_of_head)
                plgpu.copy_gmem_to_smem(own.at[entry], part, ready)

        def copy_scales(ref, place, ready):
            block = pl.ds((piece.first + i) * BLOCK, BLOCK)
            plgpu.copy_gmem_to_smem(ref.at[block], place, ready)

        hopper_stream.fill(scratch, refs, scale_refs, i, copy, copy_scales)

    hopper_stream.drain(scratch, steps)


def _mask(s: Array, step: Array, *, piece: _Piece, args: _Args) -> Array:
    """-inf outside the bounds, where the slots of a page that is none (-1) lie too: below 0."""
    column, limits, whole = hopper.iota(s.shape, args.stream.slots_axis), [], jnp.bool_(True)
    for j in range(args.pages):
        begin = _id(piece, step, j, args) * args.page_size
        first, last = _seen(piece, step, j, args)
        whole = whole & (begin >= first) & (begin + args.page_size <= last)
        # As columns.
        limits.append([x - begin + j * args.page_size for x in (first, last)])

    def some(s: Array) -> Array:
        low, high = (jnp.full_like(column, 0) + x for x in limits[0])
        for j, (first, last) in enumerate(limits[1:], 1):
            mine = column >= j * args.page_size
            low, high = jnp.where(mine, first, low), jnp.where(mine, last, high)
        return jnp.where((column >= low) & (column < high), s, -jnp.inf)

    return lax.cond(whole, lambda s: s, some, s)


def _mask_own_head(s: Array, step: Array, *, piece: _Piece, args: _Args) -> Array:
    """Of a flat list: -inf outside the bounds, and for the rows of other kv heads."""
    assert args.group is not None
    entries = [_id(piece, step, j, args) for j in range(args.pages)]
    heads = [lax.div(entry, args.pages_of_head) for entry in entries]
    # Of -1 the head is 0 and the page -1.
    pages = [entry - head * args.pages_of_head for entry, head in zip(entries, heads, strict=True)]
    slot = _slots(s.shape, pages, args)
    row = hopper.iota(s.shape, 1 - args.stream.slots_axis)
    queries = args.group * args.kv_heads
    row_head = lax.div(jnp.where(row >= queries, row - queries, row), args.group)
    column = hopper.iota(s.shape, args.stream.slots_axis)
    head = jnp.full_like(column, 0) + heads[0]
    for j in range(1, args.pages):
        head = jnp.where(column >= j * args.page_size, heads[j], head)
    start, stop, _ = piece.bounds
    seen = (slot >= start) & (slot < stop) & (head == row_head)
    return jnp.where(seen, s, -jnp.inf)


def _slots(shape: tuple[int, ...], pages: list[Array], args: _Args) -> Array:
    """The slot of every column of a block."""
    column = hopper.iota(shape, args.stream.slots_axis)
    slot = column
    for j, page in enumerate(pages):
        mine = column >= j * args.page_size
        slot = jnp.where(mine, column + (page - j) * args.page_size, slot)
    return slot
