"""Telling from what a person typed where the checkpoint is."""

import re
import tempfile
from pathlib import Path

from checkpoints_convert.sources.base import Source
from checkpoints_convert.sources.gguf import Gguf
from checkpoints_convert.sources.huggingface import HuggingFace, fetch
from jax_longctx.errors import CheckpointError, LongctxError
from jax_longctx.text import Tokenizer, check_vocabulary

__all__ = ["open_source"]

HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


def open_source(source: str | Path) -> Source:
    """A directory, a `.gguf` file, or a hub id (`owner/name`, `owner/name@revision`).

    Everything that can be known without reading the weights is checked here.

    Raises:
      CheckpointError: not a checkpoint, or an incomplete one.
      ConfigError: the architecture is not implemented.
    """
    opened = _open(source)
    _check_tokenizer(opened)
    return opened


def _open(source: str | Path) -> Source:
    path = Path(source).expanduser()
    if path.is_dir():
        return HuggingFace(path, str(source))
    if path.is_file():
        if path.name.endswith(".safetensors"):
            raise CheckpointError(f"{path}: name its folder, which holds the config and tokenizer")
        return Gguf(path, str(source))
    hub = HUB_ID.fullmatch(str(source))
    if hub is None:
        raise CheckpointError(
            f"{source} does not exist; expected a Hugging Face directory, a GGUF file, "
            f"or a hub id such as owner/name"
        )
    return HuggingFace(fetch(hub["name"], hub["revision"]), str(source))


def _check_tokenizer(source: Source) -> None:
    """The tokenizer files must be ones that the other commands can load."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            source.write_tokenizer(Path(folder))
            check_vocabulary(Tokenizer.load(folder), source.config)
        except OSError as error:
            raise CheckpointError(
                f"{source.label}: its tokenizer cannot be read: {error}"
            ) from error
        except LongctxError as error:
            # Of the copies, a person knows the names alone.
            said = str(error).replace(f"{folder}/", "")
            raise CheckpointError(f"{source.label}: {said}") from error
