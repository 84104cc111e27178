"""A checkpoint's chat template, rendered in jinja2's sandbox as Hugging Face templates expect.

Templates come with a checkpoint, so with whatever a stranger wrote: they run in the immutable
sandbox. They may use `raise_exception`, `strftime_now`, the `tojson` filter, loop controls and the
`generation` block (which marks the assistant's words for training and renders as its body).
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

from jax_longctx.errors import CheckpointError, ConfigError, InputError

__all__ = ["ChatTemplate", "select_template"]


class ChatTemplate:
    """One compiled chat template with the checkpoint's special tokens.

    Attributes:
      source: the template's own text.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]):
        self.source = source
        self._special_tokens = dict(special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(
                f"the chat template is not valid at its line {error.lineno}: {error.message}"
            ) from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
        """The messages as one text. Raises InputError when the template refuses them."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                **self._special_tokens,
            )
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template refuses the messages: {error.message}") from error


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


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}`: its body, unchanged."""

    # jinja2 declares it as a plain set of the instance; a ClassVar would contradict it.
    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[jinja2.ext.loopcontrols, _GenerationBlock],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    # Jinja's own filter escapes for HTML, which a model has not seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
