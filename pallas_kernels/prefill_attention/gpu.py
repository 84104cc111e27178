"""Attention of a chunk on NVIDIA GPUs: cuDNN's flash attention with a float32 log-sum-exp.

`jax.nn.dot_product_attention` runs the same cuDNN kernel but casts the log-sum-exp to bfloat16,
too coarse for merging partial attentions. The function below it is private to JAX and returns what
cuDNN wrote: natural log, float32, [B,N,T].

The chunk against itself: causal mask (and cuDNN's sliding window), layout [B,T,N,H]. The chunk
against the cache: padding mask with the rows' lengths, layout [B,N,T,H]; the cache is read in
place, and only q is transposed. Slots beyond a length must be finite: cuDNN multiplies those in the
length's last tile by 0, and 0 x NaN is NaN.

cuDNN gives a processor 128 queries of one head. A question fills few processors, and each reads the
whole cache. Then the cache is read in parts, which cuDNN is told are rows of one key head (the same
bytes), and the queries that share a key head lie in one tile. On an H200 a question of 32 tokens
over 131,072 slots takes a model of the 8B shape 21 ms so, and 76 ms in one part. A cache in 8 bits
is read a block of slots at a time, of which each is too short for many parts.

Roofline: matrix throughput, 4 T S N H operations (half when causal). cuDNN reached 650 TFLOP/s at
32K causal on an H100, 82% of a large matmul there. With the float32 residual it reached 575 at 32K
causal and 559 for 8192 queries against 32,668 slots, on an H200.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Shaped

from pallas_kernels import hopper
from pallas_kernels.common import (
    Attended,
    Cache,
    Chunk,
    PerRow,
    Queries,
    Window,
    blank_rows,
    merge,
    pack_rows,
    unpack_rows,
)

# Queries of a head that cuDNN gives to one processor, and the least slots of a part of the cache.
_TILE, _LEAST = 128, 2048


def unsupported_causal(q: Array) -> str | None:
    """Why cuDNN cannot run the chunk against itself, or None."""
    if q.dtype not in hopper.DTYPES:
        return f"cuDNN takes bfloat16 and float16, not {q.dtype}"
    if q.shape[3] not in hopper.HEAD_DIMS:
        return f"head dim {q.shape[3]} is not one of {hopper.HEAD_DIMS}"
    try:
        _cudnn().check_cudnn_version()
    except (NotImplementedError, RuntimeError) as error:
        return str(error)
    return None


def unsupported_cache(q: Array, window: Window | None) -> str | None:
    """Why cuDNN cannot run the chunk against the cache, or None."""
    if window is not None:
        return "cuDNN has no sliding window without a causal mask"
    return unsupported_causal(q)


def causal_attention(
    q: Queries, k: Chunk, v: Chunk, *, scale: float, window: int | None = None
) -> Attended:
    """Token t sees the tokens j <= t, and with a window those with t - j < window."""
    cudnn = _cudnn()
    out, lse_BNT = cudnn.dot_product_attention(
        q,
        k,
        v,
        scale=scale,
        mask_type=cudnn.MaskType.CAUSAL,
        qkv_layout="BTNH",
        sliding_window_length=window,
        return_residual=True,
    )
    return out, jnp.swapaxes(lse_BNT, 1, 2)


def cache_attention(
    q: Queries, k: Cache, v: Cache, lengths: PerRow, *, scale: float, parts: int | None = None
) -> Attended:
    """Every query of row b sees the slots below lengths[b]; slots beyond must be finite.

    Args:
      parts: parts of the cache that are read side by side, a divisor of its slots. None: as many as
        fill the processors.
    """
    if parts is None:
        parts = _parts(k.shape[0] * k.shape[1], q.shape[1] * q.shape[2] // k.shape[1], k.shape[2])
    if parts == 1:
        out_BNTH, lse_BNT = _padded_attention(jnp.swapaxes(q, 1, 2), k, v, lengths, scale)
        return blank_rows(jnp.swapaxes(out_BNTH, 1, 2), jnp.swapaxes(lse_BNT, 1, 2), lengths == 0)
    batch, kv_heads, slots, width = k.shape
    size = slots // parts
    held_BKP = jnp.clip(lengths[:, None, None] - size * jnp.arange(parts), 0, size)
    held_BKP = jnp.broadcast_to(held_BKP, (batch, kv_heads, parts))
    rows_BKRH = pack_rows(q, kv_heads)
    rows_BKPRH = jnp.broadcast_to(
        rows_BKRH[:, :, None], (batch, kv_heads, parts, *rows_BKRH.shape[2:])
    )
    out, lse = _padded_attention(
        rows_BKPRH.reshape(-1, 1, *rows_BKRH.shape[2:]),
        k.reshape(-1, 1, size, width),
        v.reshape(-1, 1, size, width),
        held_BKP.reshape(-1),
        scale,
    )
    out_BKPRH = out.reshape(rows_BKPRH.shape)
    lse_BKPR = jnp.where(held_BKP[..., None] > 0, lse.reshape(rows_BKPRH.shape[:-1]), -jnp.inf)
    out_BKRH, lse_BKR = merge([(out_BKPRH[:, :, p], lse_BKPR[:, :, p]) for p in range(parts)])
    return unpack_rows(out_BKRH, q.shape[1]), unpack_rows(lse_BKR, q.shape[1])


def _padded_attention(
    q: Shaped[Array, "B N T H"],
    k: Shaped[Array, "B K S H"],
    v: Shaped[Array, "B K S H"],
    lengths: PerRow,
    scale: float,
) -> tuple[Shaped[Array, "B N T H"], Shaped[Array, "B N T"]]:
    """cuDNN's attention to the slots below the lengths; undefined in a row without any."""
    cudnn = _cudnn()
    return cudnn.dot_product_attention(
        q,
        k,
        v,
        q_seqlen=jnp.full((q.shape[0],), q.shape[2], jnp.int32),
        kv_seqlen=jnp.maximum(lengths, 1),
        scale=scale,
        mask_type=cudnn.MaskType.PADDING,
        qkv_layout="BNTH",
        return_residual=True,
    )


def _parts(heads: int, queries: int, slots: int) -> int:
    """The least power of two that gives every processor a tile; parts have `_LEAST` slots or more.

    Args:
      heads: key heads of all rows.
      queries: of each key head.
    """
    tiles = heads * -(-queries // _TILE)
    parts = 1
    if 2 * tiles <= hopper.processors():
        while tiles * parts < hopper.processors() and not slots % (2 * parts):
            if slots // (2 * parts) < _LEAST:
                break
            parts *= 2
    return parts


def _cudnn() -> Any:
    """JAX's binding of cuDNN's fused attention: a private module, tried with JAX 0.11.2."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn
    except ImportError as error:
        raise NotImplementedError(
            f"JAX {jax.__version__} has no cuDNN attention binding as JAX 0.11.2 has it: {error}"
        ) from error
    missing = {"dot_product_attention", "MaskType", "check_cudnn_version"} - set(dir(cudnn))
    if missing:
        raise NotImplementedError(
            f"the cuDNN attention binding of JAX {jax.__version__} lacks {sorted(missing)}, which "
            "that of JAX 0.11.2 has"
        )
    return cudnn
