"""RefreshKV: decode over a small partial cache, chosen anew from the full one when the query turns.

Xu et al. 2025, "RefreshKV: Updating Small KV Cache During Long-form Generation", sections 2 and
A.1. Context and question are read by full attention. The last token's probabilities (maximum over
a kv head's group, maximum over `kernel` neighbours) choose the `budget` tokens of each kv head's
partial cache, by default an eighth of the prompt. Then, in each layer and at each answered token,

1. its key and value join the full cache and the partial one, whose lowest-scored token leaves (then
   the next, then the tokens answered first);
2. a partial step attends the partial cache alone, the token itself included;
3. a full step attends every key, and the same probabilities choose the partial cache anew.

Full steps come every `stride` tokens ("fixed") or, checked every `qc_stride` tokens, where the
cosine between the mean query of all heads and that of the layer's last full step is at most
`threshold` ("adaptive"). A partial step reads budget + 1 tokens, a full one all of them; the full
cache stays in memory, the partial one beside it. With `indexed` it is a list of tokens gathered
from the full cache at each step.

Where the paper is silent: the token of a full step is always chosen and leaves last
(`force_self`), which makes RefreshKV without full steps SnapKV with window 1; the mean query is
taken after rotary embedding (`qc_space`), as it meets the keys. Unlike the paper's the full cache
takes each token at once, so that no token is lost where more than `budget` come between two full
steps. Thresholds lie in [-1, 1]: at 1 every check refreshes, at -1 practically none; a fixed
stride beyond the answer never does. `evict_on_push=False` lets the partial cache grow between two
full steps. `ablation` is that of section 5.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Literal

import jax.numpy as jnp

from jax_longctx.caches import empty_append_cache, where_rows
from jax_longctx.caches.fifo import FifoCache, empty_fifo_cache, empty_fifo_list
from jax_longctx.contract import (
    CHUNK_ROWS,
    ENDS,
    QKV,
    Attended,
    CacheShape,
    LayerContext,
    Prompt,
    Registered,
    Segment,
    Stage,
    mark_ends,
    method,
)
from jax_longctx.errors import ConfigError
from jax_longctx.models.config import ModelConfig
from jax_longctx.parts import refresh_steps
from jax_longctx.parts.appending import Appending
from jax_longctx.parts.observation import check_kernel, refuse_windows
from jax_longctx.parts.refresh_steps import RefreshCache

__all__ = ["RefreshKV"]


@method(source="Xu et al. 2025, section 2")
class RefreshKV(Registered):
    """Decode reads a part of the cache, chosen anew by full steps when the query turns.

    `budget` is in tokens, the same for all rows; without one it is `ratio` of each row's own prompt
    (context and question), rounded down, at least 1.
    """

    budget: int | None = None
    ratio: float = 0.125
    kernel: int = 7
    over_group: Literal["max", "mean", "first"] = "max"
    schedule: Literal["adaptive", "fixed"] = "adaptive"
    stride: int = 10
    qc_stride: int = 5
    threshold: float = 0.85
    qc_space: Literal["post_rope", "pre_rope"] = "post_rope"
    evict_on_push: bool = True
    force_self: bool = True
    indexed: bool = False
    ablation: Literal["none", "no_refresh", "no_full"] = "none"

    phase = "decode"
    query_aware = True
    keeps_all = True
    append_only = True

    def __post_init__(self) -> None:
        least = {"stride": self.stride, "qc_stride": self.qc_stride, "budget": self.budget}
        for name, value in least.items():
            if value is not None and value < 1:
                raise ConfigError(f"RefreshKV: {name} must be at least 1, got {value}")
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"RefreshKV: ratio must be above 0 and at most 1, got {self.ratio}")
        if not -1 <= self.threshold <= 1:
            raise ConfigError(
                f"RefreshKV: threshold is a cosine from -1 to 1, got {self.threshold}; for no full "
                f"step at all set schedule=fixed and a stride beyond the answer"
            )
        check_kernel("RefreshKV", self.kernel)
        if self.indexed and not self.evict_on_push:
            raise ConfigError(
                "RefreshKV: indexed=true gathers a fixed number of tokens, which "
                "evict_on_push=false exceeds; set one of them otherwise"
            )
        if self.ablation == "no_full" and not self.force_self:
            raise ConfigError(
                "RefreshKV: ablation=no_full reads the new partial cache alone, which must hold "
                "the token itself; set force_self=true"
            )

    def validate(self, config: ModelConfig) -> None:
        refuse_windows("RefreshKV", config)

    def init_cache(self, shape: CacheShape) -> RefreshCache:
        if self.budget is not None:
            order = empty_fifo_list(shape, self.budget, "budget")
        else:
            # No prompt is longer than the slots.
            order = empty_fifo_list(shape, math.ceil(self.ratio * shape.slots), "share")
        partial = order
        if not self.indexed:
            room = None if self.evict_on_push else shape.reserve
            partial = empty_fifo_cache(shape, order, room)
        return RefreshCache(
            empty_append_cache(shape),
            partial,
            jnp.zeros((shape.batch, shape.head_dim), jnp.float32),
            jnp.zeros((shape.batch,), jnp.int32),
            jnp.zeros((shape.batch,), jnp.int32),
        )

    def segments(self, prompt: Prompt) -> Iterable[Segment]:
        segments = Appending().segments(prompt)
        return mark_ends(segments) if prompt.stage == "question" else segments

    def step_variant(self, step: int) -> str:
        return refresh_steps.PARTIAL if step % self._every else refresh_steps.CHECK

    @property
    def _every(self) -> int:
        """Steps from one that may be full to the next."""
        return self.stride if self.schedule == "fixed" else self.qc_stride

    def attend(
        self, new: QKV, cache: RefreshCache, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, RefreshCache]:
        if segment.role == "decode":
            return refresh_steps.step(self, new, cache, segment, ctx)
        part, store = Appending().attend(new, cache.store, segment, ctx)
        cache = dataclasses.replace(cache, store=store)
        if segment.variant == ENDS:
            last_B = jnp.maximum(segment.valid_of(CHUNK_ROWS) - 1, 0)
            last_B111 = last_B[:, None, None, None]
            q = jnp.take_along_axis(new[0], last_B111, axis=1)
            begun = refresh_steps.begin(self, q, cache, ctx)
            cache = where_rows(segment.ends, begun, cache)
        return part, cache

    def adopt(self, cache: RefreshCache, ctx: LayerContext) -> RefreshCache:
        """The cache whose store another method's prefill has filled; a question chooses anew."""
        return cache

    def finish(
        self, cache: RefreshCache, ctx: LayerContext, stage: Stage, reserve: int
    ) -> RefreshCache:
        return dataclasses.replace(cache, store=cache.store.end_context())

    def fork(self, cache: RefreshCache) -> RefreshCache:
        # What else a question finds here is replaced where it ends.
        return dataclasses.replace(cache, store=cache.store.rewind())

    def read_bytes(self, cache: RefreshCache, length: int) -> int:
        """The partial cache, and the part of a full step that falls to one; "adaptive": at most."""
        store, partial = cache.store, cache.partial
        if isinstance(partial, FifoCache) and not self.evict_on_push:
            tokens = partial.k.shape[2]
        else:
            tokens = (self.budget or max(int(self.ratio * length), 1)) + 1
        token = 2 * store.k.size // store.k.shape[2] * store.k.dtype.itemsize
        return token * tokens + token * store.k.shape[2] // self._every
