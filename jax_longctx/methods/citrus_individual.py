"""CItruS with an individual cache for the instruction: two threads, each with its own cache.

Bai et al. 2024, section 4.2 (equations 4 and 5); see `citrus` for the rest. The language thread is
standard chunked state eviction: the chunk attends to its cache, which keeps what chunks attend to.
The instruction sees the task thread's cache alone, which keeps what the instruction attends to.
Keys and values of a chunk join both caches, as the language thread computed them. Both caches evict
by scores from before the chunk. At the end of the context the language thread's cache is freed. The
answer is decoded over the task thread's cache. Cost: twice the memory of `Citrus` during prefill,
the same computation.
"""

import dataclasses
from typing import Any

import jax

from jax_longctx.caches import BudgetCache, empty_budget_cache
from jax_longctx.contract import (
    INSTRUCTION_ROWS,
    QKV,
    CacheShape,
    LayerContext,
    Segment,
    Stage,
    WithCache,
    method,
)
from jax_longctx.parts.by_instruction import ByLayer
from pallas_kernels.common import side_by_side


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ThreadCaches:
    """One cache for each thread of prefill; rows have the same lengths in both."""

    language: BudgetCache
    task: BudgetCache

    @property
    def step_bytes(self) -> int:
        return self.language.step_bytes + self.task.step_bytes


@method(source="Bai et al. 2024 (CItruS), section 4.2")
class CitrusIndividual(ByLayer):
    """CItruS with one cache for the text and one for the instruction."""

    def init_cache(self, shape: CacheShape) -> ThreadCaches:
        # Only the task thread's will hold question and answer.
        language = empty_budget_cache(shape, self.budget, grows=False)
        return ThreadCaches(language, super().init_cache(shape))

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        if segment.role != "probe_and_context":
            return super().attend(new, cache, segment, ctx)
        chunk = self.look(new, cache.language, segment, ctx)
        probe = self.look(new, cache.task, segment, ctx, INSTRUCTION_ROWS)
        # The chunk after the task thread's slots, which are as many as the other thread's.
        joins = dataclasses.replace(chunk, cache=cache.task, past_k=probe.past_k, instruction=probe)
        part = side_by_side((chunk.out, chunk.lse), (probe.out, probe.lse))
        return part, ThreadCaches(self.evict(chunk), self.evict(joins))

    def finish(self, cache: Any, ctx: LayerContext, stage: Stage, reserve: int) -> Any:
        """The task thread's cache alone goes on."""
        task = cache.task if stage == "context" else cache
        return super().finish(task, ctx, stage, reserve)
