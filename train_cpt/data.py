"""Training texts: documents cut into windows of L + S tokens, stored once, read by Grain.

A text file is one document; every line of a JSON-lines file is another, and every row of a Parquet
or Arrow file. A folder that `Dataset.save_to_disk` wrote has a `state.json`, which lists the files
that count; the splits of a `DatasetDict` are subfolders and are read alike, since texts are split
anew by their own hash. Files are read a piece at a time.

`prepare` reads documents, drops those that came before and those too short, and cuts the others
into windows that follow each other; what remains behind the last whole window is dropped and
counted. Which split a document goes to is decided by a hash of its text alone: the same in every
run, on every machine, whatever else is in the set, and no text is in two splits.

A data set is a folder:

    manifest.json      what was made of what, and every shard with its windows and SHA-256
    sources.jsonl      every file that was read, with its size and SHA-256
    train-00000.npy    windows [n, L + S] in uint16 or uint32, also dev-... and test-...

It is written under another name and moved when it is whole. Shards are memory-mapped: texts are
read from disk as they are asked for, by any number of processes. Grain shuffles and batches them;
its position is a small dict, which the training checkpoint keeps.
"""

import dataclasses
import hashlib
import importlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import grain
import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Int

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.models.storage import sha256_of

FORMAT = 1
MANIFEST, SOURCES = "manifest.json", "sources.jsonl"
SPLITS = ("train", "dev", "test")
# Bytes of a shard: a damaged one is found by reading that many.
SHARD_BYTES = 256 * 2**20
# Texts that no run reads through.
_ENDLESS = 1 << 48

TEXT_SUFFIXES = (".txt", ".md", ".rst")
LINES_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".parquet", ".arrow")
KINDS = (*TEXT_SUFFIXES, *LINES_SUFFIXES, *TABLE_SUFFIXES)
# What `Dataset.save_to_disk` leaves in its folder.
STATE = "state.json"
# Rows of a table that are in memory at once.
ROWS = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataManifest:
    """What a data set says about itself.

    Attributes:
      length: tokens of a window.
      dtype: that tokens are stored in.
      tokenizer: fingerprint of what made the tokens.
      shares: of the documents that went to each split.
      shards: for each split (name, windows, SHA-256).
      documents: how many were used, and how many dropped as `short` or as `repeated`.
      dropped_tokens: behind the last whole windows.
    """

    length: int
    dtype: str
    tokenizer: str
    shares: tuple[float, float, float]
    shards: dict[str, list[tuple[str, int, str]]]
    documents: dict[str, int]
    dropped_tokens: int

    def windows(self, split: str) -> int:
        """Windows of a split."""
        return sum(count for _, count, _ in self.shards[split])


def split_of(text: str, shares: tuple[float, float, float]) -> str:
    """The split of a document: its hash, as a number from 0 to 1, among the splits' shares."""
    point = int.from_bytes(_text_digest(text)[:8], "big") / 2**64
    bounds = np.cumsum(shares)
    return SPLITS[min(int(np.searchsorted(bounds, point, side="right")), len(SPLITS) - 1)]


def prepare(
    documents: Iterable[tuple[str, str]],
    encode: Callable[[str], list[int]],
    directory: Path,
    *,
    length: int,
    vocab_size: int,
    tokenizer: str,
    shares: tuple[float, float, float] = (0.8, 0.1, 0.1),
    shard_bytes: int = SHARD_BYTES,
    sources: Iterable[Mapping[str, Any]] = (),
) -> DataManifest:
    """Writes a data set.

    Args:
      documents: (name, text).
      encode: text to ids below `vocab_size`.
      length: tokens of a window.
      tokenizer: what `encode` is known by, for the manifest.
      sources: what is recorded of each file read (`file_record`).

    Raises:
      ConfigError: the length or the shares make no sense.
      InputError: the folder exists already, or no document is long enough for the training split.
    """
    if length < 2:
        raise ConfigError(f"data: a window needs at least 2 tokens, got {length}")
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ConfigError(f"data: shares of {', '.join(SPLITS)} must add up to 1, got {shares}")
    if directory.exists():
        raise InputError(f"{directory} exists already; nothing was overwritten, name another")
    building = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    building.mkdir(parents=True)
    try:
        dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
        rows = max(1, shard_bytes // (length * dtype.itemsize))
        writers = {split: _Writer(building, split, rows, dtype) for split in SPLITS}
        counts = {"used": 0, "short": 0, "repeated": 0}
        seen, dropped, longest = set(), 0, 0
        for _, text in documents:
            digest = _text_digest(text)
            if digest in seen:
                counts["repeated"] += 1
                continue
            seen.add(digest)
            tokens = encode(text)
            longest = max(longest, len(tokens))
            if len(tokens) < length:
                counts["short"] += 1
                continue
            counts["used"] += 1
            rest = len(tokens) % length
            dropped += rest
            windows = np.array(tokens[: len(tokens) - rest], np.int64).reshape(-1, length)
            writers[split_of(text, shares)].add([*windows])
        for writer in writers.values():
            writer.add((), last=True)
        shards = {split: writer.shards for split, writer in writers.items()}
        if not shards["train"]:
            raise InputError(
                f"no training text: of {counts['used'] + counts['short']} documents "
                f"{counts['used']} have the {length} tokens that a window takes (the longest has "
                f"{longest}), none of them in the training split; give longer documents or a "
                f"smaller length"
            )
        manifest = DataManifest(
            length=length,
            dtype=dtype.name,
            tokenizer=tokenizer,
            shares=shares,
            shards=shards,
            documents=counts,
            dropped_tokens=dropped,
        )
        with (building / SOURCES).open("w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(source)}\n" for source in sources)
        fields = {"format": FORMAT, **dataclasses.asdict(manifest)}
        (building / MANIFEST).write_text(json.dumps(fields, indent=1), encoding="utf-8")
        building.rename(directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return manifest


def _text_digest(text: str) -> bytes:
    # JSON can hold half a surrogate pair.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class _Writer:
    """Collects a split's windows and writes a shard for every so many."""

    def __init__(self, folder: Path, split: str, rows: int, dtype: np.dtype):
        self.folder, self.split, self.rows, self.dtype = folder, split, rows, dtype
        self.waiting: list[np.ndarray] = []
        self.shards: list[tuple[str, int, str]] = []

    def add(self, windows: Sequence[np.ndarray], *, last: bool = False) -> None:
        self.waiting.extend(windows)
        while len(self.waiting) >= self.rows or (last and self.waiting):
            own, self.waiting = self.waiting[: self.rows], self.waiting[self.rows :]
            name = f"{self.split}-{len(self.shards):05}.npy"
            np.save(self.folder / name, np.stack(own).astype(self.dtype))
            self.shards.append((name, len(own), sha256_of(self.folder / name)))


class Windows:
    """The windows of one split, `[length]` int32 each, read from memory-mapped shards."""

    def __init__(self, shards: list[np.ndarray]):
        self._shards = shards
        self._ends = np.cumsum([len(shard) for shard in shards], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: SupportsIndex) -> np.ndarray:
        at = int(index)
        if not 0 <= at < len(self):
            raise IndexError(f"window {at} of {len(self)}")
        number = int(np.searchsorted(self._ends, at, side="right"))
        shard = self._shards[number]
        return np.asarray(shard[at - int(self._ends[number]) + len(shard)], np.int32)


def open_windows(directory: Path, split: str, *, length: int, tokenizer: str) -> Windows:
    """The windows of a split, every shard of it checked against the manifest.

    Raises:
      InputError: the folder is no data set, was made for another length or tokenizer, or a shard
        is missing or damaged.
    """
    manifest = read_manifest(directory)
    if manifest.length != length:
        raise InputError(
            f"{directory} holds windows of {manifest.length} tokens, the run asks for {length}; "
            f"prepare the data again for this length"
        )
    if manifest.tokenizer != tokenizer:
        raise InputError(f"{directory} was made with another tokenizer; prepare the data again")
    shards = []
    for name, _, digest in manifest.shards[split]:
        path = directory / name
        try:
            found = sha256_of(path)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}; prepare again") from error
        if found != digest:
            raise InputError(
                f"{path} is damaged (SHA-256 {found[:12]}, expected {digest[:12]}); prepare again"
            )
        shards.append(np.load(path, mmap_mode="r"))
    return Windows(shards)


def read_manifest(directory: Path) -> DataManifest:
    """What a data set says about itself; raises InputError where there is none."""
    path = directory / MANIFEST
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = fields.pop("format")
        if found != FORMAT:
            raise ValueError(f"format {found}, expected {FORMAT}")
        fields["shares"] = tuple(fields["shares"])
        fields["shards"] = {
            split: [(str(name), int(count), str(digest)) for name, count, digest in shards]
            for split, shards in fields["shards"].items()
        }
        return DataManifest(**fields)
    except FileNotFoundError:
        raise InputError(f"{directory} is not a prepared data set (no {MANIFEST})") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is damaged: {error!s:.200}; prepare the data again") from error


def batches(
    windows: Windows, *, micro_batches: int, rows: int, seed: int, part: tuple[int, int] = (0, 1)
) -> Any:
    """An endless Grain iterator of this process's part of each global batch, `[A, B, T]` int32.

    Every epoch has its own order, the same whatever the number of processes. `get_state()` is a
    small dict with the position, `set_state` takes it back.

    Args:
      micro_batches: A, into which a global batch is divided.
      rows: texts of a micro-batch over all processes, of which B = rows / parts come here.
      part: which part of a global batch this process reads, and of how many (`own_part`).
    """
    number, parts = part
    if rows % parts:
        raise ConfigError(f"data: {rows} texts do not divide over {parts} processes")
    if not len(windows):
        raise InputError("data: this split has no text")

    def own_part(batch: np.ndarray) -> np.ndarray:
        whole = batch.reshape(micro_batches, rows, -1)
        share = rows // parts
        return whole[:, number * share : (number + 1) * share]

    source: Any = windows
    # Grain counts batches in floats, and its own endless repeat overflows with batches of one.
    data = grain.MapDataset.source(source).seed(seed).shuffle().repeat(_ENDLESS // len(windows) + 1)
    data = data.batch(micro_batches * rows).map(own_part)
    return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))


def own_part(mesh: Mesh) -> tuple[int, int]:
    """(part, parts): which part of a batch's texts this process's devices hold, of how many.

    Processes whose devices share texts (those of one `tensor` group) have the same part.

    Raises:
      ConfigError: processes do not hold equal runs of the `data` axis.
    """
    owners = np.vectorize(lambda device: device.process_index)(mesh.devices)
    return part_of(jax.process_index(), owners)


def part_of(process: int, owners: Int[np.ndarray, "data seq tensor"]) -> tuple[int, int]:
    """`own_part` of a process, from which process owns each device of the mesh."""
    own = np.flatnonzero(np.any(owners == process, axis=(1, 2)))
    shards, width = len(owners), len(own)
    if not width or shards % width or own[0] % width or own[-1] - own[0] + 1 != width:
        raise ConfigError(
            f"process {process} holds shards {own.tolist()} of mesh axis data={shards}; "
            f"give each process the same number of them, next to each other"
        )
    return int(own[0]) // width, shards // width


def own_rows(mesh: Mesh, rows: int) -> slice:
    """Which of a batch's `rows` texts this process's devices hold."""
    part, parts = own_part(mesh)
    share = rows // parts
    return slice(part * share, (part + 1) * share)


def document_files(sources: Iterable[Path]) -> list[Path]:
    """The files of the sources, in a fixed order; folders are searched for all kinds.

    Raises:
      InputError: a source is missing, a file that is named itself is of another kind, or a
        `state.json` cannot be read.
    """
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            found += _files_below(source)
        elif not source.exists():
            raise InputError(
                f"{source} does not exist; give files or folders of text, JSON lines or Parquet"
            )
        elif source.suffix not in KINDS:
            raise InputError(
                f"{source} is no kind of document that is read here; expected {', '.join(KINDS)}"
            )
        else:
            found.append(source)
    return found


def read_documents(files: Iterable[Path], field: str = "text") -> Iterator[tuple[str, str]]:
    """(name, text) of every document of `document_files`.

    Args:
      field: where a JSON object, or a row, has its text.

    Raises:
      InputError: a file cannot be read, is damaged, or has no such field of text; pyarrow is
        missing where there are tables.
    """
    for path in files:
        try:
            if path.suffix in LINES_SUFFIXES:
                yield from _lines(path, field)
            elif path.suffix in TABLE_SUFFIXES:
                yield from _rows(path, field)
            else:
                yield str(path), _read(path)
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from error


def file_record(path: Path) -> dict[str, Any]:
    """Name, size and SHA-256 of a file, JSON-able; raises InputError where it cannot be read."""
    try:
        return {"path": str(path), "bytes": path.stat().st_size, "sha256": sha256_of(path)}
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _files_below(folder: Path) -> list[Path]:
    states = {path.parent: _listed(path) for path in folder.rglob(STATE)}
    # Beside the listed files there may be caches of transformations.
    others = [
        path
        for path in folder.rglob("*")
        if path.suffix in KINDS
        and path.is_file()
        and (path.suffix != ".arrow" or path.parent not in states)
    ]
    return sorted([*others, *(path for listed in states.values() for path in listed)])


def _listed(state: Path) -> list[Path]:
    """The files of a saved `Dataset`; none where the file is somebody else's."""
    try:
        fields = json.loads(state.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{state} cannot be read: {error}") from error
    entries = fields.get("_data_files", []) if isinstance(fields, dict) else []
    return [state.parent / entry["filename"] for entry in entries]


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from error


def _lines(path: Path, field: str) -> Iterator[tuple[str, str]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                value = json.loads(line)
            except ValueError as error:  # bad UTF-8 too
                raise InputError(f"{where}: this line is not JSON: {error}") from error
            text = value.get(field) if isinstance(value, dict) else None
            if not isinstance(text, str):
                raise InputError(
                    f"{where}: expected an object with a text {field!r}; name the field"
                )
            yield where, text


def _rows(path: Path, field: str) -> Iterator[tuple[str, str]]:
    """Every row of a Parquet or Arrow file."""
    arrow = _pyarrow("pyarrow")
    try:
        texts = itertools.chain.from_iterable(_columns(path, field))
        for number, text in enumerate(texts, start=1):
            if not isinstance(text, str):
                raise InputError(f"{path}: row {number} has no text {field!r}; drop such rows")
            yield f"{path}:{number}", text
    except arrow.ArrowException as error:
        raise InputError(f"{path} is damaged: {str(error).splitlines()[0]:.200}") from error


def _columns(path: Path, field: str) -> Iterator[Sequence[Any]]:
    """The texts of a file, some rows at a time."""
    arrow = _pyarrow("pyarrow")
    if path.suffix == ".parquet":
        with _pyarrow("pyarrow.parquet").ParquetFile(path) as table:
            _check_column(path, field, table.schema_arrow, arrow)
            for batch in table.iter_batches(batch_size=ROWS, columns=[field]):
                yield batch.column(0).to_pylist()
        return
    # Arrow's streaming format, which `datasets` writes.
    with arrow.memory_map(str(path)) as source, arrow.ipc.open_stream(source) as batches:
        _check_column(path, field, batches.schema, arrow)
        for batch in batches:
            for start in range(0, batch.num_rows, ROWS):
                yield batch.column(field).slice(start, ROWS).to_pylist()


def _check_column(path: Path, field: str, schema: Any, arrow: Any) -> None:
    """Raises InputError unless there is one column of that name, of text."""
    if field not in schema.names:
        raise InputError(
            f"{path} has no column {field!r} but {', '.join(schema.names)}; name the field"
        )
    kind = schema.field(field).type
    if kind not in (arrow.string(), arrow.large_string(), arrow.string_view()):
        raise InputError(f"{path}: column {field!r} is of {kind}, expected text; name the field")


def _pyarrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise InputError(
            f"Parquet and `datasets` folders need the package {error.name}; install it: "
            f"pip install 'jax-longctx[parquet]'"
        ) from error
