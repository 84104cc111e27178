"""The kind that compresses a text that it has read, before it knows the question.

Prefill is exact attention over an append-only cache. At the end of the context each kv head ranks
its tokens and keeps the best: their keys (rotated at their true positions) and values move, in the
text's order, to a smaller append-only cache. The first `sink` tokens and the last `local` ones stay
before all others. Question and answer are appended behind, at the positions that follow the whole
text. So a context is compressed once and asked many questions.

Heads keep different tokens: a slot holds one token in one head and another in the next. Rows keep
`budget` tokens each, or a share `ratio` of their own length; heads as many, or what they have of
their sum (`layer_budgets`).

With an `interval` tokens leave during an answer too. The cache then has slots for `budget` +
`interval` tokens and never grows, however long the answer. After each part of the question, and
after each `interval` tokens of the answer, the tokens that are held compete by the same rule, and
the best `budget` stay. Rows of a batch do so each at its own time. The kind `Evicting` ranks after
each token, by the attention that the token gave, and need not read the whole text first. It is
another kind, since a rule here costs too much for each step, and has the whole text before it.

Cost: prefill as full attention; a decode step reads what stays. A step in which tokens leave also
ranks and moves what the cache holds.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_longctx.caches import AppendCache, compacted, where_rows, with_store, written_after
from jax_longctx.contract import QKV, Feed, LayerContext, Segment, Stage, WithCache
from jax_longctx.contract.context import rope_angles
from jax_longctx.parts.head_budgets import share
from jax_longctx.parts.layer_budgets import Budgeted, Ranked, stepped

# The variant of an answer's steps after which tokens leave.
LEAVING = "leaving"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compressing(Budgeted):
    """A method that keeps, at the end of the context, each kv head's tokens of the highest scores.

    Attributes:
      ratio: the budget as a share of the context, in place of `budget`.
      sink: first tokens that always stay.
      local: last tokens that always stay, of the context or of all that was read since.
      interval: tokens of an answer after which tokens leave again; None: only at the end of the
        context.
    """

    ratio: float | None = None
    sink: int = 4
    local: int = 0
    interval: int | None = None

    phase = "decode"
    keeps_all = False
    hands_over = "context"
    # Why its rule cannot rank an answer's tokens; None where it can.
    cannot_go_on: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        self.at_least(1, "budget")
        self.at_least(0, "sink", "local")
        self.at_least(1, "interval")
        super().__post_init__()
        self.fraction("ratio", above_zero=True)
        if self.ratio is None and self.budget < self.sink + self.local:
            raise self.refused(
                f"budget {self.budget} must hold sink + local = {self.least} tokens; raise budget"
            )
        if self.interval is not None and self.ratio is not None:
            raise self.refused("interval needs a budget in tokens; leave ratio out")
        if self.interval is not None and self.cannot_go_on is not None:
            raise self.refused(f"no interval: {self.cannot_go_on}")
        if self.interval is not None and self.over_heads != "uniform":
            raise self.refused(
                f"no interval with over_heads={self.over_heads}: what heads keep of a budget that "
                "they share is not ranked again; leave interval out, or take over_heads=uniform"
            )

    @property
    def cannot_hand_over(self) -> str | None:
        if self.interval is None:
            return super().cannot_hand_over
        return "with an interval it drops tokens during answers; take interval=none"

    @property
    def append_only(self) -> bool:
        return self.interval is None

    @property
    def query_aware(self) -> bool:
        # A question competes with the text.
        return self.interval is not None

    @property
    def least(self) -> int:
        return max(self.sink + self.local, 1)

    def own_budget(self, layer: int, layers: int) -> dict[str, float]:
        if self.ratio is None:
            return super().own_budget(layer, layers)
        most = min(self.ratio * (2 - 1 / self.beta), 1.0)
        return {"ratio": max(round(stepped(self.ratio, most, layer, layers), 4), 0.0001)}

    # What a method defines.

    def scores(self, cache: Any, ctx: LayerContext) -> Float[Array, "B K S"]:
        """How each kv head ranks the tokens in the slots of all shards, in the text's order.

        float32, the same on every shard of the slots; `whole` makes them of a shard's own. Slots
        beyond a row's length may hold any number.

        Args:
          cache: as prefill left it; keys and values are in `cache.store`.
        """
        raise NotImplementedError(f"{self.name}: a method that compresses defines scores")

    def gathered(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> Any:
        """The cache, with what the rule learns of a segment that it is about to read.

        Not called where the cache is a store alone.
        """
        return cache

    # The duties.

    def segments(self, feed: Feed) -> Iterable[Segment]:
        """As `Appending` has them; with an interval, a question in parts of at most that."""
        if feed.stage == "question" and self.interval is not None:
            feed = dataclasses.replace(feed, chunk=min(feed.chunk, self.interval))
        return super().segments(feed)

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        competes = self.interval is not None and segment.role != "context"
        ctx, valid_B = (ctx.undivided() if competes else ctx), segment.valid_of()
        if competes and segment.role == "query":
            # It may follow on an answer whose last tokens left too little room.
            cache = self._shrunk(cache, valid_B, ctx)
        part, store = super().attend(new, cache.store, segment, ctx)
        if cache.store is not cache:
            cache = self.gathered(new, cache, segment, ctx)
        if competes and (segment.role == "query" or segment.variant == LEAVING):
            # Nothing moves before it was read: XLA would copy the caches of all layers.
            store, part = written_after(store, part)
            return part, self._shrunk(with_store(cache, store), valid_B, ctx)
        return part, with_store(cache, store)

    def _shrunk(self, cache: Any, valid: Int[Array, " B"], ctx: LayerContext) -> Any:
        """The cache without what exceeds the budget, in rows with valid tokens."""
        over_B = (cache.store.length > self.budget) & (valid > 0)
        return with_store(cache, where_rows(over_B, self._fixed(cache, ctx), cache.store))

    def step_variant(self, step: int) -> str:
        return LEAVING if self.interval is not None and step % self.interval == 0 else ""

    def finish(self, cache: Any, ctx: LayerContext, stage: Stage, reserve: int) -> Any:
        """The kept tokens, with room for `reserve` more.

        With an interval the room is for that many, and what the rule has gathered stays.
        """
        if self.interval is not None:
            return with_store(cache, self._fixed(cache, ctx))
        return self.hand_over(cache, ctx, reserve).end_context(reserve)

    def fork(self, cache: Any) -> Any:
        """A copy where an answer's tokens evict those of the context."""
        return super().fork(cache) if self.append_only else jax.tree.map(jnp.copy, cache)

    def hand_over(self, cache: Any, ctx: LayerContext, reserve: int, *, raw: bool = False) -> Any:
        store: AppendCache = cache.store
        # A row leaves `reserve` slots free, so no row is longer.
        size = max(self._kept(store.sizes[2] * ctx.seq_size - reserve), 1)
        count_B = jnp.minimum(jnp.maximum(self._kept(store.length), 1), store.length)
        ranked = Ranked(self._ranked(cache, ctx), count_B, size)
        return self.what_stays(store, ranked, reserve, ctx, raw=raw)

    def _fixed(self, cache: Any, ctx: LayerContext) -> AppendCache:
        """The best `budget` tokens, in slots that are whole on every shard and never grow."""
        assert self.interval is not None
        count_B = jnp.minimum(cache.store.length, self.budget)
        slots_BKC = Ranked(self._ranked(cache, ctx), count_B, self.budget).best()
        # The last of the interval's tokens joins, and tokens leave: no slot to spare is needed.
        return compacted(cache.store, slots_BKC, count_B, self.interval - 1, ctx, whole=True)

    def _ranked(self, cache: Any, ctx: LayerContext) -> Float[Array, "B K S"]:
        """The scores, inf of tokens that always stay and -inf of empty slots."""
        length_B1 = cache.store.length[:, None]
        index_S = jnp.arange(cache.store.sizes[2] * ctx.seq_size)
        fixed_BS = (index_S < self.sink) | (index_S >= length_B1 - self.local)
        scores_BKS = jnp.where(fixed_BS[:, None], jnp.inf, self.scores(cache, ctx))
        scores_BKS = jnp.where((index_S < length_B1)[:, None], scores_BKS, -jnp.inf)
        return scores_BKS

    def stays(self, length: int) -> int:
        return max(self._kept(length), 1)

    def _kept(self, length: Any) -> Any:
        """Tokens kept of a context of that length, an int or an array; an array may exceed it."""
        if self.ratio is not None:
            return share(self.ratio, length)
        return min(self.budget, length) if isinstance(length, int) else self.budget


def whole(own: Float[Array, "B K C *H"], ctx: LayerContext) -> Float[Array, "B K S *H"]:
    """The numbers of all S slots, in the text's order, from those of this shard's C."""
    return ctx.slots(own.shape[2]).whole(own, axis=2)


def future_angles(
    position: Int[Array, " B"], ahead: Any, width: int, ctx: LayerContext
) -> tuple[Float[Array, "B 1 F"], Float[Array, "B 1 F"]]:
    """cos and sin of the mean rotation of queries at `position` + each of `ahead`.

    Each is taken times what the model multiplies queries with there.
    """
    at_BX = position[:, None] + ahead
    angles = rope_angles(ctx.rope, width, at_BX, ctx.total)
    cos, sin = (jnp.mean(ctx.growth(at_BX)[..., None] * x, axis=1, keepdims=True) for x in angles)
    return cos, sin
