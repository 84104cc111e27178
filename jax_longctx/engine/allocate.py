"""Empty caches, on the devices and in the host's memory."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from jax_longctx.contract import CacheShape
from jax_longctx.engine.compiling import limit_mappings
from jax_longctx.engine.setup import Setup
from jax_longctx.sharding import HOST, Stacked, tree_shardings


def empty_like(setup: Setup, shapes: tuple[Any, ...]) -> tuple[Any, ...]:
    """Zeros of these caches' shapes on their shards."""

    def made(leaf: Any, at: NamedSharding) -> jax.Array:
        if at.memory_kind == HOST:
            return host_zeros(leaf, at)
        return jnp.zeros(leaf.shape, leaf.dtype, device=at)

    return jax.tree.map(made, shapes, tree_shardings(setup.mesh, shapes))


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
            layer=layer,
            num_layers=config.num_layers,
            window=config.windows[layer],
            shards=setup.mesh.shape["seq"],
            offload=setup.offload,
        )
        for layer in range(config.num_layers)
    ]


def empty_caches(setup: Setup, batch: int, slots: int, reserve: int) -> tuple[Any, ...]:
    """The empty caches, unsharded; call it under `jax.eval_shape` or `init_caches`.

    One a layer with `Setup.by_layer`, else one for each run of consecutive layers that are alike.
    """
    shapes = cache_shapes(setup, batch, slots, reserve)
    if setup.by_layer:
        return tuple(map(setup.method.init_cache, shapes))
    caches = []
    for _, run in itertools.groupby(shapes, functools.partial(_likeness, setup)):
        alike = list(run)
        cache = setup.method.init_cache(alike[0])
        if len(alike) > 1:
            count = len(alike)
            cache = Stacked(
                jax.tree.map(lambda leaf, n=count: jnp.broadcast_to(leaf, (n, *leaf.shape)), cache),
                count,
            )
        caches.append(cache)
    return tuple(caches)


def _likeness(setup: Setup, shape: CacheShape) -> Any:
    """Equal for layers whose caches begin alike and that see alike."""
    made = jax.make_jaxpr(setup.method.init_cache, static_argnums=0, return_shape=True)
    jaxpr, cache = made(shape)
    consts = tuple(np.asarray(const).tobytes() for const in jaxpr.consts)
    return shape.window, jax.tree.structure(cache), str(jaxpr), consts


@functools.lru_cache(maxsize=256)
def abstract_caches(setup: Setup, batch: int, slots: int, reserve: int) -> tuple[Any, ...]:
    """Shapes and dtypes of every layer's empty cache."""
    return jax.eval_shape(functools.partial(empty_caches, setup, batch, slots, reserve))


@functools.lru_cache(maxsize=64)
def _cache_maker(setup: Setup, batch: int, slots: int, reserve: int) -> Any:
    """Makes the arrays of the empty caches that lie on the devices."""
    # Kept: tracing it anew cost a tenth of a second at each prefill of 32 layers.
    shapes = abstract_caches(setup, batch, slots, reserve)
    shardings = jax.tree.leaves(tree_shardings(setup.mesh, shapes))

    def make() -> list[Any]:
        arrays = jax.tree.leaves(empty_caches(setup, batch, slots, reserve))
        return [x for x, at in zip(arrays, shardings, strict=True) if at.memory_kind != HOST]

    return jax.jit(make, out_shardings=[at for at in shardings if at.memory_kind != HOST])


def init_caches(setup: Setup, batch: int, slots: int, reserve: int) -> tuple[Any, ...]:
    """Every layer's empty cache, made on its shards."""
    # New caches mean new shapes, and so new programs.
    limit_mappings()
    made = iter(_cache_maker(setup, batch, slots, reserve)())
    shapes = abstract_caches(setup, batch, slots, reserve)
    return jax.tree.map(
        lambda leaf, at: host_zeros(leaf, at) if at.memory_kind == HOST else next(made),
        shapes,
        tree_shardings(setup.mesh, shapes),
    )


def host_zeros(leaf: Any, sharding: NamedSharding) -> jax.Array:
    """Zeros in the host's memory, which no device has held."""

    def part(index: Any) -> np.ndarray:
        return np.zeros(sharding.shard_shape(leaf.shape), leaf.dtype)

    global _most_pinned
    made = jax.make_array_from_callback(leaf.shape, sharding, part)
    _most_pinned = max(_most_pinned, pinned_bytes())
    return made


def pinned_bytes() -> int:
    """Bytes that this process's arrays hold in the host's memory."""
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind == HOST)


def most_pinned() -> int:
    """The most bytes that this process's arrays held in the host's memory at once."""
    return _most_pinned


_most_pinned = 0
