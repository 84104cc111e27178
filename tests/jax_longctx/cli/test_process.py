import os
import pty
import random
import signal
import subprocess
import sys
import threading
import time
from importlib.machinery import ExtensionFileLoader
from pathlib import Path

import pytest

from jax_longctx.cli import process
from tests.jax_longctx.cli.interrupting import LIMIT, Campaign, Try, commands
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
TRYING = """
    try:
        begun()
        time.sleep(60)
"""
SLOW_TO_UNWIND = (
    TRYING
    + """
    finally:
        print("noise", file=sys.stderr)
        time.sleep(60)
"""
)
CAUGHT = f"{TRYING}    except KeyboardInterrupt as error:\n        "
UNDER_WAY = {
    "outside Python": OUTSIDE,
    "in a callback": """
    def wait(phase, about):
        gc.callbacks.clear()
        begun()
        time.sleep(60)
    gc.callbacks.append(wait)
    gc.collect()
    time.sleep(60)
""",
    "in a destructor": """
    class Doomed:
        def __del__(self):
            begun()
            time.sleep(60)
    Doomed()
    time.sleep(60)
""",
    "taken for damage": f'{CAUGHT}raise jax_longctx.errors.CheckpointError("damaged") from error',
    "taken for a fault": f'{CAUGHT}raise ValueError("damaged") from error',
    "ignored": f"{CAUGHT}pass",
    "slow to unwind": SLOW_TO_UNWIND,
    "at exit": "    atexit.register(lambda: begun() or time.sleep(60))",
    "joining at exit": """
    threading.Thread(target=lambda: time.sleep(0.5) or begun() or time.sleep(60)).start()
""",
}
TALKATIVE = """
    import rich.console
    while True:
        {write}("word " * 1000)
"""
WRITE, NOTE, PRINT = "Terminal().write", "Terminal().note", "rich.console.Console().print"


def code_of(body):
    return STAND_IN.replace("{body}", body.strip("\n"))


def talking(write):
    return code_of(TALKATIVE.replace("{write}", write))


def started(code, **how):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", code], **pipes | how)


def shell(line, **variables):
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=environment)


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
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    process = started(code_of(body), stdin=theirs, stderr=theirs, env=environment)
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


@pytest.mark.parametrize("name", UNDER_WAY)
def test_ctrl_c_ends_whatever_is_under_way(name):
    process = started(code_of(UNDER_WAY[name]), text=True)
    try:
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=patience(30))
    finally:
        process.kill()
    assert (process.returncode, stderr) == (130, "interrupted\n")


def test_a_second_ctrl_c_does_not_wait():
    # The first one is given a minute here.
    given = "process.GRACE = 60; process.install()"
    process = started(code_of(SLOW_TO_UNWIND).replace("process.install()", given))
    assert process.stdout.readline() == b"begun\n"
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert process.communicate(timeout=patience(20))[1] == b"interrupted\n"
    assert process.returncode == 130


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's list of threads")
def test_ctrl_c_while_the_command_line_is_imported():
    command = [sys.executable, "-m", "jax_longctx", "--help"]
    process = subprocess.Popen(command, stdout=-1, stderr=-1)
    threads = Path(f"/proc/{process.pid}/task")
    # A second thread listens: imports begin.
    while len(list(threads.iterdir())) < 2:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=patience(30)) == (b"", b"interrupted\n")
    assert process.returncode == 130
    # An import here starts no such thread.
    assert "interrupts" not in {thread.name for thread in threading.enumerate()}


def test_ctrl_c_stays_ignored_in_the_background():
    code = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    code += "from jax_longctx.cli import process; process.install(); "
    code += "process.run(lambda: signal.raise_signal(signal.SIGINT))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("write", [WRITE, PRINT])
def test_closed_stdout_ends_quietly(write):
    process = started(talking(write))
    assert process.stdout.read(5) == b"word "
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=patience(60)) == 141
    assert stderr == b""


def test_a_reader_of_both_that_leaves_ends_quietly():
    line = '"$PYTHON" -c "$CODE" 2>&1 | head -c 5; exit ${PIPESTATUS[0]}'
    done = shell(line, CODE=talking(NOTE))
    assert (done.returncode, done.stdout, done.stderr) == (141, "word ", "")


# As Python says that the system gives no thread.
SHORT = '"$PYTHON" -c "$SHORT"'
LONGCTX, NO_STDOUT = '"$PYTHON" -m jax_longctx', "error: stdout cannot be written: "
# Python would keep a module's bytecode cut off, and never be able to import it again.
FULL = "export PYTHONDONTWRITEBYTECODE=1; ulimit -f 20; trap '' XFSZ; "


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (f"{LONGCTX} --help >&-", f"{NO_STDOUT}it is closed; "),
        (f"{LONGCTX} --help >/dev/full", f"{NO_STDOUT}No space left on device; "),
        (f"{LONGCTX} ask none Who? -c none 1</dev/null", f"{NO_STDOUT}Bad file descriptor; "),
        # A disk that fills up below it.
        (f'{FULL}"$PYTHON" -c "$TALKATIVE" > out', f"{NO_STDOUT}File too large; "),
        ('"$PYTHON" -c "$WRITING"', "could not be written: No space left on device; free some"),
        (f"{LONGCTX} ask - Who? -c . <&-", "stdin is closed; pipe a text in"),
        (f"{LONGCTX} generate -c . <&-", "no prompt given"),
        (f"mkdir a; cd a; rmdir ../a; {LONGCTX} methods", "error: the working directory cannot"),
        (f"ulimit -v 1500000; echo a | {LONGCTX} ask - Who? -c .", "ulimit -v allows 1.4 GiB of"),
        (f"ulimit -v 4000000; {SHORT}", "ulimit -v allows 3.8 GiB of address space"),
        (
            f"mkfifo f; {LONGCTX} ask f Who? -c .",
            "f cannot be read: it is a FIFO, a socket or a device; give the path",
        ),
        (f"{LONGCTX} generate $'key \\xff' -c .", "error: the prompt is not UTF-8"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_line(tmp_path, line, message):
    (tmp_path / "manifest.json").touch()
    writing = code_of('    with open("/dev/full", "w") as file:\n        file.write("much")')
    short = code_of("""    raise RuntimeError("can't start new thread")""")
    codes = {"TALKATIVE": talking(WRITE), "WRITING": writing, "SHORT": short}
    done = shell(f"cd {tmp_path}; {line}", **codes)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")


def test_no_file_gets_the_number_of_a_closed_stream(tmp_path):
    """What prints to stdout or stderr by number must not write into a checkpoint."""
    code = (
        "from jax_longctx.cli import process; process.install(); import os, sys; "
        "print(os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY))"
    )
    line = f'"$PYTHON" -c "{code}" "$FILE" <&- 2>&-'
    assert int(shell(line, FILE=str(tmp_path / "file")).stdout) > 2
    # A closed stderr does not stop the work.
    for closed in ("2>&-", "2>/dev/full"):
        done = shell(f"{LONGCTX} --help {closed}")
        assert done.returncode == 0 and "Exit codes" in done.stdout


@pytest.mark.parametrize("error", ["RuntimeError", "EOFError"])
def test_our_own_faults_show_a_traceback(error):
    code = code_of(f'    raise {error}("a fault of ours")')
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.rstrip().endswith(f"{error}: a fault of ours")


COMMANDS = 2


@pytest.mark.long
@pytest.mark.slow
def test_ctrl_c_at_random_moments_of_commands(tmp_path, record_property):
    seed = int.from_bytes(os.urandom(4))
    record_property("seed", seed)
    campaign = Campaign(tmp_path, seed)
    drawn = random.Random(seed).sample(list(commands(tmp_path)), COMMANDS)
    for name in drawn:
        found = campaign.interrupt(name)
        assert found.right, f"seed {seed}, of {drawn}, {name}: {found}"


def test_the_campaign_sees_what_is_wrong():
    right = {"after": 1.0, "seconds": 0.1, "code": 130}
    right["stderr"] = "reading: 10/100 tokens\n6 rows in 5 s, 0 with an error\ninterrupted\n"
    assert Try(**right).right
    wrong = [{"code": 0}, {"code": -signal.SIGINT}, {"seconds": LIMIT}, {"stderr": ""}]
    wrong.append({"stderr": "error: the checkpoint is damaged\n"})
    for said in (
        "Traceback (most recent call last):",
        "ValueError: the row is damaged",
        "error: the row is damaged",
    ):
        wrong.append({"stderr": f"{said}\ninterrupted\n"})
    for changes in wrong:
        assert not Try(**right | changes).right, changes


def test_nothing_is_raised_where_an_extension_begins():
    """Jaxlib aborts the process at an exception in its import; then Ctrl-C ends it at once."""

    class Loader(ExtensionFileLoader):
        def exec_module(self, module):
            return process._begins_an_extension(sys._getframe())

    assert Loader("jaxlib._jax", "_jax.so").exec_module(None)
    assert not process._begins_an_extension(sys._getframe())
