"""SnapKV: after the question, each layer keeps the tokens that the prompt's last queries attended.

Li et al. 2024, "SnapKV: LLM Knows What You are Looking for Before Generation", section 4. Prefill
of context and question is full attention. Then, in each layer and for each kv head,

1. the last `window` queries' probabilities over all keys are summed over these queries and reduced
   over the query heads that share a kv head;
2. the sums of all tokens before the window are pooled over `kernel` neighbours;
3. the budget - window best tokens and the window itself stay, at their true positions.

Reading the question costs one more pass of `window` queries over the keys; the log-sum-exps of
these queries are kept from prefill. Each decode step reads budget + answer tokens. The context's
cache stays for the next question, and is freed where there will be none.

The authors repeat keys for every query head before they are cached: each query head keeps its own
tokens, and grouped queries save no memory. Here a kv head's group shares one choice (`over_group`;
`layer` averages over all heads of the layer).
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_longctx.caches import AppendCache, Rewinding
from jax_longctx.caches.fifo import FifoCache, padded
from jax_longctx.caches.uneven import UnevenCache
from jax_longctx.contract import QKV, CacheShape, LayerContext, Segment, Stage, WithCache, method
from jax_longctx.parts.layer_budgets import Budgeted, Ranked
from jax_longctx.parts.partial import Pool, best_last, check_kernel, latest, pooled_scores
from jax_longctx.sharding import axes_field
from pallas_kernels.attention_mass import Reduction, attention_mass


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ObservedCache(Rewinding):
    """Every key and value of a row, and the last W queries that read them.

    Attributes:
      queries: rotated, the newest last.
      lse: log-sum-exp of each one's attention and sink, -inf where a row has had fewer queries.
      context_queries, context_lse: both at the end of the context.
    """

    store: AppendCache
    queries: Float[Array, "B W N H"] = axes_field("batch", None, "heads", None)
    lse: Float[Array, "B W N"] = axes_field("batch", None, "heads")
    context_queries: Float[Array, "B W N H"] = axes_field("batch", None, "heads", None)
    context_lse: Float[Array, "B W N"] = axes_field("batch", None, "heads")

    def step_bytes(self, tokens: int) -> int:
        """Bytes of `tokens` tokens' keys and values."""
        return tokens * self.store.nbytes // self.store.sizes[2]


# In prefill, and in decode.
Cache = ObservedCache | FifoCache | UnevenCache


@method(source="Li et al. 2024, section 4")
class SnapKV(Budgeted):
    """After the question, only the tokens that its end attended stay for the answer.

    Attributes:
      window: last tokens of the prompt, whose queries choose; they always stay.
      kernel: width of the pooling over neighbouring sums of probabilities.
      pool: the maximum or the mean of the neighbours.
      over_group: how the query heads of a kv head share a score; `layer` is the mean of all heads.
    """

    window: int = 32
    kernel: int = 7
    pool: Pool = "max"
    over_group: Literal["mean", "max", "first", "layer"] = "mean"

    phase = "decode"
    query_aware = answers_apart = True
    keeps_all = False
    hands_over = "question"

    def __post_init__(self) -> None:
        self.at_least(1, "window")
        super().__post_init__()
        if self.budget <= self.window:
            raise self.refused(
                f"budget {self.budget} must exceed window {self.window}; raise budget"
            )
        check_kernel(self)

    @property
    def least(self) -> int:
        return self.window + 1

    def init_cache(self, shape: CacheShape) -> ObservedCache:
        size = (shape.batch, self.window, shape.num_heads)

        # An array for each field: a donated buffer may be named once.
        def window() -> tuple[Array, Array]:
            queries = jnp.zeros((*size, shape.head_dim), shape.dtype)
            return queries, jnp.full(size, -jnp.inf, jnp.float32)

        return ObservedCache(super().init_cache(shape), *window(), *window())

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        q, k, v = new
        valid_B = segment.valid_of()
        if isinstance(cache, UnevenCache):
            return super().attend(new, cache, segment, ctx)
        if segment.role == "decode":
            at_B1, limit = cache.position[:, None], cache.capacity
            cache = cache.push(ctx.rotate(k, at_B1), v, valid_B, limit)
            return cache.read(ctx.rotate_queries(q, at_B1), limit, ctx.scale), cache
        at_BT = cache.store.position[:, None] + jnp.arange(q.shape[1])
        (out, lse), store = super().attend(new, cache.store, segment, ctx)
        queries = latest(cache.queries, ctx.rotate_queries(q, at_BT), valid_B)
        lses = latest(cache.lse, ctx.with_sinks(lse), valid_B)
        return (out, lse), dataclasses.replace(cache, store=store, queries=queries, lse=lses)

    def finish(self, cache: Any, ctx: LayerContext, stage: Stage, reserve: int) -> Cache:
        if stage == "context":
            return cache.end_context(reserve)
        if self.over_heads != "uniform":
            return self.hand_over(cache, ctx, reserve)
        store, scores_BKS = cache.store, self._scores(cache, ctx)
        size = min(self.budget, scores_BKS.shape[2])
        chosen = best_last(scores_BKS, store.length, self.budget, size)
        capacity = padded(size + reserve)
        return chosen.filled(store, capacity, capacity, ctx)

    def hand_over(
        self, cache: ObservedCache, ctx: LayerContext, reserve: int, *, raw: bool = False
    ) -> Any:
        store, scores_BKS = cache.store, self._scores(cache, ctx)
        size, kept_B = min(self.budget, scores_BKS.shape[2]), jnp.minimum(store.length, self.budget)
        return self.what_stays(store, Ranked(scores_BKS, kept_B, size), reserve, ctx, raw=raw)

    def stays(self, length: int) -> int:
        return min(length, self.budget)

    def _scores(self, cache: ObservedCache, ctx: LayerContext) -> Float[Array, "B K S"]:
        """The scores of all tokens, on all shards."""
        mass_BKS, length_B = self._mass(cache, ctx), cache.store.length
        return pooled_scores(mass_BKS, length_B, self.window, self.kernel, self.pool)

    def _mass(self, cache: ObservedCache, ctx: LayerContext) -> Float[Array, "B K S"]:
        """Mean probability that the window's queries gave each token before it, on all shards."""
        store, group = cache.store, cache.queries.shape[2] // cache.store.k.shape[1]
        # All queries of the window see the tokens before it: no causal mask is needed.
        seen_B = store.held(ctx, but_last=self.window)
        over_group = self.over_group if self.over_group in ("max", "first") else "sum"
        how = Reduction(ctx.scale, over_group=over_group)
        mass = attention_mass(cache.queries, store.k, cache.lse, seen_B, how) / self.window
        if over_group == "sum":
            mass = mass / group
        if self.over_group == "layer":
            mean_B1S = ctx.psum_heads(jnp.mean(mass, axis=1, keepdims=True)) / ctx.head_shards
            mass = jnp.broadcast_to(mean_B1S, mass.shape)
        return ctx.slots(mass.shape[2]).whole(mass, axis=2)

    def read_bytes(self, cache: Cache, length: int) -> int:
        if isinstance(cache, UnevenCache):
            return cache.nbytes
        return cache.step_bytes(self.stays(length))
