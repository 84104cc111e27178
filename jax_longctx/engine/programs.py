"""The compiled programs: one segment, the end of the context, a block of decode steps.

Pure functions of `(static setup, arrays...)`. Caches are donated everywhere and updated in place.
`finish` runs, as `attend` does, inside one manual `shard_map` over the whole mesh.

With `Setup.by_layer` the same bodies run from Python, piece by piece (see `forward`).
"""

import dataclasses
import functools
import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from jax_longctx.compilations import limit_mappings
from jax_longctx.contract import (
    CHUNK_ROWS,
    CacheShape,
    Segment,
    Stage,
    decode_segment,
)
from jax_longctx.engine.donation import in_place
from jax_longctx.engine.forward import BATCH, Setup, hidden_states, model_of
from jax_longctx.engine.sampling import choose
from jax_longctx.sharding import tree_shardings, tree_specs

__all__ = [
    "DecodeState",
    "Setup",
    "cache_shapes",
    "decode_block",
    "finish_context",
    "finish_donated",
    "finish_question",
    "init_caches",
    "model_of",
    "next_block",
    "run_segment",
    "whole_finish",
    "whole_segment",
]


Logits = Literal["none", "hidden", "last", "all"]


def cache_shapes(setup: Setup, batch: int, slots: int, reserve: int) -> list[CacheShape]:
    """What each layer's `init_cache` is asked for."""
    config = setup.config
    return [
        CacheShape(
            batch=batch,
            slots=slots,
            chunk=setup.chunk,
            reserve=reserve,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=setup.dtype,
            layer=layer,
            num_layers=config.num_layers,
            window=config.windows[layer],
            shards=setup.mesh.shape["seq"],
        )
        for layer in range(config.num_layers)
    ]


def empty_caches(setup: Setup, batch: int, slots: int, reserve: int) -> tuple[Any, ...]:
    """Every layer's empty cache, unsharded; call it under `jax.eval_shape` or `init_caches`."""
    return tuple(
        setup.method.init_cache(shape) for shape in cache_shapes(setup, batch, slots, reserve)
    )


@functools.lru_cache(maxsize=256)
def abstract_caches(setup: Setup, batch: int, slots: int, reserve: int) -> tuple[Any, ...]:
    """Shapes and dtypes of every layer's empty cache."""
    return jax.eval_shape(functools.partial(empty_caches, setup, batch, slots, reserve))


@functools.lru_cache(maxsize=64)
def _cache_maker(setup: Setup, batch: int, slots: int, reserve: int) -> Any:
    # Kept: tracing it anew cost a tenth of a second at each prefill of 32 layers.
    shardings = tree_shardings(setup.mesh, abstract_caches(setup, batch, slots, reserve))
    make = functools.partial(empty_caches, setup, batch, slots, reserve)
    return jax.jit(make, out_shardings=shardings)


def init_caches(setup: Setup, batch: int, slots: int, reserve: int) -> tuple[Any, ...]:
    """Every layer's empty cache, made on its shards."""
    # New caches mean new shapes, and so new programs.
    limit_mappings()
    return _cache_maker(setup, batch, slots, reserve)()


def run_segment(
    setup: Setup,
    params: Any,
    caches: tuple[Any, ...],
    segment: Segment,
    total: Int[Array, " B"],
    last: Float[Array, "B V"] | None,
    logits: Logits,
) -> tuple[tuple[Any, ...], Any]:
    """One segment through the model.

    Args:
      last: each row's logits so far, kept where the row has no token in this segment; given when
        `logits` is "last".
      logits: what to return beside the caches: a marker that is ready when the segment is done,
        the hidden states `[B, T, D]` that logits are made of, the logits of each row's last valid
        token, or of all tokens `[B, T, V]` (of the chunk rows).
    """
    run = _segment if setup.by_layer else whole_segment
    return run(setup, params, caches, segment, total, last, logits)


def _segment(
    setup: Setup,
    params: Any,
    caches: tuple[Any, ...],
    segment: Segment,
    total: Int[Array, " B"],
    last: Float[Array, "B V"] | None,
    logits: Logits,
) -> tuple[tuple[Any, ...], Any]:
    hidden_BTD, caches = hidden_states(setup, params, caches, segment, total)
    return caches, _wanted(setup, params, hidden_BTD, segment, last, logits)


# All layers as one program.
whole_segment = in_place(_segment, static_argnums=(0, 6), donate_argnums=(2, 5))


@functools.partial(in_place, static_argnums=(0, 5), donate_argnums=4)
def _wanted(
    setup: Setup,
    params: Any,
    hidden_BTD: Float[Array, "B T D"],
    segment: Segment,
    last: Float[Array, "B V"] | None,
    logits: Logits,
) -> Array:
    """What `run_segment` returns beside the caches."""
    if logits == "none":
        return jnp.sum(hidden_BTD[:1, :1, :1].astype(jnp.float32))
    hidden_BTD = hidden_BTD[:, segment.group(CHUNK_ROWS).columns]
    if logits == "hidden":
        return hidden_BTD
    model = model_of(setup.config, params)
    if logits == "all":
        return model.logits(hidden_BTD)
    assert last is not None
    valid_B = segment.valid_of(CHUNK_ROWS)
    ends_B11 = jnp.maximum(valid_B - 1, 0)[:, None, None]
    new_BV = model.logits(jnp.take_along_axis(hidden_BTD, ends_B11, axis=1)[:, 0])
    return jnp.where((valid_B > 0)[:, None], new_BV, last)


def finish_context(
    setup: Setup, caches: tuple[Any, ...], total: Int[Array, " B"], reserve: int
) -> tuple[Any, ...]:
    """Every layer's `finish`, which may change the caches' shapes; `caches` are donated."""
    run = _finish if setup.by_layer else finish_donated
    with warnings.catch_warnings():
        # A cache that shrinks cannot be finished in place, which jit would report.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return run(setup, caches, total, "context", reserve)


def finish_question(
    setup: Setup, caches: tuple[Any, ...], total: Int[Array, " B"], reserve: int
) -> tuple[Any, ...]:
    """New caches for the answer, of a method whose metadata says `shrinks`; `caches` stay."""
    run = _finish if setup.by_layer else whole_finish
    return run(setup, caches, total, "question", reserve)


def _finish_layer(
    setup: Setup,
    window: int | None,
    cache: Any,
    total: Int[Array, " B"],
    stage: Stage,
    reserve: int,
) -> Any:
    """The method's `finish` of a layer inside the manual `shard_map`; traced once for like ones."""

    def local(cache: Any, total: Array) -> Any:
        return setup.method.finish(cache, setup.layer_context(window, total), stage, reserve)

    in_specs = (tree_specs(cache), BATCH)
    # What comes back is known by tracing; its fields then say how it is sharded.
    traced = jax.eval_shape(setup.shard_map(local, in_specs, PartitionSpec()), cache, total)
    return setup.shard_map(local, in_specs, tree_specs(traced))(cache, total)


finish_layer = jax.jit(_finish_layer, static_argnums=(0, 1, 4, 5))
_finish_layer_donated = in_place(_finish_layer, static_argnums=(0, 1, 4, 5), donate_argnums=2)


def _finish(
    setup: Setup, caches: tuple[Any, ...], total: Array, stage: Stage, reserve: int
) -> tuple[Any, ...]:
    each = _finish_layer_donated if stage == "context" else finish_layer
    return tuple(
        each(setup, setup.config.windows[layer], cache, total, stage, reserve)
        for layer, cache in enumerate(caches)
    )


# All layers as one program.
finish_donated = in_place(_finish, static_argnums=(0, 3, 4), donate_argnums=1)
whole_finish = jax.jit(_finish, static_argnums=(0, 3, 4))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeState:
    """Where each row's answer stands.

    Attributes:
      token: the row's newest token, not yet fed through the model.
      done: rows that have stopped; they are no-ops.
      count: tokens generated so far, `token` included.
      limit: most tokens the row may generate.
      stops: token ids that end an answer, padded with -1.
      seen: tokens under the repetition penalty, or None.
      finite: rows whose logits have been numbers so far.
      keys: of the random draws (see `sampling.row_keys`). One axis: an output of two, equal on all
        devices, takes the sharding of a parameter of two, and the next block is compiled anew.
    """

    token: Int[Array, " B"]
    done: Bool[Array, " B"]
    count: Int[Array, " B"]
    limit: Int[Array, " B"]
    stops: Int[Array, " E"]
    seen: Bool[Array, "B V"] | None
    finite: Bool[Array, " B"]
    keys: UInt32[Array, " W"]

    def watch(self, logits: Array) -> "DecodeState":
        """The state after a look at whether the logits of unfinished rows are numbers."""
        # A sum is NaN or infinite when any term is.
        finite = jnp.isfinite(jnp.sum(logits, axis=-1)) | self.done
        return dataclasses.replace(self, finite=self.finite & finite)

    def accept(self, token: Array) -> "DecodeState":
        """The state after `token` was chosen for the rows that are not done."""
        count = self.count + ~self.done
        stop = jnp.any(token[:, None] == self.stops, axis=-1) | (count >= self.limit)
        seen = self.seen
        if seen is not None:
            rows = jnp.arange(token.shape[0])
            seen = seen.at[rows, token].max(~self.done)
        token = jnp.where(self.done, self.token, token)
        return dataclasses.replace(self, token=token, done=self.done | stop, count=count, seen=seen)


@functools.partial(in_place, static_argnums=(0, 4), donate_argnums=1)
def start_answer(
    setup: Setup,
    state: DecodeState,
    logits: Float[Array, "B V"],
    values: Float[Array, " 3"],
    sampling: tuple[bool, int, bool, bool],
) -> DecodeState:
    """Chooses each row's first token from the question's last logits."""
    token = choose(logits, state.seen, state.keys, state.count, values, sampling)
    return _replicate(setup, state.watch(logits).accept(token))


# Columns of a block of decode steps, variants of the answer's steps, the sampling's static part.
DecodeStatic = tuple[int, tuple[str, ...], tuple[bool, int, bool, bool]]


def _decode_block(
    setup: Setup,
    params: Any,
    caches: tuple[Any, ...],
    state: DecodeState,
    total: Int[Array, " B"],
    turns: Int[Any, " X"],
    values: Float[Array, " 3"],
    static: DecodeStatic,
) -> tuple[tuple[Any, ...], DecodeState, Int[Array, "B X"]]:
    """A block of decode steps on the device; stops early when every row is done.

    Step i is of the variant of index turns[i]; none follow where that is negative. X columns of new
    tokens come back, -1 where a row chose none.

    Every variant has a loop of its own for steps of it that follow each other, around which one
    goes from run to run: a program for each run takes as long to begin as a step, on a GPU.
    """
    columns, variants, sampling = static

    def step(variant: str, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        index, caches, state, chosen_BX = carry
        token_B1, valid_B1 = _fed(state)
        segment = decode_segment(token_B1, valid_B1, state.done, variant)
        hidden_B1D, caches = hidden_states(setup, params, caches, segment, total)
        state, chosen_BX = _chosen(
            setup, params, hidden_B1D, state, values, chosen_BX, index, sampling
        )
        return index + 1, caches, state, chosen_BX

    def each_run(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        for number, variant in enumerate(variants):
            alike = functools.partial(lambda number, carry: _turn(turns, carry) == number, number)
            carry = jax.lax.while_loop(alike, functools.partial(step, variant), carry)
        return carry

    carry = (jnp.int32(0), caches, state, jnp.full((state.token.shape[0], columns), -1, jnp.int32))
    if setup.by_layer:
        while (number := int(_turn(turns, carry))) >= 0:
            carry = step(variants[number], carry)
    else:
        first, *others = variants
        body = each_run if others else functools.partial(step, first)
        carry = jax.lax.while_loop(lambda carry: _turn(turns, carry) >= 0, body, carry)
    _, caches, state, chosen_BX = carry
    return caches, *_replicate(setup, (state, chosen_BX))


# All layers, and all steps, as one program.
decode_block = in_place(_decode_block, static_argnums=(0, 7), donate_argnums=(2, 3))


@jax.jit
def _fed(state: DecodeState) -> tuple[Int[Array, "B 1"], Int[Array, "B 1"]]:
    """Each row's newest token, and whether it counts."""
    return state.token[:, None], (~state.done).astype(jnp.int32)[:, None]


@functools.partial(jax.jit, static_argnums=(0, 7))
def _chosen(
    setup: Setup,
    params: Any,
    hidden_B1D: Float[Array, "B 1 D"],
    state: DecodeState,
    values: Float[Array, " 3"],
    chosen_BX: Int[Array, "B X"],
    index: Int[Array, ""],
    sampling: tuple[bool, int, bool, bool],
) -> tuple[DecodeState, Int[Array, "B X"]]:
    """The state after each row's next token, which stands in its column."""
    logits_BV = model_of(setup.config, params).logits(hidden_B1D[:, 0])
    token_B = choose(logits_BV, state.seen, state.keys, state.count, values, sampling)
    column_B = jnp.where(state.done, -1, token_B)
    chosen_BX = jax.lax.dynamic_update_slice(chosen_BX, column_B[:, None], (0, index))
    return state.watch(logits_BV).accept(token_B), chosen_BX


def _turn(turns: Any, carry: tuple[Any, ...]) -> Array:
    """The variant of the next step, negative where there is none."""
    index, _, state, _ = carry
    over = (index >= len(turns)) | jnp.all(state.done)
    return jnp.where(over, -1, jnp.asarray(turns)[index])


def next_block(
    setup: Setup,
    params: Any,
    caches: tuple[Any, ...],
    state: DecodeState,
    total: Int[Array, " B"],
    turns: Int[Any, " X"],
    values: Float[Array, " 3"],
    static: DecodeStatic,
) -> tuple[tuple[Any, ...], DecodeState, Int[Array, "B X"]]:
    """`decode_block` as one program or, with `Setup.by_layer`, its steps from Python."""
    run = _decode_block if setup.by_layer else decode_block
    return run(setup, params, caches, state, total, turns, values, static)


def _replicate(setup: Setup, tree: Any) -> Any:
    """Every process reads these: the same on all devices."""
    everywhere = NamedSharding(setup.mesh, PartitionSpec())
    return jax.lax.with_sharding_constraint(tree, jax.tree.map(lambda _: everywhere, tree))
