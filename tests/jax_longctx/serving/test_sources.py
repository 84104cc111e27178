import dataclasses
import json

import pytest

import jax_longctx
from jax_longctx.serving.contexts import Contexts
from tests.jax_longctx.serving.tiny import BOOK, LENGTHS, read

ASK = {"model": "tiny", "temperature": 0, "max_tokens": 6}


def check(sources, text=BOOK):
    assert 1 <= len(sources) <= 3
    for source in sources:
        assert source.keys() == {"start", "end", "score", "text", "document", "page"}
        assert source["text"] == text[source["start"] : source["end"]]
        assert source["document"] is None and source["page"] is None
    assert sources[0]["score"] == max(source["score"] for source in sources)


def test_a_reply_says_where_its_answers_were_found(server):
    with server.http() as http:
        context = read(http, text=BOOK)["id"]
        asked = {**ASK, "context": context, "messages": [{"role": "user", "content": "Who?"}]}
        plain = http.post("/v1/chat/completions", json=asked).json()["choices"][0]
        found = http.post("/v1/chat/completions", json={**asked, "sources": True}).json()
        (choice,) = found["choices"]
        check(choice.pop("sources"))
        assert choice == plain
        streamed = {**asked, "sources": True, "stream": True}
        lines = http.post("/v1/chat/completions", json=streamed).text.split("\n\n")
        records = [json.loads(x.removeprefix("data: ")) for x in lines if x[6:7] == "{"]
        *others, last = [record["choices"][0] for record in records]
        assert last["finish_reason"] and not any("sources" in other for other in others)
        check(last["sources"])
        # Rows of one batch, and a stop string within the answer.
        prompts = {**ASK, "context": context, "prompt": ["Who?", "And why?"], "sources": True}
        for more in ({}, {"stop": plain["message"]["content"][1:3]}):
            choices = http.post("/v1/completions", json={**prompts, **more}).json()["choices"]
            for each in choices:
                check(each["sources"])
        del asked["context"]
        refused = http.post("/v1/chat/completions", json={**asked, "sources": True})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"]) == (400, "sources")
        assert "passages of a context" in error["message"]


@pytest.mark.slow
def test_rows_with_caches_of_their_own_and_methods_that_drop_tokens(tiny, serve, monkeypatch):
    how = {"sources": True, "prompt": ["Who?", "And why?"], **ASK}
    lengths = dataclasses.replace(LENGTHS, share_from=500)
    with serve(tiny, lengths=lengths).http() as http:
        context = read(http, text=BOOK)["id"]
        found = http.post("/v1/completions", json={**how, "context": context}).json()
        for choice in found["choices"]:
            check(choice["sources"])
    model = tiny.with_method(jax_longctx.make_method("knorm", {"budget": "16"}))
    with serve(model).http() as http:
        context = read(http, text=BOOK)["id"]
        with monkeypatch.context() as patch:
            patch.setattr(Contexts, "use", None)
            found = http.post("/v1/completions", json={**how, "context": context})
        assert found.status_code == 400 and "do not say which tokens" in found.text
