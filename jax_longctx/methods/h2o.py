"""H2O: the newest tokens, and the heavy hitters among the others.

Zhang et al. 2023, section 4 (algorithm 1). Each kv head keeps its own `budget` tokens: the newest
`recent`, and of those before them the ones that have received the most attention so far. For a
slot s and the queries i of a segment (P are probabilities of the attention just computed)

    acc[s] += mean over the kv head's query heads of sum_i P[i, s]

tokens join with the mass they receive in their own segment, and then the lowest `acc` leave. While
answering that is one token a step. Cost: attention over the budget, and one more product of
queries and keys for the sums.

Differences from the authors' code, which drops once after the whole prompt: the text is read in
chunks, so that memory is bounded, and every query counts; sums are kept per kv head under grouped
queries and per row of a batch. As a baseline of CItruS (`protocol=citrus`, `positions=shifted`)
the chunk is the recent window, so `recent` counts only within the tokens before it and is 0 by
default; the question's own mass is added before the eviction that it causes; while it is read and
answered nothing is added, as nothing leaves any more.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Int

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

__all__ = ["H2O"]


@method(source="Zhang et al. 2023, section 4")
class H2O(Registered):
    """The newest tokens and those that drew the most attention, per kv head.

    Attributes:
      budget: tokens kept by each kv head; `heavy` is what `recent` leaves of it.
      recent: newest tokens that never leave; None is half the budget (under `citrus` none).
      chunk: tokens of the context read between two evictions.
      over_group: how the query heads of a kv head share a score, `mean` or `max`.
      normalize: rank by the mean over the queries that could see a token, not by their sum, which
        favours the oldest.
      positions: `true` (the authors' eviction class) or `shifted` (their streaming class).
      protocol: `own` (the paper), or `citrus` (as a baseline of CItruS, section 5.2).
    """

    budget: int = 1024
    recent: int | None = None
    chunk: int = 256
    over_group: Literal["mean", "max"] = "mean"
    normalize: bool = False
    positions: eviction.Positions = "true"
    protocol: eviction.Protocol = "own"

    def __post_init__(self) -> None:
        if self.recent is not None and self.recent < 0:
            raise ConfigError(f"H2O: recent must be at least 0, got {self.recent}")
        eviction.check(self, kept=max(self.window, 1))

    @property
    def window(self) -> int:
        """Newest tokens that never leave."""
        if self.recent is None:
            return self.budget // 2 if self.protocol == "own" else 0
        return self.recent

    def init_cache(self, shape: CacheShape) -> BudgetCache:
        return eviction.empty_cache(self, shape, statistics=1)

    def attend(
        self, new: QKV, cache: BudgetCache, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, BudgetCache]:
        q, k, _ = new
        valid_B = segment.valid_of(CHUNK_ROWS)
        if eviction.only_joins(self, segment):
            return eviction.read_and_append(self, new, cache, valid_B, ctx)
        seen = eviction.look(self, new, cache, valid_B, ctx)
        if self.over_group == "mean":
            mass_BKU = seen.mass() / (q.shape[2] // k.shape[2])
        else:
            mass_BKU = seen.mass(over_group="max")
        sums = eviction.accumulated(cache, mass_BKU[..., None])
        scores_BKU = sums[..., 0]
        if self.normalize:
            scores_BKU = scores_BKU / _queries(cache, seen)
        # Under `citrus` the segment's tokens never compete: the window lies before them.
        end_B = seen.length + (seen.valid if self.protocol == "own" else 0)
        newest_BU = seen.order >= (end_B - self.window)[:, None]
        scores_BKU = jnp.where(newest_BU[:, None], jnp.inf, scores_BKU)
        return (seen.out, seen.lse), eviction.evict(self, cache, seen, scores_BKU, segment, sums)

    validate = eviction.validate
    reach = eviction.reach
    segments = eviction.segments
    finish = eviction.finish
    fork = eviction.fork
    read_bytes = eviction.read_bytes


def _queries(cache: BudgetCache, seen: eviction.Look) -> Int[Array, "B K U"]:
    """How many queries could see each slot and token: its own and all after it."""
    end_B11 = (cache.position + seen.valid)[:, None, None]
    new_BT = cache.position[:, None] + jnp.arange(seen.k.shape[1])
    new_BKT = jnp.broadcast_to(new_BT[:, None], (*cache.token.shape[:2], new_BT.shape[1]))
    return end_B11 - jnp.concatenate([cache.token, new_BKT], axis=2)
