"""A text through the model without caches, layers optionally computed again for the gradient."""

import functools
from typing import Any, Literal, get_args

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import Attend, Layer, Llama, abstract_model

__all__ = ["REMATS", "Remat", "hidden_states", "model_of"]

# What a layer keeps for its gradient: all it computes; its matmuls' results; its input alone.
Remat = Literal["none", "dots", "full"]
REMATS: tuple[str, ...] = get_args(Remat)


class Rematerialised(nnx.Module):
    """A layer of the model whose forward pass is run again for its gradient."""

    def __init__(self, layer: Layer, remat: Remat):
        self.layer, self.remat = layer, remat

    def __call__(self, x_BTD: Array, index: int, cache: None, attend: Attend) -> tuple[Array, None]:
        graph, state = nnx.split(self.layer)

        def run(state: Any, x_BTD: Array) -> Array:
            return nnx.merge(graph, state)(x_BTD, index, cache, attend)[0]

        kept = jax.checkpoint_policies.dots_with_no_batch_dims_saveable
        policy = kept if self.remat == "dots" else None
        return jax.checkpoint(run, policy=policy)(state, x_BTD), cache


@functools.lru_cache(maxsize=16)
def _abstract(config: ModelConfig) -> tuple[Any, Any]:
    return abstract_model(config)


def model_of(config: ModelConfig, params: Any) -> Llama:
    """The module over a nested dict of parameters."""
    graph, abstract = _abstract(config)
    state = jax.tree.map(lambda leaf: leaf, abstract)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def hidden_states(
    model: Llama, tokens: Int[Array, "B T"], attend: Attend, remat: Remat = "none"
) -> Float[Array, "B T D"]:
    """Final normed hidden states of texts that begin at position 0."""
    if remat != "none":
        layers: Any = nnx.List([Rematerialised(layer, remat) for layer in model.layers])
        model.layers = layers
    return model.hidden(tokens, (None,) * len(model.layers), attend)[0]
