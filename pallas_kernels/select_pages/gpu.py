"""The best pages of each query head on Hopper in one launch: a Mosaic GPU kernel.

A cluster of 8 blocks of threads takes a row's kv head. Blocks of 64 pages are dealt out to them in
turn. A block of threads copies the digests of its pages by TMA into a ring in shared memory and
multiplies them with the positive and the negative parts of the group's queries: the pages are the
rows of a wgmma, the query heads its columns. Both bounds are added up in one accumulator. The
scores go to global memory, which here is the L2 cache. After a barrier of the cluster each query
head's list is chosen by one of the blocks (`hopper_best`). Pages outside the bounds are not read.

A list for all heads together needs the scores of all clusters: a first launch writes the sums of
each group's scores, and a second adds up the groups' and chooses.

Shared memory: ring 128 KiB, queries 4 KiB, 24 KiB to choose and 16 for each 4,096 pages (the ring
64 KiB beyond 16,384 pages).

Roofline: the bytes of the digests, 34 MB for 8,192 pages of 8 kv heads of 128 with two bounds in
bfloat16: 8 us on an H200. One row of 8 kv heads keeps 64 multiprocessors busy. Not measured yet.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Float, Int

from pallas_kernels import hopper, hopper_best
from pallas_kernels.quantised import AnyStored

# Blocks of threads of a cluster: as many as every Hopper GPU lets work together.
_CLUSTER = 8
# Pages of a step, and steps in flight beside up to so many tiles of scores, or beside more.
_BLOCK = hopper.ROWS
_STAGES, _TILES_BESIDE, _FEWER_STAGES = 4, 4, 2


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

    @property
    def places(self) -> int:
        """Places of a list, in whole blocks."""
        return pl.cdiv(self.size, hopper.ROWS) * hopper.ROWS

    @property
    def stages(self) -> int:
        return _STAGES if self.tiles <= _TILES_BESIDE else _FEWER_STAGES


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
    high: Float[Array, "B K P H"],
    low: Float[Array, "B K P H"] | None,
    radius: None,
    first: Int[Array, " B"],
    last: Int[Array, " B"],
    count: Int[Array, " B"],
    *,
    size: int,
    together: bool,
    interpret: Any = None,
) -> Int[Array, "B X C"]:
    """See the public function."""
    assert radius is None
    batch, kv_heads, pages, head_dim = high.shape
    job = _Job(
        batch=batch,
        kv_heads=kv_heads,
        group=q.shape[1] // kv_heads,
        head_dim=head_dim,
        digests=1 if low is None else 2,
        together=together,
        pages=pages,
        tiles=hopper_best.tiles_of(pages),
        splits=max(hopper.processors() // (batch * kv_heads), 1) if together else _CLUSTER,
        size=size,
        dtype=high.dtype,
        interpret=interpret,
    )
    # Apart, as they come from the program: to join them would be a launch.
    bounds = [x.astype(jnp.int32) for x in (first, last, count)]
    found = _launch(_parts(q, job), [x for x in (high, low) if x is not None], bounds, job)
    if not together:
        return found[1].reshape(batch, -1, job.places)[:, :, :size]
    sums = found[0].reshape(batch, 1, kv_heads, *found[0].shape[2:])
    return hopper_best.choose(sums, bounds, pages, size, interpret)


def _parts(q: Float[Array, "B N H"], job: _Job) -> Float[Array, "X D R H"]:
    """The queries' positive and negative parts, or the queries for a point."""
    parts = [jnp.maximum(q, 0), jnp.minimum(q, 0)] if job.digests == 2 else [q]
    x = jnp.stack([part.reshape(-1, job.group, job.head_dim) for part in parts], axis=1)
    return hopper.whole_rows(x, job.interpret).reshape(*x.shape[:2], -1, job.head_dim)


def _launch(q: Array, digests: list[Array], bounds: list[Array], job: _Job) -> Sequence[Array]:
    """Scores of every row's kv head, and the lists [X,G,C] unless they are for all together.

    Scores [X,R,T,64,64]: of R query heads each, or the R = 1 sum of the group's. Those outside the
    bounds, and of heads that there are not, are undefined.
    """
    heads, alone = job.batch * job.kv_heads, not job.together
    shape = heads, job.columns if alone else 1, job.tiles, _BLOCK, _BLOCK
    ring = hopper.tiled(job.stages, _BLOCK, job.head_dim, dtype=job.dtype)
    cluster: dict[str, Any] = dict(grid=(heads, job.splits), grid_names=("head", "split"))
    if alone:
        cluster = dict(grid=(heads,), grid_names=("head",))
        cluster |= dict(cluster=(job.splits,), cluster_names=("split",))
    kernel = plgpu.kernel(
        functools.partial(_kernel, job=job),
        out_type=(
            jax.ShapeDtypeStruct(shape, jnp.float32),
            *([jax.ShapeDtypeStruct((heads, job.group, job.places), jnp.int32)] * alone),
        ),
        scratch_types=dict(
            q_tiles=hopper.tiled(job.digests, job.columns, job.head_dim, dtype=job.dtype),
            asked=plgpu.Barrier(num_arrivals=job.digests),
            rings=[ring] * job.digests,
            ready=plgpu.Barrier(num_arrivals=job.digests, num_barriers=job.stages),
            **(dict(scored=plgpu.ClusterBarrier(collective_axes=("split",))) if alone else {}),
            **(hopper_best.scratch(job.tiles) if alone else {}),
        ),
        **cluster,
        interpret=job.interpret,
        kernel_name="select_pages" if alone else "score_pages",
    )
    triangle = [hopper_best.triangle()] * alone
    return kernel(*bounds, q, *triangle, *digests)


def _kernel(first_ref, last_ref, count_ref, q_ref, *refs, job: _Job, **scratch) -> None:
    head, split = lax.axis_index("head"), lax.axis_index("split")
    alone, bounds = not job.together, (first_ref, last_ref, count_ref)
    inputs, outputs = refs[: alone + job.digests], refs[alone + job.digests :]
    batch = lax.div(head, job.kv_heads)
    digests = [ref.at[batch, lax.rem(head, job.kv_heads)] for ref in inputs[alone:]]
    first, last, count = hopper_best.bounds_of(bounds, batch, job.pages, job.size)
    if alone:
        hopper_best.begin(inputs[0], scratch)
    for i in range(job.digests):
        rows = hopper.first_rows(q_ref, job.columns, head)
        plgpu.copy_gmem_to_smem(q_ref.at[head, i, rows], scratch["q_tiles"].at[i], scratch["asked"])
    blocks = lax.div(first, _BLOCK), lax.div(last + (_BLOCK - 1), _BLOCK)
    # A row without pages has no blocks.
    steps = jnp.where(last > first, blocks[1] - blocks[0], 0)
    steps = lax.div(steps - split + (job.splits - 1), job.splits)
    _score(digests, outputs[0].at[head], blocks[0] + split, steps, job, scratch)
    if job.together:
        return
    lists_ref, scored = outputs[1].at[head], scratch["scored"]
    hopper.fence_cluster()
    plgpu.barrier_arrive(scored)
    plgpu.barrier_wait(scored)
    hopper.fence_cluster()
    plgpu.barrier_wait(scratch["triangle_ready"])

    @pl.loop(0, lax.div(job.group - split + (job.splits - 1), job.splits))
    def _list(i):
        query = i * job.splits + split
        scores = outputs[0].at[head, query]
        hopper_best.best(
            job.tiles,
            lambda tile: hopper_best.load(scores.at[tile]),
            (first, last, count),
            lists_ref.at[query],
            scratch,
        )


def _score(digests: list, scores_ref: Any, first: Array, steps: Array, job: _Job, scratch) -> None:
    """Write the scores of the blocks first, first + splits, ...: as many as `steps`."""
    rings, ready, q_tiles = (scratch[name] for name in ("rings", "ready", "q_tiles"))

    def page_of(step: Any) -> Array:
        return (first + step * job.splits) * _BLOCK

    def copy(step: Any) -> None:
        slot = lax.rem(step, job.stages)
        for ref, ring in zip(digests, rings, strict=True):
            plgpu.copy_gmem_to_smem(
                ref.at[pl.ds(page_of(step), _BLOCK)], ring.at[slot], ready.at[slot]
            )

    for ahead in range(job.stages):
        pl.when(ahead < steps)(functools.partial(copy, jnp.int32(ahead)))
    plgpu.barrier_wait(scratch["asked"])

    @pl.loop(0, steps)
    def _step(step):
        slot = lax.rem(step, job.stages)
        plgpu.barrier_wait(ready.at[slot])

        def multiply(acc) -> Array:
            for i, ring in enumerate(rings):
                plgpu.wgmma(acc, ring.at[slot], q_tiles.at[i].transpose((1, 0)))
            return acc[...]

        acc = plgpu.WGMMAAccumulatorRef((_BLOCK, job.columns), jnp.float32)
        found = pl.run_scoped(multiply, acc)

        @pl.when(step + job.stages < steps)
        def _():
            # All warps have read the slot.
            plgpu.commit_smem()
            copy(step + job.stages)

        block = lax.div(page_of(step), _BLOCK)
        tile, line = lax.div(block, _BLOCK), lax.rem(block, _BLOCK)
        if job.together:
            scores_ref[0, tile, line] = found.sum(axis=1)
        else:
            # Two pages of a query lie in a thread, so that the transpose is stored as they lie.
            found = plgpu.layout_cast(found, plgpu.Layout.WGMMA_TRANSPOSED)
            place = scores_ref.at[:, tile, line]
            hopper.store_little(found, place.transpose((1, 0)))
