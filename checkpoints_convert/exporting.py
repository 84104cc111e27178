"""A checkpoint directory -> a Hugging Face directory, one tensor at a time.

Each tensor is written in its stored type, and names and layouts come from the same table as in
conversion. So a checkpoint converted from safetensors is exported with the same bits. InternLM2,
whose fused projection was split by conversion, is written as a Llama, which transformers loads
without custom code.
"""

import json
import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints_convert.files import in_groups
from checkpoints_convert.huggingface import DTYPE_NAMES
from checkpoints_convert.names import FileTensor, expected_tensors
from checkpoints_convert.partial import GROUP, OnProgress, check_destination
from jax_longctx.errors import CheckpointError, ConfigError
from jax_longctx.files import reason, whole_path, write_text
from jax_longctx.locks import only_writer
from jax_longctx.models import storage

# A tensor to write, and its stored type.
Stored = tuple[FileTensor, np.dtype]


def export(
    checkpoint: str | Path,
    destination: str | Path,
    *,
    progress: OnProgress | None = None,
    shard_bytes: int = 5 << 30,
) -> None:
    """Writes a converted checkpoint as a Hugging Face directory, or nothing after an error.

    Args:
      progress: called with (bytes done, bytes in all).
      shard_bytes: most bytes of a file; more tensors go to further files, with an index.

    Raises:
      CheckpointError: the checkpoint is damaged, or the destination cannot be written.
      ConfigError: its matrices are in 8 bits.
      InputError: another process writes the destination.
    """
    manifest = storage.read_manifest(checkpoint)
    if manifest.weights is not None:
        raise ConfigError(
            f"{checkpoint} holds its matrices in {manifest.weights}, for which there is no Hugging "
            f"Face form here; convert the source without weights, and export that"
        )
    destination = whole_path(destination)
    scratch = destination.with_name(destination.name + ".exporting")
    tokenizer = storage.tokenizer_folder(checkpoint, manifest)
    with only_writer(destination):
        check_destination(destination)
        try:
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            _write_shards(checkpoint, manifest, scratch, shard_bytes, progress)
            for name in manifest.tokenizer_files:
                shutil.copyfile(tokenizer / name, scratch / name)
            config = manifest.config.to_hf() | dict(manifest.extras)
            config["torch_dtype"] = manifest.dtype
            write_text(scratch / "config.json", json.dumps(config, indent=2))
            scratch.rename(destination)
        except OSError as error:
            said = f"{destination} could not be written: {reason(error)}"
            raise CheckpointError(said) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _nbytes(stored: Stored) -> int:
    tensor, dtype = stored
    return tensor.nbytes(dtype)


def _write_shards(
    checkpoint: str | Path,
    manifest: storage.Manifest,
    folder: Path,
    limit: int,
    progress: OnProgress | None,
) -> None:
    stored = [
        (tensor, np.dtype(jnp.dtype(manifest.tensors[tensor.parts[0].path].dtype)))
        for tensor in expected_tensors(manifest.config, "hf").values()
    ]
    shards, total, done = in_groups(stored, _nbytes, limit), sum(map(_nbytes, stored)), 0
    placed: dict[str, str] = {}
    params = storage.params_folder(checkpoint, manifest)
    for number, tensors in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        name = name if len(shards) > 1 else "model.safetensors"
        placed |= dict.fromkeys((tensor.name for tensor, _ in tensors), name)
        with (folder / name).open("wb") as file:
            _write_header(file, tensors)
            for batch in in_groups(tensors, _nbytes, GROUP):
                # Arrays of numpy: JAX frees its own at its next call, when the next group is read.
                wanted = {
                    part.path: jax.ShapeDtypeStruct(part.info.shape, dtype)
                    for tensor, dtype in batch
                    for part in tensor.parts
                }
                arrays = storage.load_arrays(params, wanted, storage.REMEDY)
                for tensor, dtype in batch:
                    _write_tensor(file, tensor, arrays)
                    done += tensor.nbytes(dtype)
                    if progress is not None:
                        progress(done, total)
                arrays.clear()
            file.flush()
            os.fsync(file.fileno())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        write_text(folder / "model.safetensors.index.json", json.dumps(index, indent=2))


def _write_tensor(file: BinaryIO, tensor: FileTensor, arrays: dict[str, np.ndarray]) -> None:
    """Takes its parts out of `arrays`; arrays of experts stay, for other tensors."""
    values = tensor.to_file(
        arrays.pop(part.path) if part.expert is None else arrays[part.path][part.expert]
        for part in tensor.parts
    )
    file.write(np.ascontiguousarray(values).view(np.uint8).data)


def _write_header(file: BinaryIO, tensors: Sequence[Stored]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor, dtype in tensors:
        end = at + tensor.nbytes(dtype)
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode("utf-8")
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
