"""A Hugging Face checkpoint: config.json, safetensors (one file or indexed shards), tokenizer.

A safetensors file has eight bytes of length, a JSON header, then the tensors. The `safetensors`
package maps whole shards into memory. This module reads byte ranges, and names the tensor that a
truncated file lacks.

`huggingface_hub` first fetches a hub id into its cache, only the files named here.
"""

import collections
import dataclasses
import math
import os
import struct
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from checkpoints_convert import files, mxfp4
from checkpoints_convert.config import model_config, text_part
from checkpoints_convert.names import naming_of, tensor_name
from checkpoints_convert.vocabulary import sentencepiece_files
from jax_longctx.errors import CheckpointError
from jax_longctx.files import first_line, open_plain, parse_json, read_json, reading, sha256_of
from jax_longctx.models.config import ModelConfig

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Copied into the checkpoint, and back on export. The first is the tokenizer itself.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)

# What a folder may hold in place of weights that are read, the first that is found, and what to do.
OTHERS = {
    "adapter_*": "{} is of a LoRA adapter, which is no whole model; merge it into its base model "
    "(peft: merge_and_unload) and convert that",
    "consolidated*": "{} is in the layout of the model's makers; fetch the files for transformers "
    "(config.json, model*.safetensors)",
    "*-of-*.safetensors": "{} is a shard without its index; fetch {index} too",
    "*.safetensors": "{} has another name; rename it to {single} if it is the whole model",
    "*.gguf": "{} is a model by itself; name that file",
    **dict.fromkeys(
        ("*.bin", "*.pt*", "*.h5", "*.msgpack"), "{} is not read; save it as safetensors"
    ),
}
# Files that are read.
LINKED = "*.json", "*.jinja", "*.safetensors", "*.model", "merges.txt"
TOKENIZERS = "tekken.json", "*.tiktoken", "tiktoken.model", "*.spm", "vocab.json"

# What stands before or in the names of the text model's tensors beside those of images.
TEXT = "language_model."
HEAD = "lm_head.weight"

# Entries of the config that an export writes back besides the model.
EXTRAS = ("bos_token_id", "eos_token_id", "pad_token_id")

# Readable types of weights, by their name in safetensors.
DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(jnp.bfloat16),
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

# The format's own limit on headers.
HEADER_LIMIT = 100 << 20


def open_huggingface(folder: Path, label: str) -> files.Source:
    """A directory that `save_pretrained` wrote.

    Raises:
      CheckpointError: the directory or a file in it is incomplete or damaged.
      ConfigError: the architecture is not implemented.
    """
    with reading(folder):
        for path in sorted(folder.iterdir()):
            # Such as a copy of the hub's cache without its blobs; some files may be missing.
            if path.is_symlink() and any(map(path.match, LINKED)) and not path.exists():
                to = os.readlink(path)
                raise CheckpointError(f"{path} is a link to {to}, where no file is; fetch it again")
    config_path = folder / "config.json"
    if not config_path.exists():
        raise CheckpointError(
            f"{folder} is not a checkpoint: it has no config.json (expected a Hugging Face "
            f"directory with config.json, *.safetensors and tokenizer files, or a GGUF file)"
            + _other_weights(folder)
        )
    described = read_json(config_path)
    config, left_out = model_config(described, str(config_path)), None
    found = _find_tensors(folder)
    nested = described.get("text_config")
    said = {**nested} if isinstance(nested, dict) else {}
    if text_part(described) is not described:
        # The levels of the config may differ in this, or not say it. A head by a name that is not
        # read is one too: the error is that `lm_head.weight` is missing.
        stored = any(tensor.name.endswith(HEAD) for tensor in found)
        untied = False in (level.get("tie_word_embeddings") for level in (described, said))
        if stored or not untied:
            config = dataclasses.replace(config, tie_embeddings=not stored)
        found, left_out = _of_text(found)
    said |= {key: value for key, value in described.items() if value is not None}
    tokenizer = {name: folder / name for name in TOKENIZER_FILES if (folder / name).exists()}
    if not tokenizer.keys() & {"tokenizer.json", "tokenizer.model"}:
        others = [path.name for name in TOKENIZERS for path in sorted(folder.glob(name))]
        hint = f"; {others[0]} is not read" if others else ""
        raise CheckpointError(
            f"{folder} has no tokenizer (tokenizer.json or tokenizer.model){hint}; "
            f"put the model's tokenizer files beside its weights"
        )
    naming = naming_of(tensor.name for tensor in found)
    found = mxfp4.unpacked(found)
    tied = config.tie_embeddings and config.traits.has_head
    head = tensor_name(config, naming, "head.table") if tied else None
    tensors = files.check_tensors(label, found, config, naming, head)
    _check_tied_head(config, naming, found, head)
    read = [config_path, *tokenizer.values()]
    if (folder / INDEX).exists():
        read.append(folder / INDEX)
    digests = {}
    for path in read:
        with reading(path):
            digests[path] = sha256_of(path)
    made = {}
    if "tokenizer.json" not in tokenizer:
        made = sentencepiece_files(folder, config.vocab_size)
    return files.Source(
        label=label,
        config=config,
        extras={key: said[key] for key in EXTRAS if said.get(key) is not None},
        naming=naming,
        tensors=tensors,
        read_files=digests,
        tokenizer={**tokenizer, **made},
        left_out=left_out,
    )


def _of_text(tensors: list[files.SourceTensor]) -> tuple[list[files.SourceTensor], str]:
    """The text model's tensors by the names that it has alone, and what the others are."""
    kept, parts = [], collections.Counter[str]()
    for tensor in tensors:
        name = tensor.name.replace(TEXT, "", 1)
        if name != tensor.name or name == HEAD:
            kept.append(dataclasses.replace(tensor, name=name))
        else:
            parts[name.removeprefix("model.").split(".")[0]] += 1
    count = f"{parts.total()} tensors of {', '.join(parts) or 'other parts'}"
    return kept, f"it is the text model alone: left out {count}"


def _find_tensors(folder: Path) -> list[files.SourceTensor]:
    if not (folder / INDEX).exists():
        if (folder / SINGLE).exists():
            return read_header(folder / SINGLE)
        raise CheckpointError(
            f"{folder} has no weights: neither {SINGLE} nor {INDEX}{_other_weights(folder)}"
        )
    placed = read_json(folder / INDEX).get("weight_map")
    if not isinstance(placed, dict):
        raise CheckpointError(f"{folder / INDEX} has no weight_map")
    tensors: list[files.SourceTensor] = []
    for name in sorted({str(file) for file in placed.values()}):
        path = folder / name
        if path.name != name:
            raise CheckpointError(
                f"{folder / INDEX} places tensors in {name!r}, expected the name of a "
                f"file in the same folder"
            )
        said = [key for key, file in placed.items() if file == name]
        if not path.exists():
            raise CheckpointError(f"{path} is missing; it holds {said[0]} and others")
        shard = {tensor.name: tensor for tensor in read_header(path)}
        lacking = [key for key in said if key not in shard]
        if lacking:
            raise CheckpointError(f"{path} does not hold {lacking[0]}, which {INDEX} says")
        tensors += [tensor for key, tensor in shard.items() if placed.get(key) == name]
    return tensors


def _other_weights(folder: Path) -> str:
    """What the folder holds in place of the weights that are read, for an error."""
    for name, said in OTHERS.items():
        for path in sorted(folder.glob(name)):
            return "; " + said.format(path.name, index=INDEX, single=SINGLE)
    return ""


def _check_tied_head(
    config: ModelConfig, naming: str, tensors: list[files.SourceTensor], head: str | None
) -> None:
    """Raises CheckpointError where a stored tied head differs from the embedding."""
    by_name = {tensor.name: tensor for tensor in tensors}
    stored = by_name.get(head) if head else None
    embed = by_name[tensor_name(config, naming, "embed.table")]
    if stored is not None and not _same_bytes(stored, embed):
        raise CheckpointError(
            f"{stored.file}: {stored.name} differs from {embed.name}, but the config says "
            f"tie_word_embeddings; set that to false in config.json if the head is its own"
        )


def _same_bytes(one: files.SourceTensor, other: files.SourceTensor) -> bool:
    if (one.nbytes, one.dtype) != (other.nbytes, other.dtype):
        return False
    with reading(one.file), open_plain(one.file) as first, open_plain(other.file) as second:
        first.seek(one.offset)
        second.seek(other.offset)
        for begin in range(0, one.nbytes, files.STEP):
            size = min(files.STEP, one.nbytes - begin)
            if first.read(size) != second.read(size):
                return False
    return True


def read_header(path: Path) -> list[files.SourceTensor]:
    """The tensors of a file, in the order of their bytes.

    Raises:
      CheckpointError: the file is not safetensors, damaged or truncated, or has weights of a type
        that is not implemented (quantised).
    """
    with reading(path), open_plain(path) as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else HEADER_LIMIT
        size = path.stat().st_size
        if length >= min(HEADER_LIMIT, size):
            raise CheckpointError(
                f"{path} is not a safetensors file, or truncated in its header ({size} bytes)"
            )
        raw = file.read(length)
    header, begin = parse_json(raw, f"{path} is not a safetensors file"), 8 + length
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


def _tensor(path: Path, name: str, entry: Any, begin: int) -> files.SourceTensor:
    try:
        shape = tuple(int(size) for size in entry["shape"])
        first, last = (int(at) for at in entry["data_offsets"])
        kind = str(entry["dtype"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the header entry of {name} is damaged") from error
    packed = kind == "U8" and name.endswith((mxfp4.BLOCKS, mxfp4.SCALES))
    if not (packed or kind in DTYPES):
        raise CheckpointError(
            f"{path}: tensor {name} has type {kind}; implemented are {', '.join(DTYPES)} "
            f"(quantised weights are read from GGUF files)"
        )
    dtype = np.dtype(np.uint8) if packed else DTYPES[kind]
    if last - first != math.prod(shape) * dtype.itemsize or not all(shape):
        raise CheckpointError(
            f"{path}: tensor {name} {list(shape)} of type {kind} takes {last - first} bytes"
        )

    def decode(raw: bytes, rows: range) -> np.ndarray:
        return np.frombuffer(raw, dtype).reshape(len(rows), -1)

    return files.SourceTensor(
        name=name,
        shape=shape,
        # Nothing here computes in float64.
        dtype=np.dtype(np.float32) if kind == "F64" else dtype,
        file=path,
        offset=begin + first,
        nbytes=last - first,
        decode=decode,
    )


def fetch(repository: str, revision: str | None) -> Path:
    """The folder of a hub repository in the local cache; fetches missing files.

    Raises:
      CheckpointError: the hub does not answer, or has no such repository.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["config.json", SINGLE, INDEX, "model-*.safetensors", *TOKENIZER_FILES]
    try:
        folder = huggingface_hub.snapshot_download(
            repository, revision=revision, allow_patterns=wanted
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{repository} is no local path and could not be fetched from the hub: "
            f"{first_line(error)}"
        ) from error
    return Path(folder)
