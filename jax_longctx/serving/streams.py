"""A request's tickets, and their events on the way to its client: whole, or as server-sent events.

When the client goes away, or the time is over, the tickets are cancelled.
"""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from jax_longctx.serving.scheduler import Scheduler
from jax_longctx.serving.schema import RequestError
from jax_longctx.serving.tickets import Event, Piece, Ticket

# For a stream's last event, which says that the time is over.
LAST_SECONDS = 2.0
DONE = b"data: [DONE]\n\n"

# Events with the number of their ticket.
type Events = AsyncGenerator[tuple[int, Event]]


class Call:
    """One request and its tickets.

    Args:
      seconds: for the request to be answered, from its headers on.

    Attributes:
      body: bytes of its body in memory.
      counts: whether it has a place among those that are answered or wait; tickets take it over.
    """

    def __init__(self, scheduler: Scheduler, seconds: float):
        self._scheduler, self._seconds, self._came = scheduler, seconds, time.monotonic()
        self._end = self._came + seconds
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.tickets: list[Ticket] = []
        self.body, self.counts = 0, False

    def add(self, **how: Any) -> Ticket:
        """Adds a ticket; `how` is as in `Ticket`."""
        number = len(self.tickets)

        def send(event: Event) -> None:
            # At a hard end the loop is gone before the thread.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (number, event))

        self.tickets.append(Ticket(send=send, came=self._came, **how))
        return self.tickets[-1]

    def cancel(self) -> None:
        """Ends the tickets that have not ended."""
        for ticket in self.tickets:
            self._scheduler.cancel(ticket)

    async def begun(self, request: Request) -> Events:
        """Gives the tickets to the scheduler; their events.

        The first has come: a request that fails before has its own status.
        """
        self._scheduler.submit(self.tickets)
        self.counts = False
        events = self._events()
        return _chain(await self.watched(request, anext(events)), events)

    async def _events(self) -> Events:
        """The tickets' events up to the last; tickets are cancelled where nobody takes them all.

        Raises:
          RequestError: a ticket failed, or the time is over.
        """
        left = len(self.tickets)
        try:
            while left:
                try:
                    async with asyncio.timeout(self._end - time.monotonic()):
                        number, event = await self._queue.get()
                except TimeoutError:
                    raise RequestError(
                        f"the answer took longer than {self._seconds:g} s",
                        status=504,
                        code="timeout",
                    ) from None
                if isinstance(event, RequestError):
                    raise event
                left -= isinstance(event, Piece) and event.finish is not None
                yield number, event
        finally:
            self.cancel()

    async def watched[Result](self, request: Request, work: Awaitable[Result]) -> Result:
        """What `work` returns, unless the client goes away first."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_gone(request))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientDisconnect
        except BaseException:
            self.cancel()
            raise
        finally:
            gone.cancel()
            if not task.done():
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, RequestError):
                    await task

    def streamed(self, records: AsyncGenerator[Any]) -> Response:
        """Server-sent events of these records; the tickets end with them, whether sent or not."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        response = _Stream(_lines(records), media_type="text/event-stream", headers=headers)
        response.seconds = self._end + LAST_SECONDS - time.monotonic()
        response.ended = self.cancel
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


async def _chain(first: tuple[int, Event], events: Events) -> Events:
    async with contextlib.aclosing(events):
        yield first
        async for each in events:
            yield each


async def _gone(request: Request) -> None:
    """Returns when the client has gone away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


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
