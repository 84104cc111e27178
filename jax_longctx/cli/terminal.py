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
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from jax_longctx.cli import ending, processes
from jax_longctx.errors import TrainedLengthWarning
from jax_longctx.memory import memory_used, shown_bytes

__all__ = ["Terminal", "Update"]

Update = Callable[[int, int], None]

# Seconds between progress lines where stderr is a file or a pipe.
LINE_EVERY = 10.0

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
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            _CountColumn(unit),
            TimeRemainingColumn(compact=True),
            _MemoryColumn(),
            *([] if detail is None else [_DetailColumn(detail)]),
        )
        with Progress(*columns, console=self._console, transient=True) as bar, ending.bar_shown():
            task = bar.add_task(doing, total=None)

            def update(done: int, total: int) -> None:
                bar.update(task, completed=done, total=total)
                if done >= total:
                    # The bar goes before whatever comes next is written.
                    bar.stop()

            yield update

    @contextlib.contextmanager
    def waiting(self, doing: str, *, when: bool = True) -> Iterator[None]:
        """A spinner with the time that passes, for work of unknown length; only `when` asked."""
        if not (when and self._console.is_terminal):
            yield
            return
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as bar, ending.bar_shown():
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


class _CountColumn(ProgressColumn):
    """`512/6,000 tokens  397 tokens/s`."""

    def __init__(self, unit: str):
        self._unit = unit
        super().__init__()

    def render(self, task: Task) -> Text:
        if task.total is None:
            return Text("starting")
        count = _count(int(task.completed), int(task.total), self._unit)
        return Text(f"{count}  {_rate(int(task.completed), task.elapsed or 0.0, self._unit)}")


class _DetailColumn(ProgressColumn):
    """What the command itself tells of the moment."""

    max_refresh = 0.5

    def __init__(self, detail: Callable[[], str]):
        self._detail = detail
        super().__init__()

    def render(self, task: Task) -> Text:
        return Text(self._detail(), style="dim")


class _MemoryColumn(ProgressColumn):
    """Memory in use; asked for twice a second at most."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        return Text(shown_bytes(memory_used()), style="dim")


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
