"""What every method has in a layer with a sliding window: exact attention to the window.

Such a layer sees nothing beyond its window, so no method has anything to choose there. The engine
does the duties of these layers by `SLIDING_WINDOW`, and those of the others by the method
(`Setup.layer`). So a method knows nothing of windows. The segments are the method's.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jax_longctx.caches.window import WindowCache, empty_window_cache, written_last
from jax_longctx.contract import (
    CHUNK_ROWS,
    QKV,
    CacheShape,
    LayerContext,
    Method,
    Segment,
    Stage,
    WithCache,
)
from pallas_kernels.common import side_by_side


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlidingWindow(Method):
    """The duties in a layer with a sliding window, but for `segments`."""

    phase = "none"

    def init_cache(self, shape: CacheShape) -> WindowCache:
        return empty_window_cache(shape)

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        """Each row group sees the window before the segment, and itself; the chunk joins."""
        assert ctx.window is not None
        window, scale, after, parts = ctx.window, ctx.scale, cache, []
        for group in segment.groups:
            q, k, v = (x[:, group.columns] for x in new)
            at_BT = cache.position[:, None] + jnp.arange(q.shape[1])
            q, k = ctx.rotate_queries(q, at_BT), ctx.rotate(k, at_BT)
            joins = group.name == CHUNK_ROWS and segment.role != "probe"
            if joins and q.shape[1] == 1:
                after = cache.append(k, v, segment.valid_of(), window)
                parts.append(after.attend_newest(q, scale, window))
                continue
            parts.append(cache.attend((q, k, v), scale, window))
            if joins:
                valid_B = written_last(segment.valid_of(), parts)
                after = cache.append(k, v, valid_B, window)
        return side_by_side(*parts) if len(parts) > 1 else parts[0], after

    def finish(self, cache: Any, ctx: LayerContext, stage: Stage, reserve: int) -> Any:
        return cache

    def fork(self, cache: Any) -> Any:
        """A copy: what follows takes the context's slots."""
        return jax.tree.map(jnp.copy, cache)

    def read_bytes(self, cache: Any, length: int) -> int:
        return cache.nbytes


SLIDING_WINDOW = SlidingWindow()
