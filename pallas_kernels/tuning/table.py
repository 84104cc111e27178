"""Reading, looking up and writing a device's table of configurations.

The file holds `device`, `jax` (the version that measured it) and `entries`: by operation and class
of shapes a `config`, the `seconds` it took and the `default_seconds` of the kernel's default. A
file that cannot be read so is an error, not a fallback: it would go unnoticed.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from pallas_kernels import dispatch

FOLDER_VARIABLE = "JAX_LONGCTX_TUNING"

_WHAT_TO_DO = "delete it, or the entry, and run `jax-longctx bench kernels --tune`"
_logger = logging.getLogger("pallas_kernels")
# What `forced` has set: the operation's configuration and the classes looked up since.
_forced: dict[str, tuple[Any, set[str]]] = {}


class TuningError(ValueError):
    """A table of configurations that cannot be used as it is."""


class Entry(NamedTuple):
    """A configuration as keyword arguments, its seconds, and those of the default."""

    config: dict[str, Any]
    seconds: float
    default_seconds: float


Table = Mapping[str, Mapping[str, Entry]]


def shape_class(**sizes: int) -> str:
    """Shapes that share a configuration: every size rounded up to a power of two."""
    return ", ".join(f"{name} {1 << max(size - 1, 0).bit_length()}" for name, size in sizes.items())


def configured[C](operation: str, shapes: str, choices: Sequence[C]) -> C:
    """The device's configuration for these shapes, else the default.

    Args:
      shapes: a `shape_class`.
      choices: the kernel's configurations, dataclasses, the default first.

    Raises:
      TuningError: the device's table is malformed, or holds what is not one of the choices.
    """
    if operation in _forced:
        config, seen = _forced[operation]
        seen.add(shapes)
        return config
    path = path_of(dispatch.device_kind())
    entry = read(path).get(operation, {}).get(shapes)
    if entry is None:
        return choices[0]
    for config in choices:
        if dataclasses.asdict(config) == entry.config:  # pyright: ignore[reportArgumentType]
            _log_once(operation, shapes, str(config), path)
            return config
    raise TuningError(
        f"tuning table {path}: {operation}, {shapes}: {entry.config}; expected one of "
        f"{', '.join(map(str, choices))}; {_WHAT_TO_DO}"
    )


@contextlib.contextmanager
def forced(operation: str, config: Any) -> Iterator[set[str]]:
    """Within it the operation is traced with `config`; yields the classes that were looked up."""
    _forced[operation] = config, (seen := set[str]())
    try:
        yield seen
    finally:
        del _forced[operation]


def path_of(device_kind: str) -> Path:
    """The file of a device's table, which need not exist."""
    folder = os.environ.get(FOLDER_VARIABLE) or Path(__file__).parent
    return Path(folder) / (re.sub(r"[^a-z0-9]+", "-", device_kind.lower()).strip("-") + ".json")


def read(path: Path) -> Table:
    """The table of a file; an empty one where there is none.

    Raises:
      TuningError: it is not a table.
    """
    try:
        changed = path.stat().st_mtime_ns
    except FileNotFoundError:
        return {}
    return _parse(path, changed)


@functools.lru_cache
def _parse(path: Path, changed: int) -> Table:
    """Read once for each time that the file was changed."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))["entries"]
        return {
            operation: {shapes: _entry(fields) for shapes, fields in by_shapes.items()}
            for operation, by_shapes in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TuningError(
            f"tuning table {path}: {type(error).__name__}: {error}; expected JSON with `entries`: "
            f"operation -> shapes -> config, seconds, default_seconds; {_WHAT_TO_DO}"
        ) from error


def _entry(fields: Any) -> Entry:
    config = fields["config"]
    if not isinstance(config, dict):
        raise TypeError(f"config {config!r} is not an object")
    return Entry(config, float(fields["seconds"]), float(fields["default_seconds"]))


def write(path: Path, device_kind: str, table: Table) -> None:
    """Write a table, whole or not at all."""
    entries = {
        operation: {shapes: entry._asdict() for shapes, entry in sorted(by_shapes.items())}
        for operation, by_shapes in sorted(table.items())
    }
    text = json.dumps(dict(device=device_kind, jax=jax.__version__, entries=entries), indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(text + "\n", encoding="utf-8")
    unfinished.replace(path)


@functools.cache
def _log_once(operation: str, shapes: str, config: str, path: Path) -> None:
    _logger.info("%s, %s: %s (tuned, %s)", operation, shapes, config, path.name)
