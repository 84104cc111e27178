"""What methods that evict share: a segment against a budgeted cache, and when tokens leave it.

A method that evicts looks at a segment (`look`: attention over the cache and the segment itself),
ranks slots and new tokens, and keeps the best. Positions are

- `shifted`: keys are stored before rotary embedding and rotated by their *slot* each time, queries
  by the slots that follow, so that no position exceeds the cache (StreamingLLM, section 3.2);
- `true`: keys are stored rotated at their index in the text; gaps remain.

When tokens leave is the protocol:

- `own`: a segment's tokens join, then the best `budget` of all stay; also while answering;
- `citrus` (CItruS, sections 4.3 and 5.2, for itself and its baselines): only the tokens that were
  there before a chunk may leave, down to budget - chunk, then the chunk joins; the question first
  looks at the cache (`probe`) and evicts once more, is then read, and the answer grows the cache.
"""

import dataclasses
import typing
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_longctx.caches import (
    BudgetCache,
    append_budget,
    choose,
    empty_budget_cache,
    replace_one,
)
from jax_longctx.contract import (
    QKV,
    Attended,
    CacheShape,
    LayerContext,
    Prompt,
    Segment,
    Stage,
    chunk_segments,
)
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.models.config import ModelConfig
from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.lse import merge
from pallas_kernels.prefill_attention import cache_attention, causal_attention

__all__ = [
    "Evictor",
    "Look",
    "Positions",
    "Protocol",
    "accumulated",
    "check",
    "empty_cache",
    "evict",
    "finish",
    "fork",
    "joining",
    "leaving",
    "look",
    "may_leave",
    "only_joins",
    "probed_question",
    "question_width",
    "reach",
    "read_and_append",
    "read_bytes",
    "segments",
    "validate",
]

Positions = Literal["shifted", "true"]
Protocol = Literal["own", "citrus"]


class Evictor(typing.Protocol):
    """What every method that evicts says of itself.

    Attributes:
      budget: tokens that a layer's cache holds; under `citrus` the newest chunk among them.
      chunk: tokens of the context read between two evictions.
    """

    @property
    def budget(self) -> int: ...
    @property
    def chunk(self) -> int: ...
    @property
    def positions(self) -> Positions: ...
    @property
    def protocol(self) -> Protocol: ...


@dataclasses.dataclass(frozen=True)
class Look:
    """A segment's attention over a budgeted cache and itself, and what ranking needs of it.

    The joint axis U = C + T holds the cache's slots, then the segment's tokens.

    Attributes:
      out, lse: the attention of the segment's T tokens.
      q: queries, rotated.
      past_k: the cache's keys, rotated.
      k, v: the segment's keys (rotated) and values.
      store_k: the segment's keys as the cache stores them.
      length, valid: slots and tokens of each row that count.
      scale: factor of the attention logits.
    """

    out: Float[Array, "B T N H"]
    lse: Float[Array, "B T N"]
    q: Float[Array, "B T N H"]
    past_k: Float[Array, "B K C H"]
    k: Float[Array, "B T K H"]
    v: Float[Array, "B T K H"]
    store_k: Float[Array, "B T K H"]
    length: Int[Array, " B"]
    valid: Int[Array, " B"]
    scale: float

    @property
    def present(self) -> Bool[Array, "B U"]:
        """Slots and tokens that hold something."""
        slots_BC = jnp.arange(self.past_k.shape[2]) < self.length[:, None]
        tokens_BT = jnp.arange(self.k.shape[1]) < self.valid[:, None]
        return jnp.concatenate([slots_BC, tokens_BT], axis=1)

    @property
    def order(self) -> Int[Array, "B U"]:
        """Rank of each slot and token in the row's order, 0 the oldest."""
        slots_C = jnp.arange(self.past_k.shape[2])
        tokens_BT = self.length[:, None] + jnp.arange(self.k.shape[1])
        slots_BC = jnp.broadcast_to(slots_C, (tokens_BT.shape[0], slots_C.shape[0]))
        return jnp.concatenate([slots_BC, tokens_BT], axis=1)

    @property
    def onlookers(self) -> Float[Array, "B U"]:
        """How many valid queries see each slot and token: token t those from t on; float32."""
        slots_BC = jnp.broadcast_to(self.valid[:, None], (len(self.valid), self.past_k.shape[2]))
        after_BT = self.valid[:, None] - jnp.arange(self.k.shape[1])
        return jnp.concatenate([slots_BC, after_BT], axis=1).astype(jnp.float32)

    def mass(self, **options: Any) -> Any:
        """`attention_mass` of the segment's valid queries on every slot and token, `[B, K, U]`.

        `options` are those of `attention_mass`; with `squares` a pair comes back.
        """
        how = {"scale": self.scale, "valid": self.valid, **options}
        past = attention_mass(self.q, self.past_k, self.lse, self.length, **how)
        k_BKTH = jnp.swapaxes(self.k, 1, 2)
        start = jnp.zeros_like(self.length)
        new = attention_mass(self.q, k_BKTH, self.lse, self.valid, causal_start=start, **how)
        if isinstance(past, tuple):
            return tuple(jnp.concatenate(pair, axis=2) for pair in zip(past, new, strict=True))
        return jnp.concatenate([past, new], axis=2)


def _rotate_slots(k: Float[Array, "B K C H"], ctx: LayerContext) -> Float[Array, "B K C H"]:
    """Keys of a cache rotated by their slots."""
    slots = jnp.broadcast_to(jnp.arange(k.shape[2]), (k.shape[0], k.shape[2]))
    return jnp.swapaxes(ctx.rotate(jnp.swapaxes(k, 1, 2), slots), 1, 2)


def _bounded(method: "Evictor", ctx: LayerContext) -> LayerContext:
    """The length that a rotary base may follow is what the text's positions stay below."""
    if method.positions == "true":
        return ctx
    most = method.budget + method.chunk
    return dataclasses.replace(ctx, total=jnp.minimum(ctx.total, most))


def _rotated(
    method: "Evictor", q: Array, k: Array, cache: BudgetCache, ctx: LayerContext
) -> tuple[Array, Array, Array, Array]:
    """Queries, new keys and cached keys under rotary embedding, and the new keys to store."""
    shifted = method.positions == "shifted"
    start_B = cache.length if shifted else cache.position
    at_BT = start_B[:, None] + jnp.arange(q.shape[1])
    rotated = ctx.rotate(k, at_BT)
    past = _rotate_slots(cache.k, ctx) if shifted else cache.k
    return ctx.rotate(q, at_BT), rotated, past, k if shifted else rotated


def look(
    method: "Evictor", new: QKV, cache: BudgetCache, valid: Int[Array, " B"], ctx: LayerContext
) -> Look:
    """The segment over every slot of the cache and, causally, itself; the cache is not changed."""
    q, k, v = new
    q, rotated, past, store = _rotated(method, q, k, cache, _bounded(method, ctx))
    # No window: `validate` has refused those that such a cache could outgrow.
    earlier = cache_attention(q, past, cache.v, cache.length, scale=ctx.scale)
    within = causal_attention(q, rotated, v, scale=ctx.scale)
    out, lse = merge([earlier, within])
    return Look(out, lse, q, past, rotated, v, store, cache.length, valid, ctx.scale)


def read_and_append(
    method: "Evictor", new: QKV, cache: BudgetCache, valid: Int[Array, " B"], ctx: LayerContext
) -> tuple[Attended, BudgetCache]:
    """Attention over the cache and the segment, which joins it; nothing leaves."""
    q, k, v = new
    if q.shape[1] > 1:
        seen = look(method, new, cache, valid, ctx)
        return (seen.out, seen.lse), append_budget(cache, seen.store_k, v, valid)
    ctx = _bounded(method, ctx)
    q, _, _, store = _rotated(method, q, k, cache, ctx)
    cache = append_budget(cache, store, v, valid)
    keys = _rotate_slots(cache.k, ctx) if method.positions == "shifted" else cache.k
    return decode_attention(q, keys, cache.v, cache.length, scale=ctx.scale), cache


def only_joins(method: "Evictor", segment: Segment) -> bool:
    """Whether the segment's tokens join the cache and nothing leaves it."""
    return method.protocol == "citrus" and segment.role in ("query", "decode")


def may_leave(method: "Evictor", seen: Look) -> Bool[Array, "B U"]:
    """The slots and tokens that compete: all of them, or under `citrus` those cached before."""
    if method.protocol == "own":
        return seen.present
    return seen.present & (jnp.arange(seen.present.shape[1]) < seen.past_k.shape[2])


def leaving(method: "Evictor", seen: Look) -> Int[Array, " B"]:
    """How many of them leave with this segment; none in a row that has no token in it."""
    if method.protocol == "own":
        over_B = seen.length + seen.valid - method.budget
    else:
        over_B = seen.length - (method.budget - method.chunk)
    return jnp.where(seen.valid > 0, jnp.maximum(over_B, 0), 0)


def joining(segment: Segment, seen: Look) -> Int[Array, " B"]:
    """The segment's tokens that the cache is to hold; a probe leaves none."""
    return jnp.zeros_like(seen.valid) if segment.role == "probe" else seen.valid


def accumulated(cache: BudgetCache, added: Float[Array, "B K U M"]) -> Float[Array, "B K U M"]:
    """The running sums of slots and tokens after this segment; new tokens begin at zero."""
    assert cache.statistics is not None
    tokens = added.shape[2] - cache.statistics.shape[2]
    return added + jnp.pad(cache.statistics, ((0, 0), (0, 0), (0, tokens), (0, 0)))


def evict(
    method: "Evictor",
    cache: BudgetCache,
    seen: Look,
    scores: Float[Array, "B K U"],
    segment: Segment,
    statistics: Float[Array, "B K U M"] | None = None,
) -> BudgetCache:
    """Keeps the best-scored tokens as the protocol says; no score counts where nothing is.

    A row without tokens in this segment keeps what it has. `statistics` of slots and tokens are
    carried along.
    """
    joining_B = joining(segment, seen)
    scores = jnp.where(may_leave(method, seen)[:, None], scores, jnp.inf)
    # What does not join stays out, whatever its score.
    order_BU = seen.order
    held_BU = seen.present & (order_BU < (seen.length + joining_B)[:, None])
    scores = jnp.where(held_BU[:, None], scores, -jnp.inf)
    count_B = seen.length + joining_B - leaving(method, seen)
    single = seen.k.shape[1] == 1 and (method.protocol == "own" or method.chunk == 1)
    keep = replace_one if single else choose
    return keep(cache, seen.store_k, seen.v, scores, statistics, count_B, joining_B)


def check(method: "Evictor", kept: int = 1) -> None:
    """Raises ConfigError unless the budget holds the `kept` tokens that never leave at once.

    Under the protocol `citrus` a chunk must fit beside them.
    """
    name = type(method).__name__
    if method.chunk < 1:
        raise ConfigError(f"{name}: chunk must be at least 1 token, got {method.chunk}")
    citrus = method.protocol == "citrus"
    room = method.budget - method.chunk if citrus else method.budget
    if room < kept:
        less = f" less chunk {method.chunk}" if citrus else ""
        raise ConfigError(
            f"{name}: budget {method.budget}{less} leaves {room} tokens, but the method always "
            f"keeps {kept}; raise budget"
        )


def validate(self: "Evictor", config: ModelConfig) -> None:
    """Refuses positions that the model was not trained to, and windows that hide what is kept."""
    name, most = type(self).__name__, self.budget + self.chunk
    if self.positions == "shifted" and most > config.trained_length:
        raise ConfigError(
            f"{name}: budget {self.budget} + chunk {self.chunk} = {most} positions, more than the "
            f"{config.trained_length} that the model was trained to; lower them"
        )
    windows = [window for window in config.windows if window is not None]
    if not windows:
        return
    least = min(windows)
    if self.positions == "true":
        raise ConfigError(
            f"{name}: this model has layers with a sliding window of {least} tokens, which "
            f"positions=true does not support; use positions=shifted"
        )
    if least < most:
        raise ConfigError(
            f"{name}: budget {self.budget} and chunk {self.chunk} exceed the model's sliding "
            f"window of {least} tokens; lower them"
        )


def reach(self: "Evictor", config: ModelConfig, tokens: int) -> int:
    """Slots that a segment is read at where keys stand at their slots, else the text's length."""
    return tokens if self.positions == "true" else min(tokens, self.budget + self.chunk)


def segments(self: "Evictor", prompt: Prompt) -> Iterable[Segment]:
    """The context in chunks of the method's own size; the question as the protocol says.

    Raises:
      InputError: under `citrus`, a question longer than the cache which it looks at.
    """
    if prompt.stage == "context":
        return chunk_segments(prompt.context or (), self.chunk, "context")
    question = prompt.question or ()
    if self.protocol == "own":
        return chunk_segments(question, self.chunk, "query")
    return probed_question(self, question)


def probed_question(method: "Evictor", question: Sequence[Sequence[int]]) -> list[Segment]:
    """The question as a probe and then as a query, one segment each: it looks as a whole."""
    width = question_width(method, question)
    return [
        *chunk_segments(question, width, "probe"),
        *chunk_segments(question, width, "query"),
    ]


def question_width(method: "Evictor", question: Sequence[Sequence[int]]) -> int:
    """Columns for a question that looks as a whole: in powers of two, for few compilations.

    Raises:
      InputError: the question is longer than the cache which it looks at.
    """
    longest = max(map(len, question), default=1)
    if longest > method.budget:
        raise InputError(
            f"{type(method).__name__}: the question has {longest} tokens, more than the cache's "
            f"budget of {method.budget}; move text from the question to the context, or raise "
            f"budget"
        )
    return 1 << max(longest - 1, 7).bit_length()


def empty_cache(method: "Evictor", shape: CacheShape, statistics: int = 0) -> BudgetCache:
    """Slots for the budget; also for question and answer, and growing, where they only join."""
    grows = method.protocol == "citrus"
    slots = method.budget + (shape.reserve if grows else 0)
    return empty_budget_cache(shape, slots, statistics, grows=grows)


# The duties that are the same for every method that evicts.


def finish(self: "Evictor", cache: Any, ctx: LayerContext, stage: Stage, reserve: int) -> Any:
    """Nothing changes at the end of the context."""
    return cache


def fork(self: "Evictor", cache: Any) -> Any:
    """A copy: answering evicts, and what has left cannot come back."""
    return jax.tree.map(jnp.copy, cache)


def read_bytes(self: "Evictor", cache: BudgetCache, length: int) -> int:
    """Every slot's key and value; where answering evicts, what goes with them too."""
    answering = (cache.k, cache.v) if self.protocol == "citrus" else cache
    return sum(leaf.nbytes for leaf in jax.tree.leaves(answering))
