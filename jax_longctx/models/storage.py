"""Checkpoints on disk: `manifest.json`, `params/` and `tokenizer/`, all with checksums.

`checkpoints_convert` and `train_cpt` write checkpoints, all else reads them here. Parameters are
restored straight onto their shards.

TensorStore writes arrays as Zarr 3 inside OCDBT, where Orbax puts and finds them. OCDBT has a
CRC-32C on its index and none on values, so every chunk of an array gets one of its own, which
TensorStore checks at each read. It does not say whose chunk that is. So the manifest has a digest
of each array: of the CRCs of its chunks, which loading reads apart (`array_digests`). The manifest
is written last. It lists the small files with their sizes and SHA-256, and holds a SHA-256 of
itself. Saved contexts and training checkpoints are stored by the same functions.
"""

import collections
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from flax import traverse_util
from jax import Array
from jax.experimental import multihost_utils

from jax_longctx.errors import CheckpointError, DamagedError
from jax_longctx.files import (
    first_line,
    read_sealed,
    reason,
    seal,
    sha256_of,
    whole_path,
)
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.for_orbax import describe
from jax_longctx.models.params import check_mesh, param_infos, quantised_weights, stored_paths
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import StoredForm

# 1 had no digests.
FORMAT = 2
# Of a checkpoint whose matrices are in 8 bits, which a reader of `FORMAT` alone does not know.
FORMAT_8_BITS = 3
REMEDY = "convert the source again"
MANIFEST, PARAMS, TOKENIZER = "manifest.json", "params", "tokenizer"
# Each file below a folder: its size, and its SHA-256, or None where TensorStore checks the file.
type Files = Mapping[str, list[Any]]

# Bytes of arrays that are written at once, read ahead of those placed on devices, or loaded before
# those among them that become 8 bits do.
PIECE = 1 << 30
# How Zarr stores a chunk.
BYTES, CHECKSUM = {"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}
SMALLER = ({"name": "zstd", "configuration": {"level": 3}},)
# The folder of arrays, in it OCDBT's folders of data files, and those of each of several processes.
STATE, DATA, OWN = "state", "d", "ocdbt.process_"
# TensorStore's errors that name bytes which are not what was written.
DAMAGE = re.compile(r"DATA_LOSS|OUT_OF_RANGE|NOT_FOUND|Error .*\bdecoding\b")


def describe_files(folder: Path) -> dict[str, list[Any]]:
    """Every file below a folder, for `check_files`."""
    return {
        path.relative_to(folder).as_posix(): [
            path.stat().st_size,
            None if path.parent.name == DATA else sha256_of(path),
        ]
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def check_files(folder: Path, files: Files, remedy: str) -> None:
    """Checks that files are what was written.

    Args:
      remedy: what to do about damage, for the error.

    Raises:
      DamagedError: a file is missing or has changed.
      CheckpointError: a file cannot be read, which says nothing of its bytes.
    """
    for name, (size, digest) in files.items():
        path = folder / name
        try:
            found = path.stat().st_size
            same = digest is None or found != size or sha256_of(path) == digest
        except (FileNotFoundError, NotADirectoryError) as error:
            raise DamagedError(f"{path} cannot be read: {error.strerror}; {remedy}") from error
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        if found != size:
            raise DamagedError(f"{path} is damaged: {found} bytes, expected {size}; {remedy}")
        if not same:
            raise DamagedError(
                f"{path} is damaged: its SHA-256 is not the one it was written with; {remedy}"
            )


def check_stored(folder: Path, files: Files, digests: Mapping[str, str], remedy: str) -> None:
    """`check_files` of a folder of arrays, and a check of whose chunks they have.

    Args:
      digests: of arrays by path (`array_digests`); empty for what earlier versions wrote.
    """
    check_files(folder, files, remedy)
    if not digests:
        return
    try:
        found = array_digests(folder / STATE)
    except (OSError, ValueError) as error:
        raise _unread(folder, error, remedy) from error
    except (AttributeError, LookupError, TypeError) as error:
        told = "an array is not described as it was written"
        raise DamagedError(f"{folder} is damaged: {told}; {remedy}") from error
    if differ := [path for path, digest in digests.items() if found.get(path) != digest]:
        raise DamagedError(
            f"{folder} is damaged: {differ[0]} has other chunks than it was written with; {remedy}"
        )


def array_digests(database: Path, only: Container[str] | None = None) -> dict[str, str]:
    """The digest of each array in a folder of OCDBT, or of those, by dot-joined path.

    It is the SHA-256 of the array's metadata and of its chunks' names and CRC-32Cs, which
    TensorStore compares with their bytes at each read. Here only the ends of chunks are read.

    Raises:
      OSError, ValueError: TensorStore cannot read them.
    """
    base = ts.KvStore.open({"driver": "file", "path": f"{whole_path(database)}/"}).result()
    root = ts.ocdbt.dump(base).result()["versions"][-1]["root"]
    arrays: dict[str, dict[str, Any]] = collections.defaultdict(dict)
    for key, entry in sorted(_entries(base, root)):
        path, _, part = key.decode().partition("/")
        if only is None or path in only:
            arrays[path][part] = entry
    ends: dict[str, list[tuple[str, Callable[[], bytes]]]] = {}
    for path, parts in arrays.items():
        described = _value(base, parts.pop("zarr.json"))
        metadata = json.loads(described())
        whole = metadata["chunk_grid"]["configuration"]["chunk_shape"]
        # A stored chunk is one chunk and its sum, and an index of 20 bytes.
        last = 24 if metadata["codecs"][0]["configuration"].get("chunk_shape") == whole else None
        ends[path] = [("", described)]
        ends[path] += [(part, _value(base, entry, last)) for part, entry in parts.items()]
    # All reads have begun.
    return {
        path: hashlib.sha256(b"".join(part.encode() + end() for part, end in found)).hexdigest()
        for path, found in ends.items()
    }


def _entries(
    base: Any, node: Mapping[str, Any], prefix: bytes = b""
) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each key below a node of OCDBT's tree, and its entry; no two keys are the same."""
    if "location" not in node:  # nothing is stored
        return
    found = ts.ocdbt.dump(base, node["location"]).result()
    for entry in found["entries"]:
        if found["height"]:
            yield from _entries(base, entry, prefix + entry["subtree_common_prefix"])
        else:
            yield prefix + entry["key"], entry


def _value(base: Any, entry: Mapping[str, Any], last: int | None = None) -> Callable[[], bytes]:
    """Begins to read an entry's value, or its `last` bytes; gives the bytes."""
    if "inline_value" in entry:
        value = entry["inline_value"][-last if last else 0 :]
        return lambda: value
    *file, offset, size = entry["indirect_value"].split(":")
    skipped = max(0, int(size) - last) if last else 0
    place = ":".join([*file, str(int(offset) + skipped), str(int(size) - skipped)])
    return ts.ocdbt.dump(base, place).result


def _unread(folder: Path, error: Exception, remedy: str) -> CheckpointError:
    """Why TensorStore could not read the arrays; it is damage only where it says so."""
    if DAMAGE.match(said := why_failed(error)):
        return DamagedError(f"{folder} is damaged: {said}; {remedy}")
    return CheckpointError(f"{folder} cannot be read: {said}")


def load_arrays(
    folder: Path, wanted: Mapping[str, jax.ShapeDtypeStruct], remedy: str
) -> dict[str, Any]:
    """Some or all of the arrays that `save_arrays` wrote below a folder, onto their shards.

    Each process reads what its shards need.

    Args:
      wanted: by dot-joined path, with shardings and the dtypes to cast to. An array without a
        sharding is numpy's.
      remedy: what to do about damage, for the error.

    Raises:
      DamagedError: an array is missing, damaged, or of another shape.
      CheckpointError: an array cannot be read, which says nothing of its bytes.
    """
    base = {"driver": "file", "path": f"{whole_path(folder) / STATE}/"}
    # The index of the arrays is read once.
    context = ts.Context({"cache_pool#index": {"total_bytes_limit": 100_000_000}})
    index = {"driver": "ocdbt", "base": base, "cache_pool": "cache_pool#index"}
    spec = {"driver": "zarr3", "fill_missing_data_reads": False}
    loaded: dict[str, Any] = {}
    reads: collections.deque[tuple[str, int, Callable[[], Any]]] = collections.deque()
    try:
        opened = {
            path: ts.open({**spec, "kvstore": {**index, "path": f"{path}/"}}, context=context)
            for path in wanted
        }
        stores = {path: future.result() for path, future in opened.items()}
        for path, store in stores.items():
            if (wrong := _check_store(path, store, wanted[path])) is not None:
                raise DamagedError(f"{folder} is damaged: {wrong}; {remedy}")
        for path, store in stores.items():
            reads.append((path, *_begin_read(store, wanted[path])))
            while sum(size for _, size, _ in reads) > PIECE:
                path, _, array = reads.popleft()
                loaded[path] = array()
        loaded.update((path, array()) for path, _, array in reads)
    except (OSError, ValueError) as error:
        raise _unread(folder, error, remedy) from error
    return loaded


def _check_store(path: str, store: Any, wanted: jax.ShapeDtypeStruct) -> str | None:
    """What of a stored array is not what its folder says; None for the right one."""
    if store.shape != wanted.shape:
        return f"{path} is stored with shape {(*store.shape,)}, expected {wanted.shape}"
    # Floats are cast to each other; 8 bits mean what their scales say.
    found, expected = store.dtype.name, jnp.dtype(wanted.dtype).name
    if found != expected and "int8" in (found, expected):
        return f"{path} is stored as {found}, expected {expected}"
    codec, *_ = store.spec().to_json()["metadata"]["codecs"]
    if CHECKSUM not in codec.get("configuration", {}).get("codecs", []):
        return f"{path} has no checksums"
    return None


def _begin_read(store: Any, wanted: jax.ShapeDtypeStruct) -> tuple[int, Callable[[], Any]]:
    """Starts to read this process's shards; returns their bytes, and a function for the array."""
    source, sharding = ts.cast(store, wanted.dtype), wanted.sharding
    if sharding is None:
        return wanted.size * wanted.dtype.itemsize, source.read().result
    placed = sharding.addressable_devices_indices_map(wanted.shape)  # pyright: ignore
    # A shard of several devices is read once.
    indices = {str(index): index for index in placed.values()}
    reads = {name: source[index].read() for name, index in indices.items()}
    shard = math.prod(sharding.shard_shape(wanted.shape))  # pyright: ignore

    def array() -> jax.Array:
        return jax.make_array_from_callback(
            wanted.shape, sharding, lambda index: reads[str(index)].result()
        )

    return len(reads) * shard * wanted.dtype.itemsize, array


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns errors of files and TensorStore into a CheckpointError: why `path` was not written."""
    try:
        yield
    except (OSError, ValueError) as error:  # ValueError: the disk is full
        raise CheckpointError(f"{path} could not be written: {why_failed(error)}") from error


def save_arrays(
    folder: Path, arrays: Mapping[str, Array | np.ndarray], *, compress: bool = False
) -> None:
    """Writes arrays below a folder, beside those that are there, for `load_arrays`.

    Each process writes what lies on its devices, and waits for the others; `join_arrays` is next.

    Args:
      arrays: by dot-joined path; of numpy in one process alone.
      compress: each chunk, with zstd. Weights hardly get smaller.

    Raises:
      OSError, ValueError: an array cannot be written; nothing is being written any more.
    """
    for piece in _pieces(arrays):
        finish_arrays(begin_arrays(folder, piece, compress=compress))


def begin_arrays(
    folder: Path, arrays: Mapping[str, Array | np.ndarray], *, compress: bool = False
) -> list[ts.WriteFutures]:
    """Begins what `save_arrays` does; the arrays are copied, so that they may change."""
    database = whole_path(folder) / STATE
    if jax.process_count() > 1:
        database /= f"{OWN}{jax.process_index()}"
    codecs = [BYTES, *(SMALLER if compress else ()), CHECKSUM]
    opened: list[tuple[Any, list[tuple[Any, Any]]]] = []
    for path, x in arrays.items():
        shards: list[tuple[Any, Any]] = [(..., x)]
        chunk: tuple[int, ...] = x.shape
        if isinstance(x, Array):
            shards = [(it.index, it.data) for it in x.addressable_shards if it.replica_id == 0]
            chunk = x.sharding.shard_shape(x.shape)
        metadata: dict[str, Any] = {"shape": x.shape, "data_type": x.dtype.name}
        grid, sharded = {"chunk_shape": chunk}, {"chunk_shape": chunk, "codecs": codecs}
        metadata["chunk_grid"] = {"name": "regular", "configuration": grid}
        metadata["codecs"] = [{"name": "sharding_indexed", "configuration": sharded}]
        spec = {"driver": "zarr3", "kvstore": {**_database(database), "path": f"{path}/"}}
        spec |= {"metadata": metadata, "store_data_equal_to_fill_value": True}
        opened.append((ts.open(spec, create=True, delete_existing=True), shards))
    begun: list[ts.WriteFutures] = []
    try:
        for store, shards in opened:
            begun += [store.result()[index].write(np.asarray(shard)) for index, shard in shards]
        # Together, so that they go into few files.
        for write in begun:
            write.commit.force()
        for write in begun:
            write.copy.result()
    except BaseException:
        for left in (*(store for store, _ in opened), *(write.commit for write in begun)):
            left.exception()
        raise
    return begun


def finish_arrays(begun: Iterable[ts.WriteFutures]) -> None:
    """Waits for all, and for other processes; raises the first error, as `save_arrays`."""
    errors = [error for write in begun if (error := write.commit.exception()) is not None]
    if errors:
        raise errors[0]
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("arrays are written")


def join_arrays(folder: Path) -> tuple[dict[str, list[Any]], dict[str, str]]:
    """Joins what all processes have written below a folder; its files, and its arrays' digests.

    The leader alone calls it.

    Raises:
      OSError, ValueError: they cannot be read or written.
    """
    database = whole_path(folder) / STATE
    if parts := sorted(database.glob(f"{OWN}*")):
        context = ts.Context()
        opened = [ts.KvStore.open(_database(path), context=context) for path in (database, *parts)]
        whole, *stores = (store.result() for store in opened)
        with ts.Transaction(atomic=True) as transaction:
            joined = whole.with_transaction(transaction)
            for copied in [store.experimental_copy_range_to(joined) for store in stores]:
                copied.result()
    digests = array_digests(database)
    describe(folder, STATE, digests)
    return describe_files(folder), digests


def _database(folder: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder}/"}}


def why_failed(error: Exception) -> str:
    """Why TensorStore failed, without the names of its internal files."""
    found = re.search(r"os_error_code='(\d+)'", str(error))
    if found is not None:
        error = OSError(int(found[1]), os.strerror(int(found[1])))
    if isinstance(error, OSError) and error.strerror:
        return reason(error)
    # After the bracket TensorStore gives a line of its source and the whole spec.
    return first_line(error).split(" [")[0]


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """A stored array; the digest (`array_digests`) is "" where an earlier version wrote it."""

    shape: tuple[int, ...]
    dtype: str
    digest: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contents of `manifest.json`.

    Attributes:
      config: the model.
      dtype: of the parameters; where they differ, of most of the bytes. Of matrices in 8 bits that
        of the numbers they were rounded from.
      tensors: each parameter by its dot-joined path; a matrix in 8 bits is two, `PATH.values` and
        `PATH.scales`.
      source: what the checkpoint was converted from.
      sources: SHA-256 of each source file, by name.
      files: files of `params/` (see `describe_files`).
      tokenizer_files: files of `tokenizer/`.
      extras: entries of the source's config besides the model (token ids), for an export.
      weights: the 8-bit form of the layers' matrices; None where all parameters are floats.
    """

    config: ModelConfig
    dtype: str
    tensors: Mapping[str, TensorEntry]
    source: str
    sources: Mapping[str, str]
    files: Files
    tokenizer_files: Files
    extras: Mapping[str, Any]
    weights: StoredForm | None = None

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        fields = dataclasses.asdict(self)
        if self.weights is None:
            # So that earlier versions read it.
            del fields["weights"]
        version = FORMAT if self.weights is None else FORMAT_8_BITS
        return json.dumps(seal(version, fields), indent=1)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Manifest":
        """The manifest with these fields; raises ValueError, KeyError or TypeError if damaged."""
        fields["config"] = ModelConfig.from_dict(fields["config"])
        fields["tensors"] = {
            path: TensorEntry(tuple(entry["shape"]), entry["dtype"], entry.get("digest", ""))
            for path, entry in fields["tensors"].items()
        }
        if fields.get("weights") not in (None, "int8"):
            raise ValueError(f"its weights are in {fields['weights']!r}")
        return cls(**fields)


def read_manifest(directory: str | Path) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises:
      CheckpointError: the directory is no converted checkpoint, or holds its matrices in fp8.
    """
    path = whole_path(directory) / MANIFEST
    try:
        fields = read_sealed(path, FORMAT, REMEDY, FORMAT_8_BITS)
        if fields.get("weights") == "fp8":
            raise CheckpointError(
                f"{directory} holds its matrices in fp8, which is not read any more; {REMEDY} with "
                f"--weights int8"
            )
        return Manifest.from_fields(fields)
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} is not a converted checkpoint (no {MANIFEST}); "
            f"make one: jax-longctx convert SOURCE DESTINATION"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{path} is damaged: {error!s:.200}; {REMEDY}") from error


def load_params(directory: str | Path, spec: RunSpec | None = None) -> dict[str, Any]:
    """The parameters as nested dicts of arrays, each restored straight onto its shards.

    They have the spec's dtype, on its mesh. Matrices that the spec wants in 8 bits are restored in
    pieces of about `PIECE` bytes, so the whole model is never in memory in that dtype. Those that
    are stored in 8 bits stay so.

    Raises:
      CheckpointError: the checkpoint is incomplete, damaged, or of another model than its manifest.
      ConfigError: the model does not divide over the mesh, or these weights are no form of it.
    """
    directory = whole_path(directory)
    manifest = read_manifest(directory)
    spec = (spec or RunSpec()).over(manifest.dtype, manifest.weights)
    mesh, dtype = spec.devices(), jnp.dtype(spec.dtype)
    check_mesh(manifest.config, mesh)
    shapes = {
        path: info.abstract(mesh, dtype, manifest.weights)
        for path, info in param_infos(manifest.config).items()
    }
    wanted: dict[str, jax.ShapeDtypeStruct] = {}
    for path, x in shapes.items():
        wanted |= stored_paths(path, x)
    _check_entries(directory / MANIFEST, manifest.tensors, wanted)
    folder = params_folder(directory, manifest)
    if spec.form in (None, manifest.weights):
        arrays = load_arrays(folder, wanted, REMEDY)
        params: dict[str, Any] = {}
        for path, x in shapes.items():
            stored = [arrays[each] for each in stored_paths(path, x)]
            params[path] = jax.tree.unflatten(jax.tree.structure(x), stored)
        return traverse_util.unflatten_dict(params, sep=".")
    found: dict[str, Any] = {}
    for piece in _pieces(wanted):
        params = traverse_util.unflatten_dict(load_arrays(folder, piece, REMEDY), sep=".")
        stored = quantised_weights(manifest.config, mesh, params)
        found |= traverse_util.flatten_dict(stored, sep=".")
    return traverse_util.unflatten_dict(found, sep=".")


def _check_entries(
    said: Path, entries: Mapping[str, TensorEntry], wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    """Raises CheckpointError where the manifest lists other arrays than the config asks for."""
    for path, array in wanted.items():
        entry = entries.get(path)
        if entry is None:
            raise CheckpointError(f"{said}: parameter {path} is missing; {REMEDY}")
        if entry.shape != array.shape:
            raise CheckpointError(
                f"{said}: parameter {path} has shape {list(entry.shape)}, "
                f"the config says {list(array.shape)}; {REMEDY}"
            )
    if unknown := sorted(set(entries) - set(wanted)):
        raise CheckpointError(f"{said}: parameter {unknown[0]} is unknown; {REMEDY}")


def _pieces[T: Any](arrays: Mapping[str, T]) -> Iterator[dict[str, T]]:
    """Arrays or their shapes in runs of at least `PIECE` bytes."""
    piece: dict[str, T] = {}
    size = 0
    for path, array in arrays.items():
        piece[path] = array
        size += array.size * array.dtype.itemsize
        if size >= PIECE:
            yield piece
            piece, size = {}, 0
    if piece:
        yield piece


def params_folder(directory: str | Path, manifest: Manifest) -> Path:
    """The folder of the parameters, after a check of its files and of whose arrays they hold.

    Raises:
      CheckpointError: it is incomplete or damaged.
    """
    folder = whole_path(directory) / PARAMS
    digests = {path: entry.digest for path, entry in manifest.tensors.items() if entry.digest}
    check_stored(folder, manifest.files, digests, REMEDY)
    return folder


def tokenizer_folder(directory: str | Path, manifest: Manifest) -> Path:
    """The folder of the tokenizer, after a check of its files.

    Raises:
      CheckpointError: a file is missing or damaged.
    """
    folder = whole_path(directory) / TOKENIZER
    check_files(folder, manifest.tokenizer_files, REMEDY)
    return folder
