"""Attention of a chunk to listed blocks of a cache by its definition; for tests only."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.special import logsumexp
from jaxtyping import Bool, Float, Int

from pallas_kernels.common import Attended, Cache, PerRow, Queries, Scale
from pallas_kernels.prefill_attention.reference import logits_of, weigh

# Queries, and slots, of a block.
BLOCK = 128


class Blocks(NamedTuple):
    """Which blocks of slots each block of queries sees.

    Attributes:
      listed: the blocks for head n and queries 128 y to 128 y + 127, ascending; entries from
        count[b,n,y] on hold anything.
      count: how many they are. All of them begin below the row's length.
    """

    listed: Int[Array, "B N Y C"]
    count: Int[Array, "B N Y"]

    @classmethod
    def of(cls, chosen: Bool[Array, "B N Y C"]) -> "Blocks":
        """The lists of the blocks that are marked."""
        size = chosen.shape[-1]
        numbers = jnp.where(chosen, jnp.arange(size, dtype=jnp.int32), size)
        return cls(jax.lax.sort(numbers), jnp.sum(chosen, axis=-1, dtype=jnp.int32))


def block_masses(
    q: Float[Array, "B K M X"], keys: Cache, lengths: PerRow, *, scale: float, stride: int
) -> Float[Array, "B K C M"]:
    """The log of the sum of e^(scale q.k) over each block's runs of `stride` keys."""
    batch, kv_heads, slots, _ = keys.shape
    runs = keys.reshape(batch, kv_heads, slots // stride, -1).astype(jnp.float32)
    s = jnp.einsum("BKMX,BKRX->BKRM", q.astype(jnp.float32), runs, precision="highest")
    begins = jnp.arange(slots // stride) * stride < lengths[:, None]
    s = jnp.where(begins[:, None, :, None], scale * s, -jnp.inf)
    return logsumexp(s.reshape(batch, kv_heads, slots // BLOCK, -1, q.shape[2]), axis=3)


def sparse_prefill_attention(
    q: Queries, k: Cache, v: Cache, lengths: PerRow, blocks: Blocks, *, scale: Scale
) -> Attended:
    """Every query of row b sees the slots below lengths[b] of the blocks that are listed for it."""
    counts = jnp.arange(blocks.listed.shape[-1]) < blocks.count[..., None]
    slots_S, tile_T = jnp.arange(k.shape[2]), jnp.arange(q.shape[1]) // BLOCK
    in_list = blocks.listed[..., None] == slots_S // BLOCK
    seen_BNYS = jnp.any(in_list & counts[..., None], axis=3)
    seen_BTNS = jnp.swapaxes(seen_BNYS[:, :, tile_T], 1, 2)
    held_BS = slots_S < lengths[:, None]
    logits = jnp.where(seen_BTNS & held_BS[:, None, None], logits_of(q, k, scale), -jnp.inf)
    v = jnp.where(held_BS[:, None, :, None], v, 0)  # 0 x NaN is NaN
    out, lse = weigh(logits, v)
    return out.astype(q.dtype), lse
