"""A command's process: what precedes JAX, the job it may be one of, and how it ends.

A job has many processes, started once a host (or a device) by Slurm, Open MPI, GKE or by hand;
every process runs the same command, and the first alone shows and writes anything.

At Ctrl-C the process ends with code 130 and one line. While a command runs, `KeyboardInterrupt`
unwinds it, so that files under temporary names are removed. Python delivers that exception late
(XLA compiles for minutes outside Python), to code that swallows it (callbacks, destructors) or
turns it into another error. So a thread hears the signal as well, and ends the process `GRACE`
seconds later or at a second Ctrl-C. Before and after the command there is nothing to unwind: the
process ends at once. From the signal on, stderr is closed to everything but the one line.

Whatever the process leaves behind is what `kill -9` would leave: outputs have temporary names until
they are whole, and the next run removes or continues them.
"""

import atexit
import contextlib
import errno
import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NoReturn, TextIO

from jax_longctx.errors import InputError

DONE, FAULT, REFUSED, PARTLY = 0, 1, 2, 3
INTERRUPTED, READER_GONE = 130, 141
CODES = {
    DONE: "done",
    FAULT: "a fault of the program or of another process of the job",
    REFUSED: "what was given cannot be used, or an output cannot be written",
    PARTLY: "done, but rows have an error (batch) or ReAttention found no fact (demo)",
    INTERRUPTED: "interrupted by Ctrl-C",
    READER_GONE: "the reader of stdout or stderr is gone",
}

# Seconds that a command has for unwinding.
GRACE = 1.0
# What erases a bar's line and shows the cursor again.
ERASE = b"\r\x1b[2K\x1b[?25h"
# The C handler writes the signal's number to the pipe, Python's handler this.
BEGIN = b"b"

# Seconds without a sign of life after which a process of a job counts as dead: the others end too.
HEARTBEAT = 20
# Seconds that a job's processes wait for each other at the start.
START = 300
AUTO = "auto"

# What the drivers of TPUs make, up to v4 and from v5e on.
TPU_NODES = ("accel*", "vfio/[0-9]*")
# Set by whoever wants a TPU, or chooses in JAX's place.
CHOSEN = ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT")


class _State:
    """Of the process: there is one Ctrl-C."""

    installed = False
    asked = False
    unwinding = False
    handled = bars = 0
    erase = False
    who = ""
    code = FAULT
    voice = 2
    nowhere = wake = -1
    # Whoever takes it ends the process; a handler on top of its holder may take it again.
    last_word = threading.RLock()


def install() -> None:
    """Prepares the process of the console script. Call it before anything heavy is imported."""
    if _State.installed:
        return
    _State.installed = True
    _State.nowhere = _hold_standard_descriptors()
    _State.voice = os.dup(2)
    # Registered first, called last.
    atexit.register(_end)
    # A shell starts background jobs with Ctrl-C ignored; so it stays.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _hear_interrupts()
    _guard_outputs()


def run(command: Callable[[], object]) -> None:
    """Runs the command line, whose exit code becomes that of the process."""
    try:
        command()
        _State.code = DONE
    except SystemExit as ended:
        _State.code = ended.code if isinstance(ended.code, int) else FAULT
        raise
    finally:
        if _State.asked:
            leave()


@contextlib.contextmanager
def unwinding() -> Iterator[None]:
    """The command itself: Ctrl-C raises KeyboardInterrupt here, and whatever comes of it ends."""
    _State.unwinding = True
    try:
        yield
    finally:
        _State.unwinding = False
        if _State.asked:
            leave()


@contextlib.contextmanager
def bar_shown() -> Iterator[None]:
    """While a progress bar is on the terminal: a sudden end erases it."""
    _State.bars += 1
    try:
        yield
    finally:
        _State.bars -= 1


def leave(code: int = INTERRUPTED, line: str = "interrupted") -> NoReturn:
    """Ends the process now, with one line on stderr."""
    _State.last_word.acquire()
    said = f"{_State.who}{line}\n".encode() if line else b""
    with contextlib.suppress(OSError):
        if (_State.erase or _State.bars) and os.isatty(_State.voice):
            said = ERASE + said
        os.write(_State.voice, said)
    os._exit(code)


class _Guarded(io.TextIOWrapper):
    """stdout or stderr. A gone reader ends the process as SIGPIPE would, a full disk with a line.

    It is no exception because libraries print too, and each has its own idea of a broken pipe.
    """

    def __init__(self, stream: TextIO):
        super().__init__(
            stream.buffer,  # pyright: ignore[reportArgumentType]
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=bool(stream.line_buffering),
        )
        # Without it the buffer would be closed.
        self._stream = stream

    def write(self, text: str) -> int:
        with self._ending():
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._ending():
            super().flush()

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            leave(READER_GONE, "")
        except OSError as error:
            # What stderr cannot show is lost; the work and its exit code are not.
            if self.fileno() != 2:
                leave(REFUSED, _unwritable(error))


def _unwritable(error: OSError) -> str:
    return f"error: stdout cannot be written: {error.strerror}; redirect it to where it can be"


def _guard_outputs() -> None:
    if sys.stdout is None:
        leave(REFUSED, _unwritable(OSError(errno.EBADF, "it is closed")))
    try:
        # Nothing is written, and refused where nothing can be.
        os.write(1, b"")
    except OSError as error:
        leave(REFUSED, _unwritable(error))
    sys.stdout = _Guarded(sys.stdout)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    else:
        sys.stderr = _Guarded(sys.stderr)


def _hold_standard_descriptors() -> int:
    """Opens /dev/null, also in place of closed standard streams: no file may get their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    return descriptor


def _hear_interrupts() -> None:
    heard, _State.wake = os.pipe()
    os.set_blocking(_State.wake, False)
    signal.signal(signal.SIGINT, _on_interrupt)
    signal.set_wakeup_fd(_State.wake, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(heard,), name="interrupts", daemon=True).start()
    # A process forked from this one has no such thread.
    os.register_at_fork(after_in_child=_forget)
    report = sys.unraisablehook

    def swallowed(unraisable: "sys.UnraisableHookArgs") -> None:
        """A callback or destructor took the interrupt: nothing unwinds, so there is no waiting."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            leave()
        report(unraisable)

    sys.unraisablehook = swallowed


def _forget() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _begin() -> None:
    """From here on stderr is closed to all but the last line."""
    _State.erase = _State.erase or _State.bars > 0
    _State.asked = True
    os.dup2(_State.nowhere, 2)


def _on_interrupt(*_: object) -> None:
    """Python's handler, in the main thread once that runs Python."""
    _begin()
    _State.handled += 1
    if _State.handled > 1 or not _State.unwinding:
        leave()
    # An event loop may have taken the C handler's pipe for its own.
    with contextlib.suppress(BlockingIOError):
        os.write(_State.wake, BEGIN)
    raise KeyboardInterrupt


def _watch(heard: int) -> None:
    """Ends the process a while after the first signal, or at the second."""
    pressed, end = 0, None
    while True:
        left = None if end is None else max(0.0, end - time.monotonic())
        if not select.select([heard], [], [], left)[0]:
            leave()
        byte = os.read(heard, 1)
        if byte == bytes([signal.SIGINT]):
            pressed += 1
        elif byte != BEGIN:
            continue
        _begin()
        if pressed > 1 or not _State.unwinding:
            leave()
        if end is None:
            end = time.monotonic() + GRACE


def _end() -> None:
    """The last thing that is done. Python's own end still takes signals, and shows tracebacks."""
    if _State.asked:
        leave()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):
            stream.flush()
    os._exit(_State.code)


def announced(environment: Mapping[str, str]) -> bool:
    """Whether a launcher's variables say that this is one of several processes.

    Slurm (a step, as srun starts them), Open MPI, and TPU workers on GKE.
    """

    def count(name: str) -> int:
        value = environment.get(name, "")
        return int(value) if value.isdigit() else 0

    step = "SLURM_STEP_NODELIST" in environment and "SLURM_PROCID" in environment
    workers = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES")
    return (
        (step and count("SLURM_NTASKS") > 1)
        or count("OMPI_COMM_WORLD_SIZE") > 1
        or count("MEGASCALE_NUM_SLICES") > 1
        or len((workers or "").split(",")) > 1
    )


def join(coordinator: str | None, processes: str | None, process: int | None) -> None:
    """Joins the job that the options, or a launcher's variables, speak of; one process otherwise.

    Raises:
      InputError: the options do not go together, or the others were not found.
    """
    given = (coordinator, processes, process)
    if processes == "1" or (given == (None, None, None) and not announced(os.environ)):
        return
    count = None
    if processes is not None and processes != AUTO:
        if not processes.isdigit() or int(processes) < 1:
            raise InputError(f"--processes is {processes!r}; expected a number, or {AUTO}")
        count = int(processes)
        if coordinator is None or process is None:
            raise InputError("--processes N goes with --coordinator HOST:PORT and --process I")
        if not 0 <= process < count:
            raise InputError(f"--process must be from 0 to {count - 1}, got {process}")
    elif processes is None and given != (None, None, None):
        raise InputError("--coordinator and --process go with --processes N")
    if coordinator is not None and not coordinator.rpartition(":")[2].isdigit():
        raise InputError(f"--coordinator is {coordinator!r}; expected HOST:PORT")
    hide_absent_tpu()
    if not process:
        # The first, or one that does not know its number yet.
        print("waiting for the job's processes", file=sys.stderr, flush=True)
    import jax

    try:
        # What is None JAX finds out from the launcher.
        jax.distributed.initialize(
            coordinator,
            count,
            process,
            initialization_timeout=START,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    except (ValueError, RuntimeError) as error:
        # jaxlib's errors are RuntimeErrors; the first line says what happened.
        first = str(error).strip().splitlines()[0]
        raise InputError(f"the processes of the job did not find each other: {first}") from error
    if jax.process_count() > 1:
        # Of several processes all but the first say who they are.
        index = jax.process_index()
        _State.who = f"process {index}: " if index else ""
        _keep_stdout()


def _keep_stdout() -> None:
    """Leaves stdout to answers: what Gloo and NCCL print there goes to stderr."""
    sys.stdout.flush()
    answers = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = _Guarded(os.fdopen(answers, "w", encoding="utf-8", errors="replace"))


def number() -> int | None:
    """The number of this process where there are several, else None."""
    jax = sys.modules.get("jax")
    # Before `join`, and without it, nothing may start a backend.
    if jax is None or not jax.distributed.is_initialized() or jax.process_count() == 1:
        return None
    return jax.process_index()


def is_leader() -> bool:
    """Whether this process prints and writes."""
    return not number()


def leave_job(code: int) -> NoReturn:
    """Ends one of several processes at once, which ends the others.

    The orderly way waits for all of them, and they may be waiting for this one.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def hide_absent_tpu(devices: Path = Path("/dev")) -> None:
    """Makes JAX take libtpu as not installed where there is no TPU and nobody asks for one.

    JAX loads libtpu wherever it is installed, and without a TPU libtpu logs errors at length.
    `JAX_PLATFORMS=cpu` would hide GPUs too.
    """
    if any(map(os.environ.get, CHOSEN)):
        return
    if not any(node for pattern in TPU_NODES for node in devices.glob(pattern)):
        # Importing libtpu sets it, also for the processes that one starts.
        os.environ.pop("TPU_LIBRARY_PATH", None)
        sys.modules.setdefault("libtpu", None)  # pyright: ignore[reportArgumentType]
