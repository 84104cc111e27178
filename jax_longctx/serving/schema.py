"""Requests as OpenAI's clients send them, the answers to them, and errors.

A request is a pydantic model that refuses unknown fields and values that have no effect here:
nothing is ignored. A field that is null counts as left out. The answers are plain dicts, checked
in the tests by the official client.

Four fields are not OpenAI's: `context` (the id of a prefilled text), `sources` (whether to say
where in it an answer was found), `top_k` and `repetition_penalty`.
"""

import logging
import reprlib
import secrets
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import pydantic
from pydantic import Discriminator, Field, Tag

from jax_longctx.errors import CapacityError, CheckpointError, LongctxError
from jax_longctx.forms import json_form
from jax_longctx.serving.checks import Items, Model, RequestError, supported
from jax_longctx.serving.messages import ChosenTool, Message, Tool
from jax_longctx.settings import SEEDS, Sampling

# OpenAI allows 4.
MOST_STOPS = 16
# Answers to one prompt, as OpenAI's.
MOST_CHOICES = 128
# Tokens of an answer to a completion request that names no number, as OpenAI's.
COMPLETION_TOKENS = 16
# A top_p that no second token fits into.
NO_MORE = 1e-9
# Longest part of a wrong value, or of its field's name, that an error shows.
SHOWN = 80

# OpenAI's fields that have no effect here, with the values that ask for none.
WITHOUT_EFFECT: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none",),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False, True),
    "verbosity": ("low", "medium", "high"),
}
# Of these a chat takes any value.
TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
# Labels and hints of the client's own; answers never depend on them.
LABELS = ("user", "safety_identifier", "metadata", "prompt_cache_key", "reasoning_effort")


def from_library(error: LongctxError) -> RequestError:
    """The library's error for one request."""
    if isinstance(error, CheckpointError):
        # The error names files of the server, which are not the client's business.
        logging.getLogger(__name__).error("%s", error)
        return RequestError(
            "the server could not write or read the files of a context; its log says why",
            status=500,
            code="context_files",
        )
    code = "out_of_memory" if isinstance(error, CapacityError) else None
    return RequestError(str(error), code=code)


type TokenId = Annotated[int, Field(ge=0, lt=2**31)]


class StreamOptions(Model):
    """`include_usage`: whether the last event of a stream counts the tokens."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class Sampled(Model):
    """How answers are sampled where a request does not say; OpenAI's own defaults."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, ge=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    top_k: int = Field(default=0, ge=0, lt=2**31)
    repetition_penalty: float = Field(default=1.0, gt=0, le=1e6)

    @classmethod
    def of_model(cls, generation: Mapping[str, Any]) -> "Sampled":
        """What a checkpoint's generation_config.json says of these; OpenAI's defaults of others.

        As in vLLM, `do_sample` does not count, and a top_k of -1 is none.

        Raises:
          CheckpointError: a value is out of range.
        """
        said = {name: generation.get(name) for name in cls.model_fields}
        said["top_k"] = 0 if said["top_k"] == -1 else said["top_k"]
        try:
            return cls.model_validate(said)
        except pydantic.ValidationError as error:
            raise CheckpointError(
                f"the checkpoint's generation_config.json: {_first_fault(error)}; mend it, or "
                f"start the server with --sampling-defaults openai"
            ) from None


class JsonSchema(Model):
    """A JSON schema with its name. `strict` changes nothing: the schema is always followed."""

    name: str
    description: str | None = None
    strict: bool | None = None
    rules: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Model):
    """`response_format`: what an answer's text is; a JSON text is valid for the schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @pydantic.model_validator(mode="after")
    def _one_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise RequestError(
                "response_format has a json_schema where its type is json_schema, and only there",
                param="response_format.json_schema",
            )
        return self

    @property
    def form(self) -> str | None:
        """As `Sampling.form`."""
        if self.type == "text":
            return None
        found = {"type": "object"} if self.json_schema is None else self.json_schema.rules
        return json_form(found)


class _Answered(Sampled):
    """What chat and completion requests share.

    Attributes:
      n: answers to each prompt.
    """

    model: str
    context: str | None = None
    n: int = Field(default=1, ge=1, le=MOST_CHOICES)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(2**63), lt=SEEDS)
    stop: Items[str] = Field(default_factory=list)
    response_format: ResponseFormat | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    sources: bool = False

    @pydantic.model_validator(mode="after")
    def _of_a_context(self) -> "_Answered":
        if self.sources and self.context is None:
            raise RequestError(
                "sources are passages of a context; read the text by POST /v1/contexts, and name "
                "it as context",
                param="sources",
            )
        return self

    _without: ClassVar = WITHOUT_EFFECT

    @pydantic.model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        return supported(given, cls._without, LABELS)

    @pydantic.field_validator("stop", mode="wrap")
    @classmethod
    def _few_stops(cls, given: Any, check: Callable[[Any], list[str]]) -> list[str]:
        stops = check([given] if isinstance(given, str) else given)
        if len(stops) > MOST_STOPS or not all(stops):
            raise ValueError(f"expected at most {MOST_STOPS} strings, none of them empty")
        return stops

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with the usage; an answer that is no stream has it always."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, defaults: Sampled) -> Sampling:
        """How answers are drawn; a row's seed is as in `ask` and `generate`.

        A request without a seed draws one.

        Args:
          defaults: of what the request does not say.

        Raises:
          InputError: a value is out of range.
        """
        seed = secrets.randbits(64) if self.seed is None else self.seed % SEEDS
        said = {
            name: getattr(self if name in self.model_fields_set else defaults, name)
            for name in Sampled.model_fields
        }
        # OpenAI's 0 is the likeliest token alone.
        said |= {"top_p": said["top_p"] or NO_MORE, "seed": seed}
        said |= {"presence_penalty": self.presence_penalty, "form": self.form}
        return Sampling(**said, frequency_penalty=self.frequency_penalty)

    @property
    def form(self) -> str | None:
        """What the answers follow, as `Sampling.form`."""
        return None if self.response_format is None else self.response_format.form


class ChatRequest(_Answered):
    """`POST /v1/chat/completions`.

    Attributes:
      chat_template_kwargs: variables of the chat template.
      add_generation_prompt: whether the template opens an answer behind the messages.
      continue_final_message: whether the answer goes on with the last message, which stays open.
    """

    _without: ClassVar = {name: x for name, x in WITHOUT_EFFECT.items() if name not in TOOLS}

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(
        default_factory=dict, max_length=16
    )
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Items[Tool] = Field(default_factory=list, max_length=MOST_CHOICES)
    tool_choice: Literal["none", "auto", "required"] | ChosenTool = "auto"
    parallel_tool_calls: bool = True

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the answer may call, as chat templates take them."""
        if self.tool_choice == "none":
            return []
        return [
            tool.model_dump(exclude_none=True, exclude={"function": {"strict"}})
            for tool in self.tools
        ]

    @property
    def called(self) -> list[dict[str, Any]]:
        """The functions of which the answer has to call one; none where it need not."""
        if isinstance(self.tool_choice, str):
            wanted = {tool.function.name for tool in self.tools if self.tool_choice == "required"}
        else:
            wanted = {self.tool_choice.function.name}
        functions = [tool["function"] for tool in self.offered]
        return [function for function in functions if function["name"] in wanted]

    @pydantic.model_validator(mode="after")
    def _tools_there(self) -> "ChatRequest":
        if self.tool_choice not in ("none", "auto") and not self.called:
            raise RequestError("tool_choice names no function of tools", param="tool_choice")
        if self.offered and not self.called and any(tool.function.strict for tool in self.tools):
            raise RequestError(
                "strict is not supported where the answer need not call a function: leave it out, "
                "or give tool_choice required or a function",
                param="tools",
                code="unsupported",
            )
        if self.offered and self.form is not None:
            raise RequestError(
                "response_format and tools exclude each other; give one of them",
                param="response_format",
            )
        return self

    @pydantic.model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.continue_final_message and "add_generation_prompt" in self.model_fields_set:
            if self.add_generation_prompt:
                raise RequestError(
                    "continue_final_message opens no new answer; leave out add_generation_prompt",
                    param="add_generation_prompt",
                )
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise RequestError(
                "max_tokens and max_completion_tokens exclude each other; give one of them",
                param="max_tokens",
            )
        return self

    @property
    def wanted_tokens(self) -> int | None:
        """Most tokens of the answer, where the request says so."""
        return self.max_tokens or self.max_completion_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        """None for no log-probabilities; else how many alternatives."""
        return self.top_logprobs if self.logprobs else None


def _prompt_form(given: Any) -> str | None:
    if isinstance(given, str):
        return "text"
    return "ids" if isinstance(given, list) else None


type OnePrompt = Annotated[
    Annotated[str, Tag("text")] | Annotated[Items[TokenId], Tag("ids")],
    Discriminator(
        _prompt_form,
        custom_error_type="prompt_type",
        custom_error_message="Input should be a text or a list of token ids",
    ),
]


class CompletionRequest(_Answered):
    """`POST /v1/completions`.

    Attributes:
      prompts: each a text or token ids; the request's `prompt` is one of them, or their list.
      echo: whether an answer's text begins with the prompt; `logprobs` are then its tokens' too.
    """

    prompts: Items[OnePrompt] = Field(alias="prompt")
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: bool = False

    @pydantic.field_validator("prompts", mode="before")
    @classmethod
    def _several(cls, given: Any) -> Any:
        """A list of prompts; its first entry decides its kind."""
        listed = isinstance(given, list) and given and isinstance(given[0], str | list)
        prompts = given if listed else [given]
        if any(prompt in ("", []) for prompt in prompts):
            raise RequestError(
                "prompt must be one text or one list of token ids, or a list of such, none empty",
                param="prompt",
            )
        return prompts

    @pydantic.model_validator(mode="after")
    def _some_text(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise RequestError(
                "max_tokens is 0; give at least 1, or echo: true for the prompt alone",
                param="max_tokens",
            )
        return self

    @property
    def wanted_tokens(self) -> int:
        """Most tokens of the answer."""
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def scored(self) -> int | None:
        """How many alternatives of each token of the prompt; None for no log-probabilities."""
        return self.logprobs if self.echo else None

    @property
    def wanted_logprobs(self) -> int | None:
        """None for no log-probabilities; else how many alternatives."""
        return self.logprobs


class ContextRequest(Model):
    """`POST /v1/contexts`: a text to read once and to ask many times.

    Attributes:
      text, file: the text, or the name of a file under the server's `--files-under`.
      chat: whether the chat template goes around text and questions; None: where there is one.
      ttl: seconds that the context lives after its last use.
      save: whether to write it to the disk at once, so that it survives a crash.
      stream: whether to stream the progress of prefill.
    """

    text: str | None = None
    file: str | None = None
    chat: bool | None = None
    ttl: float | None = Field(default=None, gt=0, le=1e9)
    save: bool = False
    stream: bool = False

    @pydantic.model_validator(mode="after")
    def _one_text(self) -> "ContextRequest":
        if (self.text is None) == (self.file is None):
            raise RequestError("give either text or file", param="text")
        return self


def parsed[Kind: pydantic.BaseModel](kind: type[Kind], body: bytes | dict[str, Any]) -> Kind:
    """The body, JSON or a form's values, as a request. Raises RequestError with the first fault."""
    try:
        if isinstance(body, dict):
            return kind.model_validate(body)
        return kind.model_validate_json(body)
    except pydantic.ValidationError as error:
        raise _first_fault(error) from None


_brief = reprlib.Repr(maxlevel=3, maxstring=SHOWN, maxother=SHOWN, maxlong=SHOWN)


def _first_fault(error: pydantic.ValidationError) -> RequestError:
    fault = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(str(each)[:SHOWN] for each in fault["loc"]) or None
    if fault["type"] == "json_invalid":
        return RequestError(f"the body is no JSON: {fault['msg']}", code="invalid_json")
    if fault["type"] == "extra_forbidden":
        return RequestError(
            f"unknown field {where!r}; leave it out", param=where, code="unknown_field"
        )
    if fault["type"] == "missing":
        return RequestError(f"{where} is missing", param=where, code="missing_field")
    given = _brief.repr(fault["input"])
    if len(given) > SHOWN:
        given = given[:SHOWN] + "..."
    message = f"{where or 'the body'}: {fault['msg']}; got {given}"
    return RequestError(message, param=where)
