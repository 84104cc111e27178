import builtins
import importlib.util
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import types

import pytest

from jax_longctx import Conversation, make_method
from jax_longctx.cli import chat as chat_command
from jax_longctx.cli import process
from jax_longctx.engine import marks
from jax_longctx.errors import CapacityError, InputError
from jax_longctx.files import seal
from tests.jax_longctx.cli.conftest import refused
from tests.jax_longctx.cli.test_process import read_until
from tests.patience import patience

SHORT = ("-c", "m", "--max-tokens", 8)


@pytest.fixture
def said(run, loads):
    """What a conversation answers to these lines, and its notes."""

    def talk(*lines, given=(), code=0):
        result = run("chat", *given, *SHORT, stdin="".join(f"{line}\n" for line in lines))
        assert result.exit_code == code, result.output
        return result.stdout, result.stderr

    return talk


def test_the_first_answer_is_as_ask_has_it_and_the_second_follows_on_it(run, said, tiny, book):
    first = run("ask", book, "Who?", *SHORT).stdout
    out, notes = said("Who?", "", "/cost", "Why?", "/files", "/where", given=[book])
    assert "% " in notes and "characters" in notes
    context = tiny.prefill(tiny.layout().context(book.read_text()))
    talk = Conversation(tiny, context)
    answers = [talk.ask(question, max_tokens=8) for question in ("Who?", "Why?")]
    assert out == "".join(answer.text + "\n" for answer in answers)
    assert out.startswith(first) and str(book) in notes
    assert "of 1 questions and answers, room for 2," in notes
    assert talk.turns[0] == ("Who?", answers[0].text)
    # Nothing is read twice: the cache holds all but the newest token.
    assert talk.held == len(talk.tokens) - 1


def test_where_is_refused_before_it_reads_again(run, loads, tiny, book, monkeypatch):
    monkeypatch.setattr(tiny, "engine", tiny.with_method(make_method("knorm")).engine)
    # Whatever the caches hold, nothing is fed to them again.
    monkeypatch.setattr(marks, "prefill_text", None)
    result = run("chat", book, *SHORT, "-m", "knorm", stdin="Who?\n/where\n")
    assert result.exit_code and "the caches of knorm do not say which tokens" in result.stderr


def test_saved_cleared_and_read_anew_it_goes_on(said, book, tmp_path):
    whole, _ = said("Who?", "Why?", given=[book])
    first = said("Who?", given=[book])[0]
    folder = tmp_path / "talk"
    _, notes = said("Who?", f"/save {folder}", "Why?", given=[book])
    assert f"--load {folder} goes on" in notes
    assert first + said("Why?", "/files", given=["--load", folder])[0] == whole
    out, notes = said("Why?", f"/load {folder}", "Why?", "/clear", "Who?", given=[book])
    assert out.endswith(whole.removeprefix(first) + first) and "questions loaded" in notes
    out, notes = said("Who?", "/method snapkv:budget=400", "Why?", "/method", given=[book])
    # With room for all it is full attention.
    assert out == whole and "method snapkv:budget=400" in notes


def test_damaged_and_foreign_files_are_one_line(said, run, book, tmp_path):
    folder, file = tmp_path / "talk", tmp_path / "talk" / chat_command.FILE
    said("Who?", f"/save {folder}", given=[book])
    sound = file.read_text()

    def refuse(text, message):
        file.write_text(text)
        refused(run("chat", "--load", folder, *SHORT, stdin="Why?\n"), message)

    refuse(sound.replace("Who", "Why"), "conversation.json is damaged: its sha256")
    refuse(json.dumps(seal(1, {"turns": []})), "conversation.json is damaged: it holds turns")
    fields = {key: value for key, value in json.loads(sound).items() if key != "sha256"}
    refuse(json.dumps(seal(1, fields | {"text": "other"})), "talk/conversation.json was made with")
    file.unlink()
    # Without it, it is a context as `ask` saves it.
    assert said("Who?", given=["--load", folder])[0] == said("Who?", given=[book])[0]
    shutil.rmtree(folder / "caches")
    refused(run("chat", "--load", folder, *SHORT, stdin=""), "caches")


@pytest.mark.parametrize(
    ("given", "stdin", "message"),
    [
        ([], "", "no FILE given; give texts"),
        (["book", "--load", "."], "", "FILE and --load exclude each other"),
        (["-"], "", "questions come from stdin"),
        (["book"], "/foo\n", "/foo is no command; /help"),
        (["book"], "/save\n", "/save takes the name"),
        (["book"], "/load nowhere\n", "nowhere is not a saved context"),
        (["book"], "/method foo\n", "unknown method 'foo'"),
        (["book"], "/method citrus\n", "citrus reads the text for each question"),
        (["book"], b"\xffWho?\n", "stdin is not UTF-8"),
    ],
)
def test_what_cannot_be_is_refused(run, loads, book, given, stdin, message):
    given = [str(book) if each == "book" else each for each in given]
    result = run("chat", *given, *SHORT, stdin=stdin)
    assert (result.exit_code, result.stdout) == (2, "")
    # What was read first may be noted before.
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ") and message in last, result.stderr


def test_room_grows_and_where_memory_ends_clear_helps(tiny, book, monkeypatch):
    context = tiny.prefill(tiny.layout().context(book.read_text()), reserve=8)
    talk, slots = Conversation(tiny, context), context.slots
    monkeypatch.setattr("jax_longctx.conversation.ROOM", 16)
    answers = [talk.ask("Who?", max_tokens=150).text for _ in range(2)]
    assert context.slots > slots and answers[0] != answers[1]
    monkeypatch.setattr(tiny.engine, "memory_limit", 1)
    with pytest.raises(CapacityError, match=r"cannot go on: .* \(/clear\)"):
        talk.ask("Who?", max_tokens=2000)
    talk.clear()
    assert talk.ask("Who?", max_tokens=150).text == answers[0]
    with pytest.raises(InputError, match="a question is empty"):
        talk.ask(" ")


def test_a_stopped_or_failed_answer_stays_or_goes(tiny, book):
    def begun():
        return Conversation(tiny, tiny.prefill(tiny.layout().context(book.read_text())))

    whole, talk = begun().ask("Who?", max_tokens=20), begun()
    looks = iter([False, True])
    part = talk.ask("Who?", max_tokens=20, until=lambda: next(looks))
    assert part.finish == "interrupted" and whole.text.startswith(part.text)
    assert talk.turns == [("Who?", part.text)] and 0 < len(part.tokens) < 20
    after = talk.ask("Why?", max_tokens=8).text

    def fail(row, text):
        raise ValueError("full")

    tokens = list(talk.tokens)
    with pytest.raises(ValueError, match="full"):
        talk.ask("Which?", on_text=fail)
    assert (talk.tokens, talk.held) == (tokens, 0)
    # What was said is read again, and the conversation goes on.
    again = begun()
    again.turns, again.tokens = talk.turns[:1], tokens[: tokens.index(part.tokens[-1]) + 1]
    assert talk.ask("Which?", max_tokens=8).text and after
    stop = whole.text[2:4]
    cut = begun()
    assert cut.ask("Who?", max_tokens=20, stop=[stop]).text == whole.text.partition(stop)[0]
    assert cut.held <= len(cut.tokens)


@pytest.mark.parametrize("toolkit", [False, True])
def test_lines_at_a_terminal(tiny, monkeypatch, capsys, toolkit):
    typed = iter(["Who?", KeyboardInterrupt, "", "Why?", EOFError])

    def next_line(*_, **how):
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    if toolkit:
        from prompt_toolkit import PromptSession

        monkeypatch.setattr(PromptSession, "prompt", next_line)
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(builtins, "input", next_line)
    with process.catching() as caught:
        assert list(chat_command._typed(caught)) == ["Who?", "Why?"]
    assert "/quit or Ctrl-D ends" in capsys.readouterr().err


@pytest.mark.parametrize("typed", [True, False])
def test_at_a_terminal_alone_it_goes_on_after_ctrl_c_and_bad_bytes(
    run, loads, book, monkeypatch, typed
):
    caught, ask = [], Conversation.ask

    def asking(*given, **how):
        caught.append(process._State.caught is not None)
        return ask(*given, **how)

    monkeypatch.setattr(Conversation, "ask", asking)
    if typed:
        stdin = types.SimpleNamespace(isatty=lambda: True)
        monkeypatch.setattr(chat_command, "sys", types.SimpleNamespace(stdin=stdin))
        monkeypatch.setattr(chat_command, "_typed", lambda _: iter(["\udcff", "Who?"]))
    result = run("chat", book, *SHORT, stdin="Who?\n")
    assert result.exit_code == 0 and caught == [typed] and result.stdout.strip()
    assert ("error: a question is not UTF-8" in result.stderr) == typed


@pytest.mark.slow
def test_ctrl_c_stops_the_answer_and_not_the_program(checkpoint, book):
    """In a real terminal: the answer stays as far as it came, and another question follows."""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "PROMPT_TOOLKIT_NO_CPR": "1"}
    line = [sys.executable, "-m", "jax_longctx", "chat", book, "-c", checkpoint]
    pipes = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "start_new_session": True}
    begun = subprocess.Popen([*line, "--max-tokens", "40000"], env=environment, **pipes)
    os.close(theirs)

    def type_line(text):
        os.write(ours, text.encode() + b"\r")

    try:
        # A terminal says so where it takes a line.
        read_until(ours, b"\x1b[?2004h", 120)
        type_line("Who?")
        read_until(ours, b"\x1b[?2004l", 60)
        # The answer's first words, after what ends the line's editing.
        shown = b""
        while not re.sub(rb"\x1b\[[\d;?]*[a-zA-Z]|\s", b"", shown):
            shown += os.read(ours, 4096)
        begun.send_signal(signal.SIGINT)
        assert b"stays in the conversation" in read_until(ours, b"\x1b[?2004h", 60)
        type_line("/cost")
        assert b"of 1 questions and answers" in read_until(ours, b"\x1b[?2004h", 60)
        # At the prompt it ends nothing.
        os.write(ours, b"\x03")
        assert b"Ctrl-D ends" in read_until(ours, b"\x1b[?2004h", 60)
        os.write(ours, b"\x04")
        assert begun.wait(patience(60)) == 0
    finally:
        begun.kill()
        begun.wait()
        os.close(ours)
