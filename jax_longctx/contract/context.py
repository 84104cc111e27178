"""`LayerContext`: rotary embedding, and the collectives over the mesh, for one layer.

The engine makes it inside the manual `shard_map`. A collective over one shard returns its argument.

In a decode step of full attention the shards of the slots exchange one thing a layer: their
partial attention, merged by log-sum-exp (`seq_merge`). There are two ways:

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

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.contract.slots import OwnSlots, SlotLayout
from jax_longctx.models.config import RopeConfig
from jax_longctx.models.rope import apply_rope, rope_angles
from pallas_kernels.common import merge

# Queries, keys and values of T new tokens, before rotary embedding: N query heads, K kv heads.
QKV = tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]
# An attention's output, and its natural-log float32 log-sum-exp, -inf where nothing was seen.
Attended = tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]
# That, and the cache with the new tokens.
WithCache = tuple[Attended, Any]

# Bytes that a link of a TPU slice (90 GB/s) moves while a collective starts (3 us). NVLink moves
# more while an NCCL collective starts, which takes longer.
WORTH_A_COLLECTIVE = 1 << 18


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerContext:
    """What `attend` and `finish` know about the layer and the mesh.

    The layer's index is not among it: equal layers share one trace. `init_cache` decides what
    differs by layer.

    Attributes:
      scale: factor of the attention logits.
      window: sliding window of this layer in tokens, or None.
      rope: the checkpoint's rotary embedding.
      total: each row's total length, known before its first chunk (for dynamic NTK).
      stripe: slots of a stripe, where they are dealt to the shards in stripes; None for blocks.
    """

    scale: float
    window: int | None
    rope: RopeConfig
    total: Int[Array, " B"]
    stripe: int | None = None

    def rotate(
        self, x: Float[Array, "B T N H"], positions: Int[Any, "#B T"]
    ) -> Float[Array, "B T N H"]:
        """`x` under rotary embedding at `positions`; see `rope_angles` for those of numpy."""
        cos, sin = rope_angles(self.rope, x.shape[-1], positions, self.total)
        return apply_rope(x, cos, sin)

    @property
    def head_shards(self) -> int:
        """Number of shards of the heads."""
        return jax.lax.axis_size("tensor")

    def psum_heads(self, x: Array) -> Array:
        """Sum over the shards of the heads, of sums over each shard's own heads."""
        return jax.lax.psum(x, "tensor")

    def gather_heads(self, x: Array, axis: int) -> Array:
        """The shards' arrays concatenated along `axis`, on every shard of the heads."""
        return jax.lax.all_gather(x, "tensor", axis=axis, tiled=True)

    def head_offset(self, local_heads: int) -> Int[Array, ""]:
        """Global index of this shard's first head, when it holds `local_heads` of them."""
        return jax.lax.axis_index("tensor") * local_heads

    @property
    def seq_size(self) -> int:
        """Number of shards of the slots."""
        return jax.lax.axis_size("seq")

    def slots(self, size: int, page: int = 1) -> OwnSlots:
        """Which slots this shard holds, of which it has `size`; or pages of `page` slots each."""
        return SlotLayout(self.seq_size, self.stripe).own(size, page, self.seq_index)

    def seq_offset(self, local_slots: int) -> Int[Array, ""]:
        """Global index of this shard's first slot, when it holds a block of `local_slots` of them.

        Raises:
          ValueError: slots are dealt in stripes, which have no one offset; see `slots`.
        """
        if self.stripe is not None and self.seq_size > 1:
            raise ValueError(
                "seq_offset: the method's slots are dealt to the shards in stripes; ask "
                "LayerContext.slots where they lie, or set stripes = False in the method"
            )
        return jax.lax.axis_index("seq") * local_slots

    def psum_seq(self, x: Array) -> Array:
        """Sum over the shards of the slots."""
        return jax.lax.psum(x, "seq") if self.seq_size > 1 else x

    def pmax_seq(self, x: Array) -> Array:
        """Maximum over the shards of the slots."""
        return jax.lax.pmax(x, "seq") if self.seq_size > 1 else x

    def gather_seq(self, x: Array, axis: int) -> Array:
        """The shards' arrays concatenated along `axis`, on every shard of the slots."""
        return jax.lax.all_gather(x, "seq", axis=axis, tiled=True) if self.seq_size > 1 else x

    def own_seq(self, x: Array, axis: int) -> Array:
        """This shard's part along `axis` of an array that all shards hold whole."""
        own = x.shape[axis] // self.seq_size
        return jax.lax.dynamic_slice_in_dim(x, self.seq_index * own, own, axis)

    @property
    def seq_index(self) -> Int[Array, ""]:
        """Which shard of the slots this is."""
        return jax.lax.axis_index("seq")

    def send_seq(self, x: Array, to: Sequence[int]) -> Array:
        """Shard s's `x` on shard to[s] (a permutation of the shards), in one hop."""
        return jax.lax.ppermute(x, "seq", list(enumerate(to)))

    def agree(self, decided: Bool[Array, "*S"]) -> Bool[Array, "*S"]:
        """True on all shards of the same rows where it is True on any of them.

        Shards add the same numbers in different orders, so their last bits and their decisions may
        differ. If only some shards enter a branch with a collective, the program hangs.
        """
        return jax.lax.pmax(decided.astype(jnp.int32), ("tensor", "seq")) > 0

    def seq_merge(self, out: Float[Array, "B T N H"], lse: Float[Array, "B T N"]) -> Attended:
        """Each shard's partial attention over its own slots, merged; the same on every shard."""
        if self.seq_size == 1:
            return out, lse
        return merge_way(lse.size, out.shape[-1], out.dtype.itemsize, self.seq_size)(out, lse)


def merge_way(
    size: int, width: int, itemsize: int, shards: int
) -> Callable[[Array, Array], Attended]:
    """The cheaper way to merge `size` rows of `width` numbers of `itemsize` bytes over `shards`."""
    return by_gather if merge_cost(size, width, itemsize, shards)[1] == 1 else by_sum


def merge_cost(size: int, width: int, itemsize: int, shards: int) -> tuple[float, int]:
    """Bytes that a device receives in the cheaper way, and the number of collectives."""
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
