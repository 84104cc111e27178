import json

import pytest

from jax_longctx.serving.routes import PREFIX, route_of

BOOK = "The pass key is 12345. " * 300


def route(path="/v1/chat/completions", kind="application/json", **body):
    return route_of(path, kind, json.dumps(body).encode())


def said(text, role="user"):
    return {"role": role, "content": text}


def test_a_context_is_known_by_its_id_wherever_it_stands():
    name = "ctx_0123abcd" + "0" * 16
    assert route(context=name, messages=[said("What?")]) == "0123abcd"
    for end in ("", "/text"):
        assert route_of(f"/v1/contexts/{name}{end}", "", b"") == "0123abcd"


def test_texts_are_told_apart_and_one_text_has_one_route():
    texts = {route("/v1/contexts", text=text, ttl=ttl) for text in ("a", "b") for ttl in (1, 2)}
    assert len(texts) == 2 and None not in texts
    assert route("/v1/contexts", file="a") not in texts


def test_an_upload_has_its_route_whatever_the_clients_boundary():
    def form(mark, text):
        head = f'--{mark}\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\n'
        kind = f"multipart/form-data; boundary={mark}"
        return route_of("/v1/contexts", kind, f"{head}{text}\r\n--{mark}--\r\n".encode())

    assert form("one", "text") == form("another", "text") != form("one", "other")


def test_long_prompts_that_begin_alike_belong_together_and_short_ones_to_nobody():
    long = route(messages=[said(f"{BOOK}Who?")])
    assert len(BOOK) > PREFIX and long == route(messages=[said("Answer.", "system"), said(BOOK)])
    assert long != route(messages=[said("A" + BOOK)])
    assert route(prompt=BOOK + "a") == route(prompt=BOOK + "b") is not None
    assert route(messages=[said("Who?")]) is None and route(prompt="Who?") is None


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"1", b'{"context": 5}', b'{"messages": [1]}', b'{"messages": 1}']
)
def test_what_is_no_request_is_any_replicas(body):
    assert route_of("/v1/chat/completions", "application/json", body) is None
