"""Contexts are saved and loaded while other answers are decoded."""

import contextlib
import threading

import pytest
from orbax.checkpoint import v1 as ocp

from jax_longctx.api import LongContext
from jax_longctx.engine import Engine, context_io
from tests.jax_longctx.serving.tiny import BOOK, needed_bytes, read, shown, wait_until
from tests.patience import patience
from tests.small_methods import small_method

OTHER = "Nothing is known of the second book. " * 8
# An answer that is long enough to be under way when a save begins.
LONG = {"max_tokens": 64, "temperature": 0}


class Held:
    """A call that waits until it is let go, each time."""

    def __init__(self, call):
        self.call, self.begun, self.go = call, threading.Event(), threading.Event()

    def __call__(self, *given, **how):
        self.begun.set()
        assert self.go.wait(60)
        return self.call(*given, **how)


@contextlib.contextmanager
def held(monkeypatch, owner, name):
    """Within it, the function's callers wait until `go` is set."""
    waiting = Held(getattr(owner, name))
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, waiting)
        try:
            yield waiting
        finally:
            waiting.go.set()


def model_of(tiny, name, by_layer):
    engine = tiny.engine
    how = {"chunk": 32, "by_layer": by_layer}
    made = Engine(engine.config, engine.params, small_method(name), engine.mesh, **how)
    return LongContext(made, tiny.tokenizer)


def ask(client, context, **how):
    how = {"model": "tiny", "seed": 3, "max_tokens": 12, "logprobs": 0, **how}
    return client.completions.create(prompt="What?", extra_body={"context": context}, **how)


def tokens(answer):
    told = answer.choices[0].logprobs
    return [] if told is None else told.tokens


def streamed(client, context):
    """The tokens of a long answer, as their events come."""
    return (each for event in ask(client, context, stream=True, **LONG) for each in tokens(event))


@pytest.mark.parametrize(
    ("name", "by_layer"),
    [("full", False), pytest.param("refreshkv", True, marks=pytest.mark.slow)],
)
def test_answers_go_on_while_a_context_is_saved(serve, tiny, tmp_path, monkeypatch, name, by_layer):
    """Also those about the context itself, whose arrays they update in place."""
    model = model_of(tiny, name, by_layer)
    first = serve(model, contexts=tmp_path / "kept")
    with first.http() as http, first.client() as client:
        book, other = (read(http, text=each)["id"] for each in (BOOK, OTHER))
        expected = ask(client, book).choices[0]
        whole = [tokens(ask(client, each, **LONG)) for each in (book, other)]
        streams = [streamed(client, each) for each in (book, other)]
        begun = [next(stream) for stream in streams]
        with held(monkeypatch, ocp, "save") as writer:
            saving = threading.Thread(
                target=read, args=(http,), kwargs={"text": BOOK, "save": True}
            )
            saving.start()
            assert writer.begun.wait(20)
            found = [[first, *stream] for first, stream in zip(begun, streams, strict=True)]
            # New questions are answered too, about the context that is being saved as well.
            later = [list(streamed(client, each)) for each in (book, other)]
            assert found == later == whole
            assert ask(client, book).choices[0] == expected
            assert saving.is_alive() and not shown(http, book)["saved"]
        saving.join(patience(20))
        wait_until(lambda: shown(http, book)["saved"])
    first.stop()
    # What was saved while questions wrote behind it is the text as it was read.
    second = serve(model, contexts=tmp_path / "kept")
    with second.http() as http, second.client() as client:
        assert ask(client, book).choices[0] == expected
        assert "longctx_contexts_loaded_total 1.0" in http.get("/metrics").text


@pytest.mark.slow
def test_answers_go_on_while_memory_is_made_and_a_context_is_loaded(serve, tiny, monkeypatch):
    """A text that needs room waits for a save, a question for a load; nothing else does."""
    model = model_of(tiny, "full", None)
    running = serve(model, context_bytes=int(2.5 * needed_bytes(serve, model, OTHER)))
    with running.http() as http, running.client() as client:
        old, used = (read(http, text=each)["id"] for each in (BOOK, OTHER))
        expected = ask(client, old).choices[0]
        whole = tokens(ask(client, used, **LONG))
        names, answers = [], []
        stream = streamed(client, used)
        begun = next(stream)
        with held(monkeypatch, ocp, "save") as writer:
            third = threading.Thread(
                target=lambda: names.append(read(http, text="A third. " * 30)["id"])
            )
            third.start()
            assert writer.begun.wait(20)
            assert [begun, *stream] == list(streamed(client, used)) == whole
            assert third.is_alive()
        third.join(patience(20))
        states = [shown(http, each)["state"] for each in (old, names[0])]
        assert states == ["saved", "ready"]
        stream = streamed(client, used)
        begun = next(stream)
        with held(monkeypatch, context_io, "load_arrays") as reader:
            # Room for the old one: the third is saved first.
            asking = threading.Thread(target=lambda: answers.append(ask(client, old).choices[0]))
            asking.start()
            assert reader.begun.wait(20)
            assert [begun, *stream] == list(streamed(client, used)) == whole
            assert asking.is_alive()
        asking.join(patience(20))
    assert answers == [expected]
