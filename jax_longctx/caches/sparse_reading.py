"""Reading a text by attention to some blocks of its earlier keys: XAttention (Xu et al. 2025).

A chunk's queries attend the chunk itself densely, and of the earlier keys the blocks of 128 that
are chosen for each head and each 128 queries. Of every `stride` queries and `stride` keys that
follow one another, the mean of the scores along the antidiagonal stands for all of them: it crosses
every vertical and every slanted line. Their softmax over all keys, the chunk's own among them,
estimates each block's share of the attention; it takes 1/(2 stride) of dense attention's
operations. The fewest blocks are read whose shares, with the chunk's own, reach `mass`, and always
the first one.

The chunk's own keys are read whole, which the authors' diagonal block is a part of. On several
shards each leaves out at most its part of what may be left out: together they keep `mass`.
"""

import jax.numpy as jnp
from jax.scipy.special import logsumexp
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
