"""Attention of a chunk to listed blocks of a cache in plain XLA.

A block of queries of all heads goes over its lists together, a block of slots a turn, under an
online softmax: one block of each head is gathered at once, and becomes floats if it has 8 bits.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import logsumexp
from jaxtyping import Float

from pallas_kernels.common import (
    MASKED,
    Attended,
    PerRow,
    Queries,
    Scale,
    Stored,
    block_of,
    capped,
    factor_of,
)
from pallas_kernels.quantised import dequantised
from pallas_kernels.sparse_prefill_attention.reference import BLOCK, Blocks

# Slots whose scores are in memory at once.
_SLOTS = 8192


def block_masses(
    q: Float[Array, "B K M X"], keys: Stored, lengths: PerRow, *, scale: float, stride: int
) -> Float[Array, "B K C M"]:
    """See the public function."""
    (batch, kv_heads, rows, width), slots = q.shape, keys.shape[2]
    size = min(_SLOTS, slots)

    def add(number: Array, found: Array) -> Array:
        # The last part is moved back to end with the slots.
        start = jnp.minimum(number * size, slots - size)
        runs = block_of(keys, start, size).reshape(batch, kv_heads, -1, width)
        s = jnp.einsum("BKMX,BKRX->BKMR", q, runs, preferred_element_type=jnp.float32)
        begins = start + jnp.arange(size // stride) * stride < lengths[:, None]
        s = jnp.where(begins[:, None, None], scale * s, -jnp.inf)
        lse_BKMC = logsumexp(s.reshape(*s.shape[:3], size // BLOCK, -1), axis=-1)
        lse_BKCM = jnp.swapaxes(lse_BKMC, 2, 3)
        return lax.dynamic_update_slice_in_dim(found, lse_BKCM, start // BLOCK, axis=2)

    none = jnp.full((batch, kv_heads, slots // BLOCK, rows), -jnp.inf, jnp.float32)
    return lax.fori_loop(0, -(-jnp.max(lengths) // size), add, none)


def sparse_prefill_attention(
    q: Queries, k: Stored, v: Stored, lengths: PerRow, blocks: Blocks, *, scale: Scale
) -> Attended:
    """Every query of row b sees the slots below lengths[b] of the blocks that are listed for it."""
    queries, tiles = q.shape[1], blocks.count.shape[2]
    padded = jnp.pad(q, ((0, 0), (0, tiles * BLOCK - queries), (0, 0), (0, 0)))
    q_YBNTH = jnp.moveaxis(padded.reshape(q.shape[0], tiles, BLOCK, *q.shape[2:]), 3, 2)
    q_YBNTH = jnp.moveaxis(q_YBNTH, 1, 0)
    each = q_YBNTH, jnp.moveaxis(blocks.listed, 2, 0), jnp.moveaxis(blocks.count, 2, 0)
    out, lse = lax.map(lambda tile: _attend(tile, k, v, lengths, scale), each)
    out = jnp.moveaxis(out, (0, 3), (1, 2)).reshape(padded.shape)  # [Y,B,N,T,H]
    lse = jnp.moveaxis(lse, (0, 3), (1, 2)).reshape(padded.shape[:3])
    return out[:, :queries].astype(q.dtype), lse[:, :queries]


def _attend(
    tile: tuple[Array, Array, Array], k: Stored, v: Stored, lengths: PerRow, scale: Scale
) -> tuple[Array, Array]:
    """One block of queries [B,N,T,H] of all heads over lists [B,N,C] of so many [B,N]."""
    q, listed, count = tile
    batch, heads = q.shape[:2]
    row_B1, kv_head_N = jnp.arange(batch)[:, None], jnp.arange(heads) // (heads // k.shape[1])

    def step(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry
        block_BN = jnp.minimum(listed[:, :, i], k.shape[2] // BLOCK - 1)

        def numbers(stored: Stored) -> Array:
            def taken(x: Array) -> Array:
                blocked = x.reshape(*x.shape[:2], -1, BLOCK, *x.shape[3:])
                return blocked[row_B1, kv_head_N, block_BN]

            return dequantised(jax.tree.map(taken, stored))

        slots_BNC = block_BN[..., None] * BLOCK + jnp.arange(BLOCK)
        seen_BNC = (slots_BNC < lengths[:, None, None]) & (i < count)[..., None]
        k_BNCH, v_BNCH = numbers(k), jnp.where(seen_BNC[..., None], numbers(v), 0)
        s = jnp.einsum("BNTH,BNCH->BNTC", q, k_BNCH, preferred_element_type=jnp.float32)
        s = jnp.where(seen_BNC[:, :, None], capped(factor_of(scale) * s, scale), MASKED)
        new_top = jnp.maximum(top, jnp.max(s, axis=-1))
        weights = jnp.where(seen_BNC[:, :, None], jnp.exp(s - new_top[..., None]), 0)
        decay = jnp.exp(top - new_top)
        part = jnp.einsum(
            "BNTC,BNCH->BNTH", weights.astype(q.dtype), v_BNCH, preferred_element_type=jnp.float32
        )
        return new_top, total * decay + jnp.sum(weights, -1), acc * decay[..., None] + part

    empty = (
        jnp.full(q.shape[:-1], MASKED, jnp.float32),
        jnp.zeros(q.shape[:-1], jnp.float32),
        jnp.zeros(q.shape, jnp.float32),
    )
    top, total, acc = lax.fori_loop(0, jnp.max(count), step, empty)
    some = total > 0
    total = jnp.where(some, total, 1.0)
    return acc / total[..., None], jnp.where(some, top + jnp.log(total), -jnp.inf)
