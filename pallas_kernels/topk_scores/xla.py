"""The best keys of every query in plain XLA: blocks of scores, maxima of their tiles, a merge.

Each block of queries goes over the blocks of keys. The scores of a block are cut into tiles. Only
the `count` tiles with the largest maxima can hold one of the block's `count` best keys, since each
of them holds a key that is at least as good as all keys of the other tiles. So the maxima are
ranked, the scores of the chosen tiles are gathered, and they are ranked together with the best so
far. Every ranking handles ties (`merge.tied_top_k`) and puts the lowest index first: chosen tiles
are laid out in ascending order, after the best so far, whose slots are lower.

A few queries against a cache whose scores fit `_ONE_PASS_BYTES`, or are small beside the keys on a
GPU, take one block of all slots, read in place. Otherwise the largest temporaries are a block of
scores and a copied block of keys, and the loop visits only the blocks between the first start and
the last stop.

Roofline: 2 T S N H operations for many queries, the bytes of k for few.
"""

from math import isqrt

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.common import AnyCache, Bounds, PerQuery, Queries, block_of
from pallas_kernels.dispatch import platform, read_as_written
from pallas_kernels.quantised import Quantised
from pallas_kernels.topk_scores.merge import tied_top_k

# Bytes of float32 scores that are made at once: of all slots for few queries, and of a block. On a
# GPU a block's turn is some 15 launches, so all slots' may take this share of the keys' bytes, too.
_ONE_PASS_BYTES = 64 * 2**20
_ONE_PASS_SHARE = 1 / 4
_SCORE_BYTES = 16 * 2**20
# On a CPU a smaller block stays in its caches: of 64 queries and 2,048 keys, with 9 heads, it takes
# 0.8 times the processor time.
_CPU_SCORE_BYTES, _CPU_KEY_BLOCK = 8 * 2**20, 2048
# Bytes of a block's keys, which slicing copies, and the fewest keys of a block.
_KEY_BYTES = 32 * 2**20
_KEY_BLOCK = 1024

Best = tuple[Array, Array]


def topk_scores(
    q: Queries,
    k: AnyCache,
    bounds: Bounds,
    tolerance: PerQuery,
    *,
    count: int,
    blocks: tuple[int, int] | None = None,
) -> Best:
    """The `count` best slots of [start, stop) within [0, S]; see the public function.

    Args:
      blocks: queries and keys of a block; None picks them by shape.
    """
    k = read_as_written(k)
    b, queries, n, h = q.shape
    kv_heads = k.shape[1]
    query_block, key_block = blocks or _blocks(q, k)
    # Queries before heads, as rows of their kv head: a block of queries is a block of rows.
    q_BTKGH = q.reshape(b, queries, kv_heads, n // kv_heads, h)
    q_BKTGH = jnp.moveaxis(q_BTKGH, 2, 1)
    tolerance_BKTG = jnp.moveaxis(tolerance.reshape(q_BTKGH.shape[:-1]), 2, 1)

    def rank(i: Array | int, results: Best) -> Best:
        # The last block is moved back to end with T: its overlap is computed twice, alike.
        first = jnp.minimum(i * query_block, queries - query_block)
        q_BKRH, tolerance_BKR = (
            lax.dynamic_slice_in_dim(x, first, query_block, axis=2).reshape(b, kv_heads, -1, *rest)
            for x, rest in ((q_BKTGH, (h,)), (tolerance_BKTG, ()))
        )
        best = _rank_keys(q_BKRH, k, bounds, tolerance_BKR, count, key_block)
        values, indices = (
            lax.dynamic_update_slice_in_dim(
                whole, part.reshape(b, kv_heads, query_block, -1, count), first, axis=2
            )
            for whole, part in zip(results, best, strict=True)
        )
        return values, indices

    empty = _nothing((*q_BKTGH.shape[:-1], count))
    if query_block == queries:
        results = rank(0, empty)
    else:
        results = lax.fori_loop(0, -(-queries // query_block), rank, empty)
    values, indices = (jnp.moveaxis(x, 1, 2).reshape(b, queries, n, count) for x in results)
    return values, indices


def _blocks(q: Array, k: AnyCache) -> tuple[int, int]:
    """How many queries and keys pass at once: all of both where their scores are few."""
    b, queries, n, _ = q.shape
    slots = k.shape[2]
    # Keys in 8 bits become floats as blocks.
    in_place = not isinstance(k, Quantised) or 4 * k.size <= _KEY_BYTES
    key_bytes, one_pass = k.size * jnp.dtype(k.dtype).itemsize, _ONE_PASS_BYTES
    if platform() == "gpu":
        one_pass = max(one_pass, _ONE_PASS_SHARE * key_bytes)
    if in_place and 4 * b * queries * n * slots <= one_pass:
        return queries, slots
    cpu = platform() == "cpu"
    most, fewest = (_CPU_SCORE_BYTES, _CPU_KEY_BLOCK) if cpu else (_SCORE_BYTES, _KEY_BLOCK)
    fits = max(16, most // (4 * b * n * fewest))
    query_block = min(queries, 2 ** (fits.bit_length() - 1))
    # Those in 8 bits are in memory as bits and as floats.
    most_bytes = _KEY_BYTES // 4 if isinstance(k, Quantised) else _KEY_BYTES
    keys = min(most // (4 * b * n * query_block), most_bytes // (key_bytes // slots))
    return query_block, min(slots, max(fewest, 2 ** (max(keys, 1).bit_length() - 1)))


def _nothing(shape: tuple[int, ...]) -> Best:
    return jnp.full(shape, -jnp.inf, jnp.float32), jnp.full(shape, -1, jnp.int32)


def _rank_keys(
    q: Float[Array, "B K R H"],
    k: AnyCache,
    bounds: Bounds,
    tolerance: Float[Array, "B K R"],
    count: int,
    key_block: int,
) -> Best:
    """The best slots of one block of queries, [B,K,R,count], over blocks of keys."""
    slots, (start, stop) = k.shape[2], bounds
    some_B = start < stop
    low, high = jnp.min(jnp.where(some_B, start, slots)), jnp.max(jnp.where(some_B, stop, 0))
    tile = _tile(key_block, count)
    blocks = low // key_block, (high + key_block - 1) // key_block

    def step(j: Array | int, best: Best) -> Best:
        # The last block is moved back to end with S; what the one before had is masked.
        first = jnp.minimum(j * key_block, slots - key_block)[None]
        k_BKCH = block_of(k, first[0], key_block)
        from_B = jnp.maximum(start, j * key_block)
        scores = jnp.einsum("BKRH,BKCH->BKRC", q, k_BKCH, preferred_element_type=jnp.float32)
        slots_BC = first[:, None] + jnp.arange(key_block)
        held_BC = (slots_BC >= from_B[:, None]) & (slots_BC < stop[:, None])
        # NaN would win every comparison, and -0.0 would lose to 0.0.
        held = held_BC[:, None, None] & ~jnp.isnan(scores)
        scores = jnp.where(held, jnp.where(scores == 0, 0.0, scores), -jnp.inf)
        return _merge_block(best, scores, first, tolerance, tile)

    empty = _nothing((*q.shape[:-1], count))
    if key_block == slots:
        return step(0, empty)
    return lax.fori_loop(*blocks, step, empty)


def _tile(key_block: int, count: int) -> int:
    """A tile near the one that makes maxima plus candidates fewest, key_block/t + count t."""
    return max(32, min(128, 2 ** isqrt(key_block // count).bit_length() // 2))


def _merge_block(
    best: Best,
    scores: Float[Array, "B K R C"],
    first: Int[Array, " 1"],
    tolerance: Float[Array, "B K R"],
    tile: int,
) -> Best:
    """The best of those so far, whose slots are lower, and of a block that begins at `first`."""
    values, indices = best
    count = values.shape[-1]
    spare = [(0, 0)] * 3 + [(0, -scores.shape[-1] % tile)]
    scores = jnp.pad(scores, spare, constant_values=-jnp.inf)
    tiles_BKRPZ = scores.reshape(*scores.shape[:3], -1, tile)
    tops_BKRP = jnp.max(tiles_BKRPZ, axis=-1)
    chosen = tied_top_k(tops_BKRP, min(count, tops_BKRP.shape[-1]), tolerance)[1]
    chosen = jnp.sort(chosen, axis=-1)
    found = jnp.take_along_axis(tiles_BKRPZ, chosen[..., None], axis=-2)
    found = jnp.where(chosen[..., None] < 0, -jnp.inf, found)
    slots = (first[:, None, None, None] + chosen * tile)[..., None] + jnp.arange(tile)
    flat = (*found.shape[:3], -1)
    found = jnp.concatenate([values, found.reshape(flat)], axis=-1)
    values, at = tied_top_k(found, count, tolerance)
    indices = jnp.concatenate([indices, slots.reshape(flat)], axis=-1)
    return values, jnp.where(at < 0, -1, jnp.take_along_axis(indices, at, axis=-1))
