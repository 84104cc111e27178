import json
from unittest.mock import Mock

import pytest

from jax_longctx import files
from tests.jax_longctx.serving.test_abuse import check_idle, slow, slow_request
from tests.jax_longctx.serving.test_saving import held
from tests.jax_longctx.serving.tiny import BOOK, aside, read, refused, wait_until
from tests.patience import patience

__all__ = ["slow"]


def listed(http):
    return [each["id"] for each in http.get("/v1/contexts").json()["data"]]


def delete(http, name):
    return http.delete(f"/v1/contexts/{name}").status_code


def check_empty(running):
    check_idle(running)
    contexts, executor = running.served.contexts, running.served.executor
    wait_until(lambda: not (contexts._texts or executor.contexts or executor._prefilling))
    wait_until(lambda: [path.name for path in contexts.folder.iterdir()] == ["server.lock"])
    wait_until(lambda: running.served.scheduler._text is None)


@pytest.mark.parametrize("how", [{}, {"save": True}, {"stream": True}])
def test_reading_stops_where_the_context_is_deleted(serve, tiny, monkeypatch, how):
    running, answers = serve(tiny), []
    with running.http() as http:

        def post():
            answers.append(http.post("/v1/contexts", json={"text": BOOK * 4, **how}))

        with held(monkeypatch, running.served.executor, "read_on") as reader, aside(post):
            assert reader.begun.wait(patience(20))
            (name,) = listed(http)
            assert [delete(http, name) for _ in range(2)] == [200, 404] and listed(http) == []
            reader.go.set()
        (answer,) = answers
        assert answer.status_code == (200 if how.get("stream") else 410)
        assert "context_deleted" in answer.text and "ready" not in answer.text
        # It was not read to its end.
        assert "longctx_read_tokens_total 0.0" in http.get("/metrics").text
        check_empty(running)


def test_a_server_that_ends_keeps_no_context_that_was_not_read(serve, tiny, monkeypatch):
    running = serve(tiny, grace=1.0)
    executor = running.served.executor
    with running.http() as http, held(monkeypatch, executor, "read_on") as reader:
        with aside(refused, http, 503, "shut down", text=BOOK, save=True) as post:
            assert reader.begun.wait(patience(20))
            running.served.stop()
            post.join(patience(20))
    running.stop()
    with serve(tiny).http() as http:
        assert listed(http) == []


def test_an_answer_goes_on_about_a_deleted_context_and_a_waiting_question_fails(slow):
    running = slow(rows=1)
    with running.http() as http, running.client() as client:
        name = read(http, text=BOOK, save=True)["id"]
        how = {"stream": True, "max_tokens": 16, "extra_body": {"context": name}}
        stream = client.completions.create(**slow_request(**how))
        next(iter(stream))
        question = {"path": "/v1/completions", **slow_request(), "context": name}
        with aside(refused, http, 410, name, **question):
            wait_until(lambda: len(running.served.scheduler._waiting) == 1)
            assert delete(http, name) == 200
        assert [*stream][-1].choices[0].finish_reason == "length"
        check_empty(running)


def test_the_disk_forgets_a_context_before_its_client_is_told(serve, tiny, monkeypatch):
    """What a server finds that starts after kill -9 is what lies there then."""
    running = serve(tiny)
    contexts = running.served.contexts
    # The scheduler does nothing more to the files.
    monkeypatch.setattr(contexts, "update_files", lambda: None)
    monkeypatch.setattr(contexts, "useless", list)

    def saved():
        files = [json.loads(file.read_text()) for file in contexts.folder.glob("*.json")]
        return [entry["id"] for file in files for entry in file["entries"]]

    with running.http() as http:
        names = sorted(read(http, text=BOOK, save=True)["id"] for _ in range(2))
        with monkeypatch.context() as patched:
            patched.setattr(files, "write_all", Mock(side_effect=OSError("disk full")))
            assert delete(http, names[0]) == 500
        assert saved() == sorted(listed(http)) == names
        assert delete(http, names[0]) == 200 and saved() == names[1:]
        assert delete(http, names[1]) == 200 and saved() == []
