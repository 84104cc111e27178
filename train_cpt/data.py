"""Training texts on disk: documents cut into windows of L + S tokens, stored once, read by Grain.

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
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

import grain
import numpy as np

from jax_longctx.errors import ConfigError, InputError

__all__ = ["SPLITS", "DataManifest", "Windows", "batches", "open_windows", "prepare", "split_of"]

FORMAT = 1
MANIFEST, SOURCES = "manifest.json", "sources.jsonl"
SPLITS = ("train", "dev", "test")
# Bytes of a shard: a damaged one is found by reading that many.
SHARD_BYTES = 256 * 2**20
# Texts that no run reads through.
_ENDLESS = 1 << 48


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
      sources: what is recorded of each file read (`train_cpt.documents.file_record`).

    Raises:
      ConfigError: the length or the shares make no sense.
      InputError: the folder exists already, or no document is long enough for the training split.
    """
    _check(length, shares, directory)
    building = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    building.mkdir(parents=True)
    try:
        dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)
        rows = max(1, shard_bytes // (length * dtype.itemsize))
        writers = {split: _Writer(building, split, rows, dtype) for split in SPLITS}
        tally = _Tally()
        for text, windows in _cut(documents, encode, length, tally):
            writers[split_of(text, shares)].add(windows)
        shards = {split: writer.finish() for split, writer in writers.items()}
        if not shards["train"]:
            raise InputError(
                f"no training text: of {tally.used + tally.short} documents {tally.used} have the "
                f"{length} tokens that a window takes (the longest has {tally.longest}), none of "
                f"them in the training split; give longer documents or a smaller length"
            )
        manifest = DataManifest(
            length=length,
            dtype=dtype.name,
            tokenizer=tokenizer,
            shares=shares,
            shards=shards,
            documents={"used": tally.used, "short": tally.short, "repeated": tally.repeated},
            dropped_tokens=tally.dropped,
        )
        _describe(building, manifest, sources)
        building.rename(directory)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return manifest


def _check(length: int, shares: tuple[float, float, float], directory: Path) -> None:
    if length < 2:
        raise ConfigError(f"data: a window needs at least 2 tokens, got {length}")
    if min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ConfigError(f"data: shares of {', '.join(SPLITS)} must add up to 1, got {shares}")
    if directory.exists():
        raise InputError(f"{directory} exists already; nothing was overwritten, name another")


def _describe(folder: Path, manifest: DataManifest, sources: Iterable[Mapping[str, Any]]) -> None:
    with (folder / SOURCES).open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(source)}\n" for source in sources)
    fields = {"format": FORMAT, **dataclasses.asdict(manifest)}
    (folder / MANIFEST).write_text(json.dumps(fields, indent=1), encoding="utf-8")


@dataclasses.dataclass
class _Tally:
    """Documents, and the tokens of used ones that fill no window."""

    used: int = 0
    short: int = 0
    repeated: int = 0
    dropped: int = 0
    longest: int = 0


def _cut(
    documents: Iterable[tuple[str, str]],
    encode: Callable[[str], list[int]],
    length: int,
    tally: _Tally,
) -> Iterator[tuple[str, np.ndarray]]:
    """The text and the windows `[n, length]` of every document that is new and long enough."""
    seen = set()
    for _, text in documents:
        digest = _text_digest(text)
        if digest in seen:
            tally.repeated += 1
            continue
        seen.add(digest)
        tokens = encode(text)
        tally.longest = max(tally.longest, len(tokens))
        if len(tokens) < length:
            tally.short += 1
            continue
        tally.used += 1
        tally.dropped += len(tokens) % length
        whole = len(tokens) - len(tokens) % length
        yield text, np.array(tokens[:whole], np.int64).reshape(-1, length)


def _text_digest(text: str) -> bytes:
    # JSON can hold half a surrogate pair.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


class _Writer:
    """Collects a split's windows and writes a shard for every so many."""

    def __init__(self, folder: Path, split: str, rows: int, dtype: np.dtype):
        self.folder, self.split, self.rows, self.dtype = folder, split, rows, dtype
        self.waiting: list[np.ndarray] = []
        self.shards: list[tuple[str, int, str]] = []

    def add(self, windows: np.ndarray) -> None:
        self.waiting.extend(windows)
        while len(self.waiting) >= self.rows:
            self._write(self.waiting[: self.rows])
            self.waiting = self.waiting[self.rows :]

    def finish(self) -> list[tuple[str, int, str]]:
        if self.waiting:
            self._write(self.waiting)
        return self.shards

    def _write(self, windows: list[np.ndarray]) -> None:
        name = f"{self.split}-{len(self.shards):05}.npy"
        np.save(self.folder / name, np.stack(windows).astype(self.dtype))
        self.shards.append((name, len(windows), _digest(self.folder / name)))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
    return Windows([_shard(directory / name, digest) for name, _, digest in manifest.shards[split]])


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


def _shard(path: Path, digest: str) -> np.ndarray:
    try:
        found = _digest(path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}; prepare again") from error
    if found != digest:
        raise InputError(
            f"{path} is damaged (SHA-256 {found[:12]}, expected {digest[:12]}); prepare again"
        )
    return np.load(path, mmap_mode="r")


def batches(
    windows: Windows, *, micro_batches: int, rows: int, seed: int, process: int, processes: int
) -> Any:
    """An endless Grain iterator of this process's part of each global batch, `[A, B, T]` int32.

    Every epoch has its own order, the same whatever the number of processes. `get_state()` is a
    small dict with the position, `set_state` takes it back.

    Args:
      micro_batches: A, into which a global batch is divided.
      rows: texts of a micro-batch over all processes, of which B = rows / processes come here.
    """
    if rows % processes:
        raise ConfigError(f"data: {rows} texts do not divide over {processes} processes")
    if not len(windows):
        raise InputError("data: this split has no text")

    def own_part(batch: np.ndarray) -> np.ndarray:
        whole = batch.reshape(micro_batches, rows, -1)
        share = rows // processes
        return whole[:, process * share : (process + 1) * share]

    source: Any = windows
    # Grain counts batches in floats, and its own endless repeat overflows with batches of one.
    data = grain.MapDataset.source(source).seed(seed).shuffle().repeat(_ENDLESS // len(windows) + 1)
    data = data.batch(micro_batches * rows).map(own_part)
    return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)))
