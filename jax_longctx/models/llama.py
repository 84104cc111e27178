"""The decoder of the Llama family: Llama 2/3/3.1/3.2, Mistral, Qwen2/2.5, Qwen3, InternLM2.

One pre-norm decoder, configured by `ModelConfig`. Its only unusual trait: queries, keys and
values leave the layer *before* rotary embedding, through the `attend` function the caller gives.
Whoever attends decides what is cached and at which position each key is seen, so every
long-context method runs on this one model.

Arrays carry the letters of the glossary: B batch, T tokens of the segment, N query heads, K kv
heads, H head dim, D model, F ffn, V vocabulary.

The layers are unrolled, not scanned: each layer's cache stays a separate buffer that is updated
in place and that a kernel reads without slicing it out of a stack, and layers may differ (a
sliding window on some, a budget a layer).
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx, traverse_util
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jax_longctx.models.config import ModelConfig
from jax_longctx.sharding import AnyMesh, check_divisible, logical_sharding

# (layer index, q_BTNH, k_BTKH, v_BTKH, that layer's cache) -> (out_BTNH, cache)
Attend = Callable[[int, Array, Array, Array, Any], tuple[Array, Any]]


def rms_norm(x: Float[Array, "... D"], scale: Float[Array, " D"], eps: float) -> Array:
    """Root-mean-square norm in float32; the scale multiplies after the cast back, as in HF."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return scale * normed.astype(x.dtype)


# What families choose from (`jax_longctx.models.config`).
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"silu": jax.nn.silu}
NORMS: dict[str, Callable[[Array, Array, float], Array]] = {"rms": rms_norm}


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """Shape and logical axes (see `jax_longctx.sharding.RULES`) of one parameter."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]

    @property
    def inputs(self) -> tuple[int, ...]:
        """The axes that a matrix contracts; none of a bias or a scale."""
        first, count = self.axes[0], len(self.axes)
        if first == "vocab":
            return (1,)
        if first == "heads" and count == 3:
            return (0, 1)
        return (0,) if first in ("embed", "mlp") and count > 1 else ()


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


class Embedding(nnx.Module):
    """A `[V, D]` table: token embedding, or output head."""

    def __init__(self, config: ModelConfig):
        self.table = _param((config.vocab_size, config.model_dim), ("vocab", "embed"))


class Attention(nnx.Module):
    """The projections around `attend`; no rotary embedding here."""

    def __init__(self, config: ModelConfig):
        d, n, k, h = config.model_dim, config.num_heads, config.num_kv_heads, config.head_dim
        self.q = _param((d, n, h), ("embed", "heads", "head_dim"))
        self.k = _param((d, k, h), ("embed", "kv_heads", "head_dim"))
        self.v = _param((d, k, h), ("embed", "kv_heads", "head_dim"))
        self.o = _param((n, h, d), ("heads", "head_dim", "embed"))
        if config.qkv_bias:
            self.q_bias = _param((n, h), ("heads", "head_dim"))
            self.k_bias = _param((k, h), ("kv_heads", "head_dim"))
            self.v_bias = _param((k, h), ("kv_heads", "head_dim"))
        if config.o_bias:
            self.o_bias = _param((d,), ("embed",))
        if config.qk_norm:
            self.q_norm = Norm(h, config)
            self.k_norm = Norm(h, config)
        self.config = config

    def project(self, x_BTD: Array) -> tuple[Array, Array, Array]:
        """q_BTNH, k_BTKH, v_BTKH, before rotary embedding."""
        q_BTNH = jnp.einsum("BTD,DNH->BTNH", x_BTD, self.q[...])
        k_BTKH = jnp.einsum("BTD,DKH->BTKH", x_BTD, self.k[...])
        v_BTKH = jnp.einsum("BTD,DKH->BTKH", x_BTD, self.v[...])
        if self.config.qkv_bias:
            q_BTNH = q_BTNH + self.q_bias[...]
            k_BTKH = k_BTKH + self.k_bias[...]
            v_BTKH = v_BTKH + self.v_bias[...]
        if self.config.qk_norm:
            q_BTNH, k_BTKH = self.q_norm(q_BTNH), self.k_norm(k_BTKH)
        return q_BTNH, k_BTKH, v_BTKH

    def output(self, out_BTNH: Array) -> Array:
        y_BTD = jnp.einsum("BTNH,NHD->BTD", out_BTNH, self.o[...])
        return y_BTD + self.o_bias[...] if self.config.o_bias else y_BTD


class MLP(nnx.Module):
    """A gated MLP: SwiGLU with the activation silu."""

    def __init__(self, config: ModelConfig):
        d, f = config.model_dim, config.mlp_dim
        self.gate = _param((d, f), ("embed", "mlp"))
        self.up = _param((d, f), ("embed", "mlp"))
        self.down = _param((f, d), ("mlp", "embed"))
        self.bias, self.activation = config.mlp_bias, config.traits.activation
        if self.bias:
            self.gate_bias = _param((f,), ("mlp",))
            self.up_bias = _param((f,), ("mlp",))
            self.down_bias = _param((d,), ("embed",))

    def __call__(self, x_BTD: Array) -> Array:
        gate_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, self.gate[...])
        up_BTF = jnp.einsum("BTD,DF->BTF", x_BTD, self.up[...])
        if self.bias:
            gate_BTF, up_BTF = gate_BTF + self.gate_bias[...], up_BTF + self.up_bias[...]
        activated_BTF = ACTIVATIONS[self.activation](gate_BTF)
        y_BTD = jnp.einsum("BTF,FD->BTD", activated_BTF * up_BTF, self.down[...])
        return y_BTD + self.down_bias[...] if self.bias else y_BTD


class Layer(nnx.Module):
    """Pre-norm attention and MLP, each with a residual connection."""

    def __init__(self, config: ModelConfig):
        self.attn_norm = Norm(config.model_dim, config)
        self.attn = Attention(config)
        self.mlp_norm = Norm(config.model_dim, config)
        self.mlp = MLP(config)

    def __call__(self, x_BTD: Array, index: int, cache: Any, attend: Attend) -> tuple[Array, Any]:
        with jax.named_scope("attention"):
            q, k, v = self.attn.project(self.attn_norm(x_BTD))
            out_BTNH, cache = attend(index, q, k, v, cache)
            x_BTD = x_BTD + self.attn.output(out_BTNH)
        with jax.named_scope("mlp"):
            return x_BTD + self.mlp(self.mlp_norm(x_BTD)), cache


class Llama(nnx.Module):
    """The decoder."""

    def __init__(self, config: ModelConfig):
        self.config = config
        self.embed = Embedding(config)
        self.layers = nnx.List([Layer(config) for _ in range(config.num_layers)])
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
                x_BTD, cache = layer(x_BTD, index, caches[index], attend)
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
    graph, abstract = abstract_model(config)
    state = jax.tree.map(lambda leaf: leaf, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


@functools.lru_cache(maxsize=16)
def param_infos(config: ModelConfig) -> Mapping[str, ParamInfo]:
    """Shape and logical axes of every parameter, by dot-joined path (`layers.0.attn.q`)."""
    _, state = abstract_model(config)
    return {
        ".".join(map(str, path)): ParamInfo(tuple(leaf.shape), leaf.get_metadata("axes"))
        for path, leaf in nnx.to_flat_state(state)
        if isinstance(leaf, nnx.Param)
    }


def check_mesh(config: ModelConfig, mesh: AnyMesh) -> None:
    """Raises ConfigError when the model's heads, MLP or vocabulary do not divide over the mesh."""
    check_divisible(
        mesh,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        mlp=config.mlp_dim,
        vocab=config.vocab_size,
    )


def init_params(config: ModelConfig, mesh: Mesh, *, seed: int = 0, dtype: Any = jnp.float32) -> Any:
    """Random parameters as a nested dict, made straight onto their shards.

    One small program per distinct shape, so that a large model neither compiles for long nor
    holds float32 copies of everything at once.
    """
    check_mesh(config, mesh)
    params: dict[str, Array] = {}
    for index, (path, info) in enumerate(param_infos(config).items()):
        name = path.split(".")[-1]
        kind = "one" if name == "scale" else "zero" if name.endswith("bias") else "normal"
        make = _maker(info, kind, mesh, jnp.dtype(dtype))
        params[path] = make(jax.random.key(seed + index))
    return traverse_util.unflatten_dict(params, sep=".")


# Kept, so that a second model of the same shapes compiles nothing.
@functools.lru_cache(maxsize=64)
def _maker(info: ParamInfo, kind: str, mesh: Mesh, dtype: Any) -> Callable[..., Array]:
    fan_in = math.prod(info.shape[axis] for axis in info.inputs)

    def make(key: Array) -> Array:
        if kind != "normal":
            return jnp.full(info.shape, 1 if kind == "one" else 0, dtype)
        return (jax.random.normal(key, info.shape, jnp.float32) * fan_in**-0.5).astype(dtype)

    return jax.jit(make, out_shardings=logical_sharding(mesh, info.axes))
