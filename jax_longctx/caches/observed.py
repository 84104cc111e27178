"""Append-only storage that remembers the last queries too: an observation window (SnapKV)."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches.append_only import AppendCache, empty_append_cache
from jax_longctx.contract import CacheShape
from jax_longctx.sharding import axes_field

__all__ = ["ObservedCache", "empty_observed_cache"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedCache:
    """Every key and value of a row, and the last W queries that read them.

    Attributes:
      queries: rotated, the newest last.
      lse: log-sum-exp of each one's attention, -inf where a row has had fewer queries.
      context_queries, context_lse: both as they were at the end of the context.
    """

    store: AppendCache
    queries: Float[Array, "B W N H"] = axes_field("batch", None, "heads", None)
    lse: Float[Array, "B W N"] = axes_field("batch", None, "heads")
    context_queries: Float[Array, "B W N H"] = axes_field("batch", None, "heads", None)
    context_lse: Float[Array, "B W N"] = axes_field("batch", None, "heads")

    def observe(
        self,
        store: AppendCache,
        queries: Float[Array, "B T N H"],
        lse: Float[Array, "B T N"],
        valid: Int[Array, " B"],
    ) -> "ObservedCache":
        """With a segment's keys in `store` and each row's first `valid[b]` queries remembered."""
        return dataclasses.replace(
            self,
            store=store,
            queries=_last(self.queries, queries, valid),
            lse=_last(self.lse, lse, valid),
        )

    def end_context(self) -> "ObservedCache":
        """Remembers where the context ends, so that `rewind` can return there."""
        return ObservedCache(
            self.store.end_context(), self.queries, self.lse, self.queries, self.lse
        )

    def rewind(self) -> "ObservedCache":
        """The cache at the end of the context; shares the keys and values."""
        queries = jnp.array(self.context_queries, copy=True)
        lse = jnp.array(self.context_lse, copy=True)
        return dataclasses.replace(self, store=self.store.rewind(), queries=queries, lse=lse)


def empty_observed_cache(shape: CacheShape, window: int) -> ObservedCache:
    """An empty cache that remembers the last `window` queries."""
    size = (shape.batch, window, shape.num_heads)

    def queries() -> Array:
        return jnp.zeros((*size, shape.head_dim), shape.dtype)

    def lse() -> Array:
        return jnp.full(size, -jnp.inf, jnp.float32)

    return ObservedCache(empty_append_cache(shape), queries(), lse(), queries(), lse())


def _last(
    old: Float[Array, "B W *R"], new: Float[Array, "B T *R"], valid: Int[Array, " B"]
) -> Float[Array, "B W *R"]:
    """The last W of each row's old ones and its first `valid[b]` new ones."""
    size = old.shape[1]
    index_BW = valid[:, None] + jnp.arange(size)
    index_BW = index_BW.reshape(*index_BW.shape, *(1,) * (old.ndim - 2))  # [B, W, 1 ...]
    kept = jnp.take_along_axis(old, jnp.minimum(index_BW, size - 1), axis=1)
    came = jnp.take_along_axis(new, jnp.clip(index_BW - size, 0, new.shape[1] - 1), axis=1)
    return jnp.where(index_BW < size, kept, came.astype(old.dtype))
