"""The decoder of the Llama family: Llama 2/3/3.1/3.2, Mistral, Qwen2/2.5, Qwen3, InternLM2.

One pre-norm decoder, configured by `ModelConfig`. Its only unusual trait: queries, keys and
values leave the layer *before* rotary embedding, through the `attend` function the caller gives.
Whoever attends decides what is cached and at which position each key is seen, so every
long-context method runs on this one model.

Arrays carry the letters of the glossary: B batch, T tokens of the segment, N query heads, K kv
heads, H head dim, D model, F ffn, V vocabulary.

Parameters come in two forms. Apart, `params["layers"]` holds each layer's arrays under its number:
checkpoints and training have this form, and engines whose host calls each layer. Stacked
(`stacked_layers`), it holds one array for all layers of each kind of weight, which a loop over the
layers indexes. In either form the layers' matrices may be in 8 bits (`quantised_weights`): each is
a `QuantisedMatrix` then; the embedding, the head, norms and biases stay arrays. The engine runs the
layers one by one (`layer_of`); `Llama.hidden`, for training, unrolls them.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jax_longctx.models.config import ModelConfig
from jax_longctx.settings import StoredForm
from jax_longctx.sharding import AnyMesh, check_divisible, logical_sharding, weight_sharding
from pallas_kernels.quantised_matrix import (
    AnyMatrix,
    QuantisedMatrix,
    map_parts,
    quantise_matrix,
)

# (q_BTNH, k_BTKH, v_BTKH, the layer's cache) -> (out_BTNH, cache)
Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, " D"], eps: float) -> Array:
    """Root-mean-square norm in float32; the scale multiplies after the cast back, as in HF."""
    normed = x.astype(jnp.float32) * rms_factor(sums_of_squares(x), x.shape[-1], eps)
    return scale * normed.astype(x.dtype)


def rms_factor(squares: Float[Array, "..."], size: int, eps: float) -> Float[Array, "..."]:
    """What the root-mean-square norm multiplies vectors of `size` numbers with, scale apart.

    Args:
      squares: the sum of each vector's squares, in float32.
    """
    return jax.lax.rsqrt(squares / size + eps)


def sums_of_squares(x: Float[Array, "... D"]) -> Float[Array, "... 1"]:
    """Of each vector's numbers, in float32."""
    x32 = x.astype(jnp.float32)
    return jnp.sum(x32 * x32, axis=-1, keepdims=True)


# What families choose from (`jax_longctx.models.config`).
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": jax.nn.silu}
NORMS: dict[str, Callable[[Array, Array, float], Array]] = {"rms": rms_norm}


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """Shape and logical axes (see `jax_longctx.sharding.RULES`) of one parameter."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]

    def sharding(self, mesh: AnyMesh) -> NamedSharding:
        """How an engine on `mesh` holds it."""
        return weight_sharding(mesh, self.axes, self.shape)

    @property
    def inputs(self) -> tuple[int, ...]:
        """The axes that a matrix contracts; none of a bias or a scale."""
        first, count = self.axes[0], len(self.axes)
        if first == "vocab":
            return (1,)
        if first == "heads" and count == 3:
            return (0, 1)
        return (0,) if first in ("embed", "mlp") and count > 1 else ()

    @property
    def in_8_bits(self) -> bool:
        """Whether 8-bit weights are so here: of the layers' matrices.

        The table of an embedding and of the head is read as it is: a step reads one row of the one,
        and the other's errors go straight into the logits.
        """
        return bool(self.inputs) and self.axes[0] != "vocab"

    @property
    def of_scales(self) -> "ParamInfo":
        """Of the scales of this matrix in 8 bits."""
        shape, axes = [*self.shape], [*self.axes]
        for axis in self.inputs:
            shape[axis], axes[axis] = 1, None
        return ParamInfo(tuple(shape), tuple(axes))

    def abstract(self, mesh: AnyMesh, dtype: Any, weights: StoredForm | None = None) -> Any:
        """Shapes of it on `mesh`, in the 8-bit form where there is one and it has one."""
        sharding = self.sharding(mesh)
        if weights is None or not self.in_8_bits:
            return jax.ShapeDtypeStruct(self.shape, dtype, sharding=sharding)
        scales = self.of_scales
        return QuantisedMatrix(
            jax.ShapeDtypeStruct(self.shape, jnp.int8, sharding=sharding),
            jax.ShapeDtypeStruct(scales.shape, jnp.float32, sharding=scales.sharding(mesh)),
            jnp.dtype(dtype),
        )


def _param(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> nnx.Param:
    """Only its shape counts: `init_params` makes random values, the loader reads stored ones."""
    return nnx.Param(jnp.zeros(shape, jnp.float32), axes=axes)


class Norm(nnx.Module):
    """The family's norm over the last axis."""

    def __init__(self, size: int, config: ModelConfig):
        self.scale = _param((size,), (None,))
        self.kind, self.eps = config.traits.norm, config.norm_eps

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        return NORMS[self.kind](x, self.scale[...], self.eps)


class Products:
    """How a layer multiplies with its weights. The engine has another way for few rows on a GPU."""

    def of(self, x: Array, w: AnyMatrix, axes: int = 1) -> Array:
        """The last axes of x with as many first ones of w."""
        return jnp.tensordot(x, w, axes) if isinstance(w, jax.Array) else w.product(x, axes)

    def normed(self, norm: Norm, x: Array, w: AnyMatrix) -> Array:
        """The last axis of the normed x with the first one of w."""
        return self.of(self.placed(norm(x), "batch", None, None), w)

    def placed(self, x: Array, *axes: str | None) -> Array:
        """x, which has these logical axes, on the shards where the next step needs it.

        "tokens" stands for the segment's tokens as they are, spread over `seq` or not. Weights are
        multiplied with tokens that are on all shards, of axis None.
        """
        return x


PLAIN = Products()


class Embedding(nnx.Module):
    """A `[V, D]` table: token embedding, or output head."""

    def __init__(self, config: ModelConfig):
        self.table = _param((config.vocab_size, config.model_dim), ("vocab", "embed"))


class Attention(nnx.Module):
    """The projections around `attend`; no rotary embedding here.

    With `joined` the weights of queries, keys and values are one array [D, K, G + 2, H]: for each
    kv head its G query heads, its key and its value. So one matmul projects all three.
    """

    def __init__(self, config: ModelConfig, joined: bool = False):
        d, n, k, h = config.model_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.joined = joined
        if joined:
            self.qkv = _param((d, k, n // k + 2, h), ("embed", "kv_heads", None, "head_dim"))
        else:
            self.q = _param((d, n, h), ("embed", "heads", "head_dim"))
            self.k = _param((d, k, h), ("embed", "kv_heads", "head_dim"))
            self.v = _param((d, k, h), ("embed", "kv_heads", "head_dim"))
        self.o = _param((n, h, d), ("heads", "head_dim", "embed"))
        if config.qkv_bias:
            self.q_bias = _param((n, h), ("heads", None))
            self.k_bias = _param((k, h), ("kv_heads", None))
            self.v_bias = _param((k, h), ("kv_heads", None))
        if config.o_bias:
            self.o_bias = _param((d,), ("embed",))
        if config.qk_norm:
            self.q_norm = Norm(h, config)
            self.k_norm = Norm(h, config)
        self.config = config

    def project(self, norm: Norm, x_BTD: Array, products: Products) -> tuple[Array, Array, Array]:
        """q_BTNH, k_BTKH, v_BTKH of the normed x, before rotary embedding."""
        if self.joined:
            new_BTKXH = products.normed(norm, x_BTD, self.qkv[...])
            new_BTKXH = products.placed(new_BTKXH, "batch", None, "kv_heads", None, "head_dim")
            new_BTKXH = products.placed(new_BTKXH, "batch", "tokens", "kv_heads", None, None)
            q_BTKGH, k_BTKH, v_BTKH = new_BTKXH[..., :-2, :], *jnp.moveaxis(new_BTKXH, 3, 0)[-2:]
            q_BTNH = q_BTKGH.reshape(*q_BTKGH.shape[:2], -1, q_BTKGH.shape[-1])
        else:
            normed_BTD = products.placed(norm(x_BTD), "batch", None, None)
            q_BTNH, k_BTKH, v_BTKH = (
                products.placed(
                    products.placed(products.of(normed_BTD, w), "batch", None, heads, "head_dim"),
                    *("batch", "tokens", heads, None),
                )
                for w, heads in (
                    (self.q[...], "heads"),
                    (self.k[...], "kv_heads"),
                    (self.v[...], "kv_heads"),
                )
            )
        if self.config.qkv_bias:
            q_BTNH = q_BTNH + self.q_bias[...]
            k_BTKH = k_BTKH + self.k_bias[...]
            v_BTKH = v_BTKH + self.v_bias[...]
        if self.config.qk_norm:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        return q_BTNH, k_BTKH, v_BTKH

    def output(self, out_BTNH: Array, products: Products) -> Array:
        """What is added to the hidden states, [B,T,D]."""
        out_BTNH = products.placed(out_BTNH, "batch", None, "heads", "head_dim")
        product = products.placed(products.of(out_BTNH, self.o[...], 2), "batch", "tokens", None)
        return product + self.o_bias[...] if self.config.o_bias else product


class MLP(nnx.Module):
    """A gated MLP: SwiGLU with the activation silu.

    With `joined` the weights of gate and up are one array [D, 2, F].
    """

    def __init__(self, config: ModelConfig, joined: bool = False):
        d, f = config.model_dim, config.mlp_dim
        self.joined = joined
        if joined:
            self.gate_up = _param((d, 2, f), ("embed", None, "mlp"))
        else:
            self.gate = _param((d, f), ("embed", "mlp"))
            self.up = _param((d, f), ("embed", "mlp"))
        self.down = _param((f, d), ("mlp", "embed"))
        self.bias, self.activation = config.mlp_bias, config.traits.activation
        if self.bias:
            self.gate_bias = _param((f,), ("mlp",))
            self.up_bias = _param((f,), ("mlp",))
            self.down_bias = _param((d,), ("embed",))

    def __call__(self, norm: Norm, x_BTD: Array, products: Products) -> Array:
        """What is added to the hidden states, [B,T,D]: the output for the normed x."""
        if self.joined:
            both_BTCF = products.normed(norm, x_BTD, self.gate_up[...])
            gate_BTF, up_BTF = both_BTCF[:, :, 0], both_BTCF[:, :, 1]
        else:
            normed_BTD = products.placed(norm(x_BTD), "batch", None, None)
            gate_BTF = products.of(normed_BTD, self.gate[...])
            up_BTF = products.of(normed_BTD, self.up[...])
        if self.bias:
            gate_BTF, up_BTF = gate_BTF + self.gate_bias[...], up_BTF + self.up_bias[...]
        gated_BTF = ACTIVATIONS[self.activation](gate_BTF) * up_BTF
        gated_BTF = products.placed(gated_BTF, "batch", None, "mlp")
        product = products.placed(products.of(gated_BTF, self.down[...]), "batch", "tokens", None)
        return product + self.down_bias[...] if self.bias else product


class Layer(nnx.Module):
    """Pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, config: ModelConfig, joined: bool = False):
        self.attn_norm = Norm(config.model_dim, config)
        self.attn = Attention(config, joined)
        self.mlp_norm = Norm(config.model_dim, config)
        self.mlp = MLP(config, joined)

    def __call__(
        self,
        x_BTD: Array,
        cache: Any,
        attend: Attend,
        products: Products = PLAIN,
    ) -> tuple[Array, Any]:
        with jax.named_scope("attention"):
            q, k, v = self.attn.project(self.attn_norm, x_BTD, products)
            out_BTNH, cache = attend(q, k, v, cache)
            x_BTD = x_BTD + self.attn.output(out_BTNH, products)
        with jax.named_scope("mlp"):
            return x_BTD + self.mlp(self.mlp_norm, x_BTD, products), cache


class Llama(nnx.Module):
    """The decoder."""

    def __init__(self, config: ModelConfig, layers: int | None = None):
        self.config = config
        self.embed = Embedding(config)
        count = config.num_layers if layers is None else layers
        self.layers = nnx.List([Layer(config) for _ in range(count)])
        self.final_norm = Norm(config.model_dim, config)
        if not config.tie_embeddings:
            self.head = Embedding(config)

    def embedded(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """What the first layer is given."""
        with jax.named_scope("embed"):
            x_BTD = self.embed.table[...][tokens]
            scale = self.config.traits.embed_scale
            return x_BTD if scale is None else x_BTD * scale(self.config.model_dim)

    def hidden(
        self, tokens: Int[Array, "B T"], caches: Sequence[Any], attend: Attend
    ) -> tuple[Float[Array, "B T D"], tuple[Any, ...]]:
        """Final normed hidden states and the updated caches, one per layer."""
        x_BTD = self.embedded(tokens)
        updated = []
        for index, layer in enumerate(self.layers):
            with jax.named_scope(f"layer_{index}"):
                x_BTD, cache = layer(x_BTD, caches[index], attend)
            updated.append(cache)
        return self.final_norm(x_BTD), tuple(updated)

    def logits(self, x: Float[Array, "*R D"]) -> Float[Array, "*R V"]:
        """float32 logits of hidden states."""
        table_VD = self.embed.table[...] if self.config.tie_embeddings else self.head.table[...]
        with jax.named_scope("head"):
            return jnp.einsum("...D,VD->...V", x, table_VD, preferred_element_type=jnp.float32)


@functools.lru_cache(maxsize=16)
def abstract_model(config: ModelConfig) -> tuple[Any, Any]:
    """Structure and abstract (shape-only) state of the model; nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: Llama(config)))


def model_of(config: ModelConfig, params: Any) -> Llama:
    """The module over a nested dict of parameters."""
    return _merged(abstract_model(config), params)


def ends_of(config: ModelConfig, params: Any) -> Llama:
    """The module without its layers: embedding, final norm, head."""
    ends = {name: value for name, value in params.items() if name != "layers"}
    return _merged(_abstract_ends(config), ends)


def layer_of(config: ModelConfig, params: Any) -> Layer:
    """One layer over its parameters, which may be `joined` (see `stacked_layers`)."""
    return _merged(_abstract_layer(config, "qkv" in params["attn"]), params)


def gathered_ends(config: ModelConfig, mesh: AnyMesh, params: Any) -> Any:
    """`ends_of`'s parameters, which each shard of `seq` then holds whole; within `jit`."""
    return _gathered(_abstract_ends(config), mesh, params)


def gathered_layer(config: ModelConfig, mesh: AnyMesh, params: Any) -> Any:
    """`layer_of`'s parameters, which each shard of `seq` then holds whole; within `jit`."""
    return _gathered(_abstract_layer(config, "qkv" in params["attn"]), mesh, params)


def _gathered(split: tuple[Any, Any], mesh: AnyMesh, params: Any) -> Any:
    infos = {
        path: ParamInfo(tuple(leaf.shape), leaf.get_metadata("axes"))
        for path, leaf in nnx.to_flat_state(split[1])
    }

    def gathered(array: Any, info: ParamInfo) -> Any:
        return jax.lax.with_sharding_constraint(array, logical_sharding(mesh, info.axes))

    placed = {}
    for path, array in traverse_util.flatten_dict(params).items():
        info = infos[path]
        if isinstance(array, QuantisedMatrix):
            info = QuantisedMatrix(info, info.of_scales, None)
        placed[path] = map_parts(array, gathered, info)
    return traverse_util.unflatten_dict(placed)


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

    layer["attn"] |= {"q": map_parts(qkv, queries)}
    layer["attn"] |= {
        name: map_parts(qkv, lambda x, at=at: x[:, :, at]) for name, at in (("k", -2), ("v", -1))
    }
    layer["mlp"] |= {
        name: map_parts(gate_up, lambda x, at=at: x[:, at]) for name, at in (("gate", 0), ("up", 1))
    }
    return layer


def first_layers(params: Any, count: int) -> Any:
    """The parameters of a model that ends after so many layers."""
    layers = params["layers"]
    if "0" in layers:
        kept: Any = {name: layers[name] for name in map(str, range(count))}
    else:
        kept = jax.tree.map(lambda x: x[:count] if count < x.shape[0] else x, layers)
    return {**params, "layers": kept}


def stacked_layers(config: ModelConfig, params: Any, *, consume: bool = False) -> Any:
    """The parameters with those of all layers stacked, [L, ...], as a loop over layers needs them.

    The weights of queries, keys and values are joined, and those of gate and up (see `Attention`,
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
        nested = isinstance(each[0][part][names[0]], dict)
        group = _group(each, part, names)
        made = _stack_of(config, group)
        stacks.setdefault(part, {})[name] = {"scale": made} if nested else made
        if consume:
            group.clear()
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
        for group in _parts_of(_group(each, part, names)):
            key = tuple((leaf.shape, leaf.dtype, leaf.sharding) for leaf in group[0])
            if key not in found:
                sharding = _stack_sharding(group[0])
                stacker = _stacker(len(names) - 1, config.num_kv_heads, sharding)
                found[key] = stacker.lower(group)
    return list(found.values())


def _stacks(layer: Any) -> list[tuple[str, str, tuple[str, ...]]]:
    """The part of a layer that each stack is of, its name, and the arrays that it joins."""
    ways = {"attn": {"qkv": ("q", "k", "v")}, "mlp": {"gate_up": ("gate", "up")}}
    found = []
    for part, arrays in layer.items():
        joins = ways.get(part, {})
        joined = {name for names in joins.values() for name in names}
        plain = {name: (name,) for name in arrays if name not in joined}
        found += [(part, name, names) for name, names in {**plain, **joins}.items()]
    return found


def _group(layers: Sequence[Any], part: str, names: tuple[str, ...]) -> list[tuple[Any, ...]]:
    """Each layer's arrays of these names."""
    return [
        tuple(one["scale"] if isinstance(one, dict) else one for one in map(layer[part].get, names))
        for layer in layers
    ]


def _parts_of(layers: Sequence[tuple[Any, ...]]) -> list[Sequence[tuple[Any, ...]]]:
    """The layers' arrays; of 8-bit weights the numbers, then the scales."""
    if not isinstance(layers[0][0], QuantisedMatrix):
        return [layers]
    return [
        [tuple(getattr(w, part) for w in arrays) for arrays in layers]
        for part in ("values", "scales")
    ]


def _stack_of(config: ModelConfig, layers: Sequence[tuple[Any, ...]]) -> Any:
    """`_stack`, also of 8-bit weights."""
    first, (made, *scales) = layers[0][0], [_stack(config, part) for part in _parts_of(layers)]
    return QuantisedMatrix(made, scales[0], first.dtype) if scales else made


def _stack(config: ModelConfig, layers: Sequence[tuple[Any, ...]]) -> Any:
    """One array of all layers: `layers[l]` holds a layer's arrays, which are joined if several."""
    (first, *others), abstract = layers[0], isinstance(layers[0][0], jax.ShapeDtypeStruct)
    if first.sharding is None:
        return jax.eval_shape(_joined_stack(len(others), config.num_kv_heads), layers)
    sharding = _stack_sharding(layers[0])
    if abstract:
        made = jax.eval_shape(_joined_stack(len(others), config.num_kv_heads), layers)
        return jax.ShapeDtypeStruct(made.shape, made.dtype, sharding=sharding)
    return _stacker(len(others), config.num_kv_heads, sharding)(layers)


def _stack_sharding(arrays: tuple[Any, ...]) -> NamedSharding:
    """Of the stack of a layer's arrays."""
    first, *others = arrays
    # Joined, heads [D,N,H] are [D,K,X,H] and gate and up [D,2,F]: the sharded axis stays one.
    spec = tuple(first.sharding.spec) + (None,) * (first.ndim - len(first.sharding.spec))
    if others:
        spec = (spec[0], spec[1], None, spec[2]) if first.ndim == 3 else (spec[0], None, spec[1])
    return NamedSharding(first.sharding.mesh, PartitionSpec(None, *spec))


@functools.lru_cache(maxsize=64)
def _stacker(others: int, kv_heads: int, sharding: NamedSharding) -> Any:
    return jax.jit(_joined_stack(others, kv_heads), out_shardings=sharding)


def _joined_stack(others: int, kv_heads: int) -> Callable[..., Array]:
    def joined(arrays: tuple[Array, ...]) -> Array:
        if not others:
            return arrays[0]
        if others == 1:
            return jnp.stack(arrays, axis=1)
        # Query head n is the n // G-th kv head's.
        grouped = [x.reshape(x.shape[0], kv_heads, -1, x.shape[2]) for x in arrays]
        return jnp.concatenate(grouped, axis=2)

    return lambda layers: jnp.stack([joined(arrays) for arrays in layers])


def _merged(split: tuple[Any, Any], params: Any) -> Any:
    graph, abstract = split
    state = jax.tree.map(lambda leaf: leaf, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


@functools.lru_cache(maxsize=16)
def _abstract_ends(config: ModelConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Llama(config, layers=0)))


@functools.lru_cache(maxsize=16)
def _abstract_layer(config: ModelConfig, joined: bool) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Layer(config, joined)))


@functools.lru_cache(maxsize=16)
def param_infos(config: ModelConfig) -> Mapping[str, ParamInfo]:
    """Shape and logical axes of every parameter, by dot-joined path (`layers.0.attn.q`)."""
    _, state = abstract_model(config)
    return {
        ".".join(map(str, path)): ParamInfo(tuple(leaf.shape), leaf.get_metadata("axes"))
        for path, leaf in nnx.to_flat_state(state)
        if isinstance(leaf, nnx.Param)
    }


def abstract_params(
    config: ModelConfig, mesh: Any, dtype: Any, weights: StoredForm | None = None
) -> Any:
    """The parameters as shapes on the mesh, in a nested dict, a layer apart.

    Args:
      weights: the 8-bit form of the layers' matrices; None for arrays.
    """
    infos = param_infos(config).items()
    shapes = {path: info.abstract(mesh, dtype, weights) for path, info in infos}
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


def init_params(
    config: ModelConfig,
    mesh: Mesh,
    *,
    seed: int = 0,
    dtype: Any = jnp.float32,
    weights: StoredForm | None = None,
) -> Any:
    """Random parameters as a nested dict, made straight onto their shards.

    One small program per distinct shape, so that a large model neither compiles for long nor
    holds float32 copies of everything at once.

    Args:
      weights: the 8-bit form of the layers' matrices; None for arrays.
    """
    check_mesh(config, mesh)
    params: dict[str, Any] = {}
    for index, (path, info) in enumerate(param_infos(config).items()):
        name = path.split(".")[-1]
        kind = "one" if name == "scale" else "zero" if name.endswith("bias") else "normal"
        make = _maker(info, kind, mesh, jnp.dtype(dtype))
        params[path] = make(jax.random.key(seed + index))
        if weights is not None and info.in_8_bits:
            params[path] = _quantiser(info, mesh)(params[path])
    return traverse_util.unflatten_dict(params, sep=".")


# Kept, so that a second model of the same shapes compiles nothing.
@functools.lru_cache(maxsize=64)
def _maker(info: ParamInfo, kind: str, mesh: Mesh, dtype: Any) -> Callable[..., Array]:
    fan_in = math.prod(info.shape[axis] for axis in info.inputs)

    def make(key: Array) -> Array:
        if kind != "normal":
            return jnp.full(info.shape, 1 if kind == "one" else 0, dtype)
        return (jax.random.normal(key, info.shape, jnp.float32) * fan_in**-0.5).astype(dtype)

    return jax.jit(make, out_shardings=info.sharding(mesh))
