"""A converted checkpoint on disk: `manifest.json`, `params/` (Orbax) and `tokenizer/`.

`checkpoints_convert` writes it, everything else reads it here. The manifest is written last. It
lists every other file with its size and digest, so a damaged checkpoint is refused by the name of
the file (see `storage`). Parameters are restored straight onto their shards.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util
from jax.sharding import Mesh

from jax_longctx.errors import CheckpointError
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.llama import check_mesh, param_infos
from jax_longctx.models.storage import Files, check_files, load_arrays, read_sealed, seal
from jax_longctx.sharding import logical_sharding

# 1 had no digests.
FORMAT = 2
REMEDY = "convert the source again"
MANIFEST, PARAMS, TOKENIZER = "manifest.json", "params", "tokenizer"


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Shape and type that a parameter is stored in."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a checkpoint says about itself.

    Attributes:
      config: the model.
      dtype: of the parameters; where they differ, of most of the bytes.
      tensors: every parameter by its dot-joined path.
      source: what it was converted from.
      sources: every file that was read, by name, with its SHA-256.
      files: what `params/` holds, as `describe_files` has it.
      tokenizer_files: what `tokenizer/` holds.
      extras: entries of the source's config beside the model (token ids), for an export.
    """

    config: ModelConfig
    dtype: str
    tensors: Mapping[str, TensorEntry]
    source: str
    sources: Mapping[str, str]
    files: Files
    tokenizer_files: Files
    extras: Mapping[str, Any]

    def to_json(self) -> str:
        """The text of `manifest.json`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["config"] = self.config.to_dict()
        fields["tensors"] = {
            path: dataclasses.asdict(entry) for path, entry in self.tensors.items()
        }
        return json.dumps(seal(FORMAT, fields), indent=1)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> "Manifest":
        """From what `to_json` wrote; raises ValueError, KeyError or TypeError on anything else."""
        fields["config"] = ModelConfig.from_dict(fields["config"])
        fields["tensors"] = {
            path: TensorEntry(tuple(entry["shape"]), entry["dtype"])
            for path, entry in fields["tensors"].items()
        }
        return cls(**fields)


def read_manifest(directory: str | Path) -> Manifest:
    """The manifest of a checkpoint directory.

    Raises:
      CheckpointError: the directory is no converted checkpoint.
    """
    path = Path(directory) / MANIFEST
    try:
        return Manifest.from_fields(read_sealed(path, FORMAT, REMEDY))
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} is not a converted checkpoint (no {MANIFEST}); "
            f"make one: jax-longctx convert SOURCE DESTINATION"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: {error!s:.200}; {REMEDY}") from error


def load_params(directory: str | Path, mesh: Mesh, dtype: Any = None) -> dict[str, Any]:
    """The parameters as nested dicts of arrays, each restored straight onto its shards.

    Args:
      dtype: of every array; the manifest's unless given.

    Raises:
      CheckpointError: the checkpoint is incomplete, damaged, or not of the manifest's model.
      ConfigError: the model does not divide over the mesh.
    """
    manifest = read_manifest(directory)
    infos = param_infos(manifest.config)
    said = Path(directory) / MANIFEST
    for path, info in infos.items():
        entry = manifest.tensors.get(path)
        if entry is None:
            raise CheckpointError(f"{said}: parameter {path} is missing")
        if entry.shape != info.shape:
            raise CheckpointError(
                f"{said}: parameter {path} has shape {list(entry.shape)}, "
                f"the config says {list(info.shape)}"
            )
    if unknown := sorted(set(manifest.tensors) - set(infos)):
        raise CheckpointError(f"{said}: parameter {unknown[0]} is unknown")
    check_mesh(manifest.config, mesh)
    target = jnp.dtype(manifest.dtype if dtype is None else dtype)
    wanted = {
        path: jax.ShapeDtypeStruct(info.shape, target, sharding=logical_sharding(mesh, info.axes))
        for path, info in infos.items()
    }
    return traverse_util.unflatten_dict(restore(directory, manifest, wanted), sep=".")


def restore(
    directory: str | Path, manifest: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Some or all parameters, by dot-joined path.

    Raises:
      CheckpointError: the stored arrays are incomplete or damaged.
    """
    folder = Path(directory).absolute() / PARAMS
    check_files(folder, manifest.files, REMEDY)
    return load_arrays(folder, wanted, REMEDY)


def tokenizer_folder(directory: str | Path, manifest: Manifest) -> Path:
    """The folder of the tokenizer, its files as they were written.

    Raises:
      CheckpointError: one is missing or damaged.
    """
    folder = Path(directory) / TOKENIZER
    check_files(folder, manifest.tokenizer_files, REMEDY)
    return folder
