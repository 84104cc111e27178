"""A GGUF file, llama.cpp's format: metadata, tokenizer and (quantised) tensors in one.

The `gguf` package maps the file and reads its directory; the tensors' bytes are then read range by
range and dequantised a few rows at a time, so neither the file nor a float32 copy of a tensor is
ever whole in memory.
"""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints_convert.sources.base import SourceTensor, check_tensors
from checkpoints_convert.sources.config import model_config
from checkpoints_convert.sources.files import first_line
from checkpoints_convert.sources.gguf_config import INTERLEAVED, config_from_metadata
from checkpoints_convert.vocabulary import gguf_tokenizer_files
from jax_longctx.errors import CheckpointError

__all__ = ["Gguf", "read_directory"]

READABLE = (
    *("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
)


class Gguf:
    """A GGUF file (see `Source`).

    Values that were quantised count as float32, in which dequantising is exact.

    Raises:
      CheckpointError: no GGUF file, or an incomplete or damaged one.
      ConfigError: the architecture is not implemented.
    """

    def __init__(self, path: Path, label: str):
        self.label = label
        metadata, found, factors = read_directory(path)
        shapes = {tensor.name: tensor.shape for tensor in found}
        described = config_from_metadata(path, metadata, shapes, factors)
        self.config = model_config(described)
        self.extras: dict[str, Any] = {
            key: described[key] for key in ("bos_token_id", "eos_token_id") if key in described
        }
        interleaved = metadata["general.architecture"] in INTERLEAVED
        self.naming = "gguf-interleaved" if interleaved else "gguf"
        self.tensors = check_tensors(label, found, self.config, self.naming, lambda name: False)
        self.read_files: dict[Path, str] = {}
        self._tokenizer = gguf_tokenizer_files(path, metadata)

    def write_tokenizer(self, folder: Path) -> None:
        """Writes the tokenizer made from the metadata."""
        for name, text in self._tokenizer.items():
            (folder / name).write_text(text, encoding="utf-8")


def read_directory(
    path: Path,
) -> tuple[dict[str, Any], list[SourceTensor], np.ndarray | None]:
    """Metadata, tensors in the order of the file, and llama3's rotary factors where stored.

    Raises:
      CheckpointError: no GGUF file, a truncated one, or one of several parts.
    """
    from checkpoints_convert.sources.gguf_reader import Reader

    try:
        reader = Reader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        tensors = [_tensor(path, entry) for entry in reader.tensors]
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(
            f"{path} is not a GGUF file that can be read: {first_line(error)} "
            f"(expected a Hugging Face directory or a GGUF file)"
        ) from error
    if reader.byte_order != "I":
        raise CheckpointError(f"{path} has the other byte order; convert it for this machine first")
    if metadata.get("split.count", 1) not in (0, 1):
        raise CheckpointError(
            f"{path} is one of {metadata['split.count']} parts; "
            f"merge them first (llama-gguf-split --merge)"
        )
    factors = None
    for entry in reader.tensors:
        if entry.name == "rope_freqs.weight":
            factors = np.array(entry.data, np.float32).reshape(-1)
    return metadata, sorted(tensors, key=lambda tensor: tensor.offset), factors


def _tensor(path: Path, entry: Any) -> SourceTensor:
    from gguf.quants import dequantize

    kind = entry.tensor_type
    if kind.name not in READABLE:
        raise CheckpointError(
            f"{path}: tensor {entry.name} has type {kind.name}; implemented are "
            f"{', '.join(READABLE)}"
        )
    dtype = np.dtype({"F16": np.float16, "BF16": jnp.bfloat16}.get(kind.name, np.float32))

    def decode(raw: bytearray, rows: int) -> np.ndarray:
        if kind.name in ("F32", "F16", "BF16"):
            return np.frombuffer(raw, dtype).reshape(rows, -1)
        return dequantize(np.frombuffer(raw, np.uint8).reshape(rows, -1), kind)

    return SourceTensor(
        name=entry.name,
        shape=tuple(int(size) for size in reversed(entry.shape)),
        dtype=dtype,
        file=path,
        offset=int(entry.data_offset),
        nbytes=int(entry.n_bytes),
        decode=decode,
    )
