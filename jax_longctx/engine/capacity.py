"""How many slots a cache gets, what it costs, and whether that fits."""

import math
from typing import Any

import jax
from jax.sharding import Mesh

from jax_longctx.errors import CapacityError
from jax_longctx.sharding import leaf_axes, tree_shardings

__all__ = ["available_bytes", "bucket", "bytes_per_device", "check_fits", "format_bytes", "grow"]

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


def bytes_per_device(mesh: Mesh, abstract: Any) -> int:
    """Bytes that a tree of caches (shapes will do) takes on each device of the mesh."""
    arrays = jax.tree.leaves(abstract)
    shardings = jax.tree.leaves(tree_shardings(mesh, abstract))
    return sum(
        math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array, sharding in zip(arrays, shardings, strict=True)
    )


def available_bytes(mesh: Mesh) -> int | None:
    """Free memory of each device of the mesh, or None where the platform does not tell."""
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
        f"a cache of {tokens:,} tokens needs {format_bytes(need)} on each device, "
        f"{format_bytes(int(USABLE * available))} of {format_bytes(available)} free is usable: "
        f"about {fits:,} tokens would fit; shorten the context, use fewer rows, more devices "
        f"(--mesh) or a method that keeps a budget"
    )


def grow(caches: Any, more: int) -> Any:
    """The caches with `more` slots added; axes that are not slots are left alone.

    So grows an axis `room`, of a cache that keeps a budget and the tokens after the context. An
    axis `pages` grows by as many pages as there are new slots; a page is slots / pages of its
    own layer's cache.
    """
    leaves, structure = jax.tree.flatten(caches)
    axes = leaf_axes(caches)
    counts = {
        name: {
            leaf.shape[names.index(name)]
            for leaf, names in zip(leaves, axes, strict=True)
            if name in names
        }
        for name in ("slots", "pages")
    }
    page = 0
    if counts["pages"]:
        (slots,), (pages,) = counts["slots"], counts["pages"]
        page = slots // pages
        if page * pages != slots or more % page:
            raise ValueError(f"{slots} slots and {more} more are not whole pages of {page}")

    def widen(array: Any, names: tuple[str | None, ...]) -> Any:
        by = {"slots": more, "room": more, "pages": more // page if page else 0}
        widths = [(0, by.get(name or "", 0)) for name in names]
        return jax.numpy.pad(array, widths) if any(high for _, high in widths) else array

    padded = [widen(leaf, names) for leaf, names in zip(leaves, axes, strict=True)]
    return jax.tree.unflatten(structure, padded)


def format_bytes(count: int) -> str:
    """`1536` -> `1.5 KiB`."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
