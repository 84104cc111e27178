"""`tokenizer.model`, a sentencepiece model in protocol-buffer form -> `tokenizer.json`.

Checkpoints from before `tokenizer.json` (Llama 2 as first published, InternLM2) have only this.
The few fields that are needed are read here, by number, from sentencepiece_model.proto: pieces (1)
with text (1), score (2) and kind (3); the trainer's model type (2, 3); the normaliser's dummy
prefix (3, 3).
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkpoints_convert.vocabulary.build import (
    CONTROL,
    NORMAL,
    Vocabulary,
    check_ids,
    sentencepiece,
)
from jax_longctx.errors import CheckpointError

__all__ = ["sentencepiece_files"]

BPE = 2


def sentencepiece_files(folder: Path, vocab_size: int | None = None) -> dict[str, str]:
    """File name -> text, from `tokenizer.model` and the added tokens of `tokenizer_config.json`.

    Args:
      vocab_size: embeddings the model has, to be checked.

    Raises:
      CheckpointError: the model is damaged, or no BPE model.
    """
    path = folder / "tokenizer.model"
    try:
        tokens, scores, kinds, prefix = _read(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, IndexError, struct.error) as error:
        raise CheckpointError(f"{path} is not a sentencepiece BPE model: {error}") from error
    config = _config(folder)
    for key, entry in config.get("added_tokens_decoder", {}).items():
        index, text = int(key), entry["content"]
        # Ids between the model's own and the added ones have no text.
        for gap in range(len(tokens), index + 1):
            tokens.append(f"<unused_{gap}>")
            scores.append(0.0)
            kinds.append(CONTROL)
        tokens[index], kinds[index] = text, CONTROL
    if vocab_size is not None:
        check_ids(path, [len(tokens) - 1], vocab_size)
    bos = config.get("bos_token", "<s>")
    bos = bos["content"] if isinstance(bos, dict) else bos
    adds_bos = config.get("add_bos_token", True) and bos in tokens
    vocabulary = Vocabulary(tokens=tokens, kinds=kinds, bos=tokens.index(bos) if adds_bos else None)
    files = {"tokenizer.json": sentencepiece(vocabulary, scores, prefix=prefix).to_str()}
    if not (folder / "tokenizer_config.json").exists():
        said: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        said = {name: text for name, text in said.items() if text in tokens}
        files["tokenizer_config.json"] = json.dumps({**said, "add_bos_token": bool(adds_bos)})
    return files


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return config


def _read(data: bytes) -> tuple[list[str], list[float], list[int], bool]:
    """Pieces, scores, kinds, and whether a text gets a space put before it."""
    tokens: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    prefix, model_type = True, 1
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(value))
            tokens.append(piece[1].decode("utf-8"))
            scores.append(struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0)
            kinds.append(piece.get(3, NORMAL))
        elif number == 2:
            model_type = dict(_fields(value)).get(3, 1)
        elif number == 3:
            prefix = bool(dict(_fields(value)).get(3, 1))
    if not tokens:
        raise ValueError("it has no pieces")
    if model_type != BPE:
        raise ValueError(f"its model type is {model_type}, expected {BPE} (BPE)")
    return tokens, scores, kinds, prefix


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of a message: ints for varints, bytes for everything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value, at = _varint(data, at)
            yield number, value
            continue
        if wire == 2:
            size, at = _varint(data, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > len(data):
            raise ValueError("it is truncated")
        yield number, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7
