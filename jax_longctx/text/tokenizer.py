"""The checkpoint's tokenizer: text to ids, ids to text as they come, and stop strings.

Reads the files of Hugging Face: `tokenizer.json` (the tokenizer itself), `tokenizer_config.json`
(special tokens, chat template), and where they exist `chat_template.jinja`,
`chat_template.json` (of older processors of text and images), `special_tokens_map.json` and
`generation_config.json`. Needs the `tokenizers` package, not `transformers`.

Special tokens count only where a template writes them (`PromptText`). In documents, questions and
messages they are plain text, unless the tokenizer is loaded with `parse_special`.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from jax_longctx.errors import CheckpointError, ConfigError, InputError
from jax_longctx.files import read_json, read_text, reading
from jax_longctx.text.child import BoundedTokenizer, ChatTemplate
from jax_longctx.text.prompts import Encoder, PromptText

# Decoded tokens that stay in the stream decoder's window, because the text of a token (a leading
# space, a run of bytes) depends on the tokens before it. Four would suffice.
_OVERLAP = 8

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
      generation: what generation_config.json says, as it stands there.

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
        generation: Mapping[str, Any] | None = None,
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
        for text in END_TOKENS:
            # An answer of gpt-oss has several messages: `<|end|>` ends one, `<|return|>` the last.
            if text in (chat_template or "") and (text != "<|end|>" or "<|return|>" not in written):
                ends.append(written.get(text))
        ends = dict.fromkeys(token for token in ends if token is not None)
        self.eos_ids: tuple[int, ...] = tuple(ends)
        ids = backend.get_vocab(with_added_tokens=True).values()
        self.vocab_size = max(ids, default=-1) + 1
        self.own_size = max((token for token in ids if token not in added), default=-1) + 1
        self.parse_special, self.variables = parse_special, dict(variables or {})
        self.generation = dict(generation or {})
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
        text = _text(path)
        if text is None:
            raise CheckpointError(f"{path} not found; convert the checkpoint with its tokenizer")
        backend = BoundedTokenizer(text).load(str(path))
        names = "special_tokens_map.json", "tokenizer_config.json", "generation_config.json"
        others = [directory / name for name in (*names, "chat_template.json")]
        read = [read_json(other) if other.exists() else {} for other in others]
        settings = {**read[0], **read[1]}
        eos_ids = _end_ids(read[2], others[2])
        named = _end_ids({"eos_token_id": eos}, "config.json")
        added = backend.get_added_tokens_decoder()
        eos_ids += [token for token in named if not eos_ids or token in added]
        template = _text(directory / "chat_template.jinja")
        if template is None:
            said = settings.get("chat_template")
            template = select_template(read[3].get("chat_template") if said is None else said)
        how |= {"chat_template": template, "generation": read[2], "file": text}
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
        return self.placed(text, bos, begins=begins, parse_special=parse_special, starts=False)[0]

    def placed(
        self,
        text: str | PromptText,
        bos: bool = False,
        *,
        begins: bool | None = None,
        parse_special: bool = False,
        starts: bool = True,
    ) -> tuple[list[int], list[int]]:
        """`encode`, and with `starts` the index in the text of each token's first character."""
        if isinstance(text, str):
            text = PromptText(text) if parse_special else PromptText.of("", text)
        plain = () if self.parse_special else text.plain
        begins = bos if begins is None else begins
        ids, firsts = self._encoder.placed(text.text, plain, begins=begins, starts=starts)
        if bos and self.adds_bos and not text.templated and ids[:1] != [self.bos_id]:
            assert self.bos_id is not None
            return [self.bos_id, *ids], [0] * starts + firsts
        return ids, firsts

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Text of `ids`, with `special` tokens or not; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=not special)

    def stream_decoder(
        self, after: Sequence[int] = (), *, special: bool = False, shown: Iterable[str] = ()
    ) -> "StreamDecoder":
        """A decoder for ids that arrive in pieces, as `decode` reads them all.

        `after` are the ids they continue, if any; special tokens of these texts are `shown`.
        """
        hidden = frozenset[int]() if special else self.special_ids
        hidden -= {self.special_id(text) for text in shown}
        return StreamDecoder(self._backend, hidden, self.byte_ids, after)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        answer: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> PromptText:
        """The messages in the checkpoint's chat layout.

        Args:
          answer: whether it ends where the answer starts, or behind the last message.
          variables: of the template, in place of the tokenizer's own of the same names.
          tools: that the answer may call, as OpenAI's API has them.

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
        written = re.findall(
            f"{_MARK}+", json.dumps([given, variables, *tools], ensure_ascii=False)
        )
        mark = _MARK * (1 + max(map(len, written), default=0))

        def marked(value: Any) -> Any:
            """The value with a mark after the first character of each special token."""
            if isinstance(value, str):
                at = [0, *(first + 1 for first in self._encoder.special_in(value)), len(value)]
                return mark.join(value[a:b] for a, b in itertools.pairwise(at))
            if isinstance(value, Mapping):
                return {key: marked(each) for key, each in value.items()}
            return [marked(each) for each in value] if isinstance(value, list | tuple) else value

        how = {"add_generation_prompt": answer, "variables": marked(variables)}
        how["tools"] = marked(tools) or None
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
        hidden_ids: frozenset[int],
        byte_ids: frozenset[int],
        after: Sequence[int] = (),
    ):
        self._backend = backend
        self._hidden = hidden_ids
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
        return [token for token in ids if token not in self._hidden]

    def _decode(self) -> str:
        # Hidden ids are removed already; tokens that only look special must stay.
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
        """The first index where the text's tail may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            tail = text[start:]
            if any(stop.startswith(tail) and stop != tail for stop in self._stops):
                return start
        return len(text)


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


def _text(path: Path) -> str | None:
    """The file's text, or None if there is no such file."""
    if not path.exists():
        return None
    try:
        with reading(path):
            return read_text(path)
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8 text (byte {error.start})") from error
