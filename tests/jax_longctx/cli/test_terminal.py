"""stdout carries answers or JSON, never both; progress is a line where there is no terminal."""

import json
import re

import pytest

from jax_longctx.cli import terminal as terminal_module
from jax_longctx.cli.terminal import Terminal


def test_text_goes_to_stdout_and_notes_to_stderr(capsys):
    terminal = Terminal()
    terminal.write("The [bold]answer[/bold] ")
    terminal.write("is \x1b[31m42.")
    terminal.note("took [1] second")
    shown = capsys.readouterr()
    # Into a file or a pipe the text goes as it is.
    assert shown.out == "The [bold]answer[/bold] is \x1b[31m42."
    assert shown.err == "took [1] second\n"


def test_a_model_cannot_steer_the_terminal(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    Terminal().write("a\tb\n\x1b[2J\x9bé")
    assert capsys.readouterr().out == "a\tb\n\ufffd[2J\ufffdé"


def test_json_mode_streams_no_text(capsys):
    terminal = Terminal(as_json=True)
    terminal.write("streamed")
    terminal.record({"answer": "Größe\n"})
    shown = capsys.readouterr()
    assert shown.out == '{"answer": "Größe\\n"}\n'
    assert json.loads(shown.out) == {"answer": "Größe\n"}


def test_progress_without_a_terminal_is_a_line_every_ten_seconds(capsys, monkeypatch):
    now = 0.0
    monkeypatch.setattr(terminal_module.time, "monotonic", lambda: now)
    monkeypatch.setattr(terminal_module, "memory_used", lambda: 2 * 1024**3)
    with Terminal().progress("reading") as update:
        for done in (0, 1000, 2000, 3000, 4000):
            update(done, 4000)
            now += 6.0
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "reading: 2,000/4,000 tokens, 167 tokens/s, 12 s left, 2.0 GiB in use",
        "reading: 4,000/4,000 tokens, 167 tokens/s, 0 s left, 2.0 GiB in use",
    ]


def test_progress_on_a_terminal_leaves_nothing_and_gives_the_cursor_back(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with pytest.raises(KeyboardInterrupt), Terminal().progress("reading") as update:
        update(10, 100)
        raise KeyboardInterrupt
    shown = capsys.readouterr()
    assert "reading" in shown.err and "10/100 tokens" in shown.err
    assert shown.err.rindex("\x1b[?25h") > shown.err.rindex("\x1b[?25l")
    assert shown.out == ""


@pytest.mark.parametrize("width", [80, 60, 40])
@pytest.mark.parametrize(
    ("doing", "unit", "detail"),
    [
        ("reading", "tokens", ""),
        ("converting", "bytes", ""),
        ("training", "steps", "loss 2.3456, 12,345 tokens/s, MFU 12.3%, peak 3.4 GiB"),
        ("answering", "rows", "1,234 tokens/s, 0 with an error"),
        (
            "evaluating",
            "rows",
            "citrus-individual budget=1024 on niah_multikey_3 at 131,072 tokens",
        ),
    ],
)
def test_progress_stays_in_one_row(capsys, monkeypatch, width, doing, unit, detail):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setattr(terminal_module, "memory_used", lambda: 123 * 1024**3)
    with Terminal().progress(doing, unit) as update:
        update(1_234_567, 4_098_765, detail)
    shown = rows(capsys.readouterr().err)
    assert max(map(len, shown)) < width
    count = "1.2 MiB of 3.9 MiB" if unit == "bytes" else f"1,234,567/4,098,765 {unit}"
    assert any(row.startswith(doing) and count in row for row in shown)


@pytest.mark.parametrize("width", [80, 60, 40])
def test_waiting_stays_in_one_row(capsys, monkeypatch, width):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))
    with Terminal().waiting(f"loading {'a/long/path/' * 10}model"):
        pass
    shown = rows(capsys.readouterr().err)
    assert max(map(len, shown)) < width
    assert any(row.startswith("loading a/long") and row.endswith("\u2026  0:00") for row in shown)


def rows(shown):
    """What was written, row by row; one row alone may be erased and written anew."""
    assert shown.count("\n") == 1 and shown.endswith("\n\x1b[?25h\r\x1b[1A\x1b[2K")
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))


def test_bar_is_gone_before_what_comes_next_is_written(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with Terminal().progress("reading") as update:
        update(100, 100)
        assert capsys.readouterr().err.endswith("\x1b[2K")
