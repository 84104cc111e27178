"""Attention mass on TPUs: one streaming pass over the keys in a Mosaic kernel.

Grid: (row of the batch, kv head, block of keys, tile of queries), the queries innermost and in
order. Keys lie along the lanes, so the mass of a block of keys is a sum of vectors down the
sublanes, and it is written as one row. VMEM: two buffers of a key block and of a tile of queries
(all heads of the group, with their log-sum-exps as a column), the logits of a part of the tile,
about 1 MiB in float32, and the block's sums, [G, keys] and [1, keys]. Up to 2048 query rows are one
tile, which stays in VMEM while the keys pass by.

Log-sum-exps are in base 2, so that a probability is one multiplication, one subtraction and one
power of 2; they are +inf for queries that do not count. Keys beyond a length are computed with
their block and set to 0 as it is written. Prefetched scalars: the rows' lengths, counts of queries
and first causal slots. Blocks beyond a length are not fetched. Parts of the tile beyond the count,
or before the block, are not computed. Only parts that the diagonal crosses are masked.

Bytes moved: k once; q once, or once for each block of keys where there are several tiles; the mass.
A column of log-sum-exps fills one lane of 128, in memory too: 512 bytes for each query and head.
Roofline: 2 T S N H operations, half of attention's, or the bytes of k for few queries.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tpu_common as tpu
from pallas_kernels.attention_mass.reference import Masses, Reduction
from pallas_kernels.common import AnyCache, PerQuery, PerRow, Queries, factor_of, group_heads

_LOG2_E = math.log2(math.e)
# Rows (queries times heads) of a tile and of the part whose logits are made at once; those logits;
# keys of a block at most.
_TILE_ROWS = 2048
_PART_ROWS = 256
_LOGITS = 2**18
_KEYS = 4096


def attention_mass(
    q: Queries,
    k: AnyCache,
    lse: PerQuery,
    lengths: PerRow,
    how: Reduction,
    *,
    blocks: tuple[int, int, int] | None = None,
    interpret: pltpu.InterpretParams | bool = False,
) -> Masses:
    """See `api.attention_mass`; lengths within 0..S.

    Args:
      blocks: queries of a tile and of its parts, multiples of 16, and keys of a block, a multiple
        of 128; None takes the heuristic's.
      interpret: parameters of the interpreter that runs the kernel on other platforms.
    """
    (batch, queries, _, head_dim), (_, kv_heads, slots, _) = q.shape, k.shape
    counted_BT1 = (jnp.arange(queries) < how.valid[:, None])[..., None]
    lse = jnp.where(counted_BT1 & (lse > -jnp.inf), lse * _LOG2_E, jnp.inf)
    q_BKGTH = group_heads(jnp.where(counted_BT1[..., None], q, 0), kv_heads)
    lse_BKGT1 = group_heads(lse[..., None], kv_heads)
    if how.over_group == "first":
        q_BKGTH, lse_BKGT1 = q_BKGTH[:, :, :1], lse_BKGT1[:, :, :1]
    groups = q_BKGTH.shape[2]
    tile, part, block = blocks or _blocks(groups, queries, slots)
    spare = [(0, 0)] * 3 + [(0, -queries % tile), (0, 0)]
    q_BKGTH = jnp.pad(q_BKGTH, spare)
    lse_BKGT1 = jnp.pad(lse_BKGT1, spare, constant_values=jnp.inf)
    causal_start = jnp.zeros_like(lengths)
    if how.causal_start is not None:
        causal_start = how.causal_start
        # No query sees later slots: they are not fetched.
        lengths = jnp.clip(causal_start + how.valid, 0, lengths)

    def visited(b, h, j, i, lengths, valid, causal_start):
        return b, h, jnp.minimum(j, jnp.maximum(pl.cdiv(lengths[b], block) - 1, 0))

    def by_queries(b, h, j, i, *_):
        return b, h, 0, i, 0

    outputs = 2 if how.squares else 1
    pairs = q_BKGTH.size // head_dim * slots
    sums_spec = pl.BlockSpec((1, 1, 1, block), lambda b, h, j, i, *_: (b, h, 0, j))
    sums = tpu.call(
        partial(_kernel, how=how, part=part),
        (lengths, how.valid, causal_start, tpu.first_row(k)),
        [
            (q_BKGTH, pl.BlockSpec((1, 1, groups, tile, head_dim), by_queries)),
            (lse_BKGT1, pl.BlockSpec((1, 1, groups, tile, 1), by_queries)),
            (tpu.as_stored(k), tpu.key_spec(head_dim, block, visited)),
        ],
        [(jax.ShapeDtypeStruct((batch, kv_heads, 1, slots), jnp.float32), sums_spec)] * outputs,
        [pltpu.VMEM((groups, block), jnp.float32), pltpu.VMEM((1, block), jnp.float32)],
        grid=((batch, kv_heads, -(-slots // block)), (q_BKGTH.shape[3] // tile,)),
        cost=(
            2 * pairs * head_dim,
            pairs,
            k.size * k.dtype.itemsize + 4 * outputs * k.size // head_dim,
        ),
        interpret=interpret,
        name="attention_mass",
    )
    mass_BKS, *squares_BKS = (x.reshape(batch, kv_heads, slots) for x in sums)
    return mass_BKS, squares_BKS[0] if how.squares else None


def _blocks(groups: int, queries: int, slots: int) -> tuple[int, int, int]:
    """Queries in a tile, queries in a part of a tile, and keys in a block."""
    multiple = tpu.SUBLANES[2]
    part = max(_PART_ROWS // groups // multiple, 1) * multiple
    part = min(part, -(-queries // multiple) * multiple)
    tiles = -(-queries // (max(_TILE_ROWS // groups // part, 1) * part))
    tile = -(-queries // (tiles * part)) * part
    return tile, part, tpu.key_block(slots, min(_LOGITS // (groups * part), _KEYS))


def _kernel(scalars, inputs, outputs, scratch, *, how: Reduction, part: int) -> None:
    """A tile of queries against a block of keys.

    Args:
      outputs: each [1, 1, 1, Z].
      scratch: the sums over queries, [G, Z], and of the squares, [1, Z].
      part: queries whose logits are made at once; a tile has a whole number of parts.
    """
    # [B] filled slots that some query sees, queries that count, and the first query's slot, which
    # is unused without causal queries.
    lengths, valid, causal_start, _ = scalars
    heads, squared = scratch
    b, j, i = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    block, tile = squared.shape[1], inputs[0].shape[3]
    key_start = j * block

    @pl.when(i == 0)
    def _():
        heads[...] = jnp.zeros_like(heads)
        squared[...] = jnp.zeros_like(squared)

    def add_part(at: Array, _: None) -> None:
        ahead = causal_start[b] + i * tile + at * part - key_start
        probabilities = partial(_add_part, how, part, inputs, scratch, at * part)
        if how.causal_start is None:
            probabilities(None)
            return
        pl.when(ahead >= block - 1)(lambda: probabilities(None))
        pl.when(ahead < block - 1)(lambda: probabilities(ahead))

    # The parts before `first` end before the block begins.
    first = 0
    if how.causal_start is not None:
        first = jnp.maximum(key_start - causal_start[b] - i * tile, 0) // part
    last = jnp.clip(pl.cdiv(valid[b] - i * tile, part), 0, tile // part)
    pl.when(key_start < lengths[b])(lambda: lax.fori_loop(first, last, add_part, None))

    @pl.when(i == pl.num_programs(3) - 1)
    def _():
        # Of the first heads alone there is one.
        reduce = jnp.max if how.over_group == "max" else jnp.sum
        sums = [reduce(heads[...], axis=0, keepdims=True), squared[...]]
        held = key_start + lax.broadcasted_iota(jnp.int32, (1, block), 1) < lengths[b]
        for out, x in zip(outputs, sums, strict=False):
            out[0, 0] = jnp.where(held, x, 0)


def _add_part(how: Reduction, part: int, inputs, scratch, start, ahead) -> None:
    """Add the probabilities of the part's queries, from `start` on, to a block's sums.

    Query t of the part sees the keys up to ahead + t of the block, or all if `ahead` is None.
    """
    # [1, 1, G, T, H] a tile, [1, 1, G, T, 1] in base 2, and [1, 1, Z, H], or [1, 1, H, Z] for
    # narrow heads.
    q, lse, k = inputs
    heads, squared = scratch
    groups, head_dim = q.shape[2], q.shape[4]
    rows = pl.ds(pl.multiple_of(start, part), part)
    q_RH = q[0, 0, :, rows].reshape(groups * part, head_dim)
    logits_RZ = tpu.matmul(q_RH, k[0, 0], (1, 0 if tpu.slots_minor(head_dim) else 1))
    logits_GTZ = logits_RZ.reshape(groups, part, squared.shape[1])
    p_GTZ = jnp.exp2(logits_GTZ * (factor_of(how.scale) * _LOG2_E) - lse[0, 0, :, rows])
    if ahead is not None:
        back = (lax.broadcasted_iota(jnp.int32, p_GTZ.shape, axis) for axis in (2, 1))
        p_GTZ = jnp.where(next(back) - next(back) <= ahead, p_GTZ, 0)
    heads[...] += jnp.sum(p_GTZ, axis=1)
    if how.squares:
        mean_TZ = jnp.sum(p_GTZ, axis=0) * (1 / groups)
        squared[...] += jnp.sum(mean_TZ * mean_TZ, axis=0, keepdims=True)
