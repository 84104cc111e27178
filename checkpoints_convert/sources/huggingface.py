"""A Hugging Face checkpoint: config.json, safetensors (one file or indexed shards), tokenizer.

A hub id is first fetched by `huggingface_hub` into its cache, only the files named here.
"""

import shutil
from pathlib import Path
from typing import Any

from checkpoints_convert.names import naming_of
from checkpoints_convert.sources.base import SourceTensor, check_tensors
from checkpoints_convert.sources.config import model_config
from checkpoints_convert.sources.files import first_line, read_json, sha256_of, unreadable
from checkpoints_convert.sources.safetensors import read_header
from checkpoints_convert.vocabulary import sentencepiece_files
from jax_longctx.errors import CheckpointError

__all__ = ["TOKENIZER_FILES", "HuggingFace", "fetch"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Copied beside the parameters, and back on export. The first is the tokenizer itself.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)

# Of the config, what an export gives back beside the model itself.
EXTRAS = ("bos_token_id", "eos_token_id", "pad_token_id")


class HuggingFace:
    """A directory as `save_pretrained` writes it (see `Source`).

    Raises:
      CheckpointError: the directory or a file in it is incomplete or damaged.
      ConfigError: the architecture is not implemented.
    """

    def __init__(self, folder: Path, label: str):
        self.label = label
        self._folder = folder
        config_path = folder / "config.json"
        if not config_path.exists():
            raise CheckpointError(
                f"{folder} is not a checkpoint: it has no config.json (expected a Hugging Face "
                f"directory with config.json, *.safetensors and tokenizer files, or a GGUF file)"
            )
        described = read_json(config_path)
        self.config = model_config(described)
        self.extras: dict[str, Any] = {
            key: described[key] for key in EXTRAS if described.get(key) is not None
        }
        self._tokenizer = self._find_tokenizer()
        found = self._find_tensors()
        self.naming = naming_of(tensor.name for tensor in found)
        self.tensors = check_tensors(label, found, self.config, self.naming, self._is_tied_head)
        self._check_tied_head(found)
        read = [config_path, *self._tokenizer]
        if (folder / INDEX).exists():
            read.append(folder / INDEX)
        self.read_files = {path: sha256_of(path) for path in read}

    def write_tokenizer(self, folder: Path) -> None:
        """Copies the tokenizer files; makes tokenizer.json where only tokenizer.model is."""
        for path in self._tokenizer:
            shutil.copyfile(path, folder / path.name)
        if not (folder / "tokenizer.json").exists():
            for name, text in sentencepiece_files(self._folder, self.config.vocab_size).items():
                (folder / name).write_text(text, encoding="utf-8")

    def _find_tokenizer(self) -> list[Path]:
        paths = [self._folder / name for name in TOKENIZER_FILES]
        paths = [path for path in paths if path.exists()]
        names = {path.name for path in paths}
        if not names & {"tokenizer.json", "tokenizer.model"}:
            raise CheckpointError(
                f"{self._folder} has no tokenizer (tokenizer.json or tokenizer.model); "
                f"put the model's tokenizer files beside its weights"
            )
        return paths

    def _find_tensors(self) -> list[SourceTensor]:
        if not (self._folder / INDEX).exists():
            if (self._folder / SINGLE).exists():
                return read_header(self._folder / SINGLE)
            others = sorted(path.name for path in self._folder.glob("*.bin"))
            hint = f"; {others[0]} is not read, save it as safetensors" if others else ""
            raise CheckpointError(
                f"{self._folder} has no weights: neither {SINGLE} nor {INDEX}{hint}"
            )
        placed = read_json(self._folder / INDEX).get("weight_map")
        if not isinstance(placed, dict):
            raise CheckpointError(f"{self._folder / INDEX} has no weight_map")
        tensors: list[SourceTensor] = []
        for name in sorted({str(file) for file in placed.values()}):
            path = self._folder / name
            if path.name != name:
                raise CheckpointError(
                    f"{self._folder / INDEX} places tensors in {name!r}, expected the name of a "
                    f"file in the same folder"
                )
            if not path.exists():
                missing = next(key for key, file in placed.items() if file == name)
                raise CheckpointError(f"{path} is missing; it holds {missing} and others")
            shard = read_header(path)
            held = {tensor.name for tensor in shard}
            lacking = [key for key, file in placed.items() if file == name and key not in held]
            if lacking:
                raise CheckpointError(f"{path} does not hold {lacking[0]}, which {INDEX} says")
            tensors += [tensor for tensor in shard if placed.get(tensor.name) == name]
        return tensors

    def _is_tied_head(self, name: str) -> bool:
        return self.config.tie_embeddings and name in ("lm_head.weight", "output.weight")

    def _check_tied_head(self, tensors: list[SourceTensor]) -> None:
        """A head that is stored though tied is left out, so it must be the embedding indeed."""
        heads = [tensor for tensor in tensors if self._is_tied_head(tensor.name)]
        if not heads:
            return
        (embed,) = [
            tensor
            for tensor in self.tensors
            if tensor.name in ("model.embed_tokens.weight", "model.tok_embeddings.weight")
        ]
        if not _same_bytes(heads[0], embed):
            raise CheckpointError(
                f"{heads[0].file}: {heads[0].name} differs from {embed.name}, but the config says "
                f"tie_word_embeddings; set that to false in config.json if the head is its own"
            )


def _same_bytes(one: SourceTensor, other: SourceTensor) -> bool:
    if (one.nbytes, one.dtype) != (other.nbytes, other.dtype):
        return False
    step = 8 << 20
    try:
        with one.file.open("rb") as first, other.file.open("rb") as second:
            first.seek(one.offset)
            second.seek(other.offset)
            for begin in range(0, one.nbytes, step):
                size = min(step, one.nbytes - begin)
                if first.read(size) != second.read(size):
                    return False
    except OSError as error:
        raise unreadable(one.file, error) from error
    return True


def fetch(repository: str, revision: str | None) -> Path:
    """A hub repository's files in the local cache, fetched where they are not there yet.

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
