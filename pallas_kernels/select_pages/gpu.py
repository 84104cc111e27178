"""The best pages of each query head on Hopper in two launches: one scores them, one chooses.

All processors score: the blocks of 64 pages of a row's kv head are dealt out in turn to as many
blocks of threads as there are processors for it. A block of threads copies the digests of its pages
by TMA into a ring in shared memory and multiplies them with the positive and the negative parts of
the group's queries: the pages are the rows of a wgmma, the query heads its columns. Both bounds are
added up in one accumulator. The scores go to global memory, which here is the L2 cache. A second
launch chooses each list by one block of threads (`hopper_best.choose`). For a list of all heads
together the first launch writes the sums of each group's scores, and the second adds up the
groups'. Pages outside the bounds are not read.

Shared memory: ring 128 KiB, queries 4 KiB.

Roofline: the bytes of the digests, 34 MB for 8,192 pages of 8 kv heads of 128 with two bounds in
bfloat16: 8 us on an H200. In a step of an 8B shape over 131,072 tokens the scores take 11 us a
layer (for the choice see `hopper_best`). Rejected: one launch, in which a cluster of 8 blocks of
threads scores a kv head and four of them choose. It takes as long for one row, of which it keeps 64
of 132 processors busy, and a step of eight rows over 32,768 tokens takes 7.60 ms in place of 6.98.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from pallas_kernels import hopper, hopper_best
from pallas_kernels.page_scores import Best, Digests
from pallas_kernels.quantised import AnyStored

# Pages of a step, and steps in flight.
BLOCK = hopper.ROWS
STAGES = 4


def unsupported(
    q: Array, pages: AnyStored, ball: bool, size: int, slots: int | None = None
) -> str | None:
    """Why this kernel cannot run these arguments, or None.

    Args:
      pages: the digests that are read in blocks.
      slots: scores of a row; None where each page has one.
    """
    if ball:
        return "a ball's radius"
    if pages.shape[2] % hopper.TILE_ROWS:
        return f"{pages.shape[2]} pages are not whole tiles of {hopper.TILE_ROWS}"
    group = q.shape[1] // pages.shape[1]
    if group > hopper.ROWS:
        return f"{group} queries for one kv head, at most {hopper.ROWS}"
    reason = hopper_best.unsupported(pages.shape[2] if slots is None else slots, size)
    return hopper.unsupported(q[:, None]) if reason is None else reason


def select_pages(
    q: Float[Array, "B N H"],
    digests: Digests,
    best: Best,
    *,
    size: int,
    together: bool,
    interpret: Any = None,
) -> Int[Array, "B X C"]:
    """See the public function."""
    batch, kv_heads, pages, head_dim = digests.high.shape
    # Apart, as they come from the program: to join them would be a launch.
    bounds = [jnp.asarray(x, jnp.int32) for x in best]
    stored: list[Any] = [x for x in digests if x is not None]
    heads, group, kinds = batch * kv_heads, q.shape[1] // kv_heads, len(stored)
    rows = jnp.stack([x.reshape(-1, group, head_dim) for x in parts(q, kinds)], axis=1)
    rows = hopper.whole_rows(rows, interpret).reshape(heads, kinds, -1, head_dim)
    columns = pl.cdiv(group, hopper.TILE_ROWS) * hopper.TILE_ROWS
    # Scores of heads that there are not, and outside the bounds, are undefined.
    shape = heads, 1 if together else columns, *hopper_best.tiled_shape(pages)
    kernel = plgpu.kernel(
        functools.partial(_kernel, size=size, together=together),
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        scratch_types=dict(
            q_tiles=hopper.tiled(kinds, columns, head_dim, dtype=digests.high.dtype),
            asked=plgpu.Barrier(num_arrivals=kinds),
            **rings(kinds, head_dim, digests.high.dtype),
        ),
        grid=(heads, max(hopper.processors() // heads, 1)),
        grid_names=("head", "split"),
        interpret=interpret,
        kernel_name="score_pages",
    )
    scores, of = kernel(*bounds, rows, *stored), (1, 1)
    if together:
        scores = scores.reshape(batch, 1, kv_heads, *shape[2:])
    else:
        scores, of = scores.reshape(batch, kv_heads * columns, 1, *shape[2:]), (group, columns)
    return hopper_best.choose(scores, bounds, pages, size, interpret, of)


def parts(q: Array, kinds: int) -> list[Array]:
    """The queries' positive and negative parts, for a box, or the queries for a point."""
    return [jnp.maximum(q, 0), jnp.minimum(q, 0)] if kinds == 2 else [q]


def rings(kinds: int, head_dim: int, dtype: Any) -> dict[str, Any]:
    """The shared memory of `score_blocks` for one or two digests a page."""
    return dict(
        rings=[hopper.tiled(STAGES, BLOCK, head_dim, dtype=dtype)] * kinds,
        ready=plgpu.Barrier(num_arrivals=kinds, num_barriers=STAGES),
    )


def _kernel(*refs, size: int, together: bool, q_tiles, asked, **scratch) -> None:
    head, split = lax.axis_index("head"), lax.axis_index("split")
    splits = lax.axis_size("split")
    bounds, (q_ref, *digest_refs, scores_ref) = refs[:3], refs[3:]
    _, kv_heads, pages, _ = digest_refs[0].shape
    batch = lax.div(head, kv_heads)
    digests = [ref.at[batch, lax.rem(head, kv_heads)] for ref in digest_refs]
    first, last, _ = hopper_best.bounds_of(bounds, batch, pages, size)
    for i in range(len(digests)):
        rows = hopper.first_rows(q_ref, q_tiles.shape[1], head)
        plgpu.copy_gmem_to_smem(q_ref.at[head, i, rows], q_tiles.at[i], asked)
    begin, end = lax.div(first, BLOCK), lax.div(last + (BLOCK - 1), BLOCK)
    # A row without pages has no blocks.
    steps = jnp.where(last > first, end - begin, 0)
    steps = lax.div(steps - split + (splits - 1), splits)
    begin = begin + split

    def block(step: Any) -> Array:
        return begin + step * splits

    def store(found: Array, step: Array) -> None:
        tile, line = lax.div(block(step), BLOCK), lax.rem(block(step), BLOCK)
        if together:
            scores_ref[head, 0, tile, line] = found.sum(axis=1)
        else:
            hopper.store_transposed(found, scores_ref.at[head, :, tile, line])

    score_blocks(digests, block, store, steps, (q_tiles, asked), scratch)


def score_blocks(
    digests: list,
    block: Callable[[Any], Array],
    store: Callable[[Array, Array], None],
    steps: Array,
    queries: tuple[Any, Any],
    scratch: dict,
) -> None:
    """Call store(scores, step) for the block of pages of each step.

    Args:
      block: gives a step's block.
      queries: `parts` in shared memory, and the barrier at which they arrive.
    """

    def copy(step: Any) -> None:
        copy_block(digests, block(step), lax.rem(step, STAGES), scratch)

    for ahead in range(STAGES):
        pl.when(ahead < steps)(functools.partial(copy, jnp.int32(ahead)))
    plgpu.barrier_wait(queries[1])

    @pl.loop(0, steps)
    def _step(step):
        found = products(lax.rem(step, STAGES), queries[0], scratch)

        @pl.when(step + STAGES < steps)
        def _():
            # All warps have read the slot.
            plgpu.commit_smem()
            copy(step + STAGES)

        store(found, step)


def copy_block(digests: list, block: Array, slot: Any, scratch: dict) -> None:
    """Begin to copy a block of pages into a slot of the rings."""
    for ref, ring in zip(digests, scratch["rings"], strict=True):
        pages = ref.at[pl.ds(block * BLOCK, BLOCK)]
        plgpu.copy_gmem_to_smem(pages, ring.at[slot], scratch["ready"].at[slot])


def products(slot: Any, queries: Any, scratch: dict) -> Float[Array, "64 M"]:
    """The scores of a slot's pages, once they are there, by each of the queries [D,M,H]."""
    plgpu.barrier_wait(scratch["ready"].at[slot])

    def multiply(acc) -> Array:
        for i, ring in enumerate(scratch["rings"]):
            plgpu.wgmma(acc, ring.at[slot], queries.at[i].transpose((1, 0)))
        return acc[...]

    acc = plgpu.WGMMAAccumulatorRef((BLOCK, queries.shape[1]), jnp.float32)
    return pl.run_scoped(multiply, acc)
