"""The process of a command: the set-up before JAX, a job of many processes, and how it ends.

A job has many processes. Slurm, Open MPI, GKE or the user starts one for each host (or device);
every process runs the same command, and only the first prints and writes.

At Ctrl-C the process ends with code 130 and one line. While a command runs, `KeyboardInterrupt`
unwinds it, so that temporary files are removed. Python may raise that exception late (XLA compiles
for minutes outside Python), or inside code that ignores it (callbacks, destructors) or turns it
into another error. So a thread also receives the signal, and ends the process `GRACE` seconds
later or at a second Ctrl-C. Before and after the command there is nothing to unwind, and the
process ends at once. After the signal nothing but the one line is written to stderr. A command that
goes on after Ctrl-C catches it (`catching`).

The files that remain are those that `kill -9` would leave: an output has a temporary name until it
is complete, and the next run removes or resumes it.
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
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from types import FrameType
from typing import NoReturn, TextIO

from jax_longctx.errors import InputError

DONE, FAULT, REFUSED, PARTLY = 0, 1, 2, 3
INTERRUPTED, READER_GONE, TERMINATED = 130, 141, 143
CODES = {
    DONE: "done",
    FAULT: "a fault of the program or of another process of the job",
    REFUSED: "what was given cannot be used, or an output cannot be written",
    PARTLY: "done, but rows have an error (batch), ReAttention found no fact (demo) or a kernel's "
    "check failed (bench tpu-check)",
    INTERRUPTED: "interrupted by Ctrl-C",
    READER_GONE: "the reader of stdout or stderr is gone",
    TERMINATED: "ended by SIGTERM, unfinished",
}

# Seconds that a command has for unwinding.
GRACE = 1.0
# Erases a bar's line and shows the cursor again.
ERASE = b"\r\x1b[2K\x1b[?25h"
# Python's signal handler writes this to the pipe; the C handler writes the signal's number.
BEGIN = b"b"

# After this many seconds without a heartbeat a process of a job counts as dead; the others end.
HEARTBEAT = 20
# Seconds that a job's processes wait for each other at the start.
START = 300
AUTO = "auto"

# Device files of TPU drivers, up to v4 and from v5e on.
TPU_NODES = ("accel*", "vfio/[0-9]*")
# Variables that ask for a TPU or choose a platform.
CHOSEN = ("JAX_PLATFORMS", "JAX_FORCE_TPU_INIT")


class _State:
    """State of the whole process."""

    installed = False
    asked = False
    unwinding = False
    handled = bars = 0
    erase = False
    who = ""
    code = FAULT
    voice = 2
    nowhere = wake = -1
    caught: "Caught | None" = None
    # The thread that acquires this lock ends the process. It is reentrant: a signal handler may
    # interrupt the thread that holds it.
    last_word = threading.RLock()


def install() -> None:
    """Prepares the process of the console script. Call it before anything heavy is imported."""
    if _State.installed:
        return
    _State.installed = True
    _State.nowhere = _hold_standard_descriptors()
    _State.voice = os.dup(2)
    # Handlers run in reverse order: the first registered is called last.
    atexit.register(_end)
    # A shell starts background jobs with Ctrl-C ignored, which stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        _hear_interrupts()
    _guard_outputs()


def run(command: Callable[[], object]) -> None:
    """Runs the command line; its exit code becomes the process's."""
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
    """While the command runs, Ctrl-C raises KeyboardInterrupt; after unwinding the process ends."""
    _State.unwinding = True
    try:
        yield
    finally:
        _State.unwinding = False
        if _State.asked:
            leave()


class Caught:
    """Ctrl-C while a command goes on after it: it ends what `begin` began, or raises at a prompt.

    Attributes:
      pressed: when it was pressed first since then, of `time.monotonic`.
      prompting: whether the user is asked for a line; Ctrl-C is a KeyboardInterrupt there.
    """

    pressed: float | None = None
    prompting = False

    def begin(self) -> None:
        """Forgets earlier ones. An event loop may have taken the pipe of the C handler."""
        self.pressed, self.prompting = None, False
        if _State.wake >= 0:
            signal.set_wakeup_fd(_State.wake, warn_on_full_buffer=False)

    def heard(self) -> None:
        """One more. It ends the process where nothing came of one that is older than `GRACE`."""
        now = time.monotonic()
        if not self.prompting and now - (self.pressed or now) > GRACE:
            _begin()
            leave()
        self.pressed = self.pressed or now


@contextlib.contextmanager
def catching() -> Iterator[Caught]:
    """While this lasts, Ctrl-C does not end the process."""
    _State.caught = caught = Caught()
    try:
        yield caught
    finally:
        _State.caught = None


@contextlib.contextmanager
def bar_shown() -> Iterator[None]:
    """While a progress bar is on the terminal, so that a sudden end erases it."""
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
    """stdout or stderr; the process ends where the reader is gone, or with a line on a full disk.

    It raises no exception, because libraries print too and handle a broken pipe in their own ways.
    """

    def __init__(self, stream: TextIO):
        super().__init__(
            stream.buffer,  # pyright: ignore[reportArgumentType]
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=bool(stream.line_buffering),
        )
        # This reference keeps the buffer open.
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
            # An error of stderr must not end the work or change its exit code.
            if self.fileno() != 2:
                leave(REFUSED, _unwritable(error))


def _unwritable(error: OSError) -> str:
    return f"error: stdout cannot be written: {error.strerror}; redirect it to where it can be"


def _guard_outputs() -> None:
    if sys.stdout is None:
        leave(REFUSED, _unwritable(OSError(errno.EBADF, "it is closed")))
    try:
        # Writes nothing, but fails where nothing could be written.
        os.write(1, b"")
    except OSError as error:
        leave(REFUSED, _unwritable(error))
    sys.stdout = _Guarded(sys.stdout)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")
    else:
        sys.stderr = _Guarded(sys.stderr)


def _hold_standard_descriptors() -> int:
    """Opens /dev/null, also for closed standard streams, so that no file gets their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    return descriptor


def _hear_interrupts() -> None:
    heard, _State.wake = os.pipe()
    os.set_blocking(_State.wake, False)
    signal.signal(signal.SIGINT, _on_interrupt)
    signal.set_wakeup_fd(_State.wake, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(heard,), name="interrupts", daemon=True).start()
    # A forked process does not have the thread.
    os.register_at_fork(after_in_child=_forget)
    report = sys.unraisablehook

    def swallowed(unraisable: "sys.UnraisableHookArgs") -> None:
        """Ends at once where a callback or destructor ignores the interrupt: nothing unwinds."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            leave()
        report(unraisable)

    sys.unraisablehook = swallowed


def _forget() -> None:
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _begin() -> None:
    """Redirects stderr to /dev/null, for all but the last line."""
    _State.erase = _State.erase or _State.bars > 0
    _State.asked = True
    os.dup2(_State.nowhere, 2)


def _on_interrupt(_: int, frame: FrameType | None) -> None:
    """Python's signal handler, which runs in the main thread once that executes Python."""
    if _State.caught is not None:
        if _State.caught.prompting:
            raise KeyboardInterrupt
        # The thread has heard it, unless an event loop has its pipe.
        _State.caught.pressed = _State.caught.pressed or time.monotonic()
        return
    _begin()
    _State.handled += 1
    if _State.handled > 1 or not _State.unwinding or _begins_an_extension(frame):
        leave()
    # An event loop may have replaced the pipe that the C handler writes to.
    with contextlib.suppress(BlockingIOError):
        os.write(_State.wake, BEGIN)
    raise KeyboardInterrupt


def _begins_an_extension(frame: FrameType | None) -> bool:
    """Whether a C extension is being imported: jaxlib's aborts the process at an exception."""
    while frame is not None:
        if frame.f_code.co_name in ("create_module", "exec_module"):
            if isinstance(frame.f_locals.get("self"), ExtensionFileLoader):
                return True
        frame = frame.f_back
    return False


def _watch(heard: int) -> None:
    """Ends the process `GRACE` seconds after the first signal, or at the second."""
    pressed, end = 0, None
    while True:
        left = None if end is None else max(0.0, end - time.monotonic())
        if not select.select([heard], [], [], left)[0]:
            leave()
        byte = os.read(heard, 1)
        if byte == bytes([signal.SIGINT]):
            if _State.caught is not None:
                _State.caught.heard()
                continue
            pressed += 1
        elif byte != BEGIN:
            continue
        _begin()
        if pressed > 1 or not _State.unwinding:
            leave()
        if end is None:
            end = time.monotonic() + GRACE


def _end() -> None:
    """The last exit handler; Python's own shutdown would take signals and print tracebacks."""
    if _State.asked:
        leave()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):
            stream.flush()
    os._exit(_State.code)


def announced(environment: Mapping[str, str]) -> bool:
    """Whether a launcher's variables say that this is one of several processes.

    Launchers are Slurm (a step, as srun starts it), Open MPI, and GKE with TPU workers.
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
    """Joins the job that the options or a launcher's variables describe, if any.

    Raises:
      InputError: the options do not fit together, or the other processes were not found.
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
        # The first process, or one that does not know its number yet.
        print("waiting for the job's processes", file=sys.stderr, flush=True)
    import jax

    try:
        # JAX takes values that are None from the launcher.
        jax.distributed.initialize(
            coordinator,
            count,
            process,
            initialization_timeout=START,
            heartbeat_timeout_seconds=HEARTBEAT,
        )
    except (ValueError, RuntimeError) as error:
        # jaxlib's errors are RuntimeErrors, whose first line is the reason.
        first = str(error).strip().splitlines()[0]
        raise InputError(f"the processes of the job did not find each other: {first}") from error
    if jax.process_count() > 1:
        # All processes but the first name themselves in messages.
        index = jax.process_index()
        _State.who = f"process {index}: " if index else ""
        _keep_stdout()


def _keep_stdout() -> None:
    """Keeps stdout for answers: the output of Gloo and NCCL there goes to stderr."""
    sys.stdout.flush()
    answers = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = _Guarded(os.fdopen(answers, "w", encoding="utf-8", errors="replace"))


def number() -> int | None:
    """The number of this process where there are several, else None."""
    jax = sys.modules.get("jax")
    # Asking JAX for the count would start a backend, so it must have joined a job first.
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


def lost_process(error: BaseException) -> str | None:
    """The message where another process of the job has ended; None for any other error."""
    first = (str(error).strip() or type(error).__name__).splitlines()[0]
    signs = ("Gloo", "closed by peer", "heartbeat", "UNAVAILABLE", "coordination")
    if not any(sign in first for sign in signs):
        return None
    return f"another process of the job has ended, see its messages; here: {first:.200}"


def hide_absent_tpu(devices: Path = Path("/dev")) -> None:
    """Hides libtpu from JAX where there is no TPU and no variable asks for one.

    JAX loads libtpu wherever it is installed, and without a TPU libtpu logs many errors.
    `JAX_PLATFORMS=cpu` would hide GPUs too.
    """
    if any(map(os.environ.get, CHOSEN)):
        return
    if not any(node for pattern in TPU_NODES for node in devices.glob(pattern)):
        # Importing libtpu sets this variable, also for child processes.
        os.environ.pop("TPU_LIBRARY_PATH", None)
        sys.modules.setdefault("libtpu", None)  # pyright: ignore[reportArgumentType]
