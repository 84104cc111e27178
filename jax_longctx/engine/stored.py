"""Compiled programs on the disk that are found without being traced.

JAX's persistent cache is asked for a program after tracing and lowering it. On a GPU that takes one
to ten seconds for the programs of a first token, most of them for lowering kernels. Here a program
is found by what it is made of: the text of this library, the versions below it, the devices, the
static arguments, and the shapes, dtypes and shardings of the others. Programs of another package's
method are not stored. A program lies beside JAX's own, where the folder of the persistent cache is.

`program_files` says why a program is a pickle, and when it is not loaded.
"""

import dataclasses
import functools
import hashlib
import importlib
import logging
import os
import pickle
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding

from jax_longctx.engine.program_files import opened, store, trusted

# The packages whose text the programs are made of.
PACKAGES = ("jax_longctx", "pallas_kernels")
# Variables and settings that do not change a program.
_IRRELEVANT = re.compile("cache|log|traceback|debug_nans|dump", re.IGNORECASE)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_DIGEST = hashlib.sha256
_logger = logging.getLogger(__name__)


class Nameless(Exception):
    """A static argument has no description that another process would give it too."""


def folder(mesh: Mesh) -> Path | None:
    """Where programs are stored; None for those that JAX's own cache serves as well.

    These are a CPU's, which lower quickly, and those that several processes run together.
    """
    config = jax.config
    if not config.jax_enable_compilation_cache or config.jax_compilation_cache_dir is None:
        return None
    if mesh.devices.flat[0].platform == "cpu" or jax.process_count() > 1:
        return None
    where = Path(config.jax_compilation_cache_dir)
    # A folder in a bucket is none that `Path` can name.
    return where if "://" not in config.jax_compilation_cache_dir and trusted(where) else None


def path_of(where: Path, program: Any, mesh: Mesh, args: tuple[Any, ...]) -> Path | None:
    """The file of a program of these arguments; None where a static one cannot be described."""
    fixed, others = program.split(args)
    leaves, structure = jax.tree.flatten(others)
    try:
        described = [*_described(fixed)]
    except Nameless as error:
        _logger.info("%s is not stored: %s", program.name, error)
        return None
    parts = [program.name, _surroundings(mesh), *described, str(structure), *map(_shape, leaves)]
    digest = _DIGEST("\0".join(parts).encode()).hexdigest()
    return where / f"longctx-{digest}"


def write(path: Path, compiled: Any, results: Any) -> None:
    """Stores a compiled program; `results` are the shapes of its results.

    What cannot be written is left out, with a line in the log: the program is then compiled again.
    """
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type), results
    )
    try:
        payload, _, _ = serialize_executable.serialize(compiled)
        content = pickle.dumps((shapes, payload))
    except (ValueError, TypeError, pickle.PicklingError, RuntimeError) as e:
        # RuntimeErrors are JAX's, also of programs that it cannot store.
        _logger.info("%s is not stored: %s", path.name, e)
        return
    store(path, content)


def read(path: Path) -> tuple[Any, bytes] | None:
    """The shapes of a program's results, and the program as stored; None as `opened`."""
    content = opened(path)
    return None if content is None else pickle.loads(content)


def load(mesh: Mesh, payload: bytes, arguments: tuple[Any, ...], shapes: Any) -> Any:
    """The compiled program; call it with the arguments that are not static."""
    structures = jax.tree.structure((arguments, {})), jax.tree.structure(shapes)
    devices = list(mesh.devices.flat)
    return serialize_executable.deserialize_and_load(
        payload, *structures, execution_devices=devices
    )


def _surroundings(mesh: Mesh) -> str:
    device = mesh.devices.flat[0]
    settings = {
        name: str(value)
        for name, value in sorted(jax.config.values.items())
        if not _IRRELEVANT.search(name)
    }
    flags = [os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")]
    versions = *map(version, ("jax", "jaxlib", "flax")), device.client.platform_version
    return repr((_text_digest(), versions, device.device_kind, settings, flags))


@functools.cache
def _text_digest() -> str:
    digest = _DIGEST()
    for package in PACKAGES:
        root = Path(importlib.import_module(package).__path__[0])
        for file in sorted(root.rglob("*.py")):
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _described(value: Any) -> Iterator[str]:
    """A static argument in words that are the same in each process."""
    if isinstance(value, type) or (callable(value) and hasattr(value, "__qualname__")):
        yield f"{value.__module__}.{value.__qualname__}"
        if "<locals>" in value.__qualname__:
            raise Nameless(f"{value.__qualname__} is made while the process runs")
        if value.__module__.split(".")[0] not in (*PACKAGES, "jax", "jaxlib", "numpy", "builtins"):
            # Its text, and the text of all it uses, would have to be hashed.
            raise Nameless(f"{value.__module__} is of another package")
    elif isinstance(value, Mesh):
        shape = dict(value.shape)
        yield repr((shape, value.axis_types, [device.id for device in value.devices.flat]))
    elif dataclasses.is_dataclass(value):
        yield from _described(type(value))
        for field in dataclasses.fields(value):
            yield field.name
            yield from _described(getattr(value, field.name))
    elif isinstance(value, tuple | list):
        yield f"{type(value).__name__} of {len(value)}"
        for each in value:
            yield from _described(each)
    elif isinstance(value, dict):
        yield from _described(list(value.items()))
    else:
        text = f"{type(value).__name__} {value!r}"
        if _ADDRESS.search(text) or isinstance(value, np.ndarray | jax.Array):
            raise Nameless(f"{text:.60}")
        yield text


def _shape(leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return repr(leaf)
    placed = getattr(leaf, "committed", True)
    sharding = getattr(leaf, "sharding", None) if placed else None
    if isinstance(sharding, NamedSharding):
        where = "".join(_described(sharding.mesh)) + repr((sharding.spec, sharding.memory_kind))
    else:
        where = repr(sharding)
    return f"{np.shape(leaf)} {leaf.dtype} {getattr(leaf, 'weak_type', False)} {where}"
