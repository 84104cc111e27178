"""CItruS with an individual cache for the instruction: two threads, each with what it looks at.

Bai et al. 2024, section 4.2 (equations 4 and 5); `citrus` says what is common. The language thread
is standard chunked state eviction: the chunk attends to its cache, which keeps what chunks look
at. The task thread's cache keeps what the instruction looks at, and is all that the instruction
sees. Keys and values of a chunk join both, as the language thread computed them; both caches lose
tokens by scores taken before either changed. At the end of the context the language thread's cache
is dropped, its memory is free, and the task thread's answers. Cost: twice the memory of `Citrus`
while the context is read, the same computation.
"""

import dataclasses
from typing import Any

import jax

from jax_longctx.caches import BudgetCache, empty_budget_cache
from jax_longctx.contract import (
    CHUNK_ROWS,
    INSTRUCTION_ROWS,
    QKV,
    Attended,
    CacheShape,
    LayerContext,
    Registered,
    Segment,
    Stage,
    method,
)
from jax_longctx.methods import citrus
from jax_longctx.parts import eviction, instruction
from pallas_kernels.lse import side_by_side

__all__ = ["CitrusIndividual", "ThreadCaches"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ThreadCaches:
    """One cache a thread while the context is read; rows have the same lengths in both."""

    language: BudgetCache
    task: BudgetCache


@method(source="Bai et al. 2024 (CItruS), section 4.2")
class CitrusIndividual(Registered):
    """CItruS with one cache for the text and one for the instruction.

    Attributes:
      budget: tokens that each cache of a layer holds, the newest chunk among them (k + c).
      chunk: tokens of the context read between two evictions (c).
      sink: first tokens that never leave (appendix I; the paper's default is 0).
      score: what ranks a token, the `probability` or the `logit` that it is looked at with.
    """

    budget: int = 1024
    chunk: int = 256
    sink: int = 0
    score: instruction.Score = "probability"

    query_aware = True
    needs_question = True

    def init_cache(self, shape: CacheShape) -> ThreadCaches:
        # Only the task thread's will hold question and answer.
        return ThreadCaches(
            empty_budget_cache(shape, self.budget, grows=False),
            eviction.empty_cache(self, shape),
        )

    def attend(
        self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, Any]:
        if segment.role != "probe_and_context":
            return citrus.attend_alone(self, new, cache, segment, ctx)
        chunk = instruction.look(self, new, cache.language, segment, ctx, CHUNK_ROWS)
        probe = instruction.look(self, new, cache.task, segment, ctx, INSTRUCTION_ROWS)
        # The chunk before the task thread's slots, which are as many as the other thread's.
        joins = dataclasses.replace(
            probe, k=chunk.k, v=chunk.v, store_k=chunk.store_k, valid=chunk.valid
        )
        by_chunk = instruction.layer_scores(self, chunk, chunk, ctx)
        by_probe = instruction.layer_scores(self, probe, joins, ctx)
        cache = ThreadCaches(
            eviction.evict(self, cache.language, chunk, by_chunk, segment),
            eviction.evict(self, cache.task, joins, by_probe, segment),
        )
        parts = (chunk.out, chunk.lse), (probe.out, probe.lse)
        return side_by_side(*parts), cache

    def finish(self, cache: Any, ctx: LayerContext, stage: Stage, reserve: int) -> BudgetCache:
        """The task thread's cache alone."""
        return cache.task

    __post_init__ = citrus.check
    positions = instruction.positions
    protocol = instruction.protocol
    validate = eviction.validate
    reach = eviction.reach
    segments = instruction.segments
    fork = eviction.fork
    read_bytes = eviction.read_bytes
