"""The source of a conversion: a config, tensors and a tokenizer.

Files of tensors are read once, from front to back in byte ranges, and hashed at the same time.
"""

import dataclasses
import hashlib
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints_convert.names import IGNORED, expected_tensors
from jax_longctx.errors import CheckpointError
from jax_longctx.files import open_plain, reading
from jax_longctx.models.config import ModelConfig
from pallas_kernels.quantised_matrix import quantise_matrix

# Bytes read at a time where they are only hashed or compared.
STEP = 8 << 20
# Bytes of float32 values decoded at a time.
PIECE = 16 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """A tensor in a file.

    Attributes:
      dtype: of the stored values with `dtype="source"`.
      blocks: whether its values are of quantised blocks, which only `dtype` holds exactly.
      file, offset, nbytes: the place of its bytes.
      decode: (bytes of some rows, their numbers) -> values `[rows, shape[-1]]`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path
    offset: int
    nbytes: int
    decode: Callable[[bytes, range], np.ndarray]
    blocks: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A checkpoint to convert.

    Attributes:
      label: the source as the user named it.
      config: the model.
      extras: entries of the Hugging Face config that `ModelConfig` does not hold and an export
        writes back (token ids).
      naming: of its tensors (see `names.expected_tensors`).
      tensors: in the order of the files.
      read_files: SHA-256 of each file that was read, but for the tensors' files.
      tokenizer: its files by name: the text, or the file to copy.
      left_out: what is not converted of a model of text and images, in a line; else None.
    """

    label: str
    config: ModelConfig
    extras: dict[str, Any]
    naming: str
    tensors: list[SourceTensor]
    read_files: dict[Path, str]
    tokenizer: Mapping[str, str | Path]
    left_out: str | None = None

    def write_tokenizer(self, folder: Path) -> None:
        """Writes the tokenizer files into an empty folder."""
        for name, content in self.tokenizer.items():
            if isinstance(content, Path):
                shutil.copyfile(content, folder / name)
            else:
                (folder / name).write_text(content, encoding="utf-8")


class HashedFile:
    """A file read front to back by byte ranges; the bytes between them are only hashed.

    Ranges are read, not mapped: mapped pages of a whole shard would count as this process's memory.
    """

    def __init__(self, path: Path):
        self.path, self._hash = path, hashlib.sha256()
        with reading(path):
            self._file = open_plain(path)
        self.close = self._file.close

    def read(self, offset: int, size: int) -> bytes:
        """The bytes `offset` to `offset + size`; offsets only grow from call to call."""
        while (gap := offset - self._file.tell()) > 0 and self._next(min(STEP, gap)):
            pass
        data = self._next(size)
        if len(data) < size:
            raise CheckpointError(
                f"{self.path} is truncated: it ends at byte {self._file.tell()}, expected at least "
                f"{offset + size}; fetch it again"
            )
        return data

    def finish(self) -> str:
        """The SHA-256 of the whole file."""
        while self._next(STEP):
            pass
        return self._hash.hexdigest()

    def _next(self, size: int) -> bytes:
        """Up to `size` bytes; fewer only at the end of the file."""
        with reading(self.path):
            data = self._file.read(size)
        self._hash.update(data)
        return data


def in_groups[T](items: Iterable[T], size: Callable[[T], int], limit: int) -> list[list[T]]:
    """The items in order, in groups of at most `limit` bytes, or of one item."""
    groups: list[list[T]] = []
    held = 0
    for item in items:
        if not groups or held + size(item) > limit:
            groups.append([])
            held = 0
        groups[-1].append(item)
        held += size(item)
    return groups


def read_array(file: HashedFile, tensor: SourceTensor, dtype: np.dtype) -> np.ndarray:
    """The tensor in `dtype`, read and converted a few rows at a time.

    Raises:
      CheckpointError: the file is truncated, or a weight is NaN, infinite or too large.
    """
    result = np.empty((math.prod(tensor.shape[:-1]), tensor.shape[-1]), dtype)
    for begin, piece in _pieces(file, tensor, dtype):
        result[begin : begin + len(piece)] = piece
    return result.reshape(tensor.shape)


def read_quantised(
    file: HashedFile, tensor: SourceTensor, dtype: np.dtype, swapped: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """A matrix in 8 bits, and the scale of each row: `[..., rows, columns]`, `[..., rows, 1]`.

    A row is an output. What is rounded is the tensor in `dtype`, a few rows at a time; values of
    quantised blocks are rounded as they are.

    Args:
      swapped: the file has columns before rows.

    Raises:
      CheckpointError: as `read_array`.
    """
    if swapped:
        # A row's numbers are spread over the whole file.
        made = quantise_matrix(read_array(file, tensor, dtype).swapaxes(-1, -2), (-1,))
        return np.asarray(made.values), np.asarray(made.scales)
    rows, columns = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    values = np.empty((rows, columns), np.int8)
    scales = np.empty((rows, 1), np.float32)
    for begin, piece in _pieces(file, tensor, tensor.dtype if tensor.blocks else dtype):
        made = quantise_matrix(piece, (1,))
        values[begin : begin + len(piece)] = made.values
        scales[begin : begin + len(piece)] = made.scales
    return values.reshape(tensor.shape), scales.reshape(*tensor.shape[:-1], 1)


def _pieces(
    file: HashedFile, tensor: SourceTensor, dtype: np.dtype
) -> Iterator[tuple[int, np.ndarray]]:
    """The tensor in `dtype`, a few rows at a time, each with the number of its first row."""
    *leading, columns = tensor.shape
    rows = math.prod(leading)
    row_bytes = tensor.nbytes // rows
    step = max(1, PIECE // (4 * columns))
    for begin in range(0, rows, step):
        count = min(step, rows - begin)
        raw = file.read(tensor.offset + begin * row_bytes, count * row_bytes)
        values = tensor.decode(raw, range(begin, begin + count))
        # Values too large for `dtype` become infinite, which is checked below.
        with np.errstate(over="ignore"):
            piece = values.astype(dtype, copy=False)
        if not _all_finite(piece):
            raise CheckpointError(_not_finite(tensor, values, dtype))
        yield begin, piece


def _all_finite(values: np.ndarray) -> bool:
    # NaN and infinity have all exponent bits set; numpy has no fast test for bfloat16.
    if values.dtype == jnp.bfloat16:
        bits = values.view(np.uint16) & 0x7F80
        return not (bits == 0x7F80).any()
    return bool(np.isfinite(values).all())


def _not_finite(tensor: SourceTensor, values: np.ndarray, dtype: np.dtype) -> str:
    if _all_finite(values):
        return (
            f"{tensor.name} in {tensor.file} has values too large for {dtype.name} (up to "
            f"{float(np.abs(values).max()):.3g}); convert with another --dtype, such as bfloat16"
        )
    what = "NaN" if np.isnan(values).any() else "infinite values"
    return f"{tensor.name} in {tensor.file} holds {what}: the checkpoint is damaged; fetch it again"


def check_tensors(
    label: str,
    tensors: Sequence[SourceTensor],
    config: ModelConfig,
    naming: str,
    left_out: str | None = None,
) -> list[SourceTensor]:
    """The tensors to convert, after a check of their names and shapes.

    Args:
      left_out: a tensor that may be in the files and is not converted.

    Raises:
      CheckpointError: a tensor is missing, unknown or of another shape.
    """
    # Too many layers could take minutes to list.
    if config.num_layers > len(tensors):
        raise CheckpointError(
            f"{label}: the config says {config.num_layers} layers, but the files hold "
            f"{len(tensors)} tensors; the config does not belong to these weights"
        )
    expected = expected_tensors(config, naming)
    by_name = {tensor.name: tensor for tensor in tensors}
    for name, wanted in expected.items():
        if name not in by_name:
            tied = ""
            if any(part.path == "head.table" for part in wanted.parts):
                tied = " (set tie_word_embeddings to true if the head is the embedding)"
            raise CheckpointError(
                f"{label}: tensor {name} {list(wanted.shape)} is missing; the config does not "
                f"belong to these weights{tied}, or a file is incomplete"
            )
        found = by_name[name]
        if found.shape != wanted.shape:
            raise CheckpointError(
                f"{found.file}: tensor {name} has shape {list(found.shape)}, "
                f"the config says {list(wanted.shape)}"
            )
    kept = [tensor for tensor in tensors if tensor.name in expected]
    for tensor in tensors:
        known = tensor.name in expected or tensor.name == left_out
        if not (known or IGNORED.fullmatch(tensor.name)):
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} {list(tensor.shape)} is unknown: this "
                f"architecture is not implemented, or the config does not belong to these weights"
            )
    return kept
