"""How many slots a cache gets, what it costs, and whether that fits.

A footprint is made from shapes alone: caches are traced through `init_cache` and `finish`, and
nothing is allocated. A test compares it with the compiled programs' own accounts.
"""

import collections
import dataclasses
import functools
import math
import os
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from jax_longctx.caches import Offloaded
from jax_longctx.contract import SlotLayout, Stage
from jax_longctx.engine.allocate import abstract_caches, most_pinned, pinned_bytes
from jax_longctx.engine.compiling import program
from jax_longctx.engine.distributed import to_host
from jax_longctx.engine.prefill import Context, finish_one, places_of
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import CapacityError, ConfigError
from jax_longctx.memory import POOL, shown_bytes
from jax_longctx.methods import METHODS, make_method, settings_of
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.params import check_mesh
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import stored_form
from jax_longctx.sharding import HOST, AnyMesh, Stacked, layers_in, leaf_axes, tree_shardings

SMALLEST = 128
# Slots beyond the longest row, which a storage may write garbage to (see `caches.write_run`).
SPARE = 1
# From here on empty slots cost memory and time, below it another program costs more.
FINER_FROM = 8192
# Shards of the slots stay multiples of this, which is what the attention kernels tile by.
GRANULE = 128
# Share of the free memory that caches may take; the rest is for activations.
USABLE = 0.9
# The host's memory. Only Linux has this file.
MEMINFO = Path("/proc/meminfo")


def bucket(tokens: int, seq_shards: int = 1) -> int:
    """Slots for `tokens`: few capacities are ever compiled, and little of one is empty.

    At most a sixteenth more, then a sixty-fourth (dense decode reads the empty slots too), and
    what it takes to divide over the shards in whole granules.
    """
    fraction = 16 if tokens < FINER_FROM else 64
    step = max(SMALLEST, 2 ** math.floor(math.log2(max(tokens, 1))) // fraction)
    step = math.lcm(step, GRANULE * seq_shards)
    return -(-max(tokens, 1) // step) * step


def reserved(tokens: int) -> int:
    """Slots kept for a question and answer of `tokens` tokens, rounded so that few are compiled."""
    return bucket(tokens) if tokens else 0


def slots_for(context: int, reserve: int = 0, seq_shards: int = 1) -> int:
    """Slots of a cache for a text, and for a question and its answer of `reserve` tokens."""
    return bucket(context + reserved(reserve) + SPARE, seq_shards)


def setup_of(config: ModelConfig, spec: RunSpec) -> Setup:
    """What is static of the run's programs; in bfloat16 unless the spec names a dtype.

    Raises:
      ConfigError: the method or the mesh does not fit the model, or cannot be offloaded.
    """
    spec, method = spec.over("bfloat16"), spec.chosen()
    dtype, mesh = jnp.dtype(spec.dtype), spec.devices()
    method.validate(config)
    check_mesh(config, mesh)
    setup = Setup(
        config,
        method,
        mesh,
        dtype,
        spec.chunk,
        kv=stored_form("kv", spec.kv, dtype.name),
        weights=stored_form("weights", spec.weights, dtype.name),
        offload=spec.tier,
        reading=spec.reader,
    )
    check_offload(setup)
    check_reading(setup)
    return setup


def check_reading(setup: Setup) -> None:
    """Raises ConfigError where the method cannot read a text as this setup asks."""
    why = setup.method.cannot_read_blocks
    if setup.reading is not None and why is not None:
        name = settings_of(setup.method)["name"]
        raise ConfigError(f"{name} cannot read blocks of a text: {why}; leave reading away")


def check_offload(setup: Setup) -> None:
    """Raises ConfigError where caches cannot lie in the host's memory, as this setup asks."""
    if setup.offload is None:
        return
    why = setup.method.cannot_offload
    if why is not None:
        able = [name for name in METHODS if make_method(name).cannot_offload is None]
        name = settings_of(setup.method)["name"]
        raise ConfigError(
            f"{name} cannot be offloaded: {why}; with default settings these can: {', '.join(able)}"
        )
    if setup.mesh.shape["seq"] > 1:
        raise ConfigError(
            f"offload host does not divide a text over seq, the mesh has "
            f"seq={setup.mesh.shape['seq']}; leave seq out, or offload"
        )
    # The size of the working set is checked as a cache is made.
    try:
        abstract_caches(setup, 1, slots_for(1), 0)
    except ConfigError:
        # The error names what the longest text needs, so that no text is refused again.
        abstract_caches(setup, 1, slots_for(setup.config.max_position), 0)
        raise


def bytes_per_device(mesh: AnyMesh, abstract: Any, *, host: bool = False) -> int:
    """Bytes that a tree of caches (shapes will do) takes on each device of the mesh.

    Args:
      host: count a device's part of the arrays in the host's memory, not the others.
    """
    arrays = jax.tree.leaves(abstract)
    shardings = jax.tree.leaves(tree_shardings(mesh, abstract))
    return sum(
        math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
        for array, sharding in zip(arrays, shardings, strict=True)
        if (sharding.memory_kind == HOST) == host
    )


def stores_of(caches: Any) -> list[Offloaded]:
    """The stores of these caches in the host's memory; a run of layers has one."""
    nodes = jax.tree.leaves(caches, is_leaf=lambda node: isinstance(node, Offloaded))
    return [node for node in nodes if isinstance(node, Offloaded)]


def passing_bytes(setup: Setup, caches: Any) -> int:
    """Bytes on each device of keys and values that are there while a chunk is read, and not kept.

    A method that reads by full attention brings a layer's to the device, in the order of pages,
    and makes the order of slots of it.
    """
    if setup.method.info.phase not in ("none", "decode"):
        return 0
    layers = [
        bytes_per_device(setup.mesh, cache, host=True) // layers_in(cache) for cache in caches
    ]
    return 2 * max(layers, default=0)


@dataclasses.dataclass(frozen=True)
class Fetched:
    """What an answer's decode steps chose of contexts in the host's memory, over rows and layers.

    Attributes:
      hits, misses: pages that were on the device, and that were fetched.
      steps: steps, counted in each layer.
      waited: of these, with a page that was fetched.
    """

    hits: int
    misses: int
    steps: int
    waited: int

    def __add__(self, other: "Fetched") -> "Fetched":
        sums = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Fetched(*map(sum, sums))

    @property
    def hit_rate(self) -> float | None:
        """Hits of all chosen pages; None where none was chosen."""
        chosen = self.hits + self.misses
        return self.hits / chosen if chosen else None

    @property
    def waited_share(self) -> float | None:
        """The share of a step's layers that waited for a page; None without steps."""
        return self.waited / self.steps if self.steps else None

    def record(self) -> dict[str, Any]:
        """The counts and the shares, for JSON."""
        shares = {"hit_rate": self.hit_rate, "waited_share": self.waited_share}
        return dataclasses.asdict(self) | shares


def fetched_of(caches: Any, rows: int) -> Fetched | None:
    """The counts of the first `rows` rows since the last fork; None on the devices alone."""
    stores = stores_of(caches)
    if not stores:
        return None

    def total(name: str) -> int:
        return sum(
            int(np.sum(to_host(getattr(store.frames, name))[..., :rows])) for store in stores
        )

    return Fetched(*(total(field.name) for field in dataclasses.fields(Fetched)))


def available_bytes(mesh: Mesh) -> int | None:
    """Free memory of each device of the mesh, or None where the platform does not tell.

    All processes must ask. They get the same answer, the fullest one's.
    """
    return _least(_available_here(mesh))


def expected_bytes(mesh: Mesh, params: Any) -> int | None:
    """What `available_bytes` will be when the weights of these shapes are loaded.

    Of several processes all must ask.
    """
    weights = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(params)
    )
    return _least(_available_here(mesh, weights))


def _least(count: int | None) -> int | None:
    """The smallest `count` of all processes, in KiB rounded down; None where one has none."""
    if jax.process_count() == 1:
        return count
    own = np.int32(-1 if count is None else min(count >> 10, np.iinfo(np.int32).max))
    found = int(np.min(multihost_utils.process_allgather(own)))
    return None if found < 0 else found << 10


def _host_memory() -> int | None:
    """Bytes of the host's memory that are available, or None where it is not told."""
    told = MEMINFO.read_text(encoding="ascii") if MEMINFO.exists() else ""
    found = re.search(r"^MemAvailable:\s*(\d+)", told, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _available_here(mesh: Mesh, used: int | None = None) -> int | None:
    """Free bytes of a device, now or with `used` bytes in use."""
    device = mesh.local_devices[0]
    if device.platform == "cpu":
        free = _host_memory()
        # The devices of a CPU share its memory.
        return None if free is None else free // len(mesh.local_devices) - (used or 0)
    try:
        stats = device.memory_stats()
    except (jax.errors.JaxRuntimeError, NotImplementedError):
        # Pods and plugins may not implement it.
        return None
    if not stats or "bytes_limit" not in stats:
        return None
    return stats["bytes_limit"] - (stats["bytes_in_use"] if used is None else used)


def available_host_bytes(mesh: Mesh) -> int | None:
    """Free memory of the host for caches, or None where it is not told.

    XLA pins no more of it for GPUs than `POOL` says, 64 GiB unless it is set, in all. What it has
    pinned it keeps: the system counts it as used, but the next arrays can have it.
    """
    free = _host_memory()
    if keeps_pinned(mesh):
        pool = max((int(os.environ.get(POOL, "64")) << 30) - pinned_bytes(), 0)
        free = pool if free is None else min(free + kept_bytes(mesh), pool)
    return _least(free)


def keeps_pinned(mesh: Mesh) -> bool:
    """Whether XLA pins the host's memory from a pool of bounded size, and never gives it back."""
    return mesh.local_devices[0].platform == "gpu"


def kept_bytes(mesh: Mesh) -> int:
    """Bytes of the host's memory that XLA keeps of arrays that are gone."""
    if not keeps_pinned(mesh):
        return 0
    return max(most_pinned() - pinned_bytes(), 0)


def check_host(mesh: Mesh, abstract: Any) -> None:
    """Raises CapacityError where caches (shapes will do) do not fit the host's memory."""
    need = bytes_per_device(mesh, abstract, host=True) * len(mesh.local_devices)
    available = available_host_bytes(mesh)
    # What was pinned before is there whole; of the rest others take their part.
    if need <= kept_bytes(mesh) or fits(need, available):
        return
    assert available is not None
    usable = int(USABLE * available)
    limit = ""
    if keeps_pinned(mesh):
        limit = f" (at most {POOL}={os.environ.get(POOL, '64')} GiB are pinned)"
    raise CapacityError(
        f"the offloaded context needs {shown_bytes(need)} of the host's memory, "
        f"{shown_bytes(usable)} of {shown_bytes(available)} free is usable{limit}; about "
        f"{usable / need:.0%} of these tokens would fit; shorten the context, use fewer rows, or "
        "store keys and values in 8 bits (kv int8)"
    )


def fits(need: int, available: int | None) -> bool:
    """Whether caches of `need` bytes a device fit; unknown free memory (None) is enough."""
    return available is None or need <= USABLE * available


def check_fits(tokens: int, need: int, per_token: float, available: int | None) -> None:
    """Refuses a context whose caches do not fit.

    Args:
      tokens: slots asked for, for the longest row.
      need: bytes a device for them.
      per_token: bytes a device for one more slot in every row; 0 where fewer slots would not help.
      available: free bytes a device, None when unknown (then nothing is refused).
    """
    if available is None or fits(need, available):
        return
    hint = ""
    if per_token:
        fixed = need - per_token * tokens
        room = int(max(USABLE * available - fixed, 0) / per_token)
        hint = f": about {room:,} tokens would fit"
    raise CapacityError(
        f"a cache of {tokens:,} tokens needs {shown_bytes(need)} on each device, "
        f"{shown_bytes(int(USABLE * available))} of {shown_bytes(available)} free is usable{hint}; "
        "shorten the context, use fewer rows, more devices (--mesh) or a method that keeps a budget"
    )


def grow(
    caches: tuple[Any, ...],
    more: int,
    layout: SlotLayout | None = None,
    slots: int | None = None,
) -> tuple[Any, ...]:
    """Every layer's cache with `more` slots added; its other axes are left alone.

    An axis `room` grows by as many. An axis `pages` grows by the pages that the new slots are (a
    page is slots / pages of the array's own cache), and `share` by its part of them, in whole
    granules.

    Args:
      layout: where the slots lie; one block of them if not given.
      slots: of the caches. They give the size of a page where no array has slots.

    Raises:
      ValueError: pages are not whole, or a layer has no one count of slots to measure them by.
    """
    layout = layout or SlotLayout()
    return tuple(
        _grow_layer(layer, cache, more, layout, slots) for layer, cache in enumerate(caches)
    )


def extend(setup: Setup, context: Context, more: int) -> None:
    """The context's caches, and its history's, with `more` slots for question and answer."""

    def longer(caches: Any) -> Any:
        leaves, structure = jax.tree.flatten(caches)
        made = zip(leaves, _extended(setup, caches, more, context.slots), strict=True)
        return structure.unflatten(old if new is None else new for old, new in made)

    context.caches = longer(context.usable_caches())
    if context.history is not None:
        own = iter(longer(tuple(each for each in context.history if each is not None)))
        context.history = tuple(each if each is None else next(own) for each in context.history)
    context.slots, context.reserve = context.slots + more, context.reserve + more


@program(static=(0, 2, 3), places=places_of)
def _extended(setup: Setup, caches: tuple[Any, ...], more: int, slots: int) -> list[Any]:
    """The arrays that grow; None for the others, which stay where they are."""
    grown = jax.tree.leaves(grow(caches, more, setup.slot_layout, slots))
    each = zip(jax.tree.leaves(caches), grown, places_of(setup, caches), strict=True)
    placed = jax.lax.with_sharding_constraint
    return [None if new is old else placed(new, at) for old, new, at in each]


def _grow_layer(layer: int, cache: Any, more: int, layout: SlotLayout, given: int | None) -> Any:
    leaves, structure = jax.tree.flatten(cache)
    axes = leaf_axes(cache)
    counts = {
        size
        for leaf, names in zip(leaves, axes, strict=True)
        for size, name in zip(leaf.shape, names, strict=True)
        if name == "slots"
    }
    if not counts and given is not None:
        counts = {given}

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
        for axis, (name, size) in enumerate(zip(names, array.shape, strict=True)):
            if extra := added(name, size):
                array = layout.along(name).resized(array, axis, size + extra)
        return array

    padded = [widen(leaf, names) for leaf, names in zip(leaves, axes, strict=True)]
    return jax.tree.unflatten(structure, padded)


@dataclasses.dataclass(frozen=True)
class Footprint:
    """Bytes of all layers' caches.

    Attributes:
      peak: the most at any time from the start of prefill to the answer.
      resident: while answering, when no other question will follow.
      kept: after prefill, when the context is kept for more questions.
      read: what one decode step reads, at the context's length.
      host: bytes in the host's memory, which the others leave out.
    """

    peak: int
    resident: int
    kept: int
    read: int
    host: int


def footprint(
    setup: Setup, *, batch: int, context: int, reserve: int, per_device: bool = False
) -> Footprint:
    """The caches of `batch` rows of `context` tokens, with `reserve` for question and answer.

    All devices together, or with `per_device` each device of the mesh; `read` is always of all.
    """
    stages = staged_caches(setup, batch, context, reserve)
    local, hosts = [], []
    for caches in stages:
        found: dict[bool, list[Any]] = {True: [], False: []}
        shardings = jax.tree.leaves(tree_shardings(setup.mesh, caches))
        for leaf, sharding in zip(jax.tree.leaves(caches), shardings, strict=True):
            shape = sharding.shard_shape(leaf.shape) if per_device else leaf.shape
            found[sharding.memory_kind == HOST].append((shape, leaf.dtype))
        local.append(found[False])
        hosts.append(_bytes(collections.Counter(found[True])))
    empty, kept, answering = (collections.Counter(arrays) for arrays in local)
    # What the donated buffers cannot hold lies beside them.
    passing = passing_bytes(setup, stages[0]) * (1 if per_device else setup.mesh.size)
    peak = _bytes(empty) + max(_bytes(kept - empty), passing)
    if setup.method.info.answers_apart:
        peak = max(peak, _bytes(kept) + _bytes(answering))
    read = read_bytes(setup, stages[-1], context)
    return Footprint(peak, _bytes(answering), _bytes(kept), read, max(hosts))


def _bytes(arrays: collections.Counter[Any]) -> int:
    return sum(
        count * math.prod(shape) * dtype.itemsize for (shape, dtype), count in arrays.items()
    )


def staged_caches(
    setup: Setup, batch: int, context: int, reserve: int
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
    """Shapes of every layer's cache: empty, after the context, and while answering."""
    reserve = reserved(reserve)
    slots = slots_for(context, reserve, setup.mesh.shape["seq"])
    empty = abstract_caches(setup, batch, slots, reserve)
    kept = answering = finished_caches(setup, empty, "context", reserve)
    if setup.method.info.answers_apart:
        answering = finished_caches(setup, kept, "question", reserve)
    return empty, kept, answering


def finished_caches(setup: Setup, caches: Any, stage: Stage, reserve: int) -> tuple[Any, ...]:
    """Shapes after `finish`; layers that are alike are traced once."""
    found: dict[Any, Any] = {}
    finished = []
    for _, layer, cache in setup.with_layers(caches):
        leaves, structure = jax.tree.flatten(cache)
        key = (layer, structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        if key not in found:
            batch = leaves[0].shape[isinstance(cache, Stacked)]
            total = jax.ShapeDtypeStruct((batch,), jnp.int32)
            finish = functools.partial(finish_one, setup, layer, stage=stage, reserve=reserve)
            found[key] = jax.eval_shape(finish, cache, total)
        finished.append(found[key])
    return tuple(finished)


def read_bytes(setup: Setup, caches: tuple[Any, ...], length: int) -> int:
    """What a decode step reads of all layers' caches (shapes will do) at context `length`."""
    # Arrays that have a size and no memory.
    hollow = jax.tree.map(
        lambda leaf: np.broadcast_to(np.zeros((), leaf.dtype), leaf.shape), caches
    )
    read = 0
    for _, layer, cache in setup.with_layers(hollow):
        one = jax.tree.map(lambda x: x[0], cache.cache) if isinstance(cache, Stacked) else cache
        read += layers_in(cache) * layer.method.read_bytes(one, length)
    return read
