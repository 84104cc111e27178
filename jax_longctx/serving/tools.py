"""Calls of tools in answers: how a family's chat template writes them, as OpenAI's `tool_calls`.

Three forms are read. Qwen and other models of the Hermes form write
`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, also several; Mistral
`[TOOL_CALLS][{"name": ..., "arguments": {...}}]` or `[TOOL_CALLS]name[ARGS]{...}`; Llama 3 answers
by `{"name": ..., "parameters": {...}}` alone. Sources: the chat templates of Qwen2.5-7B-Instruct,
Mistral-7B-Instruct-v0.3, Ministral-8B-Instruct-2410 and Llama-3.1-8B-Instruct.
"""

import dataclasses
import json
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from jax_longctx.forms import bounded_schema
from jax_longctx.text import Tokenizer

# Letters and digits: Mistral's templates take only that many.
ID_BYTES, ID_LENGTH = 5, 9
_decoder = json.JSONDecoder()


@dataclasses.dataclass(frozen=True)
class ToolForm:
    """How a chat template writes calls.

    Attributes:
      begin: what stands before calls; "" where they are the whole answer.
      end: what stands behind each.
      arguments: the key of a call's arguments.
      listed: whether calls are in a list.
      named: what stands between a name and its arguments, where a call is no JSON object.
      marks: what of it may be special tokens, which answers show then.
    """

    begin: str
    end: str = ""
    arguments: str = "arguments"
    listed: bool = False
    named: str = ""
    marks: tuple[str, ...] = ()

    def calls(self, text: str) -> list[dict[str, Any]] | None:
        """The calls in an answer from where they begin, in OpenAI's form; None for other text."""
        found: list[dict[str, Any]] = []
        try:
            for name, arguments in self._read(text):
                told = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
                key = secrets.token_hex(ID_BYTES)[:ID_LENGTH]
                found.append({"id": key, "type": "function", "function": told})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        return found

    def _read(self, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Each call's name and arguments. ValueError and others where the text is none."""
        text = text.strip()
        for mark in self.marks if not self.begin else ():
            text = text.removeprefix(mark).lstrip()
        while text:
            text, name = _without(text, self.begin), ""
            if self.named:
                name, _, text = text.partition(self.named)
            value, end = _decoder.raw_decode(text.lstrip())
            text = _without(text.lstrip()[end:].lstrip(), self.end)
            if self.named:
                value = {"name": name.strip(), self.arguments: value}
            if not self.begin:
                # Llama 3 puts it between two calls.
                text = text.removeprefix(";").lstrip()
            for call in value if self.listed and isinstance(value, list) else [value]:
                name, arguments = call["name"], call[self.arguments]
                if not (isinstance(name, str) and isinstance(arguments, dict)):
                    raise ValueError
                yield name, arguments

    def grammar(self, tools: Sequence[Mapping[str, Any]], tokenizer: Tokenizer) -> str:
        """The form of an answer that calls one of these functions, as `Sampling.form`."""

        def written(text: str) -> str:
            token = tokenizer.special_id(text)
            return json.dumps(text) if token is None else f"<[{token}]>"

        rules = []
        for number, tool in enumerate(tools):
            schema = bounded_schema(tool.get("parameters") or {"type": "object"})
            rules_json = f"%json {json.dumps(schema, ensure_ascii=False)}"
            name = json.dumps(tool["name"], ensure_ascii=False)
            if self.named:
                parts = [name, written(self.named), rules_json]
            else:
                opened = "[" * self.listed + f'{{"name": {name}, "{self.arguments}": '
                parts = [json.dumps(opened, ensure_ascii=False), rules_json]
                parts.append(json.dumps("}" + "]" * self.listed))
            rules.append(f"call_{number}: {' '.join(parts)}")
        begin, end = ([written(x)] if x else [] for x in (self.begin, self.end))
        lines = ['"\\n"'] if end else []
        either = " | ".join(f"call_{number}" for number in range(len(tools)))
        start = [*begin, *lines, f"({either})", *lines, *end]
        return "\n".join([f"start: {' '.join(start)}", *rules])


HERMES = ToolForm("<tool_call>", "</tool_call>", marks=("<tool_call>", "</tool_call>"))
MISTRAL = ToolForm("[TOOL_CALLS]", listed=True, marks=("[TOOL_CALLS]",))
MISTRAL_NAMED = ToolForm("[TOOL_CALLS]", named="[ARGS]", marks=("[TOOL_CALLS]", "[ARGS]"))
LLAMA = ToolForm("", arguments="parameters", marks=("<|python_tag|>",))


def tool_form(template: str | None) -> ToolForm | None:
    """The form that a chat template writes calls in; None where it takes no tools, or another."""
    if template is None or "tools" not in template:
        return None
    # Qwen3-Coder writes calls as XML.
    if "<tool_call>" in template and "<function=" not in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if "<|eot_id|>" in template and '"parameters": ' in template:
        return LLAMA
    return None


class ToolReader:
    """An answer's text on its way: what is content, and the calls behind it.

    Args:
      names: of the functions that may be called.
      most: calls that are given out.
    """

    def __init__(self, form: ToolForm, names: Collection[str], most: int | None):
        self._form, self._names, self._most = form, names, most
        self._held, self._calling, self._plain = "", False, False

    def push(self, text: str) -> str:
        """The content that is certain with this text."""
        if self._plain:
            return text
        self._held += text
        begin = self._form.begin
        if not (self._calling or begin):
            starts, marks = self._held.lstrip(), ("{", *self._form.marks)
            self._calling = starts.startswith(marks)
            self._plain = not any(mark.startswith(starts[: len(mark)]) for mark in marks)
            if self._plain:
                return self._held
        if self._calling or not begin:
            return ""
        at = self._held.find(begin)
        self._calling = at >= 0
        if at < 0:
            sizes = range(len(begin) - 1, 0, -1)
            at = len(self._held) - next((n for n in sizes if self._held.endswith(begin[:n])), 0)
        content, self._held = self._held[:at], self._held[at:]
        return content

    def end(self) -> tuple[str, list[dict[str, Any]]]:
        """The rest of the content, and the calls; text that is only like calls is content."""
        if self._plain:
            return "", []
        calls = (self._form.calls(self._held) if self._calling else None) or []
        # Any JSON may have a name and parameters.
        known = all(call["function"]["name"] in self._names for call in calls)
        return ("", calls[: self._most]) if calls and known else (self._held, [])


def _without(text: str, mark: str) -> str:
    """The text behind a mark that it begins with. ValueError where it does not."""
    if not text.startswith(mark):
        raise ValueError
    return text[len(mark) :].lstrip()
