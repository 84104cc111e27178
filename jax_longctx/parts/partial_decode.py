"""The kind that decodes over a partial cache: a few tokens of each kv head, chosen from all keys.

Prefill of context and question is full attention, and every key stays. The attention of the
question's last token chooses the partial cache (`begin`). A method of this kind defines the decode
step: it may read the partial cache (`read`), or attend every key and choose anew (`look`).
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import (
    AppendCache,
    Rewinding,
    empty_append_cache,
    where_rows,
)
from jax_longctx.caches.fifo import Count, FifoCache, empty_fifo_cache
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
)
from jax_longctx.parts.appending import Appending
from jax_longctx.parts.partial import best_last, check_kernel, pooled_scores
from jax_longctx.sharding import axes_field
from pallas_kernels.decode_attention import attend_with_logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RefreshCache(Rewinding):
    """Every key and value of a row, and the part that decode reads.

    The end of a question replaces all but the store.

    Attributes:
      partial: the tokens that a partial step attends.
      query: sum over all heads of the query of the layer's last full step.
      steps, full_steps: decode steps of this answer, and those that attended every key.
    """

    store: AppendCache
    partial: FifoCache
    query: Float[Array, "B H"] = axes_field("batch", None)
    steps: Int[Array, " B"] = axes_field("batch")
    full_steps: Int[Array, " B"] = axes_field("batch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartialDecoding(Appending):
    """A method whose decode steps read a partial cache.

    Attributes:
      budget: tokens of the partial cache, the same for all rows; without one `ratio` says it.
      ratio: share of each row's own prompt (context and question) that the partial cache holds,
        rounded down to whole tokens, at least 1.
      kernel: width of the pooling over neighbouring probabilities.
      over_group: how the query heads of a kv head share a score.
    """

    budget: int | None = None
    ratio: float = 0.125
    kernel: int = 7
    over_group: Literal["max", "mean", "first"] = "max"

    phase = "decode"
    query_aware = True
    cannot_adopt = None

    def __post_init__(self) -> None:
        self.at_least(1, "budget")
        self.fraction("ratio", above_zero=True)
        check_kernel(self)

    def step(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        """One answered token."""
        raise NotImplementedError(f"{type(self).__name__}: a method of this kind defines step")

    @property
    def leaving(self) -> int | None:
        """Most tokens that leave the partial cache before it is chosen anew; None: any number."""
        return None

    def summed(self, rotated: Array, ctx: LayerContext) -> Float[Array, "B H"]:
        """The sum over all heads of a full step's query, which the cache remembers."""
        return ctx.psum_heads(jnp.sum(rotated[:, 0].astype(jnp.float32), axis=1))

    def init_cache(self, shape: CacheShape) -> RefreshCache:
        # No prompt is longer than the slots.
        size, axis = math.ceil(self.ratio * shape.slots), "share"
        if self.budget is not None:
            size, axis = self.budget, "budget"
        partial = empty_fifo_cache(shape, size, axis)
        query = jnp.zeros((shape.batch, shape.head_dim), jnp.float32)
        steps, full_steps = (jnp.zeros((shape.batch,), jnp.int32) for _ in range(2))
        return RefreshCache(empty_append_cache(shape), partial, query, steps, full_steps)

    def segments(self, feed: Feed) -> Iterable[Segment]:
        return mark_ends(super().segments(feed), feed)

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        if segment.role == "decode":
            return self.step(new, cache, segment, ctx)
        part, store = super().attend(new, cache.store, segment, ctx)
        cache = dataclasses.replace(cache, store=store)
        if segment.variant == ENDS:
            last_B = jnp.maximum(segment.valid_of() - 1, 0)
            q = jnp.take_along_axis(new[0], last_B[:, None, None, None], axis=1)
            cache = where_rows(segment.ends, self.begin(q, cache, ctx), cache)
        return part, cache

    def read_bytes(self, cache: Any, length: int) -> int:
        """The partial cache."""
        store = cache.store
        tokens = (self.budget or max(int(self.ratio * length), 1)) + 1
        token = (store.k.nbytes + store.v.nbytes) // store.k.shape[2]
        return token * tokens

    def chosen(self, cache: RefreshCache) -> Count:
        """Number of chosen tokens: the same for all rows, or a share of each row's prompt."""
        if self.budget is not None:
            return self.budget
        prompt_B = cache.store.length - cache.steps
        return jnp.maximum(jnp.floor(jnp.float32(self.ratio) * prompt_B).astype(jnp.int32), 1)

    def limit(self, cache: RefreshCache) -> Count:
        """Tokens that a partial step reads at most."""
        return self.chosen(cache) + 1

    def begin(
        self, q: Float[Array, "B 1 N H"], cache: RefreshCache, ctx: LayerContext
    ) -> RefreshCache:
        """The cache as the answer starts, chosen by the prompt's last query (before rotation)."""
        rotated = ctx.rotate_queries(q, cache.store.position[:, None] - 1)
        zeros = jnp.zeros_like(cache.steps)
        cache = dataclasses.replace(cache, steps=zeros, full_steps=zeros)
        _, partial = self.look(rotated, cache, jnp.ones(zeros.shape, bool), ctx)
        return dataclasses.replace(cache, partial=partial, query=self.summed(rotated, ctx))

    def push(
        self, k: Array, v: Array, cache: RefreshCache, valid: Int[Array, " B"], ctx: LayerContext
    ) -> RefreshCache:
        """The cache with a step's token, its key rotated, in the store and in the partial cache."""
        partial = cache.partial.push(k, v, valid, self.limit(cache))
        store = cache.store.append(k, v, valid, ctx)
        return dataclasses.replace(cache, store=store, partial=partial, steps=cache.steps + valid)

    def look(
        self,
        q: Float[Array, "B 1 N H"],
        cache: RefreshCache,
        turned: Bool[Array, " B"],
        ctx: LayerContext,
    ) -> tuple[Attended, FifoCache]:
        """Attention of one query to all keys, and in `turned` rows the tokens that it chooses."""
        store = cache.store
        batch, kv_heads, size, _ = store.k.shape
        held_B = store.held(ctx)
        *attended, logits_BNS = attend_with_logits(q, store.k, store.v, held_B, scale=ctx.scale)
        out, lse = ctx.seq_merge(*attended)
        # A row without keys has no log-sum-exp; nothing is chosen from it.
        base_B1N = jnp.where(jnp.isfinite(lse), ctx.with_sinks(lse), 0.0)
        p_BKGS = jnp.exp(logits_BNS - base_B1N.swapaxes(1, 2)).reshape(batch, kv_heads, -1, size)
        over = {"max": jnp.max, "mean": jnp.mean, "first": lambda p, axis: p[:, :, 0]}
        mass_BKS = ctx.slots(size).whole(over[self.over_group](p_BKGS, axis=2), axis=2)
        # The newest token is always chosen and leaves last.
        scores_BKS = pooled_scores(mass_BKS, store.length, 1, self.kernel, "max")
        old = dataclasses.replace(cache.partial, k=None, v=None)
        listed = old.chosen.shape[2]
        new = best_last(scores_BKS, store.length, self.chosen(cache), listed, self.leaving)
        new = dataclasses.replace(new, chosen_axis=old.chosen_axis, slots_axis=old.slots_axis)
        partial = where_rows(turned, new, old)
        # The other rows' tokens are gathered again too: to keep them would copy the buffers.
        partial = partial.filled(store, self.limit(cache), cache.partial.capacity, ctx)
        return (out.astype(q.dtype), lse), partial

    def read(self, q: Array, cache: RefreshCache, ctx: LayerContext) -> Attended:
        """Attention of one query to the partial cache."""
        return cache.partial.read(q, self.limit(cache), ctx.scale)
