"""A prefilled context on disk: `context.json` and the cache arrays.

Saved under a temporary name and renamed when complete, so a folder of that name is a whole
context or none. What it was made by (model, method and its settings, capacity) is stored and
compared on loading: the arrays mean nothing under another method. So are the shapes, before
anything is allocated. Checksums cover all of it, and say whose arrays they are (see
`models.storage`).
"""

import contextlib
import dataclasses
import functools
import json
import os
import queue
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jax_longctx.contract import SlotLayout, resized
from jax_longctx.engine import Context
from jax_longctx.engine.allocate import abstract_caches, empty_like
from jax_longctx.engine.capacity import GRANULE, check_host, finished_caches
from jax_longctx.engine.distributed import from_leader, to_host
from jax_longctx.engine.engine import Engine
from jax_longctx.engine.runs import (
    as_run,
    copied_layer,
    each_layer,
    places_of_layers,
    with_layer,
)
from jax_longctx.errors import CheckpointError, ConfigError, DamagedError, InputError
from jax_longctx.files import read_sealed, seal, whole_path
from jax_longctx.locks import only_writer
from jax_longctx.methods import make_method, settings_of
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.storage import (
    check_stored,
    join_arrays,
    load_arrays,
    save_arrays,
    writing,
)
from jax_longctx.origin import check_same
from jax_longctx.sharding import leaf_axes, logical_sharding, shards_along, tree_shardings

# 1 had no digests, 2 none of arrays.
FORMAT, OLDER = 3, 2
REMEDY = "prefill again"
# Axes whose size a mesh rounds up to fill its shards.
ROUNDED = ("slots", "pages", "pool")
MANIFEST, CACHES = "context.json", "caches"
# Counts and tokens are int32 on devices.
MOST = 2**31 - 1
# Seconds between two looks at a thread that brings layers to the host.
PAUSE = 0.002


def save_context(engine: Engine, context: Context, path: str | Path) -> None:
    """Writes the context to the new folder `path`, which all processes of a job must see.

    Raises:
      InputError: the folder exists, or the context is answering a question or of another method.
      CheckpointError: it could not be written, or another process is writing it; nothing is left
        behind.
    """
    described = _described(engine, context)
    leaves: list[Any] = []
    copies = engine.setup.offload is not None
    # Layer by layer, whatever runs of layers this engine loops over.
    for cache in _saved_layers(engine, context):
        moved = functools.partial(_moved, engine, SlotLayout.in_order, _slots(cache, context.slots))
        for leaf, axes in zip(jax.tree.leaves(cache), leaf_axes(cache), strict=True):
            # Rows that only fill the mesh's data axis stay behind.
            leaf = moved(axes, _with_rows(leaf, axes, context.batch))
            # A copy of a layer leaves the devices before the next one is made.
            leaves.append(to_host(leaf) if copies and jax.process_count() == 1 else leaf)
    _write(whole_path(path), described, leaves)


def _saved_layers(engine: Engine, context: Context) -> Iterator[Any]:
    """Each layer's cache on the devices: itself, or a copy where it lies in the host's memory."""
    caches = context.usable_caches()
    if engine.setup.offload is None:
        yield from each_layer(caches)
        return
    for run, index in places_of_layers(caches):
        yield copied_layer(caches[run], np.int32(index))


class Saving:
    """`save_context` beside decoding, in one process: copies and files are another thread's work.

    `go_on`, between two decode steps, copies a few layers on the devices. A copy is no part of the
    context, whose own arrays questions and rows that share it update in place. The thread brings
    the copies to the host, and writes the files when it has all layers. What a question writes
    meanwhile lies behind the context's tokens, so layers may be copied at different times.

    Args:
      pool: whose thread brings the layers to the host and writes the files.

    Raises:
      InputError: as `save_context`.
    """

    def __init__(
        self, engine: Engine, context: Context, path: str | Path, pool: ThreadPoolExecutor
    ):
        self._described = _described(engine, context)
        self._context, self._path = context, whole_path(path)
        self._moved = functools.partial(_moved, engine, SlotLayout.in_order)
        self._left = places_of_layers(context.usable_caches())[::-1]
        # Layers that the thread has not taken yet are on the devices twice.
        self._copies: queue.Queue[Any] = queue.Queue(maxsize=2)
        self._ended = pool.submit(self._run, len(self._left))

    def go_on(self, *, wait: bool = False) -> bool:
        """Copies the next layers unless the thread has enough of them; whether all is written.

        Args:
          wait: return when all is written.

        Raises:
          CheckpointError, InputError: as `save_context`, or there is no room on the devices for a
            copy of a layer; the save is given up.
        """
        try:
            return self._go_on(wait)
        except jax.errors.JaxRuntimeError as error:
            self.close()
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            raise CheckpointError(
                f"{self._path} could not be written: the devices have no room for a copy of a layer"
            ) from error
        except BaseException:
            self.close()
            raise

    def _go_on(self, wait: bool) -> bool:
        # An error may have ended the thread, which takes no more then.
        while self._left and not self._ended.done():
            # Nobody else puts any, so that there is room afterwards.
            if self._copies.full():
                if not wait:
                    return False
                time.sleep(PAUSE)
                continue
            begun, slots = self._described["slots"], self._context.slots
            if slots != begun:
                raise InputError(
                    f"the context grew from {begun:,} to {slots:,} slots while it was saved; save "
                    f"it again, or reserve more at prefill"
                )
            self._copies.put(self._copied(*self._left[-1]))
            self._left.pop()
        if wait or self._ended.done():
            self._ended.result()
            return True
        return False

    def close(self) -> None:
        """Gives the save up, and waits for the thread; one that has all layers goes on."""
        if not self._left:
            return
        self._left.clear()
        while not self._ended.done():
            if not self._copies.full():
                self._copies.put(None)
            time.sleep(PAUSE)

    def _copied(self, run: int, number: int) -> Any:
        layer = copied_layer(self._context.usable_caches()[run], np.int32(number))
        leaves, structure = jax.tree.flatten(layer)
        moved = functools.partial(self._moved, _slots(layer, self._context.slots))
        return structure.unflatten(map(moved, leaf_axes(layer), leaves))

    def _run(self, layers: int) -> None:
        leaves: list[np.ndarray] = []
        for _ in range(layers):
            layer = self._copies.get()
            if layer is None:
                return
            for leaf, axes in zip(jax.tree.leaves(layer), leaf_axes(layer), strict=True):
                rows = [slice(self._context.batch if axis == "batch" else None) for axis in axes]
                leaves.append(np.asarray(leaf)[*rows])
            del layer, leaf
        _write(self._path, self._described, leaves)


def _described(engine: Engine, context: Context) -> dict[str, Any]:
    """What the manifest says of the context."""
    engine.check_context(context)
    return {
        "made_by": made_by_engine(engine),
        "rows": context.rows[: context.batch],
        "questions": context.questions and context.questions[: context.batch],
        "batch": context.batch,
        "slots": context.slots,
        "reserve": context.reserve,
        "total": [int(n) for n in to_host(context.total)[: context.batch]],
    }


def _write(path: Path, described: dict[str, Any], leaves: Sequence[Any]) -> None:
    """Writes the manifest and the arrays, layer by layer."""
    described = {**described, "shapes": [leaf.shape for leaf in leaves]}
    partial = path.with_name(path.name + ".partial")
    with contextlib.ExitStack() as held:
        from_leader(lambda: _begin(path, partial, held))
        with writing(path):
            arrays = {f"{i:05d}": leaf for i, leaf in enumerate(leaves)}
            save_arrays(partial / CACHES, arrays, compress=True)
        from_leader(lambda: _finish(path, partial, described))


def _begin(path: Path, partial: Path, held: contextlib.ExitStack) -> None:
    """Locks `path` and makes the folder `partial`; `held` removes the folder and the lock."""
    try:
        held.enter_context(only_writer(path))
    except InputError as error:
        raise CheckpointError(str(error)) from error
    if os.path.lexists(path):
        raise InputError(f"{path} exists; choose another name or delete it")
    shutil.rmtree(partial, ignore_errors=True)
    held.callback(shutil.rmtree, partial, ignore_errors=True)
    try:
        partial.mkdir()
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror}") from error


def _finish(path: Path, partial: Path, described: dict[str, Any]) -> None:
    with writing(path):
        files, arrays = join_arrays(partial / CACHES)
        sealed = seal(FORMAT, {**described, "files": files, "arrays": arrays})
        (partial / MANIFEST).write_text(json.dumps(sealed), encoding="utf-8")
        partial.rename(path)


def saved_manifest(path: str | Path) -> dict[str, Any]:
    """What the manifest of a saved context says; its arrays are not read.

    Raises:
      CheckpointError: not a saved context, its manifest is damaged, or it is in fp8.
    """
    path = whole_path(path)
    try:
        described = {"arrays": {}, "shapes": None} | read_sealed(
            path / MANIFEST, FORMAT, REMEDY, OLDER
        )
    except FileNotFoundError:
        raise CheckpointError(f"{path} is not a saved context (no {MANIFEST})") from None
    made_by = described.get("made_by")
    if isinstance(made_by, dict) and made_by.get("kv") == "fp8":
        raise CheckpointError(
            f"{path} holds keys and values in fp8, which is not read any more; read the text again "
            f"with kv int8"
        )
    if isinstance(made_by, dict) and isinstance(made_by.get("model"), dict):
        # Earlier versions knew fewer fields of a model.
        with contextlib.suppress(ConfigError):
            made_by["model"] = _as_json(ModelConfig.from_dict(made_by["model"]).to_dict())
    return described


def method_of(path: str | Path) -> Any:
    """The method that a context was saved under, with its settings.

    Raises:
      CheckpointError: as `saved_manifest`.
      ConfigError: there is no such method here.
    """
    made_by = saved_manifest(path)["made_by"]["method"]
    return make_method(made_by["name"], made_by["settings"])


def sizes_of(path: str | Path, vocab_size: int) -> dict[str, Any]:
    """What a mesh for a saved context is chosen for (`planning.plan.on_best_mesh`).

    Raises:
      CheckpointError: not a saved context, or its manifest is damaged.
    """
    described = _unharmed(path, vocab_size)
    return {
        "context": max(described["total"]),
        "batch": described["batch"],
        "divide": {"seq": described["slots"] // GRANULE},
    }


def _unharmed(path: str | Path, vocab_size: int) -> dict[str, Any]:
    path, described = whole_path(path), saved_manifest(path)
    if (wrong := _wrong(described, vocab_size)) is not None:
        raise DamagedError(f"{path / MANIFEST} is damaged: {wrong}; {REMEDY}")
    return described


def check_fits(engine: Engine, path: str | Path) -> dict[str, Any]:
    """What the manifest of a saved context says that the engine can load, but for its weights.

    Raises:
      CheckpointError: not a saved context, its manifest is damaged, or it was made by another model
        or method, or does not divide over the mesh.
    """
    path, described = whole_path(path), _unharmed(path, engine.config.vocab_size)
    made_by, free = described["made_by"], ("weights", "all_weights")
    check_same(path, made_by, _facts(engine), REMEDY, kind=CheckpointError, free=free)
    slots, seq = described["slots"], engine.mesh.shape["seq"]
    if slots % (GRANULE * seq):
        raise CheckpointError(
            f"{path} has {slots} slots, which do not divide over {seq} shards in runs of "
            f"{GRANULE}; load it on a mesh whose seq divides {slots // GRANULE}, or prefill again"
        )
    return described


def load_context(engine: Engine, path: str | Path) -> Context:
    """Reads a context that an engine of the same model and method saved, onto the engine's mesh.

    Raises:
      CheckpointError: as `check_fits`; the context is damaged, or was made with other weights.
    """
    path, described = whole_path(path), check_fits(engine, path)
    made_by, ours = described["made_by"], made_by_engine(engine)
    # Earlier versions wrote fewer facts.
    ours = {key: value for key, value in ours.items() if key in made_by or key != "all_weights"}
    check_same(path, made_by, ours, REMEDY, kind=CheckpointError)
    data = engine.mesh.shape["data"]
    batch, slots, reserve = (described[key] for key in ("batch", "slots", "reserve"))
    rows = [*described["rows"], *([] for _ in range(-batch % data))]
    total = jnp.array([*described["total"], *[0] * (len(rows) - batch)], jnp.int32)
    # On the disk all lie as they do on devices, a layer apart.
    apart = dataclasses.replace(engine.setup, by_layer=True, offload=None)
    structure, runs = (
        finished_caches(
            setup, abstract_caches(setup, len(rows), slots, reserve), "context", reserve
        )
        for setup in (apart, engine.setup)
    )
    shapes = described["shapes"]
    if shapes is None and any(_slots(cache, slots) != slots for cache in structure):
        raise CheckpointError(
            f"{path} was written by an unreleased version, which may have mixed up the tokens that "
            f"stay under {engine.method.name}; {REMEDY}"
        )
    check_stored(path / CACHES, described["files"], described["arrays"], REMEDY)
    wanted = _saved_arrays(engine, structure, batch, None if engine.method.keeps_all else shapes)
    put = functools.partial(_moved, engine, SlotLayout.dealt)

    def loaded(caches: tuple[Any, ...], first: int) -> tuple[Any, ...]:
        """These layers' caches, whose arrays are those from number `first` on."""
        shardings = jax.tree.leaves(tree_shardings(engine.mesh, caches))
        names = [f"{first + number:05d}" for number in range(len(shardings))]
        arrays = load_arrays(path / CACHES, {name: wanted[name] for name in names}, REMEDY)
        sizes = [_slots(cache, slots) for cache in caches for _ in jax.tree.leaves(cache)]
        each = zip(names, sizes, leaf_axes(caches), jax.tree.leaves(caches), shardings, strict=True)
        leaves = [
            put(size, axes, jax.device_put(_with_shape(arrays[name], leaf.shape), sharding))
            for name, size, axes, leaf, sharding in each
        ]
        return jax.tree.unflatten(jax.tree.structure(caches), leaves)

    if engine.setup.offload is None:
        caches = as_run(engine.setup, loaded(structure, 0), runs)
    else:
        # One layer after the other passes over the devices.
        check_host(engine.mesh, runs)
        filled, first = [*empty_like(engine.setup, runs)], 0
        for layer, (run, index) in zip(structure, places_of_layers(runs), strict=True):
            (cache,) = loaded((layer,), first)
            first += len(jax.tree.leaves(layer))
            filled[run] = with_layer(filled[run], np.int32(index), cache)
        caches = tuple(filled)
    questions = described["questions"]
    if questions is not None:
        questions = [*questions, *([] for _ in range(len(rows) - batch))]
    sizes = (batch, slots, reserve)
    return Context(rows, *sizes, total, caches, questions=questions, method=engine.method)


def _wrong(described: dict[str, Any], vocabulary: int) -> str | None:
    """What no engine has written, or None."""

    def is_count(value: Any, most: int = MOST) -> bool:
        return type(value) is int and 0 <= value <= most

    def is_rows(value: Any, most: int = vocabulary - 1) -> bool:
        return isinstance(value, list) and all(
            isinstance(row, list) and all(is_count(number, most) for number in row) for row in value
        )

    keys = ["made_by", "rows", "questions", "batch", "slots", "reserve", "total", "files", "arrays"]
    keys += ["shapes"]
    if sorted(described) != sorted(keys):
        return f"it holds {', '.join(described) or 'nothing'}, expected {', '.join(keys)}"
    made_by, rows, questions, batch, slots, reserve, total, files = (described[k] for k in keys[:8])
    checks = {
        "made_by": isinstance(made_by, dict),
        "rows": is_rows(rows) and len(rows) > 0,
        "batch": is_count(batch) and isinstance(rows, list) and batch == len(rows),
        "questions": questions is None or (is_rows(questions) and len(questions) == batch),
        "slots": is_count(slots) and slots > 0,
        "reserve": is_count(reserve) and is_count(slots) and reserve <= slots,
        "total": isinstance(total, list) and len(total) == batch and all(map(is_count, total)),
        "files": isinstance(files, dict)
        and all(isinstance(entry, list) and len(entry) == 2 for entry in files.values()),
        "arrays": isinstance(described["arrays"], dict),
        "shapes": described["shapes"] is None or is_rows(described["shapes"], MOST),
    }
    for key, holds in checks.items():
        if not holds:
            return f"{key} {described[key]!r:.60} is not what a context has"
    for row, count in zip(rows, total, strict=True):
        if len(row) > min(count, slots):
            return f"a row of {len(row)} tokens in a total of {count} and {slots} slots"
    return None


def _saved_arrays(
    engine: Engine, structure: Any, batch: int, shapes: Sequence[Sequence[int]] | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """What the saved arrays of these caches are, on as many shards as their sizes divide over.

    Another mesh rounds the room of what stays up to another number: `shapes` say to which.
    """
    wanted = {}
    pairs = zip(jax.tree.leaves(structure), leaf_axes(structure), strict=True)
    for i, (leaf, names) in enumerate(pairs):
        shape = tuple(
            batch if axis == "batch" else size for size, axis in zip(leaf.shape, names, strict=True)
        )
        if shapes and i < len(shapes) and len(shapes[i]) == len(shape):
            each = zip(shape, shapes[i], names, strict=True)
            shape = tuple(own if axis in ROUNDED else size for size, own, axis in each)
        # Fewer rows than data shards are read by every shard, and spread once they are filled up.
        shards = [shards_along(engine.mesh, axis) for axis in names]
        kept = [
            axis if size % count == 0 else None
            for size, axis, count in zip(shape, names, shards, strict=True)
        ]
        sharding = logical_sharding(engine.mesh, kept)
        wanted[f"{i:05d}"] = jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)
    return wanted


def _with_shape(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The array with these sizes: cut, or filled with zeros. Only empty entries are cut."""
    for axis, size in enumerate(shape):
        leaf = leaf if leaf.shape[axis] == size else resized(leaf, axis, size)
    return leaf


def _with_rows(leaf: jax.Array, axes: tuple[str | None, ...], rows: int) -> jax.Array:
    """The array with `rows` rows along its batch axis: cut, or filled with zeros."""
    if "batch" not in axes or leaf.shape[axes.index("batch")] == rows:
        return leaf
    return resized(leaf, axes.index("batch"), rows)


def _slots(cache: Any, whole: int) -> int:
    """Slots of a layer's cache: a context's `whole` number, or fewer where tokens have left."""
    pairs = zip(jax.tree.leaves(cache), leaf_axes(cache), strict=True)
    return next((x.shape[axes.index("slots")] for x, axes in pairs if "slots" in axes), whole)


def _moved(
    engine: Engine,
    way: Callable[..., jax.Array],
    slots: int,
    axes: tuple[str | None, ...],
    leaf: jax.Array,
) -> jax.Array:
    """An array of a cache with `slots` slots, moved by a function of `SlotLayout`.

    On the disk they lie in the text's order (`in_order`), which every mesh reads. An engine deals
    them to its own shards (`dealt`).
    """
    for axis, name in enumerate(axes):
        layout = engine.setup.slot_layout.along(name)
        if layout.in_stripes:
            leaf = _mover(layout, way, axis, slots, leaf.sharding)(leaf)
    return leaf


@functools.cache
def _mover(
    layout: SlotLayout, way: Callable[..., jax.Array], axis: int, slots: int, sharding: Any
) -> Any:
    """The program of `_moved`: arrays of all layers share it."""
    move = functools.partial(way, layout, axis=axis, slots=slots)
    return jax.jit(move, out_shardings=sharding)


def made_by_engine(engine: Engine) -> dict[str, Any]:
    """What a saved context is compared with: model, weights, dtype and method, as JSON values."""
    return {**_facts(engine), "weights": engine.fingerprint, "all_weights": engine.checksum}


def _facts(engine: Engine) -> dict[str, Any]:
    """Those of `made_by_engine` that need no weights."""
    described = {
        "model": engine.config.to_dict(),
        "dtype": jnp.dtype(engine.setup.dtype).name,
        "method": settings_of(engine.method),
        "kv": engine.setup.kv,
        # Earlier versions' keys were all in the model's units, which nothing said.
        **({"key_units": True} if engine.setup.evens_keys else {}),
    }
    return _as_json(described)


def _as_json(value: Any) -> Any:
    """As JSON reads it back: tuples are lists there."""
    return json.loads(json.dumps(value))
