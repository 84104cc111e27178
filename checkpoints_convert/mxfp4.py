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
      CheckpointError: a packed tensor lacks its other half, or they do not fit; a tensor is stored
        plain too, or experts beside packed ones are plain, whose inputs are before their outputs.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    packed = {name.rpartition("_")[0] for name in by_name if by_name[name].dtype == np.uint8}
    found = []
    for name, tensor in by_name.items():
        if tensor.dtype != np.uint8:
            if name in packed or (packed and name.endswith("_proj")):
                raise CheckpointError(
                    f"{tensor.file}: tensor {name} is stored plain beside {min(packed)} in MXFP4; "
                    f"implemented is one of both for all experts"
                )
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
    fit = scales.dtype == np.uint8 and blocks.shape == (*scales.shape, BLOCK // 2)
    if not (scales.shape and fit):
        raise CheckpointError(
            f"{blocks.file}: {blocks.name} {list(blocks.shape)} and {scales.name} "
            f"{list(scales.shape)} are no numbers in MXFP4"
        )
    *rows, count = scales.shape

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
