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

from checkpoints_convert.sources.files import first_line, read_json
from checkpoints_convert.vocabulary.build import (
    CONTROL,
    NORMAL,
    Vocabulary,
    sentencepiece,
)
from jax_longctx.errors import CheckpointError

__all__ = ["sentencepiece_files"]

BPE = 2


def sentencepiece_files(folder: Path, vocab_size: int) -> dict[str, str]:
    """File name -> text, from `tokenizer.model` and the added tokens of `tokenizer_config.json`.

    Args:
      vocab_size: embeddings the model has, which bound the ids.

    Raises:
      CheckpointError: the model is damaged, or no BPE model.
    """
    path = folder / "tokenizer.model"
    try:
        tokens, scores, kinds, prefix = _read(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise CheckpointError(f"{path} is not a sentencepiece BPE model: {error}") from error
    settings = folder / "tokenizer_config.json"
    config = read_json(settings) if settings.exists() else {}
    try:
        added = config.get("added_tokens_decoder", {})
        added = [(int(key), str(entry["content"])) for key, entry in added.items()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{settings}: its added_tokens_decoder is damaged") from error
    for index, text in added:
        if not 0 <= index < vocab_size:
            raise CheckpointError(
                f"{settings}: wrong tokenizer, its ids reach {index!s:.20} but the model has "
                f"{vocab_size} embeddings; use the tokenizer files of this model"
            )
        # Ids between the model's own and the added ones have no text.
        for gap in range(len(tokens), index + 1):
            tokens.append(f"<unused_{gap}>")
            scores.append(0.0)
            kinds.append(CONTROL)
        tokens[index], kinds[index] = text, CONTROL
    bos = config.get("bos_token", "<s>")
    bos = bos.get("content") if isinstance(bos, dict) else bos
    bos_id = tokens.index(bos) if isinstance(bos, str) and bos in tokens else None
    if not config.get("add_bos_token", True):
        bos_id = None
    vocabulary = Vocabulary(tokens=tokens, kinds=kinds, bos=bos_id)
    try:
        files = {"tokenizer.json": sentencepiece(vocabulary, scores, prefix=prefix).to_str()}
    except Exception as error:  # the package raises the bare class on any fault in the pieces
        raise CheckpointError(f"{path}: the tokenizer is damaged: {first_line(error)}") from error
    if not settings.exists():
        said: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        said = {name: text for name, text in said.items() if text in tokens}
        files["tokenizer_config.json"] = json.dumps({**said, "add_bos_token": bos_id is not None})
    return files


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
        if shift > 63:
            raise ValueError("an integer of more than 64 bits")
