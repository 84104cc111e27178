"""What requests send: bodies within the limits of size and time, JSON, forms, files by name."""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Iterator
from typing import Any, Protocol

import anyio.to_thread
import pydantic
from starlette.datastructures import UploadFile
from starlette.requests import Request

from jax_longctx.errors import InputError
from jax_longctx.serving import schema
from jax_longctx.serving.doors import Access
from jax_longctx.serving.scheduler import Scheduler
from jax_longctx.serving.schema import RequestError
from jax_longctx.serving.streams import Call
from jax_longctx.text.documents import Document, Joined, documents_in

# What is still taken of a body that is refused: most clients read no answer before they have sent
# all, and a connection that is closed meanwhile loses it.
DROPPED_SECONDS, DROPPED_BODIES = 5.0, 4
# The statuses of such answers.
REFUSED = (413, 415, 429)
# Files of a form, and characters of a file's name.
MOST_UPLOADS, SHOWN_NAME = 100, 200


class _Holds(Protocol):
    body: int


class Arrivals:
    """Takes requests' bodies into memory; `Access` has the limits of each and of all."""

    def __init__(self, access: Access):
        self._access = access
        # Bytes of all bodies in memory.
        self._held = 0
        # Of requests whose bodies have not come.
        self._waits, self._ended = set[asyncio.Timeout](), False

    def end(self) -> None:
        """Waits for no body any more: those requests, and later ones, are refused with 503."""
        self._ended = True
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0)

    def drop(self, call: _Holds) -> None:
        """Counts that the request's body has left the memory."""
        self._held, call.body = self._held - call.body, 0

    async def received(self, request: Request, call: _Holds) -> bytes:
        """The body. Raises RequestError where it is too large or late, or room is short."""
        access, limit = self._access, self._access.body
        too_large = RequestError(
            f"the body is larger than {limit:,} bytes", status=413, code="body_too_large"
        )
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        pieces, seconds = [], min(access.body_seconds, access.seconds)
        try:
            async with self._wait(seconds):
                async for piece in request.stream():
                    request.state.taken = call.body + len(piece)
                    if request.state.taken > limit:
                        raise too_large
                    if self._held + len(piece) > access.bodies:
                        raise RequestError(
                            f"the bodies of all requests take {self._held:,} bytes, the server "
                            f"holds {access.bodies:,}; try again later",
                            status=429,
                            code="rate_limit_exceeded",
                            retry_after=1,
                        )
                    self._held += len(piece)
                    call.body += len(piece)
                    pieces.append(piece)
        except TimeoutError:
            if self._ended:
                told = "the server is shutting down"
                raise RequestError(told, status=503, retry_after=10) from None
            raise RequestError(
                f"the body did not arrive within {seconds:g} s", status=408
            ) from None
        return b"".join(pieces)

    async def refuse(self, request: Request, status: int) -> None:
        """Before an answer of `REFUSED`: takes what is left of a body of known size, for a while.

        A client that waits for `100 Continue` has sent nothing, and reads the answer.
        """
        declared = request.headers.get("content-length", "")
        if status not in REFUSED or "expect" in request.headers or not declared.isdigit():
            return
        left = int(declared) - getattr(request.state, "taken", 0)
        left = min(left, DROPPED_BODIES * self._access.body)
        with contextlib.suppress(TimeoutError):
            async with self._wait(DROPPED_SECONDS):
                while left > 0:
                    # Not `stream`: that has begun already.
                    message = await request.receive()
                    left = 0 if message["type"] != "http.request" else left - len(message["body"])

    @contextlib.asynccontextmanager
    async def _wait(self, seconds: float) -> AsyncGenerator[None]:
        """`asyncio.timeout`, which is over when `end` is called."""
        async with asyncio.timeout(0 if self._ended else seconds) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)


class Bodies(Arrivals):
    """What requests say; a request takes a place when its body has come."""

    def __init__(self, access: Access, scheduler: Scheduler):
        super().__init__(access)
        self._scheduler = scheduler

    @contextlib.contextmanager
    def admitted(self) -> Iterator[Call]:
        """A call for the request, which takes a place when its body has come.

        Raises:
          RequestError: as `Scheduler.check_room`, before anything of the request is read.
        """
        self._scheduler.check_room()
        call = Call(self._scheduler, self._access.seconds)
        try:
            yield call
        finally:
            self.drop(call)
            if call.counts:
                self._scheduler.give_back()

    async def json[Model: pydantic.BaseModel](
        self, kind: type[Model], request: Request, call: Call
    ) -> Model:
        """The request's JSON, checked in a worker thread."""
        given = _content_type(request)
        if given != "application/json":
            # Browsers send other types to any server, without asking it first.
            raise RequestError(
                f"the content type is {given!r:.80}; send JSON as application/json", status=415
            )
        body = await self._placed(request, call)
        return await anyio.to_thread.run_sync(schema.parsed, kind, body)

    async def context(self, request: Request, call: Call) -> tuple[schema.ContextRequest, Joined]:
        """The request for a context, from JSON or from a form with files, and its text."""
        if _content_type(request) != "multipart/form-data":
            asked = await self.json(schema.ContextRequest, request, call)
            return asked, await anyio.to_thread.run_sync(self._text, asked)
        form = _form(request, await self._placed(request, call), self._access.body)
        values, joined = await anyio.to_thread.run_sync(asyncio.run, form)
        asked = await anyio.to_thread.run_sync(schema.parsed, schema.ContextRequest, values)
        return asked, joined or Joined(asked.text or "")

    async def _placed(self, request: Request, call: Call) -> bytes:
        body = await self.received(request, call)
        self._scheduler.take()
        call.counts = True
        return body

    def _text(self, asked: schema.ContextRequest) -> Joined:
        """The text of a request for a context; one that it names is read from the disk."""
        if asked.text is not None:
            return Joined(asked.text)
        assert asked.file is not None
        access, name, under = self._access, asked.file, self._access.files_under
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
            if path.stat().st_size > access.body:
                raise RequestError(f"the file is larger than {access.body:,} bytes", status=413)
            raw = path.read_bytes()
        except (OSError, ValueError):
            raise refused from None
        return _documents([(name, raw)], access.body)


async def _form(request: Request, body: bytes, most: int) -> tuple[dict[str, Any], Joined | None]:
    """The fields of a form, as JSON would give them; the uploads `file` become `text`.

    Args:
      most: bytes that uploads are unpacked to.
    """
    sent = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replay() -> Any:
        return next(sent)

    form = await Request(request.scope, replay).form(max_files=MOST_UPLOADS, max_fields=8)
    try:
        values: dict[str, Any] = {}
        uploads, seen = list[tuple[str, bytes]](), set[str]()
        for name, value in form.multi_items():
            if name in seen and not (name == "file" and isinstance(value, UploadFile)):
                raise _form_error(name, "is there twice; send it once")
            seen.add(name)
            if isinstance(value, UploadFile):
                if name != "file":
                    raise _form_error(name, "is an upload; only 'file' is one")
                uploads.append((value.filename or "the file", await value.read()))
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
    if not uploads:
        return values, None
    joined = _documents(uploads, most)
    return {**values, "text": joined.text}, joined


def _content_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _form_error(name: str, what: str) -> RequestError:
    return RequestError(f"the form's field {name[:80]!r} {what}", param=name[:80])


def _documents(files: list[tuple[str, bytes]], most: int) -> Joined:
    """Files by name as one text, of at most about `most` characters."""
    found, notes = list[Document](), list[str]()
    for name, raw in files:
        # Errors show it, in one line; its ending says what the file is.
        name = " ".join(name[-SHOWN_NAME:].split())
        try:
            read = documents_in(raw, name, notes.append, max(most, 0))
        except InputError as error:
            raise RequestError(str(error), param="file") from None
        most -= sum(len(each.text) for each in read)
        found += read
    return Joined.of(found, notes)
