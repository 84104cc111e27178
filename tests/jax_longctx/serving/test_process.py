"""The command: what it refuses, how it ends, and what it finds after kill -9."""

import os
import signal
import socket
import time

import openai
import pytest

from tests.jax_longctx.cli.tiny_model import converted
from tests.jax_longctx.serving.processes import Process

BOOK = "The pass key is 12345. Remember it. " * 8
SMALL = ("--length", 512, "--max-tokens", 64, "--max-question", 64, "--rows", 2, "--chunk", 64)
SMALL += ("--share-from", 64)


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
    """An answer of twelve tokens at most."""
    how = {"model": "model", "seed": 5, "max_tokens": 12, **how}
    more = {} if context is None else {"context": context}
    return client.completions.create(prompt="The pass key is", extra_body=more, **how)


@pytest.mark.slow
def test_kill_9_and_a_restart_lose_no_saved_context(begin, tmp_path):
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
    second = begin("--contexts", folder).wait()
    with second.http() as http, second.client() as client:
        assert http.get(f"/v1/contexts/{saved['id']}").json()["state"] == "saved"
        assert http.get(f"/v1/contexts/{lost['id']}").status_code == 404
        found = answer(client, saved["id"])
        assert found.choices[0].text == expected
        assert found.usage.prompt_tokens_details.cached_tokens == saved["tokens"]
    assert not (home / "0123.partial").exists()
    assert second.end()[0] == 0
    # Another model's or method's server does not see them.
    third = begin("--contexts", folder, "-m", "streaming-llm", "--set", "budget=128").wait()
    with third.http() as http:
        assert http.get("/v1/contexts").json()["data"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code", "last"),
    [(signal.SIGTERM, 0, None), (signal.SIGINT, 130, "interrupted")],
)
def test_signals_let_answers_finish(begin, number, code, last):
    server = begin("--ready-for", 32).wait()
    with server.client() as client:
        whole = answer(client, max_tokens=64, temperature=0).choices[0].text
        stream = answer(client, max_tokens=64, temperature=0, stream=True)
        texts = [next(iter(stream)).choices[0].text]
        server.child.send_signal(number)
        texts += [chunk.choices[0].text for chunk in stream]
        assert "".join(texts) == whole
    ended, said = server.ended(20)
    assert ended == code
    assert said[-1] == last if last else said[-1].startswith("serving model on ")


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


@pytest.mark.slow
def test_what_cannot_work_is_refused_at_once(begin, tmp_path):
    empty = tmp_path / "keys"
    empty.write_text("\n")
    marked = tmp_path / "marked"
    marked.write_bytes(b"\xef\xbb\xbf\n")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for arguments, said in [
            (("--port", port), f"error: cannot listen on 127.0.0.1:{port}: Address already in use"),
            (("--api-key-file", empty), "has no key; write one a line"),
            (("--api-key-file", marked), "has no key; write one a line"),
            (("--max-tokens", 512), "allow longer texts (--length) or shorter answers"),
            (("--rows", 0), "error: --rows must be at least 1, got 0"),
            (("-m", "auto"), "name a method here"),
        ]:
            code, lines = begin(*arguments).ended()
            assert code == 2, lines
            assert said in lines[-1]


def start_job(begin, count, *arguments, **how):
    """One server over that many processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    how = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", ""), **how}
    return [
        begin(
            *("--mesh", f"seq={count}"),
            *arguments,
            job=(
                *("--coordinator", f"localhost:{port}"),
                *("--processes", count),
                *("--process", number),
            ),
            **how,
        )
        for number in range(count)
    ]


@pytest.mark.long
@pytest.mark.thorough
def test_two_processes_answer_as_one(begin, tmp_path):
    alone = begin("--contexts", tmp_path / "one", "-m", "quest").wait()
    leader, other = start_job(begin, 2, "--contexts", tmp_path / "two", "-m", "quest")
    leader.wait()
    found = []
    for server in (alone, leader):
        with server.http() as http, server.client() as client:
            name = http.post("/v1/contexts", json={"text": BOOK, "save": True}).json()["id"]
            texts = [answer(client, name, seed=seed).choices[0].text for seed in range(3)]
            texts.append(answer(client).choices[0].text)
            with pytest.raises(openai.BadRequestError):
                answer(client, max_tokens=1000)
            found.append(texts)
    assert found[0] == found[1]
    # The leader shows the other that it lives while there is nothing to do.
    time.sleep(12)
    with leader.client() as client:
        assert answer(client).choices[0].text == found[0][-1]
    assert leader.end(seconds=30)[0] == 0
    assert other.ended(30)[0] == 0


@pytest.mark.thorough
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_dies_ends_the_others(begin, tmp_path, killed):
    servers = start_job(begin, 2, "--contexts", tmp_path)
    servers[0].wait()
    with servers[0].client() as client:
        assert answer(client).choices[0].text
    servers[killed].child.kill()
    began = time.monotonic()
    code, said = servers[1 - killed].ended(30)
    assert time.monotonic() - began < 20
    assert code not in (0, None)
    # The first is ours, the second is JAX's where its heartbeat finds out first.
    ends = ("another process of the job has ended", "another task died")
    assert any(end in line for line in said for end in ends), said


@pytest.mark.thorough
def test_several_processes_need_a_folder_for_contexts(begin):
    for server in start_job(begin, 2):
        code, said = server.ended(60)
        assert code == 2
        assert "a server of several processes needs --contexts DIR" in said[-1]
