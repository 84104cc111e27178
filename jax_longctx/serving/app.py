"""The HTTP routes: OpenAI's chats, completions and models, contexts, health and metrics.

A handler checks its request, splits it into text and question in a worker thread, gives the
scheduler a job, and turns the job's events into the answer. A stream's headers are sent with its
first event, so that a request that fails before has its own status. When the client goes away, or
the time is over, the job is cancelled.
"""

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import hmac
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import anyio.to_thread
import pydantic
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from jax_longctx.api import AnswerReader, LongContext
from jax_longctx.engine.running import Request as RowRequest
from jax_longctx.errors import InputError, LongctxError
from jax_longctx.files import decoded
from jax_longctx.serving import schema
from jax_longctx.serving.answers import Answer
from jax_longctx.serving.contexts import Contexts, Entry, was_deleted
from jax_longctx.serving.doors import Doors
from jax_longctx.serving.metrics import Metrics
from jax_longctx.serving.prompts import Prompt, Prompts
from jax_longctx.serving.scheduler import (
    Ended,
    Event,
    Failed,
    Job,
    Piece,
    Place,
    Reading,
    Ready,
    Scheduler,
)
from jax_longctx.serving.schema import RequestError

# Paths that need no key: whoever watches the process has none.
OPEN = ("/health", "/ready")
# For a stream's last event, which says that the time is over.
LAST_SECONDS = 2.0
# What is still taken of a body that is refused: most clients read no answer before they have sent
# all, and a connection that is closed meanwhile loses it.
DROPPED_SECONDS, DROPPED_BODIES = 5.0, 4
DONE = b"data: [DONE]\n\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Access:
    """Who may ask, and how much.

    Attributes:
      keys: SHA-256 digests of the API keys; none: everyone may ask.
      hosts: names, in lower case, besides loopback that a request's `Host` may have where there
        are no keys; None: any.
      origins: of pages that browsers may ask from; "*": of all. None else may.
      files_under: the folder that `file` of a context may name a file of, or None.
      body: most bytes of a request.
      bodies: most bytes of all requests that are being received or tokenised.
      body_seconds: for a request's body to arrive.
      seconds: for a request to be answered, from its headers on.
    """

    keys: Sequence[bytes] = ()
    hosts: Sequence[str] | None = ()
    origins: Sequence[str] = ()
    files_under: Path | None = None
    body: int = 64 * 2**20
    bodies: int = 256 * 2**20
    body_seconds: float = 120.0
    seconds: float = 600.0


@dataclasses.dataclass(eq=False)
class Service:
    """What the routes share.

    Attributes:
      name: of the model, for clients.
    """

    model: LongContext
    name: str
    prompts: Prompts
    contexts: Contexts
    scheduler: Scheduler
    metrics: Metrics
    access: Access

    def __post_init__(self) -> None:
        self.created, self._bodies = int(time.time()), 0
        self.fingerprint = self.model.engine.fingerprint

    # -- routes ------------------------------------------------------------------------------------

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions"""
        return await self._answer(request, schema.ChatRequest, "chat")

    async def completion(self, request: Request) -> Response:
        """POST /v1/completions"""
        return await self._answer(request, schema.CompletionRequest, "completion")

    async def models(self, request: Request) -> Response:
        """GET /v1/models"""
        entry = schema.model_entry(self.name, self.created)
        return JSONResponse({"object": "list", "data": [entry]})

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/{name}"""
        self._check_model(request.path_params["name"])
        return JSONResponse(schema.model_entry(self.name, self.created))

    async def read_context(self, request: Request) -> Response:
        """POST /v1/contexts"""
        with self._admitted() as place:
            asked = await self._context_request(request, place)
            text, chat = await anyio.to_thread.run_sync(self._laid_out, asked)
            try:
                entry = self.contexts.enter(text, chat=chat, ttl=asked.ttl, save=asked.save)
            except RequestError:
                self.contexts.release(text)
                raise
            job, stream = self._submitted(place, text=text, entry=entry)
            stream = await self._begun(request, job, stream)
            if asked.stream:
                return self._streamed(job, self._progress(entry, stream))
            await self._watched(request, job, _rest(stream))
            if entry.deleted:
                raise was_deleted(entry)
            return JSONResponse(entry.record(), status_code=201)

    async def list_contexts(self, request: Request) -> Response:
        """GET /v1/contexts"""
        records = [entry.record() for entry in self.contexts.listed()]
        return JSONResponse({"object": "list", "data": records})

    async def one_context(self, request: Request) -> Response:
        """GET /v1/contexts/{id}"""
        return JSONResponse(self._entry(request.path_params["id"]).record())

    async def delete_context(self, request: Request) -> Response:
        """DELETE /v1/contexts/{id}"""
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
        if self.scheduler.accepts:
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": self.scheduler.state}, status_code=503)

    async def figures(self, request: Request) -> Response:
        """GET /metrics"""
        return Response(self.metrics.page(), media_type="text/plain; version=0.0.4")

    # -- requests ----------------------------------------------------------------------------------

    def check_key(self, request: Request) -> None:
        """Raises RequestError unless the request has one of the keys, if there are any."""
        # Not `request.url`: a client's Host header can put another path there.
        if not self.access.keys or request.scope["path"] in OPEN:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode("latin-1")).digest()
        # All keys are compared, each in constant time.
        found = [hmac.compare_digest(given, each) for each in self.access.keys]
        if scheme.lower() != "bearer" or not any(found):
            raise RequestError(
                "no valid API key; send it as 'Authorization: Bearer KEY'",
                status=401,
                code="invalid_api_key",
            )

    @contextlib.contextmanager
    def _admitted(self) -> Iterator[Place]:
        """A place for the request, which counts when its body has come."""
        with self.scheduler.place() as place:
            try:
                yield place
            finally:
                self._drop_body(place)

    def _drop_body(self, place: Place) -> None:
        """Counts that the request's body has left the memory."""
        self._bodies, place.body = self._bodies - place.body, 0

    async def _body(self, request: Request, place: Place) -> bytes:
        """The request's body, within the limits of size and time."""
        limit = self.access.body
        too_large = RequestError(
            f"the body is larger than {limit:,} bytes", status=413, code="body_too_large"
        )
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        pieces, seconds = [], min(self.access.body_seconds, self.access.seconds)
        try:
            async with asyncio.timeout(seconds):
                async for piece in request.stream():
                    request.state.taken = place.body + len(piece)
                    if place.body + len(piece) > limit:
                        raise too_large
                    if self._bodies + len(piece) > self.access.bodies:
                        raise RequestError(
                            f"the bodies of all requests take {self._bodies:,} bytes, the server "
                            f"holds {self.access.bodies:,}; try again later",
                            status=429,
                            code="rate_limit_exceeded",
                            retry_after=1,
                        )
                    self._bodies += len(piece)
                    place.body += len(piece)
                    pieces.append(piece)
        except TimeoutError:
            raise RequestError(
                f"the body did not arrive within {seconds:g} s", status=408
            ) from None
        self.scheduler.take(place)
        return b"".join(pieces)

    async def _parsed[Model: pydantic.BaseModel](
        self, kind: type[Model], request: Request, place: Place
    ) -> Model:
        """The request's JSON, checked in a worker thread."""
        given = _content_type(request)
        if given != "application/json":
            # Browsers send other types to any server, without asking it first.
            raise RequestError(
                f"the content type is {given!r:.80}; send JSON as application/json", status=415
            )
        body = await self._body(request, place)
        return await anyio.to_thread.run_sync(schema.parsed, kind, body)

    async def _context_request(self, request: Request, place: Place) -> schema.ContextRequest:
        """The request for a context, from JSON or from a form with a file."""
        if _content_type(request) != "multipart/form-data":
            return await self._parsed(schema.ContextRequest, request, place)
        form = _form(request, await self._body(request, place))
        values = await anyio.to_thread.run_sync(asyncio.run, form)
        return await anyio.to_thread.run_sync(schema.parsed, schema.ContextRequest, values)

    def _laid_out(self, asked: schema.ContextRequest) -> Any:
        text = asked.text
        if text is None:
            assert asked.file is not None
            text = self._read_file(asked.file)
        return self.prompts.context(text, asked.chat)

    def _read_file(self, name: str) -> str:
        """A file under the folder that the server was told."""
        under = self.access.files_under
        if under is None:
            raise RequestError(
                "this server reads no files; send the text, or start it with --files-under DIR",
                param="file",
            )
        refused = RequestError(f"{name!r:.200} is no file that may be read", param="file")
        try:
            path = (under / name).resolve()
            if not path.is_relative_to(under.resolve()) or not path.is_file():
                raise refused
            if path.stat().st_size > self.access.body:
                raise RequestError(
                    f"the file is larger than {self.access.body:,} bytes", status=413
                )
            return _decoded(path.read_bytes())
        except (OSError, ValueError):
            raise refused from None

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
        tokenizer = self.model.tokenizer
        with self._admitted() as place:
            asked = await self._parsed(form, request, place)
            self._check_model(asked.model)
            entry = None if asked.context is None else self._entry(asked.context, "context")
            split = getattr(self.prompts, kind)
            prompt: Prompt = await anyio.to_thread.run_sync(split, asked, entry)
            try:
                ends = self.model.end_ids(asked.stops, True)
                row = RowRequest(
                    question=prompt.question,
                    sampling=asked.sampling(),
                    max_tokens=prompt.max_tokens,
                    stop_ids=ends,
                    logprobs=asked.wanted_logprobs,
                )
                reader = AnswerReader(tokenizer, prompt.after, asked.stops, ends)
            except BaseException:
                self.contexts.release(prompt.text)
                raise
            how = {"request": row, "reader": reader, "cached": prompt.cached, "about": entry}
            job, stream = self._submitted(place, text=prompt.text, **how)
            answer = Answer(
                kind=kind,
                model=self.name,
                fingerprint=self.fingerprint,
                tokenizer=tokenizer,
                after=prompt.after,
                logprobs=asked.wanted_logprobs is not None,
                prompt=len(prompt.text.tokens) + len(prompt.question),
            )
            stream = await self._begun(request, job, stream)
            answer.cached = job.cached
            if asked.stream:
                return self._streamed(job, self._chunks(answer, stream, asked.include_usage))
            return JSONResponse(await self._watched(request, job, _whole(answer, stream)))

    def _submitted(self, place: Place, **how: Any) -> tuple[Job, AsyncGenerator[Event]]:
        """A job that the scheduler has taken, and its events, which its thread sends."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def send(event: Event) -> None:
            # At a hard end the loop is gone before the thread.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(events.put_nowait, event)

        job = Job(send=send, came=place.came, **how)
        self.scheduler.submit(job, place)
        self._drop_body(place)
        return job, self._events(job, events)

    async def _events(self, job: Job, events: asyncio.Queue[Event]) -> AsyncGenerator[Event]:
        """The job's events up to the last; the job is cancelled where nobody takes them all.

        Raises:
          RequestError: the job failed, or its time is over.
        """
        end = job.came + self.access.seconds
        try:
            while True:
                try:
                    async with asyncio.timeout(end - time.monotonic()):
                        event = await events.get()
                except TimeoutError:
                    raise RequestError(
                        f"the answer took longer than {self.access.seconds:g} s",
                        status=504,
                        code="timeout",
                    ) from None
                if isinstance(event, Failed):
                    raise event.error
                yield event
                if isinstance(event, Ended | Ready):
                    return
        finally:
            self.scheduler.cancel(job)

    async def _begun(
        self, request: Request, job: Job, stream: AsyncGenerator[Event]
    ) -> AsyncGenerator[Event]:
        """The events from the first that the client is to see, which has come.

        Texts are read in silence for an answer, not for a context.
        """

        async def wait() -> Event:
            async for event in stream:
                if job.request is None or not isinstance(event, Reading):
                    return event
            raise AssertionError("a job's events have an end")

        return _chain(await self._watched(request, job, wait()), stream)

    async def _watched[Result](
        self, request: Request, job: Job, work: Coroutine[Any, Any, Result]
    ) -> Result:
        """What `work` returns, unless the client goes away first."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientDisconnect
        except BaseException:
            self.scheduler.cancel(job)
            raise
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, RequestError):
                    await task

    async def _chunks(
        self, answer: Answer, stream: AsyncGenerator[Event], counts: bool
    ) -> AsyncGenerator[Any]:
        """The records of a streamed answer."""
        for record in answer.opening():
            yield record
        async for event in stream:
            if isinstance(event, Piece):
                yield answer.piece(event.text, event.chosen)
            elif isinstance(event, Ended):
                yield answer.closing(event.finish)
                if counts:
                    yield answer.counted(event.tokens)

    async def _progress(self, entry: Entry, stream: AsyncGenerator[Event]) -> AsyncGenerator[Any]:
        """The records of a context that is being read; the last is the context."""
        async for event in stream:
            if isinstance(event, Reading):
                told = {"id": entry.id, "object": "context.progress"}
                yield {**told, "tokens_read": event.done, "tokens": event.total}
        if entry.deleted:
            raise was_deleted(entry)
        yield entry.record()

    def _streamed(self, job: Job, records: AsyncGenerator[Any]) -> Response:
        """Server-sent events of these records; the job ends with them, whether sent or not."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        response = _Stream(_lines(records), media_type="text/event-stream", headers=headers)
        response.seconds = job.came + self.access.seconds + LAST_SECONDS - time.monotonic()
        response.ended = lambda: self.scheduler.cancel(job)
        return response


class _Stream(StreamingResponse):
    """A stream that is given up after `seconds`, also where its client does not read."""

    seconds: float
    ended: Callable[[], None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(self.seconds):
                await super().__call__(scope, receive, send)
        except (TimeoutError, asyncio.CancelledError):
            # The response is not complete: the server closes the connection.
            pass
        finally:
            self.ended()


async def _form(request: Request, body: bytes) -> dict[str, Any]:
    """The fields of a form, as JSON would give them; an uploaded `file` becomes `text`."""
    sent = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Any:
        return next(sent)

    form = await Request(request.scope, replay).form(max_files=2, max_fields=8)
    try:
        values: dict[str, Any] = {}
        seen: set[str] = set()
        for name, value in form.multi_items():
            if name in seen:
                raise _form_error(name, "is there twice; send it once")
            seen.add(name)
            if isinstance(value, UploadFile):
                if name != "file":
                    raise _form_error(name, "is an upload; only 'file' is one")
                values["text"] = _decoded(await value.read())
            elif name == "file":
                raise _form_error(name, "is not an upload; send its content, as with -F file=@NAME")
            else:
                # Forms have texts alone: ttl=60, stream=true.
                with contextlib.suppress(ValueError, RecursionError):
                    value = json.loads(value) if name != "text" else value
                values[name] = value
        if {"text", "file"} <= seen:
            raise _form_error("text", "is beside 'file'; send one of the two")
    finally:
        await form.close()
    return values


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _form_error(name: str, what: str) -> RequestError:
    return RequestError(f"the form's field {name[:80]!r} {what}", param=name[:80])


async def _rest(stream: AsyncGenerator[Event]) -> None:
    async for _ in stream:
        pass


async def _whole(answer: Answer, stream: AsyncGenerator[Event]) -> dict[str, Any]:
    async for event in stream:
        if isinstance(event, Piece):
            answer.take(event.text, event.chosen)
        elif isinstance(event, Ended):
            return answer.whole(event.finish, event.tokens)
    raise AssertionError("an answer's events have an end")


async def _chain(first: Event, stream: AsyncGenerator[Event]) -> AsyncGenerator[Event]:
    async with contextlib.aclosing(stream):
        yield first
        if not isinstance(first, Ended | Ready):
            async for event in stream:
                yield event


async def _gone(request: Request) -> None:
    """Returns when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _drop(request: Request, most: int) -> None:
    """Takes what is left of a body of known size, for a while.

    A client that waits for `100 Continue` has sent nothing, and reads the answer.
    """
    declared = request.headers.get("content-length", "")
    if "expect" in request.headers or not declared.isdigit():
        return
    left = min(int(declared) - getattr(request.state, "taken", 0), most)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DROPPED_SECONDS):
            while left > 0:
                # Not `stream`: that has begun already.
                message = await request.receive()
                left = 0 if message["type"] != "http.request" else left - len(message["body"])


async def _lines(records: AsyncGenerator[Any]) -> AsyncGenerator[bytes]:
    """These records as events; an error is the last of them."""
    async with contextlib.aclosing(records):
        try:
            async for record in records:
                yield _event(record)
        except RequestError as error:
            yield _event(error.body())
            return
    yield DONE


def _event(record: Any) -> bytes:
    return b"data: " + json.dumps(record, ensure_ascii=False).encode() + b"\n\n"


def _decoded(raw: bytes) -> str:
    try:
        return decoded(raw, "the file")
    except InputError as error:
        raise RequestError(str(error), param="file") from None


def _error(error: RequestError) -> Response:
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413, 415, 429):
        # What is left of the body is not read.
        headers["connection"] = "close"
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


Handler = Callable[[Request], Awaitable[Response]]


def _guarded(service: Service, route: str, handler: Handler) -> Handler:
    """The handler behind the keys; its errors become answers, its requests are counted."""

    async def handle(request: Request) -> Response:
        try:
            service.check_key(request)
            response = await handler(request)
        except ClientDisconnect:
            # Nobody reads it.
            response = Response(status_code=499)
        except asyncio.CancelledError:
            # The grace of a server that ends is over.
            told = "the server has shut down before this request was answered"
            response = _error(RequestError(told, status=503, retry_after=10))
        except HTTPException as error:
            response = _error(RequestError(str(error.detail), status=error.status_code))
        except LongctxError as error:
            response = _error(schema.from_library(error))
        except RequestError as error:
            response = _error(error)
            if error.status in (413, 415):
                await _drop(request, DROPPED_BODIES * service.access.body)
        service.metrics.requests.labels(route, str(response.status_code)).inc()
        return response

    return handle


def make_app(service: Service) -> Starlette:
    """The ASGI application."""
    routes: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/chat/completions", service.chat),
        ("POST", "/v1/completions", service.completion),
        ("GET", "/v1/models", service.models),
        ("GET", "/v1/models/{name:path}", service.one_model),
        ("POST", "/v1/contexts", service.read_context),
        ("GET", "/v1/contexts", service.list_contexts),
        ("GET", "/v1/contexts/{id}", service.one_context),
        ("DELETE", "/v1/contexts/{id}", service.delete_context),
        ("GET", "/health", service.health),
        ("GET", "/ready", service.ready),
        ("GET", "/metrics", service.figures),
    ]

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.scope['path']!r:.200}"
        code = RequestError(f"{what}: {error.detail}", status=error.status_code, code="unknown_url")
        service.metrics.requests.labels("other", str(error.status_code)).inc()
        return _error(code)

    async def fault(request: Request, error: Exception) -> Response:
        service.metrics.requests.labels("other", "500").inc()
        message = f"a fault of the server: {type(error).__name__}"
        return _error(RequestError(message, status=500))

    access = service.access
    # Who has a key is no page that was led here.
    hosts = None if access.hosts is None or access.keys else frozenset(access.hosts)
    inside = [Middleware(Doors, hosts=hosts, origins=frozenset(access.origins))]
    if access.origins:
        allowed: dict[str, Any] = {"allow_origins": access.origins}
        allowed |= {"allow_methods": ["*"], "allow_headers": ["*"]}
        inside.insert(0, Middleware(CORSMiddleware, **allowed))
    return Starlette(
        middleware=inside,
        routes=[
            Route(path, _guarded(service, path, handler), methods=[method])
            for method, path, handler in routes
        ],
        exception_handlers={HTTPException: refused, Exception: fault},
    )
