"""Compilation ahead of need: every program of a command at once, before the weights are there.

Programs are listed (`engine.programs`). Each one is lowered when it is first listed with some
shapes, and a thread compiles it. XLA compiles without the interpreter's lock, so several programs
compile side by side, and weights load meanwhile.

`jax.jit` keeps lowered modules and executables in caches that `lower` and `compile` fill. The run
makes the same calls. It finds the module and the executable, or waits for the thread that is
compiling it. Programs that an earlier process has stored are neither traced nor lowered. Where
programs are stored, a `Program` keeps those that are ready, and the run takes them from there:
`jax.jit` would trace one anew whose arguments come from a program that was read from the disk.
"""

import contextlib
import os
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jax_longctx.engine import stored
from jax_longctx.engine.compiling import Program, listing
from jax_longctx.engine.program_files import drop

# Most programs that compile at a time; each of a large model takes a few GiB of the host's memory.
WORKERS = 8
# Seconds between two reports of progress.
PAUSE = 0.2


class Compilation:
    """Programs that compile in threads as they are listed.

    Attributes:
      programs: by `Program.key`, the shapes of the results, and what will be the compiled program.
    """

    def __init__(self, mesh: Mesh):
        workers = min(max(2, (os.cpu_count() or 2) // 2), WORKERS)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="compile")
        self._mesh = mesh
        self.programs: dict[Any, tuple[Any, Future[Any]]] = {}
        self._first = 0

    def __len__(self) -> int:
        return len(self.programs)

    @contextlib.contextmanager
    def listing(self, *, last: bool = True) -> Iterator[None]:
        """Within it, this thread's `Program`s are compiled, not run (see `compiling.listing`).

        Unless it is the `last`, another list follows, or `close`.
        """
        try:
            with listing(self._mesh, self._take):
                yield
        finally:
            if last:
                self.close()

    def close(self) -> None:
        """No more programs will come; those submitted go on."""
        self._pool.shutdown(wait=False)

    def cancel(self) -> None:
        """Gives up the programs that do not compile yet."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def prefill_ends(self) -> None:
        """Marks the end of the prefill's programs (see `wait`)."""
        self._first = len(self.programs)

    @property
    def done(self) -> int:
        """How many programs are compiled."""
        return sum(future.done() for _, future in self.programs.values())

    def wait(
        self,
        progress: Callable[[int, int], None] = lambda done, total: None,
        *,
        prefill: bool = False,
        check: bool = False,
    ) -> None:
        """Returns when all programs are compiled; with `prefill`, when the prefill's are.

        Unless `check` is True, a program that failed is not reported here: the run compiles it
        again and raises its error.

        With `check` all that is to be stored on the disk is there too.

        Args:
          progress: called with the number compiled and the number of all programs.
        """
        futures = [future for _, future in self.programs.values()]
        needed = futures[: self._first] if prefill else futures
        while not all(future.done() for future in needed):
            progress(self.done, len(self))
            time.sleep(PAUSE if any(not future.done() for future in needed) else 0)
        progress(self.done, len(self))
        if not check:
            return
        for future in needed:
            future.result()
        self._pool.shutdown()

    def _take(self, program: Program, args: tuple[Any, ...]) -> Any:
        """Submits the program unless it is known; the shapes of its results."""
        key = program.key(args)
        if key not in self.programs:
            where = stored.folder(self._mesh)
            path = where and stored.path_of(where, program, self._mesh, args)
            self.programs[key] = self._begun(program, args, key, path)
        return self.programs[key][0]

    def _begun(
        self, program: Program, args: tuple[Any, ...], key: Any, path: Path | None
    ) -> tuple[Any, Future[Any]]:
        """Reads the program from the disk, or lowers it; a thread does the rest."""
        shapes, payload = (path and stored.read(path)) or (None, None)
        lowered = lower(program, args) if payload is None else None
        ready: Future[Any] = Future()

        def made() -> Any:
            nonlocal lowered
            if path is not None and payload is not None:
                try:
                    return stored.load(self._mesh, payload, program.split(args)[1], shapes)
                except Exception as error:  # whatever the runtime finds wrong with it
                    drop(path, error)
            lowered = lowered or lower(program, args)
            return lowered.compile()

        def done(future: Future[Any]) -> None:
            # In the thread that made it.
            failed = future.cancelled() or future.exception() is not None
            ready.set_result(None if failed else future.result())
            if path is not None and lowered is not None and not failed:
                stored.write(path, future.result(), lowered.out_info)

        if path is not None:
            program.ready[key] = ready
        future = self._pool.submit(made)
        future.add_done_callback(done)
        return shapes if lowered is None else lowered.out_info, future


def lower(program: Program, args: tuple[Any, ...]) -> Any:
    """The lowered program of these arguments."""
    with warnings.catch_warnings():
        # A cache that shrinks cannot be finished in place, as in a run.
        warnings.filterwarnings("ignore", message="Some donated buffers")
        return program.jitted.lower(*args)
