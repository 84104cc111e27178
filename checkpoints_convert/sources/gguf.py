"""A GGUF file, llama.cpp's format: metadata, tokenizer and (quantised) tensors in one.

The `gguf` package maps the file and reads its directory; the tensors' bytes are then read range by
range and dequantised a few rows at a time, so neither the file nor a float32 copy of a tensor is
ever whole in memory.
"""

import math
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

# Of an array, of the metadata, and of tensors; vocabularies have some 300,000 tokens and merges.
MOST_ENTRIES = 1 << 21


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
    import gguf

    class Reader(gguf.GGUFReader):
        """Says where a damaged file ends, and which tensor a truncated one lacks.

        The mapped file is a plain array here: for the package's hundreds of thousands of small
        slices that is twice as fast as numpy's memmap class.
        """

        @property
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._plain = mapped.view(np.ndarray)

        def _get(
            self, offset: int, dtype: Any, count: Any = 1, override_order: Any = None
        ) -> np.ndarray:
            # The package would read nothing past the end, as often as a damaged length says.
            if offset + np.dtype(dtype).itemsize * int(count) > len(self.data):
                raise ValueError(f"it is truncated or damaged at byte {offset} of its metadata")
            return super()._get(offset, dtype, count, override_order)

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type == gguf.GGUFValueType.ARRAY:
                kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
                if kind[0] == gguf.GGUFValueType.ARRAY:
                    raise ValueError("its metadata nests arrays, which no model needs")
                _check_count("entries of an array", length[0])
            return super()._get_field_parts(orig_offs, raw_type)

        def _build_fields(self, offs: int, count: int) -> int:
            _check_count("metadata entries", count)
            return super()._build_fields(offs, count)

        def _build_tensor_info(self, offs: int, count: int) -> tuple[int, list[Any]]:
            _check_count("tensors", count)
            return super()._build_tensor_info(offs, count)

        def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
            _check_complete(path, start_offs, fields, len(self.data))
            super()._build_tensors(start_offs, fields)

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


def _check_count(what: str, count: int) -> None:
    """Each takes the package microseconds and hundreds of bytes, so it must not believe any."""
    if count > MOST_ENTRIES:
        raise ValueError(f"it says that it holds {count} {what}, expected at most {MOST_ENTRIES}")


def _check_complete(path: Path, start: int, fields: list[Any], size: int) -> None:
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    for field in fields:
        _, name, _, sizes, kind, offset = field.parts
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
        end = start + int(offset[0]) + math.prod(map(int, sizes)) * block_bytes // block
        if end > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {bytes(name).decode('utf-8', 'replace')} ends at "
                f"byte {end}, the file at {size}; fetch it again"
            )


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
