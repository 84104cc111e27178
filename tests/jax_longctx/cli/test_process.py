"""Whole processes: Ctrl-C leaves a clean terminal, outputs that fail end in a line, faults show."""

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.patience import patience

# A process of the command line with one more command, which says on stdout that it has begun.
# Ctrl-C is heard also where the tests run in the background of a script.
STAND_IN = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from jax_longctx.cli import process
process.install()
import atexit, gc, hashlib, sys, threading, time, weakref
import jax_longctx.errors
from jax_longctx.cli.main import app, main
from jax_longctx.cli.terminal import Terminal

def begun():
    print("begun", flush=True)

@app.command()
def stand_in():
{body}

sys.argv = ["jax-longctx", "stand-in"]
main()
"""
ENDLESS = """
    with Terminal().progress("reading") as update:
        update(10, 100)
        while True:
            time.sleep(0.01)
"""
# As XLA compiles: outside Python for a minute.
OUTSIDE = """
    with Terminal().progress("reading") as update:
        update(10, 100)
        begun()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)
"""
IN_A_CALLBACK = """
    def wait(phase, about):
        gc.callbacks.clear()
        begun()
        time.sleep(60)
    gc.callbacks.append(wait)
    gc.collect()
    time.sleep(60)
"""
IN_A_DESTRUCTOR = """
    class Doomed:
        def __del__(self):
            begun()
            time.sleep(60)
    Doomed()
    time.sleep(60)
"""
TAKEN_FOR_DAMAGE = """
    try:
        begun()
        time.sleep(60)
    except KeyboardInterrupt as error:
        raise jax_longctx.errors.CheckpointError("the checkpoint is damaged") from error
"""
TAKEN_FOR_A_FAULT = TAKEN_FOR_DAMAGE.replace("jax_longctx.errors.CheckpointError", "ValueError")
IGNORED = """
    try:
        begun()
        time.sleep(60)
    except KeyboardInterrupt:
        pass
"""
SLOW_TO_UNWIND = """
    try:
        begun()
        time.sleep(60)
    finally:
        print("noise", file=sys.stderr)
        time.sleep(60)
"""
AT_EXIT = """
    atexit.register(lambda: begun() or time.sleep(60))
"""
JOINING_AT_EXIT = """
    threading.Thread(target=lambda: time.sleep(0.5) or begun() or time.sleep(60)).start()
"""
TALKATIVE = """
    while True:
        Terminal().write("word " * 1000)
"""
TALKATIVE_NOTES = """
    while True:
        Terminal().note("word " * 1000)
"""
TALKATIVE_TABLE = """
    import rich.console
    while True:
        rich.console.Console().print("word " * 1000)
"""
FAULTY = """
    raise {error}("a fault of ours")
"""
FULL_DISK = """
    with open("/dev/full", "w") as file:
        file.write("much")
"""


def code_of(body):
    return STAND_IN.replace("{body}", body.strip("\n"))


def command(body):
    return [sys.executable, "-c", code_of(body)]


def longctx(*args):
    return [sys.executable, "-m", "jax_longctx", *args]


def read_until(descriptor, text, seconds):
    """What the terminal shows, until `text` appears or the process ends."""
    shown, end = b"", time.monotonic() + patience(seconds)
    while text not in shown:
        assert time.monotonic() < end, shown
        try:
            piece = os.read(descriptor, 4096)
        except OSError:
            break
        shown += piece
    return shown


@pytest.mark.parametrize("body", [ENDLESS, OUTSIDE])
def test_ctrl_c_leaves_a_clean_terminal(body):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(body),
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    try:
        before = read_until(ours, b"10/100 tokens", 60)
        process.send_signal(signal.SIGINT)
        shown = before + read_until(ours, b"interrupted", 60)
        process.communicate(timeout=patience(60))
    finally:
        process.kill()
        process.communicate()
        os.close(ours)
    assert process.returncode == 130
    assert b"Traceback" not in shown
    # The cursor was hidden by the bar and shown again; the bar's line was erased.
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert shown.rindex(b"\x1b[2K") > shown.rindex(b"10/100 tokens")


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(body, id=name)
        for name, body in {
            "outside Python": OUTSIDE,
            "in a callback": IN_A_CALLBACK,
            "in a destructor": IN_A_DESTRUCTOR,
            "taken for damage": TAKEN_FOR_DAMAGE,
            "taken for a fault": TAKEN_FOR_A_FAULT,
            "ignored": IGNORED,
            "slow to unwind": SLOW_TO_UNWIND,
            "at exit": AT_EXIT,
            "joining at exit": JOINING_AT_EXIT,
        }.items()
    ],
)
def test_ctrl_c_ends_whatever_is_under_way(body):
    process = subprocess.Popen(
        command(body), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=patience(30))
    finally:
        process.kill()
    assert (process.returncode, stderr) == (130, "interrupted\n")


def test_a_second_ctrl_c_does_not_wait():
    # The first one is given a minute here.
    code = code_of(SLOW_TO_UNWIND).replace(
        "process.install()", "process.GRACE = 60; process.install()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=-1)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert process.communicate(timeout=patience(20))[1] == b"interrupted\n"
    assert process.returncode == 130


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_ctrl_c_while_the_command_line_is_imported():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(longctx("--help"), stdout=-1, stderr=-1)
    signal.signal(signal.SIGINT, before)
    threads = Path(f"/proc/{process.pid}/task")
    # A second thread listens: imports begin.
    while len(list(threads.iterdir())) < 2:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=patience(30)) == (b"", b"interrupted\n")
    assert process.returncode == 130


def test_ctrl_c_stays_ignored_in_the_background():
    code = "from jax_longctx.cli import process; import signal; process.install(); print(1)"
    ignoring = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {code}"
    ending_in = f"{ignoring}; process.run(lambda: signal.raise_signal(signal.SIGINT))"
    done = subprocess.run([sys.executable, "-c", ending_in], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("body", [TALKATIVE, TALKATIVE_TABLE])
def test_closed_stdout_ends_quietly(body):
    process = subprocess.Popen(command(body), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(5) == b"word "
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=patience(60)) == 141
    assert stderr == b""


def shell(line, **variables):
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)


def test_a_reader_of_both_that_leaves_ends_quietly():
    line = '"$PYTHON" -c "$CODE" 2>&1 | head -c 5; exit ${PIPESTATUS[0]}'
    done = shell(line, CODE=code_of(TALKATIVE_NOTES))
    assert (done.returncode, done.stdout, done.stderr) == (141, "word ", "")


@pytest.mark.parametrize(
    ("arguments", "stdout", "why"),
    [
        ("--help", ">&-", "it is closed"),
        ("--help", ">/dev/full", "No space left on device"),
        ("ask none Who? -c none", "1</dev/null", "Bad file descriptor"),
    ],
)
def test_a_stdout_that_cannot_be_written_is_told_before_any_work(arguments, stdout, why):
    done = shell(f'"$PYTHON" -m jax_longctx {arguments} {stdout}')
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: stdout cannot be written: {why}; ")
    assert done.stderr.count("\n") == 1


def test_a_disk_that_fills_up_below_stdout(tmp_path):
    # Python would keep a module's bytecode cut off, and never be able to import it again.
    given = "export PYTHONDONTWRITEBYTECODE=1; ulimit -f 20; trap '' XFSZ; "
    line = given + '"$PYTHON" -c "$CODE" > "$OUT"'
    done = shell(line, CODE=code_of(TALKATIVE), OUT=str(tmp_path / "out"))
    assert done.returncode == 2
    assert done.stderr.startswith("error: stdout cannot be written: File too large; ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", ["ask - Who?", "generate"])
def test_closed_stdin_is_one_line(arguments, tmp_path):
    (tmp_path / "manifest.json").touch()
    done = shell(f'"$PYTHON" -m jax_longctx {arguments} -c "$MODEL" <&-', MODEL=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert "stdin is closed; pipe a text in" in done.stderr or "no prompt given" in done.stderr


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    """What prints to stdout or stderr by number must not write into a checkpoint."""
    code = (
        "from jax_longctx.cli import process; process.install(); import os, sys; "
        "print(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY))"
    )
    line = f'"$PYTHON" -c "{code}" "$FILE" <&- 2>&-'
    assert int(shell(line, FILE=str(tmp_path / "file")).stdout) > 2


def test_closed_stderr_does_not_stop_the_work():
    for closed in ("2>&-", "2>/dev/full"):
        done = shell(f'"$PYTHON" -m jax_longctx --help {closed}')
        assert done.returncode == 0 and "Exit codes" in done.stdout


def test_a_full_disk_is_no_fault_of_ours():
    done = subprocess.run(command(FULL_DISK), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.endswith("could not be written: No space left on device; free some space\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("error", ["RuntimeError", "EOFError"])
def test_our_own_faults_show_a_traceback(error):
    faulty = FAULTY.replace("{error}", error)
    done = subprocess.run(command(faulty), capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.rstrip().endswith(f"{error}: a fault of ours")


def test_prompt_that_is_no_utf8(tmp_path):
    (tmp_path / "manifest.json").touch()
    done = subprocess.run(longctx("generate", b"key \xff", "-c", tmp_path), capture_output=True)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: the prompt is not UTF-8")
    assert done.stderr.count(b"\n") == 1


def test_the_thread_that_hears_ctrl_c_is_not_started_by_an_import():
    assert "interrupts" not in {thread.name for thread in threading.enumerate()}
