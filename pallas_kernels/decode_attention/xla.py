"""Attention of one or a few queries to a long cache, in plain XLA.

Two matmuls over the whole capacity with a softmax between them. The scores, [B,K,G,T,S] float32,
are small beside the cache while T is small (with T = 1, 2 G / H of a bfloat16 cache). The matmuls
read the cache in place, and no temporary has its size. The second matmul contracts S, so it has
only B x K outputs, too few for a GPU's 132 processors. It is therefore split into blocks of slots,
an extra batch dimension, and the partial outputs are summed.

Slots beyond a row's length must hold finite numbers: their weight is 0, and 0 x NaN is NaN. Empty
capacity is read too: a loop that stops at the longest row would slice the cache, which copies it.

Keys and values in 8 bits become floats a block of slots at a time, in a loop that stops at the
longest row. Each number is exact in the floats; a token's scale multiplies its score or its weight.

Roofline: the bytes of k and v over the bandwidth. A half of one query's attention moves the bytes
of k, or of v, and 4 N S bytes of logits; logits and weights together are 4 G / H of a bfloat16
cache's bytes.
"""

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.common import (
    AnyCache,
    Attended,
    PerRow,
    Queries,
    Scale,
    Stored,
    Window,
    capped,
    cut,
    factor_of,
    group_heads,
    ungroup_heads,
)
from pallas_kernels.dispatch import platform, read_as_written
from pallas_kernels.quantised import Quantised

# Queries beyond which the scores are no longer small beside the cache.
MAX_QUERIES = 16
# Slots of a part of the second matmul, lowered to a divisor of S, and of a block that becomes
# floats: the best or within 1% of it for 1 x 32K, 1 x 128K and 8 x 16K on an H200
# (2.70, 3.40 and 3.47 TB/s; blocks of 128 2 to 6% less).
BLOCK = 2048
# Bytes of the floats of a block that lies in 8 bits, on GPUs.
_FLOAT_BYTES = 64 * 2**20


def decode_attention(
    q: Queries,
    k: AnyCache,
    v: AnyCache,
    lengths: PerRow,
    *,
    scale: Scale,
    window: Window | None = None,
) -> Attended:
    """Every query of row b sees the slots below lengths[b], within the window if there is one."""
    keys, values = read_as_written((k, v))
    slots_S = jnp.arange(k.shape[2])
    seen_BTS = (slots_S < lengths[:, None])[:, None]
    if window is not None:
        seen_BTS = seen_BTS & window.sees(slots_S, jnp.arange(q.shape[1]))
    longest = jnp.max(lengths)

    scores_BKGTS = _scores(group_heads(q, k.shape[1]), keys, scale, longest)
    logits_BKGTS = jnp.where(seen_BTS[:, None, None], scores_BKGTS, -jnp.inf)
    out_BKGTH, lse_BKGT = _attend(logits_BKGTS, values, longest)
    return ungroup_heads(out_BKGTH.astype(q.dtype)), ungroup_heads(lse_BKGT)


def _attend(
    logits: Float[Array, "B K G T S"], v: Stored, longest: Int[Array, ""] | int
) -> tuple[Float[Array, "B K G T H"], Float[Array, "B K G T"]]:
    """The softmax of the logits times the values, in float32, and its log-sum-exp."""
    top_BKGT1 = jnp.max(logits, axis=-1, keepdims=True)
    some_BKGT1 = top_BKGT1 > -jnp.inf
    top_BKGT1 = jnp.where(some_BKGT1, top_BKGT1, 0.0)  # -inf - -inf would be NaN
    weights_BKGTS = jnp.exp(logits - top_BKGT1)
    total_BKGT1 = jnp.where(some_BKGT1, jnp.sum(weights_BKGTS, axis=-1, keepdims=True), 1.0)
    lse_BKGT1 = jnp.where(some_BKGT1, top_BKGT1 + jnp.log(total_BKGT1), -jnp.inf)
    return _weighted_sum(weights_BKGTS, v, longest) / total_BKGT1, lse_BKGT1[..., 0]


def _scores(
    q: Float[Array, "B K G T H"], k: Stored, scale: Scale, longest: Int[Array, ""] | int
) -> Float[Array, "B K G T S"]:
    """scale q.k in float32 over the whole capacity; anything finite from slot `longest` on."""
    # Groups and queries as one axis: with two, XLA on CPU transposes k in memory for float32.
    q_BKRH = q.reshape(*k.shape[:2], -1, k.shape[3])
    if isinstance(k, Quantised):
        scores_BKRS = _scores_by_block(q_BKRH, k, longest)
    else:
        scores_BKRS = jnp.einsum("BKRH,BKSH->BKRS", q_BKRH, k, preferred_element_type=jnp.float32)
    scores_BKGTS = factor_of(scale) * scores_BKRS.reshape(*q.shape[:4], k.shape[2])
    return capped(scores_BKGTS, scale)


def _quantised_block(x: Quantised) -> int:
    """Slots that become floats at once: on GPUs more, for few launches."""
    most = BLOCK
    if platform() == "gpu":
        most = max(BLOCK, _FLOAT_BYTES // (x.size // x.shape[2] * jnp.dtype(x.dtype).itemsize))
    return min(most, x.shape[2])


def _scores_by_block(
    q: Float[Array, "B K R H"], k: Quantised, longest: Int[Array, ""] | int
) -> Float[Array, "B K R S"]:
    """q.k in float32 of the slots below `longest`, 0 beyond the block of the last."""
    block = _quantised_block(k)

    def add(number: Array, scores: Array) -> Array:
        # The last block is moved back to end with S: its overlap is computed twice, alike.
        start = jnp.minimum(number * block, k.shape[2] - block)
        part = cut(k, start, block)
        found_BKRC = jnp.einsum(
            "BKRH,BKCH->BKRC", q, part.values.astype(q.dtype), preferred_element_type=jnp.float32
        )
        found_BKRC *= part.scales.astype(jnp.float32)[:, :, None]
        return lax.dynamic_update_slice_in_dim(scores, found_BKRC, start, axis=3)

    none = jnp.zeros((*q.shape[:3], k.shape[2]), jnp.float32)
    return lax.fori_loop(0, -(-longest // block), add, none)


def _weighted_sum(
    weights: Float[Array, "B K G T S"], v: Stored, longest: Int[Array, ""] | int
) -> Float[Array, "B K G T H"]:
    """Weights x values in float32; the weights are 0 from slot `longest` on."""
    if not isinstance(v, Quantised):
        size = _divisor(v.shape[2], BLOCK)
        w_BKGTPZ = weights.astype(v.dtype).reshape(*weights.shape[:4], -1, size)
        v_BKPZH = v.reshape(*v.shape[:2], -1, size, v.shape[3])
        part_BKPGTH = jnp.einsum(
            "BKGTPZ,BKPZH->BKPGTH", w_BKGTPZ, v_BKPZH, preferred_element_type=jnp.float32
        )
        return jnp.sum(part_BKPGTH, axis=2)
    size = _quantised_block(v)
    rows_BKRS = weights.reshape(*v.shape[:2], -1, v.shape[2])

    def add(number: Array, total: Array) -> Array:
        start = jnp.minimum(number * size, v.shape[2] - size)
        part = cut(v, start, size)
        w_BKRC = lax.dynamic_slice_in_dim(rows_BKRS, start, size, axis=3)
        # The last block is moved back to end with S: what the one before had does not count.
        new_C = start + jnp.arange(size) >= number * size
        scales_BKC = jnp.where(new_C, part.scales.astype(jnp.float32), 0.0)
        return total + jnp.einsum(
            "BKRC,BKCH->BKRH",
            (w_BKRC * scales_BKC[:, :, None]).astype(v.dtype),
            part.values.astype(v.dtype),
            preferred_element_type=jnp.float32,
        )

    none = jnp.zeros((*rows_BKRS.shape[:3], v.shape[3]), jnp.float32)
    total_BKRH = lax.fori_loop(0, -(-longest // size), add, none)
    return total_BKRH.reshape(*weights.shape[:4], v.shape[3])


def weighted_values(weights: Float[Array, "B N S"], v: AnyCache) -> Float[Array, "B N H"]:
    """The sum of the values times their weights, in float32."""
    (b, n, slots), (_, kv_heads, _, width) = weights.shape, v.shape
    grouped_BKGTS = weights.reshape(b, kv_heads, -1, 1, slots)
    out_BKG1H = _weighted_sum(grouped_BKGTS, read_as_written(v), slots)
    return out_BKG1H.reshape(b, n, width)


def _divisor(slots: int, block: int) -> int:
    """The largest divisor of `slots` up to `block`, or `slots` where only tiny ones divide it."""
    best = next(d for d in range(min(block, slots), 0, -1) if slots % d == 0)
    return best if 8 * best >= min(block, slots) else slots


def decode_logits(
    q: Float[Array, "B 1 N H"], k: AnyCache, lengths: PerRow, *, scale: Scale
) -> Float[Array, "B N S"]:
    """scale q.k of every head and slot, -inf at and beyond lengths[b]."""
    keys = read_as_written(k)
    scores_BKGTS = _scores(group_heads(q, k.shape[1]), keys, scale, jnp.max(lengths))
    scores_BNS = scores_BKGTS.reshape(q.shape[0], q.shape[2], k.shape[2])  # [B, K, G, 1, S]
    held_B1S = (jnp.arange(k.shape[2]) < lengths[:, None])[:, None]
    return jnp.where(held_B1S, scores_BNS, -jnp.inf)


def attend_with_logits(
    q: Float[Array, "B 1 N H"], k: Stored, v: Stored, lengths: PerRow, *, scale: Scale
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"], Float[Array, "B N S"]]:
    """The softmax of `decode_logits` times the values, its log-sum-exp, and the logits."""
    logits_BNS = decode_logits(q, k, lengths, scale=scale)
    v = read_as_written(v)
    (b, n, slots), kv_heads = logits_BNS.shape, v.shape[1]
    # [B, K, G, 1, S]
    out, lse = _attend(logits_BNS.reshape(b, kv_heads, -1, 1, slots), v, slots)
    return out.astype(v.dtype).reshape(b, 1, n, v.shape[3]), lse.reshape(b, 1, n), logits_BNS
