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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_convert.names import FileTensor, Part, expected_tensors
from checkpoints_convert.partial import check_destination, write_text
from checkpoints_convert.sources.safetensors import DTYPE_NAMES
from jax_longctx.errors import CheckpointError
from jax_longctx.locks import only_writer
from jax_longctx.models.checkpoint import Manifest, read_manifest, restore, tokenizer_folder

__all__ = ["export"]

# Small parameters are read from Orbax together, up to so many bytes.
GROUP = 64 << 20

OnProgress = Callable[[int, int], None]


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
            write_text(scratch / "config.json", json.dumps(_hf_config(manifest), indent=2))
            scratch.rename(destination)
        except OSError as error:
            raise CheckpointError(f"{destination} could not be written: {error}") from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _hf_config(manifest: Manifest) -> dict[str, Any]:
    return {**manifest.config.to_hf(), **manifest.extras, "torch_dtype": manifest.dtype}


def _dtype(manifest: Manifest, tensor: FileTensor) -> np.dtype:
    return np.dtype(jnp.dtype(manifest.tensors[tensor.parts[0].path].dtype))


def _bytes(manifest: Manifest, tensor: FileTensor) -> int:
    return math.prod(tensor.shape) * _dtype(manifest, tensor).itemsize


def _shards(manifest: Manifest, limit: int) -> dict[str, list[FileTensor]]:
    """Which file holds which tensors, in order."""
    groups: list[list[FileTensor]] = [[]]
    filled = 0
    for tensor in expected_tensors(manifest.config, "hf").values():
        size = _bytes(manifest, tensor)
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(tensor)
        filled += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
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
            for batch in _batches(manifest, tensors):
                arrays = _load(checkpoint, manifest, [tensor.parts[0] for tensor in batch])
                for tensor in batch:
                    values = tensor.parts[0].to_file(arrays.pop(tensor.parts[0].path))
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


def _batches(manifest: Manifest, tensors: Sequence[FileTensor]) -> list[list[FileTensor]]:
    batches: list[list[FileTensor]] = []
    held = GROUP
    for tensor in tensors:
        size = _bytes(manifest, tensor)
        if held + size > GROUP:
            batches.append([])
            held = 0
        batches[-1].append(tensor)
        held += size
    return batches


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


def _load(checkpoint: Path, manifest: Manifest, parts: Sequence[Part]) -> dict[str, np.ndarray]:
    """Parameters in host memory, by path, in the types they are stored in."""
    device = jax.local_devices(backend="cpu")[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    wanted = {
        part.path: jax.ShapeDtypeStruct(
            part.shape, jnp.dtype(manifest.tensors[part.path].dtype), sharding=sharding
        )
        for part in parts
    }
    tree = restore(checkpoint, manifest, wanted)
    found: dict[str, np.ndarray] = {}
    for part in parts:
        node: Any = tree
        for name in part.path.split("."):
            node = node[name]
        found[part.path] = np.asarray(node)
    return found
