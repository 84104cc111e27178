"""The kinds of methods that select tokens or pages for each query.

Prefill and question are exact attention over an append-only cache (keys after rotary embedding).
A decode step attends

- always the first `sink` and the last `local` tokens;
- of what lies between them the best pages, as many as the budget says (see `head_budgets`).

A method defines the digest of a page (`summarise`) and the score of a page for a query (`scores`).
The first `skip_layers` stay exact.

Every shard of the slots scores its own pages. Under a uniform budget it sends its best pages with
their scores, and all shards select from those; other budgets need all scores.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import PageDigests, Reads, SelectiveCache, Store, empty_store
from jax_longctx.contract import QKV, CacheShape, LayerContext, Method, Segment, WithCache
from jax_longctx.models.config import ModelConfig
from jax_longctx.parts.appending import Appending, Exact
from jax_longctx.parts.head_budgets import (
    Allocation,
    Enough,
    Granularity,
    ada_kv,
    best_pages,
    progressive,
    share,
    softmax_mass,
)
from jax_longctx.parts.sparse_decode import (
    Lists,
    Margins,
    Prior,
    Selected,
    Span,
    Step,
    listed,
)
from pallas_kernels.select_pages import Best

# Caches and their shards are whole numbers of this many slots, so that no page is cut.
_GRANULE = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selecting(Appending):
    """A method whose decode steps attend the tokens of the highest scores.

    Attributes:
      budget: tokens that each head attends beside the fixed ones; under PSA at most.
      ratio: the budget as a share of the prompt, in place of `budget`.
      sink: first tokens that are always attended.
      local: last tokens that are always attended.
      granularity: which heads select together.
      skip_layers: first layers that stay exact.
      allocation: `uniform`; `ada-floor`, `ada-blend` (Ada-KV); `psa-oracle`, `psa-estimate` (PSA).
      epsilon: PSA stops at this share of the attention.
    """

    budget: int = 1024
    ratio: float | None = None
    sink: int = 4
    local: int = 64
    granularity: Granularity = "query_head"
    skip_layers: int = 0
    allocation: Allocation = "uniform"
    epsilon: float = 0.95

    phase = "decode"
    query_aware = True
    cannot_adopt = None
    # A token is a page of its own (see `SelectingPages`).
    page_size = 1
    # Whether heads that select together average `scores`, or their softmax.
    pools: ClassVar[Literal["mass", "scores"]] = "mass"

    def __post_init__(self) -> None:
        self.at_least(1, "budget")
        self.at_least(0, "sink", "local", "skip_layers")
        self.fraction("ratio", "epsilon", above_zero=True)
        needed = {"ada": "kv_head", "psa": "query_head"}.get(self.allocation[:3], self.granularity)
        if self.granularity != needed:
            raise self.refused(
                f"allocation {self.allocation} needs granularity {needed}, got {self.granularity}"
            )

    @property
    def page_tokens(self) -> int:
        return self.page_size

    # What a method defines.

    def summarise(
        self, keys: Float[Array, "B K P Z H"], held: Bool[Array, "B P Z"]
    ) -> PageDigests | None:
        """The digest of each page from its held keys, finite for empty pages; None for none."""

    def scores(
        self, q: Float[Array, "B N H"], cache: SelectiveCache, ctx: LayerContext
    ) -> Float[Array, "B N P"]:
        """The score of each of this shard's pages for each query head, on the scale of q.k."""
        raise NotImplementedError(f"{self.name}: a method that selects defines scores")

    # The duties.

    def validate(self, config: ModelConfig) -> None:
        """Every model can be decoded sparsely."""

    def of_layer(self, layer: int, layers: int) -> Method:
        """Full attention in layers that stay exact. Their cache, read whole, is on the device."""
        return Exact() if layer < self.skip_layers else self

    def init_cache(self, shape: CacheShape) -> Any:
        return self.empty_selective(shape, self.reads(shape))

    def empty_selective(self, shape: CacheShape, reads: Reads) -> SelectiveCache:
        """An empty cache with digests of pages, whose store is read so."""
        store = empty_store(shape, reads)
        pages = shape.slots // self.page_size
        keys = (shape.batch, shape.num_kv_heads, pages, self.page_size, shape.head_dim)
        held = jax.ShapeDtypeStruct((shape.batch, pages, self.page_size), jnp.bool_)
        kept = jax.eval_shape(self.summarise, jax.ShapeDtypeStruct(keys, shape.dtype), held)
        digests = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), kept)
        heads = (shape.batch, shape.num_heads)
        prompt, kept, steps = (jnp.zeros(n, jnp.int32) for n in (shape.batch, heads, shape.batch))
        return SelectiveCache(store, digests, prompt, kept, steps)

    def reads(self, shape: CacheShape) -> Reads:
        """What a layer's steps read of its store."""
        page, apart = self.page_size, self.granularity != "layer"
        lists = shape.num_heads // shape.num_kv_heads if self.granularity == "query_head" else 1
        return Reads(
            page=page,
            first=-(-self.sink // page) * page,
            newest=self.local + 2 * page,
            chosen=lists * self.most_pages(shape.slots, shape.slots // page),
            chunk=shape.chunk,
            apart=apart,
        )

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        if segment.role == "decode":
            q, _, cache = self.append_token(new, cache, segment, ctx)
            valid_B = segment.valid_of()
            chosen = self.attend_selected(q, cache, ctx, valid=valid_B)
            return (chosen.out, chosen.lse), cache.counted(chosen, valid_B)
        past_B = cache.store.length
        part, store = super().attend(new, cache.store, segment, ctx)
        cache = dataclasses.replace(cache, store=store, prompt=store.length)
        return part, self.refreshed(cache, past_B, new[0].shape[1], ctx)

    def adopt(
        self, cache: Any, ctx: LayerContext, queries: Float[Array, "B N H"] | None = None
    ) -> Any:
        """The cache whose store another method's prefill has filled: every page summarised."""
        store = cache.store
        cache = dataclasses.replace(cache, prompt=store.length)
        return self.refreshed(cache, jnp.zeros_like(store.length), store.sizes[2], ctx)

    def read_bytes(self, cache: Any, length: int) -> int:
        store = cache.store
        slots, all_keys = store.sizes[2], store.nbytes // 2
        # A group whose heads select alone reads a page once for each of them.
        times = cache.kept.shape[1] // store.sizes[1] if self.granularity == "query_head" else 1
        keys = self.attended(length, slots) * times * all_keys // slots
        # PSA also reads the visited pages' keys, and under `psa-oracle` all keys, to choose.
        visited = keys * self.allocation.startswith("psa")
        visited += all_keys * (self.allocation == "psa-oracle")
        return self.scored_bytes(cache) + visited + 2 * keys

    def scored_bytes(self, cache: SelectiveCache) -> int:
        """What `scores` reads: the keys of all tokens."""
        return cache.store.nbytes // 2

    def attended(self, length: int, slots: int) -> int:
        """Tokens that a head attends of a row of `length` tokens, at most."""
        tokens = self.most_pages(length, slots // self.page_size) * self.page_size
        return min(tokens + self.sink + self.local, length)

    # A decode step.

    def append_token(
        self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext
    ) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 K H"], Any]:
        """Query and key of a decode step, rotated, and the cache with the token."""
        q, k, v = new
        past_B = cache.store.length
        positions_B1 = cache.store.position[:, None]
        q, k = ctx.rotate_queries(q, positions_B1), ctx.rotate(k, positions_B1)
        store = cache.store.append(k, v, segment.valid_of(), ctx)
        return q, k, self.refreshed(dataclasses.replace(cache, store=store), past_B, 1, ctx)

    def refreshed(
        self, cache: Any, past: Array, added: int, ctx: LayerContext, after: Any = None
    ) -> Any:
        """The cache with up-to-date digests (`PageDigests.refreshed`)."""
        if cache.digests is None:
            return cache
        digests = cache.digests.refreshed(self, cache.store, past, added, ctx, after)
        return dataclasses.replace(cache, digests=digests)

    def attend_selected(
        self,
        q: Float[Array, "B 1 N H"],
        cache: SelectiveCache,
        ctx: LayerContext,
        prior: Prior | None = None,
        valid: Int[Array, " B"] | None = None,
    ) -> Selected:
        """The rotated query of the newest token against the fixed and the selected tokens.

        Args:
          valid: 1 for the rows that take this step; all of them unless given.
        """
        valid = jnp.ones_like(cache.store.length) if valid is None else valid
        span = self.selectable(cache.store, ctx)
        step = Step(q, cache.store, span, Margins(self.sink, self.local), valid, prior)
        fixed = step.attend_fixed(ctx) if self.allocation.startswith("psa") else None
        forced = None if fixed is None else fixed[1][:, 0]
        return step.attend(self.choose(q, cache, span, ctx, forced), fixed, ctx)

    def selectable(self, store: Store, ctx: LayerContext) -> Span:
        """What lies between the fixed tokens of each row."""
        page = self.page_size
        pages = store.sizes[2] * ctx.seq_size // page
        start_B = jnp.minimum(self.sink, store.length)
        stop_B = jnp.maximum(store.length - self.local, start_B)
        first_P = jnp.arange(pages) * page
        end_BP = jnp.minimum(first_P + page, stop_B[:, None])
        tokens_BP = jnp.maximum(end_BP - jnp.maximum(first_P, start_B[:, None]), 0)
        return Span(start_B, stop_B, tokens_BP)

    def pages_of(self, prompt: Any) -> Any:
        """Pages of each head under a uniform budget, for an int or an array of tokens."""
        tokens, larger = self.budget if self.ratio is None else share(self.ratio, prompt), max
        if not isinstance(prompt, int):
            tokens, larger = jnp.broadcast_to(tokens, prompt.shape), jnp.maximum
        return larger(tokens // self.page_size, 1)

    def most_pages(self, slots: int, pages: int) -> int:
        """The largest of `pages_of` for prompts of at most `slots` tokens, within `pages`."""
        return min(self.pages_of(slots), pages)

    def choose(
        self,
        q: Float[Array, "B 1 N H"],
        cache: Any,
        span: Span,
        ctx: LayerContext,
        forced: Float[Array, "B N"] | None = None,
    ) -> Lists:
        """The pages to attend. `forced` is for PSA: see `head_budgets.progressive`."""
        pages = span.tokens.shape[1]
        most = self.most_pages(pages * self.page_size, pages)
        count_B = jnp.minimum(self.pages_of(cache.prompt), most)
        if self.allocation == "uniform":
            lists = self.select(q, cache, span, count_B, most, ctx)
            if lists is not None:
                return Lists(lists)
        own_BNP = self.scores(q[:, 0], cache, ctx)
        kv_heads = cache.store.sizes[1]
        # Of each listed page a score and an index travel.
        few = ctx.seq_size > 1 and 2 * ctx.seq_size * most < pages
        if self.allocation == "uniform" and few:
            return Lists(self._best_of_shards(own_BNP, span, count_B, most, kv_heads, ctx))
        scores_BNP = gathered(own_BNP, span, ctx, self.page_size)
        kind, _, form = self.allocation.partition("-")
        if kind == "psa":
            enough = Enough(self.epsilon, form, count_B, most)
            return progressive(q, cache.store, span, scores_BNP, enough, ctx, forced)
        ranked = self.pooled(scores_BNP, span.tokens, kv_heads, ctx)
        if kind == "uniform":
            return Lists(best_pages(ranked, count_B, most))
        if self.pools == "scores":
            ranked = softmax_mass(ranked, span.tokens, ctx.scale)
        return ada_kv(ranked, count_B, most, ctx, blend=form == "blend")

    def select(
        self,
        q: Float[Array, "B 1 N H"],
        cache: Any,
        span: Span,
        count: Int[Array, " B"],
        most: int,
        ctx: LayerContext,
    ) -> Int[Array, "B X C"] | None:
        """The count[b] best pages, where one operation finds them; None to rank `scores`."""
        return None

    def _best_of_shards(
        self,
        own: Float[Array, "B N P"],
        span: Span,
        count: Int[Array, " B"],
        most: int,
        kv_heads: int,
        ctx: LayerContext,
    ) -> Int[Array, "B X C"]:
        """The count[b] best pages of all shards, in any order, by the scores of this shard's own.

        The best of all are among the best of their shards.
        """
        where = ctx.slots(own.shape[2], self.page_size)
        tokens_BP = where.part(span.tokens, axis=1)
        own = jnp.where((tokens_BP > 0)[:, None], own, -jnp.inf)
        ranked_BXP = self.pooled(own, tokens_BP, kv_heads, ctx, sharded=True)
        best_BXC = best_pages(ranked_BXP, count, most)
        scores_BXE = ctx.gather_seq(listed(ranked_BXP, best_BXC), axis=2)
        pages_BXE = ctx.gather_seq(where.at(best_BXC), axis=2)
        # The shards' lists are not in the pages' order: one sort by both, ties to the lowest page.
        ranks_BXE, pages_BXE = jax.lax.sort((-scores_BXE, pages_BXE), num_keys=2)
        ranks_BXC, pages_BXC = ranks_BXE[..., :most], pages_BXE[..., :most]
        some_BXC = (ranks_BXC < jnp.inf) & (jnp.arange(most) < count[:, None, None])
        return jnp.where(some_BXC, pages_BXC, -1)

    def pooled(
        self,
        scores: Float[Array, "B N P"],
        tokens: Int[Array, "B P"],
        kv_heads: int,
        ctx: LayerContext,
        *,
        sharded: bool = False,
    ) -> Float[Array, "B X P"]:
        """The scores that rank each list's pages: one list a query head or kv head.

        The pages are all, or with `sharded` this shard's.
        """
        if self.granularity == "query_head":
            return scores
        if self.pools == "mass":
            # Logits of different heads are not comparable, shares of their softmax are.
            scores = softmax_mass(scores, tokens, ctx.scale, ctx if sharded else None)
        batch, heads, pages = scores.shape
        if self.granularity == "kv_head":
            return jnp.mean(scores.reshape(batch, kv_heads, -1, pages), axis=2)  # [B, K, G, P]
        mean_BP = ctx.psum_heads(jnp.sum(scores, axis=1)) / (heads * ctx.head_shards)
        return jnp.broadcast_to(mean_BP[:, None], (batch, kv_heads, pages))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectingPages(Selecting):
    """A method whose decode steps attend the pages of the highest scores, by a digest of keys.

    Attributes:
      page_size: tokens of a page.
    """

    page_size: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least(1, "page_size")
        if _GRANULE % self.page_size:
            raise self.refused(f"page_size must divide {_GRANULE}, got {self.page_size}")

    def scores(
        self, q: Float[Array, "B N H"], cache: SelectiveCache, ctx: LayerContext
    ) -> Float[Array, "B N P"]:
        """The largest q.k that the page's digest allows."""
        return cache.digests.scores(q, cache.store, self.page_size, ctx)

    def select(
        self,
        q: Float[Array, "B 1 N H"],
        cache: SelectiveCache,
        span: Span,
        count: Int[Array, " B"],
        most: int,
        ctx: LayerContext,
    ) -> Int[Array, "B X C"] | None:
        """By the digests, on one shard, for lists of each head or of the mean of all scores.

        A method with `scores` of its own ranks those.
        """
        together = self.granularity == "layer" and self.pools == "scores" and ctx.head_shards == 1
        own_scores = type(self).scores is not SelectingPages.scores
        whole = together or self.granularity == "query_head"
        if own_scores or ctx.seq_size > 1 or not whole:
            return None
        first_B = span.start // self.page_size
        last_B = jnp.where(span.stop > span.start, -(-span.stop // self.page_size), first_B)
        best, how = Best(first_B, last_B, count), {"size": most, "together": together}
        return cache.digests.select(q[:, 0], best, self.page_size, ctx, **how)

    @property
    def cannot_offload(self) -> str | None:
        """None under a uniform budget."""
        if self.allocation == "uniform":
            return None
        return f"allocation={self.allocation} reads keys to choose, or lists of any length"

    @property
    def recent(self) -> int | None:
        """What `own_tokens` is where a method changes no more than digests: those always attended.

        None under allocations other than `uniform`.
        """
        return self.local + self.page_size if self.allocation == "uniform" else None

    def scored_bytes(self, cache: SelectiveCache) -> int:
        """What `scores` reads: the digests."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(cache.digests))


def gathered(
    own: Float[Array, "B N X"], span: Span, ctx: LayerContext, page: int
) -> Float[Array, "B N P"]:
    """All shards' scores of pages of `page` slots, -inf where none may be selected."""
    scores_BNP = ctx.slots(own.shape[2], page).whole(own, axis=2)
    return jnp.where((span.tokens > 0)[:, None], scores_BNP, -jnp.inf)
