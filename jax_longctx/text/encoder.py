"""Text to ids where special tokens count only in parts of it, and where it continues another."""

import bisect
import collections
import functools
import itertools
import json
import re
import secrets
from collections.abc import Container, Iterable, Iterator
from typing import Any

import tokenizers

from jax_longctx.text.child import BoundedTokenizer
from jax_longctx.text.prompts import Spans

# Added tokens that are special though some files do not say so, as in llama.cpp.
_LOOKS_SPECIAL = re.compile(r"<\|[^|\s]+\|>|<\uff5c[^\uff5c\s]+\uff5c>")


class Encoder:
    """Encodes as the backend does that `file` describes; added tokens among `ends` are special.

    Most texts need no care. Else a text is cut at the added tokens that count, and each section is
    encoded by a copy of the tokenizer that knows no special token, with the dummy prefix or without
    (a space that many sentencepiece tokenizers put before each text).
    """

    def __init__(self, backend: tokenizers.Tokenizer, file: str, ends: Container[int]):
        added = backend.get_added_tokens_decoder()
        self._added = {token: info.content for token, info in added.items()}
        self._special = {
            token: info.content
            for token, info in added.items()
            if info.special or token in ends or _LOOKS_SPECIAL.fullmatch(info.content)
        }
        # Copies by (whether the text begins, whether special tokens are text).
        self._backend, self._copies = backend, {(True, False): BoundedTokenizer(file)}
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
          InputError: as `BoundedTokenizer.encode`.
        """
        ids, own = self._ids(text, begins), None
        if plain:
            starts, ends = zip(*plain, strict=True)
            others = zip((0, *ends), (*starts, len(text)), strict=True)
            parts = collections.Counter(text[a:b] for a, b in others)
            own = sum(n * self._count(self._ids(part, True)) for part, n in parts.items())
        if own in (None, self._count(ids)) and (begins or self._again.isdisjoint(ids)):
            return ids
        ids, at, begun = [], 0, [a for a, _ in plain]
        for token, first, start, end in self._added_in(text, begins):
            if token in self._special:
                # The last plain part that begins before the token's end.
                near = bisect.bisect_left(begun, first + len(self._added[token])) - 1
                if near >= 0 and plain[near][1] > first:
                    continue
            elif token not in self._again:
                # The copy knows it.
                continue
            ids += [*self._ids(text[at:start], begins, as_text=True), token]
            at, begins = end, token in self._again
        return ids + self._ids(text[at:], begins, as_text=True)

    @functools.cached_property
    def _written(self) -> re.Pattern[str]:
        return re.compile(_any_of(self._special.values()))

    def special_in(self, text: str) -> list[int]:
        """Index of the first character of each special token that is written in `text`."""
        if not self._special or self._written.search(text) is None:
            return []
        found = self._added_in(text, True)
        return [first for token, first, _, _ in found if token in self._special]

    def _added_in(self, text: str, begins: bool) -> Iterator[tuple[int, int, int, int]]:
        """Added tokens in `text`: id, first character, and what they take (spaces around, too)."""
        ids, offsets = self._copy(begins, False).encode(text, offsets=True)
        for token, (start, end) in zip(ids, offsets, strict=True):
            # An unknown character has the id of an added token, whose text it is not.
            if token in self._added and (at := text.find(self._added[token], start, end)) >= 0:
                yield token, at, start, end

    def _ids(self, text: str, begins: bool, *, as_text: bool = False) -> list[int]:
        return self._copy(begins, as_text).encode(text)[0] if text else []

    def _count(self, ids: Iterable[int]) -> int:
        return sum(map(self._special.__contains__, ids))

    def _copy(self, begins: bool, as_text: bool) -> BoundedTokenizer:
        key = begins or not self._has_prefix, as_text
        if key not in self._copies:
            # Not the file: it may be of an older form.
            described = json.loads(self._backend.to_str())
            if not key[0]:
                for name in ("normalizer", "pre_tokenizer"):
                    described[name] = _continued(described[name])
            if as_text:
                _hide(described, self._special.values())
            self._copies[key] = BoundedTokenizer(json.dumps(described))
        return self._copies[key]


def _any_of(texts: Iterable[str], depth: int = 32) -> str:
    """A pattern of any of the texts that tries common beginnings once: a text is scanned once."""
    texts = sorted(texts)
    if len(texts) == 1 or not depth or not texts[0]:
        return f"(?:{'|'.join(map(re.escape, texts))})"
    groups = itertools.groupby(texts, key=lambda text: text[0])
    parts = [re.escape(a) + _any_of((text[1:] for text in all), depth - 1) for a, all in groups]
    return f"(?:{'|'.join(parts)})"


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
