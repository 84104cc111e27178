"""Tokenizers made from GGUF metadata or from a sentencepiece model, as a `tokenizer.json`.

Checkpoints older than `tokenizer.json` (Llama 2 as first published, InternLM2) have only a
sentencepiece model, `tokenizer.model`.

There are two families: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM), with a split of the text
before the merges, and sentencepiece BPE (Llama 2, Mistral, InternLM2), whose merges follow from the
pieces and their scores.
"""

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import DecodeError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from checkpoints_convert.splits import SPLITS, Split
from jax_longctx.errors import CheckpointError, LongctxError
from jax_longctx.files import first_line, read_bytes, read_json
from jax_longctx.text.tokenizer import END_TOKENS

# Types of tokens in sentencepiece and GGUF.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4
# The most characters of a piece; published ones have some 100.
LONGEST = 1000
# The first line of a vocabulary of tiktoken: a token in base64, and its rank.
TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
# The model type of BPE in sentencepiece.
BPE = 2

PREFIX = "tokenizer.ggml."
SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
# Ids that end an answer: end of text, of turn, of message.
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# The model's sampling, by its names in generation_config.json.
SAMPLING = {
    "temperature": "temp",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens by id.

    Attributes:
      kinds: type of each token (NORMAL, CONTROL ...).
      bos: id at the start of a text, or None.
    """

    tokens: Sequence[str]
    kinds: Sequence[int]
    bos: int | None

    @property
    def ids(self) -> dict[str, int]:
        """Token -> id."""
        return {token: index for index, token in enumerate(self.tokens)}

    def of_kind(self, kind: int) -> list[str]:
        """Tokens of one type."""
        return [token for token, own in zip(self.tokens, self.kinds, strict=True) if own == kind]


def byte_level(vocabulary: Vocabulary, merges: Sequence[str], split: Split) -> Tokenizer:
    """Byte-level BPE with the merges of the file (`"left right"`)."""
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, pairs, ignore_merges=split.whole))  # pyright: ignore[reportArgumentType]
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    cuts = [pre.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    tokenizer.pre_tokenizer = pre.Sequence(
        [*cuts, pre.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return _finish(tokenizer, vocabulary)


def sentencepiece(vocabulary: Vocabulary, scores: Sequence[float], *, prefix: bool) -> Tokenizer:
    """Sentencepiece BPE; with `prefix`, a space is put before each text."""
    ids = vocabulary.ids
    unknown = vocabulary.of_kind(UNKNOWN)
    model = models.BPE(
        ids,
        _merges(vocabulary, scores),
        unk_token=unknown[0] if unknown else None,
        fuse_unk=True,
        byte_fallback="<0x00>" in ids,
    )
    tokenizer = Tokenizer(model)
    prepend = [normalizers.Prepend("\u2581")] * prefix
    tokenizer.normalizer = normalizers.Sequence([*prepend, normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * prefix)])
    return _finish(tokenizer, vocabulary)


def _merges(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """All splits of a piece into two others, the piece with the best score first."""
    rows = list(zip(vocabulary.tokens, scores, vocabulary.kinds, strict=True))
    ids = vocabulary.ids
    longest = max((len(token) for token, _, kind in rows if kind == NORMAL), default=0)
    if longest > LONGEST:
        # The splits of a piece grow with the square of its length.
        raise ValueError(f"a piece of {longest:,} characters, expected at most {LONGEST:,}")
    found = [
        (-score, ids[token[:cut]], ids[token[cut:]], token[:cut], token[cut:])
        for token, score, kind in rows
        if kind == NORMAL
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return [(left, right) for *_, left, right in sorted(found)]


def _finish(tokenizer: Tokenizer, vocabulary: Vocabulary) -> Tokenizer:
    special = vocabulary.of_kind(CONTROL) + vocabulary.of_kind(UNKNOWN)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    plain = vocabulary.of_kind(USER_DEFINED)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])
    if vocabulary.bos is not None:
        text = vocabulary.tokens[vocabulary.bos]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{text} $A",
            pair=f"{text} $A {text}:1 $B:1",
            special_tokens=[(text, vocabulary.bos)],
        )
    return tokenizer


def gguf_tokenizer_files(path: Path, metadata: Mapping[str, Any]) -> dict[str, str]:
    """File name -> text, for tokenizer.json and the files that belong to it.

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
        return _tokenizer_files(path, metadata, said)
    except LongctxError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{path}: the tokenizer has no {error.args[0]}") from error
    except Exception as error:  # `tokenizers` raises Exception itself
        raise CheckpointError(f"{path}: the tokenizer is damaged: {first_line(error)}") from error


def _tokenizer_files(
    path: Path, metadata: Mapping[str, Any], said: Mapping[str, Any]
) -> dict[str, str]:
    tokens, kind = said["tokens"], said["model"]
    if kind == "gpt2" and said.get("pre") not in SPLITS:
        raise CheckpointError(
            f"{path}: the tokenizer splits text as {said.get('pre')!r}, which is not implemented "
            f"(implemented: {', '.join(SPLITS)}); convert the Hugging Face directory instead"
        )
    split = SPLITS[said["pre"]] if kind == "gpt2" else None
    adds_bos = said.get("add_bos_token", split.bos if split is not None else True)
    special = {
        name: tokens[said[key]]
        for name, key in SPECIAL.items()
        if 0 <= said.get(key, -1) < len(tokens)
    }
    kinds = said.get("token_type") or [NORMAL] * len(tokens)
    # As in llama.cpp: some files do not mark ends of turns. "</s>" may be a piece of HTML.
    kinds = [
        CONTROL if token in END_TOKENS and token != "</s>" else kind
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    vocabulary = Vocabulary(
        tokens=tokens,
        kinds=kinds,
        bos=said.get("bos_token_id") if adds_bos else None,
    )
    if split is not None:
        tokenizer = byte_level(vocabulary, said["merges"], split)
    else:
        prefix = bool(said.get("add_space_prefix", True))
        tokenizer = sentencepiece(vocabulary, said["scores"], prefix=prefix)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(adds_bos),
        "add_eos_token": False,
        **special,
    }
    architecture = metadata.get("general.architecture")
    if (longest := metadata.get(f"{architecture}.context_length")) is not None:
        config["model_max_length"] = longest
    if (template := metadata.get("tokenizer.chat_template")) is not None:
        config["chat_template"] = template
    files = {
        "tokenizer.json": tokenizer.to_str(pretty=False),
        "tokenizer_config.json": json.dumps(config, ensure_ascii=False, indent=2),
    }
    ends = [said[key] for key in ENDS if key in said and 0 <= said[key] < len(tokens)]
    generation: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
    for name, key in SAMPLING.items():
        if (value := metadata.get(f"general.sampling.{key}")) is not None:
            # 0.6 as float32 is 0.60000002.
            generation[name] = float(f"{value:.6g}") if isinstance(value, float) else value
    if generation:
        files["generation_config.json"] = json.dumps(generation)
    return files


def sentencepiece_files(folder: Path, vocab_size: int) -> dict[str, str]:
    """File name -> text, from `tokenizer.model` and the added tokens of `tokenizer_config.json`.

    Args:
      vocab_size: embeddings of the model; only ids directly behind the model's own may be beyond.

    Raises:
      CheckpointError: the model is damaged, or is not BPE.
    """
    path = folder / "tokenizer.model"
    try:
        data = read_bytes(path)
        if TIKTOKEN.match(data):
            raise CheckpointError(
                f"{path} is a vocabulary of tiktoken, which is not read; put the model's "
                f"tokenizer.json beside it"
            )
        tokens, scores, kinds, prefix = _read_pieces(data)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, DecodeError) as error:
        raise CheckpointError(f"{path} is not a sentencepiece BPE model: {error}") from error
    settings, older = folder / "tokenizer_config.json", folder / "added_tokens.json"
    config = read_json(settings) if settings.exists() else {}
    decoder = config.get("added_tokens_decoder", {})
    try:
        added = {int(key): str(entry["content"]) for key, entry in decoder.items()}
        if not added and older.exists():
            added = {int(token): text for text, token in read_json(older).items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{settings}: its added_tokens_decoder is damaged") from error
    # Old Llama 2 folders add a padding token; the model has no embedding for it.
    most = max(vocab_size, len(tokens) + len(added))
    for index, text in sorted(added.items()):
        if not 0 <= index < most:
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
    except Exception as error:  # `tokenizers` raises Exception itself
        raise CheckpointError(f"{path}: the tokenizer is damaged: {first_line(error)}") from error
    if not settings.exists():
        said: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        said = {name: text for name, text in said.items() if text in tokens}
        files["tokenizer_config.json"] = json.dumps({**said, "add_bos_token": bos_id is not None})
    return files


def _read_pieces(data: bytes) -> tuple[list[str], list[float], list[int], bool]:
    """Pieces, scores, types, and whether a space is put before a text."""
    # sentencepiece's schema, which transformers 5 has for current versions of protobuf.
    from transformers.utils import sentencepiece_model_pb2_new as schema

    model: Any = schema.ModelProto.FromString(data)  # pyright: ignore[reportAttributeAccessIssue]
    if not model.pieces:
        raise ValueError("it has no pieces")
    if model.trainer_spec.model_type != BPE:
        raise ValueError(f"its model type is {model.trainer_spec.model_type}, expected {BPE} (BPE)")
    return (
        [piece.piece for piece in model.pieces],
        [piece.score for piece in model.pieces],
        [piece.type for piece in model.pieces],
        model.normalizer_spec.add_dummy_prefix,
    )
