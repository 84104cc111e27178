"""The reply to a request, as a stream's events or whole: OpenAI's chats and completions."""

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

from jax_longctx.engine.rows import Chosen
from jax_longctx.engine.scoring import TextScores
from jax_longctx.serving.prompts import Echo
from jax_longctx.serving.tickets import Piece, Ticket
from jax_longctx.serving.tools import ToolReader
from jax_longctx.sources import found_in
from jax_longctx.text import Tokenizer
from jax_longctx.text.tokens import Places, TokenNames

# Tokens with the best ones at their places, as chats have them, and where each begins.
type Scored = list[tuple[dict[str, Any], int]]


@dataclasses.dataclass
class Choice:
    """The answer to one prompt.

    Attributes:
      places: of the answer's tokens.
      echo: the start of the text, until it is given out.
      sources: the passages that the answer read, where they are wanted, once it has ended.
      tools: finds calls in the answer, where it may make any.
      calls: that it made.
    """

    ticket: Ticket
    places: Places
    echo: Echo | None = None
    tools: ToolReader | None = None
    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    tokens: int = 0
    finish: str | None = None
    texts: list[str] = dataclasses.field(default_factory=list)
    scored: Scored = dataclasses.field(default_factory=list)
    sources: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Reply:
    """The answers to one request on their way to the client.

    Attributes:
      logprobs: whether log-probabilities were asked for.
      n: answers to each prompt, which follow one another.
    """

    kind: Literal["chat", "completion"]
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    logprobs: bool
    n: int = 1
    choices: list[Choice] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        self.id, self.created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        self._names = TokenNames(self.tokenizer)

    def add(
        self, ticket: Ticket, after: Sequence[int], echo: Echo | None, tools: ToolReader | None
    ) -> None:
        """Adds a choice: the ticket's answer to its prompt."""
        begun = 0 if echo is None else len(echo.text)
        places = Places(self.tokenizer, after, begun)
        self.choices.append(Choice(ticket, places, echo, tools))

    def take(self, number: int, piece: Piece) -> list[dict[str, Any]]:
        """Takes a piece of a choice into the reply; returns what a stream tells of it."""
        choice, told = self.choices[number], list[dict[str, Any]]()
        if choice.echo is not None:
            echo, choice.echo = choice.echo, None
            told.append(self._more(number, echo.text, self._echoed(echo, choice.ticket.scores)))
        choice.tokens, choice.finish, text = piece.tokens, piece.finish, piece.text
        if choice.tools is not None:
            text = choice.tools.push(text)
            if piece.finish is not None:
                rest, choice.calls = choice.tools.end()
                text += rest
        if text or (piece.chosen and (choice.tools is None or self.logprobs)):
            told.append(self._more(number, text, self._scores(choice.places, piece.chosen)))
        if choice.calls:
            choice.finish = "tool_calls" if choice.finish == "stop" else choice.finish
            calls = [{"index": at, **call} for at, call in enumerate(choice.calls)]
            told.append(self._chunk(number, {"tool_calls": calls}, None, None))
        if piece.finish is not None:
            if choice.ticket.placed is not None and piece.read is not None:
                found = found_in(piece.read, choice.ticket.placed)
                choice.sources["sources"] = [source.record() for source in found.sources]
            empty = {} if self.kind == "chat" else ""
            told.append(self._chunk(number, empty, None, choice.finish, **choice.sources))
        return told

    def opening(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        if self.kind == "completion":
            return []
        begun = {"role": "assistant", "content": ""}
        return [self._chunk(number, begun, None, None) for number in range(len(self.choices))]

    def counted(self) -> dict[str, Any]:
        """The event with the usage."""
        return {**self._head("chunk"), "choices": [], "usage": self.usage()}

    def whole(self) -> dict[str, Any]:
        """The whole reply."""
        choices = []
        for number, each in enumerate(self.choices):
            text, logprobs = "".join(each.texts), self._logprobs(each.scored)
            choice = {"index": number, "finish_reason": each.finish, "logprobs": logprobs}
            choice |= each.sources
            if self.kind == "chat":
                message = {"role": "assistant", "content": text, "refusal": None}
                if each.calls:
                    message |= {"content": text.strip() or None, "tool_calls": each.calls}
                choice["message"] = message
            else:
                choice["text"] = text
            choices.append(choice)
        return {**self._head("whole"), "choices": choices, "usage": self.usage()}

    @property
    def tokens(self) -> tuple[int, int]:
        """Tokens of the prompts, and of the answers so far."""
        prompts = self.choices[:: self.n]
        return sum(x.ticket.prompt for x in prompts), sum(x.tokens for x in self.choices)

    def usage(self) -> dict[str, Any]:
        """OpenAI's count of tokens; cached ones of the prompts were read before the request."""
        prompt, answer = self.tokens
        cached = sum(x.ticket.cached for x in self.choices[:: self.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _more(self, number: int, text: str, scored: Scored) -> dict[str, Any]:
        """More text of a choice, for the whole reply and as an event."""
        choice = self.choices[number]
        choice.texts.append(text)
        choice.scored += scored
        part = {"content": text} if self.kind == "chat" else text
        return self._chunk(number, part, self._logprobs(scored), None)

    def _echoed(self, echo: Echo, scores: TextScores | None) -> Scored:
        """The prompt's tokens; the first has no log-probability where nothing stands before it."""
        if scores is None:
            return []
        chosen = [Chosen(echo.first), *scores.chosen()][echo.hidden :]
        return self._scores(Places(self.tokenizer, special=True), chosen)

    def _scores(self, places: Places, chosen: Sequence[Chosen]) -> Scored:
        if not self.logprobs:
            return []
        scored = []
        for each in chosen:
            name, offset = places.next(each.token)
            names = self._names.distinct([token for token, _ in each.best])
            best = [self._entry(other, *pair) for other, pair in zip(names, each.best, strict=True)]
            own = self._entry(name, each.token, each.logprob)
            scored.append(({**own, "top_logprobs": best}, offset))
        return scored

    def _entry(self, name: str, token: int, logprob: float | None) -> dict[str, Any]:
        raw = self._names.raw(token)
        return {"token": name, "logprob": logprob, "bytes": None if raw is None else list(raw)}

    def _logprobs(self, scored: Scored) -> dict[str, Any] | None:
        """The `logprobs` of a choice."""
        if not self.logprobs:
            return None
        entries = [entry for entry, _ in scored]
        if self.kind == "chat":
            return {"content": entries, "refusal": None}
        best = [{one["token"]: one["logprob"] for one in each["top_logprobs"]} for each in entries]
        return {
            "tokens": [each["token"] for each in entries],
            "token_logprobs": [each["logprob"] for each in entries],
            # The first token of a prompt has none.
            "top_logprobs": [
                None if each["logprob"] is None else found
                for each, found in zip(entries, best, strict=True)
            ],
            "text_offset": [offset for _, offset in scored],
        }

    def _chunk(
        self, number: int, part: Any, logprobs: Any, finish: str | None, **more: Any
    ) -> dict[str, Any]:
        name = "delta" if self.kind == "chat" else "text"
        choice = {
            "index": number,
            name: part,
            "logprobs": logprobs,
            "finish_reason": finish,
            **more,
        }
        return {**self._head("chunk"), "choices": [choice]}

    def _head(self, what: Literal["chunk", "whole"]) -> dict[str, Any]:
        chat = {"chunk": "chat.completion.chunk", "whole": "chat.completion"}
        return {
            "id": self.id,
            "object": chat[what] if self.kind == "chat" else "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"fp_{self.fingerprint}",
        }
