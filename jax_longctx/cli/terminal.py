"""Input and output of the commands: texts, answers, progress, times, notes, tables and files.

Answers go to stdout, progress and notes to stderr. With `as_json` stdout carries JSON lines alone.
A file that cannot be read or written is reported in one line, before any work.
"""

import contextlib
import dataclasses
import importlib.util
import json
import os
import shlex
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich.console
import rich.table
from rich.cells import cell_len
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from jax_longctx.cli import process
from jax_longctx.errors import CheckpointError, InputError, TrainedLengthWarning
from jax_longctx.files import decoded, folder_made, whole_path, write_whole
from jax_longctx.memory import check_memory_limit, memory_used, peak_memory, shown_bytes

if TYPE_CHECKING:
    from jax_longctx.api import Answer, LongContext
    from jax_longctx.engine.ahead import Compilation
    from jax_longctx.text.documents import Joined

# update(done, total), and a third text that the progress shows.
Update = Callable[..., None]
OnText = Callable[[int, str], None]

# Seconds between progress lines where stderr is a file or a pipe.
LINE_EVERY = 10.0
# A note mentions compilation from this many seconds on.
LEAST_COMPILED = 0.05
NARROWEST_BAR, WIDEST_BAR = 10, 40

# Control characters but tab and newline: a model's text must not control the terminal.
_CONTROLS = {code: "\ufffd" for code in (*range(9), *range(11, 32), *range(127, 160))}


class Terminal:
    """stdout and stderr of one command; in a job of many processes, the first process alone prints.

    Args:
      as_json: whether stdout carries JSON lines alone; text is then not streamed.
    """

    def __init__(self, *, as_json: bool = False):
        self.as_json = as_json
        self._silent = not process.is_leader()
        self._console = rich.console.Console(
            stderr=True, highlight=False, soft_wrap=True, quiet=self._silent
        )
        self._guard = sys.stdout.isatty()

    def note(self, text: str | Text) -> None:
        """A line for the person at the terminal."""
        self._console.print(text, markup=False, style="dim")

    def show(self, *parts: Any) -> None:
        """Tables and lines below each other, on stdout."""
        if not self._silent:
            rich.console.Console(highlight=False).print(*parts, sep="\n", markup=False)

    def result(self, record: Any, shown: Callable[[Any], Iterable[Any]]) -> None:
        """Prints the record as JSON, or the tables and lines that `shown` returns."""
        if self.as_json:
            self.record(record)
        else:
            self.show(*shown(record))

    def records(
        self, records: list[dict[str, Any]], shown: Callable[[list[dict[str, Any]]], str]
    ) -> None:
        """Prints each record as a JSON line, or all of them as the text that `shown` returns."""
        for record in records if self.as_json else ():
            self.record(record)
        self.write(shown(records))

    @contextlib.contextmanager
    def starting(self, doing: str = "starting", extra: str | None = None) -> Iterator[None]:
        """Shows `doing` while the block imports JAX; one line where stderr is not a terminal.

        Behind a block that imported the engine JAX's compilation cache is sealed: some commands
        compile before they make an engine, or make none.

        Raises InputError where the block needs a package of the `extra` that is not installed.
        """
        if "jax" not in sys.modules:
            check_memory_limit()
            process.hide_absent_tpu()
            if not self._console.is_terminal:
                self.note(doing)
        try:
            with self.waiting(doing):
                yield
                if "jax_longctx.engine" in sys.modules:
                    from jax_longctx.engine.program_files import seal_cache

                    seal_cache()
        except ModuleNotFoundError as error:
            if extra is None:
                raise
            install = f"pip install 'jax-longctx[{extra}]'"
            raise InputError(f"the package {error.name} is missing; {install}") from error

    @contextlib.contextmanager
    def warnings(self) -> Iterator[None]:
        """Shows warnings about a text's length as notes."""
        with warnings.catch_warnings():
            warnings.simplefilter("always", TrainedLengthWarning)
            others = warnings.showwarning

            def show(message: Any, category: Any, *where: Any) -> None:
                if issubclass(category, TrainedLengthWarning):
                    self.note(f"warning: {message}")
                else:
                    others(message, category, *where)

            warnings.showwarning = show
            yield

    def write(self, text: str) -> None:
        """A piece of an answer, shown at once; nothing in JSON mode."""
        if self.as_json or self._silent:
            return
        sys.stdout.write(text.translate(_CONTROLS) if self._guard else text)
        sys.stdout.flush()

    def stream(self, answered: Callable[[OnText], list["Answer"]]) -> "Answer":
        """Runs `answered(on_text)` for one row and streams its text to stdout."""
        try:
            (answer,) = answered(lambda row, text: self.write(text))
        finally:
            # Also when interrupted: what follows starts on a line of its own.
            self.write("\n")
        return answer

    def record(self, record: Any) -> None:
        """One JSON value as one line of stdout."""
        if self._silent:
            return
        sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")
        sys.stdout.flush()

    @contextlib.contextmanager
    def progress(self, doing: str, unit: str = "tokens") -> Iterator[Update]:
        """A bar with rate, time left and memory; call the result with (done, total[, detail]).

        Where stderr is not a terminal, it is a line every ten seconds. `detail` is a text.
        """
        if not self._console.is_terminal:
            yield self._lines(doing, unit)
            return
        row = _Row(self._console, unit)
        with Progress(row, console=self._console, transient=True) as bar, process.bar_shown():
            task = bar.add_task(doing, total=None, detail="")

            def update(done: int, total: int, detail: str = "") -> None:
                bar.update(task, completed=done, total=total, detail=detail)
                if done >= total:
                    # The bar is erased before the next output is written.
                    bar.stop()

            yield update

    @contextlib.contextmanager
    def waiting(self, doing: str, *, when: bool = True) -> Iterator[None]:
        """Shows the elapsed time of work of unknown length, on a terminal and if `when`."""
        if not (when and self._console.is_terminal):
            yield
            return
        row = _Row(self._console)
        with Progress(row, console=self._console, transient=True) as bar, process.bar_shown():
            bar.add_task(doing, total=None)
            yield

    def _lines(self, doing: str, unit: str) -> Update:
        begun = last = time.monotonic()

        def update(done: int, total: int, detail: str = "") -> None:
            nonlocal last
            now = time.monotonic()
            if now - last < LINE_EVERY or not done:
                return
            last = now
            left = (now - begun) / done * (total - done)
            self.note(
                f"{doing}: {_count(done, total, unit)}, {_rate(done, now - begun, unit)}, "
                f"{left:.0f} s left, {shown_bytes(memory_used())} in use"
                f"{detail and f', {detail}'}"
            )

        return update


class Compiling:
    """Compilation as a command shows it: ahead of need, its progress, and its seconds apart.

    On a GPU or TPU the programs compile while the weights load (see `engine.ahead`). On a CPU they
    compile when they are called: XLA uses all cores for one program there, so others beside it gain
    nothing, and the host's cores have the weights to read.

    Attributes:
      clock: the main thread's seconds of compilation, from `watching` on.
    """

    def __init__(self, terminal: Terminal):
        self._terminal = terminal
        self._begun: Compilation | None = None
        self._told = 0.0
        self.clock: Any = None

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """While the command runs. Imports JAX."""
        with self._terminal.starting():
            from jax_longctx.engine.compiling import CompileClock

        with CompileClock() as self.clock:
            yield

    def ahead(self, begin: Callable[["LongContext"], "Compilation | None"]) -> Any:
        """`begin`, as `api.load` takes it: called before the weights are there, not on a CPU.

        `begin` may find nothing to compile, and returns None then.
        """

        def begun(model: "LongContext") -> None:
            if model.compiles_ahead:
                self._begun = begin(model)

        return begun

    def wait(self, *, prefill: bool = False) -> None:
        """Waits for the programs, with progress; with `prefill`, for the prefill's alone."""
        if self._begun is None:
            return
        with self.clock.waiting(), self._terminal.progress("compiling", "programs") as update:
            self._begun.wait(update, prefill=prefill)
        if not prefill:
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


class _Row(ProgressColumn):
    """Description, bar and figures in one row; figures that do not fit are left out.

    rich would not erase a second row before it redraws the first.
    """

    def __init__(self, console: rich.console.Console, unit: str = ""):
        self._console, self._unit = console, unit
        super().__init__()

    def render(self, task: Task) -> Text:
        # Some terminals wrap a row that fills their last column.
        room = self._console.width - 1
        parts = [_clock(task.elapsed or 0.0)] if task.total is None else self._parts(task, room)
        tail = "".join(f"  {part}" for part in parts)
        row = Text(task.description)
        row.truncate(max(room - cell_len(tail), 0), overflow="ellipsis")
        bar = min(room - row.cell_len - cell_len(tail) - 2, WIDEST_BAR)
        if task.total and bar >= NARROWEST_BAR:
            done = int(bar * min(task.completed / task.total, 1))
            stroke = "-" if self._console.options.ascii_only else "\u2501"
            row.append("  ").append(stroke * done, "bar.complete")
            row.append(stroke * (bar - done), "bar.back")
        row.append(tail)
        row.truncate(room, overflow="ellipsis")
        return row

    def _parts(self, task: Task, room: int) -> list[str]:
        """The count, and the figures that fit beside a bar, the most useful first."""
        done, total, seconds = int(task.completed), int(task.total or 0), task.elapsed or 0.0
        left = f"{_clock(seconds / done * (total - done))} left" if done else ""
        rate = _rate(done, seconds, self._unit)
        parts = [_count(done, total, self._unit)]
        room -= cell_len(task.description) + 2 + cell_len(parts[0])
        if left and cell_len(left) + 2 <= room:
            parts.append(left)
            room -= cell_len(left) + 2
        room -= 2 + NARROWEST_BAR
        detail = Text(task.fields["detail"])
        detail.truncate(max(room - 2, 0), overflow="ellipsis")
        for part in (detail.plain, rate, shown_bytes(memory_used())):
            if part and cell_len(part) + 2 <= room:
                parts.append(part)
                room -= cell_len(part) + 2
        return parts


def _clock(seconds: float) -> str:
    """`75` -> `1:15`."""
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def shown_time(seconds: float, least: float = 0.1) -> str:
    """In seconds from `least` on, in milliseconds below."""
    return f"{seconds:,.2f} s" if seconds >= least else f"{seconds * 1e3:.2f} ms"


def stored(record: dict[str, Any]) -> str:
    """The forms of weights, keys and values, and the place of contexts, where a record has them."""
    said = {"weights": "weights", "kv": "keys and values", "offload": "contexts"}
    return "".join(f", {what} in {record[key]}" for key, what in said.items() if record.get(key))


def _count(done: int, total: int, unit: str) -> str:
    if unit == "bytes":
        return f"{shown_bytes(done)} of {shown_bytes(total)}"
    return f"{done:,}/{total:,} {unit}"


def _rate(done: int, seconds: float, unit: str) -> str:
    rate = per_second(done, seconds)
    if unit == "bytes":
        return f"{shown_bytes(int(rate))}/s"
    return f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s"


def per_second(count: int, seconds: float) -> float:
    """A rate; 0 where no time passed."""
    return count / seconds if seconds > 0 else 0.0


def closing_note(
    answer: "Answer", context: int, prefill: float | None, cache: int | None, compiled: float
) -> str:
    """An answer's time and memory in one line; `prefill` is None for a context read earlier.

    `compiled` are seconds of compilation, which the other times leave out.
    """
    # The rate leaves out the first token, whose time is shown by itself.
    rate = per_second(len(answer.tokens) - 1, answer.decode_seconds)
    parts = [f"context {context:,} tokens"]
    if compiled >= LEAST_COMPILED:
        parts.append(f"compiled in {compiled:.1f} s")
    if prefill is not None:
        parts.append(f"read in {prefill:.1f} s ({per_second(context, prefill):,.0f} tokens/s)")
    parts.append(f"first token {answer.first_token_seconds:.2f} s after the question")
    parts.append(f"{len(answer.tokens):,} tokens at {rate:,.1f} tokens/s")
    if cache is not None:
        parts.append(f"cache {shown_bytes(cache)}")
    if answer.fetched is not None and answer.fetched.hit_rate is not None:
        found = answer.fetched
        parts.append(
            f"{found.hit_rate:.0%} of {found.hits + found.misses:,} chosen pages on the device, "
            f"{found.waited_share:.0%} of the layers' steps waited"
        )
    parts.append(f"peak memory {shown_bytes(peak_memory())}")
    return "; ".join(parts)


def read_text(source: str) -> str:
    """The UTF-8 text of a file, or of stdin for "-"; a byte order mark is dropped.

    Raises:
      InputError: it cannot be read, is not UTF-8, or is empty.
    """

    def read() -> str:
        from jax_longctx.text.documents import read_source

        name = "stdin" if source == "-" else source
        text = decoded(read_source(source), name)
        if not text.strip():
            raise InputError(f"{name} is empty; give a text")
        return text

    return _from_leader(read)


def read_documents(sources: Sequence[str], terminal: Terminal) -> "Joined":
    """Files, folders and archives as one text (see `text.documents`); "-" is stdin.

    Raises:
      InputError: one cannot be read, or holds no text.
    """

    # Imported late: it imports tokenizers.
    from jax_longctx.text import documents

    def read() -> Any:
        found = documents.Joined.of(documents.read_documents(sources, terminal.note))
        return found.text, found.places

    text, places = _from_leader(read)
    return documents.Joined(text, tuple((at, name, page) for at, name, page in places))


def _from_leader(read: Callable[[], Any]) -> Any:
    """In a job the first process reads for all: a launcher may connect stdin to that one alone."""
    if process.number() is None:
        return read()
    from jax_longctx.engine.distributed import from_leader

    return from_leader(read)


def check_argument(name: str, text: str) -> str:
    """Returns a text from the command line; raises InputError when its bytes are not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        # Python decodes a bad byte of an argument to a lone surrogate.
        raise InputError(f"{name} is not UTF-8 text; check the terminal's encoding") from error
    return text


def check_file(out: Path | None, option: str = "--out") -> None:
    """Makes the file's folder; raises InputError where the file could not be written there."""
    if out is None:
        return
    if os.path.isdir(out):
        raise InputError(f"{option} {out} is a folder; name a file")
    if out.exists() and not out.is_file():
        # The finished file would take its place.
        raise InputError(f"{option} {out} is a device, a FIFO or a socket; name a file")
    _check_writable(out.parent, f"{option} {out}")


def check_folder(out: Path | None, option: str = "--out") -> None:
    """Raises InputError where no file could be written to the folder; leaves nothing behind."""
    if out is not None:
        _check_writable(out, f"{option} {out}")


def _check_writable(folder: Path, what: str) -> None:
    """InputError unless a file can be made there; in a job, the first process alone tries."""
    if not process.is_leader():
        return
    try:
        # Permission bits do not show that a file system is read-only or virtual.
        with folder_made(folder), tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{what}: nothing can be written to the folder {folder}: {error.strerror}; name another"
        ) from error


def check_plot(plot: Path | None, option: str) -> None:
    """`check_file` for a plot, which also needs matplotlib."""
    check_file(plot, option)
    if plot is not None:
        check_matplotlib(option)


def check_matplotlib(what: str) -> None:
    """Raises InputError where matplotlib is missing, before hours of work."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"{what} needs matplotlib; run: pip install 'jax-longctx[eval]'")


def save(record: Any, out: Path | None) -> None:
    """Writes JSON atomically; in a job, the first process alone writes.

    Raises:
      InputError: the file cannot be written.
    """
    if out is None or not process.is_leader():
        return
    write_whole(json.dumps(record, indent=1).encode("utf-8"), out)


def table(headers: Iterable[str], rows: Iterable[Iterable[str]], left: int = 1) -> rich.table.Table:
    """A table without lines; the first `left` columns are aligned left, the others right."""
    made = rich.table.Table(box=None, header_style="bold", pad_edge=False)
    for index, header in enumerate(headers):
        made.add_column(header, justify="left" if index < left else "right")
    for row in rows:
        made.add_row(*row)
    return made


def check_checkpoint(folder: Path) -> None:
    """CheckpointError where the folder has no manifest; loading checks the contents."""
    try:
        where = whole_path(folder)
        if (where / "manifest.json").is_file():
            return
        of_gguf = where.suffix == ".gguf" and where.is_file()
        known = of_gguf or any((where / name).is_file() for name in ("config.json", "params.json"))
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}") from error
    what, source, made = "no manifest.json", "SOURCE", "DESTINATION"
    if known:
        what = "it is a GGUF file" if of_gguf else "it is as other libraries write them"
        source, made = str(folder), f"{where.stem}-converted"
    raise CheckpointError(
        f"{folder} is not a converted checkpoint ({what}); make one, once: jax-longctx convert "
        f"{shlex.quote(source)} {shlex.quote(made)}"
    )


def choose_method(
    terminal: Terminal, model: "LongContext", tokens: int, reserve: int, **how: Any
) -> Any:
    """The method for one text (`choosing.choose`), with a line that says why."""
    from jax_longctx.choosing import Case, choose

    choice = choose(Case.of(model, tokens, reserve=reserve), **how)
    terminal.note(f"method {choice.reason}")
    return choice.method
