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
from dataclasses import dataclass
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
_BLOCK = hopper.ROWS
_STAGES = 4


@dataclass(frozen=True, kw_only=True)
class _Job:
    """The kernel's static arguments.

    Attributes:
      group: query heads of a kv head.
      digests: 2 for a box, 1 for a point.
      together: whether the scores of a group are summed.
      pages: of a row.
      tiles: of a row's scores.
      splits: blocks of threads of a row's kv head.
    """

    batch: int
    kv_heads: int
    group: int
    head_dim: int
    digests: int
    together: bool
    pages: int
    tiles: int
    splits: int
    size: int
    dtype: Any
    interpret: Any

    @property
    def columns(self) -> int:
        """Columns of a product."""
        return pl.cdiv(self.group, hopper.TILE_ROWS) * hopper.TILE_ROWS


def unsupported(q: Array, high: AnyStored, ball: bool, size: int) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    if ball:
        return "a ball's radius"
    if high.shape[2] % hopper.TILE_ROWS:
        return f"{high.shape[2]} pages are not whole tiles of {hopper.TILE_ROWS}"
    group = q.shape[1] // high.shape[1]
    if group > hopper.ROWS:
        return f"{group} queries for one kv head, at most {hopper.ROWS}"
    reason = hopper_best.unsupported(high.shape[2], size)
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
    job = _Job(
        batch=batch,
        kv_heads=kv_heads,
        group=q.shape[1] // kv_heads,
        head_dim=head_dim,
        digests=1 if digests.low is None else 2,
        together=together,
        pages=pages,
        tiles=hopper_best.tiles_of(pages),
        splits=max(hopper.processors() // (batch * kv_heads), 1),
        size=size,
        dtype=digests.high.dtype,
        interpret=interpret,
    )
    # Apart, as they come from the program: to join them would be a launch.
    bounds = [jnp.asarray(x, jnp.int32) for x in best]
    stored: list[Any] = [x for x in digests if x is not None]
    scores = _scores(_parts(q, job), stored, bounds, job)
    if together:
        scores, of = scores.reshape(batch, 1, kv_heads, *scores.shape[2:]), (1, 1)
    else:
        scores = scores.reshape(batch, kv_heads * job.columns, 1, *scores.shape[2:])
        of = job.group, job.columns
    return hopper_best.choose(scores, bounds, pages, size, interpret, of)


def _parts(q: Float[Array, "B N H"], job: _Job) -> Float[Array, "X D R H"]:
    """The queries' positive and negative parts, or the queries for a point."""
    parts = [jnp.maximum(q, 0), jnp.minimum(q, 0)] if job.digests == 2 else [q]
    x = jnp.stack([part.reshape(-1, job.group, job.head_dim) for part in parts], axis=1)
    return hopper.whole_rows(x, job.interpret).reshape(*x.shape[:2], -1, job.head_dim)


def _scores(
    q: Array, digests: list[Array], bounds: list[Array], job: _Job
) -> Float[Array, "X R T 64 64"]:
    """Scores of every row's kv head: of R query heads each, or the R = 1 sum of the group's.

    Those outside the bounds, and of heads that there are not, are undefined.
    """
    heads, rows = job.batch * job.kv_heads, 1 if job.together else job.columns
    ring = hopper.tiled(_STAGES, _BLOCK, job.head_dim, dtype=job.dtype)
    kernel = plgpu.kernel(
        functools.partial(_kernel, job=job),
        out_type=jax.ShapeDtypeStruct((heads, rows, job.tiles, _BLOCK, _BLOCK), jnp.float32),
        scratch_types=dict(
            q_tiles=hopper.tiled(job.digests, job.columns, job.head_dim, dtype=job.dtype),
            asked=plgpu.Barrier(num_arrivals=job.digests),
            rings=[ring] * job.digests,
            ready=plgpu.Barrier(num_arrivals=job.digests, num_barriers=_STAGES),
        ),
        grid=(heads, job.splits),
        grid_names=("head", "split"),
        interpret=job.interpret,
        kernel_name="score_pages",
    )
    return kernel(*bounds, q, *digests)


def _kernel(first_ref, last_ref, count_ref, q_ref, *refs, job: _Job, **scratch) -> None:
    head, split = lax.axis_index("head"), lax.axis_index("split")
    *digest_refs, scores_ref = refs
    batch = lax.div(head, job.kv_heads)
    digests = [ref.at[batch, lax.rem(head, job.kv_heads)] for ref in digest_refs]
    bounds = first_ref, last_ref, count_ref
    first, last, _ = hopper_best.bounds_of(bounds, batch, job.pages, job.size)
    for i in range(job.digests):
        rows = hopper.first_rows(q_ref, job.columns, head)
        plgpu.copy_gmem_to_smem(q_ref.at[head, i, rows], scratch["q_tiles"].at[i], scratch["asked"])
    blocks = lax.div(first, _BLOCK), lax.div(last + (_BLOCK - 1), _BLOCK)
    # A row without pages has no blocks.
    steps = jnp.where(last > first, blocks[1] - blocks[0], 0)
    steps = lax.div(steps - split + (job.splits - 1), job.splits)
    _score(digests, scores_ref.at[head], blocks[0] + split, steps, job, scratch)


def _score(digests: list, scores_ref: Any, first: Array, steps: Array, job: _Job, scratch) -> None:
    """Write the scores of the blocks first, first + splits, ...: as many as `steps`."""
    rings, ready, q_tiles = (scratch[name] for name in ("rings", "ready", "q_tiles"))

    def page_of(step: Any) -> Array:
        return (first + step * job.splits) * _BLOCK

    def copy(step: Any) -> None:
        slot = lax.rem(step, _STAGES)
        for ref, ring in zip(digests, rings, strict=True):
            plgpu.copy_gmem_to_smem(
                ref.at[pl.ds(page_of(step), _BLOCK)], ring.at[slot], ready.at[slot]
            )

    for ahead in range(_STAGES):
        pl.when(ahead < steps)(functools.partial(copy, jnp.int32(ahead)))
    plgpu.barrier_wait(scratch["asked"])

    @pl.loop(0, steps)
    def _step(step):
        slot = lax.rem(step, _STAGES)
        plgpu.barrier_wait(ready.at[slot])

        def multiply(acc) -> Array:
            for i, ring in enumerate(rings):
                plgpu.wgmma(acc, ring.at[slot], q_tiles.at[i].transpose((1, 0)))
            return acc[...]

        acc = plgpu.WGMMAAccumulatorRef((_BLOCK, job.columns), jnp.float32)
        found = pl.run_scoped(multiply, acc)

        @pl.when(step + _STAGES < steps)
        def _():
            # All warps have read the slot.
            plgpu.commit_smem()
            copy(step + _STAGES)

        block = lax.div(page_of(step), _BLOCK)
        tile, line = lax.div(block, _BLOCK), lax.rem(block, _BLOCK)
        if job.together:
            scores_ref[0, tile, line] = found.sum(axis=1)
        else:
            # Two pages of a query lie in a thread, so that the transpose is stored as they lie.
            found = plgpu.layout_cast(found, plgpu.Layout.WGMMA_TRANSPOSED)
            place = scores_ref.at[:, tile, line]
            hopper.store_little(found, place.transpose((1, 0)))
