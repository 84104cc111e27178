"""One pass of the model over a segment: every layer's projections, and the method's `attend`.

`attend` runs inside one manual `shard_map` over the whole mesh; projections, MLP and head are left
to the compiler through shardings.

A pass is made of pieces that are jitted on their own. Within another jitted function they become a
part of its one program, in which XLA compiles a layer as often as the model has layers, though
they are traced and lowered once. Called from Python (`Setup.by_layer`) they are programs of their
own: one for all layers that are alike, and a dispatch for each of them.
"""

import dataclasses
import functools
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_longctx.contract import LayerContext, Method, Segment
from jax_longctx.engine.donation import in_place
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import Layer, Llama, abstract_model
from jax_longctx.sharding import AnyMesh, logical_sharding, logical_spec, tree_specs

__all__ = ["BATCH", "Setup", "hidden_states", "model_of"]

BATCH = logical_spec(("batch",))


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything static: what the programs are compiled for.

    Attributes:
      by_layer: whether the host calls a program a layer, in place of one of all layers. It is
        compiled in about as many times less as there are layers; a pass takes a dispatch a layer
        longer, and a decode step waits for the host.
    """

    config: ModelConfig
    method: Method
    mesh: AnyMesh
    dtype: Any
    chunk: int
    by_layer: bool = False

    def layer_context(self, window: int | None, total: Array) -> LayerContext:
        return LayerContext(
            scale=self.config.softmax_scale,
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


def hidden_states(
    setup: Setup, params: Any, caches: tuple[Any, ...], segment: Segment, total: Int[Array, " B"]
) -> tuple[Float[Array, "B T D"], tuple[Any, ...]]:
    """Final normed hidden states of the segment's columns, and the updated caches.

    Outside of jit the caches are donated.
    """
    x_BTD = _embedded(setup, params, segment.tokens, segment.token_axis)
    updated = []
    for layer, cache in enumerate(caches):
        with jax.named_scope(f"layer_{layer}"):
            x_BTD, cache = _through_layer(
                setup,
                setup.config.windows[layer],
                params["layers"][str(layer)],
                x_BTD,
                cache,
                segment,
                total,
            )
        updated.append(cache)
    return _normed(setup, params, x_BTD), tuple(updated)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _embedded(
    setup: Setup, params: Any, tokens: Int[Any, "B T"], axis: str | None
) -> Float[Array, "B T D"]:
    # Where the tokens lie, the projections and the MLP are computed.
    tokens = jax.lax.with_sharding_constraint(tokens, logical_sharding(setup.mesh, ("batch", axis)))
    return model_of(setup.config, params).embedded(tokens)


@functools.partial(in_place, static_argnums=(0, 1), donate_argnums=(3, 4))
def _through_layer(
    setup: Setup,
    window: int | None,
    params: Any,
    x: Float[Array, "B T D"],
    cache: Any,
    segment: Segment,
    total: Int[Array, " B"],
) -> tuple[Float[Array, "B T D"], Any]:
    def attend(layer: int, q: Array, k: Array, v: Array, cache: Any) -> tuple[Array, Any]:
        return _attended(setup, window, q, k, v, cache, segment, total)

    layer = _module(*_abstract_layer(setup.config), params)
    return layer(x, 0, cache, attend)


def _attended(
    setup: Setup,
    window: int | None,
    q: Array,
    k: Array,
    v: Array,
    cache: Any,
    segment: Segment,
    total: Array,
) -> tuple[Array, Any]:
    """The method's `attend` inside the manual `shard_map`."""

    def local(q: Array, k: Array, v: Array, cache: Any, segment: Segment, total: Array) -> Any:
        ctx = setup.layer_context(window, total)
        (out, _), cache = setup.method.attend((q, k, v), cache, segment, ctx)
        return out, cache

    cache_specs = tree_specs(cache)
    heads = logical_spec(("batch", segment.token_axis, "heads", None))
    kv_heads = logical_spec(("batch", segment.token_axis, "kv_heads", None))
    in_specs = (heads, kv_heads, kv_heads, cache_specs, tree_specs(segment), BATCH)
    run = setup.shard_map(local, in_specs, (heads, cache_specs))
    return run(q, k, v, cache, segment, total)


@functools.partial(jax.jit, static_argnums=0)
def _normed(setup: Setup, params: Any, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    return model_of(setup.config, params).final_norm(x)


@functools.lru_cache(maxsize=16)
def _abstract(config: ModelConfig) -> tuple[Any, Any]:
    return abstract_model(config)


@functools.lru_cache(maxsize=16)
def _abstract_layer(config: ModelConfig) -> tuple[Any, Any]:
    return nnx.split(nnx.eval_shape(lambda: Layer(config)))


def model_of(config: ModelConfig, params: Any) -> Llama:
    """The module over a nested dict of parameters."""
    return _module(*_abstract(config), params)


def _module(graph: Any, abstract: Any, params: Any) -> Any:
    state = jax.tree.map(lambda leaf: leaf, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)
