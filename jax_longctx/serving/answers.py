"""An answer in OpenAI's two forms, as events of a stream or whole: chats and completions."""

import dataclasses
import secrets
import time
from collections.abc import Sequence
from typing import Any, Literal

from jax_longctx.engine.running import Chosen
from jax_longctx.serving.schema import usage
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
    scored: list[tuple[dict[str, Any], int]] = dataclasses.field(default_factory=list)

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

    def _scores(self, chosen: Sequence[Chosen]) -> list[tuple[dict[str, Any], int]]:
        """Tokens with the best ones at their places, as chats have them, and where each begins."""
        if not self.logprobs:
            return []
        scored = []
        for each in chosen:
            name, offset = self._places.next(each.token)
            names = self._names.distinct([token for token, _ in each.best])
            best = [self._entry(other, *pair) for other, pair in zip(names, each.best, strict=True)]
            own = self._entry(name, each.token, 0.0 if each.logprob is None else each.logprob)
            scored.append(({**own, "top_logprobs": best}, offset))
        return scored

    def _entry(self, name: str, token: int, logprob: float) -> dict[str, Any]:
        raw = self._names.raw(token)
        return {"token": name, "logprob": logprob, "bytes": None if raw is None else list(raw)}

    def _logprobs(self, scored: Sequence[tuple[dict[str, Any], int]]) -> dict[str, Any] | None:
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
            "top_logprobs": best,
            "text_offset": [offset for _, offset in scored],
        }

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
