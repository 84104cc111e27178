"""The checkpoint's tokenizer: text to ids, ids to text as they come, stop strings, and prompts.

Reads the files of Hugging Face: `tokenizer.json` (the tokenizer itself), `tokenizer_config.json`
(special tokens, chat template), and where they exist `chat_template.jinja`,
`special_tokens_map.json` and `generation_config.json`. Needs the `tokenizers` package, not
`transformers`.

A prompt is split in two (`PromptLayout`). The context is everything up to and including the
document, and is read once. The question is the rest: in a chat, the question and the tokens that
open the answer. The two are tokenised separately, so every method gets the same ids, however it
reads the context.

Special tokens count only where a template writes them (`PromptText`). In documents, questions and
messages they are plain text, unless the tokenizer is loaded with `parse_special`.

Chat templates are rendered, and texts encoded, in child processes with limits of time and memory
(`child`). One serves all templates. It starts with the first template, and imports jinja2 while the
checkpoint loads.
"""

import bisect
import collections
import dataclasses
import functools
import itertools
import json
import re
import secrets
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jax_longctx.errors import CheckpointError, ConfigError, InputError
from jax_longctx.files import read_text
from jax_longctx.text.child import RENDERER, BoundedTokenizer

# Decoded tokens that stay in the stream decoder's window, because the text of a token (a leading
# space, a run of bytes) depends on the tokens before it. Four would suffice.
_OVERLAP = 8

# Limits of one rendering, compilation included: thousands of times what published templates need.
SECONDS = 3.0
MEMORY = 2**30
# Placeholders for document and question in the template, so that jinja never renders a document.
# No template contains or strips these private-use characters.
_DOCUMENT = "\ue000document\ue000"
_QUESTION = "\ue000question\ue000"
# Marks special tokens that are written in messages, while the template renders them.
_MARK = "\ufdd0"

# Tokens that end a turn or a text, most of them from llama.cpp's list. A checkpoint's files may
# name another end only (the one of its base model).
END_TOKENS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|eot|>", "<|return|>"),
    *("<|endoftext|>", "<|end_of_text|>", "<|end_of_turn|>", "<|END_OF_TURN_TOKEN|>"),
    *("<end_of_turn>", "<end_of_utterance>", "<\uff5cend▁of▁sentence\uff5c>", "[|endofturn|]"),
    *("</s>", "<EOT>", "[EOT]", "[EOS]"),
)

# Added tokens that are special though some files do not say so, as in llama.cpp.
_LOOKS_SPECIAL = re.compile(r"<\|[^|\s]+\|>|<\uff5c[^\uff5c\s]+\uff5c>")

# Parts of a text: the first character of each, and the one behind it.
Spans = Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class PromptText:
    """A text that a template wrote in part.

    Attributes:
      plain: the parts that are the user's, in which special tokens are plain text.
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


class Tokenizer:
    """Text <-> token ids of one checkpoint.

    Attributes:
      bos_id: id of the beginning-of-text token, or None.
      eos_ids: ids that end an answer: the tokenizer's own, those that a config names, and the
        known `END_TOKENS` that the chat template writes.
      adds_bos: whether this tokenizer starts a text with `bos_id`.
      vocab_size: one more than the largest id, added tokens included.
      own_size: the same without added tokens.
      parse_special: whether special tokens that are written in a text count.
      variables: of the chat template, by name, beside those that every template finds.

    Args:
      file: the text of the `tokenizer.json` that the backend was made of, if any.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Mapping[str, Any],
        *,
        eos_ids: Iterable[int] = (),
        chat_template: str | None = None,
        parse_special: bool = False,
        variables: Mapping[str, Any] | None = None,
        file: str | None = None,
    ):
        # Files saved after training often have these set; they would silently cut the context.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.bos_id = _special_id(backend, settings, "bos_token")
        added = backend.get_added_tokens_decoder()
        ends = [_special_id(backend, settings, "eos_token"), *map(int, eos_ids)]
        written = {info.content: token for token, info in added.items()}
        ends += [written.get(text) for text in END_TOKENS if text in (chat_template or "")]
        ends = dict.fromkeys(token for token in ends if token is not None)
        self.eos_ids: tuple[int, ...] = tuple(ends)
        ids = backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        self.own_size = max((token for token in ids if token not in added), default=-1) + 1
        self.parse_special, self.variables = parse_special, dict(variables or {})
        self._encoder = Encoder(backend, file or backend.to_str(), self.eos_ids)
        self.adds_bos = _adds_bos(backend, settings, self.bos_id)
        self._chat = None
        if chat_template is not None:
            self._chat = ChatTemplate(chat_template, special_texts(settings))

    @classmethod
    def load(cls, directory: str | Path, *, eos: Any = None, **how: Any) -> "Tokenizer":
        """Reads the tokenizer files of `directory`; `how` are `parse_special` and `variables`.

        Args:
          eos: `eos_token_id` of the checkpoint's config.json, or None. Where generation_config.json
            names ids too, only added tokens count: configs hold defaults of other models.

        Raises:
          CheckpointError: a file is missing, unreadable or not what it should be.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        text = _read(path)
        if text is None:
            raise CheckpointError(f"{path} not found; convert the checkpoint with its tokenizer")
        backend = BoundedTokenizer(text).load(str(path))
        settings = dict(_read_json(directory / "special_tokens_map.json"))
        settings |= _read_json(directory / "tokenizer_config.json")
        generation = _read_json(directory / "generation_config.json")
        eos_ids = _end_ids(generation, directory / "generation_config.json")
        named = _end_ids({"eos_token_id": eos}, "config.json")
        added = backend.get_added_tokens_decoder()
        eos_ids += [token for token in named if not eos_ids or token in added]
        template = _read(directory / "chat_template.jinja")
        if template is None:
            template = select_template(settings.get("chat_template"))
        how |= {"chat_template": template, "file": text}
        return cls(backend, settings, eos_ids=eos_ids, **how)

    @property
    def has_chat(self) -> bool:
        """Whether the checkpoint came with a chat template."""
        return self._chat is not None

    @property
    def chat_template(self) -> str | None:
        """The chat template's own text, where there is one."""
        return None if self._chat is None else self._chat.source

    def encode(
        self,
        text: str | PromptText,
        bos: bool = False,
        *,
        begins: bool | None = None,
        parse_special: bool = False,
    ) -> list[int]:
        """Token ids of `text`.

        Args:
          bos: the text begins here. The beginning-of-text token is added if this tokenizer uses
            one, unless a chat template decides on it or the text already starts with it.
          begins: whether the tokenizer's dummy prefix, if any, is put before the text; by default
            as `bos`. A piece that continues another has none.
          parse_special: whether special tokens in a plain `str` become their ids, as in one that is
            a rendered template. A `PromptText` says itself which do.
        """
        if isinstance(text, str):
            text = PromptText(text) if parse_special else PromptText.of("", text)
        plain = () if self.parse_special else text.plain
        ids = self._encoder.encode(text.text, plain, begins=bos if begins is None else begins)
        if bos and self.adds_bos and not text.templated and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]  # pyright: ignore[reportReturnType]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def stream_decoder(self, after: Sequence[int] = ()) -> "StreamDecoder":
        """A decoder for ids that arrive in pieces; `after` are the ids they continue, if any."""
        return StreamDecoder(self._backend, self.special_ids, self.byte_ids, after)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        answer: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> PromptText:
        """The messages in the checkpoint's chat layout.

        Args:
          answer: whether it ends where the answer starts, or behind the last message.
          variables: of the template, in place of the tokenizer's own of the same names.

        Raises:
          ConfigError: the checkpoint has no chat template, or it is no valid template.
          InputError: the template refuses these messages, or variables have names of its own.
        """
        if self._chat is None:
            raise ConfigError(
                "this checkpoint has no chat template; ask by plain completion instead (--no-chat)"
            )
        given = [dict(message) for message in messages]
        variables = self.variables | dict(variables or {})
        written = re.findall(f"{_MARK}+", json.dumps([given, variables], ensure_ascii=False))
        mark = _MARK * (1 + max(map(len, written), default=0))

        def marked(value: Any) -> Any:
            """The value with a mark behind the first character of each special token."""
            if isinstance(value, str):
                at = [0, *(first + 1 for first in self._encoder.special_in(value)), len(value)]
                return mark.join(value[a:b] for a, b in itertools.pairwise(at))
            if isinstance(value, Mapping):
                return {key: marked(each) for key, each in value.items()}
            return [marked(each) for each in value] if isinstance(value, list | tuple) else value

        how = {"add_generation_prompt": answer, "variables": marked(variables)}
        pieces = self._chat.render(marked(given), **how).split(mark)
        ends = itertools.accumulate(map(len, pieces[:-1]))
        return PromptText("".join(pieces), tuple((end - 1, end) for end in ends), templated=True)

    def piece(self, token: int) -> str | None:
        """The token's entry in the vocabulary, as its file writes it; None for an unknown id."""
        return self._backend.id_to_token(token)

    @functools.cached_property
    def longest_piece(self) -> int:
        """Characters of the vocabulary's longest entry: no token covers more of a text."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token for token, info in added.items() if info.special)

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written `text`, or None."""
        token = self._backend.token_to_id(text)
        return token if token in self.special_ids else None

    @functools.cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of single bytes (`<0xE4>`) that the decoder joins into characters."""
        ids = [self._backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        letter = ids[ord("A")]
        if letter is None or self._backend.decode([letter], skip_special_tokens=False) != "A":
            return frozenset()
        return frozenset(token for token in ids if token is not None)


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

    def special_in(self, text: str) -> list[int]:
        """Index of the first character of each special token that is written in `text`."""
        if not any(content in text for content in self._special.values()):
            return []
        found = self._added_in(text, True)
        return [first for token, first, _, _ in found if token in self._special]

    def _added_in(self, text: str, begins: bool) -> Iterator[tuple[int, int, int, int]]:
        """Added tokens in `text`: id, first character, and what they take (spaces around, too)."""
        whole = self._copy(begins, False).encode(text, offsets=True)
        for token, (start, end) in zip(whole.ids, whole.offsets, strict=True):
            # An unknown character has the id of an added token, whose text it is not.
            if token in self._added and (at := text.find(self._added[token], start, end)) >= 0:
                yield token, at, start, end

    def _ids(self, text: str, begins: bool, *, as_text: bool = False) -> list[int]:
        return self._copy(begins, as_text).encode(text).ids if text else []

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


class StreamDecoder:
    """Decodes ids that arrive in pieces: the returned texts, joined, are `decode(all ids)`.

    Text is returned once later ids cannot change it, so no character is shown broken. Two things
    wait: the U+FFFD of an unfinished UTF-8 sequence (at most one, at the end), and a run of byte
    tokens, which the byte-fallback decoder reads as a whole.

    Each step decodes only the last few ids again: time is linear in the ids.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_ids: frozenset[int],
        byte_ids: frozenset[int],
        after: Sequence[int] = (),
    ):
        self._backend = backend
        self._special = special_ids
        self._bytes = byte_ids
        self._run: list[int] = []
        self._window: list[int] = []
        self._shown = 0
        if after:
            self._window = self._plain(after[-4 * _OVERLAP :])
            self._shown = len(self._decode())

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become certain with these ids."""
        plain = self._plain(ids)
        cut = len(plain)
        while cut and plain[cut - 1] in self._bytes:
            cut -= 1
        if cut == 0:
            self._run += plain
            return ""
        self._window += [*self._run, *plain[:cut]]
        self._run = plain[cut:]
        return self._emit(hold=True)

    def flush(self) -> str:
        """The rest, at the end of the ids."""
        self._window += self._run
        self._run = []
        return self._emit(hold=False)

    def _emit(self, *, hold: bool) -> str:
        text = self._decode()
        end = len(text) - (hold and text.endswith("\ufffd"))
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        if len(self._window) > 2 * _OVERLAP:
            held = len(text) - self._shown
            self._window = self._window[-_OVERLAP:]
            self._shown = len(self._decode()) - held
        return new

    def _plain(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token not in self._special]

    def _decode(self) -> str:
        # Special ids are removed already; tokens that only look special must stay.
        return self._backend.decode(self._window, skip_special_tokens=False)


class StopStrings:
    """Cuts a stream of text at the first of several strings.

    Text arrives in pieces of any size, and is passed on as soon as it can no longer be the start of
    a stop string. The result ends before the first stop string, however the text is divided into
    pieces. Empty stop strings are refused, as they would end every text. Work is linear in the
    text: only a tail shorter than the longest stop string is searched twice.

    Attributes:
      stopped: the stop string that ended the text, or None.
    """

    def __init__(self, stops: Iterable[str] = ()):
        self._stops = tuple(dict.fromkeys(stops))
        if "" in self._stops:
            raise InputError("a stop string is empty; give at least one character")
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """The text that has become certain; "" once stopped."""
        return self._passed(self._held + text, self._possible_start(self._held + text))

    def flush(self) -> str:
        """The text still held back, at the end of the stream."""
        return self._passed(self._held, len(self._held))

    def _passed(self, text: str, end: int) -> str:
        """`text` up to `end`, or to the first stop string; what follows is held back."""
        if self.stopped is not None:
            return ""
        # A stop string that starts after `end` waits, because an earlier one may still complete.
        found = [(at, stop) for stop in self._stops if 0 <= (at := text.find(stop)) <= end]
        self._held = text[end:]
        if found:
            end, self.stopped = min(found, key=lambda hit: hit[0])
            self._held = ""
        return text[:end]

    def _possible_start(self, text: str) -> int:
        """The first index from which the text's tail is an unfinished stop string."""
        longest = max(map(len, self._stops), default=1)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) and stop != tail for stop in self._stops):
                return start
        return len(text)


class ChatTemplate:
    """One chat template with the checkpoint's special tokens.

    Attributes:
      source: the template's own text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source = source
        self._special_tokens = dict(special_tokens)
        RENDERER.start()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The messages as one text.

        Raises:
          ConfigError: the template is not valid, fails, or exceeds a limit.
          InputError: the template refuses the messages, or variables have names of its own.
        """
        own = {
            **self._special_tokens,
            "messages": [dict(message) for message in messages],
            "tools": None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        variables = variables or {}
        if taken := sorted(own.keys() & variables.keys()):
            raise InputError(f"the template's variable {taken[0]!r} is set for you; leave it out")
        reply = RENDERER.ask(
            {
                "source": self.source,
                "variables": {**own, **variables},
                "seconds": SECONDS,
                "memory": MEMORY,
            }
        )
        if "refuses" in reply:
            raise InputError(f"the chat template refuses the messages: {reply['refuses']}")
        if "error" in reply:
            raise ConfigError(
                f"the chat template {reply['error']}; repair it, or ask without it (--no-chat)"
            )
        return reply["text"]


def select_template(value: Any) -> str | None:
    """The template of `tokenizer_config.json`: text, or a list of named ones ("default" wins)."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        named = {entry.get("name"): entry.get("template") for entry in value}
        chosen = named.get("default", next(iter(named.values()), None))
        if chosen is None or isinstance(chosen, str):
            return chosen
    raise CheckpointError(
        f"chat_template is a {type(value).__name__}; expected text or a list of named templates"
    )


@dataclasses.dataclass(frozen=True)
class PromptLayout:
    """Texts before the document, between document and question, and after the question.

    `templated` are those of a chat template.
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


def chat_layout(tokenizer: Tokenizer, variables: Mapping[str, Any] | None = None) -> PromptLayout:
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


def check_vocabulary(tokenizer: Tokenizer, config: Any) -> None:
    """Raises CheckpointError when the tokenizer has ids that the model has no embedding for.

    Added tokens may (the padding of old Llama 2 folders): only a text that holds one is an error.
    """
    if tokenizer.own_size > config.vocab_size:
        raise CheckpointError(
            f"wrong tokenizer: its ids reach {tokenizer.own_size - 1}, the model has "
            f"{config.vocab_size} embeddings; convert again with the tokenizer files of this model"
        )


def special_texts(settings: Mapping[str, Any]) -> dict[str, str]:
    """The named special tokens (`bos_token`, `eos_token` ...) as text, for the chat template."""
    found = ((name, _token_text(settings[name])) for name in settings if name.endswith("_token"))
    return {name: text for name, text in found if text is not None}


def _token_text(value: Any) -> str | None:
    """A special token's text, from the text itself or the description of an added token."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _special_id(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], name: str
) -> int | None:
    text = _token_text(settings.get(name))
    if text is None:
        return None
    token = backend.token_to_id(text)
    if token is None:
        raise CheckpointError(f"{name} {text!r} is not in the tokenizer's vocabulary")
    return token


def _end_ids(config: Mapping[str, Any], path: str | Path) -> list[int]:
    """The `eos_token_id` of a config: an id, a list of them, or none."""
    given = config.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(isinstance(token, int) for token in ids):
        raise CheckpointError(
            f"{path}: eos_token_id is {given!r:.100}, expected an id or a list of ids"
        )
    return [token for token in ids if 0 <= token < 2**31]


def _adds_bos(
    backend: tokenizers.Tokenizer, settings: Mapping[str, Any], bos_id: int | None
) -> bool:
    """Whether texts start with BOS, by the config or else by the post-processor."""
    if bos_id is None:
        return False
    said = settings.get("add_bos_token")
    if said is not None:
        return bool(said)
    return backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]


def _read(path: Path) -> str | None:
    """The file's text, or None if there is no such file."""
    try:
        return read_text(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text (byte {error.start})") from error


def _read_json(path: Path) -> dict[str, Any]:
    text = _read(path)
    if text is None:
        return {}
    try:
        value = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} is not JSON that can be read: too deeply nested") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value
