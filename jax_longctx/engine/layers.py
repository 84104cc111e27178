"""All layers of the model, in one of two modes (`Setup.by_layer`).

Neither compiles every layer of the model:

- The device loops. One program holds the whole pass. A `fori_loop` goes over the layers of each run
  (`_through_run`), so that XLA compiles a layer once for each run. Weights are stacked too
  (`models.params.stacked_layers`). Large arrays of the cache reach the method as `Plane`s.
- The host loops. Each piece of a pass (embedding, layer, norm, logits) is a program. The host calls
  the layer's program once for each layer. Weights and caches are a layer apart.

In the first mode the pieces are jitted too, and become parts of the one program.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jax_longctx.contract import Segment, step_variant
from jax_longctx.engine.compiling import IN_PLACE, program
from jax_longctx.engine.products import Divided, gathers_weights
from jax_longctx.engine.runs import layers_in, of_layer
from jax_longctx.engine.setup import BATCH, Ends, Setup, without_layers
from jax_longctx.models.llama import PLAIN, ends_of, gathered_ends, gathered_layer, layer_of
from jax_longctx.sharding import (
    AnyMesh,
    Leaf,
    Stacked,
    leaf_fields,
    logical_sharding,
    logical_spec,
    tree_specs,
)
from pallas_kernels.plane import Plane

# Most layers of one turn of the loop, in decode steps on a GPU of the kind that an answer begins
# with. A turn of a CUDA graph's loop takes about 7 us, and each layer in it takes the time to
# compile it.
LAYERS_A_TURN = 4
# Most numbers of a layer's array that are cut out, and put back, for all layers of a turn at once.
MOST_NUMBERS = 2**13


def hidden_states(
    setup: Setup, params: Any, caches: tuple[Any, ...], segment: Segment, total: Int[Array, " B"]
) -> tuple[Float[Array, "B T D"], tuple[Any, ...]]:
    """Final normed hidden states of the segment's columns, and the updated caches.

    Outside of jit the caches are donated.
    """
    ends, ends_params = setup.ends, without_layers(params)
    x_BTD = _embedded(ends, ends_params, segment.tokens, segment.token_axis)
    updated, layer, layers = [], 0, params["layers"]
    for cache in caches:
        window = setup.config.windows[layer]
        if setup.by_layer:
            weights = layers[str(layer)]
            x_BTD, cache = _through_layer(setup, window, weights, x_BTD, cache, segment, total)
        else:
            run = cache if isinstance(cache, Stacked) else _alone(cache)
            x_BTD, run = _through_run(setup, window, layers, layer, x_BTD, run, segment, total)
            cache = run if isinstance(cache, Stacked) else of_layer(run.cache, 0)
        updated.append(cache)
        layer += layers_in(cache)
    return _normed(ends, ends_params, x_BTD), tuple(updated)


def _alone(cache: Any) -> Stacked:
    return Stacked(jax.tree.map(lambda leaf: leaf[None], cache), 1)


@program(static=(0, 3))
def _embedded(
    ends: Ends, params: Any, tokens: Int[Any, "B T"], axis: str | None
) -> Float[Array, "B T D"]:
    # Where the tokens lie, the projections and the MLP are computed.
    config, mesh = ends.config, ends.mesh
    placed = jax.lax.with_sharding_constraint
    tokens = placed(tokens, logical_sharding(mesh, ("batch", axis)))
    if axis is None or mesh.shape["seq"] == 1:
        return ends_of(config, params).embedded(tokens)
    if gathers_weights(config, mesh, _tokens_of_a_shard(mesh, tokens)):
        return ends_of(config, gathered_ends(config, mesh, params)).embedded(tokens)
    x_BTD = ends_of(config, params).embedded(
        placed(tokens, logical_sharding(mesh, ("batch", None)))
    )
    return placed(x_BTD, logical_sharding(mesh, ("batch", axis, None)))


@program(static=(0, 1), donate_argnums=(3, 4), **IN_PLACE)
def _through_layer(
    setup: Setup,
    window: int | None,
    params: Any,
    x: Float[Array, "B T D"],
    cache: Any,
    segment: Segment,
    total: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Any]:
    """One layer; the method's `attend` runs inside the manual `shard_map`."""

    def local(q: Array, k: Array, v: Array, cache: Any, segment: Segment, total: Array) -> Any:
        ctx = setup.layer_context(window, total)
        (out, _), cache = setup.method.attend((q, k, v), cache, segment, ctx)
        return out, cache

    return _attended(setup, local, params, x, cache, tree_specs(cache), segment, total)


def _attended(
    setup: Setup,
    local: Any,
    params: Any,
    x: Float[Array, "B T D"],
    cache: Any,
    specs: Any,
    segment: Segment,
    total: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Any]:
    """A layer of these parameters, whose attention is `local` over a cache of these `specs`."""

    def attend(q: Array, k: Array, v: Array, cache: Any) -> tuple[Array, Any]:
        heads = logical_spec(("batch", segment.token_axis, "heads", None))
        kv_heads = logical_spec(("batch", segment.token_axis, "kv_heads", None))
        in_specs = (heads, kv_heads, kv_heads, specs, tree_specs(segment), BATCH)
        run = setup.shard_map(local, in_specs, (heads, specs))
        return run(q, k, v, cache, segment, total)

    config, mesh = setup.config, setup.mesh
    products = setup.products(x.shape[0] * x.shape[1])
    if segment.spread and mesh.shape["seq"] > 1:
        if gathers_weights(config, mesh, _tokens_of_a_shard(mesh, x)):
            params, products = gathered_layer(config, mesh, params), PLAIN
        else:
            products = Divided(mesh, spread=True)
    return layer_of(config, params)(x, cache, attend, products)


def _tokens_of_a_shard(mesh: AnyMesh, x: Array) -> int:
    """Tokens on each shard of `seq`, of spread ones [B, T, ...]."""
    return x.shape[0] * x.shape[1] // (mesh.shape["data"] * mesh.shape["seq"])


def _through_run(
    setup: Setup,
    window: int | None,
    layers: Any,
    first: int,
    x: Float[Array, "B T D"],
    run: Stacked,
    segment: Segment,
    total: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Stacked]:
    """Consecutive layers that are alike, from layer `first` on, as a loop over one layer's program.

    The loop carries the caches of all these layers. Arrays that are `in_place` reach the method as
    `Plane`s. Of the others, which are small, the layer's part is cut out and put back.

    Args:
      layers: the stacked weights of all layers of the model.
    """
    stacks, structure = jax.tree.flatten(run.cache)
    fields = leaf_fields(run.cache)
    plane: Any = Plane  # of specs here
    specs = [
        plane(logical_spec(("layers", *field.axes)), PartitionSpec())
        if field.in_place
        else logical_spec(field.axes)
        for field in fields
    ]

    # While a layer is traced: the numbers of the arrays that the method hands on as they are.
    same: set[int] = set()

    def local(q: Array, k: Array, v: Array, parts: Any, segment: Segment, total: Array) -> Any:
        ctx = setup.layer_context(window, total)
        cache = structure.unflatten(parts)
        (out, _), cache = setup.method.attend((q, k, v), cache, segment, ctx)
        news = structure.flatten_up_to(cache)
        same.update(i for i, (old, new) in enumerate(zip(parts, news, strict=True)) if old is new)
        return out, [_kept(old, new) for old, new in zip(parts, news, strict=True)]

    groups = _together(stacks, fields)

    a_turn = 1
    usual = segment.role == "decode" and segment.variant == step_variant(setup.method, 1)
    if setup.platform == "gpu" and usual:
        a_turn = max(n for n in range(1, LAYERS_A_TURN + 1) if run.count % n == 0)

    joined = _joined(stacks, groups, axis=1)
    few = [
        not fields[group[0]].in_place and stack.size <= MOST_NUMBERS * run.count
        for stack, group in zip(joined, groups, strict=True)
    ]

    # Under `jit` the layers of a turn share one lowering, and their kernels are compiled once.
    @jax.jit
    def layer(index: Array, x: Array, stacks: Any, own: Any) -> tuple[Array, Any, Any]:
        parts = [
            part
            if part is not None
            else Plane(stack, index)
            if fields[group[0]].in_place
            else of_layer(stack, index)
            for stack, part, group in zip(stacks, own, groups, strict=True)
        ]
        weights = of_layer(layers, first + index)
        parts = _apart(parts, groups)
        x, parts = _attended(setup, local, weights, x, parts, specs, segment, total)
        given, stacks, news = stacks, [], _joined(parts, groups)
        for stack, part, group, small in zip(given, news, groups, few, strict=True):
            if isinstance(part, Plane):
                stack = part.whole
            elif not small and not same.issuperset(group):
                stack = jax.lax.dynamic_update_index_in_dim(stack, part, index, 0)
            stacks.append(stack)
        own = [part if small else None for part, small in zip(news, few, strict=True)]
        return x, stacks, own

    def turn(number: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        x, stacks = carry
        begin = number * a_turn
        # Few numbers are cut out, and put back, for all layers of the turn at once.
        held = [
            jax.lax.dynamic_slice_in_dim(stack, begin, a_turn) if small else None
            for stack, small in zip(stacks, few, strict=True)
        ]
        each = []
        for offset in range(a_turn):
            own = [None if part is None else part[offset] for part in held]
            x, stacks, own = layer(begin + offset, x, stacks, own)
            each.append(own)
        for i, (group, small) in enumerate(zip(groups, few, strict=True)):
            if small and not same.issuperset(group):
                news = jnp.stack([own[i] for own in each])
                stacks[i] = jax.lax.dynamic_update_slice_in_dim(stacks[i], news, begin, 0)
        return x, stacks

    with jax.named_scope(f"layers_{first}_to_{first + run.count - 1}"):
        x, stacks = jax.lax.fori_loop(0, run.count // a_turn, turn, (x, joined))
    stacks = _apart(stacks, groups, axis=1)
    return x, Stacked(structure.unflatten(stacks), run.count)


def _together(stacks: Sequence[Array], fields: Sequence[Leaf]) -> list[list[int]]:
    """The numbers of the arrays in groups; the loop carries each group as one array.

    Small arrays of one shape, dtype and sharding (lengths, positions) form a group. To cut an array
    out and to put it back takes a kernel each in every layer.
    """
    groups: dict[Any, list[int]] = {}
    for number, (stack, field) in enumerate(zip(stacks, fields, strict=True)):
        small = not field.in_place and stack.ndim <= 2
        alike = (stack.shape, stack.dtype, logical_spec(field.axes)) if small else number
        groups.setdefault(alike, []).append(number)
    return list(groups.values())


def _joined(arrays: Sequence[Any], groups: list[list[int]], axis: int = 0) -> list[Any]:
    """The arrays of a group as one, along a new axis; one alone stays as it is."""
    return [
        arrays[group[0]] if len(group) == 1 else jnp.stack([arrays[i] for i in group], axis)
        for group in groups
    ]


def _apart(joined: Sequence[Any], groups: list[list[int]], axis: int = 0) -> list[Any]:
    """`_joined` undone."""
    found = {}
    for array, group in zip(joined, groups, strict=True):
        several = len(group) > 1
        for i, number in enumerate(group):
            found[number] = (
                jax.lax.index_in_dim(array, i, axis, keepdims=False) if several else array
            )
    return [found[number] for number in sorted(found)]


def _kept(old: Any, new: Any) -> Any:
    """What the loop carries on: where a method made an array anew, the plane it is written to."""
    if isinstance(old, Plane) and not isinstance(new, Plane):
        return old.write(new)
    return new


@program(static=(0,))
def _normed(ends: Ends, params: Any, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return ends_of(ends.config, params).final_norm(x)
