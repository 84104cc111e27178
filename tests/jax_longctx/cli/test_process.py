"""Whole processes: Ctrl-C leaves a clean terminal, a closed stdout ends quietly, faults show."""

import os
import pty
import signal
import subprocess
import sys
import time

# A process whose model is a stand-in: `load` returns an object with the few parts `generate` uses.
# Ctrl-C is heard also where the tests run in the background of a script.
STAND_IN = """
import signal, sys, time, types
signal.signal(signal.SIGINT, signal.default_int_handler)
import jax_longctx
from jax_longctx.cli.main import main

class Tokenizer:
    def encode(self, text, bos=False):
        return [1] * len(text)

class Model:
    tokenizer = Tokenizer()
    def generate(self, text, *, progress, on_text, **options):
        {body}

jax_longctx.load = lambda *args, **options: Model()
sys.argv = ["jax-longctx", "generate", *sys.argv[1:], "-c", "none"]
main()
"""
ENDLESS = """
        progress(types.SimpleNamespace(done=10, total=100))
        while True:
            time.sleep(0.01)
"""
TALKATIVE = """
        while True:
            on_text(0, "word " * 1000)
"""
FAULTY = """
        raise RuntimeError("a fault of ours")
"""


def command(body, prompt="a prompt"):
    return [sys.executable, "-c", STAND_IN.replace("{body}", body.strip()), prompt]


def read_until(descriptor, text, seconds):
    """What the terminal shows, until `text` appears or the process ends."""
    shown, end = b"", time.monotonic() + seconds
    while text not in shown:
        assert time.monotonic() < end, shown
        try:
            piece = os.read(descriptor, 4096)
        except OSError:
            break
        shown += piece
    return shown


def test_ctrl_c_leaves_a_clean_terminal():
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(ENDLESS),
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
        stdout, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.communicate()
        os.close(ours)
    assert process.returncode == 130
    assert stdout == b""
    assert b"Traceback" not in shown
    # The cursor was hidden by the bar and shown again; the bar's line was erased.
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l")
    assert shown.rindex(b"\x1b[2K") > shown.rindex(b"10/100 tokens")


def test_closed_stdout_ends_quietly():
    process = subprocess.Popen(command(TALKATIVE), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.read(5) == b"word "
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 141
    assert stderr == b""


def test_our_own_faults_show_a_traceback():
    done = subprocess.run(command(FAULTY), capture_output=True, text=True)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.rstrip().endswith("RuntimeError: a fault of ours")


def test_prompt_that_is_no_utf8():
    done = subprocess.run(command(FAULTY, b"key \xff"), capture_output=True)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: the prompt is not UTF-8")
    assert done.stderr.count(b"\n") == 1
