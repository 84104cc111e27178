"""The messages of a chat, calls of tools among them, and the tools that a chat offers."""

import json
from collections.abc import Mapping
from typing import Any, Literal

import pydantic
from pydantic import Field

from jax_longctx.serving.checks import Items, Model, RequestError, supported

# Fields of a message that have no effect here, in the same way.
MESSAGES_WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "function_call": (),
    "audio": (),
    "refusal": (),
}
MESSAGE_LABELS = ("name",)


class TextPart(Model):
    """One part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str
    # A hint for servers that cache where they are told to.
    cache_control: dict[str, Any] | None = None


class CalledFunction(Model):
    """The name and the arguments, an object as JSON text, of a call."""

    name: str
    arguments: str


class ToolCall(Model):
    """A call that an earlier answer made."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: with arguments that are no text."""
        try:
            arguments = json.loads(self.function.arguments)
        except (ValueError, RecursionError):
            raise RequestError(
                f"the arguments of the call {self.id!r:.80} are no JSON",
                param="messages.tool_calls",
            ) from None
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class Function(Model):
    """A function that answers may call; `parameters` is the JSON schema of its arguments."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Model):
    """One of `tools`."""

    type: Literal["function"]
    function: Function


class ChosenFunction(Model):
    """The name in a `tool_choice`."""

    name: str


class ChosenTool(Model):
    """A `tool_choice` of one function."""

    type: Literal["function"]
    function: ChosenFunction


class Message(Model):
    """One message of a chat; those of the role `tool` are results of calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Items[TextPart]
    tool_calls: Items[ToolCall] = Field(default_factory=list)
    tool_call_id: str | None = None

    @pydantic.model_validator(mode="before")
    @classmethod
    def _plain(cls, given: Any) -> Any:
        kept = supported(given, MESSAGES_WITHOUT_EFFECT, MESSAGE_LABELS, "messages.")
        if isinstance(kept, dict) and kept.get("role") == "assistant":
            # An answer of tool calls alone has none.
            kept["content"] = kept.get("content") or ""
        return kept

    @pydantic.model_validator(mode="after")
    def _of_its_role(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise RequestError("an assistant's message alone has tool_calls", param="messages")
        if (self.tool_call_id is None) == (self.role == "tool"):
            raise RequestError(
                "a message of the role tool has a tool_call_id, and no other has one",
                param="messages",
            )
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it; OpenAI's `developer` is their `system`."""
        role = "system" if self.role == "developer" else self.role
        text = self.content
        if not isinstance(text, str):
            text = "".join(part.text for part in text)
        told: dict[str, Any] = {"role": role, "content": text}
        if self.tool_calls:
            told["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return told if self.tool_call_id is None else {**told, "tool_call_id": self.tool_call_id}
