"""Caches of runs of layers, and one layer's part of them.

A run is layers that are alike: consecutive ones, or those of one kind where several kinds take
turns. Its caches are one `Stacked` cache, of arrays with a leading axis for the layers. Any other
layer has a cache of its own.
"""

import functools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Int

from jax_longctx.caches import Offloaded
from jax_longctx.engine.compiling import IN_PLACE, program
from jax_longctx.engine.setup import Setup
from jax_longctx.sharding import Stacked, leaf_fields, numbers_of_layers, tree_shardings
from pallas_kernels.plane import Plane, put


def places_of_layers(caches: Sequence[Any]) -> list[tuple[int, int]]:
    """Of each of the model's layers: which of the caches has its own, and where in that run."""
    found = {
        layer: (run, index)
        for run, layers in enumerate(numbers_of_layers(caches))
        for index, layer in enumerate(layers)
    }
    return [found[layer] for layer in range(len(found))]


def each_layer(caches: tuple[Any, ...]) -> Iterator[Any]:
    """One layer's cache after another; a run's layers are copied out of it, one at a time."""
    for run, index in places_of_layers(caches):
        cache = caches[run]
        if isinstance(cache, Stacked):
            cache = jax.tree.map(operator.itemgetter(index), cache.cache)
        yield cache


def per_layer(caches: tuple[Any, ...]) -> tuple[Any, ...]:
    """A cache for each layer: `each_layer`, all at once."""
    return tuple(each_layer(caches))


@program()
def copied_layer(run: Any, layer: Int[Any, ""]) -> Any:
    """A layer's cache in arrays of its own on the devices; `layer` counts within the run."""

    def copied(node: Any) -> Any:
        if isinstance(node, Offloaded):
            return (_planes(node, layer) if isinstance(run, Stacked) else node).on_device()
        return of_layer(node, layer) if isinstance(run, Stacked) else jnp.copy(node)

    cache = run.cache if isinstance(run, Stacked) else run
    return jax.tree.map(copied, cache, is_leaf=_is_offloaded)


@program(donate_argnums=0, **IN_PLACE)
def with_layer(run: Any, layer: Int[Any, ""], cache: Any) -> Any:
    """`copied_layer` undone, at the end of a context: the run with another cache of a layer."""

    def put(old: Any, new: Any) -> Any:
        if not isinstance(run, Stacked):
            return old.filled(new) if isinstance(old, Offloaded) else new
        if not isinstance(old, Offloaded):
            return jax.lax.dynamic_update_index_in_dim(old, new, layer, 0)
        return _with_planes(old, _planes(old, layer).filled(new), layer)

    before = run.cache if isinstance(run, Stacked) else run
    after = jax.tree.map(put, before, cache, is_leaf=_is_offloaded)
    return run.over(after) if isinstance(run, Stacked) else after


def _is_offloaded(node: Any) -> bool:
    return isinstance(node, Offloaded)


def _planes(stacks: Any, layer: Any) -> Any:
    """A layer's part of every stack; a `Plane` where the stack is `in_place`."""
    leaves, structure = jax.tree.flatten(stacks)
    return structure.unflatten(
        Plane(leaf, layer) if field.in_place else of_layer(leaf, layer)
        for leaf, field in zip(leaves, leaf_fields(stacks), strict=True)
    )


def _with_planes(stacks: Any, parts: Any, layer: Any) -> Any:
    """`_planes` undone."""
    return jax.tree.map(lambda whole, part: put(whole, layer, part), stacks, parts)


def seated_store(old: Offloaded, new: Offloaded, row: Any, place: Any) -> Offloaded:
    """A store, or a run's stores, with row `row` of another one copied to `place`."""
    if old.base.ndim == 1:
        return old.seated(new, row, place)

    def layer(index: Any, stores: Any) -> Any:
        parts = _planes(stores, index).seated(_planes(new, index), row, place)
        return _with_planes(stores, parts, index)

    return jax.lax.fori_loop(0, len(old.base), layer, old)


def as_run(setup: Setup, caches: tuple[Any, ...], like: tuple[Any, ...]) -> tuple[Any, ...]:
    """`per_layer` undone: caches in runs as `like` has them (shapes will do), on its shards."""
    found = []
    for layers, run in zip(numbers_of_layers(like), like, strict=True):
        alike = [caches[layer] for layer in layers]
        if isinstance(run, Stacked):
            shardings, structure = jax.tree.flatten(tree_shardings(setup.mesh, run))
            found.append(_stacker(structure, tuple(shardings), run.step)(*alike))
        else:
            found.append(alike[0])
    return tuple(found)


@functools.lru_cache(maxsize=64)
def _stacker(structure: Any, shardings: tuple[Any, ...], step: int) -> Any:
    """Makes a run of its layers' caches; a function a kind of cache, so that it compiles once."""
    return jax.jit(
        lambda *each: Stacked(jax.tree.map(lambda *x: jnp.stack(x), *each), len(each), step),
        out_shardings=structure.unflatten(shardings),
    )


def of_layer(stacks: Any, layer: Any) -> Any:
    """A layer's part of every stack."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, layer, keepdims=False), stacks)
