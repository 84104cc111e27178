"""The packed experts of the published gpt-oss: numbers of 4 bits that share a scale by 32 (MXFP4).

A tensor `X` is stored as `X_blocks` [..., blocks, 16], two numbers a byte, the lower bits first,
and `X_scales` [..., blocks], exponents of 2 above -127. Each row is an output.

Source: OCP Microscaling Formats (MX) v1.0, sections 5.3.3 and 6.3.
"""

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np

from checkpoints_convert.files import SourceTensor
from jax_longctx.errors import CheckpointError
from jax_longctx.files import open_plain, reading

BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32
_HALF = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
# Of E2M1 by its bits.
NUMBERS = np.array([*_HALF, *(-x for x in _HALF)], np.float32)


def unpacked(tensors: Iterable[SourceTensor]) -> list[SourceTensor]:
    """The tensors, with one of bfloat16, which holds the numbers exactly, for each packed pair.

    Raises:
      CheckpointError: a packed tensor lacks its other half, or they do not fit.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    found = []
    for name, tensor in by_name.items():
        if tensor.dtype != np.uint8:
            found.append(tensor)
            continue
        whole, _, end = name.rpartition("_")
        other = whole + (SCALES if f"_{end}" == BLOCKS else BLOCKS)
        if other not in by_name:
            raise CheckpointError(f"{tensor.file}: tensor {name} is there, but {other} is missing")
        if f"_{end}" == BLOCKS:
            found.append(_joined(whole, tensor, by_name[other]))
    return found


def _joined(name: str, blocks: SourceTensor, scales: SourceTensor) -> SourceTensor:
    *rows, count = scales.shape
    if scales.dtype != np.uint8 or blocks.shape != (*rows, count, BLOCK // 2):
        raise CheckpointError(
            f"{blocks.file}: {blocks.name} {list(blocks.shape)} and {scales.name} "
            f"{list(scales.shape)} are no numbers in MXFP4"
        )

    def decode(raw: bytes, chosen: range) -> np.ndarray:
        # They may lie anywhere.
        with reading(scales.file), open_plain(scales.file) as file:
            file.seek(scales.offset + chosen.start * count)
            exponents = np.frombuffer(file.read(len(chosen) * count), np.uint8).astype(np.int32)
        pairs = np.frombuffer(raw, np.uint8).reshape(len(chosen), count, -1)
        bits = np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(len(chosen), count, BLOCK)
        scaled = np.ldexp(NUMBERS[bits], exponents.reshape(len(chosen), count, 1) - 127)
        return scaled.reshape(len(chosen), -1)

    return SourceTensor(
        name=name,
        shape=(*rows, count * BLOCK),
        dtype=np.dtype(jnp.bfloat16),
        file=blocks.file,
        offset=blocks.offset,
        nbytes=blocks.nbytes,
        decode=decode,
        blocks=True,
    )
