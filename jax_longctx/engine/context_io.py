"""A prefilled context on disk: `context.json` and the cache arrays, in Orbax.

Saved under a temporary name and renamed when complete, so a folder of that name is a whole
context or none. What it was made by (model, method and its settings, capacity) is stored and
compared on loading: the arrays mean nothing under another method.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from orbax.checkpoint import v1 as ocp

from jax_longctx.engine import programs
from jax_longctx.engine.capacity import GRANULE
from jax_longctx.engine.context import Context
from jax_longctx.engine.distributed import from_leader, is_leader
from jax_longctx.engine.engine import Engine
from jax_longctx.errors import CheckpointError, InputError
from jax_longctx.methods import settings_of
from jax_longctx.models.checkpoint import quiet_orbax, why_unwritten
from jax_longctx.sharding import RULES, leaf_axes, logical_sharding, tree_shardings

__all__ = ["load_context", "save_context"]

FORMAT = 1


def save_context(engine: Engine, context: Context, path: str | Path) -> None:
    """Writes the context to the new folder `path`, which all processes of a job must see.

    Raises:
      InputError: the folder exists, or the context is answering a question.
      CheckpointError: it could not be written; nothing is left behind.
    """
    path = Path(path).absolute()
    caches = context.usable_caches()
    partial = path.with_name(path.name + ".partial")
    from_leader(lambda: _begin(path, partial))
    # Rows that only fill the mesh's data axis stay behind.
    leaves = {
        f"{i:05d}": _with_rows(leaf, axes, context.batch)
        for i, (leaf, axes) in enumerate(
            zip(jax.tree.leaves(caches), leaf_axes(caches), strict=True)
        )
    }
    described = {
        "format": FORMAT,
        "made_by": _made_by(engine),
        "rows": context.rows[: context.batch],
        "questions": context.questions and context.questions[: context.batch],
        "batch": context.batch,
        "slots": context.slots,
        "reserve": context.reserve,
        "total": [int(n) for n in context.total[: context.batch]],
        "arrays": {name: [list(leaf.shape), leaf.dtype.name] for name, leaf in leaves.items()},
    }
    try:
        with quiet_orbax():
            ocp.save(str(partial / "caches"), leaves)
        from_leader(lambda: _finish(path, partial, described))
    except (OSError, ValueError) as error:  # the latter when a disk is full
        raise CheckpointError(f"{path} could not be written: {why_unwritten(error)}") from error
    finally:
        if is_leader():
            shutil.rmtree(partial, ignore_errors=True)


def _begin(path: Path, partial: Path) -> None:
    if path.exists():
        raise InputError(f"{path} exists; choose another name or delete it")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error


def _finish(path: Path, partial: Path, described: dict[str, Any]) -> None:
    try:
        (partial / "context.json").write_text(json.dumps(described), encoding="utf-8")
        partial.rename(path)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error


def load_context(engine: Engine, path: str | Path) -> Context:
    """Reads a context that an engine of the same model and method saved, onto the engine's mesh.

    Raises:
      CheckpointError: not a saved context, damaged, or made by another model or method.
    """
    path = Path(path).absolute()
    try:
        described = json.loads((path / "context.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a saved context: {error}") from error
    if described.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {described.get('format')}, expected {FORMAT}")
    made_by, ours = described["made_by"], _made_by(engine)
    for key, value in ours.items():
        if made_by.get(key) != value:
            raise CheckpointError(
                f"{path} was made with {key} {made_by.get(key)}, this engine has {value}; "
                f"load it with what made it, or prefill again"
            )
    data = engine.mesh.shape["data"]
    batch, slots, reserve = (described[key] for key in ("batch", "slots", "reserve"))
    seq = engine.mesh.shape["seq"]
    if slots % (GRANULE * seq):
        raise CheckpointError(
            f"{path} has {slots} slots, which do not divide over {seq} shards in runs of "
            f"{GRANULE}; load it on a mesh whose seq divides {slots // GRANULE}, or prefill again"
        )
    rows = [*described["rows"], *([] for _ in range(-batch % data))]
    total = jnp.array([*described["total"], *[0] * (len(rows) - batch)], jnp.int32)
    structure = _finished_caches(engine, len(rows), slots, reserve, total)
    arrays = _load_arrays(engine, path, described["arrays"], leaf_axes(structure))
    shardings = jax.tree.leaves(tree_shardings(engine.mesh, structure))
    leaves = [
        jax.device_put(_with_rows(array, axes, len(rows)), sharding)
        for array, axes, sharding in zip(arrays, leaf_axes(structure), shardings, strict=True)
    ]
    caches = jax.tree.unflatten(jax.tree.structure(structure), leaves)
    questions = described["questions"]
    if questions is not None:
        questions = [*questions, *([] for _ in range(len(rows) - batch))]
    return Context(rows, batch, slots, reserve, total, caches, questions)


def _load_arrays(
    engine: Engine, path: Path, described: dict[str, Any], axes: list[tuple[str | None, ...]]
) -> list[jax.Array]:
    """The arrays as they were saved, on as many shards as their sizes divide over."""
    if len(axes) != len(described):
        raise CheckpointError(f"{path} holds {len(described)} arrays, expected {len(axes)}")
    targets = {}
    for (name, (shape, dtype)), names in zip(described.items(), axes, strict=True):
        # Fewer rows than data shards are read by every shard, and spread once they are filled up.
        shards = [engine.mesh.shape[RULES[axis]] if axis and RULES[axis] else 1 for axis in names]
        kept = [
            axis if size % count == 0 else None
            for size, axis, count in zip(shape, names, shards, strict=True)
        ]
        sharding = logical_sharding(engine.mesh, kept)
        targets[name] = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=sharding)
    try:
        arrays = ocp.load(str(path / "caches"), targets)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{path}: the cache arrays are damaged: {first}") from error
    return [arrays[name] for name in targets]


def _with_rows(leaf: jax.Array, axes: tuple[str | None, ...], rows: int) -> jax.Array:
    """The array with `rows` rows along its batch axis: cut, or filled with zeros."""
    if "batch" not in axes or leaf.shape[axes.index("batch")] == rows:
        return leaf
    axis = axes.index("batch")
    more = rows - leaf.shape[axis]
    if more < 0:
        return jax.lax.slice_in_dim(leaf, 0, rows, axis=axis)
    return jnp.pad(leaf, [(0, more if i == axis else 0) for i in range(leaf.ndim)])


def _made_by(engine: Engine) -> dict[str, Any]:
    described = {
        "model": engine.config.to_dict(),
        "weights": engine.fingerprint,
        "dtype": jnp.dtype(engine.setup.dtype).name,
        "method": settings_of(engine.method),
    }
    # As JSON reads it back: tuples are lists there.
    return json.loads(json.dumps(described))


def _finished_caches(engine: Engine, batch: int, slots: int, reserve: int, total: jax.Array) -> Any:
    """Abstract caches after `finish`, for their structure."""
    setup = engine.setup
    empty = programs.abstract_caches(setup, batch, slots, reserve)
    return jax.eval_shape(
        lambda caches: programs.finish_context(setup, caches, total, reserve), empty
    )
