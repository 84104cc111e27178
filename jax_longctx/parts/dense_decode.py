"""A decode step that attends every key of a cache at its true position.

For methods that cache keys before rotary embedding: the keys are rotated as they are read, a block
at a time, so that no second cache is ever held.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import AppendCache
from jax_longctx.contract import LayerContext
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.lse import merge

__all__ = ["attend_everything"]

# Keys that are rotated at once.
BLOCK = 2048


def attend_everything(
    q: Float[Array, "B 1 N H"], store: AppendCache, ctx: LayerContext
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"]]:
    """Attention of the newest token, before rotary embedding and cached already, to all tokens."""
    slots = store.k.shape[2]
    block, offset, held_B = math.gcd(slots, BLOCK), ctx.seq_offset(slots), store.held(ctx)
    q = ctx.rotate(q, store.position[:, None] - 1)

    def part(index: Int[Array, ""]) -> tuple[Array, Array]:
        begin = index * block
        k, v = (jax.lax.dynamic_slice_in_dim(x, begin, block, axis=2) for x in (store.k, store.v))
        at_BZ = jnp.broadcast_to(offset + begin + jnp.arange(block), (q.shape[0], block))
        k = jnp.swapaxes(ctx.rotate(jnp.swapaxes(k, 1, 2), at_BZ), 1, 2)
        return decode_attention(q, k, v, jnp.clip(held_B - begin, 0, block), scale=ctx.scale)

    def add(index: Int[Array, ""], so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        return merge([so_far, part(index)])

    blocks = -(-jnp.max(held_B) // block)
    return ctx.seq_merge(*jax.lax.fori_loop(1, blocks, add, part(jnp.int32(0))))
