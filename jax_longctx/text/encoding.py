"""Text to ids: which special tokens count, and where a text begins.

A special token that is written in a document is text; one that a chat template writes counts. And
many sentencepiece tokenizers put a space before each text (the dummy prefix), which must not stand
before a piece that continues another.

Most texts need no care. Else a text is cut at the added tokens that count, and each section is
encoded by a copy of the tokenizer that knows no special token, with the prefix or without.
"""

import json
import re
import secrets
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import tokenizers

from jax_longctx.errors import InputError

# Added tokens that are special though some files do not say so, as in llama.cpp.
_LOOKS_SPECIAL = re.compile(r"<\|[^|\s]+\|>|<\uff5c[^\uff5c\s]+\uff5c>")

# Parts of a text: the first character of each, and the one behind it.
Spans = Sequence[tuple[int, int]]


class Encoder:
    """Encodes with one backend; added tokens among `ends` are special."""

    def __init__(self, backend: tokenizers.Tokenizer, ends: Container[int]):
        added = backend.get_added_tokens_decoder()
        self._added = {token: info.content for token, info in added.items()}
        self._special = {
            token: info.content
            for token, info in added.items()
            if info.special or token in ends or _LOOKS_SPECIAL.fullmatch(info.content)
        }
        # Copies of the backend by (whether the text begins, whether special tokens are text).
        self._copies = {(True, False): backend}
        steps = [
            None if step is None else json.loads(step.__getstate__())
            for step in (backend.normalizer, backend.pre_tokenizer)
        ]
        self._has_prefix = steps != [_continued(step) for step in steps]
        said = json.dumps(steps)
        every = '"always"' in said or '"add_prefix_space": true' in said
        # Added tokens behind which the prefix stands again; a normalizer does not see where those
        # stand that are found in its own output.
        self._again = {
            token
            for token, info in added.items()
            if self._has_prefix and (every or ('"Prepend"' in said and not info.normalized))
        }

    def encode(self, text: str, plain: Spans = (), *, begins: bool) -> list[int]:
        """Token ids; special tokens in the `plain` parts are text.

        Args:
          begins: no other text stands before this one.

        Raises:
          InputError: the text holds half of a surrogate pair.
        """
        ids, own = self._ids(text, begins), None
        if plain:
            starts, ends = zip(*plain, strict=True)
            others = zip((0, *ends), (*starts, len(text)), strict=True)
            own = sum(self._count(self._ids(text[a:b], True)) for a, b in others)
        if own in (None, self._count(ids)) and (begins or self._again.isdisjoint(ids)):
            return ids
        ids, at = [], 0
        for token, first, start, end in self._added_in(text, begins):
            last = first + len(self._added[token])
            if token in self._special and any(first < b and a < last for a, b in plain):
                continue
            ids += [*self._ids(text[at:start], begins, as_text=True), token]
            at, begins = end, token in self._again
        return ids + self._ids(text[at:], begins, as_text=True)

    def special_in(self, text: str) -> list[int]:
        """Index of the first character of each special token that is written in `text`."""
        if not any(content in text for content in self._special.values()):
            return []
        found = self._added_in(text, True)
        return [first for token, first, _, _ in found if token in self._special]

    def _added_in(self, text: str, begins: bool) -> Iterator[tuple[int, int, int, int]]:
        """Added tokens in `text`: id, first character, and what they take (spaces around, too)."""
        whole = _encoded(self._copy(begins, False).encode_batch, text)
        for token, (start, end) in zip(whole.ids, whole.offsets, strict=True):
            # An unknown character has the id of an added token, whose text it is not.
            if token in self._added and (at := text.find(self._added[token], start, end)) >= 0:
                yield token, at, start, end

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


def _continued(step: Any, first: bool = True) -> Any:
    """A step of `tokenizer.json` without the prefix, for text that continues another.

    Behind other steps (not `first`), one that puts it before all that it gets puts it before words.
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
            steps = [_continued(each, at == 0) for at, each in enumerate(step[name])]
            return {**step, name: [each for each in steps if each is not None]}
    return step


def _hide(described: dict[str, Any], contents: Iterable[str]) -> None:
    """Gives tokens of a `tokenizer.json` names that no text holds; their ids stay."""
    secret, model = secrets.token_hex(8), described["model"]
    hidden = {text: f"\ufdd0{secret}{number}" for number, text in enumerate(contents)}
    for token in described["added_tokens"]:
        token["content"] = hidden.get(token["content"], token["content"])
    if isinstance(pieces := model["vocab"], dict):
        model["vocab"] = {hidden.get(piece, piece): token for piece, token in pieces.items()}
    else:  # Unigram
        model["vocab"] = [[hidden.get(piece, piece), score] for piece, score in pieces]
    for merge in [*model.get("merges", ())]:
        if not hidden.keys().isdisjoint((*merge, "".join(merge))):
            model["merges"].remove(merge)
    if model.get("unk_token") in hidden:
        model["unk_token"] = hidden[model["unk_token"]]
