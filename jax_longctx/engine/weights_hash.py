"""Hashes of an engine's weights, the same on every mesh and in either form of `params`."""

import functools
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jax_longctx.engine.distributed import to_host
from jax_longctx.engine.setup import without_layers
from jax_longctx.models.params import layer_params


def hash_of_weights(params: Any, layers: int, of: Callable[[Array], Array]) -> str:
    """A hash of `of(parameter)` for every parameter of a model with `layers` layers."""
    stacks = {"layers": params["layers"]}
    apart = "0" in params["layers"]
    found = {
        str(index): _of_each(of, layer_params(stacks, index))
        if apart
        else _of_layer(of, stacks, index)
        for index in range(layers)
    }
    first = {**_of_each(of, without_layers(params)), "layers": found}
    values = np.concatenate(jax.tree.leaves(jax.tree.map(to_host, first)))
    return hashlib.sha256(values.tobytes()).hexdigest()[:16]


def first_values(x: Array) -> Array:
    return x[(0,) * (x.ndim - 1)][:16].astype(jnp.float32)


def identity_of(params: Any) -> str:
    """Tells one model from another by what is outside its layers, in any dtype or form of weights.

    In bfloat16: of a checkpoint in bfloat16 that is what float32 holds too.
    """
    values = jax.tree.leaves(jax.tree.map(to_host, _of_each(_corner, without_layers(params))))
    return hashlib.sha256(np.concatenate(values).tobytes()).hexdigest()[:16]


def _corner(x: Array) -> Array:
    return x[(slice(64),) * x.ndim].astype(jnp.bfloat16).astype(jnp.float32).ravel()


def sum_of_bits(x: Array) -> Array:
    """[1], the sum of a hash of each value's bits and place; its order does not matter."""
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
    place = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        place = place * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    bits = jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32)
    # Steps of MurmurHash3's finalizer.
    mixed = bits ^ (place * jnp.uint32(0x9E3779B1))
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), dtype=jnp.uint32)[None]


# One program for a layer and one for the ends: of arrays one by one it would be many.
@functools.partial(jax.jit, static_argnums=0)
def _of_each(of: Callable[[Array], Array], tree: Any) -> Any:
    return jax.tree.map(of, tree)


@functools.partial(jax.jit, static_argnums=0)
def _of_layer(of: Callable[[Array], Array], stacks: Any, index: Any) -> Any:
    return jax.tree.map(of, layer_params(stacks, index))
