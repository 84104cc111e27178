"""Reading a text by attention to some blocks of its earlier keys, chosen by estimates.

A chunk's queries attend the chunk itself densely, and of the earlier keys the blocks of 128 that
are chosen for each head and each 128 queries: the fewest whose estimated shares of the attention,
with the chunk's own, reach `mass`, and always the first one. Three ways estimate them:

- XAttention (Xu et al. 2025): of every `stride` queries and `stride` keys that follow one another,
  the mean of the scores along the antidiagonal stands for all of them: it crosses every vertical
  and every slanted line. It takes 1/(2 stride) of dense attention's operations.
- vertical-slash (Jiang et al. 2024, MInference): the attention of the chunk's last 128 queries is
  computed whole. A block has its share there, or that of the block as far behind them as it is
  behind its queries, whichever is more. Lines are blocks wide here.
- FlexPrefill (Lai et al. 2025): of each 128 queries and each block the mean query meets the mean
  key. Heads in which that differs by `tau` or more from the last queries' attention take
  vertical-slash's shares.

The chunk's own keys are read whole, which the authors' diagonal block is a part of. On several
shards each leaves out at most its part of what may be left out: together they keep `mass`.
"""

import jax
import jax.numpy as jnp
from jax.scipy.special import logsumexp, rel_entr
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.contract import QKV, Attended, LayerContext
from jax_longctx.settings import Reading
from pallas_kernels.common import AnyCache, factor_of
from pallas_kernels.sparse_prefill_attention import (
    BLOCK,
    Blocks,
    block_masses,
    sparse_prefill_attention,
)


def earlier_attention(
    new: QKV, keys: AnyCache, values: AnyCache, past: Array, valid: Array, ctx: LayerContext
) -> Attended:
    """The attention of new tokens to this shard's first past[b] slots, as `ctx.reading` says.

    Args:
      new: queries and keys are rotated; the first valid[b] of them count.
    """
    assert ctx.reading is not None
    q, k, _ = new
    shares = block_shares(q, k, keys, past, valid, ctx.reading, ctx)
    blocks = Blocks.of(chosen_blocks(shares, past, ctx.reading, ctx))
    return sparse_prefill_attention(q, keys, values, past, blocks, scale=ctx.scale)


def block_shares(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    keys: AnyCache,
    past: Int[Array, " B"],
    valid: Int[Array, " B"],
    how: Reading,
    ctx: LayerContext,
) -> Float[Array, "B N Y C"]:
    """The estimated share of the slots of each block in the attention of each block of queries.

    What is missing to 1 is the share of the chunk's own keys `k`, and of other shards' slots.
    """
    estimate = _by_antidiagonals if how.way == "xattention" else _by_last_queries
    return estimate(q, k, keys, past, valid, how, ctx)


def _by_antidiagonals(
    q: Array, k: Array, keys: AnyCache, past: Array, valid: Array, how: Reading, ctx: LayerContext
) -> Array:
    (batch, queries, heads, width), kv_heads, stride = q.shape, k.shape[2], how.stride
    tiles = -(-queries // BLOCK)
    counts_BT = jnp.arange(tiles * BLOCK) < valid[:, None]

    def strided(x: Array) -> Array:
        """The rows of `stride` tokens each, of kv head and group: [B, K, G, R, S, H]."""
        x = jnp.pad(x, ((0, 0), (0, tiles * BLOCK - queries), (0, 0), (0, 0)))
        x = jnp.where(counts_BT[..., None, None], x, 0)
        group = x.shape[2] // kv_heads
        return jnp.moveaxis(x.reshape(batch, -1, stride, kv_heads, group, width), (1, 2), (3, 4))

    # Query s of a row meets key stride - 1 - s.
    q_BKGRX = jnp.flip(strided(q), axis=4).reshape(
        batch, kv_heads, heads // kv_heads, -1, stride * width
    )
    own_BKRX = strided(k)[:, :, 0].reshape(batch, kv_heads, -1, stride * width)
    groups, rows = q_BKGRX.shape[2:4]
    scale = factor_of(ctx.scale) / stride
    q_BKMX = q_BKGRX.reshape(batch, kv_heads, groups * rows, -1)
    lse_BKCM = block_masses(q_BKMX, keys, past, scale=scale, stride=stride)
    own = scale * jnp.einsum(
        "BKGRX,BKCX->BKGRC", q_BKGRX, own_BKRX, preferred_element_type=jnp.float32
    )
    counts_BR = counts_BT[:, ::stride]
    seen = jnp.tril(jnp.ones((rows, rows), bool)) & counts_BR[:, None]
    own_BKGR = logsumexp(jnp.where(seen[:, None, None], own, -jnp.inf), axis=-1)
    own_BK1M = own_BKGR.reshape(batch, kv_heads, 1, -1)
    top = ctx.pmax_seq(jnp.maximum(jnp.max(lse_BKCM, axis=2, keepdims=True), own_BK1M))
    # A row without tokens has no key.
    top = jnp.where(top > -jnp.inf, top, 0)
    parts_BKCM = jnp.exp(lse_BKCM - top)
    total = ctx.psum_seq(jnp.sum(parts_BKCM, axis=2, keepdims=True)) + jnp.exp(own_BK1M - top)
    shares = parts_BKCM / jnp.where(total > 0, total, 1)
    by_tile = shares.reshape(batch, kv_heads, -1, groups, tiles, rows // tiles)
    counted = counts_BR.reshape(batch, 1, 1, 1, tiles, -1)
    mean = jnp.sum(by_tile, axis=-1, where=counted) / jnp.maximum(jnp.sum(counted, axis=-1), 1)
    return jnp.moveaxis(mean, 2, -1).reshape(batch, heads, tiles, -1)


def _by_last_queries(
    q: Array, k: Array, keys: AnyCache, past: Array, valid: Array, how: Reading, ctx: LayerContext
) -> Array:
    (batch, queries, heads, width), kv_heads = q.shape, k.shape[2]
    tiles, scale = -(-queries // BLOCK), factor_of(ctx.scale)
    slots = ctx.slots(keys.shape[2] // BLOCK, BLOCK)
    room = ((0, 0), (0, tiles * BLOCK - queries), (0, 0), (0, 0))
    counts_BT = jnp.arange(tiles * BLOCK) < valid[:, None]
    q, k = (jnp.where(counts_BT[..., None, None], jnp.pad(x, room), 0) for x in (q, k))
    number_BY = jnp.sum(counts_BT.reshape(batch, tiles, BLOCK), axis=2)

    def shares(q_BTNH: Array, of_cache: Array, own_BNTY: Array) -> Array:
        """[B, N, T, C + Y] of masses [B, K, C, G * T] of all shards' blocks and of the chunk's."""
        earlier = slots.whole(of_cache, axis=2)
        earlier = jnp.moveaxis(earlier.reshape(*earlier.shape[:3], -1, q_BTNH.shape[1]), 2, -1)
        earlier = earlier.reshape(*own_BNTY.shape[:3], -1)
        return jax.nn.softmax(jnp.concatenate([earlier, own_BNTY], axis=-1), axis=-1)

    def rows(q_BTNH: Array) -> Array:
        """[B, K, G * T, H]"""
        grouped = q_BTNH.reshape(batch, -1, kv_heads, heads // kv_heads, width)
        return jnp.moveaxis(grouped, 1, 3).reshape(batch, kv_heads, -1, width)

    def scores(q_BTNH: Array, k_BSKH: Array, seen_BTS: Array) -> Array:
        own = jnp.einsum(
            "BKMH,BSKH->BKMS", rows(q_BTNH), k_BSKH, preferred_element_type=jnp.float32
        )
        own = scale * own.reshape(batch, heads, -1, k_BSKH.shape[1])
        return jnp.where(seen_BTS[:, None], own, -jnp.inf)

    first_B = jnp.maximum(valid - BLOCK, 0)
    at_BT = first_B[:, None] + jnp.arange(BLOCK)
    asks_BT = at_BT < valid[:, None]
    last_q = jnp.take_along_axis(q, at_BT[..., None, None], axis=1)
    seen = (jnp.arange(tiles * BLOCK) <= at_BT[..., None]) & counts_BT[:, None]
    own_BNTS = scores(last_q, k, seen)
    own_BNTY = logsumexp(own_BNTS.reshape(batch, heads, BLOCK, tiles, BLOCK), axis=-1)
    of_cache = block_masses(rows(last_q), keys, past, scale=scale, stride=1)
    each = jnp.where(asks_BT[:, None, :, None], shares(last_q, of_cache, own_BNTY), 0)
    last_BNZ = jnp.sum(each, axis=2) / jnp.maximum(jnp.sum(asks_BT, axis=1), 1)[:, None, None]

    # Of the text's blocks those of the cache come first, then the chunk's own.
    size = last_BNZ.shape[-1] - tiles
    earlier_B = ctx.psum_seq(past)
    before_B = earlier_B // BLOCK
    newest_B = jnp.maximum(valid - 1, 0) // BLOCK
    later_BY = newest_B[:, None] - jnp.arange(tiles)
    place_BYC = jnp.arange(size) + later_BY[..., None]
    own_BYC = size + jnp.clip(place_BYC - before_B[:, None, None], 0, tiles - 1)
    place_BYC = jnp.where(place_BYC < before_B[:, None, None], place_BYC, own_BYC)
    slanted = jnp.take_along_axis(last_BNZ[:, :, None], place_BYC[:, None], axis=-1)
    found = jnp.maximum(last_BNZ[:, :, None, :size], slanted)

    if how.way == "flex":

        def means(x: Array) -> Array:
            apart = x.reshape(batch, tiles, BLOCK, -1, width).astype(jnp.float32)
            return (apart.sum(axis=2) / jnp.maximum(number_BY, 1)[..., None, None]).astype(x.dtype)

        mean_q, mean_k = means(q), means(k)
        upto_YY = jnp.tril(jnp.ones((tiles, tiles), bool)) & (number_BY > 0)[:, None]
        # Beside a block's 128 keys laid end to end: that product is one with their sum.
        wide = jnp.tile(rows(mean_q), BLOCK)
        of_cache = block_masses(wide, keys, past, scale=scale / BLOCK, stride=BLOCK)
        pooled = shares(mean_q, of_cache, scores(mean_q, mean_k, upto_YY))
        newest = jnp.take_along_axis(pooled, newest_B[:, None, None, None], axis=2)[:, :, 0]
        alike_BN = _divergence(newest, last_BNZ) < how.tau**2
        found = jnp.where(alike_BN[..., None, None], pooled[..., :size], found)
    begins_BC = jnp.arange(size) * BLOCK < earlier_B[:, None]
    counts_BYC = (number_BY > 0)[..., None] & begins_BC[:, None]
    return slots.part(jnp.where(counts_BYC[:, None], found, 0), axis=3)


def _divergence(p: Float[Array, "*S C"], q: Float[Array, "*S C"]) -> Float[Array, "*S"]:
    """Jensen-Shannon's, in bits."""
    both = p + q
    return jnp.sum(rel_entr(2 * p, both) + rel_entr(2 * q, both), axis=-1) / (4 * jnp.log(2))


def chosen_blocks(
    shares: Float[Array, "B N Y C"], past: Int[Array, " B"], how: Reading, ctx: LayerContext
) -> Bool[Array, "B N Y C"]:
    """The blocks that are read, of those that begin below past[b]."""
    size = shares.shape[-1]
    begins_BC = jnp.arange(size) * BLOCK < past[:, None]
    ascending = jnp.sort(shares)
    if how.density is None:
        here = jnp.sum(shares, axis=-1, keepdims=True)
        everywhere = ctx.psum_seq(here)
        may_miss = (1 - how.mass) * here / jnp.where(everywhere > 0, everywhere, 1)
        left_out = jnp.sum(jnp.cumsum(ascending, axis=-1) < may_miss, axis=-1, keepdims=True)
    else:
        kept_B = jnp.ceil(how.density * jnp.sum(begins_BC, axis=-1)).astype(jnp.int32)
        left_out = jnp.broadcast_to(size - kept_B[:, None, None, None], (*shares.shape[:3], 1))
    least = jnp.take_along_axis(ascending, jnp.minimum(left_out, size - 1), axis=-1)
    chosen = (shares >= least) | (jnp.arange(size) == 0)
    return chosen & begins_BC[:, None, None]
