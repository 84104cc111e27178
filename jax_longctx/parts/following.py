"""Two methods that follow one another: what stays of a text, and what a decode step reads of it.

The first method reads the text. At its end, or at the end of the question where the first method
ranks by that (`Method.hands_over`), what stays becomes a smaller cache of keys and values, in the
text's order. The second method's cache is made over that (`Method.adopt`), and the second does all
that follows. So a decode step is the second's own over so short a cache, in the same kernels.

Nothing leaves while answering: the answer's tokens join the second's cache. Positions go on as the
first method has them. Under a second one that caches keys before rotary embedding (InfLLM,
ReAttention, FreePages) keys are turned back, and the tokens that stay follow one another. A page of
the second holds neighbours among the tokens that stay, which may lie far apart in the text, and
each kv head has its own.

RocketKV (Behnam et al. 2025) is such a pair: SnapKV, then a selector that ranks pages by Quest's
bounds in the channels where a query is largest. No selector here reads few channels: `snapkv >
quest` is the nearest, and is not called RocketKV.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import AppendCache, where_rows, with_store
from jax_longctx.contract import (
    CHUNK_ROWS,
    QKV,
    CacheShape,
    Feed,
    LayerContext,
    Method,
    Phase,
    PrefillWork,
    Segment,
    Stage,
    WithCache,
)
from jax_longctx.models.config import ModelConfig
from jax_longctx.settings import THEN
from jax_longctx.sharding import axes_field, leaf_axes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FirstCache:
    """The first method's cache, until the second takes over.

    Attributes:
      shape: what the second's cache is like, but for its sizes.
      last: the prompt's last query, before rotary embedding.
      read: tokens of each row so far.
      queries: the sum of their rotated queries, where the second needs it.
      context_read, context_queries: both at the end of the context.
    """

    shape: CacheShape = dataclasses.field(metadata={"static": True})
    cache: Any
    last: Float[Array, "B 1 N H"] = axes_field("batch", None, "heads", None)
    read: Int[Array, " B"] = axes_field("batch")
    context_read: Int[Array, " B"] = axes_field("batch")
    queries: Float[Array, "B N H"] | None = axes_field("batch", "heads", None)
    context_queries: Float[Array, "B N H"] | None = axes_field("batch", "heads", None)

    def after(
        self, cache: Any, q: Float[Array, "B T N H"], rotated: Array | None, valid: Int[Array, " B"]
    ) -> "FirstCache":
        """With each row's first `valid[b]` queries, which `cache` has read."""
        at_B111 = jnp.maximum(valid - 1, 0)[:, None, None, None]
        last = jnp.take_along_axis(q, at_B111, axis=1).astype(self.last.dtype)
        last, total = where_rows(valid > 0, last, self.last), self.queries
        if total is not None and rotated is not None:
            held_BT11 = (jnp.arange(q.shape[1]) < valid[:, None])[..., None, None]
            total += jnp.sum(jnp.where(held_BT11, rotated.astype(jnp.float32), 0.0), axis=1)
        read = self.read + valid
        return dataclasses.replace(self, cache=cache, last=last, read=read, queries=total)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Following(Method):
    """A method that evicts, and one that selects of what stays.

    Attributes:
      first: says what stays.
      second: says what a decode step reads.
    """

    first: Method
    second: Method

    def __post_init__(self) -> None:
        if isinstance(self.first, Following):
            raise self.refused("one method may follow another one, and no third")
        if self.first.hands_over is None:
            raise self.refused(
                f"{self.first.name} evicts nothing, so that nothing can follow it; take "
                f"{self.second.name} alone"
            )
        if self.first.cannot_hand_over is not None:
            raise self.refused(
                f"nothing can follow {self.first.name}: {self.first.cannot_hand_over}"
            )
        if self.second.cannot_adopt is not None:
            raise self.refused(
                f"{self.second.name} cannot follow another method: {self.second.cannot_adopt}"
            )

    # Metadata.

    @property
    def name(self) -> str:
        return f"{self.first.name}{THEN}{self.second.name}"

    @property
    def summary(self) -> str:
        return f"{self.first.summary}; then: {self.second.summary}"

    @property
    def source(self) -> str:
        return f"{self.first.source}; {self.second.source}"

    @property
    def phase(self) -> Phase:
        return "decode" if self.first.phase in ("none", "decode") else "both"

    @property
    def query_aware(self) -> bool:
        return self.first.query_aware or self.second.query_aware

    @property
    def by_values(self) -> bool:
        return self.first.by_values or self.second.by_values

    @property
    def needs_question(self) -> bool:
        return self.first.needs_question

    @property
    def asks(self) -> tuple[str, ...]:
        return self.first.asks

    @property
    def weights_of(self) -> str | None:
        return self.first.weights_of or self.second.weights_of

    @property
    def looks_ahead(self) -> bool:
        return self.first.looks_ahead or self.second.looks_ahead

    @property
    def answers_apart(self) -> bool:
        return self.first.hands_over == "question"

    @property
    def measures_keys(self) -> bool:
        return self.first.measures_keys or self.second.measures_keys

    @property
    def hands_over(self) -> Stage | None:
        return self.first.hands_over

    @property
    def append_only(self) -> bool:
        return self._over_context.append_only

    @property
    def stripes(self) -> bool:
        return self.first.stripes and self.second.stripes

    @property
    def cannot_offload(self) -> str | None:
        if self.first.cannot_offload is None:
            return None
        return f"{self.first.name} chooses what stays by keys and values on the device"

    @property
    def cannot_read_blocks(self) -> str | None:
        return self.first.cannot_read_blocks

    @property
    def cannot_slide(self) -> str | None:
        return self.first.cannot_slide or self.second.cannot_slide

    @property
    def _over_context(self) -> Method:
        """Whose cache a context is."""
        return self.first if self.answers_apart else self.second

    # The duties.

    def validate(self, config: ModelConfig) -> None:
        self.first.validate(config)
        self.second.validate(config)

    def of_layer(self, layer: int, layers: int) -> "Following":
        first, second = (each.of_layer(layer, layers) for each in (self.first, self.second))
        return Following(first=first, second=second)

    def reach(self, config: ModelConfig, tokens: int) -> int:
        return max(method.reach(config, tokens) for method in (self.first, self.second))

    def prefill_work(self, feed: Feed) -> PrefillWork | None:
        return self.first.prefill_work(feed)

    def init_cache(self, shape: CacheShape) -> FirstCache:
        # Nothing that differs from length to length.
        like = dataclasses.replace(shape, slots=0, reserve=0, offload=None)
        size = (shape.num_heads, shape.head_dim)

        def zeros(*sizes: int, dtype: Any) -> Array:
            return jnp.zeros((shape.batch, *sizes), dtype)

        # An array for each field: a donated buffer may be named once.
        read, total = [zeros(dtype=jnp.int32) for _ in range(2)], [None, None]
        if self.second.wants_queries:
            total = [zeros(*size, dtype=jnp.float32) for _ in range(2)]
        last, held = zeros(1, *size, dtype=shape.dtype), self.first.init_cache(shape)
        return FirstCache(like, held, last, *read, *total)

    def segments(self, feed: Feed) -> Iterable[Segment]:
        return (self.first if feed.stage == "context" else self._over_context).segments(feed)

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        if not isinstance(cache, FirstCache):
            return self.second.attend(new, cache, segment, self.first.handed_context(ctx))
        position_B = self.first.next_position(cache.cache)
        part, held = self.first.attend(new, cache.cache, segment, ctx)
        if segment.role == "probe":
            return part, dataclasses.replace(cache, cache=held)
        q, rotated = new[0][:, segment.group(CHUNK_ROWS).columns], None
        if cache.queries is not None:
            at_BT = position_B[:, None] + jnp.arange(q.shape[1])
            rotated = self.first.handed_context(ctx).rotate_queries(q, at_BT)
        return part, cache.after(held, q, rotated, segment.valid_of())

    def finish(self, cache: Any, ctx: LayerContext, stage: Stage, reserve: int) -> Any:
        if stage != self.first.hands_over:
            held = self.first.finish(cache.cache, ctx, stage, reserve)
            ends = {"context_read": cache.read, "context_queries": cache.queries}
            return dataclasses.replace(cache, cache=held, **ends)
        store = self.first.hand_over(cache.cache, ctx, reserve, raw=self.second.raw_keys)
        queries = cache.queries
        if queries is not None:
            # As many as there are keys.
            queries *= (store.length / jnp.maximum(cache.read, 1))[:, None, None]
        ctx = self.first.handed_context(ctx)
        adopted = with_store(self._empty(cache, store, ctx.seq_size), store)
        adopted = self.second.adopt(adopted, ctx, queries)
        adopted = self.second.finish(adopted, ctx, "context", reserve)
        return self.second.begin(cache.last, adopted, ctx) if self.answers_apart else adopted

    def _empty(self, cache: FirstCache, store: AppendCache, shards: int) -> Any:
        """A shard's part of the second's empty cache, for a store of that size."""
        (rows, heads, slots, _), like = store.sizes, cache.shape
        sizes = {"batch": rows, "slots": slots * shards, "num_kv_heads": heads}
        group = like.num_heads // like.num_kv_heads
        shape = dataclasses.replace(like, num_heads=heads * group, **sizes)

        def own(x: Array, axes: tuple[str | None, ...]) -> Array:
            # All entries along these axes are alike.
            for axis, name in enumerate(axes):
                if name in ("slots", "pages"):
                    x = jax.lax.slice_in_dim(x, 0, x.shape[axis] // shards, axis=axis)
            return x

        empty = self.second.init_cache(shape)
        leaves, structure = jax.tree.flatten(empty)
        return structure.unflatten(map(own, leaves, leaf_axes(empty)))

    def fork(self, cache: Any) -> Any:
        if not isinstance(cache, FirstCache):
            return self.second.fork(cache)
        # New arrays: a fork is donated to the next step while the context keeps its own.
        read, queries = cache.context_read, cache.context_queries
        again = {"context_read": read, "context_queries": queries}
        again |= {"last": cache.last, "read": read, "queries": queries}
        made = jax.tree.map(lambda x: jnp.array(x, copy=True), again)
        return dataclasses.replace(cache, cache=self.first.fork(cache.cache), **made)

    def step_variant(self, step: int) -> str:
        return self.second.step_variant(step)

    def read_bytes(self, cache: Any, length: int) -> int:
        if isinstance(cache, FirstCache):
            return self.first.read_bytes(cache.cache, length)
        return self.second.read_bytes(cache, self.first.stays(length))
