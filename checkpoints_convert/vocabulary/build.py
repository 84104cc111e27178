"""A `tokenizer.json` from a vocabulary, through the `tokenizers` library.

Two families: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM), which differ in how text is split
before merging, and sentencepiece BPE (Llama 2, Mistral, InternLM2), whose merges follow from the
pieces and their scores.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, processors
from tokenizers import pre_tokenizers as pre

from jax_longctx.errors import CheckpointError

__all__ = [
    "CONTROL",
    "NORMAL",
    "UNKNOWN",
    "USER_DEFINED",
    "Split",
    "Vocabulary",
    "byte_level",
    "sentencepiece",
    "splits",
]

# Kinds of tokens: sentencepiece's numbers, which GGUF uses too.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST
_QWEN2 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How a byte-level tokenizer cuts text before merging.

    Attributes:
      patterns: applied one after another; what they match and what lies between become pieces.
      whole: a piece that is in the vocabulary is one token, whatever the merges say.
      bos: texts begin with the beginning-of-text token unless the file says otherwise.
      nfc: text is brought to Unicode's composed form first.
    """

    patterns: tuple[str, ...]
    whole: bool = False
    bos: bool = False
    nfc: bool = False


_LLAMA3_SPLIT = Split(patterns=(_LLAMA3,), whole=True, bos=True)
_QWEN2_SPLIT = Split(patterns=(_QWEN2,), nfc=True)

# By the name that llama.cpp gives (`tokenizer.ggml.pre`).
SPLITS = {
    "gpt-2": Split(patterns=(_GPT2,)),
    "smollm": Split(patterns=(r"\p{N}", _GPT2)),
    "llama3": _LLAMA3_SPLIT,
    "llama-v3": _LLAMA3_SPLIT,
    "llama-bpe": _LLAMA3_SPLIT,
    "qwen2": _QWEN2_SPLIT,
    "deepseek-r1-qwen": _QWEN2_SPLIT,
    "tekken": Split(patterns=(_TEKKEN,), whole=True, bos=True),
}


def splits(path: Path, name: str | None) -> Split:
    """The way of splitting of that name.

    Raises:
      CheckpointError: it is not known.
    """
    if name not in SPLITS:
        raise CheckpointError(
            f"{path}: the tokenizer splits text as {name!r}, which is not implemented "
            f"(implemented: {', '.join(SPLITS)}); convert the Hugging Face directory instead"
        )
    return SPLITS[name]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens by id.

    Attributes:
      kinds: of each token (NORMAL, CONTROL ...).
      bos: id that a text begins with, or None.
    """

    tokens: Sequence[str]
    kinds: Sequence[int]
    bos: int | None

    @property
    def ids(self) -> dict[str, int]:
        """Token -> id."""
        return {token: index for index, token in enumerate(self.tokens)}

    def of_kind(self, kind: int) -> list[str]:
        """Tokens of one kind."""
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


def sentencepiece(
    vocabulary: Vocabulary, scores: Sequence[float], *, prefix: bool = True
) -> Tokenizer:
    """Sentencepiece BPE; `prefix`: a text is read as if a space stood before it."""
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
    spaces = [normalizers.Replace(" ", "\u2581")]
    if prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), *spaces])
    else:
        tokenizer.normalizer = normalizers.Sequence(spaces)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] * prefix)])
    return _finish(tokenizer, vocabulary)


def _merges(vocabulary: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every way a piece is made of two others, the best scored piece first."""
    rows = zip(vocabulary.tokens, scores, vocabulary.kinds, strict=True)
    ids = vocabulary.ids
    found: list[tuple[float, int, int, str, str]] = []
    for token, score, kind in rows:
        if kind != NORMAL:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                found.append((-score, ids[left], ids[right], left, right))
    found.sort()
    return [(left, right) for *_, left, right in found]


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
