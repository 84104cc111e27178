"""How many slots a cache gets, what it costs, and whether that fits."""

import math
from typing import Any

import jax
from jax.sharding import Mesh

from jax_longctx.engine.distributed import least
from jax_longctx.errors import CapacityError
from jax_longctx.memory import shown_bytes
from jax_longctx.sharding import AnyMesh, leaf_axes, tree_shardings

__all__ = ["available_bytes", "bucket", "bytes_per_device", "check_fits", "grow"]

SMALLEST = 128
# Where decode reads more of the cache than of the weights, roughly, empty slots cost time.
FINER_FROM = 32768
# Shards of the slots stay multiples of this, which is what the attention kernels tile by.
GRANULE = 128
# Share of the free memory that caches may take; the rest is for activations.
USABLE = 0.9


def bucket(tokens: int, seq_shards: int = 1) -> int:
    """Slots for `tokens`: few capacities are ever compiled, and little of one is empty.

    At most a sixteenth more, then a sixty-fourth (dense decode reads the empty slots too), and
    what it takes to divide over the shards in whole granules.
    """
    fraction = 16 if tokens < FINER_FROM else 64
    step = max(SMALLEST, 2 ** math.floor(math.log2(max(tokens, 1))) // fraction)
    step = math.lcm(step, GRANULE * seq_shards)
    return -(-max(tokens, 1) // step) * step


def bytes_per_device(mesh: AnyMesh, abstract: Any) -> int:
    """Bytes that a tree of caches (shapes will do) takes on each device of the mesh."""
    arrays = jax.tree.leaves(abstract)
    shardings = jax.tree.leaves(tree_shardings(mesh, abstract))
    return sum(
        math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array, sharding in zip(arrays, shardings, strict=True)
    )


def available_bytes(mesh: Mesh) -> int | None:
    """Free memory of each device of the mesh, or None where the platform does not tell.

    Of several processes all must ask: they get the same answer, that of the fullest.
    """
    return least(_available_here(mesh))


def _available_here(mesh: Mesh) -> int | None:
    device = mesh.local_devices[0]
    if device.platform == "cpu":
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    # The devices of a CPU share its memory.
                    return int(line.split()[1]) * 1024 // len(mesh.local_devices)
        return None
    try:
        stats = device.memory_stats()
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        # Pods and plugins may not implement it.
        return None
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - stats["bytes_in_use"]


def check_fits(tokens: int, need: int, per_token: float, available: int | None) -> None:
    """Refuses a context whose caches do not fit.

    Args:
      tokens: slots asked for, for the longest row.
      need: bytes a device for them.
      per_token: bytes a device for one more slot in every row.
      available: free bytes a device, None when unknown (then nothing is refused).
    """
    if available is None or need <= USABLE * available:
        return
    fixed = need - per_token * tokens
    fits = int(max(USABLE * available - fixed, 0) / per_token) if per_token else 0
    raise CapacityError(
        f"a cache of {tokens:,} tokens needs {shown_bytes(need)} on each device, "
        f"{shown_bytes(int(USABLE * available))} of {shown_bytes(available)} free is usable: "
        f"about {fits:,} tokens would fit; shorten the context, use fewer rows, more devices "
        f"(--mesh) or a method that keeps a budget"
    )


def grow(caches: tuple[Any, ...], more: int) -> tuple[Any, ...]:
    """Every layer's cache with `more` slots added; its other axes are left alone.

    An axis `room` grows by as many. An axis `pages` grows by the pages that the new slots are (a
    page is slots / pages of the array's own cache), and `share` by its part of them, in whole
    granules.

    Raises:
      ValueError: pages are not whole, or a layer has no one count of slots to measure them by.
    """
    return tuple(_grow_layer(layer, cache, more) for layer, cache in enumerate(caches))


def _grow_layer(layer: int, cache: Any, more: int) -> Any:
    leaves, structure = jax.tree.flatten(cache)
    axes = leaf_axes(cache)
    counts = {
        size
        for leaf, names in zip(leaves, axes, strict=True)
        for size, name in zip(leaf.shape, names, strict=True)
        if name == "slots"
    }

    def added(name: str | None, size: int) -> int:
        if name in ("slots", "room"):
            return more
        if name not in ("pages", "share"):
            return 0
        if len(counts) != 1:
            raise ValueError(
                f"layer {layer}: axis {name!r} of {size} is measured by one number of slots, "
                f"the cache has {sorted(counts)}"
            )
        (slots,) = counts
        if name == "share":
            return math.ceil(size * more / slots / GRANULE) * GRANULE
        page = slots // size
        if page * size != slots or more % page:
            raise ValueError(
                f"layer {layer}: {slots} slots in {size} pages, and {more} slots more, "
                f"are not whole pages"
            )
        return more // page

    def widen(array: Any, names: tuple[str | None, ...]) -> Any:
        widths = [(0, added(name, size)) for name, size in zip(names, array.shape, strict=True)]
        return jax.numpy.pad(array, widths) if any(high for _, high in widths) else array

    padded = [widen(leaf, names) for leaf, names in zip(leaves, axes, strict=True)]
    return jax.tree.unflatten(structure, padded)
