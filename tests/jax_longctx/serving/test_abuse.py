import asyncio
import contextlib
import hashlib
import json
import os
import random
import re
import select
import socket
import time
import tracemalloc
from collections import Counter

import jax
import openai
import pytest

from jax_longctx.api import LongContext
from jax_longctx.engine.capacity import reserved
from jax_longctx.serving import bodies, streams
from jax_longctx.serving.doors import Access
from jax_longctx.serving.schema import ChatRequest, CompletionRequest, RequestError, parsed
from tests.jax_longctx.serving.tiny import LENGTHS, aside, generated, read, refused, wait_until
from tests.patience import patience
from tests.support import engine_over

CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is the pass key?"}],
    "seed": 1,
    "max_tokens": 2,
    "temperature": 0.5,
    "stop": ["x"],
    "stream": False,
    "logprobs": True,
    "top_logprobs": 2,
}
COMPLETION = {"model": "tiny", "prompt": "The pass key is", "max_tokens": 2, "top_p": 0.9}
CONTEXT = {"text": "The pass key is 12345.", "ttl": 1, "chat": True}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/contexts": CONTEXT}
ODD = [None, True, -1, 0, 2**70, 1e300, -0.5, "", "x" * 3000, "\u0000", "\ud800", [], [[]], {}]
ODD += [[None], {"a": {}}, ["a"] * 40, [1, "a"], [2**63], [-(2**31) - 1], [2**70]]


def check_idle(running):
    """Every row is free and no request is in the books."""
    scheduler, contexts = running.served.scheduler, running.served.contexts
    wait_until(lambda: scheduler._tickets == 0 and not scheduler._rows)
    assert running.served.executor.free == running.served.options.rows
    assert all(text.tickets == text.rows == 0 for text in contexts._texts.values())
    assert not running.faults


def malformed(draw, given):
    """A body that is a valid request with one or two things wrong."""
    way = draw.randrange(6)
    if way == 0:
        return bytes(draw.randrange(256) for _ in range(draw.randrange(60)))
    body = json.loads(json.dumps(given))
    for _ in range(draw.randrange(1, 3)):
        where = draw.choice(list(body))
        if way == 1:
            del body[where]
            body[f"{where}{draw.randrange(9)}"] = draw.choice(ODD)
            break
        body[where] = draw.choice(ODD)
    raw = json.dumps(body).encode()
    if way == 2:
        return raw[: draw.randrange(len(raw))]
    if way == 3:
        at = draw.randrange(len(raw))
        return raw[:at] + bytes([draw.randrange(256)]) + raw[at + 1 :]
    if way == 4:
        return b"[" * draw.randrange(1, 5000) + raw
    return raw


def fuzz(running, count, seed):
    """Sends malformed bodies; returns how often each status came."""
    draw, found = random.Random(seed), Counter()
    with running.http() as http:
        for _ in range(count):
            path, given = draw.choice(list(PATHS.items()))
            body = malformed(draw, given)
            answer = http.post(path, content=body, headers={"content-type": "application/json"})
            found[answer.status_code] += 1
            if answer.status_code >= 400:
                said = answer.json()["error"]["message"]
                assert said and "\n" not in said
            assert answer.status_code < 500, (path, body, answer.text)
    return found


def test_malformed_bodies_are_4xx(server):
    found = fuzz(server, 120, seed=1)
    # Some changes leave a request valid.
    assert found[400] > 60 and set(found) <= {200, 201, 400, 404}
    check_idle(server)


@pytest.mark.long
@pytest.mark.thorough
def test_ten_thousand_malformed_bodies_leave_nothing(server):
    fuzz(server, 500, seed=2)
    before = len(os.listdir("/proc/self/fd"))
    fuzz(server, 10_000, seed=3)
    check_idle(server)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (CompletionRequest, {"prompt": [1, "a"] * 120_000}),
        (CompletionRequest, {"prompt": [["a"] * 120_000]}),
        (CompletionRequest, {"prompt": [None] * 120_000}),
        (CompletionRequest, {"stop": [1] * 240_000}),
        (CompletionRequest, {f"{i}": 1 for i in range(60_000)}),
        (ChatRequest, {"messages": [{}] * 200_000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 240_000}]}),
    ],
)
def test_a_body_with_many_faults_is_checked_up_to_the_first(kind, changes):
    raw = json.dumps((CHAT if kind is ChatRequest else COMPLETION) | changes).encode()
    assert 500_000 < len(raw) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(RequestError) as caught:
            parsed(kind, raw)
        # Each fault would take a kilobyte. The JSON's own values take most of this.
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()
    assert len(json.dumps(caught.value.body())) < 500


def test_errors_show_the_beginning_of_long_names_and_values(server):
    long = "x" * 200_000
    bodies = [{**COMPLETION, long: 1}, {**COMPLETION, "max_tokens": long}]
    bodies += [{**COMPLETION, "max_tokens": [long] * 4}, {**COMPLETION, "model": long}]
    with server.http() as http:
        for body in bodies:
            answer = http.post("/v1/completions", json=body)
            assert 400 <= answer.status_code < 500
            assert len(answer.content) < 700
        answer = http.post("/v1/contexts", files={long: ("a", b"text")})
        assert answer.status_code == 400 and len(answer.content) < 700


def test_forms_that_are_none_are_4xx(server):
    kinds = ["multipart/form-data", "multipart/form-data; boundary=x", "multipart/form-data; =="]
    bodies = [b"", b"--x", b"--x\r\n\r\n\r\n--x--", b"\xff" * 100]
    with server.http() as http:
        for kind in kinds:
            for body in bodies:
                answer = http.post("/v1/contexts", content=body, headers={"content-type": kind})
                assert answer.status_code == 400, (kind, body, answer.text)
        upload = ("a", b"text")
        for fields, said in [
            ([("ttl", (None, b"1")), ("ttl", (None, b"2"))], "'ttl' is there twice; send it once"),
            ([("other", upload)], "'other' is an upload; only 'file' is one"),
            ([("file", (None, b"book.txt"))], "'file' is not an upload; send its content"),
            ([("file", upload), ("text", (None, b"x"))], "'text' is beside 'file'; send one"),
            ([("text", (None, b"x")), ("file", upload)], "'text' is beside 'file'; send one"),
        ]:
            answer = http.post("/v1/contexts", files=fields)
            assert answer.status_code == 400
            assert answer.json()["error"]["message"].startswith(f"the form's field {said}")
    check_idle(server)


def test_unknown_urls_and_methods_and_bodies_beyond_the_limit_are_4xx(server):
    huge = b"x" * ((1 << 20) + 1)
    with server.http(headers={"content-type": "application/json"}) as http:
        for path in ("/index", "/v1", "/v1/embeddings", "/v1/contexts/a/b", "/v1/models/other"):
            answer = http.get(path)
            assert answer.status_code == 404 and answer.json()["error"]["message"]
        assert http.get("/v1/completions").status_code == 405
        assert http.post("/health").status_code == 405
        assert http.post("/v1/completions", content=huge).status_code == 413
        # Without a length: it is counted as it comes.
        pieces = (huge[:100_000] for _ in range(12))
        assert http.post("/v1/completions", content=pieces).status_code == 413
        assert http.get("/health").status_code == 200
    check_idle(server)


def connect(running):
    host, port = running.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=patience(20))


def begin_post(running, sent, declared, path="/v1/completions"):
    raw = connect(running)
    lines = [f"POST {path} HTTP/1.1", "host: localhost", "content-type: application/json"]
    head = "\r\n".join([*lines, f"content-length: {declared}", "", ""])
    raw.sendall(head.encode() + sent)
    return raw


def slowed(monkeypatch, owner, name):
    call = getattr(owner, name)

    def wait(*given, **how):
        time.sleep(0.05)
        return call(*given, **how)

    monkeypatch.setattr(owner, name, wait)


def test_slow_senders_are_ended(serve, tiny):
    seconds = patience(0.3)
    running = serve(tiny, access=Access(body_seconds=seconds), header_seconds=seconds)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    head += b"content-type: application/json\r\n"
    begun = [b"", head, head + b"content-length: 100\r\n\r\n{"]
    # The second request of a connection is waited for no longer than the first.
    again = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(running)) for _ in [*begun, again]]
        for one, sent in zip(slow, [*begun, again], strict=True):
            one.sendall(sent)
        healthy = b""
        while b"ok" not in healthy:
            piece = slow[-1].recv(1000)
            assert piece, healthy
            healthy += piece
        slow[-1].sendall(head)
        for one in slow:
            assert b" 408 " in one.recv(1000).splitlines()[0]
    check_idle(running)


@pytest.mark.parametrize(
    "sent", [b"\x00\x01\x02\r\n\r\n", b"GET / HTTP/x.y\r\n\r\n", b"x" * 200_000, b"GET /\r\n\r\n"]
)
def test_what_is_no_http_is_refused(server, sent):
    with connect(server) as raw:
        raw.sendall(sent)
        assert b" 40" in raw.recv(1000).splitlines()[0]


def slow_request(**how):
    """A request whose answer takes many blocks: no token ends it."""
    return {"model": "tiny", "prompt": "The pass key is", "max_tokens": 64, "seed": 4, **how}


@pytest.fixture
def slow(serve, tiny, monkeypatch):
    def start(**how):
        running = serve(tiny, **how)
        executor = running.served.executor
        step = executor.step
        running.blocks = []

        def wait(most):
            running.blocks.append(most)
            time.sleep(0.05)
            return step(1)

        monkeypatch.setattr(executor, "step", wait)
        return running

    return start


def test_clients_that_go_away_free_their_rows(slow):
    running = slow()
    for stream in (True, False):
        for _ in range(2):
            body = json.dumps(slow_request(stream=stream)).encode()
            with begin_post(running, body, len(body)) as raw:
                if stream:
                    assert raw.recv(100)
                else:
                    wait_until(lambda: running.served.scheduler._rows)
            check_idle(running)
            # The whole answer would take 64.
            assert len(running.blocks) < 60
            running.blocks.clear()


def test_a_text_is_given_up_when_its_client_goes_away(serve, tiny, monkeypatch):
    running = serve(tiny)
    executor, contexts = running.served.executor, running.served.contexts
    slowed(monkeypatch, executor, "read_on")
    body = json.dumps({"text": "The pass key is 12345. " * 60, "stream": True}).encode()
    with begin_post(running, body, len(body), "/v1/contexts") as raw:
        assert raw.recv(100)
    check_idle(running)
    wait_until(lambda: not contexts._texts and not executor._prefilling)
    assert not executor.contexts and contexts.listed() == []


async def post(app, path, body, *, sends):
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "method": "POST"}
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope |= {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers}
    sent = iter([{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}])

    async def receive():
        for message in sent:
            return message
        await asyncio.Event().wait()

    await app(scope, receive, sends)


@pytest.mark.parametrize("path", ["/v1/contexts", "/v1/completions"])
def test_a_client_that_goes_before_its_stream_begins_leaves_nothing(slow, path, monkeypatch):
    running = slow()
    slowed(monkeypatch, running.served.executor, "read_on")
    text = "The pass key is 12345. " * 15
    body = {"text": text, "stream": True} if "contexts" in path else slow_request(stream=True)

    async def go():
        begun = asyncio.Event()

        async def sends(message):
            begun.set()
            await asyncio.Event().wait()

        task = asyncio.ensure_future(post(running.served.app, path, body, sends=sends))
        await asyncio.wait_for(begun.wait(), patience(20))
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        # The loop's end would close the generators that nobody reads.
        await asyncio.to_thread(check_idle, running)

    asyncio.run(go())
    assert running.served.contexts.listed() == []
    assert not running.served.contexts._entries


def test_a_client_that_does_not_read_is_given_up(slow, monkeypatch):
    monkeypatch.setattr(streams, "LAST_SECONDS", 0.1)
    running = slow(access=Access(seconds=patience(0.5)))
    count = 0

    async def go():
        async def sends(message):
            nonlocal count
            count += 1
            if count > 2:
                await asyncio.Event().wait()

        how = slow_request(stream=True)
        await asyncio.wait_for(
            post(running.served.app, "/v1/completions", how, sends=sends), patience(20)
        )

    began = time.monotonic()
    asyncio.run(go())
    assert time.monotonic() - began < patience(10) and count == 3
    check_idle(running)


def texts_of(model, count):
    """Short texts, and the bytes that each needs."""
    reserve = reserved(LENGTHS.question + LENGTHS.answer)
    need = model.engine.new_cache_bytes(20 + reserve, reserve)
    return [f"{number} is the pass key." for number in range(count)], need


def test_a_request_that_does_not_fit_now_waits(slow, tiny):
    texts, need = texts_of(tiny, 2)
    running = slow(context_bytes=need)
    done = []

    def ask(text):
        with running.client() as client:
            how = slow_request(prompt=text, temperature=0, max_tokens=8)
            done.append((text, client.completions.create(**how).choices[0].text))

    with aside(ask, texts[0]):
        wait_until(lambda: running.served.scheduler._rows)
        with aside(ask, texts[1]):
            wait_until(lambda: running.served.scheduler._tickets == 2)
            while len(done) == 0:
                assert len(running.served.scheduler._rows) <= 1
                time.sleep(0.01)
    expected = [(text, tiny.generate(text, max_tokens=8)[0].text) for text in texts]
    assert done == expected
    check_idle(running)


def test_waiting_requests_keep_each_others_texts(slow, tiny):
    """One row on the first text, room for two: the other two questions wait for the row's place."""
    texts, need = texts_of(tiny, 3)
    running = slow(rows=1, context_bytes=2 * need)
    with running.http() as http:
        names = [read(http, text=text, chat=False)["id"] for text in texts]

        def ask(name, tokens):
            body = slow_request(max_tokens=tokens, context=name, prompt=" Remember")
            with running.http() as own:
                assert own.post("/v1/completions", json=body).status_code == 200

        with contextlib.ExitStack() as stack:
            for number, asked in enumerate(zip(names, (24, 1, 1), strict=True), start=1):
                stack.enter_context(aside(ask, *asked))
                # The first one's text is loaded. Until then a question about another could join.
                wait_until(lambda: running.served.scheduler._rows)
                wait_until(lambda number=number: running.served.scheduler._tickets == number)
        figures = http.get("/metrics").text
    (loaded,) = re.findall(r"longctx_contexts_loaded_total (\d+)\.0", figures)
    # Each at most once.
    assert int(loaded) <= 3
    check_idle(running)


def test_a_full_queue_tells_when_to_come_again_and_a_slow_body_holds_no_place(slow, monkeypatch):
    monkeypatch.setattr(bodies, "DROPPED_SECONDS", 0.1)
    running = slow(rows=1, queue=1)
    with begin_post(running, b"{", 100) as first, running.client() as client:
        wait_until(lambda: running.served.service.bodies._held == 1)
        stream = client.completions.create(**slow_request(stream=True))
        next(iter(stream))
        with aside(client.completions.create, **slow_request(max_tokens=1)):
            wait_until(lambda: running.served.scheduler._tickets == 2)
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(**slow_request())
            assert int(caught.value.response.headers["retry-after"]) >= 1
            # This body is not waited for.
            with begin_post(running, b"", 1 << 20) as second:
                head = second.recv(1000).lower()
            assert b" 429 " in head.splitlines()[0] and b"connection: close" in head
            first.sendall(b"x" * 99)
            # Its body came when the places were taken.
            assert b" 429 " in first.recv(1000).splitlines()[0]
            stream.close()
    check_idle(running)


def test_a_client_that_sends_all_of_its_body_first_reads_the_refusal(server):
    with server.http() as http:
        for size, kind, status in ((3 << 20, "application/json", 413), (9, "text/plain", 415)):
            told = {"content-type": kind}
            answer = http.post("/v1/completions", content=b" " * size, headers=told)
            assert answer.status_code == status and answer.json()["error"]["message"]
    # A real client's socket, which does not read meanwhile.
    with begin_post(server, b"", 3 << 20) as sent:
        for _ in range(3):
            sent.sendall(b" " * (1 << 20))
        assert b" 413 " in sent.recv(1000).splitlines()[0]
    check_idle(server)


def test_the_bodies_of_all_requests_have_a_limit(serve, tiny):
    running, size = serve(tiny, access=Access(body=3 << 20, bodies=4 << 20)), 2 << 20
    held = lambda: running.served.service.bodies._held  # noqa: E731
    with begin_post(running, b"x" * size, size + 1) as first:
        wait_until(lambda: held() == size)
        with begin_post(running, b"x" * (size + 1), 3 << 20) as second:
            # A client reads when it has sent all.
            assert not select.select([second], (), (), 0.3)[0]
            second.sendall(b"x" * (size // 2 - 1))
            assert b" 429 " in second.recv(1000).splitlines()[0]
        assert held() == size
        first.sendall(b"x")
        assert b" 400 " in first.recv(1000).splitlines()[0]
    assert held() == 0
    check_idle(running)


def test_connections_have_a_limit(serve, tiny):
    running = serve(tiny, connections=3)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connect(running))
        with running.http() as http:
            wait_until(lambda: http.get("/health").status_code == 503)
    with running.http() as http:
        wait_until(lambda: http.get("/health").status_code == 200)


def test_the_time_of_a_request_begins_with_its_headers(serve, tiny):
    seconds = patience(1)
    running = serve(tiny, access=Access(seconds=seconds))
    with begin_post(running, b"{", 100) as raw:
        began = time.monotonic()
        assert b" 408 " in raw.recv(1000).splitlines()[0]
        assert time.monotonic() - began < patience(10)
    # The time that the body took is not there for the answer.
    body = slow_request(max_tokens=1)
    with running.http() as http:
        assert http.post("/v1/completions", json=body).status_code == 200
        prompts = running.served.service.prompts
        completion = prompts.completion

        def late(*given):
            time.sleep(1.25 * seconds)
            return completion(*given)

        prompts.completion = late
        assert http.post("/v1/completions", json=body).status_code == 504
    check_idle(running)


def test_texts_that_are_too_long_are_not_tokenised(serve, tiny, monkeypatch):
    running = serve(tiny)
    long = "key " * (LENGTHS.whole * tiny.tokenizer.longest_piece // 4 + 1)

    def encode(text, bos=False):
        raise AssertionError("it was tokenised")

    monkeypatch.setattr(tiny.tokenizer, "encode", encode)
    with running.http() as http:
        for path, changes in {
            "/v1/chat/completions": {"messages": [{"role": "user", "content": long}]},
            "/v1/completions": {"prompt": long},
            "/v1/contexts": {"text": long},
        }.items():
            answer = refused(http, 400, "", path, **PATHS[path] | changes)
            assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert not running.faults


def test_requests_end_with_their_time(slow):
    running = slow(access=Access(seconds=0.5))
    with running.client() as client:
        with pytest.raises(openai.InternalServerError, match=r"took longer than 0\.5 s"):
            client.completions.create(**slow_request())
        with pytest.raises(openai.APIError, match=r"took longer than 0\.5 s"):
            for _ in client.completions.create(**slow_request(stream=True)):
                pass
    check_idle(running)


def test_answers_that_have_begun_finish_at_the_end(slow, tiny):
    running = slow()
    with running.client() as client:
        stream = client.completions.create(**slow_request(stream=True, max_tokens=16))
        texts = [next(iter(stream)).choices[0].text]
        running.served.stop()
        with pytest.raises(ConnectionRefusedError):
            wait_until(lambda: connect(running).close())
        texts += [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == generated(tiny, "The pass key is", seed=4, max_tokens=16).text
    running.thread.join(patience(20))
    assert not running.thread.is_alive()


def test_keys_are_asked_for(serve, tiny):
    keys = [hashlib.sha256(key).digest() for key in (b"one", b"two")]
    running = serve(tiny, access=Access(keys=keys))
    for key in ("one", "two"):
        with running.client(key) as client:
            assert client.models.list().data
    with running.client("three") as client, pytest.raises(openai.AuthenticationError):
        client.completions.create(**slow_request())
    with running.http() as http:
        for path in ("/v1/models", "/metrics", "/v1/contexts"):
            for headers in ({}, {"authorization": "Basic one"}, {"authorization": "Bearer"}):
                assert http.get(path, headers=headers).status_code == 401
        for path in ("/health", "/ready"):
            assert http.get(path).status_code == 200
            # Some frameworks read the path from this header.
            for host in (f"x{path}?", f"x{path}#", f"x{path}"):
                answer = http.get("/v1/models", headers={"host": host})
                assert answer.status_code == 401, host


def test_a_fault_of_the_scheduler_is_reported_once(serve, tiny, monkeypatch):
    running = serve(tiny, access=Access(seconds=3))
    executor = running.served.executor

    def broken(key, ask):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(executor, "join", broken)
    with running.client() as client, pytest.raises(openai.InternalServerError):
        client.completions.create(**slow_request())
    with running.http() as http:
        assert http.get("/ready").status_code == 503
    assert [str(fault) for fault in running.faults] == ["the device is gone"]
    running.faults.clear()


def test_errors_of_the_engine_are_the_requests_alone(serve, tiny):
    old = tiny.engine
    params = jax.tree.map(lambda x: x * float("nan"), old.params)
    engine = engine_over(old.config, params, old.method, old.mesh, chunk=64)
    running = serve(LongContext(engine, tiny.tokenizer))
    with running.client() as client:
        for prompt in ("The pass key is", "The pass key is 12345. Remember it. " * 8):
            with pytest.raises(openai.InternalServerError, match="logits are not finite"):
                client.completions.create(**slow_request(prompt=prompt))
    check_idle(running)
