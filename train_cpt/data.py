"""Training texts: documents cut into windows of L + S tokens, stored once, read by Grain.

A text file is one document. Each line of a JSON-lines file is one, and so is each row of a Parquet
or Arrow file. A folder written by `Dataset.save_to_disk` has a `state.json`, which lists its files;
the splits of a `DatasetDict` are subfolders. All splits are read alike, since `prepare` splits
documents anew. Files are read in pieces.

`prepare` leaves out repeated and short documents and cuts each of the others into consecutive
windows. Tokens behind the last whole window are dropped and counted. The split of a document
depends on a hash of its text alone: it is the same in every run, on every machine and beside any
other documents, and no text is in two splits.

A data set is a folder:

    manifest.json    how the data set was made, the windows of each split, SHA-256 of its file
    sources.jsonl    each source file with its size and SHA-256
    train.npy        windows [n, L + S] in uint16 or uint32, also dev.npy and test.npy

It is written under another name and renamed at the end. Splits are memory-mapped, so any number of
processes read only the texts they need. Grain shuffles the numbers of the texts; its position is a
small dict, which the training checkpoint holds.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import numpy as np
from jaxtyping import Integer

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.files import (
    check_plain,
    check_text,
    file_errors,
    open_plain,
    read_sealed,
    read_text,
    reason,
    seal,
    sha256_of,
)
from jax_longctx.jobs import lines
from jax_longctx.origin import check_same

# 1 had several files a split and no digest of its own.
FORMAT = 2
MANIFEST, SOURCES = "manifest.json", "sources.jsonl"
SPLITS = ("train", "dev", "test")
# More texts than any run reads.
_ENDLESS = 1 << 48

TEXT_SUFFIXES = (".txt", ".md", ".rst")
LINES_SUFFIXES = (".jsonl", ".ndjson")
TABLE_SUFFIXES = (".parquet", ".arrow")
SUFFIXES = (*TEXT_SUFFIXES, *LINES_SUFFIXES, *TABLE_SUFFIXES)
# Written by `Dataset.save_to_disk`.
STATE = "state.json"
# Rows of a table that are in memory at once.
ROWS = 64

Windows = Integer[np.ndarray, "_ T"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """A prepared data set, and its sources if it must be made.

    Attributes:
      length: tokens of a text, L + S.
      sources: files or folders of text, JSON lines, Parquet, or saved `datasets`.
      field: where JSON lines and tables have their text.
      shares: of the documents that go to train, dev and test.
    """

    directory: Path
    length: int
    sources: tuple[Path, ...] = ()
    field: str = "text"
    shares: tuple[float, float, float] = (0.8, 0.1, 0.1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataManifest:
    """The contents of `manifest.json`.

    Attributes:
      length: tokens of a window.
      tokenizer: fingerprint of the tokenizer.
      shares: of the documents requested for each split.
      windows: of each split.
      digests: SHA-256 of each split's file.
      documents: counts of the documents `used`, and left out as `short` or as `repeated`.
      dropped_tokens: tokens behind the last whole windows.
      field: where JSON lines and tables had their text; earlier versions do not say.
    """

    length: int
    tokenizer: str
    shares: Sequence[float]
    windows: dict[str, int]
    digests: dict[str, str]
    documents: dict[str, int]
    dropped_tokens: int
    field: str | None = None


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
    field: str | None = None,
    sources: Iterable[Mapping[str, Any]] = (),
) -> DataManifest:
    """Writes a data set.

    Args:
      documents: (name, text).
      encode: text to ids.
      length: tokens of a window.
      tokenizer: fingerprint of the tokenizer, for the manifest.
      field: of the text in JSON lines and tables, for the manifest.
      sources: records of the files read (`file_record`).

    Raises:
      ConfigError: the length or the shares make no sense.
      InputError: the folder exists already, a document has an id of `vocab_size` or more, or none
        is long enough for the training split.
    """
    if length < 2:
        raise ConfigError(f"data: a window needs at least 2 tokens, got {length}")
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ConfigError(f"data: shares of {', '.join(SPLITS)} must add up to 1, got {shares}")
    if directory.exists():
        raise InputError(f"{directory} exists already; nothing was overwritten, name another")
    building = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    with file_errors(f"{directory} could not be written"):
        building.mkdir(parents=True)
    dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
    counts = {"used": 0, "short": 0, "repeated": 0, "dropped": 0, "longest": 0}
    try:
        with file_errors(f"{directory} could not be written"):
            found = _cut(documents, encode, length, vocab_size, counts)
            by_split = ((split_of(text, shares), tokens) for text, tokens in found)
            windows = _write_splits(building, by_split, length, dtype)
            dropped, longest = counts.pop("dropped"), counts.pop("longest")
            if not windows["train"]:
                raise InputError(
                    f"no training text: of {counts['used'] + counts['short']} documents "
                    f"{counts['used']} have the {length} tokens of a window (the longest has "
                    f"{longest}), none of them in the training split; give longer documents or a "
                    f"smaller length"
                )
            manifest = DataManifest(
                length=length,
                tokenizer=tokenizer,
                shares=shares,
                windows=windows,
                digests={split: sha256_of(_split_file(building, split)) for split in SPLITS},
                documents=counts,
                dropped_tokens=dropped,
                field=field,
            )
            with (building / SOURCES).open("w", encoding="utf-8") as file:
                file.writelines(f"{json.dumps(source)}\n" for source in sources)
            fields = seal(FORMAT, dataclasses.asdict(manifest))
            (building / MANIFEST).write_text(json.dumps(fields, indent=1), encoding="utf-8")
            building.rename(directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return manifest


def _cut(
    documents: Iterable[tuple[str, str]],
    encode: Callable[[str], list[int]],
    length: int,
    vocab_size: int,
    counts: dict[str, int],
) -> Iterator[tuple[str, list[int]]]:
    """(text, tokens of its whole windows) of each document used; updates `counts`."""
    seen = set()
    for name, text in documents:
        digest = _text_digest(text)
        if digest in seen:
            counts["repeated"] += 1
            continue
        seen.add(digest)
        tokens = encode(text)
        if (largest := max(tokens, default=0)) >= vocab_size:
            raise InputError(
                f"{name} holds token id {largest}, the model has {vocab_size} embeddings; leave "
                f"that token out of the document, or use the checkpoint's tokenizer"
            )
        counts["longest"] = max(counts["longest"], len(tokens))
        rest = len(tokens) % length
        if rest == len(tokens):
            counts["short"] += 1
            continue
        counts["used"] += 1
        counts["dropped"] += rest
        yield text, tokens[: len(tokens) - rest]


def _write_splits(
    folder: Path, found: Iterable[tuple[str, list[int]]], length: int, dtype: np.dtype
) -> dict[str, int]:
    """Writes a file a split from (split, tokens of whole windows); returns the windows of each."""
    windows: dict[str, int] = dict.fromkeys(SPLITS, 0)
    with contextlib.ExitStack() as stack:
        files: dict[str, Any] = {
            split: stack.enter_context(_split_file(folder, split).open("wb")) for split in SPLITS
        }

        def write_headers() -> None:
            for split, file in files.items():
                shape = (windows[split], length)
                header = {"descr": dtype.str, "fortran_order": False, "shape": shape}
                file.seek(0)
                np.lib.format.write_array_header_1_0(file, header)

        write_headers()
        for split, tokens in found:
            files[split].write(np.array(tokens, dtype).data)
            windows[split] += len(tokens) // length
        # The number of windows is known now; numpy's headers have room for any.
        write_headers()
    return windows


def _split_file(directory: Path, split: str) -> Path:
    return directory / f"{split}.npy"


def _text_digest(text: str) -> bytes:
    # JSON can hold half a surrogate pair.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


def open_windows(directory: Path, split: str, *, length: int, tokenizer: str) -> Windows:
    """The windows of a split, memory-mapped, after a check of the file against the manifest.

    Raises:
      InputError: the folder is no data set, was made for another length or tokenizer, or the
        split's file is missing or damaged.
      CheckpointError: the manifest is damaged, or of another version.
    """
    manifest = read_manifest(directory)
    if manifest.length != length:
        raise InputError(
            f"{directory} holds windows of {manifest.length} tokens, the run asks for {length}; "
            f"prepare the data again for this length"
        )
    if manifest.tokenizer != tokenizer:
        raise InputError(f"{directory} was made with another tokenizer; prepare the data again")
    path, expected = _split_file(directory, split), manifest.digests[split]
    with file_errors(f"{path} cannot be read", "prepare again"):
        found = sha256_of(path)
    if found != expected:
        raise InputError(
            f"{path} is damaged (SHA-256 {found[:12]}, expected {expected[:12]}); prepare again"
        )
    return np.load(path, mmap_mode="r")


def read_manifest(directory: Path) -> DataManifest:
    """The manifest of a data set.

    Raises:
      InputError: the folder is no data set.
      CheckpointError: the manifest is damaged, or of another version.
    """
    try:
        return DataManifest(**read_sealed(directory / MANIFEST, FORMAT, "prepare the data again"))
    except FileNotFoundError:
        raise InputError(f"{directory} is not a prepared data set (no {MANIFEST})") from None
    except TypeError:  # of other fields, as a checkpoint's
        raise InputError(
            f"{directory} is not a prepared data set (its {MANIFEST} is of something else); name "
            f"the folder in which jax-longctx train prepared one"
        ) from None


def check_made_from(config: DataConfig) -> None:
    """Checks that a data set was made from its configuration's sources.

    Raises:
      OriginError: it was made from other files, or in another way.
      InputError: a source, or the data set's list of them, cannot be read.
    """
    if not config.sources:
        # It is taken as it is.
        return
    manifest, path = read_manifest(config.directory), config.directory / SOURCES
    known: dict[str, Any] = {"shares": manifest.shares, "field": manifest.field or config.field}
    given: dict[str, Any] = {"shares": config.shares, "field": config.field}

    def digests(records: Iterable[Mapping[str, Any]]) -> dict[str, str]:
        return {record["path"]: record["sha256"][:16] for record in records}

    try:
        with file_errors(f"{path} cannot be read", "prepare the data again"):
            before = digests(lines.read(path))
    except (ValueError, LookupError, TypeError) as error:
        raise InputError(f"{path} is damaged: {error}; prepare the data again") from error
    try:
        now = digests(map(file_record, document_files(config.sources)))
    except InputError as error:
        told = f"{error}; or leave sources out to take {config.directory} as it is"
        raise InputError(told) from error
    # A file that was moved is the same.
    if before and sorted(before.values()) != sorted(now.values()):
        known["sources"], given["sources"] = before, now
    remedy = "name another [data] directory, or leave sources out to take it as it is"
    check_same(config.directory, known, given, remedy)


def batches(windows: Windows, *, micro_batches: int, rows: int, seed: int) -> Any:
    """An endless Grain iterator of global batches: numbers of windows, `[A, B]`.

    Each epoch has an order of its own. `get_state()` is a small dict with the position, and
    `set_state` takes it.

    Args:
      micro_batches: A.
      rows: B, texts of a micro-batch over all processes.
    """
    if not len(windows):
        raise InputError("data: this split has no text")
    numbers = grain.MapDataset.range(len(windows)).seed(seed).shuffle()
    # Grain counts batches in floats, and its own endless repeat overflows with batches of one.
    numbers = numbers.repeat(_ENDLESS // len(windows) + 1).batch(micro_batches * rows)
    numbers = numbers.map(lambda batch: batch.reshape(micro_batches, rows))
    # Numbers take no time to make: Grain would make 500 batches ahead, in 16 threads.
    at_once = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(numbers.to_iter_dataset(at_once))


def document_files(sources: Iterable[Path]) -> list[Path]:
    """The files of the sources, in a fixed order; folders are searched for all known suffixes.

    Raises:
      InputError: a source is missing, a named file has another suffix, or a `state.json` cannot be
        read.
    """
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            found += _files_below(source)
        elif not source.exists():
            raise InputError(
                f"{source} does not exist; give files or folders of text, JSON lines or Parquet"
            )
        elif source.suffix not in SUFFIXES:
            raise InputError(f"{source} has an unknown suffix; expected {', '.join(SUFFIXES)}")
        else:
            found.append(source)
    return found


def read_documents(files: Iterable[Path], field: str = "text") -> Iterator[tuple[str, str]]:
    """(name, text) of each document in `files` (see `document_files`).

    Args:
      field: of the text in a JSON object or a row.

    Raises:
      InputError: a file cannot be read, is damaged or lacks the field; or there are tables and
        pyarrow is not installed.
    """
    for path in files:
        with file_errors(f"{path} cannot be read"):
            check_plain(path)
            if path.suffix in LINES_SUFFIXES:
                yield from _lines(path, field)
            elif path.suffix in TABLE_SUFFIXES:
                yield from _rows(path, field)
            else:
                yield str(path), _read(path)


def file_record(path: Path) -> dict[str, Any]:
    """Name, size and SHA-256 of a file, JSON-able; raises InputError where it cannot be read."""
    with file_errors(f"{path} cannot be read"):
        return {"path": str(path), "bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _files_below(folder: Path) -> list[Path]:
    states = {path.parent: _listed(path) for path in folder.rglob(STATE)}
    # Other Arrow files beside the listed ones are caches of transformations.
    others = [
        path
        for path in folder.rglob("*")
        if path.suffix in SUFFIXES
        and path.is_file()
        and (path.suffix != ".arrow" or path.parent not in states)
    ]
    return sorted([*others, *(path for listed in states.values() for path in listed)])


def _listed(state: Path) -> list[Path]:
    """The files that a saved `Dataset` lists; none where `state.json` is another program's."""
    try:
        fields = json.loads(read_text(state))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{state} cannot be read: {reason(error)}") from error
    entries = fields.get("_data_files", []) if isinstance(fields, dict) else []
    return [state.parent / entry["filename"] for entry in entries]


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start})") from error


def _lines(path: Path, field: str) -> Iterator[tuple[str, str]]:
    with open_plain(path) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                value = json.loads(line)
            except (ValueError, RecursionError) as error:  # bad UTF-8 too
                raise InputError(f"{where}: this line is not JSON: {error}") from error
            text = value.get(field) if isinstance(value, dict) else None
            if not isinstance(text, str):
                raise InputError(
                    f"{where}: expected an object with a text {field!r}; name the field"
                )
            check_text(text, where)
            yield where, text


def _rows(path: Path, field: str) -> Iterator[tuple[str, str]]:
    """Each row of a Parquet file, or of an Arrow stream, which `datasets` writes."""
    try:
        import pyarrow as arrow
        from pyarrow import ipc, parquet
    except ModuleNotFoundError as error:
        raise InputError(
            f"Parquet and `datasets` folders need the package {error.name}; install it: "
            f"pip install 'jax-longctx[parquet]'"
        ) from error
    try:
        if path.suffix == ".parquet":
            table = parquet.ParquetFile(path)
            schema = table.schema_arrow
            batches = table.iter_batches(batch_size=ROWS, columns=[field])
        else:
            table = batches = ipc.open_stream(arrow.memory_map(str(path)))
            schema = table.schema
        with table:
            if field not in schema.names:
                raise InputError(
                    f"{path} has no column {field!r} but {', '.join(schema.names)}; name the field"
                )
            found = schema.field(field).type
            if found not in (arrow.string(), arrow.large_string(), arrow.string_view()):
                raise InputError(
                    f"{path}: column {field!r} is of {found}, expected text; name the field"
                )
            number = 0
            for batch in batches:
                for start in range(0, batch.num_rows, ROWS):
                    for text in batch.column(field).slice(start, ROWS).to_pylist():
                        number += 1
                        if text is None:
                            raise InputError(
                                f"{path}: row {number} has no text {field!r}; drop such rows"
                            )
                        yield f"{path}:{number}", text
    except arrow.ArrowException as error:
        raise InputError(f"{path} is damaged: {str(error).splitlines()[0]:.200}") from error
