"""`LayerContext`: rotary embedding and the helpers that reach across the mesh, for one layer.

Made by the engine inside the manual `shard_map`. A collective over one shard returns its argument.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.contract import merging
from jax_longctx.models.config import RopeConfig
from jax_longctx.models.rope import apply_rope, rope_angles


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerContext:
    """What `attend` and `finish` may know about the layer and the mesh.

    Not which layer it is: layers that are alike share one trace. What differs by layer is decided
    in `init_cache`.

    Attributes:
      scale: factor of the attention logits.
      window: sliding window of this layer in tokens, or None.
      rope: the checkpoint's rotary embedding.
      total: each row's total length, fixed before its first chunk (dynamic NTK needs it).
    """

    scale: float
    window: int | None
    rope: RopeConfig
    total: Int[Array, " B"]

    def rotate(
        self, x: Float[Array, "B T N H"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T N H"]:
        """`x` under rotary embedding at `positions`."""
        cos, sin = rope_angles(self.rope, x.shape[-1], positions, self.total)
        return apply_rope(x, cos, sin)

    @property
    def head_shards(self) -> int:
        """Number of shards of the heads."""
        return jax.lax.axis_size("tensor")

    def psum_heads(self, x: Array) -> Array:
        """Sum over the shards of the heads (each shard has already reduced its own)."""
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

    def seq_offset(self, local_slots: int) -> Int[Array, ""]:
        """Global index of this shard's first slot, when it holds `local_slots` of them."""
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

    @property
    def seq_index(self) -> Int[Array, ""]:
        """Which shard of the slots this is."""
        return jax.lax.axis_index("seq")

    def send_seq(self, x: Array, to: Sequence[int]) -> Array:
        """Shard s's `x` on shard to[s] (a permutation of the shards), in one hop."""
        return jax.lax.ppermute(x, "seq", list(enumerate(to)))

    def agree(self, decided: Bool[Array, "*S"]) -> Bool[Array, "*S"]:
        """Where any shard that holds a part of the same rows has decided so, on all of them.

        Shards compute the same numbers in their own order: their last bits, and what is decided by
        them, may differ. A branch with a collective that only some shards enter never ends.
        """
        return jax.lax.pmax(decided.astype(jnp.int32), ("tensor", "seq")) > 0

    def seq_merge(
        self, out: Float[Array, "B T N H"], lse: Float[Array, "B T N"]
    ) -> merging.Attended:
        """Merges each shard's partial attention over its own slots, by log-sum-exp."""
        return merging.merge_seq(out, lse)
