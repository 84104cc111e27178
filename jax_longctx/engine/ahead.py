"""Compilation ahead of need: every program of a command at once, before the weights are there.

The engine calls `Program`s, which are functions under `jax.jit`. A rehearsal is a run of the engine
over rows of the right lengths in which no `Program` is executed. Each one is lowered when it is
first called with some shapes, and a thread compiles it. XLA compiles without the interpreter's
lock, so several programs compile side by side. What the program would return stands in as zeros, or
as an argument of the same shape. The parameters may be shapes, so weights can load meanwhile.

`jax.jit` keeps lowered modules and executables in caches that `lower` and `compile` fill. The real
run makes the same calls. It finds the module and the executable, or waits for the thread that is
compiling it. Programs that an earlier process has stored are neither traced nor lowered. Where
programs are stored, a `Program` keeps those that are ready, and the run takes them from there:
`jax.jit` would trace one anew whose arguments come from a program that was read from the disk.
"""

import collections
import contextlib
import hashlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from jax_longctx.engine import stored
from jax_longctx.engine.compiling import Program, calls_to
from jax_longctx.engine.program_files import drop
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import LongctxError
from jax_longctx.sharding import HOST, logical_sharding, tree_shardings

# Most programs that compile at a time; each of a large model takes a few GiB of the host's memory.
WORKERS = 8
# In the folder of the persistent cache: how long compilation took last time, by what was compiled.
TIMES = "compile-times.json"
MOST_TIMES = 500


def most_workers() -> int:
    """Programs that compile at a time unless told."""
    return min(max(2, (os.cpu_count() or 2) // 2), WORKERS)


class Compilation:
    """The programs of a rehearsal, which compile in threads.

    Attributes:
      begun: `time.perf_counter()` at the start.
    """

    def __init__(self, mesh: Mesh):
        self._pool = ThreadPoolExecutor(most_workers(), thread_name_prefix="compile")
        self._mesh = mesh
        self._found: dict[Any, tuple[Any, Future[Any]]] = {}
        self._first = 0
        self.begun = self._ended = time.perf_counter()

    def __len__(self) -> int:
        return len(self._found)

    @contextlib.contextmanager
    def rehearsing(self, *, last: bool = True) -> Iterator[None]:
        """Within it, this thread's `Program`s are compiled, not executed.

        Unless it is the `last`, another rehearsal of this compilation follows, or `close`.
        """
        try:
            with calls_to(self):
                yield
        finally:
            if last:
                self.close()

    def close(self) -> None:
        """No more programs will come; those submitted go on."""
        self._pool.shutdown(wait=False)

    def prefill_ends(self) -> None:
        """Marks the programs so far as those of the prefill (see `wait`)."""
        self._first = len(self._found)

    def call(self, program: Program, args: tuple[Any, ...]) -> Any:
        """Lowers and submits the program unless it is known; what stands in for its results."""
        leaves = jax.tree.leaves(args)
        if any(isinstance(leaf, Tracer) for leaf in leaves):
            # A part of another program, or of its shapes.
            return program.jitted(*args)
        key = program.key(args)
        if key not in self._found:
            given = program, args, key
            self._found[key] = self._stored(*given) or self._compiling(*given)
            self._found[key][1].add_done_callback(self._on_done)
        shapes, future = self._found[key]
        return self._stand_in(shapes, future, leaves)

    def _compiling(
        self, program: Program, args: tuple[Any, ...], key: Any
    ) -> tuple[Any, Future[Any]]:
        lowered = _lowered(program, args)
        path = self._path(program, args)

        def compiled() -> Any:
            made = lowered.compile()
            if path is not None:
                program.ready[key] = _known(made)
            return made

        def write(done: Future[Any]) -> None:
            if path is not None and not done.cancelled() and done.exception() is None:
                stored.write(path, done.result(), lowered.out_info)

        future = self._pool.submit(compiled)
        # In the thread that compiled it, after those who wait for the program go on.
        future.add_done_callback(write)
        return lowered.out_info, future

    def _stored(
        self, program: Program, args: tuple[Any, ...], key: Any
    ) -> tuple[Any, Future[Any]] | None:
        path = self._path(program, args)
        found = stored.read(path)
        if path is None or found is None:
            return None
        shapes, payload = found
        ready: Future[Any] = Future()

        def loaded() -> Any:
            try:
                made = stored.load(self._mesh, payload, program.split(args)[1], shapes)
            except Exception as error:  # whatever the runtime finds wrong with it
                drop(path, error)
                ready.set_result(None)
                lowered = _lowered(program, args)
                made = lowered.compile()
                stored.write(path, made, lowered.out_info)
                return made
            ready.set_result(made)
            return made

        program.ready[key] = ready
        future = self._pool.submit(loaded)
        future.add_done_callback(lambda done: ready.set_result(None) if done.cancelled() else None)
        return shapes, future

    def _path(self, program: Program, args: tuple[Any, ...]) -> Path | None:
        where = stored.folder(self._mesh)
        if where is None:
            return None
        fixed, others = program.split(args)
        leaves, structure = jax.tree.flatten(others)
        return stored.path_of(where, program.name, self._mesh, fixed, structure, leaves)

    def _on_done(self, future: Future[Any]) -> None:
        self._ended = time.perf_counter()

    @property
    def done(self) -> int:
        """How many programs are compiled."""
        return sum(future.done() for _, future in self._found.values())

    def cancel(self) -> None:
        """Gives up the programs that do not compile yet."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def seconds(self) -> float:
        """From the start to the end of the program that was compiled last."""
        return self._ended - self.begun

    def _stand_in(self, shapes: Any, future: Future[Any], given: list[Any]) -> Any:
        """Arrays of the results' shapes: arguments in their order where shapes agree, or zeros."""
        free: dict[Any, collections.deque[Any]] = collections.defaultdict(collections.deque)
        for leaf in given:
            if isinstance(leaf, jax.Array):
                free[leaf.shape, leaf.dtype].append(leaf)
        wanted, structure = jax.tree.flatten(shapes)
        found = []
        for index, (leaf, sharding) in enumerate(zip(wanted, self._shardings(shapes), strict=True)):
            same = free[leaf.shape, leaf.dtype]
            made = same.popleft() if same else None
            if made is not None and made.committed and self._mesh.size > 1:
                found.append(made)
                continue
            if sharding is None and made is None and leaf.shape:
                sharding = jax.tree.leaves(future.result().output_shardings)[index]
            sharding = sharding or logical_sharding(self._mesh, ())
            # As a result it is committed to the mesh.
            found.append(_zeros(leaf, sharding) if made is None else jax.device_put(made, sharding))
        return structure.unflatten(found)

    def _shardings(self, shapes: Any) -> list[Any]:
        """Where each result will be: caches by their axes; None for one that XLA decides."""
        if isinstance(shapes, tuple | list):
            return [sharding for each in shapes for sharding in self._shardings(each)]
        everywhere, count = logical_sharding(self._mesh, ()), len(jax.tree.leaves(shapes))
        if hasattr(shapes, "shape"):
            return [everywhere if self._mesh.size == 1 else None]
        try:
            return jax.tree.leaves(tree_shardings(self._mesh, shapes))
        except TypeError:
            # The state of an answer, which is replicated.
            return [everywhere] * count

    def wait(
        self,
        progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        prefill: bool = False,
        check: bool = False,
        every: float = 0.2,
    ) -> None:
        """Returns when all programs are compiled, or with `prefill` those of the prefill.

        Unless `check` is True, a program that failed is not reported here: the run compiles it
        again and raises its error.

        With `check` all that is to be stored on the disk is there too.

        Args:
          progress: called with the number compiled and the number of all programs.
          every: seconds between two calls of it.
        """
        futures = [future for _, future in self._found.values()]
        needed = futures[: self._first] if prefill else futures
        while not all(future.done() for future in needed):
            progress(sum(future.done() for future in futures), len(futures))
            time.sleep(every if any(not future.done() for future in needed) else 0)
        progress(sum(future.done() for future in futures), len(futures))
        if not check:
            return
        for future in needed:
            future.result()
        self._pool.shutdown()


def begun_or_none(begin: Callable[[], Compilation]) -> Compilation | None:
    """What `begin` returns; None where it is refused, or memory is short, as its run may be.

    For runs that go on after either, and then say why.
    """
    try:
        return begin()
    except LongctxError:
        return None
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


class Listing:
    """The programs that a function calls, of arguments that may be shapes; nothing is lowered.

    Args:
      stand_in: of a program's arguments and its results' shapes makes what stands in for them.

    Attributes:
      programs: the jitted function and the arguments of each, in the order of first use.
    """

    def __init__(self, stand_in: Callable[[tuple[Any, ...], Any], Any]):
        self._stand_in = stand_in
        self._results: dict[Any, Any] = {}
        self.programs: list[tuple[Any, tuple[Any, ...]]] = []

    def rehearsing(self) -> contextlib.AbstractContextManager[None]:
        """Within it, this thread's `Program`s are listed, not executed."""
        return calls_to(self)

    def call(self, program: Program, args: tuple[Any, ...]) -> Any:
        """Lists the program unless it is known; what stands in for its results."""
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args)):
            return program.jitted(*args)
        key = program.key(args)
        if key not in self._results:
            self._results[key] = program.jitted.eval_shape(*args)
            self.programs.append((program.jitted, args))
        return self._stand_in(args, self._results[key])


def _lowered(program: Program, args: tuple[Any, ...]) -> Any:
    with calls_to(None), warnings.catch_warnings():
        # A cache that shrinks cannot be finished in place, as in a run.
        warnings.filterwarnings("ignore", message="Some donated buffers")
        return program.jitted.lower(*args)


def _known(value: Any) -> Future[Any]:
    """A future that has ended with this value."""
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _zeros(leaf: Any, sharding: Any) -> Any:
    """Zeros on the devices. Few are copied there: a program for them would be compiled."""
    few = np.prod(leaf.shape) * leaf.dtype.itemsize <= 1 << 20
    if few or sharding.memory_kind == HOST:
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), sharding)
    return jnp.zeros(leaf.shape, leaf.dtype, device=sharding)


def key_of(setup: Setup, mesh: Mesh) -> str:
    """What compilation takes equally long for: model, method, mesh, device and chunk."""
    facts = (
        setup.config,
        setup.method,
        dict(mesh.shape),
        mesh.devices.flat[0].device_kind,
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
    except (OSError, ValueError, RecursionError):
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
    folder = jax.config.jax_compilation_cache_dir
    # The folder may be in a bucket, which `Path` cannot name.
    return None if folder is None or "://" in folder else Path(folder) / TIMES
