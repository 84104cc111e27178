"""The server's process: the socket, signals, an orderly end, and an end at once after a fault.

SIGTERM and Ctrl-C let the answers that have begun finish, for some seconds, while new connections
are refused. A second signal ends the process at once. A fault of the scheduler's thread ends it at
once too, because without that thread every request would hang.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from jax_longctx.api import LongContext
from jax_longctx.errors import InputError
from jax_longctx.serving.app import Service, make_app
from jax_longctx.serving.contexts import Contexts
from jax_longctx.serving.doors import Access
from jax_longctx.serving.executor import Executor
from jax_longctx.serving.metrics import Metrics
from jax_longctx.serving.prompts import Lengths, Prompts
from jax_longctx.serving.scheduler import Scheduler
from jax_longctx.serving.schema import Sampled

# Share of the memory beside the weights and the rows that texts may take, unless it is given. The
# rest is for reading them.
CONTEXTS_SHARE = 0.5
# Where the platform does not say how much memory is free.
CONTEXTS_BYTES = 2**30

TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How the server runs; the command's options, whose help says what the rest means.

    Attributes:
      sampled: how answers are sampled where a request does not say.
      context_bytes: bytes on each device for texts in memory; None: half of what is free.
      connections: that may be open; a request on a further one is answered with 503.
      header_seconds: for a connection to send a request's headers.
      common: whether other replicas have the same folder of contexts.
    """

    name: str
    contexts: Path
    lengths: Lengths
    access: Access = dataclasses.field(default_factory=Access)
    sampled: Sampled = dataclasses.field(default_factory=Sampled)
    rows: int = 8
    queue: int = 64
    context_bytes: int | None = None
    ttl: float = 3600.0
    max_ttl: float = 7 * 86400.0
    max_contexts: int = 1024
    grace: float = 30.0
    connections: int = 1024
    header_seconds: float = 30.0
    ready_for: int = 0
    common: bool = False


class LongServer:
    """A model behind HTTP.

    Args:
      crashed: called with a fault of the scheduler's thread, in that thread; nothing is answered
        afterwards.
      compiling: told how many programs are compiled, and how many there are, in that thread.

    Raises:
      CapacityError: the rows do not fit.
      InputError: the folder of contexts cannot be used.
    """

    def __init__(
        self,
        model: LongContext,
        options: ServeOptions,
        *,
        crashed: Callable[[BaseException], None],
        compiling: Callable[[int, int], None] = lambda done, total: None,
    ):
        self.options, self.metrics = options, Metrics()
        self.executor = executor = make_executor(model, options)
        free, budget = executor.free_bytes, options.context_bytes
        if budget is None:
            budget = CONTEXTS_BYTES if free is None else max(1, int(CONTEXTS_SHARE * free))
        # `Contexts` compares all weights. Earlier versions did not know their hash.
        facts = {key: fact for key, fact in executor.made_by.items() if key != "all_weights"}
        digest, apart = json.dumps(facts, sort_keys=True).encode(), "-all" * options.common
        self.contexts = Contexts(
            options.contexts / (hashlib.sha256(digest).hexdigest()[:16] + apart),
            executor.made_by,
            tokenizer=model.tokenizer_digest,
            ttl=options.ttl,
            max_ttl=options.max_ttl,
            max_contexts=options.max_contexts,
            common=options.common,
        )
        most = options.rows + options.queue
        self.scheduler = Scheduler(
            executor,
            self.contexts,
            self.metrics,
            budget=budget,
            most=most,
            crashed=crashed,
            compiled=(options.ready_for, options.lengths.question) if options.ready_for else None,
            compiling=compiling,
        )
        prompts = Prompts(model, self.contexts, options.lengths, executor.reserve, most)
        self.service = Service(model, options, prompts, self.contexts, self.scheduler, self.metrics)
        self.app = make_app(self.service)

    def run(self, listening: socket.socket, *, on_ready: Callable[[], None] = lambda: None) -> int:
        """Serves until a signal, or `stop`; returns the signal's number, or 0.

        Signals are heard in the main thread alone.
        """
        return asyncio.run(self._serve(listening, on_ready))

    def stop(self) -> None:
        """Begins the end, as SIGTERM does; any thread may call it."""
        self._loop.call_soon_threadsafe(self._end, 0)

    async def _serve(self, listening: socket.socket, on_ready: Callable[[], None]) -> int:
        self._loop, self._signal, self._ended = asyncio.get_running_loop(), 0, False
        config = uvicorn.Config(
            self.app,
            http=_protocol(self.options.header_seconds),
            ws="none",
            lifespan="off",
            log_level="error",
            access_log=False,
            server_header=False,
            limit_concurrency=self.options.connections,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=max(1, round(self.options.grace)),
        )
        self._server = _Server(config)
        heard = self._hear()
        self.scheduler.start()
        try:
            serving = asyncio.ensure_future(self._server.serve(sockets=[listening]))
            while not (
                (self._server.started and self.scheduler.state != "compiling") or serving.done()
            ):
                await asyncio.sleep(0.01)
            if self.scheduler.state == "ready" and not serving.done():
                on_ready()
            await serving
        finally:
            # The answers have ended, or their time is over.
            await asyncio.to_thread(self.scheduler.close)
            for number in heard:
                self._loop.remove_signal_handler(number)
            self.contexts.close()
        return self._signal

    def _hear(self) -> list[int]:
        """Takes over the signals that end a server, where this is the main thread."""
        heard = []
        for number in (signal.SIGTERM, signal.SIGINT):
            # Another thread can have no handlers: it is ended by `stop`.
            with contextlib.suppress(ValueError, RuntimeError):
                self._loop.add_signal_handler(number, self._end, number)
                heard.append(number)
        return heard

    def _end(self, number: int) -> None:
        if self._ended:
            self._server.force_exit = True
        self._ended, self._signal = True, self._signal or number
        self.scheduler.refuse()
        self.service.bodies.end()
        self._server.should_exit = True


def make_executor(model: LongContext, options: ServeOptions) -> Executor:
    """The engine's side of a server; every process of a mesh makes one."""
    lengths = options.lengths
    return Executor(
        model,
        places=options.rows,
        length=lengths.whole,
        reserve=lengths.question + lengths.answer,
        share_from=lengths.share_from,
        # Elsewhere empty places cost little, and another size would take a program of its own.
        fitted=not (model.compiles_ahead or options.ready_for),
    )


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
      InputError: the address cannot be used.
    """
    with contextlib.ExitStack() as opened:
        try:
            ((family, kind, protocol, _, address), *_) = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            listening = opened.enter_context(socket.socket(family, kind, protocol))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen(2048)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                f"cannot listen on {host}:{port}: {reason}; choose another --host or --port"
            ) from error
        # It stays open for who called.
        opened.pop_all()
    return listening


class _Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would end the process by the signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _protocol(seconds: float) -> type[H11Protocol]:
    """HTTP/1.1, with `seconds` to send a request's headers."""

    class Protocol(H11Protocol):
        timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.timer = self.loop.call_later(seconds, self.too_slow)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.asked and self.timer is not None:
                self.timer.cancel()
                self.timer = None
            elif not self.asked and self.timer is None:
                self.timer = self.loop.call_later(seconds, self.too_slow)

        @property
        def asked(self) -> bool:
            """Whether a request's headers are there, and its answer is not yet."""
            return self.cycle is not None and not self.cycle.response_complete

        def too_slow(self) -> None:
            self.timer = None
            if not (self.asked or self.transport.is_closing()):
                self.transport.write(TOO_SLOW)
                self.transport.close()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.timer is not None:
                self.timer.cancel()
            super().connection_lost(exc)

    return Protocol
