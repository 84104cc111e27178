"""A converted checkpoint on disk: `manifest.json`, `params/` (Orbax) and `tokenizer/`.

`checkpoints_convert` writes it, everything else reads it here. The manifest is written last and
lists the files of `params/` with their sizes, so a checkpoint that lost something is refused by the
name of the file before a byte of it is read. Parameters are restored straight onto their shards.
"""

import contextlib
import dataclasses
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tensorstore as ts
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from jax_longctx.errors import CheckpointError
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import check_mesh, param_infos
from jax_longctx.sharding import logical_sharding

__all__ = [
    "MANIFEST",
    "PARAMS",
    "TOKENIZER",
    "Manifest",
    "TensorEntry",
    "list_files",
    "load_params",
    "quiet_orbax",
    "read_manifest",
    "restore",
    "why_unwritten",
]

FORMAT = 1
# Seconds that the other workers of a failed save or load are waited for.
WORKERS = 2.0
MANIFEST, PARAMS, TOKENIZER = "manifest.json", "params", "tokenizer"


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Shape and type that a parameter is stored in."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
      config: the model.
      dtype: of the parameters; where they differ, of most of the bytes.
      tensors: every parameter by its dot-joined path.
      source: what it was converted from.
      sources: every file that was read, by name, with its SHA-256.
      files: every file below `params/` with its size in bytes.
      tokenizer_files: names below `tokenizer/`.
      extras: entries of the source's config beside the model (token ids), for an export.
    """

    config: ModelConfig
    dtype: str
    tensors: Mapping[str, TensorEntry]
    source: str
    sources: Mapping[str, str]
    files: Mapping[str, int]
    tokenizer_files: tuple[str, ...]
    extras: Mapping[str, Any]

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["config"] = self.config.to_dict()
        fields["tensors"] = {
            path: dataclasses.asdict(entry) for path, entry in self.tensors.items()
        }
        return json.dumps({"format": FORMAT, **fields}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """Reads what `to_json` wrote; raises ValueError, KeyError or TypeError on anything else."""
        fields = json.loads(text)
        found = fields.pop("format")
        if found != FORMAT:
            raise ValueError(f"format {found}, expected {FORMAT}; convert the source again")
        fields["config"] = ModelConfig.from_dict(fields["config"])
        fields["tensors"] = {
            path: TensorEntry(tuple(entry["shape"]), entry["dtype"])
            for path, entry in fields["tensors"].items()
        }
        fields["tokenizer_files"] = tuple(fields["tokenizer_files"])
        return cls(**fields)


def read_manifest(directory: str | Path) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises:
      CheckpointError: the directory is no converted checkpoint.
    """
    path = Path(directory) / MANIFEST
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} is not a converted checkpoint (no {MANIFEST}); "
            f"make one: jax-longctx convert SOURCE DESTINATION"
        ) from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!s:.200}") from error


def load_params(directory: str | Path, mesh: Mesh, dtype: Any = None) -> dict[str, Any]:
    """The parameters as nested dicts of arrays, each restored straight onto its shards.

    Args:
      dtype: of every array; the manifest's unless given.

    Raises:
      CheckpointError: the checkpoint is incomplete, damaged, or not of the manifest's model.
      ConfigError: the model does not divide over the mesh.
    """
    manifest = read_manifest(directory)
    infos = param_infos(manifest.config)
    _check_entries(Path(directory), manifest, {path: info.shape for path, info in infos.items()})
    check_mesh(manifest.config, mesh)
    target = jnp.dtype(manifest.dtype if dtype is None else dtype)
    wanted = {
        path: jax.ShapeDtypeStruct(info.shape, target, sharding=logical_sharding(mesh, info.axes))
        for path, info in infos.items()
    }
    return restore(directory, manifest, wanted)


def restore(
    directory: str | Path, manifest: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, Any]:
    """Some or all parameters, as nested dicts.

    Raises:
      CheckpointError: the stored arrays are incomplete or damaged.
    """
    folder = Path(directory).absolute() / PARAMS
    _check_files(folder, manifest)
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    try:
        with quiet_orbax(), context:
            _check_store(folder, manifest)
            # Orbax itself leaves out what is missing, and fails on each wrong shape in a thread.
            _check_stored(folder, ocp.metadata(str(folder)).metadata, wanted)
            return ocp.load(str(folder), _nested(wanted))
    except (OSError, ValueError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{folder} is damaged: {first:.300}; convert again") from error


def list_files(folder: Path) -> dict[str, int]:
    """Every file below a folder with its size."""
    return {
        path.relative_to(folder).as_posix(): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Keeps Orbax from logging the trace of every worker thread beside the error it raises."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    threads = set(threading.enumerate())
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    except Exception:
        # Passed on, once Orbax's other workers have stopped.
        _await_threads(set(threading.enumerate()) - threads)
        raise
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def why_unwritten(error: Exception) -> str:
    """What kept Orbax from writing, in a few words: a full disk names a file of Orbax's own."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    if found is not None:
        return os.strerror(int(found[1]))
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


def _await_threads(threads: set[threading.Thread]) -> None:
    """Workers that fail after the first one would still log, and write, behind our back."""
    end = time.monotonic() + WORKERS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _check_entries(
    directory: Path, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]
) -> None:
    for path, shape in shapes.items():
        entry = manifest.tensors.get(path)
        if entry is None:
            raise CheckpointError(f"{directory / MANIFEST}: parameter {path} is missing")
        if entry.shape != shape:
            raise CheckpointError(
                f"{directory / MANIFEST}: parameter {path} has shape {list(entry.shape)}, "
                f"the config says {list(shape)}"
            )
    unknown = sorted(set(manifest.tensors) - set(shapes))
    if unknown:
        raise CheckpointError(f"{directory / MANIFEST}: parameter {unknown[0]} is unknown")


def _check_stored(folder: Path, stored: Any, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    for path, abstract in wanted.items():
        node = stored
        for name in path.split("."):
            node = node.get(name) if isinstance(node, Mapping) else None
        if node is None:
            raise CheckpointError(f"{folder} is damaged: it holds no {path}; convert again")
        if tuple(node.shape) != abstract.shape:
            raise CheckpointError(
                f"{folder} is damaged: {path} is stored with shape {list(node.shape)}, "
                f"expected {list(abstract.shape)}; convert again"
            )


def _check_store(folder: Path, manifest: Manifest) -> None:
    """Walks the index of the arrays; raises ValueError where it is damaged.

    Orbax would meet the damage in all reads at once, await the first and abandon the others, which
    then fail on their closed event loop.
    """
    for name in manifest.files:
        if name.count("/") == 1 and name.endswith("/manifest.ocdbt"):
            base = {"driver": "file", "path": f"{(folder / name).parent}/"}
            ts.KvStore.open({"driver": "ocdbt", "base": base}).result().list().result()


def _check_files(folder: Path, manifest: Manifest) -> None:
    for name, size in manifest.files.items():
        path = folder / name
        try:
            found = path.stat().st_size
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read: {error.strerror}; the checkpoint is damaged, convert again"
            ) from error
        if found != size:
            raise CheckpointError(
                f"{path} has {found} bytes, expected {size}; the checkpoint is damaged, "
                f"convert again"
            )


def _nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Dot-joined paths as nested dicts."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, leaf = path.split(".")
        node = tree
        for name in folders:
            node = node.setdefault(name, {})
        node[leaf] = value
    return tree
