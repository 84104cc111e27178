import json
import re
from pathlib import Path
from unittest.mock import Mock

import pytest

from jax_longctx.bench import kernels
from jax_longctx.cli import process, terminal
from jax_longctx.cli import terminal as terminal_module
from jax_longctx.cli.options import Output
from jax_longctx.cli.terminal import Terminal, read_text
from jax_longctx.engine import program_files
from jax_longctx.errors import InputError
from jax_longctx.planning import compiled
from tests.jax_longctx.cli.conftest import refused


def test_text_goes_to_stdout_and_notes_to_stderr(capsys, monkeypatch):
    terminal = Terminal()
    terminal.write("The [bold]answer[/bold] ")
    terminal.write("is \x1b[31m42.")
    terminal.note("took [1] second")
    shown = capsys.readouterr()
    # Into a file or a pipe the text goes as it is.
    assert shown.out == "The [bold]answer[/bold] is \x1b[31m42."
    assert shown.err == "took [1] second\n"
    # In JSON mode no text is streamed.
    terminal = Terminal(as_json=True)
    terminal.write("streamed")
    terminal.record({"answer": "Größe\n"})
    assert capsys.readouterr().out == '{"answer": "Größe\\n"}\n'
    # A model cannot steer the terminal.
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    Terminal().write("a\tb\n\x1b[2J\x9bé")
    assert capsys.readouterr().out == "a\tb\n\ufffd[2J\ufffdé"


def on_terminal(monkeypatch, width=80):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(width))


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
    on_terminal(monkeypatch)
    with pytest.raises(KeyboardInterrupt), Terminal().progress("reading") as update:
        update(10, 100)
        raise KeyboardInterrupt
    shown = capsys.readouterr()
    assert "reading" in shown.err and "10/100 tokens" in shown.err
    assert shown.err.rindex("\x1b[?25h") > shown.err.rindex("\x1b[?25l")
    assert shown.out == ""
    # A full bar is gone before what comes next is written.
    with Terminal().progress("reading") as update:
        update(100, 100)
        assert capsys.readouterr().err.endswith("\x1b[2K")


@pytest.mark.parametrize("width", [80, 60, 40])
def test_progress_and_waiting_stay_in_one_row(capsys, monkeypatch, width):
    on_terminal(monkeypatch, width)
    monkeypatch.setattr(terminal_module, "memory_used", lambda: 123 * 1024**3)
    cell = "citrus-individual budget=1024 on niah_multikey_3 at 131,072 tokens"
    for doing, unit, detail in [
        ("reading", "tokens", ""),
        ("converting", "bytes", ""),
        ("training", "steps", "loss 2.3456, 12,345 tokens/s, MFU 12.3%, peak 3.4 GiB"),
        ("answering", "rows", "1,234 tokens/s, 0 with an error"),
        ("evaluating", "rows", cell),
    ]:
        with Terminal().progress(doing, unit) as update:
            update(1_234_567, 4_098_765, detail)
        shown = rows(capsys.readouterr().err)
        assert max(map(len, shown)) < width
        count = "1.2 MiB of 3.9 MiB" if unit == "bytes" else f"1,234,567/4,098,765 {unit}"
        assert any(row.startswith(doing) and count in row for row in shown)
    with Terminal().waiting(f"loading {'a/long/path/' * 10}model"):
        pass
    shown = rows(capsys.readouterr().err)
    assert max(map(len, shown)) < width
    assert any(row.startswith("loading a/long") and row.endswith("\u2026  0:00") for row in shown)


def rows(shown):
    """What was written, row by row; one row alone may be erased and written anew."""
    assert shown.count("\n") == 1 and shown.endswith("\n\x1b[?25h\r\x1b[1A\x1b[2K")
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown))


@pytest.mark.parametrize("leads", [True, False])
def test_the_first_process_alone_writes_and_shows(tmp_path, monkeypatch, capsys, leads):
    monkeypatch.setattr(process, "is_leader", lambda: leads)
    out, found = tmp_path / "found.json", {"seconds": 1.5}
    for as_json, shown in ((True, json.dumps(found)), (False, "in 1.5 s")):
        Output(out=out, as_json=as_json).hand_over(found, lambda it: [f"in {it['seconds']} s"])
        assert capsys.readouterr().out == (f"{shown}\n" if leads else "")
        assert list(tmp_path.iterdir()) == [out] * leads
        if leads:
            assert json.loads(out.read_text()) == found
            out.unlink()


def test_a_file_is_replaced_whole(tmp_path, monkeypatch):
    out = tmp_path / "found.json"
    out.write_text("before")
    with pytest.raises(TypeError):
        Output(out=out).hand_over({"bad": object()}, lambda result: [result])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "replace", Mock(side_effect=KeyboardInterrupt))
        terminal.save({}, out)
    assert out.read_text() == "before" and list(tmp_path.iterdir()) == [out]
    (tmp_path / "found.json.partial").mkdir()
    with pytest.raises(InputError, match=r"found\.json could not be written: Is a directory"):
        terminal.save({}, out)


def test_where_nothing_can_be_written_is_named_before_the_work(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    for check, name in ((terminal.check_file, "found.json"), (terminal.check_folder, "")):
        check(None)
        for folder, why in ((tmp_path / "file" / "more", "Not a directory"), (Path("/proc"), "")):
            with pytest.raises(InputError, match=f"to the folder {folder}: {why}"):
                check(folder / name, "--where")
    (tmp_path / "file").unlink()
    # Nothing is left; what is written makes its folder.
    terminal.check_file(tmp_path / "a" / "b" / "found.json")
    terminal.check_folder(tmp_path / "c" / "d")
    assert not list(tmp_path.iterdir())
    terminal.save({}, tmp_path / "a" / "b" / "found.json")
    with pytest.raises(InputError, match="is a folder; name a file"):
        terminal.check_file(tmp_path / "a")
    # Of several processes the first looks, on whose machine it is written.
    monkeypatch.setattr(process, "is_leader", lambda: False)
    terminal.check_folder(Path("/proc"))
    terminal.check_file(tmp_path / "e" / "found.json")
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize(
    "command",
    [
        "train evaluate -c model --data model --out",
        "bench kernels --out",
        "bench decode --method h2o --out",
        "bench prefill --method h2o --out",
        "eval run -c model -t passkey --length 4096 --output",
        "eval perplexity -c model --out",
        "eval perplexity -c model --plot",
        "eval agreement -c model --out",
    ],
)
def test_commands_look_first_where_they_write(run, loads, tmp_path, command, monkeypatch):
    words = command.split()
    option = words[-1]
    (tmp_path / "file").write_text("")
    found = tmp_path / "file" / "more" / "found"
    cases = [(found, f"{found}: nothing can be written"), ("/proc/found", "nothing can be")]
    if words[0] == "eval" and option != "--output":
        cases.append((tmp_path, "is a folder; name a file"))
    if option == "--plot":
        cases.append((tmp_path / "plot.png", "needs matplotlib"))
    for out, message in cases:
        if message == "needs matplotlib":
            monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        result = run(*words, out)
        refused(result, message)
        assert result.stderr.startswith(f"error: {option} ")
    assert loads == []


def test_texts_come_without_the_byte_order_mark_and_others_are_refused(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffGröße\r\n".encode())
    assert read_text(str(path)) == "Größe\r\n"
    for content, message in [
        (b"", "is empty"),
        (b" \n\t", "is empty"),
        (b"abc\xff", r"not UTF-8 text \(byte 3 is 0xff\)"),
        ("ÿ".encode("utf-16"), "not UTF-8"),
    ]:
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            read_text(str(path))
    for missing, message in (("none.txt", "No such file"), ("", "Is a directory")):
        with pytest.raises(InputError, match=f"cannot be read: {message}"):
            read_text(str(tmp_path / missing))


@pytest.mark.parametrize(
    ("words", "module", "name"),
    [
        ("bench kernels", kernels, "run"),
        ("plan --compile --target cpu --model llama-3.2-1b --context 64", compiled, "compile_plan"),
    ],
)
def test_commands_that_make_no_engine_compile_into_a_sealed_cache(
    run, monkeypatch, words, module, name
):
    """Else JAX would run any program that others put into the cache's folder."""
    done = []

    def compiles(*given, **how):
        done.append("compiled")
        raise InputError("enough")

    monkeypatch.setattr(program_files, "seal_cache", lambda: done.append("sealed"))
    monkeypatch.setattr(module, name, compiles)
    assert "enough" in run(*words.split(), code=2).stderr
    assert done[0] == "sealed" and done[-1] == "compiled"
