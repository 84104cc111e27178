"""ReAttention: full attention over a finite scope that every layer chooses anew at every step.

Liu et al. 2024, sections 2.2 and 3.1. All keys stay, cached before rotary embedding. For each
chunk of the context and each generated token, each layer

1. appends the new keys and values; L tokens are cached now. Up to L = g + w all are attended;
2. beyond that, cuts the cache into global (first g), middle, and local (last w, which hold the
   chunk). Every query head of every new token names its k best keys of the middle by dot product,
   without positions;
3. keeps the k' keys of most votes and the span of m slots around each (`parts.voted_keys`);
4. attends [global | kept | local] in the text's order at positions 0, 1, 2, ...: rotary embedding
   never sees a position beyond g + k' m + w, so a model reads any length within its own window.

With k = 0 it is the paper's StreamingLLM ablation. The question's last token is read alone, as
generated tokens are.

Cost of a chunk at length L: 2 N T L H operations to rank, plus attention over the fixed scope;
of a decode step: all keys read once (no values), and the scope. Memory is full attention's. Under
`offload="host"` values lie in the host's memory, of which those of the scope are fetched.

Differs from the authors' released code: each row of a batch chooses for itself, scores are float32,
scores that differ by rounding alone tie, ties go to the lower slot (`parts.voted_keys`), empty
candidates cast no votes, and a span has exactly m slots, even or odd. Here the ranking is exact
(theirs keeps the best key of each tile of 128), decode reads the right kv heads (theirs reads h mod
K), and the local part has w tokens (theirs up to 128 fewer, so that the middle is whole tiles).
"""

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jax_longctx.caches import (
    Listed,
    Reads,
    Scope,
    Store,
    Votes,
    empty_store,
    page_of_spans,
    pages_of_run,
    written_after,
)
from jax_longctx.contract import (
    QKV,
    Attended,
    CacheShape,
    Feed,
    LayerContext,
    Segment,
    WithCache,
    chunk_segments,
    method,
    question_segments,
)
from jax_longctx.models.config import ModelConfig
from jax_longctx.parts import voted_keys
from jax_longctx.parts.appending import Appending
from pallas_kernels.voted_slots import Spans

# The variant of segments that attend to all cached tokens.
WHOLE = "whole"


@method(source="Liu et al. 2024, sections 2.2 and 3.1")
class ReAttention(Appending):
    """A scope of fixed size that every layer chooses anew from the whole context.

    Attributes:
      global_size: g, first tokens that are always attended.
      local_size: w, newest tokens that are always attended.
      span: m, slots around a kept key.
      count: k, keys that a query head names; 0 attends the global and local part alone.
      kept: k', keys that stay after the vote.
      chunk: c, tokens of the context that choose together.
    """

    global_size: int = 32
    local_size: int = 4096
    span: int = 32
    count: int = 4
    kept: int = 127
    chunk: int = 512

    phase = "both"
    query_aware = looks_ahead = True
    cannot_offload = cannot_adopt = None
    raw_keys = True

    def __post_init__(self) -> None:
        self.at_least(0, "global_size")
        self.at_least(1, "span", "kept", "chunk")
        if not 0 <= self.count <= 16:
            raise self.refused(f"count must be from 0 to 16, got {self.count}")
        if self.local_size < self.chunk:
            raise self.refused(
                f"local_size {self.local_size} must hold a chunk of "
                f"{self.chunk} tokens; raise local_size or lower chunk"
            )

    @property
    def scope_size(self) -> int:
        """Most tokens that are attended at once."""
        return self.global_size + self.local_size + (self.kept * self.span if self.count else 0)

    def validate(self, config: ModelConfig) -> None:
        """Refuses a scope beyond the trained length."""
        size = self.scope_size
        if size > config.trained_length:
            middle = f" + kept {self.kept} * span {self.span}" if self.count else ""
            raise self.refused(
                f"global_size {self.global_size}{middle} + local_size "
                f"{self.local_size} = {size} positions, the model was trained to "
                f"{config.trained_length}; lower local_size or kept"
            )

    def reach(self, config: ModelConfig, tokens: int) -> int:
        return min(tokens, self.scope_size)

    def init_cache(self, shape: CacheShape) -> Store:
        return empty_store(shape, self.reads)

    @property
    def reads(self) -> Reads:
        """What a chunk or step reads: every key to rank them, and the scope's values."""
        page = page_of_spans(self.span)
        spans = self.kept if self.count else 0
        return Reads(
            page=page,
            first=self.global_size,
            newest=self.local_size,
            chosen=spans * pages_of_run(self.span, page),
            chunk=self.chunk,
            apart=False,
            all_keys=self.count > 0,
        )

    def segments(self, feed: Feed) -> Iterable[Segment]:
        rows = feed.rows
        if feed.stage == "question":
            return question_segments(rows, self.chunk)
        # The first chunk is fed in pieces, which changes nothing where all tokens are attended.
        cut = self.global_size + self.local_size
        first, rest = [row[:cut] for row in rows], [row[cut:] for row in rows]
        done = np.array([not row for row in rest])
        whole = (
            dataclasses.replace(segment, ends=np.asarray(segment.ends) & done, variant=WHOLE)
            for segment in chunk_segments(first, self.chunk, "context")
        )
        return itertools.chain(whole, chunk_segments(rest, self.chunk, "context"))

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        part, cache, _ = self.attend_chosen(new, cache, segment, ctx)
        return part, cache

    def attend_chosen(
        self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, Any, Scope | Listed]:
        """What `attend` returns, and the scope that `choose` gave it."""
        (q, k, v), valid_B, sizes = new, segment.valid_of(), None
        rank = segment.variant != WHOLE
        if rank and self.count and q.shape[1] == 1:
            # A lone token is not ranked, so its write need not come first.
            sizes = voted_keys.key_sizes(cache.all_keys, self.stop(cache.length + valid_B), ctx)
            cache, sizes = written_after(cache, sizes)
        cache = cache.append(k, v, valid_B, ctx)
        scope = self.choose(q, cache, valid_B, ctx, rank=rank, sizes=sizes)
        cache = cache.fetch(scope, valid_B, ctx, step=q.shape[1] == 1)
        part = voted_keys.attend_scope(new, cache, valid_B, scope, ctx)
        return part, cache, scope

    def stop(self, length: Int[Array, " B"]) -> Int[Array, " B"]:
        """The first slot of the local part. From there on no slot is ranked."""
        return length - jnp.clip(length - self.global_size, 0, self.local_size)

    def choose(
        self,
        q: Float[Array, "B T N H"],
        cache: Store,
        valid: Int[Array, " B"],
        ctx: LayerContext,
        *,
        rank: bool = True,
        sizes: Float[Array, "B K"] | None = None,
    ) -> Scope | Listed:
        """The scope of the `valid` newest tokens by raw queries.

        Args:
          sizes: what `voted_keys.key_sizes` gives for the cache, where the caller has it.
        """
        length, g, w = cache.length, self.global_size, self.local_size
        stop_B = self.stop(length)
        if not rank or not self.count:
            none = jnp.zeros((len(length), 0), jnp.int32)
            return Scope(none, none, stop_B, length, g, self.span, w, self.kept)
        ranked = (q, cache.all_keys, voted_keys.KeySpan(g, stop_B, valid), ctx)
        named_BTNC = voted_keys.best_keys(*ranked, count=self.count, sizes=sizes)
        return cache.select(Votes(named_BTNC, stop_B, Spans(self.kept, self.span, g), w), ctx)

    def read_bytes(self, cache: Store, length: int) -> int:
        # All keys are ranked, empty slots too; the scope's keys and values are gathered.
        attended = min(length, self.scope_size) * cache.nbytes // cache.sizes[2]
        # Half of the store's bytes are keys.
        return attended + (cache.nbytes // 2 if self.count else 0)
