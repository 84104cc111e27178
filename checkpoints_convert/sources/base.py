"""What every source gives: a config, tensors that are read piece by piece, and a tokenizer."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from checkpoints_convert.names import IGNORED, expected_tensors
from checkpoints_convert.sources.files import HashedFile
from jax_longctx.errors import CheckpointError
from jax_longctx.models.config import ModelConfig

__all__ = ["Source", "SourceTensor", "check_tensors", "read_array"]

# Bytes of float32 values that are decoded at a time: what reading needs beside the result.
PIECE = 16 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceTensor:
    """A tensor in a file.

    Attributes:
      dtype: of its values as `dtype="source"` stores them.
      file, offset, nbytes: where its bytes are.
      decode: bytes of some rows -> their values, `[rows, shape[-1]]`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    file: Path
    offset: int
    nbytes: int
    decode: Callable[[bytearray, int], np.ndarray]


class Source(Protocol):
    """A checkpoint to convert.

    Attributes:
      label: what the person named.
      config: the model.
      extras: entries of the Hugging Face config that `ModelConfig` does not hold and an export
        should give back (token ids).
      naming: the key of `names.NAMINGS` its tensors follow.
      tensors: in the order of the files.
      read_files: files that were read beside those of the tensors, with their SHA-256.
    """

    label: str
    config: ModelConfig
    extras: dict[str, Any]
    naming: str
    tensors: list[SourceTensor]
    read_files: dict[Path, str]

    def write_tokenizer(self, folder: Path) -> None:
        """Writes the tokenizer files into an empty folder."""
        ...


def read_array(file: HashedFile, tensor: SourceTensor, dtype: np.dtype) -> np.ndarray:
    """The tensor in `dtype`, read and converted a few rows at a time.

    Raises:
      CheckpointError: the file is truncated, or a weight is NaN, infinite or too large.
    """
    *leading, columns = tensor.shape
    rows = math.prod(leading)
    row_bytes = tensor.nbytes // rows
    step = max(1, PIECE // (4 * columns))
    result = np.empty((rows, columns), dtype)
    for begin in range(0, rows, step):
        count = min(step, rows - begin)
        raw = file.read(tensor.offset + begin * row_bytes, count * row_bytes)
        values = tensor.decode(raw, count)
        piece = result[begin : begin + count]
        if values.dtype == dtype:
            piece[...] = values
        else:
            # Too large a value becomes infinite and is found below.
            with np.errstate(over="ignore"):
                piece[...] = values.astype(dtype)
        if not _all_finite(piece):
            raise CheckpointError(_not_finite(tensor, values, dtype))
    return result.reshape(tensor.shape)


def _all_finite(values: np.ndarray) -> bool:
    # The exponent bits are all ones in NaN and infinity; for bfloat16 numpy has no fast test.
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
    ignore: Callable[[str], bool],
) -> list[SourceTensor]:
    """The tensors to convert: all that the model has, each of its shape, and nothing unknown.

    Args:
      ignore: true for tensors of this source that are left out on purpose.

    Raises:
      CheckpointError: a tensor is missing, unknown or of another shape.
    """
    # The names of a model that does not belong to these tensors can take minutes to list.
    if config.num_layers > len(tensors):
        raise CheckpointError(
            f"{label}: the config says {config.num_layers} layers, but the files hold "
            f"{len(tensors)} tensors; the config does not belong to these weights"
        )
    expected = expected_tensors(config, naming)
    by_name = {tensor.name: tensor for tensor in tensors}
    for name, wanted in expected.items():
        if name not in by_name:
            raise CheckpointError(
                f"{label}: tensor {name} {list(wanted.shape)} is missing; the config does not "
                f"belong to these weights, or a file is incomplete"
            )
        found = by_name[name]
        if found.shape != wanted.shape:
            raise CheckpointError(
                f"{found.file}: tensor {name} has shape {list(found.shape)}, "
                f"the config says {list(wanted.shape)}"
            )
    kept = [tensor for tensor in tensors if tensor.name in expected]
    for tensor in tensors:
        if tensor.name not in expected and not (
            IGNORED.fullmatch(tensor.name) or ignore(tensor.name)
        ):
            raise CheckpointError(
                f"{tensor.file}: tensor {tensor.name} {list(tensor.shape)} is unknown: this "
                f"architecture is not implemented, or the config does not belong to these weights"
            )
    return kept
