"""`batch` and `eval run` on replicas beside one process, also where processes are killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet
import pytest

from jax_longctx.evaluation.rows import read_rows
from tests.jax_longctx.cli.tiny_model import converted
from tests.jax_longctx.replicas.ray import environment, needs_ray
from tests.patience import patience

pytestmark = [pytest.mark.slow, pytest.mark.long, needs_ray]

BOOK = "The pass key is 12345. Remember it. "
ROWS = [
    {
        "id": f"{text}-{i}",
        "context": f"Text {text}. {BOOK}",
        "question": f"Is it {'not ' * (i % 3)}{i}?",
    }
    for text in range(8)
    for i in range(10)
]
random.Random(0).shuffle(ROWS)
BATCH = ("--max-tokens", 6, "--rows", 2, "--temperature", 1.0)
FAST = {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
FAST["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
EVAL = ("eval", "run", "-m", "full", "-m", "streaming-llm:budget=64,chunk=32", "--batch", 2)
EVAL += ("-t", "passkey", "-t", "vt", "--length", 256, "--length", 448, "--trials", 5)


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Starts the command in a folder with the model and rows."""
    folder, model = tmp_path_factory.mktemp("replicas"), converted(tmp_path_factory)
    rows = [*ROWS, {"prompt": ""}, {"context": BOOK, "questions": ["Who?", "Why?"]}]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = dict.fromkeys(["id", *(key for row in rows for key in row)])
    table = pyarrow.Table.from_pylist([columns | row for row in rows])
    pyarrow.parquet.write_table(table, folder / "in.parquet", row_group_size=50)
    how = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    told = environment(JAX_COMPILATION_CACHE_DIR=str(folder / "programs"), **FAST)

    def start(*given):
        arguments = [*map(str, given), "-c", str(model)]
        return subprocess.Popen([sys.executable, "-m", "jax_longctx", *arguments], env=told, **how)

    start.folder, start.model, start.told = folder, str(model), told
    return start


def ended(child, code):
    _, said = child.communicate(timeout=patience(300))
    assert child.returncode == code, said
    return said


@pytest.fixture(scope="module")
def whole(command):
    """The output of one process, and its origin."""
    ended(command("batch", "in.jsonl", "one.jsonl", *BATCH), 3)
    return output(command, "one.jsonl")


def output(command, name):
    return [(command.folder / f"{name}{end}").read_bytes() for end in ("", ".origin")]


def test_replicas_write_what_one_process_writes(command, whole):
    rows = (command.folder / "in.parquet").as_uri()
    said = ended(command("batch", rows, "two.jsonl", *BATCH, "--replicas", 2), 3)
    assert output(command, "two.jsonl") == whole
    assert "82 rows in " in said and "82 rows, 1 with an error" in said and "[20" not in said


def family(pid):
    """The processes below one, with their commands."""
    found, left = {}, [pid]
    while left:
        each = left.pop()
        try:
            tasks = Path(f"/proc/{each}/task")
            left += [int(n) for t in tasks.iterdir() for n in (t / "children").read_text().split()]
            found[each] = Path(f"/proc/{each}/cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
    return found


def kill_when_answering(child, journal, words):
    """Kills a process whose command has the words, once the journal has answers."""
    until = time.monotonic() + patience(240)
    while time.monotonic() < until and child.poll() is None:
        if journal.exists() and journal.read_text().count("\n") > 3:
            for pid, told in family(child.pid).items():
                if words in told:
                    os.kill(pid, signal.SIGKILL)
                    return
        time.sleep(0.05)
    raise AssertionError(f"no {words} was killed: {child.stderr.read()}")


@pytest.mark.parametrize("words, code", [("jax_longctx", -9), ("raylet/raylet", None)])
def test_a_killed_process_loses_nothing(command, whole, words, code):
    # No name of the command has the words.
    name = f"killed{code}.jsonl"
    child = command("batch", "in.jsonl", name, *BATCH, "--replicas", 2)
    kill_when_answering(child, command.folder / f"{name}.journal", words)
    child.communicate(timeout=patience(300))
    assert code is None or child.returncode == code
    # One process goes on with what replicas began.
    said = ended(command("batch", "in.jsonl", name, *BATCH), 3)
    # Replicas outlive their node's process for a moment, which may do for the last rows.
    assert "going on: " in said or (code is None and "is complete already" in said)
    assert output(command, name) == whole


# What replicas do in place of answering a batch of rows, beside it.
WITHIN = """
import sys
from pathlib import Path

import jax_longctx
from jax_longctx.batch import BatchOptions, run, run_batch
from jax_longctx.errors import LongctxError
from jax_longctx.replicas import Replicas

(MODEL, TOLD), made = sys.argv[1:], run.computing

def opened():
    def computing(*given):
        compute = made(*given)

        def answer(batch):
            rows = {row for part in batch["parts"] for row, _ in part["places"]}
            exec(TOLD)
            return compute(batch)

        return answer

    run.computing = computing
    return jax_longctx.load(MODEL)

try:
    options = BatchOptions(rows=2, max_tokens=6)
    replicas = Replicas(2, opened)
    run_batch(replicas, Path("few.jsonl"), Path("few.out"), options)
except LongctxError as error:
    print(error)
"""

# Row 9 ends the process that first answers it, row 5 each one.
DEADLY = """
import os, signal
from pathlib import Path

once = Path("once")
if 5 in rows or (9 in rows and not once.exists()):
    once.write_text("") if 9 in rows else None
    os.kill(os.getpid(), signal.SIGKILL)
"""
COUNTING = """
with open("read", "a") as file:
    file.write("1" * len(batch["parts"]) + chr(10))
"""


@pytest.fixture
def answered(command):
    """What a run of replicas over rows says, which do something beside answering."""

    def run(rows, does):
        (command.folder / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (command.folder / "few.out").unlink(missing_ok=True)
        code = [sys.executable, "-c", WITHIN, command.model, does]
        told = {"env": command.told, "cwd": command.folder, "timeout": patience(300)}
        done = subprocess.run(code, capture_output=True, text=True, **told)
        assert not done.stderr and done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_replicas_read_a_text_of_scattered_rows_once(command, answered):
    rows = [row for row in ROWS if row["id"] < "6"]
    assert answered(rows, COUNTING) == ""
    assert (command.folder / "read").read_text().count("1") == 6
    found = map(json.loads, (command.folder / "few.out").read_text().splitlines())
    assert [line["id"] for line in found] == [row["id"] for row in rows]


def test_a_row_that_ends_its_replicas_is_named_when_all_else_is_done(command, answered):
    some = sorted(ROWS, key=lambda row: row["id"])[:12]
    rows = [{**row, "context": f"{row['id']}. {BOOK}"} for row in some]
    said = answered(rows, DEADLY)
    assert "line 6: the replica ended each of the 4 times" in said, said
    journal = (command.folder / "few.out.journal").read_text()
    kept = {json.loads(line).get("row") for line in journal.splitlines()}
    missing = {*range(12)} - kept
    # No more than its batch. The other one that ended a replica went on.
    assert 5 in missing and len(missing) <= 2 and (command.folder / "once").exists()
    few = ("batch", "few.jsonl", "few.out", "--max-tokens", 6, "--rows", 2)
    assert "going on: " in ended(command(*few), 0)


def test_eval_on_replicas_has_the_rows_and_the_report_of_one_process(command):
    ended(command(*EVAL, "-o", "e1"), 0)
    ended(command(*EVAL, "-o", "e2", "--replicas", 2), 0)
    one, two = (read_rows(command.folder / name) for name in ("e1", "e2"))
    for row in [*one, *two]:
        for times in ("seconds", "compiled"):
            row.pop(times, None)
    assert len(one) == 40 and one == two
    assert not all("refused" in row for row in one)
    reports = [(command.folder / name / "report.md").read_text() for name in ("e1", "e2")]
    first, second = ([line for line in each.splitlines() if " ms " not in line] for each in reports)
    assert first == second
