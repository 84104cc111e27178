"""The best pages of rows that share a context on Hopper: two launches, however many rows there are.

The first one scores. Blocks of 64 shared pages are dealt out to the blocks of threads of a kv head.
One copies the digests of its pages by TMA into a ring in shared memory and multiplies them with the
queries of all rows, which are the columns of one wgmma. So the shared digests are read once for all
rows; beyond 128 columns once for each 128. The same blocks of threads then score the rows' own
pages: those of a few rows whose columns fill a tile of 8, each row's columns of its own product.
The bounds are added up as in `gpu`, so a row's scores are those of the row alone.

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
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from pallas_kernels import hopper, hopper_best
from pallas_kernels.page_scores import Best, Digests, SharedPages
from pallas_kernels.quantised import AnyStored

# Pages of a step, and steps in flight.
_BLOCK, _STAGES = hopper.ROWS, 4
# Columns of a product at most.
_COLUMNS = 128


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The kernels' static arguments.

    Attributes:
      group: query heads of a kv head.
      width: columns of a row: its group's, and empty ones.
      columns: of a pass over the shared pages.
      digests: 2 for a box, 1 for a point.
      together: whether the scores of all heads are summed.
      pages: shared ones, and those of each row.
      splits: blocks of threads of a pass over a kv head's pages.
    """

    rows: int
    kv_heads: int
    group: int
    width: int
    columns: int
    passes: int
    head_dim: int
    digests: int
    together: bool
    pages: tuple[int, int]
    splits: int
    size: int
    dtype: Any
    interpret: Any

    @property
    def tile(self) -> int:
        """Columns of a product with rows' own pages."""
        return max(self.width, hopper.TILE_ROWS)

    @property
    def lines(self) -> tuple[int, int]:
        """Lines of scores: of shared pages, and of a row's own."""
        shared, own = (pl.cdiv(pages, _BLOCK) for pages in self.pages)
        return shared, own

    @property
    def tiles(self) -> int:
        return pl.cdiv(sum(self.lines), _BLOCK)


def unsupported(q: Array, high: AnyStored, shared: SharedPages, size: int) -> str | None:
    """Why these kernels cannot run these arguments, or None."""
    if shared.digests.radius is not None:
        return "a ball's radius"
    theirs, own = (x.shape[2] for x in (shared.digests.high, high))
    if theirs % hopper.TILE_ROWS:
        return f"{theirs} shared pages are not whole tiles of {hopper.TILE_ROWS}"
    group = q.shape[1] // high.shape[1]
    if group > hopper.ROWS:
        return f"{group} queries for one kv head, at most {hopper.ROWS}"
    slots = (pl.cdiv(theirs, _BLOCK) + pl.cdiv(own, _BLOCK)) * _BLOCK
    reason = hopper_best.unsupported(slots, size)
    return hopper.unsupported(q[:, None]) if reason is None else reason


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
    spare = -own % hopper.TILE_ROWS
    job = _Job(
        rows=rows,
        kv_heads=kv_heads,
        group=group,
        width=width,
        columns=pl.cdiv(tiles, passes) * tile,
        passes=passes,
        head_dim=head_dim,
        digests=1 if digests.low is None else 2,
        together=together,
        pages=(shared.digests.high.shape[2], own + spare),
        splits=max(hopper.processors() // (kv_heads * passes), 1),
        size=size,
        dtype=digests.high.dtype,
        interpret=interpret,
    )
    # Apart, as they come from the program: to join them would be a launch.
    bounds = [jnp.asarray(x, jnp.int32) for x in best]
    split = shared.split.astype(jnp.int32)
    theirs, mine = ([x for x in each if x is not None] for each in (shared.digests, digests))
    if spare:
        mine = [jnp.pad(x, ((0, 0), (0, 0), (0, spare), (0, 0))) for x in mine]
    scores = _scores(_columns(q, job), theirs, mine, split, job)
    return _choose(scores, bounds, split, job)


def _columns(q: Float[Array, "B N H"], job: _Job) -> Float[Array, "K D M H"]:
    """The rows' queries as columns of a kv head: positive and negative parts, or for a point all.

    Row b begins at column b * width.
    """
    parts = [jnp.maximum(q, 0), jnp.minimum(q, 0)] if job.digests == 2 else [q]
    x = jnp.stack(parts).reshape(-1, job.rows, job.kv_heads, job.group, job.head_dim)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, job.width - job.group), (0, 0)))
    x = jnp.transpose(x, (2, 0, 1, 3, 4)).reshape(job.kv_heads, job.digests, -1, job.head_dim)
    return jnp.pad(x, ((0, 0), (0, 0), (0, job.passes * job.columns - x.shape[2]), (0, 0)))


def _scores(
    q: Float[Array, "K D M H"],
    theirs: list[Array],
    own: list[Array],
    split: Int[Array, " 1"],
    job: _Job,
) -> Float[Array, "K X T 64 64"]:
    """The scores of every column, or of every row the sums of its group's.

    Undefined outside the bounds, in the gap, and of columns that there are not.
    """
    each = job.rows if job.together else job.passes * job.columns
    tiled = functools.partial(hopper.tiled, dtype=job.dtype)
    kernel = plgpu.kernel(
        functools.partial(_score_kernel, job=job),
        out_type=jax.ShapeDtypeStruct((job.kv_heads, each, job.tiles, _BLOCK, _BLOCK), jnp.float32),
        scratch_types=dict(
            q_tiles=tiled(job.digests, job.columns, job.head_dim),
            q_tile=tiled(job.digests, job.tile, job.head_dim),
            asked=plgpu.Barrier(num_arrivals=job.digests, num_barriers=2),
            rings=[tiled(_STAGES, _BLOCK, job.head_dim)] * job.digests,
            ready=plgpu.Barrier(num_arrivals=job.digests, num_barriers=_STAGES),
        ),
        grid=(job.kv_heads, job.passes, job.splits),
        grid_names=("head", "pass", "split"),
        interpret=job.interpret,
        kernel_name="score_shared_pages",
    )
    return kernel(split, q, *theirs, *own)


def _score_kernel(split_ref, q_ref, *refs, job: _Job, **scratch) -> None:
    head, number, split = (lax.axis_index(name) for name in ("head", "pass", "split"))
    theirs = [ref.at[0, head] for ref in refs[: job.digests]]
    own = refs[job.digests : 2 * job.digests]
    scores_ref = refs[-1].at[head]
    begin = number * job.columns
    for i in range(job.digests):
        columns = q_ref.at[head, i, pl.ds(begin, job.columns)]
        plgpu.copy_gmem_to_smem(columns, scratch["q_tiles"].at[i], scratch["asked"].at[0])
    blocks = lax.div(_split(split_ref, job) + (_BLOCK - 1), _BLOCK)
    steps = lax.div(blocks - split + (job.splits - 1), job.splits)
    _score_shared(theirs, scores_ref, begin, split, steps, job, scratch)
    # The rows' own pages: lines of a tile of columns, dealt out over all passes.
    workers = job.passes * job.splits
    worker = number * job.splits + split
    lines = job.lines[1]
    count = pl.cdiv(job.rows * job.width, job.tile) * lines

    @pl.loop(0, lax.div(count - worker + (workers - 1), workers))
    def _item(i):
        item = i * workers + worker
        tile, line = lax.div(item, lines), lax.rem(item, lines)
        # All warps are done with what the copies overwrite.
        plgpu.commit_smem()
        for j in range(job.digests):
            columns = q_ref.at[head, j, pl.ds(tile * job.tile, job.tile)]
            plgpu.copy_gmem_to_smem(columns, scratch["q_tile"].at[j], scratch["asked"].at[1])
        _score_own([(ref, head) for ref in own], scores_ref, tile, line, job, scratch)


def _split(ref: Any, job: _Job) -> Array:
    return jnp.clip(ref[0], 0, job.pages[0])


def _score_shared(
    digests: list, scores_ref: Any, begin: Array, first: Array, steps: Array, job: _Job, scratch
) -> None:
    """Score the shared blocks first, first + splits, ...: as many as `steps`."""

    def block(step: Any) -> Array:
        return first + step * job.splits

    def copy(step: Any) -> None:
        _copy(digests, block(step), lax.rem(step, _STAGES), scratch)

    for ahead in range(_STAGES):
        pl.when(ahead < steps)(functools.partial(copy, jnp.int32(ahead)))
    plgpu.barrier_wait(scratch["asked"].at[0])

    @pl.loop(0, steps)
    def _step(step):
        found = _products(lax.rem(step, _STAGES), scratch["q_tiles"], job.columns, scratch)

        @pl.when(step + _STAGES < steps)
        def _():
            # All warps have read the slot.
            plgpu.commit_smem()
            copy(step + _STAGES)

        _store(found, scores_ref, begin, block(step), job)


def _score_own(
    digests: list, scores_ref: Any, tile: Array, line: Array, job: _Job, scratch
) -> None:
    """Score a line of own pages of the rows of a tile of columns, each by its own columns."""
    rows = job.tile // job.width

    def copy(i: int) -> None:
        row = jnp.minimum(tile * rows + i, job.rows - 1)
        _copy([ref.at[row, head] for ref, head in digests], line, i % _STAGES, scratch)

    for i in range(min(rows, _STAGES)):
        copy(i)
    plgpu.barrier_wait(scratch["asked"].at[1])
    whole: Any = None
    for i in range(rows):
        found = _products(i % _STAGES, scratch["q_tile"], job.tile, scratch)
        if i + _STAGES < rows:
            plgpu.commit_smem()
            copy(i + _STAGES)
        mine = hopper.iota(found.shape, 1) >= i * job.width
        whole = jnp.where(mine, found, whole) if i else found
    _store(whole, scores_ref, tile * job.tile, job.lines[0] + line, job)


def _copy(digests: list, block: Array, slot: Any, scratch: dict) -> None:
    """Begin to copy a block of pages into a slot of the rings."""
    for ref, ring in zip(digests, scratch["rings"], strict=True):
        pages = ref.at[pl.ds(block * _BLOCK, _BLOCK)]
        plgpu.copy_gmem_to_smem(pages, ring.at[slot], scratch["ready"].at[slot])


def _products(slot: Any, q: Any, columns: int, scratch: dict) -> Float[Array, "64 M"]:
    """The scores of a slot's pages, once they are there."""
    plgpu.barrier_wait(scratch["ready"].at[slot])

    def multiply(acc) -> Array:
        for i, ring in enumerate(scratch["rings"]):
            plgpu.wgmma(acc, ring.at[slot], q.at[i].transpose((1, 0)))
        return acc[...]

    acc = plgpu.WGMMAAccumulatorRef((_BLOCK, columns), jnp.float32)
    return pl.run_scoped(multiply, acc)


def _store(
    found: Float[Array, "64 M"], scores_ref: Any, begin: Any, block: Array, job: _Job
) -> None:
    """Write the scores of a block of pages, which is a line, of the columns from `begin` on."""
    tile, line = lax.div(block, _BLOCK), lax.rem(block, _BLOCK)
    if not job.together:
        # Two pages of a query lie in a thread, so that the transpose is stored as they lie.
        found = plgpu.layout_cast(found, plgpu.Layout.WGMMA_TRANSPOSED)
        place = scores_ref.at[pl.ds(begin, found.shape[1]), tile, line]
        hopper.store_little(found, place.transpose((1, 0)))
        return
    first = lax.div(begin, job.width)
    for i in range(found.shape[1] // job.width):
        sums = found[:, i * job.width : (i + 1) * job.width].sum(axis=1)

        # Columns behind those of the last row are none.
        @pl.when(first + i < job.rows)
        def _(i=i, sums=sums):
            scores_ref[first + i, tile, line] = sums


def _choose(
    scores: Array, bounds: list[Array], split: Int[Array, " 1"], job: _Job
) -> Int[Array, "B X C"]:
    """The lists.

    Args:
      bounds: of every row first, last and count.
    """
    lists = 1 if job.together else job.kv_heads * job.group
    kernel = plgpu.kernel(
        functools.partial(_choose_kernel, job=job),
        out_type=jax.ShapeDtypeStruct((job.rows, lists, job.size), jnp.int32),
        scratch_types=hopper_best.scratch(job.tiles),
        grid=(job.rows, lists),
        grid_names=("row", "list"),
        interpret=job.interpret,
        kernel_name="choose_shared_pages",
    )
    return kernel(*bounds, split, scores)


def _choose_kernel(*refs, job: _Job, **scratch) -> None:
    *bound_refs, split_ref, scores_ref, lists_ref = refs
    row, each = lax.axis_index("row"), lax.axis_index("list")
    split, own = _split(split_ref, job), job.lines[0] * _BLOCK
    first, last = (jnp.clip(ref[row], 0, split + job.pages[1]) for ref in bound_refs[:2])
    count = jnp.clip(bound_refs[2][row], 0, job.size)
    # As slots of the scores: the gap lies before a row's own pages.
    first = jnp.where(first < split, first, first + (own - split))
    last = jnp.where(last <= split, last, last + (own - split))
    # An empty range may end before the gap and begin behind it.
    last = jnp.maximum(first, last)

    def sums(tile: Any) -> Array:
        if job.together:
            parts = [scores_ref.at[head, row, tile] for head in range(job.kv_heads)]
        else:
            column = row * job.width + lax.rem(each, job.group)
            parts = [scores_ref.at[lax.div(each, job.group), column, tile]]
        return functools.reduce(jnp.add, map(hopper_best.load, parts))

    its = hopper_best.Row(job.tiles, sums, (first, last, count), gap=(split, own))
    hopper_best.best(its, lists_ref.at[row, each], scratch, job.interpret is not None)
