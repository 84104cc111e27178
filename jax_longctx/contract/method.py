"""What a long-context method is: five duties, the segments it is fed, the context it attends in.

A method is a frozen dataclass of hyper-parameters (a static argument of `jit`) with

1. `init_cache(shape)`: the cache of one layer, a dataclass whose fields say their logical axes;
2. `segments(prompt)`: how a prompt is fed, as `Segment`s of fixed shapes;
3. `attend(new, cache, segment, ctx)`: attention of one layer over one segment, updating the cache;
   queries, keys and values arrive before rotary embedding;
4. `finish(cache, ctx, stage, reserve)`: the context (or the question) has been read; the cache may
   change its shapes here;
5. `fork(cache)`: the cache as it was at the end of the context, for one more question;

and `info`, its metadata. The model and the engine know no method by name. A method whose positions
stay behind a text's length says how far they go (`Bounded`).

`attend` and `finish` run inside one `shard_map` that is manual over the mesh axes `data`, `seq`
and `tensor`, also on one device: they see the local rows, the local heads and the local slots, and
reach other shards only through `LayerContext`'s helpers. A branch (`lax.cond`, `lax.while_loop`)
that holds such a helper is taken by what `LayerContext.agree` returns wherever floats decide, and
so are the counters and references that go with it; integers that all shards hold alike (lengths,
steps) need no agreement.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from jax_longctx.contract.context import LayerContext
from jax_longctx.contract.merging import QKV, Attended
from jax_longctx.contract.registered import MethodInfo
from jax_longctx.contract.segments import Prompt, Segment, Stage
from jax_longctx.models.config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheShape:
    """What a method needs to allocate one layer's cache, in global (unsharded) sizes.

    `slots` is the capacity in tokens that the engine planned for context, question and answer;
    `reserve` is the part of it that is free for question and answer. A cache that keeps a budget
    needs its budget and `reserve`; one that evicts after each segment also room for a segment,
    `chunk` tokens at most. The slots lie on `shards` shards.
    """

    batch: int
    slots: int
    reserve: int
    chunk: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: Any
    layer: int
    num_layers: int
    window: int | None
    shards: int = 1


@runtime_checkable
class Method(Protocol):
    """The five duties (see the module's docstring), `validate`, and the metadata."""

    @property
    def info(self) -> MethodInfo:
        """What the method does to inference under these settings."""
        ...

    def validate(self, config: ModelConfig) -> None:
        """Raises ConfigError when the method cannot run on such a model."""
        ...

    def init_cache(self, shape: CacheShape) -> Any:
        """An empty cache for one layer: a registered dataclass of `axes_field`s."""
        ...

    def segments(self, prompt: Prompt) -> Iterable[Segment]:
        """The prompt as segments, in order, as numpy arrays."""
        ...

    def attend(
        self, new: QKV, cache: Any, segment: Segment, ctx: LayerContext
    ) -> tuple[Attended, Any]:
        """Attention of a segment, and the cache with it.

        Rows beyond `valid` may hold anything finite.
        """
        ...

    def finish(self, cache: Any, ctx: LayerContext, stage: Stage, reserve: int) -> Any:
        """Marks the end of the context; may return a cache of other shapes.

        With `info.shrinks` it is called for the end of the question too. `reserve` tokens will
        follow at most: question and answer after the context, the answer after the question.
        """
        ...

    def fork(self, cache: Any) -> Any:
        """The cache at the end of the context: a rewind if `append_only`, else a copy."""
        ...

    def read_bytes(self, cache: Any, length: int) -> int:
        """Cache bytes one decode step reads from one layer's `cache` at context `length`."""
        ...


@runtime_checkable
class Bounded(Protocol):
    """A method that reads texts longer than the model was trained to at lengths that it knows."""

    def reach(self, config: ModelConfig, tokens: int) -> int:
        """The trained length that a row of `tokens` tokens, answer included, asks of the model."""
        ...


def reach(method: Method, config: ModelConfig, tokens: int) -> int:
    """As `Bounded.reach`; all of the tokens where positions grow with the text."""
    return method.reach(config, tokens) if isinstance(method, Bounded) else tokens


@runtime_checkable
class Scheduled(Protocol):
    """A method whose decode steps are of several kinds that follow a schedule.

    Each kind is a program of its own, which the engine picks; a branch in every layer would cost
    copies of what it may change, and a wait for its predicate.
    """

    def step_variant(self, step: int) -> str:
        """`Segment.variant` of an answer's decode step; the first is 1."""
        ...


def step_variant(method: Method, step: int) -> str:
    """The variant of an answer's decode step (the first is 1); "" where all steps are alike."""
    return method.step_variant(step) if isinstance(method, Scheduled) else ""


@dataclasses.dataclass(frozen=True)
class PrefillWork:
    """Of one row, on the shard of the slots that has the most to do.

    Attributes:
      tokens: that pass through projections and MLP.
      pairs: of query and key that are attended, in a layer without a sliding window.
      received: tokens whose keys and values come from other shards, in a layer.
      collectives: how many bring them, in a layer.
      passes: segments, each of which reads all weights.
    """

    tokens: float
    pairs: float
    received: float = 0.0
    collectives: int = 0
    passes: int = 1


@runtime_checkable
class Planned(Protocol):
    """A method whose prefill is not told by its segments and by what a decode step reads."""

    def prefill_work(self, prompt: Prompt) -> PrefillWork:
        """Of the one row of a prompt at stage `context`; only its length counts."""
        ...
