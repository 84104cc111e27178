"""Compilation as a command shows it: ahead of need, its progress, and its seconds apart.

On a GPU or TPU the programs compile while the weights load (see `engine.ahead`). On a CPU they
compile when they are called: XLA uses all cores for one program there, so others beside it gain
nothing, and the host's cores have the weights to read.
"""

import contextlib
import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jax_longctx.cli.terminal import Terminal, shown_time

if TYPE_CHECKING:
    from jax_longctx.api import Answer, LongContext
    from jax_longctx.engine.ahead import Compilation

# In the folder of the persistent cache: how long compilation took last time, by what was compiled.
TIMES = "compile-times.json"
MOST_TIMES = 500


class Compiling:
    """The compilation of one command.

    Attributes:
      clock: the main thread's seconds of compilation, from `watching` on.
    """

    def __init__(self, terminal: Terminal):
        self._terminal = terminal
        self._begun: Compilation | None = None
        self._key, self._told = "", 0.0
        self.clock: Any = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While the command runs. Imports JAX."""
        with self._terminal.starting():
            from jax_longctx.engine.programs import CompileClock

        with CompileClock() as self.clock:
            yield

    def ahead(self, begin: Callable[["LongContext"], "Compilation | None"]) -> Any:
        """`begin`, as `api.load` takes it: called before the weights are there, not on a CPU.

        `begin` may find nothing to compile, and returns None then.
        """

        def begun(model: "LongContext") -> None:
            if not worthwhile(model):
                return
            self._begun, self._key = begin(model), key_of(model)

        return begun

    def wait(self, *, prefill: bool = False) -> None:
        """Waits for the programs, with progress; with `prefill` for those of the prefill."""
        if self._begun is None:
            return
        last = read_times().get(self._key)
        detail = "" if last is None else f"{shown_time(last)} last time"
        with self.clock.waiting(), self._terminal.progress("compiling", "programs") as update:
            self._begun.wait(lambda done, total: update(done, total, detail), prefill=prefill)
        if not prefill:
            write_time(self._key, self._begun.seconds)
            self._begun = None

    def apart(self, answer: "Answer", began: float) -> "Answer":
        """The answer with its times less compilation.

        `began` is `time.perf_counter()` when the question was asked.
        """
        first = began + answer.first_token_seconds
        before = self.clock.seconds(began, first)
        after = self.clock.seconds(first, first + answer.decode_seconds)
        return dataclasses.replace(
            answer,
            first_token_seconds=max(answer.first_token_seconds - before, 0.0),
            decode_seconds=max(answer.decode_seconds - after, 0.0),
        )

    def news(self) -> float:
        """Seconds of compilation since the last call."""
        now = self.clock.seconds()
        since, self._told = now - self._told, now
        return since


def worthwhile(model: "LongContext") -> bool:
    """Whether programs are compiled side by side."""
    return model.compiles_ahead


def key_of(model: "LongContext") -> str:
    """What compilation takes equally long for: model, method, mesh, device and chunk."""
    setup = model.engine.setup
    facts = (
        setup.config,
        setup.method,
        dict(model.engine.mesh.shape),
        model.engine.mesh.devices.flat[0].device_kind,
        str(setup.dtype),
        setup.chunk,
        setup.by_layer,
        *(() if setup.kv is None else (setup.kv,)),
        *(() if setup.weights is None else ("weights", setup.weights)),
        *(() if setup.offload is None else (setup.offload,)),
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]


def read_times() -> dict[str, float]:
    """Seconds by key; empty where there are none, or none that can be read."""
    file = _times_file()
    try:
        found = {} if file is None else json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, float)}


def write_time(key: str, seconds: float) -> None:
    """Notes the seconds; a folder that cannot be written to is no error."""
    file = _times_file()
    if file is None:
        return
    times = read_times()
    times.pop(key, None)
    kept = [*times.items(), (key, round(seconds, 3))][-MOST_TIMES:]
    partial = file.with_name(f"{file.name}.{time.time_ns()}")
    with contextlib.suppress(OSError):
        partial.write_text(json.dumps(dict(kept)), encoding="utf-8")
        partial.replace(file)


def _times_file() -> Path | None:
    import jax

    folder = jax.config.jax_compilation_cache_dir
    # The folder may be in a bucket, which `Path` cannot name.
    return None if folder is None or "://" in folder else Path(folder) / TIMES
