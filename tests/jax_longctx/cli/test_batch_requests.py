"""Rows in OpenAI's batch file format."""

import json

import pytest
from openai.types.chat import ChatCompletion

from jax_longctx.engine import Sampling
from tests.jax_longctx.cli.test_batch import batch, given, killed, lines_of, out

__all__ = ["batch", "given", "killed", "out"]

WHO, HOW = ([{"role": "user", "content": text}] for text in ("Who?", "How does it end?"))
SEEDED = {"temperature": 1, "seed": 7}


def request(custom_id, messages, **body):
    body = {"model": "any", "messages": messages, "max_tokens": 6, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


ROWS = [
    request("a", WHO),
    request("b", HOW, stop=["e"]),
    {"messages": HOW},
    request("c", WHO, **SEEDED),
    request("d", WHO, **SEEDED, max_completion_tokens=4, max_tokens=None),
    request("e", [{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *WHO]),
]


def test_a_request_is_answered_as_it_says_and_as_the_run_says_else(batch, tiny, out):
    batch("--max-tokens", 9, "--rows", 4, rows=ROWS)
    found = lines_of(out)
    asked = {
        "a": (WHO, {"max_tokens": 6}),
        "b": (HOW, {"max_tokens": 6, "stop": ["e"]}),
        "c": (WHO, {"max_tokens": 6, "sampling": Sampling(temperature=1.0, seed=7)}),
        "d": (WHO, {"max_tokens": 4, "sampling": Sampling(temperature=1.0, seed=7)}),
        "e": ([{"role": "system", "content": "Be brief."}, *WHO], {"max_tokens": 6}),
    }
    plain = found.pop(2)
    assert plain["tokens"]["answer"] == 9 and plain["line"] == 3
    assert [line["custom_id"] for line in found] == list(asked)
    assert len({line["id"] for line in found}) == 5
    for line, (messages, how) in zip(found, asked.values(), strict=True):
        tokens = tiny.tokenizer.encode(tiny.tokenizer.chat(messages), bos=True)
        read = tiny.engine.prefill([tokens[:-1]], reserve=128, total=[len(tokens)])
        (answer,) = tiny.ask(read, [tokens[-1:]], keep=False, **how)
        assert (line["error"], line["response"]["status_code"]) == (None, 200)
        body = ChatCompletion.model_validate(line["response"]["body"], strict=True)
        assert body.choices[0].message.content == answer.text and body.model == "any"
        assert body.choices[0].finish_reason == answer.finish
        assert body.usage.prompt_tokens == len(tokens)
        assert body.usage.completion_tokens == len(answer.tokens)


KIND = {"type": "object", "properties": {"kind": {"enum": ["sea"]}}, "required": ["kind"]}
KIND["additionalProperties"] = False


def in_form(schema):
    return {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}


def test_a_row_may_have_a_form_and_the_run_another(batch, out, tmp_path):
    (tmp_path / "schema.json").write_text(json.dumps({"enum": ["town"]}))
    rows = [request("a", WHO, response_format=in_form(KIND), max_tokens=90), request("b", WHO)]
    rows += [request("c", WHO, response_format={"type": "text"}), {"messages": HOW}]
    batch("--schema", tmp_path / "schema.json", "--max-tokens", 24, rows=rows)
    *found, plain = lines_of(out)
    texts = [line["response"]["body"]["choices"][0]["message"]["content"] for line in found]
    assert json.loads(texts[0]) == {"kind": "sea"}
    assert '"town"'.startswith(texts[1][:6]) and not texts[2].startswith('"town')
    assert plain["answer"] == '"town"'


BAD = {
    "is refused: Invalid type: wrong": {
        "body": request("", WHO, response_format=in_form({"type": "wrong"}))["body"]
    },
    "expected body, custom_id, method, url, the method POST": {"url": "/v1/embeddings"},
    "body is 3": {"body": 3},
    "messages is missing": {"body": {"model": "x"}},
    "temperature: Input should be less": {"body": request("", WHO, temperature=3)["body"]},
    "logprobs has no effect in a batch": {"body": request("", WHO, logprobs=True)["body"]},
    "unknown field 'colour'": {"body": request("", WHO, colour=True)["body"]},
    "the last of messages is not the user's": {
        "body": request("", [*WHO, {"role": "assistant", "content": "I."}])["body"]
    },
}


def test_a_bad_request_has_an_answer_with_its_reason_and_is_tried_again(batch, out, monkeypatch):
    rows = [{**request(said, WHO), **changed} for said, changed in BAD.items()]
    batch(rows=[*rows, request("good", WHO)], code=3)
    *wrong, good = lines_of(out)
    for line in wrong:
        response = line["response"]
        assert response["status_code"] == 400 and line["error"] is None
        assert line["custom_id"] in response["body"]["error"]["message"]
    rows = [request(said, HOW) for said in BAD]
    result = batch("--retry-errors", rows=[*rows, request("good", WHO)])
    *mended, again = lines_of(out)
    assert again == good and result.stderr.count(f"{len(BAD)} rows in")
    assert {line["response"]["status_code"] for line in mended} == {200}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    batch("--overwrite", rows=[request("a", WHO)], code=3)
    (line,) = lines_of(out)
    assert "pip install 'jax-longctx[serve]'" in line["response"]["body"]["error"]["message"]


@pytest.mark.parametrize("count", [3, 6])
def test_a_killed_run_of_requests_goes_on(batch, killed, out, tmp_path, monkeypatch, count):
    monkeypatch.setattr("time.time", lambda: 1_700_000_000.0)
    batch("--rows", 1, rows=ROWS)
    whole, other = out.read_bytes(), tmp_path / "other.jsonl"
    killed(count, "--rows", 1, into=other, code=None)
    assert not other.exists()
    monkeypatch.setattr("time.time", lambda: 1_800_000_000.0)
    batch("--rows", 1, into=other)
    assert other.read_bytes() == whole
