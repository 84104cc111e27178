"""A deleted context is gone: from the disk before its client is told, and from who waits for it."""

import errno
import json
import threading
from pathlib import Path

import pytest

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
    """Nothing is left of any context, in memory or on the disk."""
    check_idle(running)
    contexts, executor = running.served.contexts, running.served.team.executor
    wait_until(lambda: not (contexts._texts or executor.contexts or executor._reading))
    wait_until(lambda: not [path for path in contexts.folder.iterdir() if path.suffix != ".lock"])
    assert running.served.scheduler._need == 0


@pytest.mark.parametrize("how", [{}, {"save": True}, {"stream": True}])
def test_reading_stops_where_the_context_is_deleted(serve, tiny, monkeypatch, how):
    running, answers = serve(tiny), []
    executor = running.served.team.executor
    with running.http() as http:

        def post():
            answers.append(http.post("/v1/contexts", json={"text": BOOK * 4, **how}))

        with held(monkeypatch, executor, "read_on") as reader, aside(post):
            assert reader.begun.wait(patience(20))
            (name,) = listed(http)
            deletions = [threading.Thread(target=delete, args=(http, name)) for _ in range(3)]
            for each in deletions:
                each.start()
            for each in deletions:
                each.join()
            assert listed(http) == [] and delete(http, name) == 404
            reader.go.set()
        (answer,) = answers
        assert "context_deleted" in answer.text and name in answer.text
        assert answer.status_code == (200 if how.get("stream") else 410)
        assert "ready" not in answer.text
        # It was not read to its end.
        assert "longctx_read_tokens_total 0.0" in http.get("/metrics").text
        check_empty(running)
        assert read(http, text=BOOK)["state"] == "ready"


def test_one_of_two_readers_of_a_text_is_deleted(serve, tiny, monkeypatch):
    running, answers = serve(tiny), []
    with running.http() as http:

        def post():
            answers.append(http.post("/v1/contexts", json={"text": BOOK}))

        with (
            held(monkeypatch, running.served.team.executor, "read_on") as reader,
            aside(post),
            aside(post),
        ):
            wait_until(lambda: len(listed(http)) == 2)
            gone, kept = listed(http)
            assert delete(http, gone) == 200
            reader.go.set()
        assert sorted(answer.status_code for answer in answers) == [201, 410]
        assert listed(http) == [kept]


def test_a_context_that_is_deleted_between_reading_and_its_answer(serve, tiny, monkeypatch):
    running = serve(tiny)
    contexts = running.served.contexts
    finish = running.served.scheduler._finish_reading

    def deleted(job):
        contexts.remove(job.entry.id, deleted=True)
        finish(job)

    monkeypatch.setattr(running.served.scheduler, "_finish_reading", deleted)
    with running.http() as http:
        refused(http, 410, "was deleted before", text=BOOK)
        check_empty(running)


def test_an_answer_goes_on_about_a_deleted_context_and_a_waiting_question_fails(slow, tiny):
    running = slow(rows=1)
    scheduler = running.served.scheduler
    with running.http() as http, running.client() as client:
        name = read(http, text=BOOK, save=True)["id"]
        about = {"extra_body": {"context": name}}
        how = {"max_tokens": 16, **about}
        whole = client.completions.create(**slow_request(**how)).choices[0].text
        stream = client.completions.create(**slow_request(stream=True, **how))
        texts = [next(iter(stream)).choices[0].text]
        question = {"path": "/v1/completions", **slow_request(), "context": name}
        with aside(refused, http, 410, name, **question):
            wait_until(lambda: len(scheduler._waiting) == 1)
            assert delete(http, name) == 200
        texts += [chunk.choices[0].text for chunk in stream]
        assert "".join(texts) == whole
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
        return sorted(entry["id"] for file in files for entry in file["entries"])

    with running.http() as http:
        names = sorted(read(http, text=BOOK, save=True)["id"] for _ in range(3))
        assert saved() == names
        assert delete(http, names[0]) == 200 and saved() == names[1:]
        write = Path.write_text

        def full(path, text, **how):
            write(path, text[:10], **how)
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(Path, "write_text", full)
            answer = http.delete(f"/v1/contexts/{names[1]}")
            assert answer.status_code == 500 and "its log says why" in answer.text
            assert saved() == sorted(listed(http)) == names[1:]
        for left in ([names[2]], []):
            assert delete(http, [each for each in names[1:] if each not in left][-1]) == 200
            assert saved() == left
