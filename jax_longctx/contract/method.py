"""What a long-context method is: a frozen dataclass of hyper-parameters with five duties.

The dataclass is a static argument of `jit`. The duties are

1. `init_cache(shape)`: the cache of one layer, a dataclass whose fields say their logical axes;
2. `segments(feed)`: the context or the question as `Segment`s of fixed shapes;
3. `attend(new, cache, segment, ctx)`: attention of one layer over one segment, and the new cache;
   queries, keys and values arrive before rotary embedding;
4. `finish(cache, ctx, stage, reserve)`: the end of the context (or the question); the cache may
   change its shapes here;
5. `fork(cache)`: the cache at the end of the context, for one more question;

and `info`, its metadata. `@method` names it. The model and the engine know no method by name. All
that the engine may ask besides has a default in the class `Method`. This module also has what
passes between engine and method: `CacheShape`, `Feed`, and `Segment` with the functions that make
segments.

`attend` and `finish` run inside one `shard_map` that is manual over the mesh axes `data`, `seq`
and `tensor`, also on one device. They see the local rows, heads and slots, and reach other shards
only through `LayerContext`. Where floats decide a branch (`lax.cond`, `lax.while_loop`) that holds
a collective, the predicate comes from `LayerContext.agree`, and so do the counters and references
that go with it. Integers that are equal on all shards (lengths, steps) need no agreement.
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, cast, dataclass_transform

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from jax_longctx.contract.context import QKV, LayerContext, WithCache
from jax_longctx.errors import ConfigError
from jax_longctx.models.config import ModelConfig
from jax_longctx.settings import Offload, StoredForm, at_least
from jax_longctx.sharding import OwnAxis, axes_field
from pallas_kernels.quantised import empty

Phase = Literal["none", "prefill", "decode", "both"]
Role = Literal["context", "probe", "probe_and_context", "query", "decode"]
Stage = Literal["context", "question"]

# The row groups of a segment.
CHUNK_ROWS = "chunk"
INSTRUCTION_ROWS = "instruction"
# The variant of segments where a row ends, for methods that do more there.
ENDS = "ends"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodInfo:
    """What a method does to inference; printed by `jax-longctx methods`.

    Attributes:
      summary: one line for a user.
      source: paper and section.
      phase: the phase of inference that it changes.
      query_aware: whether the tokens kept or read depend on the question.
      by_values: whether they depend on values; then outputs do not show the attention weights.
      keeps_all: whether every key of the context stays in memory.
      needs_question: whether prefill needs the question (one prefill a question).
      append_only: whether `fork` is a rewind that shares the context's buffers; if not it copies.
      looks_ahead: whether tokens that are read together choose together what they attend. Then a
        prediction uses later tokens, unless its token is read alone.
      answers_apart: whether an answer has a cache of its own, which `finish` makes at the end of
        the question. The context's stays, and is freed when no other question will follow.
    """

    summary: str
    source: str
    phase: Phase
    query_aware: bool
    keeps_all: bool
    needs_question: bool
    append_only: bool
    looks_ahead: bool = False
    answers_apart: bool = False
    by_values: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheShape:
    """What a method needs to allocate one layer's cache, in global (unsharded) sizes.

    Attributes:
      slots: capacity in tokens for context, question and answer.
      reserve: the part of it for question and answer.
      chunk: most tokens of a segment.
      shards: shards that hold the slots.
      kv: the 8-bit form of keys and values; None for arrays of `dtype`. `empty_slots` knows it. A
        method that makes its keys and values otherwise keeps them as floats.
      offload: keys and values lie in the host's memory, in stores that `caches.empty_store` makes;
        None for the devices' memory.
    """

    batch: int
    slots: int
    reserve: int
    chunk: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: Any
    window: int | None
    shards: int = 1
    kv: StoredForm | None = None
    offload: Offload | None = None

    def empty_slots(self, count: int) -> Any:
        """Empty keys or values of `count` slots, [B, K, count, H], as the engine stores them."""
        return empty((self.batch, self.num_kv_heads, count, self.head_dim), self.dtype, self.kv)


@dataclasses.dataclass(frozen=True)
class RowGroup:
    """A named block of a segment's T columns: `columns = slice(start, start + size)`."""

    name: str
    start: int
    size: int

    @property
    def columns(self) -> slice:
        return slice(self.start, self.start + self.size)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Segment:
    """A fixed-shape piece of the prompt, fed through the model in one pass.

    Attributes:
      tokens: token ids; within each row group, row b's first `valid[b, group]` columns are valid.
        The rest is padding, which no cache keeps and no score counts.
      valid: valid tokens of each row in each group; a row with none is a complete no-op.
      ends: whether the row's context (or question) ends with this segment.
      role: `context`: the text itself; `probe`: tokens that attend to the context without joining
        it; `probe_and_context`: both, in two row groups; `query`: the question, whose last token's
        logits start the answer; `decode`: one generated token.
      groups: static layout of the columns. Positions come from the cache.
      variant: a static tag of the method, for programs that differ.
      spread: the columns are divided over the shards of the slots, one row group. A shard computes
        its own columns; the first `valid[b, shard]` are valid.
    """

    tokens: Int[Array, "B T"] = axes_field("batch", OwnAxis("token_axis"))
    valid: Int[Array, "B R"] = axes_field("batch", OwnAxis("valid_axis"))
    ends: Bool[Array, " B"] = axes_field("batch")
    role: Role = dataclasses.field(default="context", metadata={"static": True})
    groups: tuple[RowGroup, ...] = dataclasses.field(default=(), metadata={"static": True})
    variant: str = dataclasses.field(default="", metadata={"static": True})
    spread: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def token_axis(self) -> str | None:
        """The logical axis of the columns."""
        return "tokens" if self.spread else None

    @property
    def valid_axis(self) -> str | None:
        """The logical axis of a row's `valid`."""
        return "shards" if self.spread else None

    @property
    def chunk_lengths(self) -> np.ndarray:
        """On the host: tokens of text in each row; 0 where the segment is a probe alone."""
        if self.spread:
            return np.asarray(self.valid).sum(axis=1)
        for column, group in enumerate(self.groups):
            if group.name == CHUNK_ROWS:
                return np.asarray(self.valid)[:, column]
        return np.zeros(self.valid.shape[0], np.int32)

    def group(self, name: str) -> RowGroup:
        """The row group of that name; KeyError when the segment has none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise KeyError(f"segment {self.role!r} has row groups {[g.name for g in self.groups]}")

    def valid_of(self, name: str = CHUNK_ROWS) -> Int[Any, " B"]:
        """Valid tokens of each row in the named group."""
        return self.valid[:, self.groups.index(self.group(name))]


@dataclasses.dataclass(frozen=True)
class Feed:
    """What a method takes into its cache at one stage: token rows, each of its own length.

    At stage `context` the question is None unless the method needs it at prefill. At stage
    `question` the context is in the cache and `context` is None.

    Attributes:
      slots, shards: capacity of the caches, and the number of shards that hold it.
      vocab_size: number of token ids.
      asks: tokens of `Method.asks`; none where there is no tokenizer.
    """

    stage: Stage
    chunk: int
    context: Sequence[Sequence[int]] | None = None
    question: Sequence[Sequence[int]] | None = None
    slots: int = 0
    shards: int = 1
    vocab_size: int = 0
    asks: Sequence[Sequence[int]] = ()

    @property
    def rows(self) -> Sequence[Sequence[int]]:
        """The rows of this stage."""
        return (self.context if self.stage == "context" else self.question) or ()


def make_segment(rows: Sequence[Sequence[int]], size: int, role: Role, ends: np.ndarray) -> Segment:
    """One row group of `size` columns from rows of at most that length, padded on the right."""
    tokens = np.zeros((len(rows), size), np.int32)
    for b, row in enumerate(rows):
        tokens[b, : len(row)] = row
    valid = np.array([[len(row)] for row in rows], np.int32)
    # numpy arrays on the host, which become JAX arrays at the `jit` border.
    arrays = cast(tuple[Any, Any, Any], (tokens, valid, ends))
    return Segment(*arrays, role, (RowGroup(CHUNK_ROWS, 0, size),))


def spread_segment(
    rows: Sequence[Sequence[Sequence[int]]], size: int, ends: np.ndarray, variant: str = ""
) -> Segment:
    """Context tokens `rows[b][shard]`, in `size` columns on each shard."""
    shards = len(rows[0])
    tokens = np.zeros((len(rows), shards, size), np.int32)
    for b, row in enumerate(rows):
        for shard, part in enumerate(row):
            tokens[b, shard, : len(part)] = part
    valid = np.array([[len(part) for part in row] for row in rows], np.int32)
    arrays = cast(tuple[Any, Any, Any], (tokens.reshape(len(rows), -1), valid, ends))
    groups = (RowGroup(CHUNK_ROWS, 0, shards * size),)
    return Segment(*arrays, "context", groups, variant, spread=True)


def decode_segment(
    tokens: Int[Any, "B 1"], valid: Int[Any, "B 1"], done: Bool[Any, " B"], variant: str
) -> Segment:
    """One generated token of each row; `valid` is 0 in rows that are done."""
    return Segment(tokens, valid, done, "decode", (RowGroup(CHUNK_ROWS, 0, 1),), variant)


def chunk_segments(rows: Sequence[Sequence[int]], chunk: int, role: Role) -> Iterator[Segment]:
    """Ragged rows in chunks of `chunk` tokens, each padded to that.

    Row b contributes `clip(len_b - i * chunk, 0, chunk)` tokens to chunk i. Where all rows fit in
    one chunk it is padded to `tail_size`. So texts of any lengths share few programs.
    """
    lengths = np.array([len(row) for row in rows])
    longest = int(lengths.max(initial=0))
    size = tail_size(min(chunk, longest), chunk)
    for start in range(0, longest, chunk):
        ends = (lengths > start) & (lengths <= start + chunk)
        yield make_segment([row[start : start + chunk] for row in rows], size, role, ends)


def question_segments(rows: Sequence[Sequence[int]], chunk: int) -> Iterator[Segment]:
    """The question in chunks, and its last token in a segment of its own: it chooses alone."""
    some = np.array([len(row) > 0 for row in rows])
    for segment in chunk_segments([row[:-1] for row in rows], chunk, "query"):
        yield dataclasses.replace(segment, ends=np.zeros_like(some))
    yield make_segment([row[-1:] for row in rows], 1, "query", some)


def mark_ends(segments: Iterable[Segment], feed: Feed) -> Iterator[Segment]:
    """The same segments, of a question with variant ENDS where a row ends."""
    for segment in segments:
        ends = feed.stage == "question" and bool(np.any(np.asarray(segment.ends)))
        yield dataclasses.replace(segment, variant=ENDS) if ends else segment


def beside(chunk: Segment, instructions: Sequence[Sequence[int]], width: int) -> Segment:
    """A segment of a chunk's columns, then `width` columns of each row's instruction.

    A row whose context has ended is a no-op: its instruction does not count either.
    """
    size = chunk.tokens.shape[1]
    looking = np.asarray(chunk.valid)[:, 0] > 0
    rows = [row if looks else () for row, looks in zip(instructions, looking, strict=True)]
    probe = make_segment(rows, width, "probe", np.asarray(chunk.ends))
    arrays = (
        np.concatenate([np.asarray(part.tokens) for part in (chunk, probe)], axis=1),
        np.concatenate([np.asarray(part.valid) for part in (chunk, probe)], axis=1),
    )
    tokens, valid = cast(tuple[Any, Any], arrays)
    groups = (*chunk.groups, RowGroup(INSTRUCTION_ROWS, size, width))
    return Segment(tokens, valid, chunk.ends, "probe_and_context", groups)


def tail_size(tokens: int, chunk: int) -> int:
    """The smallest of chunk, chunk/4, chunk/16 ... (at least 8) that holds `tokens`."""
    size = chunk
    while size // 4 >= max(tokens, 8):
        size //= 4
    return size


@dataclasses.dataclass(frozen=True)
class PrefillWork:
    """Prefill of one row, on the shard of the slots with the most work.

    Attributes:
      tokens: tokens that pass through projections and MLP.
      pairs: attended pairs of query and key, in a layer without a sliding window.
      received: tokens whose keys and values come from other shards, in a layer.
      collectives: collectives that bring them, in a layer.
      passes: segments; each reads all weights.
    """

    tokens: float
    pairs: float
    received: float = 0.0
    collectives: int = 0
    passes: int = 1


class Method:
    """A frozen dataclass of hyper-parameters with five duties; each kind of method is a subclass.

    Each field of `MethodInfo` is an attribute or a property here. The duties are to be defined, and
    all else has a default: `@method` refuses a public name that is nearly one of these.

    Attributes:
      name, summary, source: set by `@method`.
      own_tokens: tokens at the end of a context that each of the rows over it keeps for itself.
        Rows then share the other keys and values in decode steps (`caches.BranchedStore`). None
        where they cannot.
      stripes: whether slots may be dealt to the shards in stripes: only `LayerContext.slots` says
        where a slot lies. If not, each shard has one block of slots.
      cannot_offload: why keys and values cannot lie in the host's memory; None where they can:
        `caches.empty_store` makes the stores, and decode steps read few pages.
      names_tokens: whether its caches say which tokens of a text they hold where they do not hold
        all (`caches.marks`).
      cannot_slide: why it cannot read a text that some layers see through a sliding window; None
        where it can. Such layers have caches of their own (`parts.sliding_window`) in any method.
      cannot_adopt: why it cannot decode over what another method has read; None where it can.
      raw_keys: whether it caches keys before rotary embedding.
      measures_keys: whether norms or cosines of keys or queries decide, not their products alone.
        Then 8-bit caches hold keys in the model's own units (`engine.layers.key_units`).
      hands_over: the stage at whose end another method can follow (`parts.following`), if any.
      cannot_hand_over: why none can under its settings all the same; None where one can.
      wants_output: whether `LayerContext.output` is given while it reads.
      page_tokens: tokens of a page, which lies in one block of a text that `adopt` is given.
      wants_queries: whether `adopt` needs the sum of the text's queries.
      asks: texts of the method's own that it feeds to the model; `Feed` has their tokens.
      weights_of: `Engine.identity` of the weights that a setting was measured on, if it says so.
    """

    name: str = ""
    summary: str = ""
    source: str = ""
    phase: Phase = "both"
    query_aware: bool = False
    keeps_all: bool = False
    needs_question: bool = False
    append_only: bool = False
    looks_ahead: bool = False
    answers_apart: bool = False
    by_values: bool = False
    own_tokens: int | None = None
    stripes: bool = False
    cannot_offload: str | None = "a decode step reads or moves keys of the whole cache"
    names_tokens: bool = False
    cannot_slide: str | None = None
    cannot_adopt: str | None = "it chooses, or changes, what it caches as it reads the text"
    raw_keys: bool = False
    measures_keys: bool = False
    hands_over: Stage | None = None
    cannot_hand_over: str | None = None
    wants_queries: bool = False
    wants_output: bool = False
    page_tokens: int = 1
    asks: tuple[str, ...] = ()
    weights_of: str | None = None

    # The duties.

    def validate(self, config: ModelConfig) -> None:
        """Raises ConfigError when the method cannot run on such a model."""

    def init_cache(self, shape: CacheShape) -> Any:
        """An empty cache for one layer: a registered dataclass of `axes_field`s."""
        raise NotImplementedError

    def segments(self, feed: Feed) -> Iterable[Segment]:
        """The rows as segments, in order, as numpy arrays."""
        raise NotImplementedError

    def attend(self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext) -> WithCache:
        """Attention of a segment, and the cache with it.

        Rows beyond `valid` may hold anything finite. What is stored as keys and values, and fields
        of the cache that are marked `in_place` (`axes_field`), are read and written by the
        functions of `caches` and of `pallas_kernels` alone.
        """
        raise NotImplementedError

    def finish(self, cache: Any, ctx: LayerContext, stage: Stage, reserve: int) -> Any:
        """Marks the end of the context; may return a cache of other shapes.

        With `answers_apart` it is called for the end of the question too. At most `reserve` tokens
        will follow: question and answer after the context, the answer after the question.
        """
        raise NotImplementedError

    def fork(self, cache: Any) -> Any:
        """The cache at the end of the context: a rewind if `append_only`, else a copy."""
        raise NotImplementedError

    def read_bytes(self, cache: Any, length: int) -> int:
        """Cache bytes one decode step reads from one layer's `cache` at context `length`."""
        raise NotImplementedError

    # What has a default.

    def of_layer(self, layer: int, layers: int) -> "Method":
        """What does the duties of that one of `layers` layers: `init_cache`, `attend` and so on.

        It is not asked of layers with a sliding window (`cannot_slide`).
        """
        return self

    def reach(self, config: ModelConfig, tokens: int) -> int:
        """The trained length that a row of `tokens` tokens, answer included, needs of the model."""
        return tokens

    def step_variant(self, step: int) -> str:
        """`Segment.variant` of an answer's decode step; the first step is 1.

        Each variant is a program of its own, which the engine picks. A branch in every layer would
        copy what it may change, and wait for its predicate.
        """
        return ""

    def adopt(self, cache: Any, ctx: LayerContext, queries: Array | None = None) -> Any:
        """The cache, its other parts made right for what another prefill put in `cache.store`.

        Args:
          queries: the float32 sum [B, N, H] of the text's queries, rotated as its keys.
        """
        return cache

    def begin(self, q: Any, cache: Any, ctx: LayerContext) -> Any:
        """The cache as an answer begins, where `adopt` was that late; `q`: the last raw query."""
        return cache

    def next_position(self, cache: Any) -> Any:
        """Where the query of each row's next token stands, [B]."""
        return cache.store.position

    def hand_over(self, cache: Any, ctx: LayerContext, reserve: int, *, raw: bool = False) -> Any:
        """What stays, in the text's order, as an `AppendCache` for a method that follows.

        Keys are rotated, or with `raw` not. `reserve` tokens follow at most.
        """
        raise NotImplementedError(f"{self._named}: a method with hands_over defines hand_over")

    def handed_context(self, ctx: LayerContext) -> LayerContext:
        """What that method is to know of the layer."""
        return ctx

    def stays(self, length: int) -> int:
        """Tokens that stay of a text of `length` tokens."""
        return length

    def prefill_work(self, feed: Feed) -> PrefillWork | None:
        """The work of a feed of one row at stage `context`, of which only the length matters.

        None where it follows from the segments and `read_bytes`.
        """
        return None

    def check_model(self, config: ModelConfig) -> None:
        """`validate`, and that some layers are left to the method where others have windows.

        Raises:
          ConfigError: the method cannot run on such a model.
        """
        self.validate(config)
        windows = [window for window in config.windows if window is not None]
        if windows and self.cannot_slide is not None:
            raise self.refused(
                f"this model has layers with a sliding window of {min(windows)} tokens, and "
                f"{self.cannot_slide}; use --method full"
            )
        if len(windows) == config.num_layers and self.phase != "none":
            raise self.refused(
                f"every layer of this model has a sliding window, of {max(windows)} tokens at "
                "most, and keeps no more: there is nothing to choose; use --method full"
            )

    @property
    def cannot_read_blocks(self) -> str | None:
        """Why a text cannot be read by blocks of its keys (`settings.Reading`); None where it can.

        A method that changes nothing while a text is read attends to all keys by `Store.attend`.
        """
        if self.phase in ("none", "decode"):
            return None
        return "it does not attend to all earlier keys while it reads"

    @property
    def info(self) -> MethodInfo:
        """The metadata under these settings."""
        names = (field.name for field in dataclasses.fields(MethodInfo))
        return MethodInfo(**{name: getattr(self, name) for name in names})

    def refused(self, why: str) -> ConfigError:
        """The error for settings, or a model, that this method cannot run with."""
        return ConfigError(f"{self._named}: {why}")

    @property
    def _named(self) -> str:
        return self.name or type(self).__name__

    def at_least(self, least: int, *names: str) -> None:
        """Raises ConfigError unless each of these settings is None or at least so large."""
        at_least(least, self, *names, within=f"{self._named}: ")

    def fraction(self, *names: str, above_zero: bool = False) -> None:
        """Raises ConfigError unless each of these settings is None or from 0 to 1."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not (0 <= value <= 1 and (value or not above_zero)):
                least = "above 0 and at most" if above_zero else "from 0 to"
                raise self.refused(f"{name} must be {least} 1, got {value}")


# Methods by name, as their modules are imported.
REGISTERED: dict[str, type[Any]] = {}


@dataclass_transform(frozen_default=True, kw_only_default=True)
def method[T](*, source: str, name: str | None = None) -> Callable[[type[T]], type[T]]:
    """Makes a class a frozen dataclass of hyper-parameters, and registers it.

    It is named after its file, with hyphens, unless `name` says otherwise. The first sentence of
    its docstring is the summary.

    Args:
      source: paper and section.

    Raises:
      TypeError: a public name of the class is nearly one that `Method` has.
    """

    def register(kind: type[T]) -> type[T]:
        known = {each for base in kind.__mro__[1:] for each in vars(base)}
        for own in sorted({*vars(kind), *vars(kind).get("__annotations__", ())} - known):
            if meant := difflib.get_close_matches(own, vars(Method), 1, 0.85):
                raise TypeError(f"{kind.__name__}.{own}: did you mean {meant[0]}?")
        made: Any = dataclasses.dataclass(frozen=True, kw_only=True)(kind)
        made.name = name or kind.__module__.rpartition(".")[2].replace("_", "-")
        made.source = source
        if "__doc__" in vars(kind) and kind.__doc__:
            made.summary = " ".join(kind.__doc__.split("\n\n")[0].split()).removesuffix(".")
        REGISTERED[made.name] = made
        return made

    return register
