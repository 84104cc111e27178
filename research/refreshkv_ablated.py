"""RefreshKV's ablations of section 5: full steps that do one half of their work."""

import dataclasses
from typing import Any, Literal

from jaxtyping import Array, Bool

from jax_longctx.caches.fifo import FifoCache
from jax_longctx.contract import Attended, LayerContext, method
from jax_longctx.methods.refreshkv import RefreshKV


@method(source="Xu et al. 2025, section 5")
class RefreshKVAblated(RefreshKV):
    """RefreshKV whose full steps choose nothing anew, or attend the new partial cache alone.

    Attributes:
      ablation: `no_refresh` or `no_full`.
    """

    ablation: Literal["no_refresh", "no_full"] = "no_refresh"

    @property
    def leaving(self) -> int | None:
        """Without refreshing any number of tokens leaves."""
        return None if self.ablation == "no_refresh" else super().leaving

    def full_step(
        self, q: Array, cache: Any, turned: Bool[Array, " B"], ctx: LayerContext
    ) -> tuple[Attended, FifoCache]:
        attended, partial = super().full_step(q, cache, turned, ctx)
        if self.ablation == "no_refresh":
            return attended, cache.partial

        return self.read(q, dataclasses.replace(cache, partial=partial), ctx), partial
