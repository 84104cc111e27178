"""The compiled programs: one segment, the end of the context, a block of decode steps.

Pure functions of `(static setup, arrays...)`. Caches are donated everywhere and updated in place.
`attend` and `finish` run inside one manual `shard_map` over the whole mesh; projections, MLP and
head are left to the compiler through shardings.
"""

import dataclasses
import functools
import itertools
import warnings
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int, UInt32

from jax_longctx.contract import (
    CHUNK_ROWS,
    CacheShape,
    LayerContext,
    Method,
    Segment,
    Stage,
    decode_segment,
    step_variant,
)
from jax_longctx.engine.sampling import Sampling, choose, sampling_values
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import Attend, Llama, abstract_model
from jax_longctx.sharding import AnyMesh, logical_sharding, logical_spec, tree_shardings, tree_specs

__all__ = [
    "DecodeState",
    "Setup",
    "attend_of",
    "cache_shapes",
    "decode_block",
    "decode_steps",
    "finish_context",
    "finish_donated",
    "finish_question",
    "init_caches",
    "model_of",
]

BATCH = logical_spec(("batch",))


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything static: what the programs are compiled for."""

    config: ModelConfig
    method: Method
    mesh: AnyMesh
    dtype: Any
    chunk: int

    def layer_context(self, window: int | None, total: Array) -> LayerContext:
        return LayerContext(
            scale=self.config.head_dim**-0.5,
            window=window,
            rope=self.config.rope,
            total=total,
        )

    def shard_map(self, body: Any, in_specs: Any, out_specs: Any) -> Any:
        """`body` as one program a device, manual over every mesh axis."""
        # Values that are equal on all shards of an axis (a psum's result) carry no proof of it
        # through kernels, so the replication check stays off.
        return jax.shard_map(
            body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


@functools.lru_cache(maxsize=16)
def _abstract(config: ModelConfig) -> tuple[Any, Any]:
    return abstract_model(config)


def model_of(config: ModelConfig, params: Any) -> Llama:
    """The module over a nested dict of parameters."""
    graphdef, abstract = _abstract(config)
    state = jax.tree.map(lambda leaf: leaf, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graphdef, state)


def attend_of(setup: Setup, segment: Segment, total_B: Array) -> Attend:
    """The model's `attend`: the method's, inside the manual `shard_map`."""

    def attend(layer: int, q: Array, k: Array, v: Array, cache: Any) -> tuple[Array, Any]:
        window = setup.config.windows[layer]
        return _attend_layer(setup, window, q, k, v, cache, segment, total_B)

    return attend


# Compiled as a part of the callers; on its own it is traced and lowered once for all layers that
# are alike, which takes a kernel's lowering of half a second out of every layer but one.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _attend_layer(
    setup: Setup,
    window: int | None,
    q: Array,
    k: Array,
    v: Array,
    cache: Any,
    segment: Segment,
    total: Array,
) -> tuple[Array, Any]:
    def local(q: Array, k: Array, v: Array, cache: Any, segment: Segment, total: Array) -> Any:
        ctx = setup.layer_context(window, total)
        out, _, cache = setup.method.attend(q, k, v, cache, segment, ctx)
        return out, cache

    cache_specs = tree_specs(cache)
    heads = logical_spec(("batch", segment.token_axis, "heads", None))
    kv_heads = logical_spec(("batch", segment.token_axis, "kv_heads", None))
    in_specs = (heads, kv_heads, kv_heads, cache_specs, tree_specs(segment), BATCH)
    run = setup.shard_map(local, in_specs, (heads, cache_specs))
    return run(q, k, v, cache, segment, total)


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
    return _cache_maker(setup, batch, slots, reserve)()


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=(2, 5))
def run_segment(
    setup: Setup,
    params: Any,
    caches: tuple[Any, ...],
    segment: Segment,
    total: Int[Array, " B"],
    last: Float[Array, "B V"] | None,
    logits: Literal["none", "hidden", "last", "all"],
) -> tuple[tuple[Any, ...], Any]:
    """One segment through the model.

    Args:
      last: each row's logits so far, kept where the row has no token in this segment; given when
        `logits` is "last".
      logits: what to return beside the caches: a marker that is ready when the segment is done,
        the hidden states `[B, T, D]` that logits are made of, the logits of each row's last valid
        token, or of all tokens `[B, T, V]` (of the chunk rows).
    """
    model = model_of(setup.config, params)
    # Where the tokens lie, the projections and the MLP are computed.
    tokens = jax.lax.with_sharding_constraint(
        segment.tokens, logical_sharding(setup.mesh, ("batch", segment.token_axis))
    )
    hidden_BTD, caches = model.hidden(tokens, caches, attend_of(setup, segment, total))
    if logits == "none":
        return caches, jnp.sum(hidden_BTD[:1, :1, :1].astype(jnp.float32))
    hidden_BTD = hidden_BTD[:, segment.group(CHUNK_ROWS).columns]
    if logits == "hidden":
        return caches, hidden_BTD
    if logits == "all":
        return caches, model.logits(hidden_BTD)
    assert last is not None
    valid_B = segment.valid_of(CHUNK_ROWS)
    ends_B11 = jnp.maximum(valid_B - 1, 0)[:, None, None]
    new_BV = model.logits(jnp.take_along_axis(hidden_BTD, ends_B11, axis=1)[:, 0])
    return caches, jnp.where((valid_B > 0)[:, None], new_BV, last)


def finish_context(
    setup: Setup, caches: tuple[Any, ...], total: Int[Array, " B"], reserve: int
) -> tuple[Any, ...]:
    """Every layer's `finish`, which may change the caches' shapes; `caches` are donated."""
    with warnings.catch_warnings():
        # A cache that shrinks cannot be finished in place, which jit would report.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return finish_donated(setup, caches, total, "context", reserve)


@functools.partial(jax.jit, static_argnums=0, static_argnames="reserve")
def finish_question(
    setup: Setup, caches: tuple[Any, ...], total: Int[Array, " B"], reserve: int
) -> tuple[Any, ...]:
    """New caches for the answer, of a method whose metadata says `shrinks`; `caches` stay."""
    return _finish(setup, caches, total, "question", reserve)


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames=("stage", "reserve"))
def finish_layer(
    setup: Setup,
    window: int | None,
    cache: Any,
    total: Int[Array, " B"],
    *,
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


def _finish(
    setup: Setup, caches: tuple[Any, ...], total: Array, stage: Stage, reserve: int
) -> tuple[Any, ...]:
    return tuple(
        finish_layer(setup, setup.config.windows[layer], cache, total, stage=stage, reserve=reserve)
        for layer, cache in enumerate(caches)
    )


finish_donated = jax.jit(_finish, static_argnums=(0, 3, 4), donate_argnums=1)


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
      seed: of the random draws.
    """

    token: Int[Array, " B"]
    done: Bool[Array, " B"]
    count: Int[Array, " B"]
    limit: Int[Array, " B"]
    stops: Int[Array, " E"]
    seen: Bool[Array, "B V"] | None
    finite: Bool[Array, " B"]
    seed: UInt32[Array, ""]

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


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=1)
def start_answer(
    setup: Setup,
    state: DecodeState,
    logits: Float[Array, "B V"],
    values: Float[Array, " 3"],
    sampling: tuple[bool, int, bool, bool],
) -> DecodeState:
    """Chooses each row's first token from the question's last logits."""
    token = choose(logits, state.seen, state.seed, state.count, values, sampling)
    return _replicate(setup, state.watch(logits).accept(token))


@functools.partial(jax.jit, static_argnums=(0, 7), donate_argnums=(2, 3))
def decode_block(
    setup: Setup,
    params: Any,
    caches: tuple[Any, ...],
    state: DecodeState,
    total: Int[Array, " B"],
    steps: Int[Array, ""],
    values: Float[Array, " 3"],
    static: tuple[int, str, tuple[bool, int, bool, bool]],
) -> tuple[tuple[Any, ...], DecodeState, Int[Array, "B X"]]:
    """Up to `steps` decode steps on the device; stops early when every row is done.

    `static` is (X, the steps' variant, the static part of the sampling): X columns of new tokens
    come back, -1 where a row chose none.
    """
    columns, variant, sampling = static
    model = model_of(setup.config, params)
    batch = state.token.shape[0]

    def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
        index, caches, state, chosen_BX = carry
        valid_B1 = (~state.done).astype(jnp.int32)[:, None]
        segment = decode_segment(state.token[:, None], valid_B1, state.done, variant)
        hidden_B1D, caches = model.hidden(segment.tokens, caches, attend_of(setup, segment, total))
        logits_BV = model.logits(hidden_B1D[:, 0])
        token_B = choose(logits_BV, state.seen, state.seed, state.count, values, sampling)
        column_B = jnp.where(state.done, -1, token_B)
        chosen_BX = jax.lax.dynamic_update_slice(chosen_BX, column_B[:, None], (0, index))
        return index + 1, caches, state.watch(logits_BV).accept(token_B), chosen_BX

    def unfinished(carry: tuple[Any, ...]) -> Array:
        index, _, state, _ = carry
        return (index < jnp.minimum(steps, columns)) & ~jnp.all(state.done)

    empty_BX = jnp.full((batch, columns), -1, jnp.int32)
    carry = (jnp.int32(0), caches, state, empty_BX)
    _, caches, state, chosen_BX = jax.lax.while_loop(unfinished, step, carry)
    return caches, *_replicate(setup, (state, chosen_BX))


def decode_steps(
    setup: Setup,
    params: Any,
    caches: tuple[Any, ...],
    state: DecodeState,
    total: Int[Array, " B"],
    steps: range,
    sampling: Sampling,
    most: int,
) -> tuple[tuple[Any, ...], DecodeState, np.ndarray]:
    """The answer's steps of these numbers, a program for each run of one variant, queued together.

    Programs are compiled for `most` steps at a time, however few these are.

    Returns:
      Caches, state, and the new tokens `[B, X]`, -1 where a row chose none.
    """
    chosen, values = [], sampling_values(sampling)
    for variant, alike in itertools.groupby(steps, functools.partial(step_variant, setup.method)):
        static = (most, variant, sampling.static())
        count = jnp.int32(len(list(alike)))
        caches, state, new = decode_block(
            setup, params, caches, state, total, count, values, static
        )
        chosen.append(new)
    return caches, state, np.concatenate([np.asarray(new) for new in chosen], axis=1)


def _replicate(setup: Setup, tree: Any) -> Any:
    """Every process reads these: the same on all devices."""
    everywhere = NamedSharding(setup.mesh, PartitionSpec())
    return jax.lax.with_sharding_constraint(tree, jax.tree.map(lambda _: everywhere, tree))
