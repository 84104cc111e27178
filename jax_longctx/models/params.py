"""The parameters of the decoder: their shapes and shardings, and the forms that they come in.

Parameters come in two forms. Apart, `params["layers"]` holds each layer's arrays under its number:
checkpoints and training have this form, and engines whose host calls each layer. Stacked
(`stacked_layers`), it holds one array for all layers of each kind of weight, which a loop over the
layers indexes. In either form the layers' matrices may be in 8 bits (`quantised_weights`): each is
a `QuantisedMatrix` then; the embedding, the head, norms and biases stay arrays.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import NORMS, abstract_model
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import StoredForm
from jax_longctx.sharding import AnyMesh, ParamInfo, check_divisible, info_of
from pallas_kernels.plane import Plane
from pallas_kernels.quantised_matrix import QuantisedMatrix, quantise_matrix


def layer_params(params: Any, index: Any) -> Any:
    """One layer's parameters by the names of a checkpoint, from either form of `params`.

    Of stacked ones the index may be traced.
    """
    layers = params["layers"]
    if "0" in layers:
        return layers[str(index)]
    layer = jax.tree.map(lambda x: x[index], layers)
    qkv, gate_up = layer["attn"].pop("qkv"), layer["mlp"].pop("gate_up")

    def queries(x: Any) -> Any:
        # An array, or numpy's.
        return x[:, :, :-2].reshape(x.shape[0], -1, x.shape[3])

    layer["attn"] |= {"q": jax.tree.map(queries, qkv)}
    layer["attn"] |= {
        name: jax.tree.map(lambda x, at=at: x[:, :, at], qkv) for name, at in (("k", -2), ("v", -1))
    }
    layer["mlp"] |= {
        name: jax.tree.map(lambda x, at=at: x[:, at], gate_up)
        for name, at in (("gate", 0), ("up", 1))
    }
    return layer


def indexed_layer(layers: Any, index: Array) -> Any:
    """One layer's part of stacked weights. Those of experts are `Plane`s: not all are read."""
    layer = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False), layers)
    if "router" in layer["mlp"]:
        stacks = {name: layers["mlp"][name] for name in ("gate_up", "down")}
        layer["mlp"] |= {
            name: jax.tree.map(lambda x: Plane(x, index), stack) for name, stack in stacks.items()
        }
    return layer


def first_layers(params: Any, count: int) -> Any:
    """The parameters of a model that ends after `count` layers."""
    layers = params["layers"]
    if "0" in layers:
        kept: Any = {name: layers[name] for name in map(str, range(count))}
    else:
        kept = jax.tree.map(lambda x: x[:count] if count < x.shape[0] else x, layers)
    return {**params, "layers": kept}


def stacked_layers(config: ModelConfig, params: Any, *, consume: bool = False) -> Any:
    """The parameters with all layers stacked, [L, ...], as a loop over layers needs them.

    The weights of queries, keys and values are joined, and gate with up (see `Attention`,
    `MLP`). Stacked parameters are returned as they are. Shapes give shapes.

    Args:
      consume: removes the arrays from the dicts of `params`, so that each is freed as soon as it is
        copied. The most memory that this takes beside the weights is the largest stack's.
    """
    layers = params["layers"]
    if "0" not in layers:
        return params
    each = [layers[str(index)] for index in range(len(layers))]
    stacks: dict[str, dict[str, Any]] = {}
    for part, name, names in _stacks(each[0]):
        trees = [layer[part][one] for layer in each for one in names]
        made = jax.tree.map(functools.partial(_stack, len(names), config.num_kv_heads), *trees)
        stacks.setdefault(part, {})[name] = made
        if consume:
            trees.clear()
            jax.block_until_ready(made)
            for layer, one in itertools.product(each, names):
                del layer[part][one]
    return {**params, "layers": stacks}


def stacking_programs(config: ModelConfig, params: Any) -> list[Any]:
    """The programs that `stacked_layers` calls for parameters of these shapes, lowered, each once.

    Args:
      params: shapes on a mesh, a layer apart.
    """
    layers = params["layers"]
    each = [layers[str(index)] for index in range(len(layers))]
    found: dict[Any, Any] = {}
    for part, _, names in _stacks(each[0]):
        trees = [layer[part][one] for layer in each for one in names]
        for leaves in zip(*map(jax.tree.leaves, trees), strict=True):
            first = leaves[: len(names)]
            key = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in first)
            if key not in found:
                stacker = _stacker(len(names), config.num_kv_heads, _stack_sharding(first))
                found[key] = stacker.lower(leaves)
    return list(found.values())


def _stacks(layer: Any) -> list[tuple[str, str, tuple[str, ...]]]:
    """The part of a layer that each stack is of, its name, and the parameters that it joins."""
    ways = {"attn": {"qkv": ("q", "k", "v")}, "mlp": {"gate_up": ("gate", "up")}}
    found = []
    for part, arrays in layer.items():
        joins = ways.get(part, {})
        joined = {name for names in joins.values() for name in names}
        plain = {name: (name,) for name in arrays if name not in joined}
        found += [(part, name, names) for name, names in {**plain, **joins}.items()]
    return found


def _stack(joined: int, kv_heads: int, *leaves: Any) -> Any:
    """One array of all layers; `leaves` has `joined` arrays of each layer in turn."""
    placed = leaves[0].sharding is not None
    sharding = _stack_sharding(leaves[:joined]) if placed else None
    if not isinstance(leaves[0], jax.ShapeDtypeStruct):
        return _stacker(joined, kv_heads, sharding)(leaves)
    made = jax.eval_shape(functools.partial(_joined_stack, joined, kv_heads), leaves)
    return jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=sharding)


def _stack_sharding(arrays: tuple[Any, ...]) -> NamedSharding:
    """Of the stack of a layer's arrays."""
    first, *others = arrays
    # Joined, heads are [D,K,X,H], and gate and up [D,2,F] or [E,2,D,F]: the sharded axis stays one.
    spec = tuple(first.sharding.spec) + (None,) * (first.ndim - len(first.sharding.spec))
    if others:
        at = 2 if len(arrays) == 3 else 1
        spec = (*spec[:at], None, *spec[at:])
    return NamedSharding(first.sharding.mesh, PartitionSpec(None, *spec))


@functools.lru_cache(maxsize=64)
def _stacker(joined: int, kv_heads: int, sharding: NamedSharding | None) -> Any:
    return jax.jit(functools.partial(_joined_stack, joined, kv_heads), out_shardings=sharding)


def _joined_stack(joined: int, kv_heads: int, leaves: tuple[Array, ...]) -> Array:
    def one(arrays: tuple[Array, ...]) -> Array:
        if joined == 1:
            return arrays[0]
        if joined == 2:
            return jnp.stack(arrays, axis=1)
        # Query head n is the n // G-th kv head's.
        grouped = [x.reshape(x.shape[0], kv_heads, -1, x.shape[2]) for x in arrays]
        return jnp.concatenate(grouped, axis=2)

    return jnp.stack([one(arrays) for arrays in itertools.batched(leaves, joined)])


@functools.lru_cache(maxsize=16)
def param_infos(config: ModelConfig) -> Mapping[str, ParamInfo]:
    """Shape and logical axes of every parameter, by dot-joined path (`layers.0.attn.q`)."""
    _, state = abstract_model(config)
    return {
        ".".join(map(str, path)): info_of(leaf)
        for path, leaf in nnx.to_flat_state(state)
        if isinstance(leaf, nnx.Param)
    }


def abstract_params(config: ModelConfig, spec: RunSpec) -> Any:
    """The parameters as shapes on the mesh, in a nested dict, a layer apart.

    They are in float32 unless the spec names a dtype, as in `init_params`.
    """
    mesh, dtype, infos = spec.devices(), jnp.dtype(spec.dtype or "float32"), param_infos(config)
    shapes = {path: info.abstract(mesh, dtype, spec.form) for path, info in infos.items()}
    return traverse_util.unflatten_dict(shapes, sep=".")


def stored_paths(path: str, x: Any) -> dict[str, Any]:
    """A parameter as a checkpoint stores it, by path: an array; of 8 bits values and scales."""
    if not isinstance(x, QuantisedMatrix):
        return {path: x}
    return {f"{path}.values": x.values, f"{path}.scales": x.scales}


def form_of_weights(params: Any) -> StoredForm | None:
    """The 8-bit form of the weights among these parameters; None where all are arrays."""
    leaves = jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, QuantisedMatrix))
    return "int8" if any(isinstance(x, QuantisedMatrix) for x in leaves) else None


def quantised_weights(config: ModelConfig, mesh: AnyMesh, params: Any) -> Any:
    """The parameters, some or all and a layer apart, with the layers' matrices in 8 bits.

    Each matrix is taken out of the dicts of `params` when its 8-bit form is made: what that takes
    beside the weights is one matrix.
    """
    flat: dict[str, Any] = dict(traverse_util.flatten_dict(params, sep="."))
    infos, found = param_infos(config), {}
    for path in [*flat]:
        info, w = infos[path], flat.pop(path)
        if info.in_8_bits:
            *folders, name = path.split(".")
            del functools.reduce(dict.__getitem__, folders, params)[name]
            w = jax.block_until_ready(_quantiser(info, mesh)(w))
        found[path] = w
    return traverse_util.unflatten_dict(found, sep=".")


@functools.lru_cache(maxsize=64)
def _quantiser(info: ParamInfo, mesh: AnyMesh) -> Callable[[Array], Any]:
    shardings = jax.tree.map(lambda x: x.sharding, info.abstract(mesh, jnp.float32, "int8"))

    def parts(w: Array) -> tuple[Array, Array]:
        made = quantise_matrix(w, info.inputs)
        return made.values, made.scales

    run = jax.jit(parts, out_shardings=(shardings.values, shardings.scales))

    def quantised(w: Array) -> QuantisedMatrix:
        values, scales = run(w)
        return QuantisedMatrix(values, scales, jnp.dtype(w.dtype))

    return quantised


def check_mesh(config: ModelConfig, mesh: AnyMesh) -> None:
    """Raises ConfigError when the model's heads, MLP or vocabulary do not divide over the mesh."""
    check_divisible(
        mesh,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        mlp=config.mlp_dim,
        vocab=config.vocab_size,
    )


def init_params(config: ModelConfig, spec: RunSpec | None = None, *, seed: int = 0) -> Any:
    """Random parameters as a nested dict, made straight onto their shards.

    One small program per distinct shape, so that a large model neither compiles for long nor
    holds float32 copies of everything at once.
    """
    spec = spec or RunSpec()
    mesh, dtype = spec.devices(), jnp.dtype(spec.dtype or "float32")
    check_mesh(config, mesh)
    params: dict[str, Any] = {}
    for index, (path, info) in enumerate(param_infos(config).items()):
        name = path.split(".")[-1]
        fresh = NORMS[config.traits.norm].fresh if name == "scale" else None
        make = _maker(info, 0.0 if name.endswith("bias") else fresh, mesh, dtype)
        params[path] = make(jax.random.key(seed + index))
        if spec.form is not None and info.in_8_bits:
            params[path] = _quantiser(info, mesh)(params[path])
    return traverse_util.unflatten_dict(params, sep=".")


# Kept, so that a second model of the same shapes compiles nothing.
@functools.lru_cache(maxsize=64)
def _maker(info: ParamInfo, value: float | None, mesh: Mesh, dtype: Any) -> Callable[..., Array]:
    """Makes arrays of one value, or random ones."""
    fan_in = math.prod(info.shape[axis] for axis in info.inputs)

    def make(key: Array) -> Array:
        if value is not None:
            return jnp.full(info.shape, value, dtype)
        return (jax.random.normal(key, info.shape, jnp.float32) * fan_in**-0.5).astype(dtype)

    return jax.jit(make, out_shardings=info.sharding(mesh))
