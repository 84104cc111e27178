"""Text to ids: which special tokens count, and where a text begins.

A special token that is written in a document is text; one that a chat template writes counts. And
many sentencepiece tokenizers put a space before each text (the dummy prefix), which must not stand
before a piece that continues another.

Most texts need no care and are encoded at once. Else the text is cut at the added tokens that
count, and each section is encoded by a copy of the tokenizer that knows no special token, with the
prefix or without. The ids are those of the whole text: sections are not cut further.
"""

import json
import re
import secrets
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

import tokenizers

from jax_longctx.errors import InputError

# Added tokens that are special though some files do not say so, as in llama.cpp.
_LOOKS_SPECIAL = re.compile(r"<\|[^|\s]+\|>|<\uff5c[^\uff5c\s]+\uff5c>")

# Parts of a text: the first character of each, and the one behind it.
Spans = Sequence[tuple[int, int]]


class Encoder:
    """Encodes with one backend.

    Args:
      ends: ids that end an answer; added tokens among them count as special.
    """

    def __init__(self, backend: tokenizers.Tokenizer, ends: Container[int]):
        added = backend.get_added_tokens_decoder()
        self._added = {token: info.content for token, info in added.items()}
        special = {
            token: info
            for token, info in added.items()
            if info.special or token in ends or _LOOKS_SPECIAL.fullmatch(info.content)
        }
        self._special = {token: info.content for token, info in special.items()}
        folds = backend.normalizer is not None
        self._folds = folds and any(info.normalized for info in special.values())
        # A copy of the backend by (whether the text begins, whether special tokens are plain).
        self._copies = {(True, False): backend}
        normalizer, splitter = _described(backend.normalizer), _described(backend.pre_tokenizer)
        self._has_prefix = (normalizer, splitter) != (_continued(normalizer), _continued(splitter))
        # Added tokens behind which the prefix stands again. A normalizer does not see what is
        # between tokens that are found in its own output.
        every = any(word in json.dumps(splitter) for word in ('"always"', '_space": true'))
        self._again = frozenset(
            token
            for token, info in added.items()
            if self._has_prefix
            and (every or ('"Prepend"' in json.dumps(normalizer) and not info.normalized))
        )

    def encode(self, text: str, plain: Spans = (), *, begins: bool) -> list[int]:
        """Token ids of `text`.

        Args:
          plain: parts in which special tokens are text.
          begins: no other text stands before this one.

        Raises:
          InputError: the text holds half of a surrogate pair.
        """
        ids, written = self._ids(text, begins), False
        if plain:
            starts, ends = zip(*plain, strict=True)
            others = zip((0, *ends), (*starts, len(text)), strict=True)
            own = sum(self._count(self._ids(text[a:b], True)) for a, b in others)
            written = self._count(ids) != own
        if written or not (begins or self._again.isdisjoint(ids)):
            return self._in_sections(text, plain, begins)
        return ids

    def special_in(self, text: str) -> list[int]:
        """Index of the first character of each special token that is written in `text`."""
        if not self._folds and not any(content in text for content in self._special.values()):
            return []
        whole = _encoded(self._copy(True, False).encode_batch, text)
        return [
            max(start, text.find(self._special[token], start, end))
            for token, (start, end) in zip(whole.ids, whole.offsets, strict=True)
            if token in self._special
        ]

    def _in_sections(self, text: str, plain: Spans, begins: bool) -> list[int]:
        whole = _encoded(self._copy(begins, False).encode_batch, text)
        ids: list[int] = []
        at = 0
        for token, (start, end) in zip(whole.ids, whole.offsets, strict=True):
            content = self._added.get(token, "")
            # An unknown character has the id of an added token, whose text it is not.
            first = text.find(content, start, end) if content else -1
            last = first + len(content)
            as_text = token in self._special and any(first < b and a < last for a, b in plain)
            if first >= 0 and not as_text:
                ids += [*self._ids(text[at:start], begins, as_text=True), token]
                at, begins = end, token in self._again
        return ids + self._ids(text[at:], begins, as_text=True)

    def _ids(self, text: str, begins: bool, *, as_text: bool = False) -> list[int]:
        # A batch of one, because `encode` blocks other threads, half a second a megabyte, and
        # with them the handling of Ctrl-C.
        return _encoded(self._copy(begins, as_text).encode_batch_fast, text).ids if text else []

    def _count(self, ids: Iterable[int]) -> int:
        return sum(map(self._special.__contains__, ids))

    def _copy(self, begins: bool, as_text: bool) -> tokenizers.Tokenizer:
        key = begins or not self._has_prefix, as_text
        if key not in self._copies:
            described = json.loads(self._copies[True, False].to_str())
            if not key[0]:
                for name in ("normalizer", "pre_tokenizer"):
                    described[name] = _continued(described[name])
            if as_text:
                _hide(described, self._special.values())
            self._copies[key] = tokenizers.Tokenizer.from_str(json.dumps(described))
        return self._copies[key]


def _encoded(encode: Callable[..., list[tokenizers.Encoding]], text: str) -> tokenizers.Encoding:
    try:
        (encoded,) = encode([text], add_special_tokens=False)
    except TypeError as error:  # the package raises this for half a surrogate pair
        raise InputError("the text holds characters that are not Unicode (no UTF-8)") from error
    return encoded


def _described(step: Any) -> Any:
    """A normalizer or pre-tokenizer as `tokenizer.json` writes it."""
    return None if step is None else json.loads(step.__getstate__())


def _continued(step: Any, first: bool = True) -> Any:
    """A step as `tokenizer.json` writes it, for text that continues another: without prefix.

    Args:
      first: whether it is the first of its steps. Behind another one, a step that puts a prefix
        before all that it gets puts it before words, which keep it.
    """
    match step:
        case {"type": "Prepend"}:
            return None
        case {"type": "Metaspace", "prepend_scheme": scheme} if first or scheme == "first":
            return {**step, "prepend_scheme": "never"}
        case {"type": "ByteLevel"} if first:
            return {**step, "add_prefix_space": False}
        case {"type": "Sequence"}:
            (name,) = step.keys() - {"type"}
            steps = [_continued(each, first=at == 0) for at, each in enumerate(step[name])]
            return {**step, name: [each for each in steps if each is not None]}
    return step


def _hide(described: dict[str, Any], contents: Iterable[str]) -> None:
    """Gives the tokens of a `tokenizer.json` names that no text holds; their ids stay."""
    secret = secrets.token_hex(8)
    hidden = {text: f"\ufdd0{secret}{number}" for number, text in enumerate(contents)}
    for token in described["added_tokens"]:
        token["content"] = hidden.get(token["content"], token["content"])
    model = described["model"]
    pieces = model["vocab"]
    if isinstance(pieces, dict):
        model["vocab"] = {hidden.get(piece, piece): token for piece, token in pieces.items()}
    else:  # Unigram
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in pieces]
    if "merges" in model:
        merges = model["merges"]
        model["merges"] = [
            pair for pair in merges if hidden.keys().isdisjoint((*pair, "".join(pair)))
        ]
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
    described["post_processor"] = None
