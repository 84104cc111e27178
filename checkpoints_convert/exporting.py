"""A checkpoint directory -> a Hugging Face directory, one tensor at a time.

Every tensor keeps the type it is stored in, and names and layouts come from the table that
conversion reads by, so a checkpoint that came from safetensors comes out with the same bits.
InternLM2, whose fused projection conversion split, is written as the Llama that it is, which
transformers loads without code from elsewhere.
"""

import json
import math
import os
import shutil
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_convert.huggingface import DTYPE_NAMES
from checkpoints_convert.names import FileTensor, expected_tensors
from checkpoints_convert.partial import GROUP, OnProgress, check_destination
from jax_longctx.errors import CheckpointError
from jax_longctx.locks import only_writer
from jax_longctx.models.checkpoint import Manifest, read_manifest, restore, tokenizer_folder
from jax_longctx.models.storage import write_text


def export(
    checkpoint: str | Path,
    destination: str | Path,
    *,
    progress: OnProgress | None = None,
    shard_bytes: int = 5 << 30,
) -> None:
    """Writes a converted checkpoint as a Hugging Face directory, whole or not at all.

    Args:
      progress: called with (bytes done, bytes in all).
      shard_bytes: tensors beyond this many bytes go to a next file, with an index.

    Raises:
      CheckpointError: the checkpoint is damaged, or the destination cannot be written.
      InputError: another process writes the destination.
    """
    manifest = read_manifest(checkpoint)
    destination = Path(destination).expanduser().absolute()
    scratch = destination.with_name(destination.name + ".exporting")
    tokenizer = tokenizer_folder(checkpoint, manifest)
    shards = _shards(manifest, shard_bytes)
    with only_writer(destination):
        check_destination(destination)
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            _write_shards(Path(checkpoint), manifest, scratch, shards, progress)
            for name in manifest.tokenizer_files:
                shutil.copyfile(tokenizer / name, scratch / name)
            config = manifest.config.to_hf() | dict(manifest.extras)
            config["torch_dtype"] = manifest.dtype
            write_text(scratch / "config.json", json.dumps(config, indent=2))
            scratch.rename(destination)
        except OSError as error:
            raise CheckpointError(f"{destination} could not be written: {error}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _dtype(manifest: Manifest, tensor: FileTensor) -> np.dtype:
    return np.dtype(jnp.dtype(manifest.tensors[tensor.parts[0].path].dtype))


def _bytes(manifest: Manifest, tensor: FileTensor) -> int:
    return math.prod(tensor.shape) * _dtype(manifest, tensor).itemsize


def _groups(
    manifest: Manifest, tensors: Sequence[FileTensor], limit: int
) -> list[list[FileTensor]]:
    """The tensors in order, in groups of at most `limit` bytes, or of one tensor."""
    groups: list[list[FileTensor]] = []
    held = limit
    for tensor in tensors:
        size = _bytes(manifest, tensor)
        if not groups or held + size > limit:
            groups.append([])
            held = 0
        groups[-1].append(tensor)
        held += size
    return groups


def _shards(manifest: Manifest, limit: int) -> dict[str, list[FileTensor]]:
    """Which file holds which tensors, in order."""
    groups = _groups(manifest, [*expected_tensors(manifest.config, "hf").values()], limit)
    count = len(groups)
    if count == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i:05d}-of-{count:05d}.safetensors": g for i, g in enumerate(groups, 1)}


def _write_shards(
    checkpoint: Path,
    manifest: Manifest,
    folder: Path,
    shards: Mapping[str, Sequence[FileTensor]],
    progress: OnProgress | None,
) -> None:
    total = sum(_bytes(manifest, tensor) for group in shards.values() for tensor in group)
    done = 0
    for name, tensors in shards.items():
        with (folder / name).open("wb") as file:
            _write_header(file, manifest, tensors)
            for batch in _groups(manifest, tensors, GROUP):
                arrays = restore(checkpoint, manifest, _wanted(manifest, batch))
                for tensor in batch:
                    parts = [
                        part.to_file(np.asarray(arrays.pop(part.path))) for part in tensor.parts
                    ]
                    values = np.concatenate(parts) if len(parts) > 1 else parts[0]
                    file.write(np.ascontiguousarray(values).view(np.uint8).data)
                    done += values.nbytes
                    if progress is not None:
                        progress(done, total)
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        placed = {tensor.name: name for name, group in shards.items() for tensor in group}
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2))


def _write_header(file: BinaryIO, manifest: Manifest, tensors: Sequence[FileTensor]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        end = at + _bytes(manifest, tensor)
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[_dtype(manifest, tensor)],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)


def _wanted(manifest: Manifest, tensors: Sequence[FileTensor]) -> dict[str, jax.ShapeDtypeStruct]:
    """Their parameters in host memory, in the types they are stored in."""
    host = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    return {
        part.path: jax.ShapeDtypeStruct(
            part.info.shape, jnp.dtype(manifest.tensors[part.path].dtype), sharding=host
        )
        for tensor in tensors
        for part in tensor.parts
    }
