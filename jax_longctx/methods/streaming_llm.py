"""StreamingLLM: the first tokens and the newest ones, at positions that never grow.

Xiao et al. 2024, sections 3.1 and 3.2. Each layer keeps the first `sink` tokens, which draw
attention whatever they say, and the newest `budget - sink`. Keys are cached before rotary
embedding and stand at their slot, so a model reads a text of any length at positions below the
cache's size. Memory and time per token are constant; what has left is lost.

A segment attends everything cached before it and itself; then the oldest tokens but the sinks
leave. With `chunk=1` that is the authors' evaluation; a larger chunk lets its queries see up to
`chunk - 1` tokens more, and reads a text faster.
"""

import jax.numpy as jnp

from jax_longctx.caches import BudgetCache
from jax_longctx.contract import (
    CHUNK_ROWS,
    QKV,
    Attended,
    CacheShape,
    LayerContext,
    Registered,
    Segment,
    method,
)
from jax_longctx.errors import ConfigError
from jax_longctx.parts import eviction

__all__ = ["StreamingLLM"]


@method(source="Xiao et al. 2024, sections 3.1 and 3.2")
class StreamingLLM(Registered):
    """The first tokens and the newest; any length at constant memory.

    Attributes:
      budget: tokens kept in each layer.
      sink: first tokens that never leave; as many as `budget` keep no newer ones at all.
      chunk: tokens of the context read before the oldest leave.
      positions: `shifted` (the paper) or `true` (positions keep growing).
      protocol: `own` (the paper), or `citrus` (as a baseline of CItruS, section 5.2).
    """

    budget: int = 1024
    sink: int = 4
    chunk: int = 256
    positions: eviction.Positions = "shifted"
    protocol: eviction.Protocol = "own"

    def __post_init__(self) -> None:
        if self.sink < 0:
            raise ConfigError(f"StreamingLLM: sink must be at least 0, got {self.sink}")
        eviction.check(self, kept=max(self.sink, 1))

    def init_cache(self, shape: CacheShape) -> BudgetCache:
        return eviction.empty_cache(self, shape)

    def attend(
        self, new: QKV, cache: BudgetCache, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, BudgetCache]:
        valid_B = segment.valid_of(CHUNK_ROWS)
        if eviction.only_joins(self, segment):
            return eviction.read_and_append(self, new, cache, valid_B, ctx)
        seen = eviction.look(self, new, cache, valid_B, ctx)
        scores_BU = jnp.where(seen.order < self.sink, jnp.inf, seen.order)
        scores_BKU = jnp.broadcast_to(scores_BU[:, None], (*cache.k.shape[:2], scores_BU.shape[1]))
        return (seen.out, seen.lse), eviction.evict(self, cache, seen, scores_BKU, segment)

    validate = eviction.validate
    reach = eviction.reach
    segments = eviction.segments
    finish = eviction.finish
    fork = eviction.fork
    read_bytes = eviction.read_bytes
