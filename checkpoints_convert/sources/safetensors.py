"""The safetensors format: eight bytes of length, a JSON header, then the tensors.

Read here rather than through the `safetensors` package because that one maps whole shards into
memory; ours reads byte ranges and can say which tensor a truncated file lacks.
"""

import math
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints_convert.sources.base import SourceTensor
from checkpoints_convert.sources.files import parse_json, unreadable
from jax_longctx.errors import CheckpointError

__all__ = ["DTYPE_NAMES", "read_header"]

# Names that safetensors gives to the types weights can be read from.
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# The format's own limit on headers.
HEADER_LIMIT = 100 << 20


def read_header(path: Path) -> list[SourceTensor]:
    """The tensors of a file, in the order they lie in it.

    Raises:
      CheckpointError: no safetensors file, a damaged or truncated one, or weights of a type that
        is not implemented (quantised).
    """
    header, begin, size = _raw_header(path)
    tensors = [
        _tensor(path, name, entry, begin)
        for name, entry in header.items()
        if name != "__metadata__"
    ]
    tensors.sort(key=lambda tensor: tensor.offset)
    at = begin
    for tensor in tensors:
        if tensor.offset != at:
            raise CheckpointError(f"{path}: tensor {tensor.name} does not begin where it should")
        at = tensor.offset + tensor.nbytes
        if at > size:
            raise CheckpointError(
                f"{path} is truncated: tensor {tensor.name} ends at byte {at}, the file at "
                f"{size}; fetch it again"
            )
    if at != size:
        raise CheckpointError(f"{path}: {size - at} bytes follow the last tensor")
    return tensors


def _raw_header(path: Path) -> tuple[dict[str, Any], int, int]:
    """The header, where the tensors begin, and the file's size."""
    try:
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else HEADER_LIMIT
            size = path.stat().st_size
            if length >= min(HEADER_LIMIT, size):
                raise CheckpointError(
                    f"{path} is not a safetensors file, or truncated in its header ({size} bytes)"
                )
            raw = file.read(length)
    except OSError as error:
        raise unreadable(path, error) from error
    return parse_json(raw, f"{path} is not a safetensors file"), 8 + length, size


def _tensor(path: Path, name: str, entry: Any, begin: int) -> SourceTensor:
    try:
        shape = tuple(int(size) for size in entry["shape"])
        first, last = (int(at) for at in entry["data_offsets"])
        kind = str(entry["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header entry of {name} is damaged") from error
    if kind not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name} has type {kind}; implemented are {', '.join(DTYPES)} "
            f"(quantised weights are read from GGUF files)"
        )
    dtype = DTYPES[kind]
    if last - first != math.prod(shape) * dtype.itemsize or not all(shape):
        raise CheckpointError(
            f"{path}: tensor {name} {list(shape)} of type {kind} takes {last - first} bytes"
        )

    def decode(raw: bytearray, rows: int) -> np.ndarray:
        return np.frombuffer(raw, dtype).reshape(rows, -1)

    return SourceTensor(
        name=name,
        shape=shape,
        # Nothing here computes in float64.
        dtype=np.dtype(np.float32) if kind == "F64" else dtype,
        file=path,
        offset=begin + first,
        nbytes=last - first,
        decode=decode,
    )
