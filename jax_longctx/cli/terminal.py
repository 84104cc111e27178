"""What the commands show: answers on stdout; progress and notes on stderr; or JSON lines.

With `json=True` stdout carries one JSON object a line and nothing else.
"""

import contextlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import rich.console
from rich.cells import cell_len
from rich.progress import Progress, ProgressColumn, Task
from rich.text import Text

from jax_longctx.cli import ending, processes
from jax_longctx.errors import TrainedLengthWarning
from jax_longctx.memory import memory_used, shown_bytes

__all__ = ["Terminal", "Update"]

Update = Callable[[int, int], None]

# Seconds between progress lines where stderr is a file or a pipe.
LINE_EVERY = 10.0
NARROWEST_BAR, WIDEST_BAR = 10, 40

# Control characters but tab and newline: what a model writes must not steer the terminal.
_CONTROLS = {code: "\ufffd" for code in (*range(9), *range(11, 32), *range(127, 160))}


class Terminal:
    """stdout and stderr of one command; of a job's processes the first alone shows anything.

    Args:
      as_json: stdout is for JSON lines; text is not streamed.
    """

    def __init__(self, *, as_json: bool = False):
        self.as_json = as_json
        self._silent = not processes.is_leader()
        self._console = rich.console.Console(
            stderr=True, highlight=False, soft_wrap=True, quiet=self._silent
        )
        self._guard = sys.stdout.isatty()

    def note(self, text: str) -> None:
        """A line for the person at the terminal."""
        self._console.print(text, markup=False, style="dim")

    def line(self, text: str) -> None:
        """A note where stderr is a file or a pipe: on a terminal `waiting` shows the same."""
        if not self._console.is_terminal:
            self.note(text)

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

    def record(self, record: dict[str, Any]) -> None:
        """One JSON object as one line of stdout."""
        if self._silent:
            return
        sys.stdout.write(json.dumps(record, ensure_ascii=False) + "\n")
        sys.stdout.flush()

    @contextlib.contextmanager
    def progress(
        self, doing: str, unit: str = "tokens", detail: Callable[[], str] | None = None
    ) -> Iterator[Update]:
        """A bar with rate, time left and memory; call the result with (done, total).

        Where stderr is no terminal, a line every ten seconds instead. `detail` gives what else is
        shown of the moment.
        """
        if not self._console.is_terminal:
            yield self._lines(doing, unit, detail)
            return
        row = _Row(self._console, unit, detail)
        with Progress(row, console=self._console, transient=True) as bar, ending.bar_shown():
            task = bar.add_task(doing, total=None)

            def update(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)
                if done >= total:
                    # The bar goes before whatever comes next is written.
                    bar.stop()

            yield update

    @contextlib.contextmanager
    def waiting(self, doing: str, *, when: bool = True) -> Iterator[None]:
        """The time that passes, for work of unknown length; only `when` asked, on a terminal."""
        if not (when and self._console.is_terminal):
            yield
            return
        row = _Row(self._console)
        with Progress(row, console=self._console, transient=True) as bar, ending.bar_shown():
            bar.add_task(doing, total=None)
            yield

    def _lines(self, doing: str, unit: str, detail: Callable[[], str] | None) -> Update:
        begun = last = time.monotonic()

        def update(done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last < LINE_EVERY or not done:
                return
            last = now
            left = (now - begun) / done * (total - done)
            self.note(
                f"{doing}: {_count(done, total, unit)}, {_rate(done, now - begun, unit)}, "
                f"{left:.0f} s left, {shown_bytes(memory_used())} in use"
                f"{'' if detail is None else f', {detail()}'}"
            )

        return update


class _Row(ProgressColumn):
    """All that is shown of some work, in one row; what has no room there is left out.

    A second row would not be erased when the first is written anew.
    """

    def __init__(
        self,
        console: rich.console.Console,
        unit: str = "",
        detail: Callable[[], str] | None = None,
    ):
        self._console, self._unit, self._detail = console, unit, detail or str
        super().__init__()

    def render(self, task: Task) -> Text:
        # Some terminals break the row after their last column.
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
        """The count, and as much more as there is room for beside a bar, the most useful first."""
        done, total, seconds = int(task.completed), int(task.total or 0), task.elapsed or 0.0
        left = f"{_clock(seconds / done * (total - done))} left" if done else ""
        rate = _rate(done, seconds, self._unit)
        parts = [_count(done, total, self._unit)]
        room -= cell_len(task.description) + 2 + cell_len(parts[0])
        if left and cell_len(left) + 2 <= room:
            parts.append(left)
            room -= cell_len(left) + 2
        room -= 2 + NARROWEST_BAR
        detail = Text(self._detail())
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


def _count(done: int, total: int, unit: str) -> str:
    if unit == "bytes":
        return f"{shown_bytes(done)} of {shown_bytes(total)}"
    return f"{done:,}/{total:,} {unit}"


def _rate(done: int, seconds: float, unit: str) -> str:
    rate = done / seconds if seconds > 0 else 0.0
    if unit == "bytes":
        return f"{shown_bytes(int(rate))}/s"
    # Of what takes seconds each, the first digits count.
    return f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s"
