"""The checkpoint's tokenizer: text to ids, ids to text as they come, stop strings, and prompts.

Reads the files of Hugging Face: `tokenizer.json` (the tokenizer itself), `tokenizer_config.json`
(special tokens, chat template), and where they exist `chat_template.jinja`,
`special_tokens_map.json` and `generation_config.json`. Needs the `tokenizers` package, not
`transformers`.

A prompt is split in two (`PromptLayout`). The context is everything up to and including the
document, and is read once. The question is the rest: in a chat, the question and the tokens that
open the answer. The two are tokenised separately, so every method gets the same ids, however it
reads the context.

Chat templates are rendered, and texts encoded, in child processes with limits of time and memory
(`child`). One serves all templates. It starts with the first template, and imports jinja2 while the
checkpoint loads.
"""

import dataclasses
import functools
import json
from collections.abc import Iterable, Mapping, Sequence
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


class Tokenizer:
    """Text <-> token ids of one checkpoint.

    Attributes:
      bos_id: id of the beginning-of-text token, or None.
      eos_ids: ids that end an answer: the tokenizer's own and those of the generation config.
      adds_bos: whether this tokenizer starts a text with `bos_id`.
      vocab_size: one more than the largest id, added tokens included.

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
        file: str | None = None,
    ):
        # Files saved after training often have these set; they would silently cut the context.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._encoder = BoundedTokenizer(backend.to_str() if file is None else file)
        self.bos_id = _special_id(backend, settings, "bos_token")
        own_eos = _special_id(backend, settings, "eos_token")
        ends = dict.fromkeys([own_eos, *map(int, eos_ids)])
        self.eos_ids: tuple[int, ...] = tuple(token for token in ends if token is not None)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.adds_bos = _adds_bos(backend, settings, self.bos_id)
        self._chat = None
        if chat_template is not None:
            self._chat = ChatTemplate(chat_template, special_texts(settings))

    @classmethod
    def load(cls, directory: str | Path) -> "Tokenizer":
        """Reads the tokenizer files of `directory`.

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
        eos = generation.get("eos_token_id")
        eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if not all(isinstance(token, int) for token in eos_ids):
            raise CheckpointError(
                f"{directory / 'generation_config.json'}: eos_token_id is {eos!r:.100}, "
                f"expected an id or a list of ids"
            )
        template = _read(directory / "chat_template.jinja")
        if template is None:
            template = select_template(settings.get("chat_template"))
        return cls(backend, settings, eos_ids=eos_ids, chat_template=template, file=text)

    @property
    def has_chat(self) -> bool:
        """Whether the checkpoint came with a chat template."""
        return self._chat is not None

    @property
    def chat_template(self) -> str | None:
        """The chat template's own text, where there is one."""
        return None if self._chat is None else self._chat.source

    def encode(self, text: str, bos: bool = False) -> list[int]:
        """Token ids of `text`; special tokens written out in the text become their ids.

        Args:
          bos: the text begins here. The beginning-of-text token is added if this tokenizer uses
            one, unless the text (a rendered chat) already starts with it.
        """
        ids = self._encoder.encode(text).ids
        if bos and self.adds_bos and ids[:1] != [self.bos_id]:
            return [self.bos_id, *ids]  # pyright: ignore[reportReturnType]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=True)

    def stream_decoder(self, after: Sequence[int] = ()) -> "StreamDecoder":
        """A decoder for ids that arrive in pieces; `after` are the ids they continue, if any."""
        return StreamDecoder(self._backend, self.special_ids, self.byte_ids, after)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, answer: bool = True) -> str:
        """The messages in the checkpoint's chat layout, ending where the answer starts.

        Raises:
          ConfigError: the checkpoint has no chat template, or it is no valid template.
          InputError: the template refuses these messages.
        """
        if self._chat is None:
            raise ConfigError(
                "this checkpoint has no chat template; ask by plain completion instead (--no-chat)"
            )
        return self._chat.render(messages, add_generation_prompt=answer)

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

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The messages as one text.

        Raises:
          ConfigError: the template is not valid, fails, or exceeds a limit.
          InputError: the template refuses the messages.
        """
        reply = RENDERER.ask(
            {
                "source": self.source,
                "variables": {
                    **self._special_tokens,
                    "messages": [dict(message) for message in messages],
                    "add_generation_prompt": add_generation_prompt,
                },
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
    """Texts before the document, between document and question, and after the question."""

    before: str
    between: str
    after: str

    def context(self, document: str) -> str:
        """The context's text. Raises InputError when the document is empty."""
        if not document.strip():
            raise InputError("the document is empty; give a text to ask about")
        return self.before + document

    def question(self, question: str) -> str:
        """The text between the context and the answer. Raises InputError when it is empty."""
        if not question.strip():
            raise InputError("a question is empty; write what to ask of the document")
        return self.between + question + self.after


def plain_layout(stem: bool = False) -> PromptLayout:
    """Completion without a chat template: a question and "Answer:", or the answer's own `stem`."""
    if stem:
        return PromptLayout("", "\n\n", "")
    return PromptLayout("", "\n\nQuestion: ", "\nAnswer:")


def chat_layout(tokenizer: Tokenizer) -> PromptLayout:
    """The checkpoint's chat template around document and question, in one user message.

    Raises:
      ConfigError: there is no template, or it does not contain the message exactly once.
    """
    content = f"{_DOCUMENT}\n\n{_QUESTION}"
    text = tokenizer.chat([{"role": "user", "content": content}])
    before, found_document, rest = text.partition(_DOCUMENT)
    between, found_question, after = rest.partition(_QUESTION)
    if not (found_document and found_question) or "\ue000" in before + between + after:
        raise ConfigError(
            "the chat template does not show a user's message exactly once; use --no-chat"
        )
    return PromptLayout(before, between, after)


def check_vocabulary(tokenizer: Tokenizer, config: Any) -> None:
    """Raises CheckpointError when the tokenizer has ids that the model has no embedding for."""
    if tokenizer.vocab_size > config.vocab_size:
        raise CheckpointError(
            f"wrong tokenizer: its ids reach {tokenizer.vocab_size - 1}, the model has "
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
