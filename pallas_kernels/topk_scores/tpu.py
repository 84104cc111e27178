"""The best keys of every query on TPUs: one Mosaic kernel, matmul and running lists, streaming.

Grid: (row of the batch, kv head, tile of query rows, block of keys), the keys innermost and in
order. A kv head's rows are its T G queries, so a block of keys serves the whole group. Scores are
made transposed, keys down the sublanes and query rows along the lanes: the best of a block is a
maximum down the sublanes, and the sorted lists of the `count` best, values and slots, are
[count, rows] tiles in VMEM, kept in the output blocks while the keys pass by. VMEM besides: two
buffers of a key block, and the block's scores in float32, 1 to 2 MiB.

A block is matched against the lists in rounds. A round takes the best remaining key of every row
(its first slot, on ties), inserts it where it beats the row's worst, and removes it; there is
another round while any row's best remaining key still beats its worst, which `count` rounds end at
the latest. Comparisons are strict and keys ascend, so ties go to the lowest slot. For keys in no
order a row's list is improved about count / i times by block i, so most blocks take a round or two.

The rows' bounds are prefetched scalars: blocks outside them are not fetched, and only blocks that
a bound cuts through are masked. Scores that are no number are removed from every block.

Bytes moved: k once for each tile of rows (twice or so for 512 queries of a group of 4 at a time),
8 count for each query. Roofline: 2 T S N H operations, or the bytes of k for few queries. The
vector unit compares, selects and takes a maximum of each score, then six operations a round.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Float, Int

from pallas_kernels.tpu_common import (
    LANES,
    as_stored,
    key_block,
    key_spec,
    matmul,
    slots_minor,
    unsupported_keys,
)

# Query rows of a tile; scores of a block; keys of a block where few rows leave the lanes half empty
# and the copy of the keys is what counts.
_ROWS = 512
_SCORES = 2**18
_FEW_ROWS_KEYS = 4096
_NO_SLOT = jnp.iinfo(jnp.int32).max


def unsupported(q: Array, tile_best: int | None) -> str | None:
    """Why the kernel cannot run these arguments, or None."""
    if tile_best is not None:
        return "tiles are counted from each row's start, which cuts through the blocks"
    return unsupported_keys(q)


def topk_scores(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
    *,
    count: int,
    tile_best: int | None = None,
    blocks: tuple[int, int] | None = None,
    interpret: pltpu.InterpretParams | bool = False,
) -> tuple[Float[Array, "B T N C"], Int[Array, "B T N C"]]:
    """The `count` best slots of [start, stop) within [0, S]; see the door's docstring.

    Args:
      blocks: query rows and keys of a block, multiples of 128; None takes the heuristic's.
      interpret: parameters of the interpreter that runs the kernel on other platforms.
    """
    reason = unsupported(q, tile_best)
    if reason is not None:
        raise NotImplementedError(f"topk_scores: {reason}")
    (batch, queries, heads, head_dim), (_, kv_heads, slots, _) = q.shape, k.shape
    # Queries before heads: a tile of rows is a run of queries with all heads of the group.
    q_BTKGH = q.reshape(batch, queries, kv_heads, heads // kv_heads, head_dim)
    q_BKRH = jnp.moveaxis(q_BTKGH, 1, 2).reshape(batch, kv_heads, -1, head_dim)
    rows = q_BKRH.shape[2]
    row_tile, block = blocks or _blocks(rows, slots)
    row_tile = min(row_tile, rows)
    first_B = start // block
    stop_block_B = jnp.where(stop > start, -(-stop // block), first_B)
    scalars = (x.astype(jnp.int32) for x in (start, stop, first_B, stop_block_B))
    run = _call(q_BKRH, k, row_tile, block, count, interpret)
    found_BKCR = run(*scalars, q_BKRH, as_stored(k))
    values, indices = (_by_query(x[:, :, :count], q.shape[:3]) for x in found_BKCR)
    return jnp.where(values == 0, 0.0, values), indices  # -0 is 0


def _call(
    q: Float[Array, "B K R H"],
    k: Float[Array, "B K S H"],
    row_tile: int,
    block: int,
    count: int,
    interpret: pltpu.InterpretParams | bool,
) -> Callable[..., list[Array]]:
    """The kernel as a function of the prefetched scalars, q, and k as stored."""
    (batch, kv_heads, rows, head_dim), slots = q.shape, k.shape[2]
    listed = -(-count // 8) * 8  # whole vectors
    tiles = -(-rows // row_tile)

    def visited(b, h, r, j, start, stop, first, stop_block):
        return b, h, jnp.minimum(first[b] + j, jnp.maximum(stop_block[b] - 1, 0))

    best = pl.BlockSpec((1, 1, listed, row_tile), lambda b, h, r, j, *_: (b, h, 0, r))
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=(batch, kv_heads, tiles, -(-slots // block)),
        in_specs=[
            pl.BlockSpec((1, 1, row_tile, head_dim), lambda b, h, r, j, *_: (b, h, r, 0)),
            key_spec(head_dim, block, visited),
        ],
        out_specs=[best, best],
        scratch_shapes=[pltpu.VMEM((block, row_tile), jnp.float32)],
    )
    return pl.pallas_call(
        partial(_kernel, block=block, count=count),
        grid_spec=grid_spec,
        out_shape=[
            jax.ShapeDtypeStruct((batch, kv_heads, listed, rows), dtype)
            for dtype in (jnp.float32, jnp.int32)
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * q.size * slots,
            transcendentals=0,
            bytes_accessed=k.size * k.dtype.itemsize * tiles,
        ),
        interpret=interpret,
        name="topk_scores",
    )


def _by_query(x: Array, shape: tuple[int, ...]) -> Array:
    """Lists [B,K,C,T*G] as [B,T,N,C]."""
    batch, queries, heads = shape
    x_BKCTG = x.reshape(*x.shape[:3], queries, -1)
    return jnp.einsum("BKCTG->BTKGC", x_BKCTG).reshape(batch, queries, heads, -1)


def _blocks(rows: int, slots: int) -> tuple[int, int]:
    """Query rows of a tile, cut evenly, and keys of a block."""
    tiles = -(-rows // _ROWS)
    row_tile = -(-rows // (tiles * LANES)) * LANES
    most = _FEW_ROWS_KEYS if row_tile <= LANES else _SCORES // row_tile
    return row_tile, key_block(slots, most)


def _kernel(
    start,  # [B] the first slot that counts
    stop,  # [B] the slot after the last
    first,  # [B] the block of the first slot
    stop_block,  # [B] the block after the last slot's
    q,  # [1, 1, R, H]
    k,  # [1, 1, Z, H], or [1, 1, H, Z] for narrow heads
    values,  # [1, 1, C, R] the lists, best first
    indices,
    scores,  # [Z, R]
    *,
    block: int,
    count: int,
):
    b, j = pl.program_id(0), pl.program_id(3)
    at = first[b] + j

    @pl.when(j == 0)
    def _():
        values[...] = jnp.full_like(values, -jnp.inf)
        indices[...] = jnp.full_like(indices, -1)

    def match(cut: bool):
        scores_ZR = matmul(k[0, 0], q[0, 0], (0 if slots_minor(q.shape[3]) else 1, 1))
        held = scores_ZR > -jnp.inf  # not NaN
        if cut:
            slots_ZR = at * block + lax.broadcasted_iota(jnp.int32, scores_ZR.shape, 0)
            held &= (slots_ZR >= start[b]) & (slots_ZR < stop[b])
        scores_ZR = jnp.where(held, scores_ZR, -jnp.inf)
        scores[...] = scores_ZR
        best_1R = jnp.max(scores_ZR, axis=0, keepdims=True)
        lax.while_loop(
            lambda carry: carry[1] > 0,
            partial(_round, scores, values.at[0, 0], indices.at[0, 0], at * block, count),
            (best_1R, _any_beats(best_1R, values[0, 0, count - 1 : count])),
        )

    cut = (at * block < start[b]) | ((at + 1) * block > stop[b])
    pl.when((at < stop_block[b]) & ~cut)(lambda: match(cut=False))
    pl.when((at < stop_block[b]) & cut)(lambda: match(cut=True))


def _any_beats(best_1R: Array, worst_1R: Array) -> Array:
    return jnp.max(jnp.where(best_1R > worst_1R, 1.0, 0.0))


def _round(scores, values, indices, base, count: int, carry: tuple[Array, Array]):
    """Insert every row's best remaining key where it beats the row's worst, and remove it."""
    best_1R, _ = carry
    scores_ZR = scores[...]
    values_CR = values[...]
    keys_ZR = lax.broadcasted_iota(jnp.int32, scores_ZR.shape, 0)
    key_1R = jnp.min(jnp.where(scores_ZR == best_1R, keys_ZR, _NO_SLOT), axis=0, keepdims=True)
    take_1R = best_1R > values_CR[count - 1 : count]
    place_CR = lax.broadcasted_iota(jnp.int32, values_CR.shape, 0)
    # Entries at least as good stay, so that earlier slots win ties; the others move down by one.
    kept_CR = (values_CR >= best_1R) | ~take_1R
    kept_1R = jnp.sum(kept_CR.astype(jnp.int32), axis=0, keepdims=True)
    here_CR = (place_CR == kept_1R) & take_1R
    inserted = (values, values_CR, best_1R), (indices, indices[...], base + key_1R)
    for ref, old_CR, new_1R in inserted:
        moved_CR = jnp.where(here_CR, new_1R, pltpu.roll(old_CR, 1, 0))
        ref[...] = jnp.where(kept_CR, old_CR, moved_CR)
    scores_ZR = jnp.where((keys_ZR == key_1R) & take_1R, -jnp.inf, scores_ZR)
    scores[...] = scores_ZR
    best_1R = jnp.max(scores_ZR, axis=0, keepdims=True)
    return best_1R, _any_beats(best_1R, values[count - 1 : count, :])
