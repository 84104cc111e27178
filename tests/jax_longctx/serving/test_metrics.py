import logging
import re
from collections import Counter

import pytest

from tests.jax_longctx.serving.tiny import BOOK, chat, complete, read, wait_until


@pytest.fixture
def lines(caplog):
    """The log's lines; a function that waits for as many, clears and returns them.

    A line follows its answer, so a test may see the `/metrics` that the one before it asked for.
    """
    caplog.set_level(logging.INFO, logger="jax_longctx.serving.requests")

    def messages():
        own = [each.message for each in caplog.records if each.name.endswith("requests")]
        return [line for line in own if '"GET /metrics"' not in line]

    def logged(count):
        wait_until(lambda: len(messages()) >= count)
        found = messages()
        caplog.clear()
        assert all(re.match(r'127\.0\.0\.1:\d+ "', line) for line in found)
        assert all(re.search(r" \d+\.\d{3}s$", line) for line in found)
        return [line.split(" ", 1)[1].rpartition(" ")[0] for line in found]

    return logged


def test_each_request_has_a_line(server, client, lines):
    with server.http() as http:
        record = read(http, text=BOOK)
        name, size = record["id"], record["tokens"]
        assert lines(1) == [f'"POST /v1/contexts" 201 model=tiny context={name} in={size} out=0']
        for stream in (False, True):
            found = chat(client, "Why?", name, max_tokens=9, stream=stream)
            if stream:
                assert list(found)
            else:
                usage = found.usage
            (line,) = lines(1)
            counts = f"in={usage.prompt_tokens} out=" + ("" if stream else "9")
            start = f'"POST /v1/chat/completions" 200 model=tiny context={name} {counts}'
            assert line.startswith(start) and re.search(r"out=[1-9]$", line)
        complete(client, ["a b", "c"], max_tokens=1)
        (line,) = lines(1)
        assert line.endswith("model=tiny context=- in=4 out=2")
        http.get("/v1/models?key=secret")
        http.get("/no%0Ain%22?x=1")
        http.post("/v1/completions", json={})
        http.get("/v1/models", headers={"host": "attacker.example"})
        assert lines(4) == [
            '"GET /v1/models" 200',
            '"GET /no%0Ain%22" 404',
            '"POST /v1/completions" 400',
            '"GET /v1/models" 403',
        ]


def test_what_was_answered_is_counted(server, client):
    def counted():
        with server.http() as http:
            page = http.get("/metrics").text
        return Counter(
            {name: float(n) for name, n in re.findall(r"^longctx_(.*) (.*)$", page, re.M)}
        )

    before = counted()
    answer = complete(client, "The pass key is", max_tokens=5).usage
    nothing = complete(client, ["Remember it.", [5]], max_tokens=0, extra_body={"echo": True}).usage
    assert counted() - before >= Counter(
        {
            "answer_tokens_total": answer.completion_tokens,
            "prompt_tokens_total": answer.prompt_tokens + nothing.prompt_tokens,
            'requests_total{route="/v1/completions",status="200"}': 2,
            "first_token_seconds_count": 1,
        }
    )


def test_a_fault_has_a_line(server, lines, monkeypatch):
    monkeypatch.setattr(server.served.contexts, "listed", lambda: 1 / 0)
    with server.http() as http:
        assert http.get("/v1/contexts").status_code == 500
    assert lines(1) == ['"GET /v1/contexts" 500']
