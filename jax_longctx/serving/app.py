"""The HTTP routes: OpenAI's chats, completions and models, contexts, health, metrics, the page.

A handler checks its request, splits it into texts and questions in a worker thread, gives the
scheduler its tickets, and turns their events into the reply. A stream's headers are sent with its
first event, so that a request that fails before has its own status.
"""

import asyncio
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Literal

import anyio.to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jax_longctx.answers import AnswerReader
from jax_longctx.api import LongContext
from jax_longctx.engine.marks import check_where
from jax_longctx.engine.rows import Ask
from jax_longctx.errors import LongctxError
from jax_longctx.methods import settings_of
from jax_longctx.serving import schema
from jax_longctx.serving.bodies import REFUSED, Bodies
from jax_longctx.serving.contexts import Contexts
from jax_longctx.serving.doors import Access, Doors
from jax_longctx.serving.metrics import Metrics, Requests
from jax_longctx.serving.openapi import Handler, Way
from jax_longctx.serving.prompts import Prompt, Prompts
from jax_longctx.serving.reply import Reply
from jax_longctx.serving.routes import ROUTE
from jax_longctx.serving.scheduler import Scheduler
from jax_longctx.serving.schema import RequestError
from jax_longctx.serving.streams import Call, Events
from jax_longctx.serving.texts import Entry, was_deleted
from jax_longctx.serving.tickets import Piece, Prefilled
from jax_longctx.serving.tools import ToolReader
from jax_longctx.serving.web import Web

if TYPE_CHECKING:
    from jax_longctx.serving.server import ServeOptions

# Paths that need no key: whoever watches the process has none, and the page takes one.
OPEN = ("/health", "/ready", "/", "/page/{name}", "/openapi.json")


@dataclasses.dataclass(eq=False)
class Service:
    """What the routes share."""

    model: LongContext
    options: "ServeOptions"
    prompts: Prompts
    contexts: Contexts
    scheduler: Scheduler
    metrics: Metrics

    def __post_init__(self) -> None:
        self.name, self.access = self.options.name, self.options.access
        self.bodies = Bodies(self.access, self.scheduler)
        self.fingerprint, created = self.model.engine.fingerprint, int(time.time())
        self.entry = {"id": self.name, "object": "model", "created": created}
        self.entry |= {"owned_by": "jax-longctx", "method": settings_of(self.model.engine.method)}

    # -- routes ------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions: an answer to messages."""
        return await self._answer(request, schema.ChatRequest, "chat")

    async def completion(self, request: Request) -> Response:
        """POST /v1/completions: an answer to each prompt."""
        return await self._answer(request, schema.CompletionRequest, "completion")

    async def models(self, request: Request) -> Response:
        """GET /v1/models: the one model, with its method."""
        return JSONResponse({"object": "list", "data": [self.entry]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/{name}: the model of this name."""
        self._check_model(request.path_params["name"])
        return JSONResponse(self.entry)

    async def make_context(self, request: Request) -> Response:
        """POST /v1/contexts: reads a text."""
        with self.bodies.admitted() as call:
            asked, given = await self.bodies.context(request, call)
            lay_out = self.prompts.context
            text, chat, prompt = await anyio.to_thread.run_sync(lay_out, given.text, asked.chat)
            try:
                how = {"save": asked.save, "route": request.scope.get(ROUTE)}
                entry = self.contexts.enter(text, chat=chat, ttl=asked.ttl, **how)
            except RequestError:
                self.contexts.release(text)
                raise
            entry.prompt, entry.place, entry.notes = prompt, given.place, given.notes
            request.state.context, request.state.tokens = entry.id, lambda: (len(text.tokens), 0)
            call.add(text=text, entry=entry)
            self.bodies.drop(call)
            records = _progress(entry, await call.begun(request))
            if asked.stream:
                return call.streamed(records)
            return JSONResponse(await call.watched(request, _last(records)), status_code=201)

    async def list_contexts(self, request: Request) -> Response:
        """GET /v1/contexts: all contexts."""
        records = [entry.record() for entry in self.contexts.listed()]
        return JSONResponse({"object": "list", "data": records})

    async def one_context(self, request: Request) -> Response:
        """GET /v1/contexts/{id}: one context."""
        return JSONResponse(self._entry(request.path_params["id"]).record())

    async def context_text(self, request: Request) -> Response:
        """GET /v1/contexts/{id}/text: the text of a context."""
        entry = self._entry(request.path_params["id"])
        placed = await anyio.to_thread.run_sync(self.prompts.placed, entry)
        return JSONResponse({"id": entry.id, "object": "context.text", "text": placed.text})

    async def delete_context(self, request: Request) -> Response:
        """DELETE /v1/contexts/{id}: removes a context."""
        name = self._entry(request.path_params["id"]).id
        delete = functools.partial(self.contexts.remove, name, deleted=True)
        if not await anyio.to_thread.run_sync(delete):
            # Another request was faster.
            self._entry(name)
        self.scheduler.wake()
        return JSONResponse({"id": name, "object": "context.deleted", "deleted": True})

    async def health(self, request: Request) -> Response:
        """GET /health: the process runs."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """GET /ready: requests are taken."""
        state = self.scheduler.state
        return JSONResponse({"status": state}, status_code=200 if state == "ready" else 503)

    async def figures(self, request: Request) -> Response:
        """GET /metrics: figures for Prometheus."""
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4")

    # -- requests ----------------------------------------------------------------------------------

    def _check_model(self, name: str) -> None:
        if name != self.name:
            raise RequestError(
                f"there is no model {name!r:.200}; this server has {self.name!r}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def _entry(self, name: str, param: str | None = None) -> Entry:
        entry = self.contexts.find(name)
        if entry is None:
            raise RequestError(
                f"there is no context {name!r:.200}; it was deleted, or its time is over",
                status=404,
                param=param,
                code="context_not_found",
            )
        return entry

    # -- answers -----------------------------------------------------------------------------------

    async def _answer(
        self, request: Request, form: type[Any], kind: Literal["chat", "completion"]
    ) -> Response:
        with self.bodies.admitted() as call:
            asked = await self.bodies.json(form, request, call)
            self._check_model(asked.model)
            entry = None if asked.context is None else self._entry(asked.context, "context")
            if asked.sources:
                check_where(self.model.engine)
            split = getattr(self.prompts, kind)
            prompts: list[Prompt] = await anyio.to_thread.run_sync(split, asked, entry)
            reply = Reply(
                kind=kind,
                model=self.name,
                fingerprint=self.fingerprint,
                tokenizer=self.model.tokenizer,
                logprobs=asked.wanted_logprobs is not None,
                n=asked.n,
            )
            try:
                placed = None
                if asked.sources and entry is not None:
                    placed = await anyio.to_thread.run_sync(self.prompts.placed, entry)
                self._add_tickets(call, reply, asked, prompts, {"about": entry, "placed": placed})
            except BaseException:
                for prompt in prompts:
                    self.contexts.release(prompt.text)
                raise
            request.state.context, request.state.tokens = asked.context, lambda: reply.tokens
            self.bodies.drop(call)
            records = _chunks(reply, await call.begun(request), asked.include_usage)
            if asked.stream:
                return call.streamed(records)
            await call.watched(request, _last(records))
            return JSONResponse(reply.whole())

    def _add_tickets(
        self,
        call: Call,
        reply: Reply,
        asked: Any,
        prompts: list[Prompt],
        about: dict[str, Any],
    ) -> None:
        """A ticket and a choice for each answer."""
        ends = self.model.end_ids(asked.stop, True)
        sampling = asked.sampling(self.options.sampled)
        sampling = dataclasses.replace(sampling, form=self.prompts.form(asked))
        calling = self.prompts.calling(asked)
        shown = () if calling is None else calling.marks
        names = () if calling is None else [tool["function"]["name"] for tool in asked.offered]
        for number, prompt in enumerate(prompts):
            how: dict[str, Any] = {"text": prompt.text, "cached": prompt.cached, **about}
            if prompt.max_tokens:
                how["ask"] = Ask(
                    question=prompt.question,
                    # As the rows of one call of `generate`.
                    sampling=sampling.at([(number,)]),
                    max_tokens=prompt.max_tokens,
                    stop_ids=ends,
                    logprobs=asked.wanted_logprobs,
                )
                reader = AnswerReader(reply.tokenizer, prompt.after, asked.stop, ends, shown)
                how["reader"] = reader
            how["prompt"] = len(prompt.text.tokens) + len(prompt.question)
            most = None if calling is None or asked.parallel_tool_calls else 1
            tools = None if calling is None else ToolReader(calling, names, most)
            reply.add(call.add(**how), prompt.after, prompt.echo, tools)


async def _progress(entry: Entry, events: Events) -> AsyncGenerator[dict[str, Any]]:
    """The records of a context that is being read; the last is the context."""
    async for _, event in events:
        if isinstance(event, Prefilled):
            told = {"id": entry.id, "object": "context.progress"}
            yield {**told, "tokens_read": event.done, "tokens": event.total}
    if entry.deleted:
        raise was_deleted(entry)
    yield entry.record()


async def _chunks(reply: Reply, events: Events, counts: bool) -> AsyncGenerator[dict[str, Any]]:
    """The records of a streamed answer, which takes these events."""
    for record in reply.opening():
        yield record
    async for number, piece in events:
        assert isinstance(piece, Piece)
        if reply.choices[number].echo is None:
            records = reply.take(number, piece)
        else:
            # The tokens of a long prompt take a while to name.
            records = await anyio.to_thread.run_sync(reply.take, number, piece)
        for record in records:
            yield record
    if counts:
        yield reply.counted()


async def _last(records: AsyncGenerator[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    async for record in records:
        found = record
    return found


def error_response(error: RequestError) -> Response:
    """The answer that says this error."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 503, *REFUSED):
        # What is left of the body is not read.
        headers["connection"] = "close"
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


def _guarded(service: Service, route: str, handler: Handler) -> Handler:
    """The handler behind the keys."""

    async def handle(request: Request) -> Response:
        request.state.route = route
        if route not in OPEN:
            service.access.check_key(request.headers)
        try:
            return await handler(request)
        except asyncio.CancelledError:
            # The grace of a server that ends is over.
            told = "the server has shut down before this request was answered"
            return error_response(RequestError(told, status=503, retry_after=10))

    return handle


def guards(access: Access) -> list[Middleware]:
    """What says to browsers which pages may ask, and refuses the others."""
    allowed: dict[str, Any] = {"allow_origins": access.origins, "allow_private_network": True}
    allowed |= {"allow_methods": ["*"], "allow_headers": ["*"]}
    cors = [Middleware(CORSMiddleware, **allowed)] if access.origins else []
    return [*cors, Middleware(Doors, access=access)]


def make_app(service: Service) -> Starlette:
    """The ASGI application."""
    routes: list[Way] = [
        ("POST", "/v1/chat/completions", service.chat),
        ("POST", "/v1/completions", service.completion),
        ("GET", "/v1/models", service.models),
        ("GET", "/v1/models/{name:path}", service.one_model),
        ("POST", "/v1/contexts", service.make_context),
        ("GET", "/v1/contexts", service.list_contexts),
        ("GET", "/v1/contexts/{id}", service.one_context),
        ("DELETE", "/v1/contexts/{id}", service.delete_context),
        ("GET", "/v1/contexts/{id}/text", service.context_text),
        ("GET", "/health", service.health),
        ("GET", "/ready", service.ready),
        ("GET", "/metrics", service.figures),
    ]

    async def refused(request: Request, error: Exception) -> Response:
        if isinstance(error, ClientDisconnect):
            # Nobody reads it.
            return Response(status_code=499)
        if isinstance(error, HTTPException):
            what = f"{request.method} {request.scope['path']!r:.200}: {error.detail}"
            code = "unknown_url" if error.status_code in (404, 405) else None
            error = RequestError(what, status=error.status_code, code=code)
        elif isinstance(error, LongctxError):
            error = schema.from_library(error)
        assert isinstance(error, RequestError)
        await service.bodies.refuse(request, error.status)
        return error_response(error)

    async def fault(request: Request, error: Exception) -> Response:
        message = f"a fault of the server: {type(error).__name__}"
        return error_response(RequestError(message, status=500))

    access = service.access
    inside = [Middleware(Requests, metrics=service.metrics, model=service.name)]
    known = (ClientDisconnect, HTTPException, LongctxError, RequestError)
    return Starlette(
        middleware=inside + guards(access),
        routes=[
            Route(path, _guarded(service, path, handler), methods=[method])
            for method, path, handler in Web(access.beside, routes).ways
        ],
        exception_handlers={**dict.fromkeys(known, refused), Exception: fault},
    )
