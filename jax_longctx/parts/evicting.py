"""The kind that evicts: each layer keeps a budget of tokens, chosen anew after each segment.

A segment attends to the cache and to itself. Then slots and new tokens are ranked, and the best
stay. A method of this kind defines the ranking (`Evicting.rank`), or how many first tokens stay
while the oldest others leave (`first`). It may also define running sums for each token (`gained`,
`num_sums`) and how many tokens its ranking always keeps (`kept`).

Positions are

- `shifted`: keys are stored before rotary embedding. During prefill each segment rotates
  them by their *slot* and queries by the slots that follow, so that no distance exceeds the cache
  (StreamingLLM, section 3.2);
- `true`: keys are stored rotated at their index in the text; gaps remain.

The protocol says when tokens leave:

- `own`: a segment's tokens join, then the best `budget` of all stay, also in decode;
- `citrus` (CItruS, sections 4.3 and 5.2, for itself and its baselines): only tokens cached before a
  chunk may leave, down to budget - chunk; then the chunk joins. The question first attends to the
  cache without joining it (`probe`) and evicts once more. Then it is read; the answer grows the
  cache.

Where what leaves while answering does not depend on attention, the answer has a cache of its own
(`AnswerCache`), whose keys are rotated once. Positions then grow with the answer. Distances do not
where tokens leave.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from jax_longctx.caches import (
    AppendCache,
    BudgetCache,
    Joining,
    cache_of,
    choose,
    drop_oldest,
    empty_budget_cache,
    numbers,
    write_rows,
)
from jax_longctx.caches.fifo import FifoCache, padded
from jax_longctx.contract import (
    CHUNK_ROWS,
    QKV,
    Attended,
    CacheShape,
    Feed,
    LayerContext,
    Method,
    Segment,
    Stage,
    WithCache,
    chunk_segments,
)
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.models.config import ModelConfig
from jax_longctx.sharding import axes_field
from pallas_kernels.attention_mass import Reduction, attention_mass
from pallas_kernels.common import Stored

# Most questions are shorter: programs for them serve one another.
LEAST_QUESTION = 32

Positions = Literal["shifted", "true"]
Protocol = Literal["own", "citrus"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AnswerCache:
    """The cache of an answer: keys under rotary embedding, each in the slot that it got first.

    With shifted positions each token of the answer stands one after the token before it. Where the
    oldest token leaves, no position changes: between a query and the keys of the window lie as many
    positions as between their slots in a cache that closes its gaps. The first tokens would fall
    behind, so their keys are rotated anew for each step.

    Attributes:
      store: all keys and values; its first tokens never leave.
      sinks: with shifted positions, the F first tokens' keys before rotary embedding.
      budget: tokens that stay after a step; None where all do.
    """

    store: FifoCache
    sinks: Float[Array, "B K F H"] | None = axes_field("batch", "kv_heads", None, None)
    budget: int | None = dataclasses.field(default=None, metadata={"static": True})

    @property
    def limit(self) -> int:
        """Tokens that a step reads at most, its own included."""
        return self.store.capacity if self.budget is None else self.budget + 1

    @property
    def step_bytes(self) -> int:
        """Bytes that a decode step reads: keys and values."""
        held = sum(leaf.nbytes for leaf in jax.tree.leaves((self.store.k, self.store.v)))
        return held * self.limit // self.store.capacity


@dataclasses.dataclass(frozen=True)
class Look:
    """A segment's attention over a budgeted cache and itself, for ranking.

    The joint axis U = C + T holds the cache's slots, then the segment's tokens.

    Attributes:
      method, cache, segment, ctx: the method, and the arguments of its `attend`.
      valid: valid tokens of each row.
      out, lse: the attention of the segment's T tokens.
      q: queries, rotated.
      past_k: the cache's keys, rotated.
      k, v: the segment's keys (rotated) and values.
      store_k: the segment's keys as the cache stores them.
      sums: M running sums of each slot and token, with what this segment adds; new tokens begin at
        zero. None where the method has none.
      instruction: the look of the instruction beside the segment, where there is one.
    """

    method: "Evicting"
    cache: BudgetCache
    segment: Segment
    ctx: LayerContext
    valid: Int[Array, " B"]
    out: Float[Array, "B T N H"]
    lse: Float[Array, "B T N"]
    q: Float[Array, "B T N H"]
    past_k: Stored
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    store_k: Float[Array, "B T K H"]
    sums: Any = None
    instruction: Any = None

    @property
    def length(self) -> Int[Array, "B 1 1"]:
        """Slots of each row that hold a token."""
        return self.cache.length[:, None, None]

    def _joint(self, slots: Shaped[Array, "_ _"], tokens: Array) -> Shaped[Array, "B 1 U"]:
        slots_BC = jnp.broadcast_to(slots, (len(tokens), self.past_k.shape[2]))
        return jnp.concatenate([slots_BC, tokens], axis=1)[:, None]

    @property
    def order(self) -> Int[Array, "B 1 U"]:
        """Rank of each slot and token in the row's order, 0 the oldest."""
        tokens_BT = self.cache.length[:, None] + jnp.arange(self.k.shape[1])
        return self._joint(jnp.arange(self.past_k.shape[2])[None], tokens_BT)

    @property
    def token(self) -> Int[Array, "B K U"]:
        """Index of each slot's and token's token in the row's text."""
        return jnp.concatenate([self.cache.token, self.cache.next_tokens(self.k.shape[1])], axis=2)

    @property
    def present(self) -> Bool[Array, "B 1 U"]:
        """Slots that hold a token, and valid tokens."""
        slots_BC = jnp.arange(self.past_k.shape[2]) < self.cache.length[:, None]
        return self._joint(slots_BC, jnp.arange(self.k.shape[1]) < self.valid[:, None])

    @property
    def onlookers(self) -> Float[Array, "B 1 U"]:
        """Number of valid queries that see each slot and token; float32."""
        after_BT = self.valid[:, None] - jnp.arange(self.k.shape[1])
        return self._joint(self.valid[:, None], after_BT).astype(jnp.float32)

    @property
    def competing(self) -> Bool[Array, "B 1 U"]:
        """Slots and tokens that may leave: all, or under `citrus` the slots."""
        if self.method.protocol == "own":
            return self.present
        return self.present & (jnp.arange(self.order.shape[2]) < self.past_k.shape[2])

    @property
    def leaving(self) -> Int[Array, " B"]:
        """How many of them leave after this segment; none in a row without valid tokens."""
        method, length_B = self.method, self.cache.length
        if method.protocol == "own":
            over_B = length_B + self.valid - method.budget
        else:
            over_B = length_B - (method.budget - method.chunk)
        return jnp.where(self.valid > 0, jnp.maximum(over_B, 0), 0)

    @property
    def joining(self) -> Int[Array, " B"]:
        """Number of the segment's tokens that join the cache; 0 for a probe."""
        return jnp.zeros_like(self.valid) if self.segment.role == "probe" else self.valid

    @property
    def log_total(self) -> Float[Array, "B T N"]:
        """The log of what each query's probabilities are divided by."""
        return self.ctx.with_sinks(self.lse)

    def mass(self, **options: Any) -> Any:
        """`attention_mass` of the segment's valid queries on every slot and token, `[B, K, U]`.

        `options` go to `Reduction`; with `squares` a pair comes back.
        """
        past = self.mass_on_cache(**options)
        k_BKTH, start = jnp.swapaxes(self.k, 1, 2), jnp.zeros_like(self.valid)
        how = Reduction(self.ctx.scale, self.valid, start, **options)
        new = attention_mass(self.q, k_BKTH, self.log_total, self.valid, how)
        return jax.tree.map(lambda *pair: jnp.concatenate(pair, axis=2), past, new)

    def mass_on_cache(self, **options: Any) -> Any:
        """`mass` on the cache's slots alone, `[B, K, C]`."""
        how = Reduction(self.ctx.scale, self.valid, **options)
        return attention_mass(self.q, self.past_k, self.log_total, self.cache.length, how)

    def with_tokens(self, slots: Float[Array, "B K C"]) -> Float[Array, "B K U"]:
        """Values of slots, and zeros for the segment's tokens."""
        return jnp.pad(slots, ((0, 0), (0, 0), (0, self.k.shape[1])))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evicting(Method):
    """A method that keeps a budget of tokens in each layer, the best of each kv head.

    Attributes:
      budget: tokens in a layer's cache; under `citrus` the newest chunk included.
      chunk: tokens of the context read between two evictions.
      positions: `true` (indices in the text), or `shifted` (keys stand at their slots).
      protocol: `own` (as the method's paper), or `citrus` (as a baseline of CItruS, section 5.2).
    """

    budget: int = 1024
    chunk: int = 256
    positions: Positions = "true"
    protocol: Protocol = "own"

    # False for a method that ranks by place alone.
    query_aware = True
    # Running sums of each kept token.
    num_sums = 0
    names_tokens = True
    hands_over = "question"

    def rank(self, seen: Look) -> Shaped[Array, "B _ U"]:
        """Scores of slots and tokens, for all kv heads together or each its own.

        The highest stay, +inf before all others; of equals the older stays.
        """
        raise NotImplementedError(
            f"{type(self).__name__}: a method that evicts defines rank or first"
        )

    def gained(self, seen: Look) -> Float[Array, "B K U M"] | None:
        """What this segment adds to the `num_sums` running sums of each slot and token."""
        return None

    @property
    def first(self) -> int | None:
        """First tokens that stay while the oldest others leave; None where `rank` decides."""
        return None

    @property
    def kept(self) -> int:
        """Least tokens that the ranking always keeps."""
        return 1

    @property
    def answers_apart(self) -> bool:
        """Whether age alone decides what leaves while answering, if anything does."""
        return self.protocol == "citrus" or self.first is not None

    def __post_init__(self) -> None:
        self.at_least(1, "chunk")
        citrus = self.protocol == "citrus"
        room = self.budget - self.chunk if citrus else self.budget
        if room < self.kept:
            less = f" less chunk {self.chunk}" if citrus else ""
            raise self.refused(
                f"budget {self.budget}{less} leaves {room} tokens, but the method always "
                f"keeps {self.kept}; raise budget"
            )

    def validate(self, config: ModelConfig) -> None:
        """Refuses positions that the model was not trained to."""
        most = self.budget + self.chunk
        if self.positions == "shifted" and most > config.trained_length:
            raise self.refused(
                f"budget {self.budget} + chunk {self.chunk} = {most} positions, more than "
                f"the {config.trained_length} that the model was trained to; lower them"
            )

    def reach(self, config: ModelConfig, tokens: int) -> int:
        """The most positions in use where keys stand at their slots, else all tokens."""
        return tokens if self.positions == "true" else min(tokens, self.budget + self.chunk)

    def init_cache(self, shape: CacheShape) -> Any:
        """Slots for the budget, and for question and answer where these evict nothing."""
        grows = self.protocol == "citrus"
        slots = self.budget + (shape.reserve if grows else 0)
        return empty_budget_cache(shape, slots, self.num_sums, grows=grows)

    def segments(self, feed: Feed) -> Iterable[Segment]:
        """The context in chunks of the method's own size; the question as the protocol says.

        Raises:
          InputError: under `citrus`, a question longer than the cache.
        """
        if feed.stage == "context":
            return chunk_segments(feed.rows, self.chunk, "context")
        if self.protocol == "own":
            return chunk_segments(feed.rows, self.chunk, "query")
        # One segment each: all of the question's tokens rank together.
        width = self.question_width(feed.rows)
        probe = chunk_segments(feed.rows, width, "probe")
        return [*probe, *chunk_segments(feed.rows, width, "query")]

    def question_width(self, question: Sequence[Sequence[int]]) -> int:
        """Columns for the whole question: a power of two, and not few, for few compilations.

        Raises:
          InputError: the question is longer than the cache.
        """
        longest = max(map(len, question), default=1)
        if longest > self.budget:
            raise InputError(
                f"{self.name}: the question has {longest} tokens, more than the cache's "
                f"budget of {self.budget}; move text from the question to the context, or raise "
                f"budget"
            )
        least = min(LEAST_QUESTION, 1 << (self.budget.bit_length() - 1))
        return max(least, 1 << (longest - 1).bit_length())

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        if segment.role == "decode" and self.answers_apart:
            return self.answer(new, cache, segment, ctx)
        if self.protocol == "citrus" and segment.role == "query":
            return self.read_and_append(new, cache, segment, ctx)
        seen = self.look(new, cache, segment, ctx)
        return (seen.out, seen.lse), self.evict(seen)

    def look(
        self,
        new: QKV,
        cache: BudgetCache,
        segment: Segment,
        ctx: LayerContext,
        rows: str = CHUNK_ROWS,
    ) -> Look:
        """Attention of one row group to every slot and, causally, to itself."""
        q, k, v = (x[:, segment.group(rows).columns] for x in new)
        q, rotated, store = self._rotated(q, k, cache, ctx)
        (out, lse), past = cache.attend((q, rotated, v), ctx.scale, self._turned(ctx))
        valid_B = segment.valid_of(rows)
        return Look(self, cache, segment, ctx, valid_B, out, lse, q, past, rotated, v, store)

    def read_and_append(
        self, new: QKV, cache: BudgetCache, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, BudgetCache]:
        """Attention over the cache and the text's columns, which join it without eviction."""
        seen = self.look(new, cache, segment, ctx)
        return (seen.out, seen.lse), cache.append(seen.store_k, seen.v, segment.valid_of())

    def answer(
        self, new: QKV, cache: AnswerCache, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, AnswerCache]:
        """One token joins, reads all, and the oldest that may leave does if the cache is full."""
        q, k, v = new
        store, sinks, valid_B = cache.store, cache.sinks, segment.valid_of()
        ctx, limit, number_B = self._bounded(ctx), cache.limit, cache.store.number
        at_B1 = (number_B if self.positions == "shifted" else store.position)[:, None]
        if sinks is not None:
            assert store.k is not None
            first_F = jnp.arange(sinks.shape[2])
            joins_BF = (first_F == at_B1) & (valid_B > 0)[:, None]
            sinks = jnp.where(joins_BF[:, None, :, None], jnp.swapaxes(k, 1, 2), sinks)
            left_B1 = jnp.maximum(at_B1 + 1 - limit, 0)
            nearer = ctx.rotate(jnp.swapaxes(sinks, 1, 2), first_F + left_B1)
            held_B = jnp.minimum(number_B, sinks.shape[2])
            moved = write_rows(store.k, nearer, jnp.zeros_like(number_B), held_B)
            store = dataclasses.replace(store, k=moved)
        store = store.push(ctx.rotate(k, at_B1), v, valid_B, limit)
        part = store.read(ctx.rotate_queries(q, at_B1), limit, ctx.scale)
        return part, dataclasses.replace(cache, store=store, sinks=sinks)

    def _bounded(self, ctx: LayerContext) -> LayerContext:
        """A rotary base that follows the length must follow the largest position."""
        if self.positions == "true":
            return ctx
        return dataclasses.replace(ctx, total=jnp.minimum(ctx.total, self.budget + self.chunk))

    def _rotated(
        self, q: Array, k: Array, cache: BudgetCache, ctx: LayerContext
    ) -> tuple[Array, Array, Array]:
        """Queries and new keys under rotary embedding, and the new keys to store."""
        shifted, ctx = self.positions == "shifted", self._bounded(ctx)
        at_BT = self.next_position(cache)[:, None] + jnp.arange(q.shape[1])
        rotated = ctx.rotate(k, at_BT)
        return ctx.rotate_queries(q, at_BT), rotated, k if shifted else rotated

    def _turned(self, ctx: LayerContext) -> LayerContext | None:
        """How cached keys are to be rotated to their slots; None where they are rotated."""
        return None if self.positions == "true" else self._bounded(ctx)

    def evict(self, seen: Look) -> BudgetCache:
        """Keeps the best-ranked tokens by the protocol; a row without valid tokens keeps all."""
        cache, sums = seen.cache, self.gained(seen)
        if sums is not None:
            assert cache.statistics is not None
            sums += jnp.pad(cache.statistics, ((0, 0), (0, 0), (0, seen.k.shape[1]), (0, 0)))
        count_B = cache.length + seen.joining - seen.leaving
        new = Joining(seen.store_k, seen.v, sums, count_B, seen.joining)
        # One token joins: at most one leaves.
        one = seen.k.shape[1] == 1 and (self.protocol == "own" or self.chunk == 1)
        if self.first is not None:
            how = {"first": self.first, "leaving": seen.leaving, "one": one}
            return drop_oldest(cache, new, after=seen.out, **how)
        scores = self.rank(dataclasses.replace(seen, sums=sums))
        heads, candidates = cache.k.shape[1], seen.order.shape[2]
        if scores.shape not in [(len(cache.length), n, candidates) for n in (1, heads)]:
            raise ConfigError(
                f"{type(self).__name__}.rank gave scores of shape {scores.shape}; expected "
                f"[B, K, U] or [B, 1, U], here {(len(cache.length), heads, candidates)}"
            )
        scores = jnp.where(seen.competing, scores, jnp.inf)
        # Tokens that do not join stay out at any score.
        held = seen.present & (seen.order < seen.length + seen.joining[:, None, None])
        scores = jnp.where(held, scores, -jnp.inf)
        scores_BKU = jnp.broadcast_to(scores, (*cache.k.shape[:2], scores.shape[2]))
        return choose(cache, new, scores_BKU, one=one)

    def finish(self, cache: Any, ctx: LayerContext, stage: Stage, reserve: int) -> Any:
        """Nothing changes at the end of the context; after the question keys are rotated."""
        if stage == "context":
            return cache
        own, slots = self.protocol == "own", cache.k.shape[2]
        first = self.first if own and self.first else 0
        room = padded(self.budget + 1) if own else slots
        k, v = cache.in_room(room, self._turned(ctx))
        held_BC = jnp.arange(slots) < cache.length[:, None]
        chosen = jnp.where(held_BC[:, None], cache.token, -1)
        counts = (cache.length, jnp.zeros_like(cache.length), cache.position)
        axes = {"chosen_axis": cache.slots_axis, "slots_axis": cache.slots_axis}
        store = FifoCache(chosen, *counts, k, v, **axes, first=first)
        turns = first and self.positions == "shifted"
        sinks = numbers(cache.k)[:, :, :first] if turns else None
        return AnswerCache(store, sinks, self.budget if own else None)

    def hand_over(
        self, cache: BudgetCache, ctx: LayerContext, reserve: int, *, raw: bool = False
    ) -> AppendCache:
        # Shifted keys are stored before rotary embedding.
        k, v = cache.in_room(cache.k.shape[2], None if raw else self._turned(ctx))
        turned = cache.token if raw and self.positions == "true" else None
        return cache_of(k, v, cache.length, self.next_position(cache), reserve, ctx, turned)

    def next_position(self, cache: BudgetCache) -> Int[Array, " B"]:
        return cache.length if self.positions == "shifted" else cache.position

    def handed_context(self, ctx: LayerContext) -> LayerContext:
        return self._bounded(ctx)

    def stays(self, length: int) -> int:
        return min(length, self.budget)

    def fork(self, cache: Any) -> Any:
        """A copy: decode evicts, and evicted tokens cannot come back."""
        return jax.tree.map(jnp.copy, cache)

    def read_bytes(self, cache: Any, length: int) -> int:
        """Every slot's key and value; where decode ranks tokens, also their indices and sums."""
        return cache.step_bytes
