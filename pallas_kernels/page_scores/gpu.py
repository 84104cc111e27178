"""Scores of pages on Hopper: a Mosaic GPU kernel that reads each bound once.

As in XLA's form a score is max(q, 0) upper + min(q, 0) lower; here both products are added where
they are made. A wgmma multiplies 64 rows, of which a kv head's queries fill G; 8 rows leave
together. So the query heads of 8 / G kv heads are one tile: for each kv head the tile's other rows
are zeros, and the heads' products add up to 8 rows of scores (bounds of filled pages must be finite
for that). Every worker (one block of threads a multiprocessor) takes a run of blocks of 128 pages
of a tile; one warpgroup copies bounds by TMA into rings in shared memory, the other multiplies.
Blocks behind the filled pages are not read.

Shared memory: queries 16 KiB and 4 a kv head of a tile, rings 128 or 192 KiB, 9 KiB on the way out.

Roofline: memory, the bytes of both bounds and 4 a score.
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

from pallas_kernels import hopper
from pallas_kernels import hopper_attention as streaming

_BLOCK = 128  # pages of a step
_ROWS = hopper.TILE_ROWS  # query heads of a tile


@dataclass(frozen=True, kw_only=True)
class _Job:
    """What the kernel knows when it is compiled."""

    tiles: int  # of a row
    heads: int  # kv heads of a tile
    blocks: int  # of all pages
    share: int  # blocks of a worker at most
    head_dim: int
    dtype: Any

    @property
    def stages(self) -> int:
        """Steps in flight: as many as leave room for the queries."""
        return 3 if self.heads <= 2 else 2

    @property
    def q_rows(self) -> int:
        """Rows of queries: a tile for each kv head's positive parts, and for the negative."""
        return 2 * self.heads * _ROWS


# On an H200 both take 0.075 ms for 8 rows of 8,192 pages, 90% of the roofline.
HELD_BACK = "XLA's form is as quick"


def unsupported(q: Array, upper: Array) -> str | None:
    """Why this kernel cannot run these arguments, or None."""
    heads, group = q.shape[1], q.shape[1] // upper.shape[1]
    if _ROWS % group or heads % _ROWS:
        return f"{heads} query heads in groups of {group} are not tiles of {_ROWS}"
    if upper.shape[2] % _BLOCK:
        return f"{upper.shape[2]} pages are not whole blocks of {_BLOCK}"
    return hopper.unsupported(q[:, None])


def page_scores(
    q: Float[Array, "B N H"],
    upper: Float[Array, "B K P H"],
    lower: Float[Array, "B K P H"],
    pages: Int[Array, " B"],
    *,
    interpret: Any = None,
) -> Float[Array, "B N P"]:
    """Sum over d of max(q_d upper_d, q_d lower_d); -inf from page pages[b] on."""
    (batch, queries, head_dim), all_pages = q.shape, upper.shape[2]
    tiles, blocks = queries // _ROWS, all_pages // _BLOCK
    splits = min(max(hopper.processors() // (batch * tiles), 1), blocks)
    job = _Job(
        tiles=tiles,
        heads=upper.shape[1] // tiles,
        blocks=blocks,
        share=pl.cdiv(blocks, splits),
        head_dim=head_dim,
        dtype=upper.dtype,
    )
    ring = hopper.tiled(job.stages, _BLOCK, head_dim, dtype=job.dtype)
    barriers = plgpu.Barrier(num_barriers=job.stages)
    kernel = plgpu.kernel(
        functools.partial(_kernel, job=job),
        out_type=jax.ShapeDtypeStruct((batch * tiles, _ROWS, all_pages), jnp.float32),
        scratch_types=dict(
            # Tiles of 64 rows that overlap: of each the first 8 count.
            q_tiles=hopper.tiled(hopper.ROWS + job.q_rows - _ROWS, head_dim, dtype=job.dtype),
            rings=(ring, ring),
            asked=plgpu.Barrier(),
            ready=(barriers, barriers),
            free=(barriers, barriers),
            out_tile=streaming.out_scratch(_ROWS)["out_tile"],
        ),
        grid=(batch * tiles, pl.cdiv(blocks, job.share)),
        grid_names=("tile", "split"),
        num_threads=2,
        thread_name="role",
        interpret=interpret,
    )
    filled = jnp.clip(pages, 0, all_pages).astype(jnp.int32)
    return kernel(filled, _query_tiles(q, job), upper, lower).reshape(batch, queries, all_pages)


def _query_tiles(q: Float[Array, "B N H"], job: _Job) -> Float[Array, "X M H"]:
    """For each kv head of a tile its rows of max(q, 0), and of min(q, 0), and zeros elsewhere."""
    q_XRH = q.reshape(-1, _ROWS, job.head_dim)
    parts_X2RH = jnp.stack([jnp.maximum(q_XRH, 0), jnp.minimum(q_XRH, 0)], axis=1)
    own_JR = jnp.arange(_ROWS) * job.heads // _ROWS == jnp.arange(job.heads)[:, None]
    tiles = jnp.where(own_JR[:, None, :, None], parts_X2RH[:, None], 0)  # [X, J, 2, R, H]
    return tiles.reshape(-1, job.q_rows, job.head_dim).astype(job.dtype)


def _kernel(pages_ref, q_ref, upper_ref, lower_ref, out_ref, *, job: _Job, **scratch):
    tile, split, role = (lax.axis_index(name) for name in ("tile", "split", "role"))
    row, first = lax.div(tile, job.tiles), split * job.share
    pages = pages_ref[row]
    blocks = jnp.minimum(job.blocks - first, job.share)
    filled = jnp.clip(lax.div(pages + (_BLOCK - 1), _BLOCK) - first, 0, blocks)

    @pl.when(role == 1)
    def _copies():
        plgpu.set_max_registers(40, action="decrease")
        place = scratch["q_tiles"].at[pl.ds(0, job.q_rows)]
        plgpu.copy_gmem_to_smem(q_ref.at[tile], place, scratch["asked"])
        head = lax.rem(tile, job.tiles) * job.heads
        _fetch((upper_ref.at[row], lower_ref.at[row]), head, first, filled, job, scratch)

    @pl.when(role == 0)
    def _products():
        plgpu.set_max_registers(232, action="increase")
        plgpu.barrier_wait(scratch["asked"])

        def write(block: Array, scores: Array) -> None:
            to = out_ref.at[tile, :, pl.ds((first + block) * _BLOCK, _BLOCK)]
            streaming.write_rows(scores, to, scratch["out_tile"])

        @pl.loop(0, filled)
        def _block(block):
            scores = _score(block, job, scratch)
            column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)
            held = column + (first + block) * _BLOCK < pages
            write(block, jnp.where(held, scores, -jnp.inf))

        @pl.loop(filled, blocks)
        def _empty(block):
            write(block, hopper.full((hopper.ROWS, _BLOCK), -jnp.inf))

        streaming.written()


def _fetch(refs, head: Array, first: Array, blocks: Array, job: _Job, scratch: dict) -> None:
    """Copy the blocks' bounds, of one kv head of the tile after another, into the rings."""
    steps = blocks * job.heads

    @pl.loop(0, steps)
    def _step(step):
        slot = lax.rem(step, job.stages)
        start = (first + lax.div(step, job.heads)) * _BLOCK
        at = head + lax.rem(step, job.heads), pl.ds(start, _BLOCK)
        for ref, ring, ready, free in zip(
            refs, scratch["rings"], scratch["ready"], scratch["free"], strict=True
        ):

            @pl.when(step >= job.stages)
            def _(free=free):
                plgpu.barrier_wait(free.at[slot])

            plgpu.copy_gmem_to_smem(ref.at[at], ring.at[slot], ready.at[slot])

    for free in scratch["free"]:
        hopper.drain(free, steps, job.stages)


def _score(block: Array, job: _Job, scratch: dict) -> Float[Array, "M Z"]:
    """The products of a block's bounds with the tile's queries, summed."""
    scores = hopper.full((hopper.ROWS, _BLOCK), 0.0)
    for j in range(job.heads):
        slot = lax.rem(block * job.heads + j, job.stages)
        for side in range(2):
            plgpu.barrier_wait(scratch["ready"][side].at[slot])
            queries = scratch["q_tiles"].at[pl.ds((2 * j + side) * _ROWS, hopper.ROWS)]
            bounds = scratch["rings"][side].at[slot]
            scores = scores + hopper.product(queries, bounds.transpose((1, 0)))
            plgpu.barrier_arrive(scratch["free"][side].at[slot])
    return scores
