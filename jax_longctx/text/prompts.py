"""Prompts: texts that a template wrote in part, and layouts around a document and a question.

A prompt is split in two (`PromptLayout`). The context is everything up to and including the
document, and prefilled once. The question is the rest: in a chat, the question and the tokens that
open the answer. The two are tokenised separately, so every method gets the same ids. Special tokens
count only in the template's parts (`Encoder`).
"""

import bisect
import collections
import dataclasses
import functools
import itertools
import json
import re
import secrets
import unicodedata
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tokenizers

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.text.child import BoundedTokenizer

if TYPE_CHECKING:
    from jax_longctx.text.tokenizer import Tokenizer

# Placeholders for document and question in the template, so that jinja never renders a document.
# No template contains or strips these private-use characters.
_DOCUMENT = "\ue000document\ue000"
_QUESTION = "\ue000question\ue000"

# Added tokens that are special though some files do not say so, as in llama.cpp.
_LOOKS_SPECIAL = re.compile(r"<\|[^|\s]+\|>|<\uff5c[^\uff5c\s]+\uff5c>")

# Parts of a text: the first character of each, and the one behind it.
Spans = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class PromptText:
    """A text that a template wrote in part.

    Attributes:
      plain: the user's parts. There special tokens are plain text.
      templated: a chat template wrote the beginning, with a beginning-of-text token or without.
    """

    text: str
    plain: Spans = ()
    templated: bool = False

    @classmethod
    def of(cls, *parts: str, templated: bool = False) -> "PromptText":
        """Parts of the template and of the user in turn."""
        ends = list(itertools.accumulate(map(len, parts)))
        spans = zip(ends[::2], ends[1::2], strict=False)
        return cls("".join(parts), tuple(spans), templated)

    def __str__(self) -> str:
        return self.text

    def after(self, mark: str) -> tuple[str, "PromptText"] | None:
        """The text before the first `mark`, and what follows it; None where there is none."""
        before, found, after = self.text.partition(mark)
        cut = len(self.text) - len(after)
        plain = tuple((max(a - cut, 0), b - cut) for a, b in self.plain if b > cut)
        return (before, PromptText(after, plain)) if found else None

    def until(self, mark: str) -> "PromptText | None":
        """The text before the last `mark`; None where there is none."""
        end = self.text.rfind(mark)
        if end < 0:
            return None
        plain = tuple((a, min(b, end)) for a, b in self.plain if a < end)
        return PromptText(self.text[:end], plain, self.templated)


@dataclasses.dataclass(frozen=True)
class PromptLayout:
    """Texts before the document, between document and question, and after the question.

    `templated`: they come from a chat template.
    """

    before: str
    between: str
    after: str
    templated: bool = False

    def context(self, document: str) -> PromptText:
        """The context's text. Raises InputError when the document is empty."""
        if not document.strip():
            raise InputError("the document is empty; give a text to ask about")
        return PromptText.of(self.before, document, templated=self.templated)

    def question(self, question: str) -> PromptText:
        """The text between the context and the answer. Raises InputError when it is empty."""
        if not question.strip():
            raise InputError("a question is empty; write what to ask of the document")
        return PromptText.of(self.between, question, self.after)


def plain_layout(stem: bool = False) -> PromptLayout:
    """Completion without a chat template: a question and "Answer:", or the answer's own `stem`."""
    if stem:
        return PromptLayout("", "\n\n", "")
    return PromptLayout("", "\n\nQuestion: ", "\nAnswer:")


def chat_layout(tokenizer: "Tokenizer", variables: Mapping[str, Any] | None = None) -> PromptLayout:
    """The checkpoint's chat template around document and question, in one user message.

    Args:
      variables: as for `Tokenizer.chat`.

    Raises:
      ConfigError: there is no template, or it does not contain the message exactly once.
    """
    content = f"{_DOCUMENT}\n\n{_QUESTION}"
    asked = [{"role": "user", "content": content}]
    text = tokenizer.chat(asked, variables=variables).text
    before, found_document, rest = text.partition(_DOCUMENT)
    between, found_question, after = rest.partition(_QUESTION)
    if not (found_document and found_question) or "\ue000" in before + between + after:
        raise ConfigError(
            "the chat template does not show a user's message exactly once; use --no-chat"
        )
    return PromptLayout(before, between, after, templated=True)


def turn_layout(tokenizer: "Tokenizer", variables: Mapping[str, Any] | None = None) -> PromptLayout:
    """The checkpoint's chat template from an answer to the next one, around the question between.

    Args:
      variables: as for `Tokenizer.chat`.

    Raises:
      ConfigError: there is no template, or it shows no earlier answers.
    """
    said = ("user", "\ue000"), ("assistant", _DOCUMENT), ("user", _QUESTION)
    turns = [{"role": role, "content": text} for role, text in said]
    _, found_answer, rest = tokenizer.chat(turns, variables=variables).text.partition(_DOCUMENT)
    between, found_question, after = rest.partition(_QUESTION)
    if not (found_answer and found_question) or "\ue000" in between + after:
        raise ConfigError(
            "the chat template does not show an earlier answer and the next question, each once; "
            "use --no-chat, or ask single questions"
        )
    return PromptLayout("", between, after, templated=True)


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
        said = json.dumps(steps)
        self._has_prefix = steps != [_continued(step) for step in steps]
        every = '"always"' in said or '"add_prefix_space": true' in said
        # Whether other texts than their own become special tokens, by a normalizer or by the model.
        own = backend.get_vocab(with_added_tokens=False)
        changes = steps[0] is not None or "Metaspace" in said
        self._altered = changes and any(
            added[token].normalized or content in own for token, content in self._special.items()
        )
        self._single_words = any(added[token].single_word for token in self._special)
        # Added tokens behind which the prefix stands again; a normalizer does not see where those
        # stand that are found in its own output.
        self._again = {
            token
            for token, info in added.items()
            if self._has_prefix and (every or ('"Prepend"' in said and not info.normalized))
        }

    def placed(
        self, text: str, plain: Spans = (), *, begins: bool, starts: bool = True
    ) -> tuple[list[int], list[int]]:
        """Token ids, and with `starts` the index in the text of each one's first character.

        Special tokens in the `plain` parts are text.

        Args:
          begins: no other text stands before this one.

        Raises:
          InputError: as `BoundedTokenizer.encode`.
        """
        ids, firsts = self._ids(text, begins, starts=starts)
        same = not plain or self._count(ids) == self._written_beside(text, plain)
        if same and (begins or self._again.isdisjoint(ids)):
            return ids, firsts
        ids, firsts, at, begun = [], [], 0, [a for a, _ in plain]

        def take(end: int) -> None:
            more, places = self._ids(text[at:end], begins, as_text=True, starts=starts)
            ids.extend(more)
            firsts.extend(at + place for place in places)

        for token, (first, last), (start, end) in self._added_in(text, begins):
            if token in self._special:
                # The last plain part that begins before the token's end.
                near = bisect.bisect_left(begun, last) - 1
                if near >= 0 and plain[near][1] > first:
                    continue
            elif token not in self._again:
                # The copy knows it.
                continue
            take(start)
            ids.append(token)
            firsts += [start] * starts
            at, begins = end, token in self._again
        take(len(text))
        return ids, firsts

    def _written_beside(self, text: str, plain: Spans) -> collections.Counter[int] | None:
        """Special tokens outside the `plain` parts; None where words beside them decide."""
        if self._single_words:
            return None
        starts, ends = zip(*plain, strict=True)
        others = zip((0, *ends), (*starts, len(text)), strict=True)
        found = collections.Counter[int]()
        for part, times in collections.Counter(text[a:b] for a, b in others).items():
            found.update(self._count(self._ids(part, True)[0] * times))
        return found

    @functools.cached_property
    def _unknown(self) -> int | None:
        """The id of unknown characters."""
        model = json.loads(self._backend.model.__getstate__())
        piece = model.get("unk_token")
        return model.get("unk_id") if piece is None else self._backend.token_to_id(piece)

    @functools.cached_property
    def _written(self) -> re.Pattern[str]:
        return re.compile(f"(?={_any_of(self._special.values())})")

    def special_in(self, text: str) -> list[int]:
        """Index of the first character of each special token that `text` may hold."""
        if not self._special:
            return []
        found = {each.start() for each in self._written.finditer(text)}
        if self._altered and self._count(self._ids(text, True)[0]):
            tokens = self._added_in(text, True)
            found |= {first for token, (first, _), _ in tokens if token in self._special}
        return sorted(found)

    def _added_in(
        self, text: str, begins: bool
    ) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
        """Added tokens in `text`: id, where it is written, and what it takes (spaces around, too).

        A normalizer makes their text of others, such as full-width letters.
        """
        ids, offsets = self._copy(begins, False).encode(text, offsets=True)
        for token, (start, end) in zip(ids, offsets, strict=True):
            if token not in self._added:
                continue
            content, taken = self._added[token], text[start:end]
            written = content if content in taken else taken.strip()
            first = start + taken.index(written)
            # An unknown character has the id of an added token, whose text it is not.
            if written == content or token != self._unknown or _folded(written) == _folded(content):
                yield token, (first, first + len(written)), (start, end)

    def _ids(
        self, text: str, begins: bool, *, as_text: bool = False, starts: bool = False
    ) -> tuple[list[int], list[int]]:
        """Token ids, and with `starts` the first character of each."""
        if not text:
            return [], []
        ids, offsets = self._copy(begins, as_text).encode(text, offsets=starts)
        return ids, [start for start, _ in offsets]

    def _count(self, ids: Iterable[int]) -> collections.Counter[int]:
        """How often each special token is among the ids."""
        return collections.Counter(filter(self._special.__contains__, ids))

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


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


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
