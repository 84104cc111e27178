"""Rows in OpenAI's batch file format: a request a line in, a response a line out.

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": ...}}
    {"id": "batch_req_...", "custom_id": "a", "error": null,
     "response": {"status_code": 200, "request_id": "...", "body": {"choices": [...], ...}}}

A body is checked as `jax-longctx serve` checks it. What it leaves out, the command's options say.
Its `model` comes back, whatever it names: the one model of the run answers. A body with a seed is
answered as the server answers it; without one a row draws by its place.
"""

import dataclasses
import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jax_longctx.errors import InputError
from jax_longctx.settings import Sampling

if TYPE_CHECKING:
    from jax_longctx.serving.schema import ChatRequest

KEYS = {"custom_id", "method", "url", "body"}
URL = "/v1/chat/completions"
# Fields of a body that are used, beside those of `Sampling`.
USED = ("model", "messages", "stop", "max_tokens", "max_completion_tokens", "response_format")
# Fields of `Sampling` that have no default of a model, with the field of a body that says them.
OWN = {name: name for name in ("presence_penalty", "frequency_penalty")}
OWN["form"] = "response_format"


@dataclasses.dataclass(frozen=True)
class Request:
    """What a row of this format says of its answer.

    Attributes:
      seeded: whether its random draws are those of its own seed at the first place.
    """

    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    seeded: bool = False


def read_request(
    fields: Mapping[str, Any], usual: Request
) -> tuple[list[dict[str, str]], str, Request]:
    """Messages for the chat template, the name of the model, and the rest of a request.

    Args:
      usual: what a body leaves out.

    Raises:
      InputError: it cannot be answered, or pydantic, which checks it, is not installed.
    """
    if importlib.util.find_spec("pydantic") is None:
        raise InputError("OpenAI's batch format needs pydantic: pip install 'jax-longctx[serve]'")
    from jax_longctx.serving.schema import ChatRequest, RequestError, Sampled, parsed

    if fields.keys() != KEYS or (fields["method"], fields["url"]) != ("POST", URL):
        raise InputError(f"expected {', '.join(sorted(KEYS))}, the method POST and the url {URL}")
    if not isinstance(fields["body"], dict):
        raise InputError(f"body is {fields['body']!r:.80}; expected an object")
    try:
        asked = parsed(ChatRequest, fields["body"])
        _check_used(asked)
        drawn = asked.sampling(Sampled.model_construct(**dataclasses.asdict(usual.sampling)))
        messages = [message.for_template() for message in asked.messages]
    except RequestError as error:
        raise InputError(str(error)) from None
    seeded = asked.seed is not None
    left = [name for name, field in OWN.items() if field not in asked.model_fields_set]
    left += [] if seeded else ["seed"]
    drawn = dataclasses.replace(drawn, **{name: getattr(usual.sampling, name) for name in left})
    stop = tuple(asked.stop) if "stop" in asked.model_fields_set else usual.stop
    most = asked.wanted_tokens or usual.max_tokens
    return messages, asked.model, Request(drawn, most, stop, seeded)


def _check_used(asked: "ChatRequest") -> None:
    """Raises InputError for a field that would have no effect here."""
    used = {*USED, *(field.name for field in dataclasses.fields(Sampling))}
    for name in sorted(asked.model_fields_set - used):
        if getattr(asked, name) != type(asked).model_fields[name].get_default(
            call_default_factory=True
        ):
            raise InputError(f"{name} has no effect in a batch; leave it out")


def response(
    custom_id: str, digest: str, created: int, body: Mapping[str, Any], error: str | None
) -> dict[str, Any]:
    """A line of the output.

    Args:
      digest: of the row, from which the ids are made.
      created: seconds since 1970.
      body: model, `text`, `finish`, and tokens of prompt and answer; unused with an `error`.
    """
    head, request = {"id": f"batch_req_{digest[:24]}", "custom_id": custom_id}, digest[24:48]
    if error is not None:
        from jax_longctx.serving.schema import RequestError

        found = {"status_code": 400, "request_id": request, "body": RequestError(error).body()}
        return {**head, "response": found, "error": None}
    message = {"role": "assistant", "content": body["text"], "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": body["finish"]}
    prompt, answer = body["prompt"], body["answer"]
    usage = {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
    whole = {"id": f"chatcmpl-{request}", "object": "chat.completion", "created": created}
    whole |= {"model": body["model"], "choices": [choice], "usage": usage}
    found = {"status_code": 200, "request_id": request, "body": whole}
    return {**head, "response": found, "error": None}


def failed(line: Mapping[str, Any]) -> bool:
    """Whether a line of the output has an error in place of an answer, in either format."""
    response = line.get("response") or {}
    return line.get("error") is not None or response.get("status_code", 200) != 200
