import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from unittest.mock import create_autospec

import httpx
import openai
import pytest
from typer.testing import CliRunner

import jax_longctx
from jax_longctx.cli import process
from jax_longctx.cli.main import app
from tests.jax_longctx.cli.conftest import last_of_each
from tests.jax_longctx.cli.tiny_model import converted
from tests.jax_longctx.cli.two_processes import COMMAND, environment, jobs
from tests.jax_longctx.serving.tiny import BOOK, asked_plainly, generated
from tests.patience import patience

SMALL = ("--length", 512, "--max-tokens", 64, "--max-question", 64, "--rows", 2, "--chunk", 64)
SMALL += ("--share-from", 64)


class Process:
    """A server's process; `said` are the lines of its stderr, `url` is known after `wait`."""

    def __init__(self, *arguments, job=(), cache=None, code=COMMAND, **told):
        words = (*job, "serve", "--port", 0, *arguments)
        self.child = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, words)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env=environment(cache) | told,
        )
        self.said, self.url = [], None
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.child.stderr:
            self.said.append(line.rstrip("\n"))

    def wait(self, seconds=120):
        end = time.monotonic() + patience(seconds)
        while time.monotonic() < end:
            found = re.search(r"on (http://\S+)/v1, ", "\n".join(self.said))
            if found:
                self.url = found[1]
                return self
            assert self.child.poll() is None, "\n".join(self.said)
            time.sleep(0.05)
        raise AssertionError("\n".join(self.said))

    def end(self, number=signal.SIGTERM, seconds=60):
        """Sends the signal; returns the exit code and what was written to stderr last."""
        self.child.send_signal(number)
        return self.ended(seconds)

    def ended(self, seconds=60):
        """Waits for the end; returns the exit code and the lines of stderr."""
        code = self.child.wait(patience(seconds))
        self._reader.join(patience(10))
        return code, self.said

    def kill(self):
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        self._reader.join(patience(10))
        self.child.stderr.close()

    def client(self, key="none"):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def http(self):
        return httpx.Client(base_url=self.url, timeout=patience(120))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return converted(tmp_path_factory)


@pytest.fixture
def begin(checkpoint, tmp_path_factory):
    """Starts servers of the checkpoint; those that a failed test leaves behind are killed."""
    cache = tmp_path_factory.getbasetemp() / "compiled"
    began = []

    def start(*arguments, **how):
        began.append(Process("-c", checkpoint, *SMALL, *arguments, cache=cache, **how))
        return began[-1]

    yield start
    for server in began:
        server.kill()


def answer(client, context=None, **how):
    how = {"model": "model", "seed": 5, "max_tokens": 12, **how}
    more = {} if context is None else {"context": context}
    return client.completions.create(prompt="The pass key is", extra_body=more, **how)


@pytest.mark.slow
def test_kill_9_and_restarts_lose_no_saved_context_and_signals_let_answers_finish(begin, tmp_path):
    folder = tmp_path / "contexts"
    first = begin("--contexts", folder).wait()
    with first.http() as http, first.client() as client:
        saved = http.post("/v1/contexts", json={"text": BOOK, "save": True}).json()
        lost = http.post("/v1/contexts", json={"text": BOOK + "x"}).json()
        expected = answer(client, saved["id"]).choices[0].text
    assert first.end(signal.SIGKILL)[0] == -signal.SIGKILL
    # What a server that is killed while it saves leaves behind.
    (home,) = folder.iterdir()
    (home / "0123.partial").mkdir()
    for number, code, last in (
        (
            signal.SIGTERM,
            0,
            r'20.* "POST /v1/completions" 200 model=model context=- in=\d+ out=64 ',
        ),
        (signal.SIGINT, 130, "interrupted"),
    ):
        server = begin("--contexts", folder, "--ready-for", 32).wait()
        with server.http() as http, server.client() as client:
            assert http.get(f"/v1/contexts/{saved['id']}").json()["state"] == "saved"
            assert http.get(f"/v1/contexts/{lost['id']}").status_code == 404
            found = answer(client, saved["id"])
            assert found.choices[0].text == expected
            assert found.usage.prompt_tokens_details.cached_tokens == saved["tokens"]
            assert not (home / "0123.partial").exists()
            whole = answer(client, max_tokens=64, temperature=0).choices[0].text
            with socket.create_connection((http.base_url.host, http.base_url.port)) as silent:
                # Who holds back a body does not hold up the end.
                silent.sendall(b"POST /v1/contexts HTTP/1.1\r\nhost: localhost\r\n")
                silent.sendall(b"content-type: application/json\r\ncontent-length: 9\r\n\r\n{")
                stream = answer(client, max_tokens=64, temperature=0, stream=True)
                texts = [next(iter(stream)).choices[0].text]
                server.child.send_signal(number)
                texts += [chunk.choices[0].text for chunk in stream]
                assert b" 503 " in silent.recv(1000).splitlines()[0]
            assert "".join(texts) == whole
        ended, said = server.ended(20)
        assert ended == code and re.match(last, said[-1]), said


CRASHING = (
    "from jax_longctx.engine.running import RunningBatch\n"
    "def step(self, most=0): raise RuntimeError('the device is gone')\n"
    "RunningBatch.step = step\n"
    "from jax_longctx.__main__ import main; main()"
)


@pytest.mark.slow
def test_a_fault_of_the_scheduler_ends_the_process(begin, tmp_path):
    server = begin(code=CRASHING, TMPDIR=str(tmp_path)).wait()
    assert list(tmp_path.glob("jax-longctx-contexts-*"))
    with server.client() as client, pytest.raises(openai.APIConnectionError):
        answer(client)
    code, said = server.ended(20)
    assert code == 1
    assert said[-1] == "error: the scheduler failed: RuntimeError: the device is gone"
    assert not list(tmp_path.glob("jax-longctx-contexts-*"))


def test_what_cannot_work_is_refused_at_once(checkpoint, tmp_path, monkeypatch):
    keys, marked, pipe = (tmp_path / name for name in ("keys", "marked", "pipe"))
    os.mkfifo(pipe)
    keys.write_text("\n")
    marked.write_bytes(b"\xef\xbb\xbf\n")

    def refused(*arguments, limits=SMALL):
        words = last_of_each(["-c", checkpoint, *limits, "--port", 0, *arguments])
        result = CliRunner().invoke(app, ["serve", *words])
        assert result.exit_code == 2, result.output
        return result.stderr.splitlines()[-1]

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, said in [
            (("--port", port), f"error: cannot listen on 127.0.0.1:{port}: Address already in use"),
            (("--api-key-file", keys), "has no key; write one a line"),
            (("--api-key-file", marked), "has no key; write one a line"),
            (("--api-key-file", pipe), f"{pipe} cannot be read: it is a FIFO"),
            (("--max-tokens", 512), "allow longer texts (--length) or shorter answers"),
            (("--rows", 0), "error: --rows must be at least 1, got 0"),
            (("-m", "auto"), "name a method here"),
            (("--address", "auto"), "say how many with --replicas"),
            (("--replicas", 3, "--max-replicas", 2), "--max-replicas 2 needs --replicas of"),
            (("--replicas", 2), "--replicas needs --contexts DIR, a folder that all see"),
        ]:
            assert said in refused(*arguments)
        # Questions and answers have half of it.
        assert "cannot listen" in refused("--port", port, limits=("--length", 100))
        # The command alone takes this for a process of a job, whose end would be that of pytest.
        job = create_autospec(process, instance=True, number=lambda: 0)
        monkeypatch.setattr("jax_longctx.cli.serve.process", job)
        assert "a server of several processes needs --contexts DIR" in refused("--port", port)
    gc.collect()


# A leader that has nothing to do shows the others at once that it lives.
RESTLESS = f"from jax_longctx.serving import scheduler; scheduler.LIVES_SECONDS = 0.1; {COMMAND}"


def start_job(begin, count, *arguments):
    mesh = ("--mesh", f"seq={count}")
    return [begin(*mesh, *arguments, job=job, code=RESTLESS) for job in jobs(count)]


@pytest.mark.long
@pytest.mark.thorough
def test_two_processes_answer_as_one_and_end_together(begin, checkpoint, tmp_path):
    """At SIGTERM, and where either of them dies: these answer nothing, which would compile."""
    method, asks = jax_longctx.make_method("quest"), "The pass key is"
    alone = jax_longctx.load(checkpoint, method=method, chunk=64)
    text = alone.layout().context(BOOK)
    expected = [asked_plainly(alone, text, asks, seed=seed) for seed in range(3)]
    expected.append(generated(alone, asks, seed=5).text)
    job = ("--contexts", tmp_path / "contexts", "-m", "quest")
    leader, other = start_job(begin, 2, *job)
    leader.wait()
    with leader.http() as http, leader.client() as client:
        name = http.post("/v1/contexts", json={"text": BOOK, "save": True}).json()["id"]
        found = [answer(client, name, seed=seed).choices[0].text for seed in range(3)]
        assert [*found, answer(client).choices[0].text] == expected
        with pytest.raises(openai.BadRequestError):
            answer(client, max_tokens=1000)
    time.sleep(2)
    with leader.client() as client:
        assert answer(client).choices[0].text == expected[-1]
    assert leader.end(seconds=30)[0] == 0
    assert other.ended(30)[0] == 0
    for killed in (0, 1):
        servers = start_job(begin, 2, *job)
        servers[0].wait()
        servers[killed].child.kill()
        began = time.monotonic()
        code, said = servers[1 - killed].ended(30)
        assert time.monotonic() - began < patience(20)
        assert code not in (0, None)
        # The first is ours, the second is JAX's where its heartbeat finds out first.
        ends = ("another process of the job has ended", "another task died")
        assert any(end in line for line in said for end in ends), said
