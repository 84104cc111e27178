"""The kind that keeps every token: exact attention over an append-only cache.

Keys are cached after rotary embedding at their true positions. A chunk of queries attends the
cache (all of it visible) and itself (causal), two partial results merged by log-sum-exp; one token
attends the cache alone, after its own key was appended. Cost: O(L^2) in prefill, the whole cache
read once a decode step.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp

from jax_longctx.caches import empty_append_cache
from jax_longctx.contract import (
    QKV,
    CacheShape,
    Feed,
    LayerContext,
    Method,
    Segment,
    Stage,
    WithCache,
    chunk_segments,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Appending(Method):
    """A method whose cache is every key and value."""

    phase = "none"
    keeps_all = append_only = stripes = True

    def init_cache(self, shape: CacheShape) -> Any:
        return empty_append_cache(shape)

    def segments(self, feed: Feed) -> Iterable[Segment]:
        """Chunks of the engine's own size."""
        role = "context" if feed.stage == "context" else "query"
        return chunk_segments(feed.rows, feed.chunk, role)

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        q, k, v = new
        positions_BT = cache.position[:, None] + jnp.arange(q.shape[1])
        q, k = ctx.rotate_queries(q, positions_BT), ctx.rotate(k, positions_BT)
        return cache.attend((q, k, v), segment.valid_of(), ctx)

    def finish(self, cache: Any, ctx: LayerContext, stage: Stage, reserve: int) -> Any:
        """The cache of a subclass is `Rewinding` too."""
        return cache.end_context(reserve)

    def fork(self, cache: Any) -> Any:
        return cache.rewind()

    def read_bytes(self, cache: Any, length: int) -> int:
        # Dense decode reads empty slots too.
        return cache.store.nbytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exact(Appending):
    """Full attention, of a whole model or of some layers under another method."""

    own_tokens = 0
    cannot_adopt = None
