import contextlib
import hashlib
import json
from threading import Event
from types import SimpleNamespace

import pytest

from jax_longctx.engine import context_io
from tests.jax_longctx.serving.tiny import (
    BOOK,
    aside,
    model_of,
    needed_bytes,
    read,
    shown,
    wait_until,
)
from tests.patience import patience

OTHER = "Nothing is known of the second book. " * 8
# An answer that is long enough to be under way when a save begins.
LONG = {"max_tokens": 64, "temperature": 0}


@contextlib.contextmanager
def held(monkeypatch, owner, name):
    """Within it, the function's callers set `begun` and wait until `go` is set."""
    call, events = getattr(owner, name), SimpleNamespace(begun=Event(), go=Event())

    def waiting(*given, **how):
        events.begun.set()
        assert events.go.wait(patience(60))
        return call(*given, **how)

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, waiting)
        try:
            yield events
        finally:
            events.go.set()


def ask(client, context, **how):
    how = {"model": "tiny", "seed": 3, "max_tokens": 12, "logprobs": 0, **how}
    return client.completions.create(prompt="What?", extra_body={"context": context}, **how)


def tokens(answer):
    told = answer.choices[0].logprobs
    return [] if told is None else told.tokens


def streamed(client, context):
    return (each for event in ask(client, context, stream=True, **LONG) for each in tokens(event))


@pytest.mark.parametrize(
    ("name", "by_layer"), [("full", False), pytest.param("refreshkv", True, marks=pytest.mark.slow)]
)
def test_answers_go_on_while_a_context_is_saved(serve, tiny, tmp_path, monkeypatch, name, by_layer):
    model = model_of(tiny, name, by_layer)
    first = serve(model, contexts=tmp_path / "kept")
    with first.http() as http, first.client() as client:
        book, other = (read(http, text=each)["id"] for each in (BOOK, OTHER))
        expected = ask(client, book).choices[0]
        whole = [tokens(ask(client, each, **LONG)) for each in (book, other)]
        streams = [streamed(client, each) for each in (book, other)]
        begun = [next(stream) for stream in streams]
        with held(monkeypatch, context_io, "save_arrays") as writer:
            with aside(read, http, text=BOOK, save=True) as saving:
                assert writer.begun.wait(patience(20))
                found = [[first, *stream] for first, stream in zip(begun, streams, strict=True)]
                # New questions are answered too, about the context that is being saved as well.
                later = [list(streamed(client, each)) for each in (book, other)]
                assert found == later == whole
                assert ask(client, book).choices[0] == expected
                assert saving.is_alive() and not shown(http, book)["saved"]
                writer.go.set()
        wait_until(lambda: shown(http, book)["saved"])
    first.stop()
    # An earlier version named the folder without a checksum of all weights.
    made_by, (folder,) = context_io.made_by_engine(model.engine), (tmp_path / "kept").iterdir()
    del made_by["all_weights"]
    facts = json.dumps(made_by, sort_keys=True).encode()
    folder.rename(tmp_path / "kept" / hashlib.sha256(facts).hexdigest()[:16])
    # What was saved while questions wrote behind it is the text as it was read.
    second = serve(model, contexts=tmp_path / "kept")
    with second.http() as http, second.client() as client:
        assert ask(client, book).choices[0] == expected
        assert "longctx_contexts_loaded_total 1.0" in http.get("/metrics").text


@pytest.mark.slow
def test_answers_go_on_while_memory_is_made_and_a_context_is_loaded(serve, tiny, monkeypatch):
    model = model_of(tiny, "full")
    running = serve(model, context_bytes=int(2.5 * needed_bytes(serve, model, OTHER)))
    with running.http() as http, running.client() as client:
        old, used = (read(http, text=each)["id"] for each in (BOOK, OTHER))
        expected = ask(client, old).choices[0]
        whole = tokens(ask(client, used, **LONG))
        names, answers = [], []
        stream = streamed(client, used)
        begun = next(stream)
        with held(monkeypatch, context_io, "save_arrays") as writer:
            with aside(lambda: names.append(read(http, text="A third. " * 30)["id"])) as third:
                assert writer.begun.wait(patience(20))
                assert [begun, *stream] == list(streamed(client, used)) == whole
                assert third.is_alive()
                writer.go.set()
        states = [shown(http, each)["state"] for each in (old, names[0])]
        assert states == ["saved", "ready"]
        stream = streamed(client, used)
        begun = next(stream)
        with held(monkeypatch, context_io, "load_arrays") as reader:
            # Room for the old one: the third is saved first.
            with aside(lambda: answers.append(ask(client, old).choices[0])) as asking:
                assert reader.begun.wait(patience(20))
                assert [begun, *stream] == list(streamed(client, used)) == whole
                assert asking.is_alive()
                reader.go.set()
    assert answers == [expected]
