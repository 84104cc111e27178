"""The decoder of Llama and the families like it (`jax_longctx.models.families`).

One decoder, configured by `ModelConfig`. Its only unusual trait: queries, keys and values leave the
layer *before* rotary embedding, through the `attend` function the caller gives. Whoever attends
decides what is cached and at which position each key is seen, so every long-context method runs on
this one model.

Arrays carry the letters of the glossary: B batch, T tokens of the segment, N query heads, K kv
heads, H head dim, D model, F ffn, V vocabulary.

Parameters are nested dicts (`models.params`). The engine runs the layers one by one (`layer_of`);
`Llama.hidden`, for training, unrolls them.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jax_longctx.models import experts
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.families import NORM_PLACES
from jax_longctx.sharding import (
    AnyMesh,
    ParamInfo,
    info_of,
    logical_sharding,
    logical_spec,
    on_devices,
    param,
)
from pallas_kernels.plane import Plane, is_plane, part_of
from pallas_kernels.quantised_matrix import QuantisedMatrix

# (q_BTNH, k_BTKH, v_BTKH, the layer's cache) -> (out_BTNH, cache)
Attend = Callable[..., tuple[Array, Any]]


def rms_norm(x: Float[Array, "..."], scale: Float[Array, "*D"], eps: float) -> Array:
    """Root-mean-square norm over the axes of `scale`, in float32.

    The scale multiplies after the cast back, as in HF's Llama.
    """
    return scale * _of_unit_size(x, scale, eps).astype(x.dtype)


def wide_rms_norm(x: Float[Array, "..."], scale: Float[Array, "*D"], eps: float) -> Array:
    """`rms_norm` whose scale multiplies before the cast back, as in HF's OLMo 2 and Gemma."""
    return (scale.astype(jnp.float32) * _of_unit_size(x, scale, eps)).astype(x.dtype)


def layer_norm(x: Float[Array, "..."], scale: Float[Array, "*D"], eps: float) -> Array:
    """Norm of mean 0 and variance 1 over the axes of `scale`, in float32 (Ba et al. 2016)."""
    mean = jnp.mean(x, tuple(range(-scale.ndim, 0)), jnp.float32, keepdims=True)
    return wide_rms_norm(x.astype(jnp.float32) - mean, scale, eps).astype(x.dtype)


def _of_unit_size(x: Array, scale: Array, eps: float) -> Array:
    squares = sums_of_squares(x, scale.ndim)
    return x.astype(jnp.float32) * rms_factor(squares, scale.size, eps)


def rms_factor(squares: Float[Array, "..."], size: int, eps: float) -> Float[Array, "..."]:
    """What the root-mean-square norm multiplies vectors of `size` numbers with, scale apart.

    Args:
      squares: the sum of each vector's squares, in float32.
    """
    return jax.lax.rsqrt(squares / size + eps)


def sums_of_squares(x: Float[Array, "..."], axes: int = 1) -> Float[Array, "..."]:
    """Of the numbers of each vector, x's last `axes` axes, which stay as 1; in float32."""
    x32 = x.astype(jnp.float32)
    return jnp.sum(x32 * x32, axis=tuple(range(-axes, 0)), keepdims=True)


@dataclasses.dataclass(frozen=True)
class NormKind:
    """A norm that families choose.

    Attributes:
      of: the normed x, from x, the scale and epsilon.
      gain: of a root-mean-square norm: what x is multiplied with beside `rms_factor`, from the
        scale. None of another norm.
      fresh: the scale of a random model, which changes nothing.
    """

    of: Callable[[Array, Array, float], Array]
    gain: Callable[[Array], Array] | None = None
    fresh: float = 1.0


def _plus_one(scale: Array) -> Array:
    return 1 + scale.astype(jnp.float32)


# What families choose from (`jax_longctx.models.families`).
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_pytorch_tanh": jax.nn.gelu,
}
NORMS = {
    "rms": NormKind(rms_norm, lambda scale: scale),
    "wide rms": NormKind(wide_rms_norm, lambda scale: scale.astype(jnp.float32)),
    "rms plus one": NormKind(
        lambda x, scale, eps: wide_rms_norm(x, _plus_one(scale), eps), _plus_one, fresh=0.0
    ),
    "layer": NormKind(layer_norm),
}


class Norm(nnx.Module):
    """The family's norm over the last axes, which have this shape and these logical axes."""

    def __init__(self, config: ModelConfig, shape: tuple[int, ...], axes: tuple[str | None, ...]):
        self.scale = param(shape, axes)
        if config.traits.norm_bias:
            self.bias = param(shape, axes)
        self.kind, self.biased = config.traits.norm, config.traits.norm_bias
        self.eps = config.norm_eps

    @property
    def gain(self) -> Array | None:
        """What x is multiplied with beside `rms_factor`; None of a norm with more to it."""
        gain = NORMS[self.kind].gain
        return None if gain is None or self.biased else gain(self.scale[...])

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        normed = NORMS[self.kind].of(x, self.scale[...], self.eps)
        return normed + self.bias[...] if self.biased else normed


@dataclasses.dataclass(frozen=True)
class Products:
    """How a layer multiplies with its weights. The engine has another way for few rows on a GPU.

    Attributes:
      mesh: the engine's; None in training.
      spread: whether the tokens are spread over `seq`.
    """

    mesh: AnyMesh | None
    spread: bool = False

    def of(self, x: Array, weight: nnx.Param, axes: int = 1) -> Array:
        """The last axes of x with as many first ones of the weight, a matrix."""
        w = weight[...]
        return jnp.tensordot(x, w, axes) if isinstance(w, jax.Array) else w.product(x, axes)

    def normed(self, norm: Norm | None, x: Array, weight: nnx.Param) -> Array:
        """The last axis of x, normed if there is a norm, with the first one of w."""
        return self.of(self.entering(norm, x), weight)

    def entering(self, norm: Norm | None, x: Array) -> Array:
        """x, normed if there is a norm, as several weights are multiplied with it."""
        return self.placed(x if norm is None else norm(x), "batch", None, None)

    def placed(self, x: Array, *axes: str | None) -> Array:
        """x, which has these logical axes, on the shards where the next step needs it.

        "tokens" stands for the segment's tokens as they are, spread over `seq` or not. Weights are
        multiplied with tokens that are on all shards, of axis None.
        """
        return x

    def by_device(
        self, run: Callable[..., Array], tokens: Sequence[Array], weights: Mapping[str, nnx.Param]
    ) -> Array:
        """The sum over devices of `run(*rows, parts)`, [B,T,D].

        Args:
          run: given a device's rows of `tokens`, and its parts of `weights`.
          tokens: arrays [B,T,...].
          weights: of experts. Those with an axis "mlp" are divided along it.
        """

        def local(*given: Any) -> Array:
            *rows, parts = given
            flat = [x.reshape(-1, x.shape[-1]) for x in rows]
            return run(*flat, parts).reshape(1, *rows[0].shape)

        # Of a loop over layers they are `Plane`s, which indexing would read.
        arrays = {name: param.get_value() for name, param in weights.items()}
        if self.mesh is None:
            return local(*tokens, arrays)[0]

        def spec(part: Any, info: ParamInfo) -> Any:
            found = self.weight_spec(info)
            plane: Any = Plane  # of specs here
            whole = PartitionSpec(None, *found)
            return plane(whole, PartitionSpec()) if isinstance(part, Plane) else found

        specs = {
            name: jax.tree.map(
                spec, array, parts_info(array, info_of(weights[name])), is_leaf=is_plane
            )
            for name, array in arrays.items()
        }
        summed = self.weight_spec(info_of(weights["down"]))[1]
        rows = logical_spec(("batch", self.tokens, None))
        in_specs, out_specs = (*[rows] * len(tokens), specs), PartitionSpec(summed, *rows)
        parts = on_devices(self.mesh, local, in_specs, out_specs)(*tokens, arrays)
        return parts[0] if len(parts) == 1 else jnp.sum(parts, axis=0)

    @property
    def tokens(self) -> str | None:
        """The logical axis of the tokens that are multiplied."""
        return "tokens" if self.spread else None

    def weight_spec(self, info: ParamInfo) -> PartitionSpec:
        """How the weights of this shape are divided."""
        return logical_spec(info.axes)


PLAIN = Products(None)


class Embedding(nnx.Module):
    """A `[V, D]` table: token embedding, or output head."""

    def __init__(self, config: ModelConfig):
        self.table = param((config.vocab_size, config.model_dim), ("vocab", "embed"))


class Attention(nnx.Module):
    """The projections around `attend`; no rotary embedding here.

    With `joined` the weights of queries, keys and values are one array [D, K, G + 2, H]: for each
    kv head its G query heads, its key and its value. So one matmul projects all three.
    """

    def __init__(self, config: ModelConfig, joined: bool = False):
        d, n, k, h = config.model_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.joined = joined
        if joined:
            self.qkv = param((d, k, n // k + 2, h), ("embed", "kv_heads", None, "head_dim"))
        else:
            self.q = param((d, n, h), ("embed", "heads", "head_dim"))
            self.k = param((d, k, h), ("embed", "kv_heads", "head_dim"))
            self.v = param((d, k, h), ("embed", "kv_heads", "head_dim"))
        self.o = param((n, h, d), ("heads", "head_dim", "embed"))
        if config.qkv_bias:
            self.q_bias = param((n, h), ("heads", None))
            self.k_bias = param((k, h), ("kv_heads", None))
            self.v_bias = param((k, h), ("kv_heads", None))
        if config.o_bias:
            self.o_bias = param((d,), ("embed",))
        if config.sinks:
            self.sinks = param((n,), ("heads",))
        if config.qk_norm:
            over_heads = config.traits.qk_norm == "heads"
            shapes = ((n, h), (k, h)) if over_heads else ((h,), (h,))
            axes = (("heads", None), ("kv_heads", None)) if over_heads else ((None,), (None,))
            self.q_norm, self.k_norm = (
                Norm(config, shape, named) for shape, named in zip(shapes, axes, strict=True)
            )
        self.config = config

    def project(
        self, norm: Norm | None, x_BTD: Array, products: Products
    ) -> tuple[Array, Array, Array]:
        """q_BTNH, k_BTKH, v_BTKH of the normed x, before rotary embedding."""
        if self.joined:
            new_BTKXH = products.normed(norm, x_BTD, self.qkv)
            new_BTKXH = products.placed(new_BTKXH, "batch", None, "kv_heads", None, "head_dim")
            new_BTKXH = products.placed(new_BTKXH, "batch", "tokens", "kv_heads", None, None)
            q_BTKGH, k_BTKH, v_BTKH = new_BTKXH[..., :-2, :], *jnp.moveaxis(new_BTKXH, 3, 0)[-2:]
            q_BTNH = q_BTKGH.reshape(*q_BTKGH.shape[:2], -1, q_BTKGH.shape[-1])
        else:
            normed_BTD = products.entering(norm, x_BTD)
            q_BTNH, k_BTKH, v_BTKH = (
                products.placed(
                    products.placed(products.of(normed_BTD, w), "batch", None, heads, "head_dim"),
                    *("batch", "tokens", heads, None),
                )
                for w, heads in (
                    (self.q, "heads"),
                    (self.k, "kv_heads"),
                    (self.v, "kv_heads"),
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
        product = products.placed(products.of(out_BTNH, self.o, 2), "batch", "tokens", None)
        return product + self.o_bias[...] if self.config.o_bias else product


class MLP(nnx.Module):
    """A gated MLP: SwiGLU with the activation silu, GeGLU with gelu.

    With `joined` the weights of gate and up are one array [D, 2, F].
    """

    def __init__(self, config: ModelConfig, joined: bool = False):
        d, f = config.model_dim, config.mlp_dim
        self.joined = joined
        if joined:
            self.gate_up = param((d, 2, f), ("embed", None, "mlp"))
        else:
            self.gate = param((d, f), ("embed", "mlp"))
            self.up = param((d, f), ("embed", "mlp"))
        self.down = param((f, d), ("mlp", "embed"))
        self.bias, self.activation = config.mlp_bias, config.traits.activation
        if self.bias:
            self.gate_bias = param((f,), ("mlp",))
            self.up_bias = param((f,), ("mlp",))
            self.down_bias = param((d,), ("embed",))

    def __call__(self, norm: Norm | None, x_BTD: Array, products: Products) -> Array:
        """What is added to the hidden states, [B,T,D]: the output for the normed x."""
        if self.joined:
            both_BTCF = products.normed(norm, x_BTD, self.gate_up)
            gate_BTF, up_BTF = both_BTCF[:, :, 0], both_BTCF[:, :, 1]
        else:
            normed_BTD = products.entering(norm, x_BTD)
            gate_BTF = products.of(normed_BTD, self.gate)
            up_BTF = products.of(normed_BTD, self.up)
        if self.bias:
            gate_BTF, up_BTF = gate_BTF + self.gate_bias[...], up_BTF + self.up_bias[...]
        gated_BTF = ACTIVATIONS[self.activation](gate_BTF) * up_BTF
        gated_BTF = products.placed(gated_BTF, "batch", None, "mlp")
        product = products.placed(products.of(gated_BTF, self.down), "batch", "tokens", None)
        return product + self.down_bias[...] if self.bias else product


class ExpertMLP(nnx.Module):
    """Experts, of which each token goes through some (`models.experts`).

    With `joined` the weights of gate and up are one array [E, 2, D, F].
    """

    def __init__(self, config: ModelConfig, joined: bool = False):
        assert config.experts is not None
        d, f, e = config.model_dim, config.mlp_dim, config.experts.count
        self.router = param((d, e), ("embed", "experts"))
        if joined:
            self.gate_up = param((e, 2, d, f), ("experts", None, "embed", "mlp"))
        else:
            self.gate = param((e, d, f), ("experts", "embed", "mlp"))
            self.up = param((e, d, f), ("experts", "embed", "mlp"))
        self.down = param((e, f, d), ("experts", "mlp", "embed"))
        self.names = ("gate_up", "down") if joined else ("gate", "up", "down")
        if config.mlp_bias:
            self.router_bias = param((e,), ("experts",))
            self.gate_bias = param((e, f), ("experts", "mlp"))
            self.up_bias = param((e, f), ("experts", "mlp"))
            self.down_bias = param((e, d), ("experts", "embed"))
            self.names = (*self.names, "gate_bias", "up_bias")
        self.bias, self.activation = config.mlp_bias, config.traits.activation
        self.mixture = config.experts

    def __call__(self, norm: Norm | None, x_BTD: Array, products: Products) -> Array:
        """What is added to the hidden states, [B,T,D]: the output for the normed x."""
        normed_BTD = products.entering(norm, x_BTD)
        logits_BTE = products.of(normed_BTD, self.router)
        if self.bias:
            logits_BTE = logits_BTE + self.router_bias[...]
        choice = experts.choose(self.mixture, logits_BTE)
        run = functools.partial(experts.through_experts, self._gated)
        weights = {name: getattr(self, name) for name in self.names}
        out_BTD = products.by_device(run, (normed_BTD, *choice), weights)
        if self.bias:
            shares_BTE = experts.shares(self.mixture, *choice).astype(x_BTD.dtype)
            out_BTD = out_BTD + jnp.tensordot(shares_BTE, self.down_bias[...], 1)
        return products.placed(out_BTD, "batch", "tokens", None)

    def _gated(self, gate: Array, up: Array) -> Array:
        if self.mixture.limit is not None:
            return experts.clamped_swiglu(self.mixture, gate, up)
        return ACTIVATIONS[self.activation](gate) * up


class Layer(nnx.Module):
    """Attention and MLP, each with a residual connection, and their norms (`Family.norms`)."""

    def __init__(self, config: ModelConfig, joined: bool = False):
        def norm(name: str) -> Norm | None:
            return model_norm(config) if name in NORM_PLACES[config.traits.norms] else None

        self.attn_norm, self.attn_out_norm = norm("attn_norm"), norm("attn_out_norm")
        self.attn = Attention(config, joined)
        self.mlp_norm, self.mlp_out_norm = norm("mlp_norm"), norm("mlp_out_norm")
        self.mlp = (MLP if config.experts is None else ExpertMLP)(config, joined)
        self.shared, self.residual = config.traits.norms == "shared", config.residual_multiplier

    def __call__(
        self,
        x_BTD: Array,
        cache: Any,
        attend: Attend,
        products: Products = PLAIN,
    ) -> tuple[Array, Any]:
        with jax.named_scope("attention"):
            q, k, v = self.attn.project(self.attn_norm, x_BTD, products)
            sinks = (self.attn.sinks[...],) if self.attn.config.sinks else ()
            out_BTNH, cache = attend(q, k, v, cache, *sinks)
            out_BTD = self.attn.output(out_BTNH, products)
            added_BTD = x_BTD + self._added(self.attn_out_norm, out_BTD)
        with jax.named_scope("mlp"):
            fed = (self.attn_norm, x_BTD) if self.shared else (self.mlp_norm, added_BTD)
            out_BTD = self.mlp(*fed, products)
            return added_BTD + self._added(self.mlp_out_norm, out_BTD), cache

    def _added(self, norm: Norm | None, out: Array) -> Array:
        """What attention or MLP adds to the hidden states, of its output."""
        normed = out if norm is None else norm(out)
        if self.residual is None:
            return normed
        # The multiplier itself is not rounded to the type of the hidden states.
        return (normed.astype(jnp.float32) * self.residual).astype(normed.dtype)


def model_norm(config: ModelConfig) -> Norm:
    """A norm of hidden states."""
    return Norm(config, (config.model_dim,), (None,))


class Llama(nnx.Module):
    """The decoder."""

    def __init__(self, config: ModelConfig, layers: int | None = None):
        self.config = config
        self.embed = Embedding(config)
        count = config.num_layers if layers is None else layers
        self.layers = nnx.List([Layer(config) for _ in range(count)])
        self.final_norm = model_norm(config)
        if not config.tie_embeddings:
            self.head = Embedding(config)

    def embedded(
        self, tokens: Int[Array, "B T"], rows_of: Callable[[Array, Array], Array] = operator.getitem
    ) -> Float[Array, "B T D"]:
        """What the first layer is given; `rows_of(table, tokens)` are rows of the table."""
        with jax.named_scope("embed"):
            x_BTD = rows_of(self.embed.table[...], tokens)
            scale = self.config.embed_scale
            return x_BTD if scale is None else x_BTD * scale

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
            logits = jnp.einsum("...D,VD->...V", x, table_VD, preferred_element_type=jnp.float32)
            divisor, times = self.config.logits_divisor, self.config.logits_multiplier
            cap = self.config.logits_cap
            logits = logits if divisor is None else logits / divisor
            logits = logits if times is None else logits * times
            return logits if cap is None else cap * jnp.tanh(logits / cap)


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
    infos = {path: info_of(leaf) for path, leaf in nnx.to_flat_state(split[1])}

    def gathered(array: Any, info: ParamInfo) -> Any:
        return jax.lax.with_sharding_constraint(array, logical_sharding(mesh, info.axes))

    placed = {}
    for path, array in traverse_util.flatten_dict(params).items():
        placed[path] = jax.tree.map(gathered, part_of(array), parts_info(array, infos[path]))
    return traverse_util.unflatten_dict(placed)


def parts_info(array: Any, info: ParamInfo) -> Any:
    """Of the parts of a parameter in this form, each its `ParamInfo`."""
    if isinstance(array, QuantisedMatrix):
        return QuantisedMatrix(info, info.of_scales, array.dtype)
    return info


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
