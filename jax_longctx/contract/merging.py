"""Merging of the shards' partial attention, by its log-sum-exps.

In a decode step of full attention the shards of the slots exchange one thing a layer: their
partial attention (`LayerContext.seq_merge`). There are two ways:

- `by_sum`: the maximum of the log-sum-exps (`pmax`), then one sum of the weighted outputs and their
  weights (`psum`), in float32: two collectives, one after the other.
- `by_gather`: one all-gather of the outputs in their own dtype, the bits of the float32 log-sum-exp
  appended. Every shard merges them in the same order, so all hold the same bits.

Each of S shards receives for each query and head of width H, in bfloat16:

    by_gather  (S - 1) (2 H + 4) bytes in one collective
    by_sum     2 (S - 1) / S (4 H + 8) bytes in two

At H = 128 that is 260 against 520 bytes for two shards, 780 against 780 for four, 1820 against 910
for eight. `seq_merge` gathers where that is fewer bytes, or where the extra bytes cost less than a
second collective: in all decode steps of some tens of rows, up to 16 shards. Tests count the
collectives and bytes in the programs compiled for CPU and v5e.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common import merge

# An attention's output, and its natural-log float32 log-sum-exp, -inf where nothing was seen.
Attended = tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]

# Bytes that a link of a TPU slice (90 GB/s) moves while a collective starts (3 us). NVLink moves
# more while an NCCL collective starts, which takes longer.
WORTH_A_COLLECTIVE = 1 << 18


def merge_cost(size: int, width: int, itemsize: int, shards: int) -> tuple[float, int]:
    """Bytes that a device receives in the cheaper way, and its collectives: 1 of `by_gather`.

    `size` rows of `width` numbers of `itemsize` bytes are merged over `shards`.
    """
    others = shards - 1
    gathered = others * size * (width * itemsize + 4)
    summed = 2 * others / shards * size * 4 * (width + 2)
    return (gathered, 1) if gathered <= summed + WORTH_A_COLLECTIVE else (summed, 2)


def with_sinks(
    out: Float[Array, "B T N H"], lse: Float[Array, "B T N"], sinks: Float[Array, " N"]
) -> Float[Array, "B T N H"]:
    """The output where each head's softmax has one more column, of logit `sinks[n]` and value 0.

    exp(lse) / (exp(lse) + exp(sink)) of the output stays.
    """
    share = jax.nn.sigmoid(lse - sinks.astype(jnp.float32))
    return (out.astype(jnp.float32) * share[..., None]).astype(out.dtype)


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


def by_gather(
    out: Float[Array, "B T N H"], lse: Float[Array, "B T N"], gather: Callable[[Array], Array]
) -> Attended:
    """One all-gather, by a function that gives all shards' arrays; `out` travels in its dtype."""
    width = out.shape[-1]
    # Bits, not numbers: the halves of a float32 may look like a NaN that a copy would quieten.
    word = jnp.uint32 if out.dtype.itemsize == 4 else jnp.uint16
    bits_out = jax.lax.bitcast_convert_type(out, word)
    bits_lse = jax.lax.bitcast_convert_type(lse, word).reshape(*lse.shape, -1)  # [B, T, N, 1 or 2]
    packed = jnp.concatenate([bits_out, bits_lse], axis=-1)
    parts = []
    for bits in gather(packed):
        halves = bits[..., width:].reshape(bits_lse.shape if word == jnp.uint16 else lse.shape)
        part = jax.lax.bitcast_convert_type(bits[..., :width], out.dtype)
        parts.append((part, jax.lax.bitcast_convert_type(halves, jnp.float32)))
    return merge(parts)
