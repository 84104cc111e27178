import functools
import json
import signal
import types
from unittest.mock import create_autospec

import jax
import pytest

from jax_longctx import sharding
from jax_longctx.cli import process
from jax_longctx.errors import ConfigError
from tests.jax_longctx.cli.conftest import refused
from tests.jax_longctx.cli.two_processes import ended, start
from tests.jax_longctx.serving.tiny import wait_until

TEXT = "The pass key is 12345. Remember it. "
LIMIT = ("--max-tokens", 6, "--chunk", 64)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def begin(cache):
    """Starts processes; those that a failed test leaves behind are killed."""
    began = []
    yield functools.partial(start, cache=cache, began=began)
    for child in began:
        child.kill()
        child.communicate()


@pytest.mark.thorough
def test_two_processes_answer_as_one_also_after_a_kill(checkpoint, begin, run, tmp_path):
    given, rows = tmp_path / "in.jsonl", [{"id": n, "prompt": TEXT * (1 + n % 3)} for n in range(8)]
    rows[3] = {"prompt": 5}
    rows[5] = {"file": "book.txt", "questions": ["Who?", "Why?"]}
    (tmp_path / "book.txt").write_text(TEXT * 4)
    given.write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = ("-c", checkpoint, *LIMIT, "--rows", 2, "--temperature", 0.7)
    one = tmp_path / "one.jsonl"
    # One of the rows fails.
    assert run("batch", given, one, *common).exit_code == 3
    two = tmp_path / "two.jsonl"
    command = ["batch", given, two, *common, "--mesh", "data=2"]
    leader, other = begin(command, count=2)
    journal = tmp_path / "two.jsonl.journal"
    # Somewhere between the first batch on the disk and the last.
    wait_until(lambda: journal.exists() and journal.read_bytes().count(b"\n") > 1, seconds=120)
    assert leader.poll() is None
    leader.send_signal(signal.SIGKILL)
    (code, *_), (code_1, _, said) = ended([leader, other], seconds=60)
    assert code == -signal.SIGKILL and code_1 not in (0, -signal.SIGKILL)
    assert "another process of the job has ended" in said or "another task died" in said
    (code, out, said), (code_1, out_1, said_1) = ended(begin(command, count=2))
    # The first process writes the rows and counts them.
    assert (code, code_1) == (3, 0), said + said_1
    assert "8 rows, 1 with an error" in said
    assert (out, out_1) == ("", "")
    assert two.read_bytes() == one.read_bytes()


@pytest.mark.thorough
def test_answers_are_those_of_one_process_and_printed_once(checkpoint, begin, run, tmp_path):
    book = tmp_path / "book.txt"
    book.write_text(TEXT * 4)
    how = ("--method", "star", "--set", "block=64")
    common = ("ask", book, "Who?", "-c", checkpoint, *how, *LIMIT, "--json")
    alone = run(*common, code=0)
    command = (*common, "--mesh", "seq=2", "--save-context", tmp_path / "kept")
    (code, first, said), (code_1, second, said_1) = ended(begin(command, count=2))
    assert (code, code_1) == (0, 0), said + said_1
    assert json.loads(first)["answer"] == json.loads(alone.stdout)["answer"]
    assert second == ""


@pytest.mark.slow
def test_an_evaluation_of_two_processes_has_the_rows_of_one(checkpoint, begin, run, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Rain falls. " * 20)
    common = ["eval", "run", "-c", checkpoint, "-t", f"passkey:haystack={text}", "--chunk", 256]
    common += ["--length", 200, "--trials", 3, "--batch", 2]
    assert run(*common, "-o", tmp_path / "one").exit_code == 0
    two = [*common, "-o", tmp_path / "two", "--mesh", "data=2"]
    (code, out, said), (code_1, *nothing, said_1) = ended(begin(two, count=2))
    assert (code, code_1) == (0, 0), said + said_1
    assert "first number is the key" in out and "3 rows;" in said
    assert nothing == [""] and "rows" not in said_1
    alone, both = (
        [json.loads(line) for line in (tmp_path / name / "rows.jsonl").read_text().splitlines()]
        for name in ("one", "two")
    )
    assert alone[0] == both[0] and len(both) == 4
    own = ("mesh", "seconds", "compiled", "crc32")
    for one, other in zip(alone[1:], both[1:], strict=True):
        assert other["mesh"] == {"data": 2, "seq": 1, "tensor": 1}
        assert other == one | {key: other[key] for key in own}
    assert (tmp_path / "two" / "report.html").is_file()


def test_options_that_do_not_go_together(run):
    two = ["--processes", "2", "--coordinator"]
    for options, message in [
        (["--processes", "2"], "goes with --coordinator HOST:PORT and --process I"),
        (["--process", "1"], "go with --processes N"),
        (["--processes", "two"], "--processes is 'two'; expected a number, or auto"),
        ([*two, "here", "--process", "1"], "--coordinator is 'here'; expected HOST:PORT"),
        ([*two, "here:1", "--process", "2"], "--process must be from 0 to 1"),
    ]:
        refused(run(*options, "methods", "full"), message)
    # One process joins nothing.
    assert run("--processes", "1", "methods", "--help").exit_code == 0
    assert process.number() is None and process.is_leader()


STEP = {"SLURM_STEP_NODELIST": "node[1-2]", "SLURM_PROCID": "0"}


def test_launchers_that_start_several():
    for variables, several in [
        ({}, False),
        ({**STEP, "SLURM_NTASKS": "2"}, True),
        ({**STEP, "SLURM_NTASKS": "1"}, False),
        # A batch script, outside of any step.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, True),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "0"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"MEGASCALE_NUM_SLICES": "2"}, True),
    ]:
        assert process.announced(variables) is several, variables


def test_the_job_is_joined_as_the_launcher_says(run, monkeypatch):
    joined = create_autospec(jax.distributed.initialize)
    monkeypatch.setattr(jax.distributed, "initialize", joined)
    job = {"COORDINATOR_ADDRESS": "host:1234", "NUM_PROCESSES": "4", "PROCESS_ID": "3"}
    for variables in (
        {**STEP, "SLURM_NTASKS": "2"},
        {f"JAX_{key}": value for key, value in job.items()},
    ):
        for key, value in variables.items():
            monkeypatch.setenv(key, value)
        assert run("methods", "--help").exit_code == 0
    given = [call.args for call in joined.call_args_list]
    assert given == [(None, None, None), ("host:1234", 4, 3)]
    times = [call.kwargs["heartbeat_timeout_seconds"] for call in joined.call_args_list]
    assert max(times) <= 20
    # Every process needs a device.
    devices = [types.SimpleNamespace(process_index=n // 2) for n in range(4)]
    monkeypatch.setattr(sharding.jax, "devices", lambda: devices)
    with pytest.raises(ConfigError, match=r"leaves process 1 without a device.* 4 devices"):
        sharding.make_mesh(data=2)
