"""The `gguf` package's reader, with the lengths and counts of a file checked.

The package walks the metadata entry by entry, and takes microseconds and hundreds of bytes for each
that a count names, also where the file has ended.
"""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jax_longctx.errors import CheckpointError

__all__ = ["Reader"]

# Of an array, of the metadata, and of tensors; vocabularies have some 300,000 tokens and merges.
MOST_ENTRIES = 1 << 21


class Reader(gguf.GGUFReader):
    """Says where a damaged file ends, and which tensor a truncated one lacks.

    The mapped file is a plain array here: for the package's hundreds of thousands of small
    slices that is twice as fast as numpy's memmap class.
    """

    def __init__(self, path: Path):
        self.path = path
        super().__init__(path)

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

    def _get_field_parts(self, orig_offs: int, raw_type: Any) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY:
            kind, length = self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)
            if kind[0] == gguf.GGUFValueType.ARRAY:
                raise ValueError("its metadata nests arrays, which no model needs")
            _check_count("entries of an array", length[0])
        return super()._get_field_parts(orig_offs, raw_type)

    def _build_fields(self, offs: int, count: Any) -> int:
        _check_count("metadata entries", count)
        return super()._build_fields(offs, count)

    def _build_tensor_info(self, offs: int, count: Any) -> tuple[int, list[Any]]:
        _check_count("tensors", count)
        return super()._build_tensor_info(offs, count)

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        _check_complete(self.path, start_offs, fields, len(self.data))
        super()._build_tensors(start_offs, fields)


def _check_count(what: str, count: Any) -> None:
    if count > MOST_ENTRIES:
        raise ValueError(f"it says that it holds {count} {what}, expected at most {MOST_ENTRIES}")


def _check_complete(path: Path, start: int, fields: list[Any], size: int) -> None:
    for field in fields:
        _, name, _, sizes, kind, offset = field.parts
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind[0])]
        end = start + int(offset[0]) + math.prod(map(int, sizes)) * block_bytes // block
        if end > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {bytes(name).decode('utf-8', 'replace')} ends at "
                f"byte {end}, the file at {size}; fetch it again"
            )
