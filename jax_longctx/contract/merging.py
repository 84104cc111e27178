"""Partial attention of the shards of the slots, merged by log-sum-exp: the only words that shards
exchange in a decode step of full attention, once in every layer, on the way to the next.

`by_sum`: the maximum of the log-sum-exps (`pmax`), then one sum of the weighted outputs with their
weights behind (`psum`), in float32: two collectives that wait for each other.
`by_gather`: one all-gather of the outputs in their own dtype with the float32 log-sum-exp's bits
behind; every shard merges them in the same order, so that all hold the same bits.

A device of S receives for each query and head of width H, in bfloat16:

    by_gather  (S - 1) (2 H + 4) bytes in one collective
    by_sum     2 (S - 1) / S (4 H + 8) bytes in two

At H = 128 that is 260 against 520 bytes for two shards, 780 against 780 for four, 1820 against 910
for eight. So `merge_seq` gathers where that is less, and where it is so little more that a
collective costs more than its bytes: all decode steps of some tens of rows, up to 16 shards.
The compiled programs for CPU and v5e have these collectives and bytes (tests count them).
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common import merge

# Queries, keys and values of T new tokens, before rotary embedding: N query heads, K kv heads.
QKV = tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]
# An attention's output, and its natural-log float32 log-sum-exp, -inf where nothing was seen.
Attended = tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]

# What a link of a TPU slice (90 GB/s) moves while a collective gets under way (3 us). NVLink moves
# more in the longer start of an NCCL collective.
WORTH_A_COLLECTIVE = 1 << 18


def merge_seq(out: Float[Array, "B T N H"], lse: Float[Array, "B T N"]) -> Attended:
    """The attention over all shards' slots, on every shard; inside `shard_map`."""
    shards = jax.lax.axis_size("seq")
    if shards == 1:
        return out, lse
    merge = choose(lse.size, out.shape[-1], out.dtype.itemsize, shards)
    return merge(out, lse)


def choose(size: int, width: int, itemsize: int, shards: int) -> Callable[[Array, Array], Attended]:
    """The way for `size` rows of `width` numbers of `itemsize` bytes, on each of `shards`."""
    return by_gather if cost(size, width, itemsize, shards)[1] == 1 else by_sum


def cost(size: int, width: int, itemsize: int, shards: int) -> tuple[float, int]:
    """Bytes that a device receives in the way that is chosen, and in how many collectives."""
    others = shards - 1
    gathered = others * size * (width * itemsize + 4)
    summed = 2 * others / shards * size * 4 * (width + 2)
    return (gathered, 1) if gathered <= summed + WORTH_A_COLLECTIVE else (summed, 2)


def by_sum(out: Float[Array, "B T N H"], lse: Float[Array, "B T N"]) -> Attended:
    """`pmax`, then `psum` of numerators and denominator in float32."""
    top = jax.lax.pmax(lse, "seq")
    safe = jnp.where(jnp.isfinite(top), top, 0.0)
    weight = jnp.exp(lse - safe)
    packed = jnp.concatenate(
        [out.astype(jnp.float32) * weight[..., None], weight[..., None]], axis=-1
    )
    packed = jax.lax.psum(packed, "seq")
    total = packed[..., -1]
    merged = packed[..., :-1] / jnp.where(total > 0, total, 1.0)[..., None]
    return merged.astype(out.dtype), jnp.where(total > 0, safe + jnp.log(total), -jnp.inf)


def by_gather(out: Float[Array, "B T N H"], lse: Float[Array, "B T N"]) -> Attended:
    """One all-gather; `out` travels in its own dtype."""
    width = out.shape[-1]
    # Bits, not numbers: the halves of a float32 may look like a NaN that a copy would quieten.
    word = jnp.uint32 if out.dtype.itemsize == 4 else jnp.uint16
    bits_out = jax.lax.bitcast_convert_type(out, word)
    bits_lse = jax.lax.bitcast_convert_type(lse, word).reshape(*lse.shape, -1)  # [B, T, N, 1 or 2]
    packed = jnp.concatenate([bits_out, bits_lse], axis=-1)
    parts = []
    for bits in jax.lax.all_gather(packed, "seq"):
        halves = bits[..., width:].reshape(bits_lse.shape if word == jnp.uint16 else lse.shape)
        part = jax.lax.bitcast_convert_type(bits[..., :width], out.dtype)
        parts.append((part, jax.lax.bitcast_convert_type(halves, jnp.float32)))
    return merge(parts)
