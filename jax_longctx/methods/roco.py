"""RoCo: the tokens of high mean attention, and those whose attention is still uncertain.

Ren and Zhu 2024 (EasyKV), section 3. Each kv head keeps its own `budget` tokens. For every kept
token three sums are carried, with P the mean probability over the kv head's query heads:

    total += sum_i P[i, s]    squares += sum_i P[i, s]^2    count += queries that could see s

and when j tokens must leave

    mean = total / count      std = sqrt(squares / count - mean^2)
    scope = the f tokens of smallest std, the first `sink` and the newest `protected_last` left out
    the j tokens of the scope with the smallest mean leave
    f = max(budget - int(recent_ratio * budget) - sink, j)

The ratio only makes the scope smaller: no recent window is protected beyond `protected_last`. In an
answer one token leaves a step, with `decode_recent_ratio` and without protected sinks (the authors'
mode encoding_decoding). Cost: H2O's, and three numbers a token.

Differences from the authors' code: variances are clamped at 0 (rounding gave NaN), of equals the
older stays, the newest tokens are those of each row of a batch, `budget` is what they call budget
plus stride, and statistics begin with the first token; `warm_start=False` begins them, as the code
does by default, with the first segment that makes tokens leave. As a baseline of CItruS
(`protocol=citrus`, `positions=shifted`) only tokens before the chunk are in the scope; the newest
are counted from the chunk's end; the question's own statistics are added before the eviction that
it causes, and none after it, as nothing leaves any more.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

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
from pallas_kernels.select_large_k import select_mask

__all__ = ["RoCo"]


@method(source="Ren and Zhu 2024, section 3; EasyKV")
class RoCo(Registered):
    """High mean attention, or attention still uncertain, per kv head.

    Attributes:
      budget: tokens kept by each kv head.
      chunk: tokens of the context read between two evictions.
      sink: first slots that do not leave while text is read.
      recent_ratio, decode_recent_ratio: shares of the budget by which the scope is smaller, while
        text is read and in an answer.
      protected_last: newest tokens that never leave.
      scope: `std` (the paper), or `all`: every token that is not protected may leave.
      warm_start: statistics begin with the first token, not with the first eviction.
      positions: `true`, or `shifted` (keys stand at their slots).
      protocol: `own` (the authors' code), or `citrus` (as a baseline of CItruS, section 5.2).
    """

    budget: int = 1024
    chunk: int = 256
    sink: int = 4
    recent_ratio: float = 0.1
    decode_recent_ratio: float = 0.3
    protected_last: int = 10
    scope: Literal["std", "all"] = "std"
    warm_start: bool = True
    positions: eviction.Positions = "true"
    protocol: eviction.Protocol = "own"

    def __post_init__(self) -> None:
        for name in ("sink", "protected_last"):
            if getattr(self, name) < 0:
                raise ConfigError(f"RoCo: {name} must be at least 0, got {getattr(self, name)}")
        for name in ("recent_ratio", "decode_recent_ratio"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(
                    f"RoCo: {name} must be at least 0 and below 1, got {getattr(self, name)}"
                )
        eviction.check(self, kept=max(self.sink + self.protected_last, 1))

    def init_cache(self, shape: CacheShape) -> BudgetCache:
        return eviction.empty_cache(self, shape, statistics=3)

    def attend(
        self, new: QKV, cache: BudgetCache, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, BudgetCache]:
        q, k, _ = new
        valid_B = segment.valid_of(CHUNK_ROWS)
        if eviction.only_joins(self, segment):
            return eviction.read_and_append(self, new, cache, valid_B, ctx)
        seen = eviction.look(self, new, cache, valid_B, ctx)
        total, squares = seen.mass(squares=True)
        count = jnp.broadcast_to(seen.onlookers[:, None], total.shape)
        added = jnp.stack([total / (q.shape[2] // k.shape[2]), squares, count], axis=-1)
        if not self.warm_start:
            counted_B = eviction.leaving(self, seen) > 0
            added = jnp.where(counted_B[:, None, None, None], added, 0.0)
        sums = eviction.accumulated(cache, added)
        scores_BKU = self._scores(seen, sums, segment)
        return (seen.out, seen.lse), eviction.evict(self, cache, seen, scores_BKU, segment, sums)

    def _scores(
        self, seen: eviction.Look, sums: Float[Array, "B K U 3"], segment: Segment
    ) -> Float[Array, "B K U"]:
        """Means within the scope, +inf outside it."""
        answering = segment.role == "decode"
        sink = 0 if answering else self.sink
        ratio = self.decode_recent_ratio if answering else self.recent_ratio
        end_B = seen.length + eviction.joining(segment, seen)
        in_scope_BU = eviction.may_leave(self, seen) & (seen.order >= sink)
        in_scope_BU &= seen.order < (end_B - self.protected_last)[:, None]
        total, squares, count = jnp.moveaxis(sums, -1, 0)
        # A cold start has counted nothing yet.
        count = jnp.maximum(count, 1)
        mean = total / count
        in_scope_BKU = jnp.broadcast_to(in_scope_BU[:, None], mean.shape)
        if self.scope == "std":
            std = jnp.sqrt(jnp.maximum(squares / count - mean**2, 0))
            fixed = self.budget - int(ratio * self.budget) - sink
            size_B = jnp.maximum(fixed, eviction.leaving(self, seen))
            # The uncertain stay, and of equals the older: so they are chosen, not the scope.
            uncertain_B = jnp.sum(in_scope_BU, axis=1) - size_B
            std = jnp.where(in_scope_BKU, std, -jnp.inf)
            uncertain_BK = jnp.broadcast_to(uncertain_B[:, None], mean.shape[:2])
            in_scope_BKU &= ~select_mask(std, uncertain_BK)
        return jnp.where(in_scope_BKU, mean, jnp.inf)

    validate = eviction.validate
    reach = eviction.reach
    segments = eviction.segments
    finish = eviction.finish
    fork = eviction.fork
    read_bytes = eviction.read_bytes
