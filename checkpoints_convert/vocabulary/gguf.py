"""A GGUF file's tokenizer and chat template -> the files Hugging Face would have."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoints_convert.sources.files import first_line
from checkpoints_convert.vocabulary.build import (
    NORMAL,
    Vocabulary,
    byte_level,
    sentencepiece,
    splits,
)
from jax_longctx.errors import CheckpointError, LongctxError

__all__ = ["gguf_tokenizer_files"]

PREFIX = "tokenizer.ggml."
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Ids that end an answer: of the text, of a turn, of a message.
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")


def gguf_tokenizer_files(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    """File name -> text, for tokenizer.json and its companions.

    Raises:
      CheckpointError: the metadata has no tokenizer, a damaged one, or one that is not implemented.
    """
    said = {
        key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)
    }
    tokens = said.get("tokens")
    if not tokens or "model" not in said:
        raise CheckpointError(f"{path} holds no tokenizer; convert the Hugging Face directory")
    kind = said["model"]
    if kind not in ("gpt2", "llama"):
        raise CheckpointError(
            f"{path}: a tokenizer of type {kind!r} is not implemented (implemented: gpt2, llama)"
        )
    try:
        return _files(path, metadata, said)
    except LongctxError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{path}: the tokenizer has no {error.args[0]}") from error
    except Exception as error:  # the package raises the bare class on any fault in merges or tokens
        raise CheckpointError(f"{path}: the tokenizer is damaged: {first_line(error)}") from error


def _files(path: Path, metadata: Mapping[str, Any], said: Mapping[str, Any]) -> dict[str, str]:
    tokens, kind = said["tokens"], said["model"]
    split = splits(path, said.get("pre")) if kind == "gpt2" else None
    adds_bos = said.get("add_bos_token", split.bos if split is not None else True)
    special = {
        name: tokens[said[key]]
        for name, key in SPECIAL.items()
        if 0 <= said.get(key, -1) < len(tokens)
    }
    vocabulary = Vocabulary(
        tokens=tokens,
        kinds=said.get("token_type") or [NORMAL] * len(tokens),
        bos=said.get("bos_token_id") if adds_bos else None,
    )
    if split is not None:
        tokenizer = byte_level(vocabulary, said["merges"], split)
    else:
        prefix = bool(said.get("add_space_prefix", True))
        tokenizer = sentencepiece(vocabulary, said["scores"], prefix=prefix)
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": _config(metadata, special, bool(adds_bos)),
    }
    ends = [said[key] for key in ENDS if key in said]
    if ends:
        files["generation_config.json"] = json.dumps({"eos_token_id": list(dict.fromkeys(ends))})
    return files


def _config(metadata: Mapping[str, Any], special: Mapping[str, str], adds_bos: bool) -> str:
    architecture = metadata.get("general.architecture")
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": adds_bos,
        "add_eos_token": False,
        **special,
    }
    if (length := metadata.get(f"{architecture}.context_length")) is not None:
        config["model_max_length"] = length
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    return json.dumps(config, ensure_ascii=False, indent=2)
