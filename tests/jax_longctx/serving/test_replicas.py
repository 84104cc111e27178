import collections
import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

import jax_longctx
from tests.jax_longctx.cli.tiny_model import converted
from tests.jax_longctx.replicas.ray import environment, needs_ray
from tests.jax_longctx.serving.test_process import SMALL, Process, answer
from tests.jax_longctx.serving.tiny import asked_plainly
from tests.patience import patience

BOOKS, CLIENTS = 8, 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return converted(tmp_path_factory)


@pytest.fixture
def begin(checkpoint, tmp_path):
    """Starts replicas, with a mark in their environment; the end ends them all."""
    began = []

    def start(*arguments):
        words = ("-c", checkpoint, *SMALL, "--contexts", tmp_path / "contexts")
        told = environment(LONGCTX_TEST_MARK=str(tmp_path))
        mine = {name: told[name] for name in ("PYTHONPATH", "LONGCTX_TEST_MARK")}
        began.append(Process(*words, *arguments, cache=tmp_path / "compiled", **mine))
        return began[-1].wait(300)

    yield start
    for server in began:
        server.kill()
    for process in marked(tmp_path, "ray"):
        os.kill(process, signal.SIGKILL)


def marked(mark, title):
    """The processes of this test whose titles begin so."""
    found = []
    for process in Path("/proc").iterdir():
        try:
            given = (process / "cmdline").read_bytes(), (process / "environ").read_bytes()
        except OSError:
            continue
        if process.name.isdigit() and os.fsencode(f"LONGCTX_TEST_MARK={mark}\0") in given[1]:
            if re.match(title.encode(), given[0]):
                found.append(int(process.name))
    return found


def counted(http, name):
    """A counter's value of each replica."""
    page = http.get("/metrics").raise_for_status().text
    rows = re.findall(rf'^longctx_{name}_total{{replica="(\w+)"}} (\S+)$', page, re.MULTILINE)
    return {replica: float(value) for replica, value in rows}


def insisting(call, refused):
    """What the call returns, which is tried again as long as the server says so, or breaks off."""
    end = time.monotonic() + patience(120)
    while time.monotonic() < end:
        try:
            return call()
        except (openai.APIConnectionError, openai.InternalServerError) as error:
            refused[getattr(error, "status_code", "broken")] += 1
            time.sleep(0.2)
    raise AssertionError(refused)


def book(number):
    return f"Book {number}. " + "The pass key is 12345. Remember it. " * 5


def whole(model, book):
    """What `ask` answers."""
    return asked_plainly(model, model.layout().context(book), "The pass key is", seed=5)


@needs_ray
@pytest.mark.long
@pytest.mark.thorough
def test_clients_that_retry_get_right_answers_though_a_replica_is_killed(
    begin, checkpoint, tmp_path
):
    alone = jax_longctx.load(checkpoint, chunk=64)
    expected = [whole(alone, book(number)) for number in range(BOOKS)]
    server = begin("--replicas", 2)
    refused = collections.Counter()
    with server.http() as http, server.client() as client, ThreadPoolExecutor(CLIENTS) as pool:

        def read(number):
            made = http.post("/v1/contexts", json={"text": book(number)})
            return made.raise_for_status().json()

        # Each text is posted twice at the same time, and read once.
        made = list(pool.map(read, [*range(BOOKS)] * 2))
        while not min(counted(http, "read_tokens").values()):
            # The hash ring gave one replica all of them.
            expected.append(whole(alone, book(len(expected))))
            made.insert(len(expected) - 1, read(len(expected) - 1))
        books = len(expected)
        assert len({each["id"] for each in made}) == len(made) == books + BOOKS
        assert all(each["saved"] for each in made)
        before = counted(http, "read_tokens")
        assert sum(before.values()) == sum(each["tokens"] for each in made[:books])
        listed = http.get("/v1/contexts").json()["data"]
        assert {each["id"] for each in listed} == {each["id"] for each in made}

        def ask(number, count, after=None):
            """Asks on until `after` is set, and then so many times."""
            found, left, turn = [], count, 0
            while left:
                left, turn = left - (after is None or after.is_set()), turn + 1
                which = (number + turn) % len(made)
                call = lambda: answer(client, made[which]["id"])  # noqa: E731, B023
                found.append((which % books, insisting(call, refused)))
            return found

        def right(found):
            for which, each in (one for of_client in found for one in of_client):
                assert each.choices[0].text == expected[which]
                read_before = each.usage.prompt_tokens_details.cached_tokens
                assert read_before == made[which]["tokens"]

        right(pool.map(ask, range(CLIENTS), [1] * CLIENTS))
        stream = answer(client, made[0]["id"], stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == expected[0]
        assert not refused and not sum(counted(http, "contexts_loaded").values())
        one, _ = marked(tmp_path, r"ray::.*\bEngine\b")
        gone = threading.Event()
        asking = [pool.submit(ask, number, books, gone) for number in range(CLIENTS)]
        time.sleep(1)
        os.kill(one, signal.SIGKILL)
        killing = time.monotonic()
        gone.set()
        right(each.result() for each in asking)
        assert set(refused) <= {503, "broken"}, refused
        # Those of the killed one were found on the disk, and nothing was read again.
        (left,) = counted(http, "read_tokens").items() & before.items()
        loaded = counted(http, "contexts_loaded")
        assert 0 < loaded[left[0]] <= books
        while len(counted(http, "read_tokens")) < 2:
            assert time.monotonic() < killing + patience(240)
            time.sleep(0.5)
        # Also where the hash ring has changed again.
        right(pool.map(ask, range(CLIENTS), [books] * CLIENTS))
        assert sum(counted(http, "read_tokens").values()) == left[1]
        # What was deleted is not found in another replica's folder.
        for each in made:
            http.delete(f"/v1/contexts/{each['id']}").raise_for_status()
        assert not http.get("/v1/contexts").json()["data"]
        assert http.get(f"/v1/contexts/{made[0]['id']}").status_code == 404
        # What begun finishes.
        stream = answer(client, max_tokens=64, temperature=0, stream=True)
        next(iter(stream))
        # In the meantime others are told to come again.
        server.child.send_signal(signal.SIGTERM)
        while http.get("/ready").status_code == 200:
            time.sleep(0.01)
        with pytest.raises(openai.InternalServerError, match="shutting down"):
            answer(client)
        assert list(stream)[-1].choices[0].finish_reason == "length"
    code, lines = server.ended(120)
    assert code == 0, lines
    assert not marked(tmp_path, "ray")
    print(f"refused {dict(refused)}; loaded {loaded}")


@needs_ray
@pytest.mark.long
@pytest.mark.thorough
def test_who_may_not_ask_and_too_large_bodies_are_refused_at_the_door(begin, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    page = "https://example.org"
    server = begin(
        *("--replicas", 1, "--api-key-file", keys, "--max-body", 1, "--allow-origin", page)
    )
    with httpx.Client(base_url=server.url, timeout=patience(60)) as http:
        for path in ("/metrics", "/v1/contexts", "/v1/models"):
            given = {"authorization": "Bearer secret", "origin": page}
            for headers, code in ((given, 200), ({"origin": page}, 401)):
                found = http.get(path, headers=headers)
                assert found.status_code == code
                assert found.headers.get_list("access-control-allow-origin") == [page]
        assert http.post("/v1/contexts", json={"text": "x"}).status_code == 401
        post = lambda text: http.post("/v1/contexts", json={"text": text}, headers=given)  # noqa: E731
        large = post("x" * (1 << 20))
        assert large.status_code == 413 and large.json()["error"]["code"] == "body_too_large"
        assert http.get("/metrics", headers={"host": "evil", **given}).status_code == 200
        bodies_are_bounded_in_sum(http)
        # Ctrl-C lets an answer finish too, but waits for no body.
        with server.client("secret") as client, half_sent(http) as silent:
            stream = answer(client, max_tokens=64, temperature=0, stream=True)
            next(iter(stream))
            server.child.send_signal(signal.SIGINT)
            assert b" 503 " in silent.recv(10_000).splitlines()[0]
            assert list(stream)[-1].choices[0].finish_reason == "length"
            # Without the time that answers have.
            code, lines = server.ended(20)
    assert (code, lines[-1]) == (130, "interrupted")
    assert not marked(tmp_path, "ray")


@contextlib.contextmanager
def half_sent(http, size=1 << 20):
    """A connection with a request whose body has all but its last byte."""
    with socket.create_connection((http.base_url.host, http.base_url.port)) as opened:
        head = f"POST /v1/contexts HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n"
        opened.sendall(f"{head}authorization: Bearer secret\r\n\r\n".encode() + b"x" * (size - 1))
        opened.settimeout(patience(60))
        yield opened


def bodies_are_bounded_in_sum(http):
    """Of five bodies of 1 MiB whose ends do not come, the door holds four and refuses one."""
    headers = {"content-type": "application/json", "authorization": "Bearer secret"}
    size = 1 << 20
    probe = lambda: http.post("/v1/contexts", content=b"x" * size, headers=headers)  # noqa: E731

    def answered(seconds):
        return select.select(slow, (), (), seconds)[0]

    with contextlib.ExitStack() as opened:
        slow = [opened.enter_context(half_sent(http)) for _ in range(5)]
        (refused,) = answered(patience(60))
        said = b""
        while not said.endswith(b"}"):
            # Head and body come apart.
            piece = refused.recv(10_000)
            assert piece, said
            said += piece
        assert b" 429 " in said.splitlines()[0] and b"bodies of all requests take" in said
        slow.remove(refused)
        assert not answered(1)
        # All that the door may hold is taken, until they go.
        assert probe().status_code == 429
    end = time.monotonic() + patience(60)
    while (found := probe()).status_code == 429:
        assert time.monotonic() < end
    assert found.status_code == 400 and "the body is no JSON" in found.text


TAKEN = """
from ray import serve
from jax_longctx.errors import InputError
from jax_longctx.replicas import cluster

@serve.deployment
class Other:
    pass

with cluster(None, 2):
    from jax_longctx.serving.replicas import NAME, running

    serve.run(Other.bind(), name=NAME, route_prefix=None)
    engines = {"autoscaling_config": {"max_replicas": 1}, "graceful_shutdown_timeout_s": 1}
    try:
        with running(None, None, engines):
            raise AssertionError
    except InputError as error:
        print(error, NAME in serve.status().applications)
"""


@needs_ray
@pytest.mark.long
@pytest.mark.thorough
def test_an_application_on_the_cluster_is_not_replaced():
    how = {"env": environment(), "text": True, "timeout": patience(120)}
    said = subprocess.check_output([sys.executable, "-c", TAKEN], **how)
    assert said.endswith("a kill: `serve shutdown` True\n"), said
