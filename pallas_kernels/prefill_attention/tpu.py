"""Attention of a chunk on TPUs: JAX's splash attention with a float32 log-sum-exp.

Splash takes one sequence of heads and keeps a block map for each head. So the rows of the batch are
folded into the heads: query head (b, n) reads kv head (b, n // G), and rows of different lengths
are different block maps.

The chunk against itself: the kernel computes a causal or local mask from positions, and skips
blocks that no query sees. The chunk against the cache takes two calls. The first visits the blocks
that lie wholly below a row's length and needs no mask; the block map keeps the others from being
fetched. The second takes the one block that the length cuts through, from a copy whose invalid
slots are zero, masked by segment ids. The two results are merged. So empty capacity costs no
arithmetic, and garbage in it, NaN included, reaches no matmul.

Queries are padded to whole blocks. A head dim of 64 is not padded: k and v go in with the slots
minor, as XLA stores them, and the cache is not copied (compiled for v5e: 2 MB of temporaries
against 1.1 GB, with a cache of 0.5 GB). Splash has no scale, so `scale` is multiplied into q in q's
dtype.

VMEM of a step: blocks of q, k, v, and the scores [block_q, block_kv] in float32, 1 MiB. Roofline:
matrix throughput, 4 T S N H operations (half when causal). Published figures for splash and flash
are 75-89% of peak on v5p, a third on v6e.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as mask_info
from jaxtyping import Float

from pallas_kernels.common import (
    Attended,
    Cache,
    Chunk,
    PerRow,
    Queries,
    Scale,
    Window,
    blank_rows,
    cap_of,
    factor_of,
    merge,
)
from pallas_kernels.quantised import AnyStored
from pallas_kernels.tpu_common import LANES, slots_minor, unsupported_keys

_BLOCKS = (512, 256, 128)
# The block maps lie in scalar memory, 1 MiB on v5e; this many entries keep them well within.
_MAP_ENTRIES = 2**16


def unsupported_cache(q: Array, k: AnyStored, window: Window | None) -> str | None:
    """Why splash cannot run the chunk against the cache, or None."""
    if window is not None:
        return "no sliding window against a cache"
    block = _key_block(k.shape[2])
    if block is None:
        return f"{k.shape[2]} slots are not a multiple of {_BLOCKS[-1]}"
    batch, queries, heads, _ = q.shape
    maps = 1 if batch == 1 else batch * heads
    entries = maps * -(-queries // _query_block(queries)) * (k.shape[2] // block)
    if entries > _MAP_ENTRIES:
        return f"block maps of {entries} entries, at most {_MAP_ENTRIES} fit scalar memory"
    return unsupported_keys(q)


def causal_attention(
    q: Queries,
    k: Chunk,
    v: Chunk,
    *,
    scale: Scale,
    window: int | None = None,
    interpret: bool = False,
) -> Attended:
    """Token t sees the tokens j <= t, and with a window those with t - j < window."""
    batch, tokens, heads, _ = q.shape
    q_heads = _fold_queries(q, scale)
    k_heads, v_heads = (_pad_tokens(_fold(jnp.moveaxis(x, 1, 2)), q_heads.shape[1]) for x in (k, v))
    square = q_heads.shape[1], q_heads.shape[1]
    # Keys of the padding come after every true query: the causal mask hides them.
    mask = (
        masks.CausalMask(square)
        if window is None
        else masks.LocalMask(square, (window - 1, 0), offset=0)
    )
    kernel = splash.make_splash_mha_single_device(
        masks.MultiHeadMask([mask] * (batch * heads)),
        block_sizes=_block_sizes(_query_block(tokens), _query_block(tokens), q.shape[3]),
        save_residuals=True,
        attn_logits_soft_cap=cap_of(scale),
        interpret=interpret,
    )
    out_XTH, (lse_XT,) = kernel(q_heads, k_heads, v_heads)
    return _unfold(out_XTH, lse_XT, q.shape)


def cache_attention(
    q: Queries, k: Cache, v: Cache, lengths: PerRow, *, scale: Scale, interpret: bool = False
) -> Attended:
    """Every query of row b sees the slots below lengths[b]."""
    block = _key_block(k.shape[2])
    if block is None:
        raise NotImplementedError(unsupported_cache(q, k, None))
    q_heads = _fold_queries(q, scale)
    query_block, heads = _query_block(q.shape[1]), q.shape[2]
    whole_B, k_tail, v_tail, tail_B = _split_tail(k, v, lengths, block)
    # The first whole blocks of every row's cache. One map serves all heads of a single row;
    # otherwise every folded head has its row's.
    blocks_B = whole_B // block
    blocks_X = blocks_B if q.shape[0] == 1 else jnp.repeat(blocks_B, heads)
    j = jnp.arange(k.shape[2] // block)
    visited_XJ = j < blocks_X[:, None]
    # Beyond the last visited block the index stays, so that nothing more is fetched.
    fetched_XJ = jnp.minimum(j, jnp.maximum(blocks_X[:, None] - 1, 0))
    shape = (len(blocks_X), q_heads.shape[1] // query_block, len(j))

    def over_queries(x_XJ: Array) -> Array:
        return jnp.broadcast_to(x_XJ[:, None], shape).astype(jnp.int32)

    # 0: nothing of a block is seen, 2: everything.
    sizes = _block_sizes(query_block, block, k.shape[3])
    how = {"cap": cap_of(scale), "interpret": interpret}
    kernel = _kernel(sizes, over_queries(fetched_XJ), over_queries(2 * visited_XJ), **how)
    out_XTH, (lse_XT,) = kernel(q_heads, _fold(k), _fold(v))
    whole = _unfold(out_XTH, lse_XT, q.shape)
    # The block that the length cuts through: its first slots are valid.
    kernel = _kernel(sizes, **how)
    q_BNTH = q_heads.reshape(q.shape[0], heads, *q_heads.shape[1:])
    queries_BT = jnp.zeros((q.shape[0], q_heads.shape[1]), jnp.int32)
    slots_BZ = jnp.where(jnp.arange(block) < tail_B[:, None], 0, 1)
    out_BNTH, (lse_BNT,) = jax.vmap(kernel)(
        q_BNTH, k_tail, v_tail, segment_ids=splash.SegmentIds(queries_BT, slots_BZ)
    )
    tail = _unfold(_fold(out_BNTH), lse_BNT.reshape(-1, lse_BNT.shape[2]), q.shape)
    return merge([blank_rows(*whole, whole_B == 0), blank_rows(*tail, tail_B == 0)])


def _kernel(
    sizes: splash.BlockSizes,
    fetched: Array | None = None,
    seen: Array | None = None,
    *,
    cap: float | None,
    interpret: bool,
) -> splash.SplashAttentionKernel:
    """Splash without a mask but, where they are given, the maps of blocks."""
    return splash.SplashAttentionKernel(
        mask_info.MaskInfo(
            data_next=fetched,
            mask_next=None,
            block_mask=seen,
            partial_mask_blocks=None,
            q_sequence=None,
        ),
        None,
        None,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=True,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=cap,
        residual_checkpoint_name=None,
        mask_function=None,
        interpret=interpret,
    )


def _split_tail(
    k: Cache, v: Cache, lengths: PerRow, size: int
) -> tuple[Array, Array, Array, Array]:
    """Cut every row at its last whole block, so that garbage in v never meets a matmul.

    A masked slot has weight 0, and 0 x NaN is NaN, so values beyond a row's length have to be
    replaced. To replace them in place would copy the cache. Only the one block that the length
    cuts through is copied.

    Returns:
      (whole_B, k_tail, v_tail, tail_B): the number of slots in whole blocks, the cut block
      [B,K,size,H] zeroed beyond the length, and how many of its slots are valid.
    """
    blocks = k.shape[2] // size
    whole_B = lengths // size
    at_B = jnp.minimum(whole_B, blocks - 1)
    tail_B = jnp.where(whole_B < blocks, lengths - whole_B * size, 0)
    valid_B1C1 = (jnp.arange(size) < tail_B[:, None])[:, None, :, None]

    def tail(x: Cache) -> Array:
        block = jax.vmap(lambda row, i: lax.dynamic_slice_in_dim(row, i * size, size, axis=1))
        return jnp.where(valid_B1C1, block(x, at_B), 0)

    k_tail, v_tail = tail(k), tail(v)
    return whole_B * size, k_tail, v_tail, tail_B


def _key_block(slots: int) -> int | None:
    """The largest block that divides the slots, or None."""
    return next((size for size in _BLOCKS if slots % size == 0), None)


def _query_block(queries: int) -> int:
    return min(_BLOCKS[0], -(-queries // LANES) * LANES)


def _block_sizes(query_block: int, key_block: int, head_dim: int) -> splash.BlockSizes:
    # A head dim below a vector's 128 lanes would be padded to them, which copies the cache at twice
    # its size; XLA lays such an array out with the slots minor, and splash takes it so when told.
    layout = splash.QKVLayout.HEAD_DIM_MINOR
    if slots_minor(head_dim):
        layout = splash.QKVLayout.SEQ_MINOR
    return splash.BlockSizes(
        block_q=query_block, block_kv=key_block, k_layout=layout, v_layout=layout
    )


def _fold(x: Cache) -> Array:
    """Rows and heads as one axis, [B*K,S,H]."""
    return x.reshape(-1, *x.shape[2:])


def _pad_tokens(x: Float[Array, "X T H"], tokens: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, tokens - x.shape[1]), (0, 0)))


def _fold_queries(q: Queries, scale: Scale) -> Array:
    """Scaled queries [B*N,T',H], T' a whole number of query blocks."""
    block = _query_block(q.shape[1])
    scaled = (q.astype(jnp.float32) * factor_of(scale)).astype(q.dtype)
    return _pad_tokens(_fold(jnp.moveaxis(scaled, 2, 1)), -(-q.shape[1] // block) * block)


def _unfold(out: Array, lse: Array, q_shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Splash's out [B*N,T',H] and log-sum-exp [B*N,T'] as [B,T,N,H] and [B,T,N]."""
    batch, queries, heads, head_dim = q_shape
    out_BNTH = out[:, :queries].reshape(batch, heads, queries, head_dim)
    lse_BNT = lse[:, :queries].reshape(batch, heads, queries)
    return jnp.moveaxis(out_BNTH, 1, 2), jnp.moveaxis(lse_BNT, 1, 2)
