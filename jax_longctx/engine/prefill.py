"""Prefill: one segment through the model, the end of a text or a question, and the context."""

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jax_longctx.contract import CHUNK_ROWS, Feed, Method, RowGroup, Segment, Stage
from jax_longctx.engine.allocate import held_bytes
from jax_longctx.engine.compiling import IN_PLACE, LOOPED, Program, program
from jax_longctx.engine.layers import hidden_states
from jax_longctx.engine.setup import BATCH, Ends, Layer, Setup, without_layers
from jax_longctx.errors import InputError
from jax_longctx.sharding import Stacked, on_devices, tree_shardings, tree_specs, weight_sharding

Logits = Literal["none", "hidden", "last"]
# Whether a context is given up for a question, is afterwards as before, or is that and keeps
# question and answer as its history, on which the next such question follows.
Keep = bool | Literal["history"]


def _segment(
    setup: Setup,
    params: Any,
    caches: tuple[Any, ...],
    segment: Segment,
    total: Int[Any, " B"],
    last: Float[Any, "B V"] | None,
    logits: Logits,
) -> tuple[tuple[Any, ...], Any]:
    """One segment through the model.

    Args:
      last: each row's logits so far, kept where the row has no token in this segment; given when
        `logits` is "last".
      logits: what to return beside the caches: a marker that is ready when the segment is done,
        the hidden states `[B, T, D]` of the chunk rows that logits are made of, or the logits of
        each row's last valid token.
    """
    hidden_BTD, caches = hidden_states(setup, params, caches, segment, total)
    if logits == "none":
        return caches, _marker(hidden_BTD)
    columns = segment.group(CHUNK_ROWS)
    given = hidden_BTD, segment.valid_of(CHUNK_ROWS), last
    return caches, _wanted(setup.ends, without_layers(params), *given, columns, logits)


def _logits_place(setup: Setup | Ends, last: Any) -> Any:
    """Where the logits of rows are: as the compiler leaves them."""
    if last is None:
        return None
    return weight_sharding(setup.mesh, ("batch", "vocab"), last.shape)


# All layers as one program.
whole_segment = Program(
    _segment,
    static=(0, 6),
    donate_argnums=(2, 5),
    places=lambda setup, *args: _logits_place(setup, args[4]),
    **IN_PLACE,
    **LOOPED,
)


def run_segment(setup: Setup, *args: Any) -> tuple[tuple[Any, ...], Any]:
    """`whole_segment` or, with `Setup.by_layer`, its layers from Python."""
    return (_segment if setup.by_layer else whole_segment)(setup, *args)


@program()
def _marker(hidden_BTD: Float[Array, "B T D"]) -> Float[Array, ""]:
    """A number that is ready when these are."""
    return jnp.sum(hidden_BTD[:1, :1, :1].astype(jnp.float32))


@program(
    static=(0, 5, 6),
    donate_argnums=4,
    places=lambda ends, *args: _logits_place(ends, args[3]),
    **IN_PLACE,
)
def _wanted(
    ends: Ends,
    params: Any,
    hidden_BTD: Float[Array, "B T D"],
    valid_B: Int[Any, " B"],
    last: Float[Array, "B V"] | None,
    columns: RowGroup,
    logits: Logits,
) -> Array:
    """What `run_segment` returns for these columns, beside the caches."""
    hidden_BTD = hidden_BTD[:, columns.columns]
    if logits == "hidden":
        return hidden_BTD
    assert last is not None
    ends_B11 = jnp.maximum(valid_B - 1, 0)[:, None, None]
    new_BV = ends.logits(params, jnp.take_along_axis(hidden_BTD, ends_B11, axis=1)[:, 0])
    return jnp.where((valid_B > 0)[:, None], new_BV, last)


def finish_context(
    setup: Setup, caches: tuple[Any, ...], total: Int[Any, " B"], reserve: int
) -> tuple[Any, ...]:
    """Every layer's `finish`, which may change the caches' shapes; `caches` are donated."""
    run = _finish if setup.by_layer else finish_donated
    with warnings.catch_warnings():
        # A cache that shrinks cannot be finished in place, which jit would report.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return run(setup, caches, total, "context", reserve)


def finish_question(
    setup: Setup, caches: tuple[Any, ...], total: Int[Any, " B"], reserve: int
) -> tuple[Any, ...]:
    """New caches for the answer, of a method that `answers_apart`; `caches` stay."""
    run = _finish if setup.by_layer else whole_finish
    return run(setup, caches, total, "question", reserve)


def _finish_layer(
    setup: Setup,
    layer: Layer,
    cache: Any,
    total: Int[Array, " B"],
    stage: Stage,
    reserve: int,
) -> Any:
    """The method's `finish` of a layer inside the manual `shard_map`; traced once for like ones."""
    finish, specs, _ = _traced_finish(setup, layer, cache, total, stage, reserve)
    return on_devices(setup.mesh, finish, (tree_specs(cache), BATCH), specs)(cache, total)


def _traced_finish(
    setup: Setup, layer: Layer, cache: Any, total: Any, stage: Stage, reserve: int
) -> tuple[Any, Any, list[int | None]]:
    """`finish` of a device's part, the specs of its result, and which arrays it hands on.

    The last gives for each array of the result its number in `cache`; None where it is made anew
    or sharded otherwise.
    """
    handed: list[int | None] = []

    def finish(cache: Any, total: Array) -> Any:
        new = layer.method.finish(cache, setup.layer_context(layer, total), stage, reserve)
        known = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(cache))}
        handed[:] = [known.get(id(leaf)) for leaf in jax.tree.leaves(new)]
        return new

    # What comes back is known by tracing; its fields then say how it is sharded.
    in_specs = (tree_specs(cache), BATCH)
    traced = jax.eval_shape(on_devices(setup.mesh, finish, in_specs, PartitionSpec()), cache, total)
    specs = tree_specs(traced)
    before = jax.tree.leaves(in_specs[0])
    for index, spec in enumerate(jax.tree.leaves(specs)):
        number = handed[index]
        if number is not None and before[number] != spec:
            handed[index] = None
    return finish, specs, handed


finish_layer = Program(_finish_layer, static=(0, 1, 4, 5))
_finish_layer_donated = Program(_finish_layer, static=(0, 1, 4, 5), donate_argnums=2, **IN_PLACE)


def _finish(
    setup: Setup, caches: tuple[Any, ...], total: Any, stage: Stage, reserve: int
) -> tuple[Any, ...]:
    return tuple(
        finish_one(setup, layer, cache, total, stage, reserve)
        for _, layer, cache in setup.with_layers(caches)
    )


def finish_one(
    setup: Setup, layer: Layer, cache: Any, total: Any, stage: Stage, reserve: int
) -> Any:
    """`finish` of a layer, or of a run of them."""
    each = _finish_layer_donated if stage == "context" else finish_layer
    if not isinstance(cache, Stacked):
        return each(setup, layer, cache, total, stage, reserve)
    stacks, structure = jax.tree.flatten(cache.cache)
    one = structure.unflatten(jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in stacks)
    finish, specs, handed = _traced_finish(setup, layer, one, total, stage, reserve)
    change = on_devices(setup.mesh, finish, (tree_specs(one), BATCH), specs)

    def made(_: None, parts: Any) -> tuple[None, Any]:
        news = jax.tree.leaves(change(structure.unflatten(parts), total))
        return None, [new for new, old in zip(news, handed, strict=True) if old is None]

    # Of the arrays that are handed on no slice is made.
    fresh = iter(jax.lax.scan(made, None, stacks)[1])
    found = [next(fresh) if old is None else stacks[old] for old in handed]
    return cache.over(jax.tree.unflatten(jax.tree.structure(specs), found))


def places_of(setup: Setup, caches: Any, *_: int) -> list[Any]:
    """Where the arrays of these caches lie."""
    return jax.tree.leaves(tree_shardings(setup.mesh, caches))


@program(static=(0, 1), places=lambda setup, _, cache: places_of(setup, cache))
def _forked(setup: Setup, layer: Layer, cache: Any) -> list[Any]:
    """The arrays of a layer's fork, or a run's; None for those that it shares with the context."""

    def new(cache: Any) -> list[Any]:
        forked = layer.method.fork(cache)
        pairs = zip(jax.tree.leaves(cache), jax.tree.leaves(forked), strict=True)
        return [None if made is old else made for old, made in pairs]

    made = jax.vmap(new)(cache.cache) if isinstance(cache, Stacked) else new(cache)
    placed, places = jax.lax.with_sharding_constraint, places_of(setup, cache)
    return [x if x is None else placed(x, at) for x, at in zip(made, places, strict=True)]


def fork(setup: Setup, caches: tuple[Any, ...], *, keep: bool) -> tuple[Any, ...]:
    """The caches of all layers for one question.

    Unless the context is kept, a layer whose fork would be a copy hands on its own cache.
    """
    forked = []
    for _, layer, cache in setup.with_layers(caches):
        if not (keep or layer.method.append_only):
            forked.append(cache)
            continue
        leaves, structure = jax.tree.flatten(cache)
        pairs = zip(leaves, _forked(setup, layer, cache), strict=True)
        forked.append(structure.unflatten(old if new is None else new for old, new in pairs))
    return tuple(forked)


# All layers as one program.
finish_donated = Program(_finish, static=(0, 3, 4), donate_argnums=1, **IN_PLACE)
whole_finish = Program(_finish, static=(0, 3, 4))


@dataclasses.dataclass(frozen=True)
class Progress:
    """Tokens prefilled so far, in all rows, and the seconds."""

    done: int
    total: int
    seconds: float


@dataclasses.dataclass
class Context:
    """A prefilled context: a handle for `Engine.stream`; the engine alone changes it.

    Attributes:
      rows: the context's token ids, padding rows included.
      batch: rows that are the caller's (the rest pads the mesh's data axis).
      slots: capacity of the cache in tokens.
      reserve: slots that are free for a question and its answer.
      total: each row's total length, as rotary embedding sees it.
      caches: one a layer, or one for each run of layers that are alike (see `engine.runs`); None
        while a question over an append-only method borrows them.
      questions: the questions of the prefill, where the method needs them.
      answering_bytes: what the newest answer's caches held, over all devices.
      host_bytes: what they held in the hosts' memory.
      method: the method that prefilled it; no other can ask it. None is not checked.
      history: the caches that have gone on with a conversation; None in place of those that share
        the context's buffers, which hold both.
      joined: each row's tokens beyond the context that the history holds.
    """

    rows: list[list[int]]
    batch: int
    slots: int
    reserve: int
    total: jax.Array
    caches: tuple[Any, ...] | None
    questions: list[list[int]] | None = None
    answering_bytes: int = 0
    host_bytes: int = 0
    method: Method | None = None
    history: tuple[Any, ...] | None = None
    joined: list[list[int]] = dataclasses.field(default_factory=list)

    def past(self, keep: Keep) -> list[list[int]]:
        """Each row's tokens between the context and the next question."""
        return self.joined if keep == "history" and self.joined else [[] for _ in self.rows]

    def forget(self) -> None:
        """Ends the history."""
        self.history, self.joined = None, []

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(row) for row in self.rows[: self.batch]]

    @property
    def resident_bytes(self) -> int:
        """Bytes the caches hold, over all devices."""
        return held_bytes(self.usable_caches())[0]

    def usable_caches(self) -> tuple[Any, ...]:
        """The caches. Raises InputError while they are lent out, or when they were lost."""
        if self.caches is None:
            raise InputError(
                "this context is answering another question (finish or close that first), or was "
                "given up for its last one"
            )
        arrays = (leaf for leaf in jax.tree.leaves(self.caches) if isinstance(leaf, jax.Array))
        if any(leaf.is_deleted() for leaf in arrays):
            raise InputError("this context was lost to an interruption; prefill it again")
        return self.caches


@dataclasses.dataclass
class Live:
    """The caches of the question at hand: always the newest, the older ones were donated.

    Attributes:
      whole: the context's and the question's, where the answer is read from others.
      given: each row's tokens between the context and the answer.
      answers: each row's tokens so far.
    """

    caches: tuple[Any, ...]
    whole: tuple[Any, ...] | None = None
    given: list[list[int]] = dataclasses.field(default_factory=list)
    answers: list[list[int]] = dataclasses.field(default_factory=list)

    def told(self, news: list[list[int]]) -> list[list[int]]:
        """These tokens, which each row's answer now has too."""
        earlier = self.answers or [[] for _ in news]
        self.answers = [[*old, *new] for old, new in zip(earlier, news, strict=True)]
        return news

    @property
    def joined(self) -> list[list[int]]:
        """Each row's tokens beyond the context that the context's own caches hold."""
        # The newest token is fed with the next one.
        fed = (row[: -1 if self.whole is None else 0] for row in self.answers)
        return [[*row, *more] for row, more in zip(self.given, fed, strict=True)]


@contextlib.contextmanager
def asked(
    setup: Setup, context: Context, keep: Keep, check: Callable[[Any], object]
) -> Iterator[Live]:
    """Forks the context for one question, or takes its history; if kept it is then as before.

    Layers that only append lend the context's buffers, and take them back with what was asked
    behind the context, where the next fork overwrites it. The others go on in a copy. With
    "history" the next such question finds both as this one leaves them, unless an error ends it.

    Args:
      check: raises an error where there is no memory for a copy of these caches.
    """
    before, past = context.usable_caches(), context.history
    joins = keep == "history"
    lending = [layer.method.append_only for _, layer, _ in setup.with_layers(before)]
    if joins and past is not None:
        pairs = zip(before, past, strict=True)
        live = Live(tuple(shared if own is None else own for shared, own in pairs))
    else:
        copied = [cache for cache, lends in zip(before, lending, strict=True) if not lends]
        if keep and copied:
            check(copied)
        live = Live(fork(setup, before, keep=bool(keep)))
    if any(lending) or not keep:
        context.caches = None
    context.forget()
    held: list[list[int]] = []
    try:
        yield live
        held = live.joined
    except GeneratorExit:
        held = live.joined
        raise
    finally:
        if keep:
            after = list(zip(before, live.whole or live.caches, lending, strict=True))
            context.caches = tuple(new if lends else old for old, new, lends in after)
            if joins and held:
                context.history = tuple(None if lends else new for _, new, lends in after)
                context.joined = held


def prefill_text(
    setup: Setup, params: Any, live: Live, feed: Feed, total: Any, wanted: Logits = "none"
) -> Iterator[tuple[Segment, Any]]:
    """Prefills what is fed; each segment with what `run_segment` returns of it.

    InputError where a segment is `wanted` and does not follow the one before.
    """
    for segment in setup.method.segments(feed):
        if wanted != "none" and segment.spread:
            raise InputError("this method reads a text in parts side by side; it cannot score one")
        kind: Logits = "none" if segment.role == "probe" else wanted
        live.caches, found = run_segment(setup, params, live.caches, segment, total, None, kind)
        yield segment, found


def prefill_question(
    setup: Setup, params: Any, live: Live, rows: list[list[int]], total: Any
) -> Float[Any, "B V"]:
    """Feeds the questions; the logits of each row's first token, zeros of a row without one."""
    logits = jax.device_put(np.zeros((len(rows), setup.config.vocab_size), np.float32))
    for segment in setup.method.segments(setup.feed("question", 0, question=rows)):
        given = setup, params, live.caches, segment, total, logits
        live.caches, logits = run_segment(*given, "last")
    return logits
