"""FreePages: a scope at free positions, of the pages whose digests promise most.

Parts of three papers, put together:

- The scope and its positions are ReAttention's (Liu et al. 2024, section 2.2). Keys are cached
  before rotary embedding. Every chunk of the context and every generated token attends [sink |
  chosen spans | local] in the text's order at positions 0, 1, 2, ..., so a model reads any length
  within the positions that it was trained to.
- The ranking is Quest's (Tang et al. 2024, section 3) or ArkVale's (Chen et al. 2024, section 4).
  Each page of `page_size` tokens has a digest of its keys, and a query scores a page by the largest
  q.k that the digest allows. Both are before rotary embedding here: the scores do not depend on
  distance, and hold beyond the trained length. Every query head of every new token names its
  `count` best pages; the pages of most votes stay, and the span of `span` tokens around each.
- The rest is estimated as in RESA (section 4) if `lam` is not 0, in generated tokens. A token that
  is left out has no position. It gets one constant distance, as in InfLLM: the mean query is
  rotated to `local`, and keys are not rotated. RESA's equations hold unchanged for such logits.

With one token a page the digests are the keys, and the method is ReAttention.

Bytes of a decode step, as a share of full attention's: 1 / (2 page_size) for `centroid`, twice
that for the other digests, and the scope over the length. ReAttention reads all keys, a half.
Memory is full attention's and the digests; under `offload="host"` the device keeps the digests,
and fetches what the scopes hold. A chunk costs 2 N T (L / page_size) H operations for each vector
of a digest, and attention over the scope.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import (
    Listed,
    Reads,
    Scope,
    SelectiveCache,
    Votes,
    page_of_spans,
    pages_of_run,
)
from jax_longctx.contract import (
    ENDS,
    QKV,
    Attended,
    CacheShape,
    Feed,
    LayerContext,
    Segment,
    WithCache,
    mark_ends,
    method,
)
from jax_longctx.methods.arkvale import ArkVale
from jax_longctx.methods.quest import Quest
from jax_longctx.methods.reattention import WHOLE, ReAttention
from jax_longctx.models.config import ModelConfig
from jax_longctx.parts import residual, voted_keys
from jax_longctx.parts.appending import Appending
from jax_longctx.parts.named_pages import best_pages
from jax_longctx.parts.residual import Background, ResaCache
from jax_longctx.parts.selecting import SelectingPages
from jax_longctx.parts.sparse_decode import Selected
from jax_longctx.parts.unit_memory import GRANULE
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.voted_slots import Spans


@method(source="composed here, of ReAttention, Quest, ArkVale and RESA")
class FreePages(Appending):
    """A scope of fixed size, chosen by digests of pages, that reads any length at few bytes.

    Attributes:
      digest: `centroid` (the mean key) and the cuboids are ArkVale's, `bounds` is Quest's.
      page_size: tokens of a page.
      count: pages that a query head names.
      budget: tokens of the scope that stay after the vote, `span` for each page.
      span: tokens around the middle of a chosen page, a page at least.
      sink, local: first and newest tokens that are always attended.
      chunk: tokens of the context that choose together.
      lam: weight of RESA's estimate of the tokens left out; 0 leaves it away.
    """

    digest: Literal["centroid", "bounds", "cuboid-mean", "cuboid-center"] = "centroid"
    page_size: int = 8
    count: int = 4
    budget: int = 2048
    span: int = 32
    sink: int = 32
    local: int = 1024
    chunk: int = 512
    lam: float = 0.0

    phase = "both"
    query_aware = looks_ahead = raw_keys = True

    def __post_init__(self) -> None:
        self.at_least(0, "sink")
        self.at_least(1, "page_size", "chunk")
        self.fraction("lam")
        if not 1 <= self.count <= 16:
            raise self.refused(f"count must be from 1 to 16, got {self.count}")
        if GRANULE % self.page_size:
            raise self.refused(f"page_size must divide {GRANULE}, got {self.page_size}")
        if self.span < self.page_size:
            raise self.refused(f"span {self.span} must hold a page of {self.page_size} tokens")
        if self.budget < self.span:
            raise self.refused(f"budget {self.budget} must hold a span of {self.span} tokens")
        if self.local < max(self.chunk, self.page_size):
            raise self.refused(
                f"local {self.local} must hold a chunk of {self.chunk} tokens and a page of "
                f"{self.page_size}; raise local or lower chunk"
            )

    @property
    def pages(self) -> SelectingPages:
        """The selector whose digests rank pages."""
        if self.digest == "bounds":
            return Quest(page_size=self.page_size)
        return ArkVale(page_size=self.page_size, local=self.local, digest=self.digest)

    @property
    def kept(self) -> int:
        """Pages that stay after the vote."""
        return self.budget // self.span

    @property
    def scope_size(self) -> int:
        """Most tokens that are attended at once."""
        return self.sink + self.kept * self.span + self.local

    def validate(self, config: ModelConfig) -> None:
        """Refuses a scope beyond the trained length."""
        if self.scope_size > config.trained_length:
            raise self.refused(
                f"sink {self.sink} + budget {self.kept * self.span} + local {self.local} = "
                f"{self.scope_size} positions, the model was trained to {config.trained_length}; "
                "lower budget or local"
            )

    def reach(self, config: ModelConfig, tokens: int) -> int:
        return min(tokens, self.scope_size)

    @property
    def cannot_offload(self) -> str | None:
        """None without RESA's estimate."""
        return "lam above 0 begins each answer with all keys and values" if self.lam else None

    @property
    def cannot_adopt(self) -> str | None:
        """None without RESA's estimate."""
        return "lam above 0 begins with the queries of the whole text" if self.lam else None

    def adopt(self, cache: SelectiveCache, ctx: LayerContext, queries: Array | None = None) -> Any:
        store = cache.store
        none_B, slots = jnp.zeros_like(store.length), store.sizes[2] * ctx.seq_size
        return self.pages.refreshed(cache, none_B, slots, ctx)

    @property
    def reads(self) -> Reads:
        """What a chunk or step reads: the scope. The newest pages are summarised anew."""
        page = page_of_spans(self.span)
        return Reads(
            page=page,
            first=self.sink,
            newest=self.local + 2 * self.page_size,
            chosen=self.kept * pages_of_run(self.span, page),
            chunk=self.chunk,
            apart=False,
        )

    def init_cache(self, shape: CacheShape) -> SelectiveCache:
        cache = self.pages.empty_selective(shape, self.reads)
        if not self.lam:
            return cache
        background = residual.empty_background(shape)
        return ResaCache(**vars(cache), background=background)

    def segments(self, feed: Feed) -> Iterable[Segment]:
        reads = ReAttention(global_size=self.sink, local_size=self.local, chunk=self.chunk)
        segments = reads.segments(feed)
        return mark_ends(segments, feed) if self.lam else segments

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        (q, k, v), valid_B, past_B = new, segment.valid_of(), cache.store.length
        alone, rank = q.shape[1] == 1, segment.variant != WHOLE
        store = cache.store.append(k, v, valid_B, ctx)
        cache = dataclasses.replace(cache, store=store)

        def choose(cache: SelectiveCache) -> Scope | Listed:
            return self.choose(q, cache, valid_B, ctx, rank=rank)

        def refresh(cache: SelectiveCache, after: Any = None) -> SelectiveCache:
            return self.pages.refreshed(cache, past_B, q.shape[1], ctx, after)

        # A lone token's page is not ranked: its digest need not come first.
        scope, cache = cache.chosen(choose, refresh, late=alone)
        store = store.fetch(scope, valid_B, ctx, step=alone)
        cache = dataclasses.replace(cache, store=store)
        part = voted_keys.attend_scope(new, store, valid_B, scope, ctx)
        part, cache = cache.written_before(part, late=alone)
        if self.lam:
            part, background = self.estimate(new, part, cache, scope, segment, ctx)
            cache = dataclasses.replace(cache, background=background)
        if segment.role == "decode":
            kept_BN = cache.kept + (scope.number * valid_B)[:, None]
            cache = dataclasses.replace(cache, kept=kept_BN, steps=cache.steps + valid_B)
        return part, cache

    def stop(self, length: Int[Array, " B"]) -> Int[Array, " B"]:
        """The first slot of the local part."""
        return length - jnp.clip(length - self.sink, 0, self.local)

    def pages_before(self, stop: Int[Array, " B"]) -> Int[Array, " B"]:
        """The page behind the last one that is ranked.

        Pages that the sink or the local part cut take part with their whole digests.
        """
        return jnp.where(stop > self.sink, -(-stop // self.page_size), 0)

    def choose(
        self,
        q: Float[Array, "B T N H"],
        cache: SelectiveCache,
        valid: Int[Array, " B"],
        ctx: LayerContext,
        *,
        rank: bool = True,
    ) -> Scope | Listed:
        """The scope of the `valid` newest tokens by raw queries."""
        length, sink, page = cache.store.length, self.sink, self.page_size
        stop_B = self.stop(length)
        if not rank:
            none = jnp.zeros((len(length), 0), jnp.int32)
            return Scope(none, none, stop_B, length, sink, self.span, self.local, self.kept)
        assert cache.digests is not None
        ranked = voted_keys.KeySpan(sink // page, self.pages_before(stop_B), valid, page)
        named_BTNC = best_pages(q, cache.digests, ranked, ctx, count=self.count)
        spans = Spans(self.kept, self.span, sink, page)
        return cache.store.select(Votes(named_BTNC, stop_B, spans, self.local), ctx)

    def estimate(
        self,
        new: QKV,
        part: Attended,
        cache: ResaCache,
        scope: Scope | Listed,
        segment: Segment,
        ctx: LayerContext,
    ) -> tuple[Attended, Background]:
        """`part`, in decode with RESA's estimate of what the scope leaves out; the new prior."""
        (q, k, v), store, background = new, cache.store, cache.background
        valid_B = segment.valid_of()
        # A rotary base that follows the length must follow the scope's, which bounds distances.
        near = dataclasses.replace(ctx, total=jnp.minimum(ctx.total, self.scope_size))
        far = near.rotate_queries(q, jnp.full(q.shape[:2], self.local, jnp.int32))
        far = ctx.for_raw_keys(far)
        if segment.role != "decode":
            background = residual.observe(background, far, k, valid_B, store.length)
            if segment.variant == ENDS:
                background = residual.begin_answer(background, store, segment.ends, ctx)
            return part, background
        background = residual.observe(background, None, k, valid_B, store.length)
        background = residual.grow(background, k, v, valid_B, ctx)
        prior = residual.prior_of(background, far, ctx)
        slots_BX, _, read_B = scope.own(ctx.slots(store.sizes[2]))
        keys, values = store.read(slots_BX[:, None])
        behind = decode_attention(prior.query, keys, values, read_B, scale=ctx.scale)
        behind = ctx.seq_merge(*behind)
        kept_BN = jnp.broadcast_to(scope.number[:, None], prior.lse.shape)
        everything_BN = kept_BN == store.length[:, None]
        chosen = Selected(*part, *behind, kept_BN)
        part = residual.combine(chosen, prior, everything_BN, lam=self.lam)
        return part, background

    def read_bytes(self, cache: Any, length: int) -> int:
        # All digests, empty pages' too; keys and values of the scope, whose spans are at most
        # those that a token's heads name. RESA's estimate reads the scope once more.
        spans = min(self.kept, cache.kept.shape[1] * self.count)
        most = min(length, self.sink + spans * self.span + self.local)
        lines = most * cache.store.nbytes // cache.store.sizes[2]
        digests = sum(leaf.nbytes for leaf in jax.tree.leaves(cache.digests))
        return digests + lines * (2 if self.lam else 1)
