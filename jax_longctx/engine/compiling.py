"""The engine's jitted functions, how long they compile, and how many may be kept.

Each is a `Program`, whose calls can be listed in place of run (`listing`).
"""

import contextlib
import contextvars
import functools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jax
import jax.monitoring
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from jax_longctx.sharding import AnyMesh, logical_sharding, tree_shardings

# Options of a function that gives back every donated argument, updated, in the order they came.
#
# JAX pairs donated leaves with outputs by shape, in their order. A leaf left out as unused would
# move all that follow: one leaf is then returned in another's buffer, which XLA's GPU compiler
# overwrites before it has read it (jax-ml/jax#39625). With none left out each keeps its own.
IN_PLACE: dict[str, Any] = {"keep_unused": True}
# Options of programs that loop over layers. XLA's Triton matmuls copy each layer's weights out of
# the stack first; cuBLAS takes their address. Command buffers that hold loops make the whole loop
# one CUDA graph. Where weights and caches nearly fill the memory, rematerialization would compute
# products several times, and copy caches that are written in place.
# To choose how a fusion is compiled, XLA would run it with inputs and outputs of its own: one that
# writes a token into all layers' caches takes twice their bytes, which need not be free.
_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,CONDITIONAL,DYNAMIC_SLICE_FUSION,WHILE"
LOOPED: dict[str, Any] = {
    "compiler_options": {
        "xla_gpu_enable_triton_gemm": False,
        "xla_disable_hlo_passes": "rematerialization",
        "xla_gpu_experimental_enable_fusion_autotuner": False,
        # Kernels that do not wait for one another run side by side.
        "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
        # XLA's own kernels are launched while those before them end, and wait within.
        "xla_gpu_enable_pdl": True,
        "xla_gpu_enable_pdl_launch": True,
        "xla_gpu_enable_command_buffer": _GRAPHS,
    }
}
# The same of decode steps: those on several devices are a graph with their collectives.
STEPPED: dict[str, Any] = {
    "compiler_options": {
        **LOOPED["compiler_options"],
        "xla_gpu_enable_command_buffer": f"{_GRAPHS},COLLECTIVES",
    }
}
# JAX's events around tracing, lowering and compiling, or reading a compiled program.
EVENTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)
# This process's mappings, one a line, and the most that a process may have. Only Linux has them.
MAPPINGS, MOST_MAPPINGS = Path("/proc/self/maps"), Path("/proc/sys/vm/max_map_count")
_logger = logging.getLogger(__name__)
# Counting mappings takes milliseconds. So it is done once in this many of JAX's events of tracing,
# lowering and compiling, which is about once in twenty programs.
COUNTED = 60
_events = 0
# The mesh, and what takes the calls of `Program`s, within `listing`.
_listing: contextvars.ContextVar[Any] = contextvars.ContextVar("listing", default=None)
# Every `Program`; `forget` clears them.
_programs: weakref.WeakSet["Program"] = weakref.WeakSet()


class Program:
    """A jitted function of the engine, whose calls can be listed.

    It has the attributes of the jitted function.

    Args:
      function, options: as of `jax.jit`.
      static: the positions of the static arguments.
      places: of the arguments gives the sharding of a result that is an array, or those of a list
        of arrays. Caches lie as their axes say, all else lies on all devices.

    Attributes:
      name: tells it from other programs.
      ready: of listed calls, the programs that are stored on the disk, or will be, once they are
        compiled (see `engine.stored`); None for one that could not be loaded or compiled.
    """

    def __init__(
        self, function: Any, *, static: Sequence[int] = (), places: Any = None, **options: Any
    ):
        self.jitted: Any = jax.jit(function, static_argnums=static, **options)
        self._static, self._places = static, places
        self.name = f"{function.__module__}.{function.__qualname__} {static} {options}"
        self.ready: dict[Any, Future[Any]] = {}
        _programs.add(self)

    def __call__(self, *args: Any) -> Any:
        if (listed := _listing.get()) is not None and not _is_traced(args):
            mesh, take = listed
            with _set(None):
                shapes = take(self, args)
            return _placed(mesh, shapes, self._places and self._places(*args))
        if self.ready:
            found = self.ready.get(self.key(args))
            if found is not None and found.result() is not None:
                return found.result()(*self.split(args)[1])
        return self.jitted(*args)

    def split(self, args: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
        """The static arguments and the others."""
        fixed = [args[position] for position in self._static]
        return fixed, tuple(arg for i, arg in enumerate(args) if i not in self._static)

    def key(self, args: tuple[Any, ...]) -> Any:
        """What tells the program of these arguments from others of this process, as `jit` does."""
        fixed, others = self.split(args)
        leaves, structure = jax.tree.flatten(others)
        signatures = tuple(map(_signature, leaves))
        precision = jax.config.jax_default_matmul_precision
        return id(self), precision, tuple(fixed), structure, signatures

    def __getattr__(self, name: str) -> Any:
        return getattr(self.jitted, name)


def forget() -> None:
    """Drops all compiled programs of this process."""
    jax.clear_caches()
    for each in _programs:
        each.ready.clear()


def program(**options: Any) -> Callable[[Any], Program]:
    """Makes a `Program` of a function, with its options."""
    return functools.partial(Program, **options)


def _signature(leaf: Any) -> Any:
    """What `jit` tells an argument's programs apart by."""
    if not hasattr(leaf, "dtype"):
        return leaf
    sharding = getattr(leaf, "sharding", None) if getattr(leaf, "committed", True) else None
    at = _place(sharding) if isinstance(sharding, NamedSharding) else sharding
    return np.shape(leaf), leaf.dtype, getattr(leaf, "weak_type", False), at


@functools.lru_cache(maxsize=1024)
def _place(sharding: NamedSharding) -> Any:
    """The same for shardings that differ in how they are written alone."""
    mesh, parts = sharding.mesh, []
    for part in sharding.spec:
        axes = part if isinstance(part, tuple) else (part,)
        parts.append(tuple(axis for axis in axes if axis and mesh.shape[axis] > 1))
    while parts and not parts[-1]:
        parts.pop()
    return mesh, tuple(parts), sharding.memory_kind


def listing(mesh: AnyMesh, take: Callable[[Program, tuple[Any, ...]], Any]) -> Any:
    """Within it, this thread's calls of `Program`s go to `take`, and nothing is run.

    `take(program, args)` returns the shapes of the results. The caller gets these with the
    shardings that the results have in a run, and calls the next program with them. Arguments may be
    shapes or arrays.
    """
    return _set((mesh, take))


def is_listing() -> bool:
    """Whether calls are listed, and not run."""
    return _listing.get() is not None


@contextlib.contextmanager
def _set(listed: Any) -> Iterator[None]:
    token = _listing.set(listed)
    try:
        yield
    finally:
        _listing.reset(token)


def _is_traced(args: Any) -> bool:
    """Whether the call is a part of another program, or of its shapes."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args))


def _placed(mesh: AnyMesh, shapes: Any, at: Any) -> Any:
    """Results' shapes with their shardings: caches by their axes, arrays at `at`."""
    if isinstance(shapes, tuple):
        return tuple(_placed(mesh, each, at) for each in shapes)
    if isinstance(shapes, list):
        # Arrays of caches, each with a place; None for one that is no result.
        pairs = zip(shapes, at, strict=True)
        return [None if leaf is None else _shape(leaf, place) for leaf, place in pairs]
    everywhere = logical_sharding(mesh, ())
    if isinstance(shapes, jax.ShapeDtypeStruct):
        return _shape(shapes, at or everywhere)
    try:
        return jax.tree.map(_shape, shapes, tree_shardings(mesh, shapes))
    except TypeError:
        # The state of an answer.
        return jax.tree.map(lambda leaf: _shape(leaf, everywhere), shapes)


def _shape(leaf: Any, at: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at, weak_type=leaf.weak_type)


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


def _on_compilation(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _events
    _events += 1


jax.monitoring.register_event_duration_secs_listener(_on_compilation)


def limit_mappings() -> None:
    """Drops all compiled programs once this process uses half of its memory mappings.

    JAX keeps every program. On a CPU each takes tens of memory mappings, of which Linux gives a
    process 65,530: twenty methods at a few text lengths use them up, and then LLVM ends the
    process. A dropped program is compiled again, or read from the disk, when it is next called.
    Call this outside of traced functions, before work that may compile.
    """
    global _events
    if _events < COUNTED or not MAPPINGS.exists():
        return
    _events = 0
    used, most = MAPPINGS.read_bytes().count(b"\n"), int(MOST_MAPPINGS.read_text())
    if used > most // 2:
        _logger.info("dropping all compiled programs: %d of %d mappings in use", used, most)
        forget()
