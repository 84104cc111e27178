"""The best pages of rows that share a context on Hopper: two launches, however many rows there are.

The first one scores. Blocks of 64 shared pages are dealt out to the blocks of threads of a kv head.
One copies the digests of its pages by TMA into a ring in shared memory and multiplies them with the
queries of all rows, which are the columns of one wgmma. So the shared digests are read once for all
rows; beyond 128 columns once for each 128. The same blocks of threads then score the rows' own
pages: those of a few rows whose columns fill a tile of 8, each row's columns of its own product.
The bounds are added up as in `gpu`, so a row's scores are the same as for the row alone.

The second launch chooses, a block of threads a list (`hopper_best`). A row's scores lie in lines of
64 pages: those of the shared pages, then those of its own. The pages between the split and the last
shared line are a gap.

Shared memory of the first launch: ring 128 KiB, queries up to 64 KiB and 4; of the second as
`hopper_best` says.

Roofline of the first: the bytes of the shared digests, and the scores, which go to the L2 cache and
come back from it: 4 bytes a query head and page. For 8,192 pages of 8 kv heads of 128 with two
bounds in bfloat16, and 16 rows of 32 query heads, 34 MB and 17. On an H200 a step of Quest for 16
rows over one context of 131,072 tokens, 8B shape, takes 8.56 ms, with XLA's form 9.44.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from pallas_kernels import hopper, hopper_best, hopper_warps
from pallas_kernels.page_scores import Best, Digests, SharedPages
from pallas_kernels.quantised import AnyStored
from pallas_kernels.select_pages import gpu
from pallas_kernels.select_pages.gpu import BLOCK, STAGES

# Columns of a product at most.
_COLUMNS = 128


def unsupported(q: Array, high: AnyStored, shared: SharedPages, size: int) -> str | None:
    """Why these kernels cannot run these arguments, or None."""
    theirs, ball = shared.digests.high, shared.digests.radius is not None
    slots = (pl.cdiv(theirs.shape[2], BLOCK) + pl.cdiv(high.shape[2], BLOCK)) * BLOCK
    return gpu.unsupported(q, theirs, ball, size, slots)


def select_pages(
    q: Float[Array, "B N H"],
    digests: Digests,
    best: Best,
    *,
    size: int,
    together: bool,
    shared: SharedPages,
    interpret: Any = None,
) -> Int[Array, "B X C"]:
    """See the public function."""
    rows, kv_heads, own, head_dim = digests.high.shape
    group = q.shape[1] // kv_heads
    # The sum of a group's scores takes whole tiles of columns. Groups that do not divide a tile, or
    # are not whole ones, have empty columns.
    width = next((n for n in (1, 2, 4) if group <= n and not together), 0)
    width = width or pl.cdiv(group, hopper.TILE_ROWS) * hopper.TILE_ROWS
    tile = max(width, hopper.TILE_ROWS)
    tiles = pl.cdiv(rows * width, tile)
    passes = pl.cdiv(tiles, max(_COLUMNS // tile, 1))
    columns = pl.cdiv(tiles, passes) * tile
    theirs, mine = ([x for x in each if x is not None] for each in (shared.digests, digests))
    if spare := -own % hopper.TILE_ROWS:
        mine = [jnp.pad(x, ((0, 0), (0, 0), (0, spare), (0, 0))) for x in mine]
    kinds, pages = len(theirs), shared.digests.high.shape[2]
    lines = pl.cdiv(pages, BLOCK), pl.cdiv(own + spare, BLOCK)
    shape = pl.cdiv(sum(lines), BLOCK), BLOCK, BLOCK
    split = shared.split.astype(jnp.int32)
    tiled = functools.partial(hopper.tiled, dtype=digests.high.dtype)
    # Scores outside the bounds, in the gap, and of columns that there are not, are undefined.
    each = rows if together else passes * columns
    kernel = plgpu.kernel(
        functools.partial(_score_kernel, width=width, together=together),
        out_type=jax.ShapeDtypeStruct((kv_heads, each, *shape), jnp.float32),
        scratch_types=dict(
            q_tiles=tiled(kinds, columns, head_dim),
            q_tile=tiled(kinds, tile, head_dim),
            asked=plgpu.Barrier(num_arrivals=kinds, num_barriers=2),
            **gpu.rings(kinds, head_dim, digests.high.dtype),
        ),
        grid=(kv_heads, passes, max(hopper.processors() // (kv_heads * passes), 1)),
        grid_names=("head", "pass", "split"),
        interpret=interpret,
        kernel_name="score_shared_pages",
    )
    # A row's queries as columns of a kv head: row b begins at column b * width.
    x = jnp.stack(gpu.parts(q, kinds)).reshape(kinds, rows, kv_heads, group, head_dim)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, width - group), (0, 0)))
    x = jnp.transpose(x, (2, 0, 1, 3, 4)).reshape(kv_heads, kinds, -1, head_dim)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, passes * columns - x.shape[2]), (0, 0)))
    scores = kernel(split, x, *theirs, *mine)
    choose = plgpu.kernel(
        functools.partial(
            _choose_kernel,
            pages=(pages, own + spare),
            columns=None if together else (group, width),
            interpreted=interpret is not None,
        ),
        out_type=jax.ShapeDtypeStruct((rows, 1 if together else q.shape[1], size), jnp.int32),
        scratch_types=hopper_warps.scratch(shape[0]),
        grid=(rows, 1 if together else q.shape[1]),
        grid_names=("row", "list"),
        interpret=interpret,
        kernel_name="choose_shared_pages",
    )
    # Apart, as they come from the program: to join them would be a launch.
    return choose(*(jnp.asarray(x, jnp.int32) for x in best), split, scores)


def _score_kernel(split_ref, q_ref, *refs, width: int, together: bool, **scratch) -> None:
    head, number, split = (lax.axis_index(name) for name in ("head", "pass", "split"))
    passes, splits = (lax.axis_size(name) for name in ("pass", "split"))
    q_tiles, q_tile, asked = (scratch[name] for name in ("q_tiles", "q_tile", "asked"))
    *refs, scores_ref = refs
    theirs, own = refs[: len(refs) // 2], refs[len(refs) // 2 :]
    kinds, columns, _ = q_tiles.shape
    rows, tile_columns = own[0].shape[0], q_tile.shape[1]
    begin, pages = number * columns, theirs[0].shape[2]
    store = functools.partial(
        _store, scores_ref=scores_ref.at[head], width=width, rows=rows if together else None
    )
    for i in range(kinds):
        mine = q_ref.at[head, i, pl.ds(begin, columns)]
        plgpu.copy_gmem_to_smem(mine, q_tiles.at[i], asked.at[0])
    blocks = lax.div(_split(split_ref, pages) + (BLOCK - 1), BLOCK)
    steps = lax.div(blocks - split + (splits - 1), splits)

    def block(step: Any) -> Array:
        return split + step * splits

    def store_shared(found: Array, step: Array) -> None:
        store(found, begin, block(step))

    shared = [ref.at[0, head] for ref in theirs]
    gpu.score_blocks(shared, block, store_shared, steps, (q_tiles, asked.at[0]), scratch)
    # The rows' own pages: lines of a tile of columns, dealt out over all passes.
    workers = passes * splits
    worker = number * splits + split
    lines = pl.cdiv(own[0].shape[2], BLOCK)
    count = pl.cdiv(rows * width, tile_columns) * lines

    @pl.loop(0, lax.div(count - worker + (workers - 1), workers))
    def _item(i):
        item = i * workers + worker
        tile, line = lax.div(item, lines), lax.rem(item, lines)
        # All warps are done with what the copies overwrite.
        plgpu.commit_smem()
        for j in range(kinds):
            mine = q_ref.at[head, j, pl.ds(tile * tile_columns, tile_columns)]
            plgpu.copy_gmem_to_smem(mine, q_tile.at[j], asked.at[1])
        found = _score_own([(ref, head) for ref in own], tile, line, width, scratch)
        store(found, tile * tile_columns, pl.cdiv(pages, BLOCK) + line)


def _split(ref: Any, pages: int) -> Array:
    return jnp.clip(ref[0], 0, pages)


def _score_own(digests: list, tile: Array, line: Array, width: int, scratch) -> Array:
    """The scores of a line of own pages of a tile of columns, each column by its row's digests."""
    q_tile, own = scratch["q_tile"], digests[0][0].shape[0]
    rows = q_tile.shape[1] // width

    def copy(i: int) -> None:
        row = jnp.minimum(tile * rows + i, own - 1)
        gpu.copy_block([ref.at[row, head] for ref, head in digests], line, i % STAGES, scratch)

    for i in range(min(rows, STAGES)):
        copy(i)
    plgpu.barrier_wait(scratch["asked"].at[1])
    whole: Any = None
    for i in range(rows):
        found = gpu.products(i % STAGES, q_tile, scratch)
        if i + STAGES < rows:
            plgpu.commit_smem()
            copy(i + STAGES)
        mine = hopper.iota(found.shape, 1) >= i * width
        whole = jnp.where(mine, found, whole) if i else found
    return whole


def _store(
    found: Float[Array, "64 M"],
    begin: Any,
    block: Array,
    *,
    scores_ref: Any,
    width: int,
    rows: int | None,
) -> None:
    """Write the scores of a block of pages, one line, for the columns from `begin` on.

    Args:
      rows: of the batch, where the columns of each are summed, or None.
    """
    tile, line = lax.div(block, BLOCK), lax.rem(block, BLOCK)
    if rows is None:
        place = scores_ref.at[pl.ds(begin, found.shape[1]), tile, line]
        hopper.store_transposed(found, place)
        return
    first = lax.div(begin, width)
    for i in range(found.shape[1] // width):
        sums = found[:, i * width : (i + 1) * width].sum(axis=1)

        # There is no column behind the last row's.
        @pl.when(first + i < rows)
        def _(i=i, sums=sums):
            scores_ref[first + i, tile, line] = sums


def _choose_kernel(
    *refs, pages: tuple[int, int], columns: tuple[int, int] | None, interpreted: bool, **scratch
) -> None:
    """Choose a row's list.

    Args:
      pages: shared ones, and those of a row.
      columns: of a row those of a group, and all; None where the heads' scores are summed.
    """
    *bound_refs, split_ref, scores_ref, lists_ref = refs
    row, each = lax.axis_index("row"), lax.axis_index("list")
    split, own = _split(split_ref, pages[0]), pl.cdiv(pages[0], BLOCK) * BLOCK
    first, last = (jnp.clip(ref[row], 0, split + pages[1]) for ref in bound_refs[:2])
    count = jnp.clip(bound_refs[2][row], 0, lists_ref.shape[2])
    # As slots of the scores: the gap lies before a row's own pages.
    first = jnp.where(first < split, first, first + (own - split))
    last = jnp.where(last <= split, last, last + (own - split))
    # An empty range may end before the gap and begin behind it.
    last = jnp.maximum(first, last)

    def sums(tile: Any) -> Array:
        if columns is None:
            parts = [scores_ref.at[head, row, tile] for head in range(scores_ref.shape[0])]
        else:
            group, width = columns
            column = row * width + lax.rem(each, group)
            parts = [scores_ref.at[lax.div(each, group), column, tile]]
        return functools.reduce(jnp.add, map(hopper_best.load, parts))

    its = hopper_best.Row(scores_ref.shape[2], sums, (first, last, count), gap=(split, own))
    hopper_best.best(its, lists_ref.at[row, each], scratch, interpreted)
