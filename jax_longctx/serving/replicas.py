"""Replicas of the server behind one address, with Ray Serve.

There are two deployments. An `Engine` is the application of `app` over a model of its own, without
a socket. A `Door` receives a request, finds out which text it is about (`routes`), and passes it to
an engine; the answer's ASGI messages come back as they are made. Requests about one text go to one
engine by consistent hashing, so a door keeps no books, and there may be any number of them.

Engines have a folder of contexts in common, and save each context when they have read it. Where the
engine of a context has ended, or another one has come, the next engine of the hash ring loads it.
"""

# pyright: reportMissingImports=false
import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import anyio.to_thread
import prometheus_client
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jax_longctx.errors import InputError
from jax_longctx.serving.app import error_response, guards
from jax_longctx.serving.bodies import Arrivals
from jax_longctx.serving.doors import Access
from jax_longctx.serving.routes import ROUTE, route_of
from jax_longctx.serving.schema import RequestError
from jax_longctx.serving.server import LongServer

# Of the application in Serve.
NAME = "jax-longctx"
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
# What an engine needs of a request's scope.
SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string")
SCOPE += ("root_path", "headers", "client", "server")
# Seconds for engines to say that their answers have ended, after the time that these have.
END_SECONDS = 10.0
# Requests that a door takes at a time; engines for each door.
CONNECTIONS, ENGINES = 1024, 16


class Engine:
    """A replica. `opened` makes its server; it is called in the replica's process."""

    def __init__(self, opened: Callable[[], LongServer]):
        self._server, self._answering = opened(), set[asyncio.Future[None]]()
        self._server.scheduler.start()

    async def answer(self, scope: Scope, body: bytes) -> AsyncGenerator[Message]:
        """The messages of the answer to a request; the request ends where nobody takes them all."""
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        given = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            return next(given, None) or await asyncio.get_running_loop().create_future()

        answering = asyncio.ensure_future(self._server.app(scope, receive, sent.put))
        answering.add_done_callback(lambda _: sent.put_nowait(None))
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)
        try:
            while (message := await sent.get()) is not None:
                yield message
        finally:
            answering.cancel()

    async def end(self, seconds: float) -> None:
        """Refuses requests from now on, with 503; answers that have begun have so many seconds."""
        self._server.scheduler.refuse()
        if self._answering:
            _, late = await asyncio.wait(self._answering, timeout=seconds)
            for each in late:
                each.cancel()

    async def told(self) -> tuple[str, list[Any], list[dict[str, Any]]]:
        """The replica's name, its metrics, and its contexts."""
        name, server = serve.get_replica_context().replica_id.unique_id, self._server
        contexts = [entry.record() for entry in server.contexts.listed()]
        return name, [*server.metrics.registry.collect()], contexts

    def __del__(self) -> None:
        # Serve calls it when the answers have ended, or their time is over.
        if hasattr(self, "_server"):
            self._server.scheduler.close()
            self._server.contexts.close()


class Door:
    """Passes requests to the engines."""

    def __init__(self, engines: DeploymentHandle, access: Access):
        self._engines, self._access, self._arrivals = engines, access, Arrivals(access)

    def __serve_build_asgi_app__(self) -> Starlette:
        ways = [Route("/metrics", self._figures), Route("/v1/contexts", self._contexts)]
        ways.append(Route("/{path:path}", self._pass))
        # The engines say which methods there are.
        ways[-1].methods = None
        handlers: Any = {RequestError: self._refused}
        # Nobody reads it.
        handlers[ClientDisconnect] = lambda *_: Response(status_code=499)
        return Starlette(routes=ways, middleware=guards(self._access), exception_handlers=handlers)

    async def end(self, seconds: float) -> None:
        """Takes no more requests; ends the engines' answers as `Engine.end`."""
        self._arrivals.end()
        await self._engines.broadcast("end", seconds).results_async()

    async def _refused(self, request: Request, error: RequestError) -> Response:
        await self._arrivals.refuse(request, error.status)
        return error_response(error)

    async def _pass(self, request: Request) -> ASGIApp:
        """The answer of the engine that the request's text belongs to."""
        body = b""
        held: Any = SimpleNamespace(body=0)
        kind, path = request.headers.get("content-type", ""), request.url.path
        scope = {name: request.scope[name] for name in SCOPE if name in request.scope}
        try:
            if request.method == "POST":
                self._access.check_key(request.headers)
                body = await self._arrivals.received(request, held)
            route = await anyio.to_thread.run_sync(route_of, path, kind, body)
            engine = self._engines.options(stream=True, session_id=route or "")
            messages = aiter(engine.answer.remote({**scope, ROUTE: route}, body))
            begun = await anext(messages)
        except RayActorError as error:
            told = "the replica that was to answer has ended; ask again"
            raise RequestError(told, status=503, retry_after=1) from error
        except BackPressureError as error:
            told = "all replicas that may answer are busy; try again later"
            raise RequestError(told, status=429, retry_after=1) from error
        finally:
            self._arrivals.drop(held)

        async def respond(scope: Scope, receive: Receive, send: Send) -> None:
            await send(begun)
            async for message in messages:
                await send(message)

        return respond

    async def _told(self, request: Request) -> list[Any]:
        self._access.check_key(request.headers)
        return await self._engines.broadcast("told").results_async()

    async def _contexts(self, request: Request) -> Response:
        """The contexts of all replicas."""
        found = [each for *_, contexts in await self._told(request) for each in contexts]
        # Of those that several have, the one in memory.
        named = {each["id"]: each for each in sorted(found, key=lambda each: each["bytes"])}
        data = sorted(named.values(), key=lambda each: each["created"])
        return JSONResponse({"object": "list", "data": data})

    async def _figures(self, request: Request) -> Response:
        """The metrics of all replicas, each with its name."""
        merged: dict[str, Any] = {}
        for name, metrics, _ in await self._told(request):
            for each in metrics:
                own = [x._replace(labels={**x.labels, "replica": name}) for x in each.samples]
                each.samples = []
                merged.setdefault(each.name, each).samples += own
        registry: Any = SimpleNamespace(collect=merged.values)
        page = prometheus_client.generate_latest(registry)
        return Response(page, media_type="text/plain; version=0.0.4")


@contextlib.contextmanager
def running(
    opened: Callable[[], LongServer], access: Access, engines: dict[str, Any], **listening: Any
) -> Iterator[None]:
    """Within it Serve runs replicas, whose servers `opened` makes; then answers may finish.

    Args:
      engines: Serve's options of the replicas' deployment.
      listening: of `serve.start`.

    Raises:
      InputError: the replicas do not start, or the cluster serves already.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    made = serve.deployment(Engine, request_router_config={"request_router_class": ROUTER})
    doors = serve.deployment(
        serve.ingress()(Door),
        num_replicas=-(-engines["autoscaling_config"]["max_replicas"] // ENGINES),
        max_ongoing_requests=CONNECTIONS,
        graceful_shutdown_timeout_s=engines["graceful_shutdown_timeout_s"],
        ray_actor_options={"num_cpus": 0},
    )
    if NAME in serve.status().applications:
        told = "end that command, or what it left behind after a kill: `serve shutdown`"
        raise InputError(f"the cluster has an application {NAME} already; {told}")
    serve.start(**listening)
    try:
        try:
            door = serve.run(doors.bind(made.options(**engines).bind(opened), access), name=NAME)
        except (RuntimeError, TimeoutError, RayError, RayServeException) as error:
            raise InputError(f"the replicas do not start: {error}") from error
        yield
        grace = engines["graceful_shutdown_timeout_s"]
        # A replica may have died. All doors hear it, also one with all requests that it may hold.
        with contextlib.suppress(RayError, RayServeException, TimeoutError):
            door.broadcast("end", grace).results(timeout_s=grace + END_SECONDS)
    finally:
        # Serve waits for a minute, and ends by force what has not ended.
        with contextlib.suppress(TimeoutError):
            serve.delete(NAME)
