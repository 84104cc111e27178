"""Empty caches, on the devices and in the host's memory."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jax_longctx.contract import CacheShape
from jax_longctx.engine.compiling import Program, is_listing, limit_mappings
from jax_longctx.engine.setup import Setup
from jax_longctx.sharding import HOST, Stacked, tree_shardings

# Most kinds of layers that take turns in one loop, which compiles a layer of each.
MOST_KINDS = 8


def empty_like(setup: Setup, shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Zeros of these caches' shapes on their shards."""
    leaves = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes))
    return made_on_shards(setup, shapes, _zeros, (leaves,))


def _zeros(leaves: tuple[tuple[Any, Any], ...]) -> list[Any]:
    return [jnp.zeros(*leaf) for leaf in leaves]


def made_on_shards(setup: Setup, shapes: Any, make: Any, static: Any, *args: Any) -> Any:
    """Caches of these shapes, each array on its shards; zeros in the host's memory.

    `make(*static, *args)` returns the arrays, as part of a program.
    """
    leaves, structure = jax.tree.flatten(shapes)
    places = tuple(jax.tree.leaves(tree_shardings(setup.mesh, shapes)))
    made = iter(_maker(make, places, len(static))(*static, *args))
    return structure.unflatten(
        host_zeros(leaf, at) if at.memory_kind == HOST else next(made)
        for leaf, at in zip(leaves, places, strict=True)
    )


@functools.lru_cache(maxsize=64)
def _maker(make: Any, places: tuple[NamedSharding, ...], static: int) -> Program:
    here = [at.memory_kind != HOST for at in places]
    kept = [*itertools.compress(places, here)]

    @functools.wraps(make)
    def made(*args: Any) -> list[Any]:
        return [*itertools.compress(make(*args), here)]

    how = {"static": range(static), "out_shardings": kept}
    return Program(made, places=lambda *_: kept, **how)


def cache_shapes(setup: Setup, batch: int, slots: int, reserve: int) -> list[CacheShape]:
    """What each layer's `init_cache` is asked for."""
    config = setup.config
    return [
        CacheShape(
            batch=batch,
            slots=slots,
            chunk=setup.chunk,
            reserve=reserve,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=setup.dtype,
            kv=setup.kv,
            window=window,
            shards=setup.mesh.shape["seq"],
            offload=setup.offload,
        )
        for window in config.windows
    ]


def empty_caches(setup: Setup, batch: int, slots: int, reserve: int) -> tuple[Any, ...]:
    """The empty caches, unsharded; call it under `jax.eval_shape`.

    One a layer with `Setup.by_layer`, else one for each run of layers that are alike: consecutive
    ones, or those of a kind where several kinds take turns.
    """
    shapes = cache_shapes(setup, batch, slots, reserve)
    kinds = [(setup.layer(layer), shape) for layer, shape in enumerate(shapes)]
    if setup.by_layer:
        return tuple(layer.method.init_cache(shape) for layer, shape in kinds)
    caches, first = [], 0
    while first < len(kinds):
        step, count = _turns(kinds[first:])
        for layer, shape in kinds[first : first + step]:
            cache = layer.method.init_cache(shape)
            if count > 1:
                stacks = jax.tree.map(lambda x, n=count: jnp.broadcast_to(x, (n, *x.shape)), cache)
                cache = Stacked(stacks, count, step)
            caches.append(cache)
        first += step * count
    return tuple(caches)


def _turns(kinds: list[Any]) -> tuple[int, int]:
    """How many kinds of layers take turns from the first layer on, and how many turns they take.

    A run of one kind is a kind that takes turns alone.
    """
    best = 1, 1
    for step in range(1, min(MOST_KINDS, len(kinds) // 2) + 1):
        alike = [a == b for a, b in zip(kinds, kinds[step:], strict=False)]
        count = 1 + [*alike, False].index(False) // step
        if count > 1 and step * count > best[0] * best[1]:
            best = step, count
    return best


@functools.lru_cache(maxsize=256)
def abstract_caches(setup: Setup, batch: int, slots: int, reserve: int) -> tuple[Any, ...]:
    """Shapes and dtypes of every layer's empty cache."""
    return jax.eval_shape(functools.partial(empty_caches, setup, batch, slots, reserve))


def init_caches(setup: Setup, batch: int, slots: int, reserve: int) -> tuple[Any, ...]:
    """Every layer's empty cache, made on its shards."""
    # New caches mean new shapes, and so new programs.
    limit_mappings()
    shapes = abstract_caches(setup, batch, slots, reserve)
    return made_on_shards(setup, shapes, _cache_arrays, (setup, batch, slots, reserve))


def _cache_arrays(setup: Setup, batch: int, slots: int, reserve: int) -> list[Any]:
    return jax.tree.leaves(empty_caches(setup, batch, slots, reserve))


def host_zeros(leaf: Any, sharding: NamedSharding) -> Any:
    """Zeros in the host's memory, which no device has held."""
    if is_listing():
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    def part(index: Any) -> np.ndarray:
        return np.zeros(sharding.shard_shape(leaf.shape), leaf.dtype)

    global _most_pinned
    made = jax.make_array_from_callback(leaf.shape, sharding, part)
    _most_pinned = max(_most_pinned, pinned_bytes())
    return made


def held_bytes(caches: Any) -> tuple[int, int]:
    """Bytes that caches hold over all devices, and in the hosts' memory."""
    found = {True: 0, False: 0}
    for leaf in jax.tree.leaves(caches):
        found[leaf.sharding.memory_kind == HOST] += leaf.nbytes
    return found[False], found[True]


def pinned_bytes() -> int:
    """Bytes that this process's arrays hold in the host's memory."""
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == HOST)


def most_pinned() -> int:
    """The most bytes that this process's arrays held in the host's memory at once."""
    return _most_pinned


_most_pinned = 0
