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
from jax_longctx.engine.engine import Context, Engine
from jax_longctx.errors import CheckpointError, InputError
from jax_longctx.methods import settings_of
from jax_longctx.sharding import tree_shardings

__all__ = ["load_context", "save_context"]

FORMAT = 1


def save_context(engine: Engine, context: Context, path: str | Path) -> None:
    """Writes the context to the new folder `path`.

    Raises:
      InputError: the folder exists, or the context is answering a question.
      CheckpointError: it could not be written; nothing is left behind.
    """
    path = Path(path).absolute()
    if path.exists():
        raise InputError(f"{path} exists; choose another name or delete it")
    if context.caches is None:
        raise InputError("this context is answering a question; finish that first")
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    leaves = {f"{i:05d}": leaf for i, leaf in enumerate(jax.tree.leaves(context.caches))}
    described = {
        "format": FORMAT,
        "made_by": _made_by(engine),
        "rows": context.rows,
        "batch": context.batch,
        "slots": context.slots,
        "reserve": context.reserve,
        "total": [int(n) for n in context.total],
        "arrays": {name: [list(leaf.shape), leaf.dtype.name] for name, leaf in leaves.items()},
    }
    try:
        partial.mkdir(parents=True)
        ocp.save(str(partial / "caches"), leaves)
        (partial / "context.json").write_text(json.dumps(described), encoding="utf-8")
        partial.rename(path)
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


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
    batch, slots, reserve = len(described["rows"]), described["slots"], described["reserve"]
    total = jnp.array(described["total"], jnp.int32)
    structure = _finished_caches(engine, batch, slots, reserve, total)
    shardings = jax.tree.leaves(tree_shardings(engine.mesh, structure))
    if len(shardings) != len(described["arrays"]):
        raise CheckpointError(
            f"{path} holds {len(described['arrays'])} arrays, expected {len(shardings)}"
        )
    targets = {
        name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype), sharding=sharding)
        for (name, (shape, dtype)), sharding in zip(
            described["arrays"].items(), shardings, strict=True
        )
    }
    try:
        arrays = ocp.load(str(path / "caches"), targets)
    except (OSError, ValueError, KeyError) as error:
        first = str(error).strip().splitlines()[0]
        raise CheckpointError(f"{path}: the cache arrays are damaged: {first}") from error
    caches = jax.tree.unflatten(jax.tree.structure(structure), [arrays[name] for name in targets])
    return Context(described["rows"], described["batch"], slots, reserve, total, caches)


def _made_by(engine: Engine) -> dict[str, Any]:
    described = {
        "model": engine.config.to_dict(),
        "dtype": jnp.dtype(engine.setup.dtype).name,
        "method": settings_of(engine.method),
    }
    # As JSON reads it back: tuples are lists there.
    return json.loads(json.dumps(described))


def _finished_caches(engine: Engine, batch: int, slots: int, reserve: int, total: jax.Array) -> Any:
    """Abstract caches after `finish`, for their structure."""
    setup = engine.setup
    empty = programs.abstract_caches(setup, batch, slots, reserve)
    return jax.eval_shape(lambda caches: programs.finish_context(setup, caches, total), empty)
