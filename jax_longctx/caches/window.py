"""The newest keys and values of a row: all that a layer with a sliding window of W tokens sees.

The token at position p lies in slot p modulo W, so a token takes the place of the one that leaves
the window with it. A decode step appends its token, then reads all slots that hold one: no mask.
Several tokens first attend to the window before them, put in the text's order, and to themselves.
Then the last W of them are written. So a chunk needs no slots of its own, however long it is.
The buffers are small, and whole on every shard of the slots.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches.append_only import write_rows
from jax_longctx.caches.fifo import padded
from jax_longctx.contract import QKV, Attended, CacheShape
from jax_longctx.sharding import axes_field
from pallas_kernels.common import AnyCache, Scale, Window, merge
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.plane import part_of
from pallas_kernels.prefill_attention import cache_attention, causal_attention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowCache:
    """Keys, rotated to their positions, and values of the last W tokens of each row.

    Attributes:
      k, v: slots from W on hold nothing; they fill a tile of the kernels.
      position: tokens read so far, the position of the next one.
    """

    k: AnyCache = axes_field("batch", "kv_heads", "budget", None, in_place=True)
    v: AnyCache = axes_field("batch", "kv_heads", "budget", None, in_place=True)
    position: Int[Array, " B"] = axes_field("batch")

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        return self.k.nbytes + self.v.nbytes

    def attend(self, new: QKV, scale: Scale, window: int) -> Attended:
        """Attention of rotated tokens, which the cache does not hold, to it and to themselves."""
        q, k, v = new
        held_B = jnp.minimum(self.position, window)
        seen = Window(window, held_B)
        past_k, past_v = (self._in_order(x, window) for x in (self.k, self.v))
        earlier = cache_attention(q, past_k, past_v, held_B, scale=scale, window=seen)
        return merge([earlier, causal_attention(q, k, v, scale=scale, window=window)])

    def attend_newest(self, q: Float[Array, "B 1 N H"], scale: Scale, window: int) -> Attended:
        """Attention of the newest token, which the cache holds."""
        return decode_attention(q, self.k, self.v, jnp.minimum(self.position, window), scale=scale)

    def _in_order(self, x: AnyCache, window: int) -> Any:
        """What the slots hold, the oldest token first."""
        turned_B = jnp.where(self.position > window, self.position % window, 0)

        def rolled(part: Array) -> Array:
            return jax.vmap(lambda row, turned: jnp.roll(row, -turned, axis=1))(
                part[:, :, :window], turned_B
            )

        return jax.tree.map(rolled, part_of(x))

    def append(
        self,
        k: Float[Array, "B T K H"],
        v: Float[Array, "B T K H"],
        valid: Int[Array, " B"],
        window: int,
    ) -> "WindowCache":
        """With each row's first `valid[b]` tokens, of which the last W stay."""
        late_B = jnp.zeros_like(valid)
        if k.shape[1] > window:
            late_B = jnp.maximum(valid - window, 0)
            at_BW = (late_B[:, None] + jnp.arange(window))[..., None, None]
            k, v = (jnp.take_along_axis(x, at_BW, axis=1) for x in (k, v))
        slot_B = (self.position + late_B) % window

        def written(buffer: AnyCache, new: Array) -> AnyCache:
            if new.shape[1] == 1:
                # Of a row that takes no token: the slot's token has left the window, or is none.
                return write_rows(buffer, new, slot_B, valid)
            # The part up to the last slot, and what goes on at the first one.
            for start_B in (slot_B, slot_B - window):
                buffer = write_rows(buffer, new, start_B, valid - late_B, whole=False)
            return buffer

        moved = self.position + valid
        return WindowCache(written(self.k, k), written(self.v, v), moved)


def empty_window_cache(shape: CacheShape) -> WindowCache:
    """A cache for `shape.window` tokens a row."""
    assert shape.window is not None
    # An array for each field: a donated buffer may be named once.
    k, v = (shape.empty_slots(padded(shape.window)) for _ in range(2))
    return WindowCache(k, v, jnp.zeros((shape.batch,), jnp.int32))


def written_last(valid: Array, read: Any) -> Array:
    """`valid`, which is known once `read` is: what is written then is not read as a copy."""
    return jax.lax.optimization_barrier((valid, read))[0]
