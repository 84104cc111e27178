"""CItruS: read in chunks, keep what a chunk or the instruction looks at, layer by layer.

Bai et al. 2024, sections 4.1 (chunked state eviction, CSE), 4.2 (instruction-aware) and 4.3; k is
`budget - chunk`, c is `chunk`. For each chunk of the text

1. the chunk attends to the whole cache (up to k + c slots) and to itself;
2. every cached slot is scored by the probability that it gets, on average over all query heads of
   the layer and over the rows that look: the chunk (`CitrusStandard`), or the instruction in its
   place (`Citrus`, one shared cache; `CitrusIndividual`, with a cache of its own);
3. the k best stay, the same tokens for all heads, and the chunk joins.

After the context the instruction evicts once more, down to k, is read, and the answer grows the
cache. Keys are cached before rotary embedding and stand at their slots. Cost: attention over
k + c / 2 more slots a token, one more product with the cached keys for the scores, and with an
instruction its rows once more a chunk.

Eq. 1 names a scaled product; the authors' code ranks by the softmax, which is the default here.
Section 4.2 can be read as evicting before the chunk is encoded (`evict_first`); figure 5 and the
code encode first. Scores come in float32 from the log-sum-exp of the attention that was computed,
where the code keeps every probability in the model's dtype; of equal scores the older token stays.
"""

import dataclasses
from typing import Any

from jax_longctx.caches import BudgetCache
from jax_longctx.contract import (
    CHUNK_ROWS,
    INSTRUCTION_ROWS,
    QKV,
    Attended,
    CacheShape,
    LayerContext,
    Registered,
    Segment,
    method,
)
from jax_longctx.errors import ConfigError
from jax_longctx.parts import eviction, instruction
from pallas_kernels.lse import side_by_side

__all__ = [
    "Citrus",
    "attend_alone",
    "check",
]


def check(self: Any) -> None:
    """Raises ConfigError unless a chunk fits into the budget beside the first `sink` tokens."""
    if self.sink < 0:
        raise ConfigError(f"{type(self).__name__}: sink must be at least 0, got {self.sink}")
    eviction.check(self, kept=self.sink)


def _init_cache(self: Any, shape: CacheShape) -> BudgetCache:
    return eviction.empty_cache(self, shape)


def attend_alone(
    self: Any, new: QKV, cache: BudgetCache, segment: Segment, ctx: LayerContext
) -> tuple[Attended, Any]:
    """A segment of one row group: what reads the text alone, probes, or only joins."""
    valid_B = segment.valid_of(CHUNK_ROWS)
    if eviction.only_joins(self, segment):
        return eviction.read_and_append(self, new, cache, valid_B, ctx)
    seen = eviction.look(self, new, cache, valid_B, ctx)
    scores_BKU = instruction.layer_scores(self, seen, seen, ctx)
    return (seen.out, seen.lse), eviction.evict(self, cache, seen, scores_BKU, segment)


@method(source="Bai et al. 2024 (CItruS), section 4.2")
class Citrus(Registered):
    """Reads in chunks and keeps what the instruction looks at.

    Attributes:
      budget: tokens that a layer's cache holds, the newest chunk among them (k + c).
      chunk: tokens of the context read between two evictions (c).
      sink: first tokens that never leave (appendix I; the paper's default is 0).
      score: what ranks a token, the `probability` or the `logit` that it is looked at with.
      evict_first: the instruction evicts before the chunk is encoded, which then sees k tokens.
    """

    budget: int = 1024
    chunk: int = 256
    sink: int = 0
    score: instruction.Score = "probability"
    evict_first: bool = False

    query_aware = True
    needs_question = True

    def attend(
        self, new: QKV, cache: BudgetCache, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, Any]:
        q, k, v = new
        if segment.role != "probe_and_context":
            return attend_alone(self, new, cache, segment, ctx)
        probe = instruction.look(self, new, cache, segment, ctx, INSTRUCTION_ROWS)
        if self.evict_first:
            looking = dataclasses.replace(segment, role="probe")
            cache = eviction.evict(
                self, cache, probe, instruction.layer_scores(self, probe, probe, ctx), looking
            )
            valid_B = segment.valid_of(CHUNK_ROWS)
            columns = segment.group(CHUNK_ROWS).columns
            text = q[:, columns], k[:, columns], v[:, columns]
            part, cache = eviction.read_and_append(self, text, cache, valid_B, ctx)
            return side_by_side(part, (probe.out, probe.lse)), cache
        chunk = instruction.look(self, new, cache, segment, ctx, CHUNK_ROWS)
        cache = eviction.evict(
            self, cache, chunk, instruction.layer_scores(self, probe, chunk, ctx), segment
        )
        parts = (chunk.out, chunk.lse), (probe.out, probe.lse)
        return side_by_side(*parts), cache

    __post_init__ = check
    positions = instruction.positions
    protocol = instruction.protocol
    validate = eviction.validate
    reach = eviction.reach
    init_cache = _init_cache
    segments = instruction.segments
    finish = eviction.finish
    fork = eviction.fork
    read_bytes = eviction.read_bytes
