"""How long a thread compiled."""

import contextlib
import threading
import time
from collections.abc import Iterator

import jax.monitoring

# JAX's events around tracing, lowering and compiling, or reading a compiled program.
EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


class CompileClock:
    """How long a thread has traced, lowered and compiled, and how many programs it took.

    JAX reports each of these with its duration when it ends. Tracing nests, so the intervals are
    joined. What other threads compile meanwhile takes no time of this one; `waiting` adds the time
    that it waits for them.

    Attributes:
      programs: programs that were asked for in the whole process.
      hits: of these, programs that the persistent cache held.
    """

    def __init__(self) -> None:
        self._thread, self._spans = threading.get_ident(), []
        self.programs = self.hits = 0

    def __enter__(self) -> "CompileClock":
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **about: str | int) -> None:
        if event not in EVENTS:
            return
        self.programs += event == EVENTS[-1]
        if threading.get_ident() == self._thread:
            now = time.perf_counter()
            self._spans.append((now - duration_secs, now))

    def _on_event(self, event: str, **about: str | int) -> None:
        self.hits += event == "/jax/compilation_cache/cache_hits"

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The time of the block counts as time for compilation."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._spans.append((begun, time.perf_counter()))

    def seconds(self, begun: float = 0.0, ended: float = float("inf")) -> float:
        """Seconds of compilation between two times of `time.perf_counter()`."""
        total, last = 0.0, begun
        for start, end in sorted(self._spans):
            start, end = max(start, last), min(end, ended)
            if end > start:
                total, last = total + end - start, end
        return total
