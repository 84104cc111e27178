"""All routes as an OpenAPI 3.1 document, from the schemas of the requests."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pydantic
from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response

import jax_longctx
from jax_longctx.serving import schema

type Handler = Callable[[Request], Awaitable[Response]]
# A method, a path, and what answers there.
type Way = tuple[str, str, Handler]

SCHEMAS = "#/components/schemas/"
BODIES: Mapping[str, type[pydantic.BaseModel]] = {
    "/v1/chat/completions": schema.ChatRequest,
    "/v1/completions": schema.CompletionRequest,
    "/v1/contexts": schema.ContextRequest,
}
# Lists in whose place one text may stand, which the schemas' own checks see to.
ALONE = ("stop", "prompt")
_TEXT, _MAYBE = {"type": "string"}, {"type": ["string", "null"]}
_FAULT = {"message": _TEXT, "type": _TEXT, "param": _MAYBE, "code": _MAYBE}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": [*_FAULT], "properties": _FAULT}},
}


def describe(ways: Sequence[Way]) -> dict[str, Any]:
    """The document; a handler's docstring says behind `: ` what its route does."""
    wanted: list[tuple[Any, Any]] = [(model, "validation") for model in BODIES.values()]
    _, defined = models_json_schema(wanted, ref_template=f"{SCHEMAS}{{model}}")
    schemas = {**defined["$defs"], "Error": ERROR}
    for model in BODIES.values():
        fields = schemas[model.__name__]["properties"]
        fields |= {name: {"anyOf": [fields[name], _TEXT]} for name in ALONE if name in fields}
    fields = schemas["ContextRequest"]["properties"]
    upload = {"type": "string", "contentMediaType": "application/octet-stream"}
    schemas["ContextForm"] = {"type": "object", "properties": {**fields, "file": upload}}
    paths: dict[str, Any] = {}
    for method, path, handler in ways:
        shown = path.replace(":path}", "}")
        body = BODIES.get(path) if method == "POST" else None
        paths.setdefault(shown, {})[method.lower()] = _operation(shown, handler, body)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "jax-longctx serve",
            "version": jax_longctx.__version__,
            "description": "OpenAI's API, and contexts: texts that are read once, asked often. "
            "A field that is null counts as left out.",
        },
        "paths": paths,
        # Without keys a server takes requests that have none.
        "security": [{"key": []}, {}],
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(
    path: str, handler: Handler, body: type[pydantic.BaseModel] | None
) -> dict[str, Any]:
    named = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    failed = {"application/json": {"schema": {"$ref": f"{SCHEMAS}Error"}}}
    told: dict[str, Any] = {
        "operationId": handler.__name__,
        "summary": (handler.__doc__ or "").partition(": ")[2],
        "parameters": [
            {"name": name, "in": "path", "required": True, "schema": _TEXT} for name in named
        ],
        "responses": {
            "2XX": {"description": "The answer."},
            "default": {"description": "An error in OpenAI's form.", "content": failed},
        },
    }
    if body is not None:
        kinds = {"application/json": body.__name__}
        if body is schema.ContextRequest:
            kinds["multipart/form-data"] = "ContextForm"
        taken = {kind: {"schema": {"$ref": SCHEMAS + name}} for kind, name in kinds.items()}
        told["requestBody"] = {"required": True, "content": taken}
    return told
