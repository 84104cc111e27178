"""Figures of the server for Prometheus (`GET /metrics`), and a line in the log for each request."""

import logging
import time
from collections.abc import Sized
from urllib.parse import quote

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jax_longctx.memory import memory_used
from jax_longctx.serving.contexts import Contexts
from jax_longctx.serving.texts import STATES

# At level INFO, one line for each request.
log = logging.getLogger("jax_longctx.serving.requests")

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2.5, 10)
LONG = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class Metrics:
    """One server's figures; any thread may change them."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        into = {"registry": self.registry, "namespace": "longctx"}
        self.requests = Counter("requests", "HTTP requests.", ["route", "status"], **into)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts.", **into)
        self.cached_tokens = Counter(
            "cached_tokens", "Tokens of prompts that were read before the request.", **into
        )
        self.answer_tokens = Counter("answer_tokens", "Tokens of answers.", **into)
        self.read_tokens = Counter("read_tokens", "Tokens of texts that were read.", **into)
        self.first_token = Histogram(
            "first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=LONG,
            **into,
        )
        self.between_tokens = Histogram(
            "between_tokens_seconds",
            "From one piece of an answer to the next.",
            buckets=SHORT,
            **into,
        )
        self.answer_seconds = Histogram(
            "answer_seconds", "From a request's arrival to its last token.", buckets=LONG, **into
        )
        self.running = Gauge("rows_running", "Rows that decode.", **into)
        self.waiting = Gauge("requests_waiting", "Requests that wait for a row.", **into)
        self.contexts = Gauge("contexts", "Texts, by state.", ["state"], **into)
        self.context_bytes = Gauge(
            "context_bytes", "Bytes on each device of texts in memory.", **into
        )
        self.saved = Counter("contexts_saved", "Contexts written to the disk.", **into)
        self.loaded = Counter("contexts_loaded", "Contexts read from the disk.", **into)
        self.dropped = Counter("contexts_dropped", "Contexts taken out of memory.", **into)
        Gauge("memory_bytes", "Memory in use.", **into).set_function(memory_used)

    def watch(self, contexts: Contexts, running: Sized, waiting: Sized) -> None:
        """Shows how many texts, rows and requests there are when the figures are read."""
        self.running.set_function(lambda: len(running))
        self.waiting.set_function(lambda: len(waiting))
        self.context_bytes.set_function(lambda: contexts.resident_bytes)
        for state in STATES:
            gauge = self.contexts.labels(state)
            gauge.set_function(lambda state=state: [x.state for x in contexts.texts].count(state))

    def page(self) -> bytes:
        """The figures in Prometheus's text format."""
        return prometheus_client.generate_latest(self.registry)


class Requests:
    """Counts each request and logs it when its answer has ended; outside all that can refuse it.

    What the handlers know they leave in the request's state: `route`, `context` and `tokens`, a
    function that counts them in prompts and answers.

    Args:
      model: its name.
    """

    def __init__(self, app: ASGIApp, *, metrics: Metrics, model: str):
        self._app, self._metrics, self._model = app, metrics, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A fault has no answer yet when it passes here.
        status, began, state = 500, time.monotonic(), scope.setdefault("state", {})

        async def sent(message: Message) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            await self._app(scope, receive, sent)
        finally:
            self._metrics.requests.labels(state.get("route", "other"), str(status)).inc()
            host, port = scope.get("client") or ("-", 0)
            what = f'{host}:{port} "{scope["method"]} {quote(scope["path"]):.200}" {status}'
            if "tokens" in state:
                read, written = state["tokens"]()
                what += f" model={self._model} context={state['context'] or '-'}"
                what += f" in={read} out={written}"
            log.info("%s %.3fs", what, time.monotonic() - began)
