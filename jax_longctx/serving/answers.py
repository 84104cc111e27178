"""An answer in OpenAI's two forms, as events of a stream or whole: chats and completions."""

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

from jax_longctx.engine.running import Chosen
from jax_longctx.serving.schema import Named, Scored, chat_logprobs, completion_logprobs, usage
from jax_longctx.serving.tokens import Places, TokenNames
from jax_longctx.text import Tokenizer


@dataclasses.dataclass
class Answer:
    """One answer on its way to the client.

    Attributes:
      after: the tokens that the answer's text follows on.
      logprobs: whether log-probabilities were asked for.
    """

    kind: Literal["chat", "completion"]
    model: str
    fingerprint: str
    tokenizer: Tokenizer
    after: Sequence[int]
    logprobs: bool
    prompt: int
    cached: int = 0
    texts: list[str] = dataclasses.field(default_factory=list)
    scored: list[Scored] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        prefix = "chatcmpl" if self.kind == "chat" else "cmpl"
        self.id, self.created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())
        self._names = TokenNames(self.tokenizer)
        self._places = Places(self.tokenizer, self.after)

    def opening(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        if self.kind == "completion":
            return []
        return [self._chunk([self._choice({"role": "assistant", "content": ""}, None, None)])]

    def piece(self, text: str, chosen: Sequence[Chosen]) -> dict[str, Any]:
        """More text, as an event."""
        logprobs = self._logprobs(self._scores(chosen))
        part = {"content": text} if self.kind == "chat" else text
        return self._chunk([self._choice(part, logprobs, None)])

    def closing(self, finish: str) -> dict[str, Any]:
        """The event that says why the answer ended."""
        return self._chunk([self._choice({} if self.kind == "chat" else "", None, finish)])

    def counted(self, tokens: int) -> dict[str, Any]:
        """The event with the usage."""
        return {**self._chunk([]), "usage": usage(self.prompt, self.cached, tokens)}

    def take(self, text: str, chosen: Sequence[Chosen]) -> None:
        """More text, for the whole answer."""
        self.texts.append(text)
        if self.logprobs:
            self.scored += self._scores(chosen)

    def whole(self, finish: str, tokens: int) -> dict[str, Any]:
        """The whole answer."""
        text, logprobs = "".join(self.texts), self._logprobs(self.scored)
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish, "logprobs": logprobs}
        if self.kind == "chat":
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        name = "chat.completion" if self.kind == "chat" else "text_completion"
        counts = usage(self.prompt, self.cached, tokens)
        return {**self._head(name), "choices": [choice], "usage": counts}

    def _scores(self, chosen: Sequence[Chosen]) -> list[Scored]:
        if not self.logprobs:
            return []
        scored = []
        for each in chosen:
            name, offset = self._places.next(each.token)
            logprob = 0.0 if each.logprob is None else each.logprob
            names = self._names.distinct([token for token, _ in each.best])
            best = [
                Named(other, self._names.raw(token), value)
                for other, (token, value) in zip(names, each.best, strict=True)
            ]
            own = Named(name, self._names.raw(each.token), logprob)
            scored.append(Scored(own, best, offset))
        return scored

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        if self.kind == "chat":
            return chat_logprobs(scored)
        return completion_logprobs(scored)

    def _choice(self, part: Any, logprobs: Any, finish: str | None) -> dict[str, Any]:
        name = "delta" if self.kind == "chat" else "text"
        return {"index": 0, name: part, "logprobs": logprobs, "finish_reason": finish}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        name = "chat.completion.chunk" if self.kind == "chat" else "text_completion"
        return {**self._head(name), "choices": choices}

    def _head(self, name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"fp_{self.fingerprint}",
        }
