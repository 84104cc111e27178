"""All layers of the model, in one of two modes (`Setup.by_layer`).

Neither compiles every layer of the model:

- The device loops. One program holds the whole pass. A `fori_loop` goes over the layers of each run
  (`_through_runs`), so that XLA compiles a layer once for each run. Where kinds of layers take
  turns, as local and global ones do, one loop goes over their runs. Weights are stacked too
  (`models.params.stacked_layers`). Large arrays of the cache reach the method as `Plane`s.
- The host loops. Each piece of a pass (embedding, layer, norm, logits) is a program. The host calls
  the layer's program once for each layer. Weights and caches are a layer apart.

In the first mode the pieces are jitted too, and become parts of the one program.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jax_longctx.contract import PLACES, QKV, WEIGHT_PLACES, Exchanges, Segment
from jax_longctx.contract.merging import with_sinks
from jax_longctx.engine.compiling import IN_PLACE, program
from jax_longctx.engine.products import Divided, gathers_weights
from jax_longctx.engine.runs import of_layer
from jax_longctx.engine.setup import BATCH, Ends, Layer, Setup, without_layers
from jax_longctx.models.llama import (
    Attend,
    Products,
    ends_of,
    gathered_ends,
    gathered_layer,
    layer_of,
)
from jax_longctx.models.params import indexed_layer
from jax_longctx.sharding import (
    AnyMesh,
    Stacked,
    leaf_fields,
    logical_sharding,
    logical_spec,
    mesh_axes,
    on_devices,
    tree_specs,
    weight_spec,
)
from pallas_kernels.peers import AllPeers
from pallas_kernels.plane import Plane, is_plane, put, written
from pallas_kernels.quantised_matrix import floats_of

# Most layers of one turn of the loop, in decode steps on a GPU of the kind that an answer begins
# with. A turn of a CUDA graph's loop takes about 7 us, and each layer in it takes the time to
# compile it.
LAYERS_A_TURN = 4
# Most numbers of a layer's array that are cut out, and put back, for all layers of a turn at once.
MOST_NUMBERS = 2**13


def hidden_states(
    setup: Setup, params: Any, caches: tuple[Any, ...], segment: Segment, total: Int[Any, " B"]
) -> tuple[Float[Any, "B T D"], tuple[Any, ...]]:
    """Final normed hidden states of the segment's columns, and the updated caches.

    Outside of jit the caches are donated.
    """
    ends, ends_params = setup.ends, without_layers(params)
    x_BTD = _embedded(ends, ends_params, segment.tokens, segment.token_axis)
    updated, layers, each = [], params["layers"], [*setup.with_layers(caches)]
    if setup.by_layer:
        for number, layer, cache in each:
            weights = layers[str(number)]
            x_BTD, cache = _through_layer(setup, layer, weights, x_BTD, cache, segment, total)
            updated.append(cache)
        return _normed(ends, ends_params, x_BTD), tuple(updated)
    peers = setup.peers(x_BTD.shape[0] * x_BTD.shape[1])
    while each:
        first, _, cache = each[0]
        turn = cache.step if isinstance(cache, Stacked) else 1
        taking, each = each[:turn], each[turn:]
        passes = [LayerPass(setup, layer, segment, total, peers) for _, layer, _ in taking]
        runs = [cache if isinstance(cache, Stacked) else _alone(cache) for _, _, cache in taking]
        x_BTD, runs = _through_runs(passes, layers, first, x_BTD, runs)
        for run, (_, _, cache) in zip(runs, taking, strict=True):
            updated.append(run if isinstance(cache, Stacked) else of_layer(run.cache, 0))
    return _normed(ends, ends_params, x_BTD), tuple(updated)


def _alone(cache: Any) -> Stacked:
    return Stacked(jax.tree.map(lambda leaf: leaf[None], cache), 1)


def _hidden_place(mesh: AnyMesh, axis: str | None) -> Any:
    """Where hidden states are: as the compiler leaves them."""
    return logical_sharding(mesh, ("batch", axis, None))


@program(static=(0, 3), places=lambda ends, params, x, axis: _hidden_place(ends.mesh, axis))
def _embedded(
    ends: Ends, params: Any, tokens: Int[Any, "B T"], axis: str | None
) -> Float[Array, "B T D"]:
    # Where the tokens lie, the projections and the MLP are computed.
    config, mesh = ends.config, ends.mesh
    placed = jax.lax.with_sharding_constraint
    tokens = placed(tokens, logical_sharding(mesh, ("batch", axis)))
    if axis is None or mesh.shape["seq"] == 1:
        rows_of = functools.partial(_rows_of_table, mesh)
        return ends_of(config, params).embedded(tokens, rows_of)
    if gathers_weights(config, mesh, _tokens_of_a_shard(mesh, tokens)):
        return ends_of(config, gathered_ends(config, mesh, params)).embedded(tokens)
    x_BTD = ends_of(config, params).embedded(
        placed(tokens, logical_sharding(mesh, ("batch", None)))
    )
    return placed(x_BTD, logical_sharding(mesh, ("batch", axis, None)))


def _rows_of_table(
    mesh: AnyMesh, table: Float[Array, "V D"], tokens: Int[Array, "B T"]
) -> Float[Array, "B T D"]:
    """The tokens' rows of a table that is divided over devices, which the one that has it sends.

    For one token XLA would gather the whole table.
    """
    spec = weight_spec(mesh, ("vocab", "embed"), table.shape)
    axes = mesh_axes(mesh, [*spec])
    if not axes:
        return table[tokens]

    def own(table: Array, tokens: Array) -> Array:
        local = tokens - jax.lax.axis_index(axes) * table.shape[0]
        there = (local >= 0) & (local < table.shape[0])
        rows = table[jnp.where(there, local, 0)]
        return jax.lax.psum(jnp.where(there[..., None], rows, 0), axes)

    return on_devices(mesh, own, (spec, BATCH), BATCH)(table, tokens)


@program(
    static=(0, 1),
    donate_argnums=(3, 4),
    places=lambda setup, *args: _hidden_place(setup.mesh, args[4].token_axis),
    **IN_PLACE,
)
def _through_layer(
    setup: Setup,
    layer: Layer,
    params: Any,
    x: Float[Array, "B T D"],
    cache: Any,
    segment: Segment,
    total: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Any]:
    """One layer, with arrays of its own."""
    return LayerPass(setup, layer, segment, total).through(params, x, cache, tree_specs(cache))


@dataclasses.dataclass(frozen=True)
class LayerPass:
    """A segment on its way through layers that are alike.

    Attributes:
      total: each row's total length, as rotary embedding sees it.
      peers: of `Setup.peers`.
      handed_on: after a layer was traced, the numbers of its cache's arrays that the method did not
        change.
    """

    setup: Setup
    layer: Layer
    segment: Segment
    total: Int[Array, " B"]
    peers: AllPeers = dataclasses.field(default_factory=dict)
    handed_on: set[int] = dataclasses.field(default_factory=set)

    def through(
        self, weights: Any, x: Float[Array, "B T D"], cache: Any, specs: Any
    ) -> tuple[Float[Array, "B T D"], Any]:
        """A layer with these weights, over a cache whose arrays are sharded as `specs` say."""
        config, mesh = self.setup.config, self.setup.mesh
        products = self.setup.products(x.shape[0] * x.shape[1], self.peers)
        if self.segment.spread and mesh.shape["seq"] > 1:
            if gathers_weights(config, mesh, _tokens_of_a_shard(mesh, x)):
                weights = gathered_layer(config, mesh, weights)
                products = Products(mesh, spread=True)
            else:
                products = Divided(mesh, spread=True)
        output = None
        if self.layer.method.wants_output and self.segment.role != "decode":
            output = floats_of(weights["attn"]["o"])
        attend = functools.partial(self.attend, (specs, output))
        if self.setup.evens_keys:
            attend = functools.partial(_evened, key_units(weights["attn"]["k_bias"]), attend)
        return layer_of(config, weights)(x, cache, attend, products)

    def attend(
        self, own: Any, q: Array, k: Array, v: Array, cache: Any, sinks: Array | None = None
    ) -> tuple[Array, Any]:
        """What the layer calls with its queries, keys and values: `_attend_here` on each device.

        Args:
          own: the specs of the cache, and the output projection where the method wants it.
        """
        (specs, output), axis = own, self.segment.token_axis
        away = PartitionSpec(self.setup.mesh.axis_names)
        heads = logical_spec(("batch", axis, "heads", None))
        kv_heads = logical_spec(("batch", axis, "kv_heads", None))
        in_specs = ((heads, kv_heads, kv_heads), specs, tree_specs(self.segment), BATCH)
        in_specs += ((logical_spec(("heads",)), logical_spec(("heads", None, None)), away),)
        run = on_devices(self.setup.mesh, self._attend_here, in_specs, (heads, specs))
        return run((q, k, v), cache, self.segment, self.total, (sinks, output, self.peers))

    def _attend_here(
        self, new: QKV, cache: Any, segment: Segment, total: Array, others: tuple[Any, ...]
    ) -> tuple[Array, Any]:
        """`attend` over a device's part of heads and slots, and what `LayerContext` has."""
        sinks, output, peers = others
        ctx = self.setup.layer_context(self.layer, total)
        reading = self.setup.reading if segment.role == "context" else None
        exchanges = Exchanges(peers, new[0], range(len(WEIGHT_PLACES), PLACES))
        given: Any = dict(sinks=sinks, output=output, exchanges=exchanges, reading=reading)
        ctx = dataclasses.replace(ctx, **given)
        (out, lse), after = self.layer.method.attend(new, cache, segment, ctx)
        out = exchanges.done(out)
        if sinks is not None:
            out = with_sinks(out, lse, sinks)
        olds, structure = jax.tree.flatten(cache, is_leaf=is_plane)
        news = structure.flatten_up_to(after)
        pairs = list(zip(olds, news, strict=True))
        self.handed_on.update(i for i, (old, new) in enumerate(pairs) if old is new)
        return out, structure.unflatten(written(old, new) for old, new in pairs)


def key_units(bias: Float[Array, "K H"]) -> Float[Array, "K F"]:
    """What to divide keys by, and multiply queries with, before keys are rounded to 8 bits.

    The constant part of a key, which large biases make, would set the scale of all its numbers. So
    channels of large biases are made smaller, both of a pair that rotary embedding turns alike:
    scores stay as they are, to the bit, for units are powers of two. About the power of 3/4 of the
    bias is between what leaves the large channels coarse and what leaves the others so (compare
    SmoothAttention in Lin et al. 2024, QServe). Without bias keys have numbers of about 2.

    It is made of the bias's exponents alone, so that all programs and devices have the same units.
    """
    size_KF = jnp.max(jnp.abs(bias.astype(jnp.float32)).reshape(len(bias), 2, -1), axis=1)
    exponent_KF = (jax.lax.bitcast_convert_type(size_KF, jnp.int32) >> 23) - 127
    power_KF = (3 * jnp.maximum(exponent_KF, 1) + 2) // 4
    return jax.lax.bitcast_convert_type((power_KF + 127) << 23, jnp.float32)


def _evened(units: Float[Array, "K F"], attend: Attend, q: Array, k: Array, *others: Any) -> Any:
    """`attend` of queries times these units, and keys divided by them."""

    def times(x: Float[Array, "B T N H"], factors: Float[Array, "K F"]) -> Float[Array, "B T N H"]:
        apart = x.reshape(*x.shape[:2], len(factors), -1, 2, factors.shape[1])
        return (apart * factors[:, None, None].astype(x.dtype)).reshape(x.shape)

    return attend(times(q, units), times(k, 1 / units), *others)


def _tokens_of_a_shard(mesh: AnyMesh, x: Array) -> int:
    """Tokens on each shard of `seq`, of spread ones [B, T, ...]."""
    return x.shape[0] * x.shape[1] // (mesh.shape["data"] * mesh.shape["seq"])


def _through_runs(
    passes: Sequence[LayerPass],
    layers: Any,
    first: int,
    x: Float[Array, "B T D"],
    runs: Sequence[Stacked],
) -> tuple[Float[Array, "B T D"], list[Stacked]]:
    """The layers of runs that take turns, from layer `first` on, as a loop over one layer of each.

    Args:
      layers: the stacked weights of all layers of the model.
    """
    step, count = len(runs), runs[0].count
    each = [
        _LayerOfRun(one, layers, range(first + number, first + step * count, step), run)
        for number, (one, run) in enumerate(zip(passes, runs, strict=True))
    ]
    a_turn = _turns_at_once(passes[0], step, count)

    def turn(number: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        x, stacks = carry
        begin, news = number * a_turn, [[] for _ in each]
        stacks = [*stacks]
        held = [of.carried.cut(own, begin, a_turn) for of, own in zip(each, stacks, strict=True)]
        for offset in range(a_turn):
            for i, of in enumerate(each):
                own = [None if part is None else part[offset] for part in held[i]]
                x, stacks[i], own = of.layer(begin + offset, x, stacks[i], own)
                news[i].append(own)
        after = zip(each, stacks, news, strict=True)
        return x, [of.carried.put_back(own, begin, new) for of, own, new in after]

    with jax.named_scope(f"layers_{first}_to_{first + step * count - 1}"):
        given = [of.carried.stacks(run) for of, run in zip(each, runs, strict=True)]
        x, stacks = jax.lax.fori_loop(0, count // a_turn, turn, (x, given))
    pairs = zip(each, runs, stacks, strict=True)
    return x, [run.over(of.carried.whole(own)) for of, run, own in pairs]


class _LayerOfRun:
    """One of a run's layers, within a loop over them.

    Attributes:
      layer: of its index in the run, the hidden states and the arrays of `_Carried`. Under `jit`
        the layers of a turn share one lowering, and their kernels are compiled once.
    """

    def __init__(self, each: LayerPass, layers: Any, numbers: range, run: Stacked):
        self.carried = carried = _Carried(run, each.handed_on)
        first, step = numbers.start, numbers.step

        @jax.jit
        def layer(index: Array, x: Array, stacks: Any, own: Any) -> tuple[Array, Any, Any]:
            cache = carried.cache_of(stacks, index, own)
            weights = indexed_layer(layers, first + (index if step == 1 else step * index))
            x, cache = each.through(weights, x, cache, carried.specs)
            return x, *carried.with_cache(stacks, index, cache)

        self.layer = layer


def _turns_at_once(each: LayerPass, kinds: int, count: int) -> int:
    """How many of `count` layers of each kind a turn of the loop takes."""
    segment, setup = each.segment, each.setup
    usual = segment.role == "decode" and segment.variant == setup.method.step_variant(1)
    if setup.platform != "gpu" or not usual:
        return 1
    most = max(LAYERS_A_TURN // kinds, 1)
    return max(n for n in range(1, most + 1) if count % n == 0)


class _Carried:
    """The arrays of a run's cache as the loop over its layers carries them, in groups.

    - An array that is `in_place` is a group. It reaches the method as a `Plane`.
    - Small arrays of one shape, dtype and sharding (lengths, positions) are a group, joined to one
      array. To cut an array out and to put it back takes a kernel each in every layer.
    - Any other array is a group. A layer's part is cut out and put back, unless the method hands
      it on as it is. If it has `few` numbers, all layers of a turn are cut out at once.

    Attributes:
      specs: of a layer's cache.
    """

    def __init__(self, run: Stacked, handed_on: set[int]):
        leaves, self._structure = jax.tree.flatten(run.cache)
        fields, self._handed_on = leaf_fields(run.cache), handed_on
        groups: dict[Any, list[int]] = {}
        for number, (leaf, field) in enumerate(zip(leaves, fields, strict=True)):
            small = not field.in_place and leaf.ndim <= 2
            alike = (leaf.shape, leaf.dtype, logical_spec(field.axes)) if small else number
            groups.setdefault(alike, []).append(number)
        self._groups = list(groups.values())
        self._in_place = [fields[group[0]].in_place for group in self._groups]
        self._few = [
            not in_place and len(group) * leaves[group[0]].size <= MOST_NUMBERS * run.count
            for group, in_place in zip(self._groups, self._in_place, strict=True)
        ]
        plane: Any = Plane  # of specs here
        self.specs = self._structure.unflatten(
            plane(logical_spec(("layers", *field.axes)), PartitionSpec())
            if field.in_place
            else logical_spec(field.axes)
            for field in fields
        )

    def stacks(self, run: Stacked) -> list[Array]:
        """All layers' arrays, one a group."""
        return self._joined(jax.tree.leaves(run.cache), axis=1)

    def whole(self, stacks: list[Array]) -> Any:
        """`stacks` undone: the cache of a `Stacked`."""
        return self._apart(stacks, axis=1)

    def cut(self, stacks: list[Array], begin: Array, count: int) -> list[Array | None]:
        """The parts of `count` layers of groups of few numbers; None of the others."""
        return [
            jax.lax.dynamic_slice_in_dim(stack, begin, count) if few else None
            for stack, few in zip(stacks, self._few, strict=True)
        ]

    def put_back(self, stacks: list[Array], begin: Array, news: list[list[Any]]) -> list[Array]:
        """`cut` undone, with each layer's new parts."""
        for i, few in enumerate(self._few):
            if few and self._changed(i):
                parts = jnp.stack([own[i] for own in news])
                stacks[i] = jax.lax.dynamic_update_slice_in_dim(stacks[i], parts, begin, 0)
        return stacks

    def cache_of(self, stacks: list[Array], layer: Array, own: list[Any]) -> Any:
        """A layer's cache; `own` has its parts of few numbers."""
        parts = [
            few_of if few else Plane(stack, layer) if in_place else of_layer(stack, layer)
            for stack, few_of, few, in_place in zip(
                stacks, own, self._few, self._in_place, strict=True
            )
        ]
        return self._apart(parts)

    def with_cache(
        self, stacks: list[Array], layer: Array, cache: Any
    ) -> tuple[list[Array], list[Any]]:
        """`cache_of` undone: the arrays with this cache in them, and its parts of few numbers."""
        parts = self._joined(self._structure.flatten_up_to(cache))
        after = []
        for i, (stack, part) in enumerate(zip(stacks, parts, strict=True)):
            changed = self._in_place[i] or (not self._few[i] and self._changed(i))
            after.append(put(stack, layer, part) if changed else stack)
        return after, [part if few else None for part, few in zip(parts, self._few, strict=True)]

    def _changed(self, group: int) -> bool:
        return not self._handed_on.issuperset(self._groups[group])

    def _joined(self, arrays: Sequence[Any], axis: int = 0) -> list[Any]:
        """The arrays of each group stacked along a new axis; a group of one stays unchanged."""
        return [
            arrays[group[0]] if len(group) == 1 else jnp.stack([arrays[i] for i in group], axis)
            for group in self._groups
        ]

    def _apart(self, joined: Sequence[Any], axis: int = 0) -> Any:
        """`_joined` undone, as a cache."""
        found = {}
        for array, group in zip(joined, self._groups, strict=True):
            for i, number in enumerate(group):
                one = len(group) == 1
                found[number] = (
                    array if one else jax.lax.index_in_dim(array, i, axis, keepdims=False)
                )
        return self._structure.unflatten(found[number] for number in sorted(found))


@program(static=(0,), places=lambda ends, params, x: x.sharding)
def _normed(ends: Ends, params: Any, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return ends_of(ends.config, params).final_norm(x)
