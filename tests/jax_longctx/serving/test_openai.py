import itertools
import json
import math
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import numpy as np
import openai
import pytest
import tokenizers
from tokenizers import decoders

from jax_longctx.api import LongContext
from jax_longctx.settings import Sampling
from jax_longctx.text import Tokenizer
from jax_longctx.text.tokens import Places, TokenNames
from tests.jax_longctx.serving.tiny import BOOK, asked, chat, complete, generated, read
from tests.patience import patience
from tests.support import score

PROMPT = "The pass key is 12345. Remember it. The pass key"
QUESTIONS = ["What is the pass key?", "Remember what?", "Is it 12345?", "Which key?"]


def chat_of(model, question):
    return model.tokenizer.chat([{"role": "user", "content": question}])


def test_completion_and_chat_of_the_one_model_are_those_of_generate(client, tiny):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "jax-longctx"
    ids = tiny.tokenizer.encode(PROMPT, bos=True)
    expected = generated(tiny, PROMPT, seed=7)
    for prompt in (PROMPT, ids, [ids], [PROMPT]):
        found = complete(client, prompt, seed=7, max_tokens=12)
        assert found.choices[0].text == expected.text
        assert found.choices[0].finish_reason == expected.finish
        assert found.usage.completion_tokens == len(expected.tokens)
        assert found.usage.prompt_tokens == len(ids)
    expected = generated(tiny, chat_of(tiny, QUESTIONS[0]), seed=3)
    found = chat(client, QUESTIONS[0], seed=3, max_completion_tokens=12)
    assert found.choices[0].message.content == expected.text
    assert found.choices[0].message.role == "assistant"


def test_streams_are_the_whole_answers_and_without_a_seed_drawn_anew(client, tiny):
    expected = generated(tiny, PROMPT, seed=9, max_tokens=40)
    how = {"seed": 9, "max_tokens": 40, "stream": True}
    *chunks, last = complete(client, PROMPT, stream_options={"include_usage": True}, **how)
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
    assert chunks[-1].choices[0].finish_reason == expected.finish
    assert last.choices == [] and last.usage.completion_tokens == len(expected.tokens)
    expected = generated(tiny, chat_of(tiny, "Why?"), seed=9, max_tokens=40)
    chunks = list(chat(client, "Why?", **how))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == expected.text
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    texts = {complete(client, PROMPT, max_tokens=16).choices[0].text for _ in range(4)}
    assert len(texts) > 1


def test_stops_end_the_text_before_them(client, tiny):
    # The first seed whose answer is not ended by the model itself.
    whole, seed = next(
        (answer.text, seed)
        for seed in range(50)
        if (answer := generated(tiny, PROMPT, seed=seed, max_tokens=40)).finish == "length"
    )
    stop = whole[10:13]
    expected = generated(tiny, PROMPT, seed=seed, max_tokens=40, stop=[stop])
    assert expected.finish == "stop" and len(expected.text) < len(whole)
    how = {"seed": seed, "max_tokens": 40, "stop": [stop, "@@@"]}
    for stream in (False, True):
        found = complete(client, PROMPT, stream=stream, **how)
        chunks = list(found) if stream else [found]
        assert "".join(chunk.choices[0].text for chunk in chunks) == expected.text
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "how",
    [
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.8, "min_p": 0.02},
        {"temperature": 0.6, "presence_penalty": 1.5, "frequency_penalty": -0.5},
        pytest.param({"temperature": 1.5, "top_k": 5}, marks=pytest.mark.slow),
        pytest.param({"temperature": 0.9, "repetition_penalty": 1.3}, marks=pytest.mark.slow),
    ],
)
def test_sampling_options_are_those_of_the_library(client, tiny, how):
    ours = {key: how[key] for key in ("top_k", "min_p", "repetition_penalty") if key in how}
    theirs = {key: value for key, value in how.items() if key not in ours}
    found = complete(client, PROMPT, seed=11, max_tokens=16, extra_body=ours, **theirs)
    assert found.choices[0].text == generated(tiny, PROMPT, seed=11, max_tokens=16, **how).text


@pytest.mark.parametrize("stream", [False, True])
def test_n_answers_to_each_prompt_are_those_of_a_list_of_prompts(client, tiny, stream):
    how = {"seed": 4, "max_tokens": 6, "stream": stream, "temperature": 1.0}
    prompts = [PROMPT, "Remember"]
    texts, usage = told(complete(client, prompts, n=3, **how))
    sampling = Sampling(temperature=1.0, seed=4)
    given = [each for each in prompts for _ in range(3)]
    alone = tiny.generate(given, sampling=sampling, max_tokens=6)
    assert texts == [answer.text for answer in alone] and len({*texts[:3]}) == 3
    if not stream:
        read = [len(tiny.tokenizer.encode(each, bos=True)) for each in prompts]
        assert usage.prompt_tokens == sum(read)
        assert usage.completion_tokens == sum(len(answer.tokens) for answer in alone)
    texts, _ = told(chat(client, "Why?", n=2, **how))
    rendered = [chat_of(tiny, "Why?")] * 2
    alone = tiny.generate(rendered, sampling=sampling, max_tokens=6)
    assert texts == [answer.text for answer in alone]


def told(answer):
    """The texts of the choices, whole or as they come, and the usage of a whole answer."""
    texts: dict[int, str] = {}
    for each in [answer] if hasattr(answer, "choices") else answer:
        for choice in each.choices:
            part = getattr(choice, "delta", None) or getattr(choice, "message", None)
            text = choice.text if part is None else part.content
            texts[choice.index] = texts.get(choice.index, "") + (text or "")
    return [texts[index] for index in sorted(texts)], getattr(answer, "usage", None)


def test_fields_that_change_nothing_are_taken(server, client):
    plain = {"model": "tiny", "seed": 3, "max_tokens": 6, "temperature": 0.7}
    asked = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": ""},
        {"role": "user", "content": "How?"},
    ]
    expected = chat_body(client, plain | {"messages": asked})
    part = {"type": "text", "text": "How?", "cache_control": {"type": "ephemeral"}}
    decked = [
        {"role": "user", "content": "Why?", "name": "bob", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [], "annotations": [], "audio": None}
        | {"refusal": None, "function_call": None},
        {"role": "user", "content": [part], "annotations": []},
    ]
    beside = [
        {"tools": [], "tool_choice": "auto", "functions": None, "user": "x", "store": True},
        {"metadata": {"a": "b"}, "reasoning_effort": "high", "verbosity": "low"},
        {"stream_options": {"include_usage": True}, "min_p": 0, "n": 1, "logit_bias": {}},
    ]
    for more in beside:
        assert chat_body(client, plain | {"messages": decked} | more) == expected
    # The likeliest token alone.
    greedy = chat_body(client, plain | {"messages": asked, "temperature": 0})
    assert chat_body(client, plain | {"messages": asked, "top_p": 0}) == greedy
    for message, said in [
        ({"tool_calls": [{"id": "1"}]}, "messages.0.tool_calls.0.function is missing"),
        ({"audio": {"id": "1"}}, "messages.audio is not supported: leave it out"),
        ({"nickname": "bob"}, "unknown field 'messages.0.nickname'"),
        ({"content": None}, "messages.0.content is missing"),
    ]:
        with pytest.raises(openai.BadRequestError, match=said):
            chat_body(client, plain | {"messages": [{"role": "user", "content": "a"} | message]})


def chat_body(client, body):
    return client.post("/chat/completions", body=body, cast_to=object)["choices"][0]["message"]


def test_logprobs_are_those_of_the_model(client, tiny):
    how = {"temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    found = chat(client, "Why?", **how)
    content = found.choices[0].logprobs.content
    answer = generated(tiny, chat_of(tiny, "Why?"), max_tokens=8, temperature=0.0)
    prompt = tiny.tokenizer.encode(chat_of(tiny, "Why?"), bos=True)
    (logits,) = score(tiny.engine, [prompt + answer.tokens])
    logits = logits[len(prompt) - 1 : -1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert len(content) == len(answer.tokens)
    for entry, row, token in zip(content, expected, answer.tokens, strict=True):
        assert math.isclose(entry.logprob, row[token], abs_tol=1e-4)
        text = tiny.tokenizer.decode([token])
        assert entry.token == text or (entry.token.startswith("bytes:") and "\ufffd" in text)
        best = sorted(row, reverse=True)[:3]
        assert np.allclose([each.logprob for each in entry.top_logprobs], best, atol=1e-4)
    raw = b"".join(bytes(entry.bytes or []) for entry in content)
    assert raw.decode("utf-8", "replace") == answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_completion_logprobs_point_into_the_text(client, stream):
    parts = 0
    for seed in range(6):
        how = {"seed": seed, "max_tokens": 24, "logprobs": 5}
        found = complete(client, PROMPT, stream=stream, **how)
        chunks = [each.choices[0] for each in (found if stream else [found])]
        text = "".join(chunk.text for chunk in chunks)
        scored = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
        tokens = [token for each in scored for token in each.tokens]
        offsets = [at for each in scored for at in each.text_offset]
        assert len(tokens) == len(offsets) and tokens
        assert offsets[0] == 0 and offsets == sorted(offsets)
        for name, at in zip(tokens, offsets, strict=True):
            parts += name.startswith("bytes:")
            assert name.startswith(("bytes:", "<|")) or text[at:].startswith(name)
        for each in scored:
            assert all(value <= 0 for value in each.token_logprobs)
            # None is lost, whatever the names of special tokens and parts of characters.
            assert all(len(best) == 5 for best in each.top_logprobs)
    assert parts > 3


def test_tokens_of_a_sentencepiece_vocabulary_keep_their_spaces():
    vocabulary = ["<unk>", "</s>", "<0xC3>", "<0xA4>", "a", "\u2581key", "key", "\u2581", "<0x0A>"]
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    model = tokenizers.models.BPE(ids, merges=[], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["</s>"])
    spaces, strip = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    steps = [spaces, decoders.ByteFallback(), decoders.Fuse(), strip]
    backend.decoder = decoders.Sequence(steps)
    tokenizer = Tokenizer(backend, {})
    names = TokenNames(tokenizer)
    assert names.distinct([5, 6, 2, 1, 2]) == [" key", "key", "bytes:\\xc3", "</s>", "<0xC3>"]
    assert (names.raw(5), names.raw(2), names.raw(1)) == (b" key", b"\xc3", None)
    with mock.patch.object(tokenizer, "decode", wraps=tokenizer.decode) as decode:
        names = TokenNames(tokenizer)
        for _ in range(3):
            names.distinct([5, 6, 2, 1])
    # Of the text before them, and of each token once.
    assert decode.call_count == 5
    ids = [5, 2, 3, 6, 5, 8, 4]
    for after in ([], [4]):
        decoder, places = tokenizer.stream_decoder(after), Places(tokenizer, after)
        text = "".join(decoder.push([token]) for token in ids) + decoder.flush()
        found = [places.next(token) for token in ids]
        first = " key" if after else "key"
        assert [name for name, _ in found] == [
            *(first, "bytes:\\xc3", "bytes:\\xa4", "key", " key", "\n", "a")
        ]
        for name, at in found:
            assert text[at:].startswith("\xe4" if name.startswith("bytes:") else name)
    # Of a prompt, whose special tokens are in its text.
    ids, places = [1, 5, 2, 3, 1, 6, 5], Places(tokenizer, special=True)
    text = tokenizer.decode(ids, special=True)
    found = [places.next(token) for token in ids]
    shown = [("\xe4" if name.startswith("bytes:") else name, at) for name, at in found]
    assert shown == [(name, text.index(name, at)) for name, at in shown]
    assert [at for _, at in found] == [0, 4, 8, 8, 9, 13, 16] and text[16:] == " key"


def test_a_chat_to_a_base_checkpoint_names_the_other_route(serve, tiny):
    base = LongContext(tiny.engine, Tokenizer(tiny.tokenizer._backend, {}))
    assert not base.tokenizer.has_chat
    running = serve(base)
    with running.client() as client:
        with pytest.raises(openai.BadRequestError, match="send a prompt to /v1/completions"):
            chat(client, "Why?")
        assert complete(client, PROMPT, max_tokens=2).choices


def test_answers_amid_others_are_those_alone(server, client, tiny):
    alone, cases = [], []
    with server.http() as http:
        for book, seeds in ((None, 4), (BOOK, 1), ("Remember it.", 1)):
            name = None if book is None else read(http, text=book)["id"]
            for question, seed in itertools.product(QUESTIONS, range(seeds)):
                how = {"seed": seed, "max_tokens": 24}
                cases.append((question, name, how))
                if book is None:
                    alone.append(generated(tiny, chat_of(tiny, question), **how).text)
                else:
                    alone.append(asked(tiny, book, question, **how))

    def answer(case):
        question, context, how = case
        return chat(client, question, context, **how).choices[0].message.content

    with ThreadPoolExecutor(len(cases)) as pool:
        assert list(pool.map(answer, cases)) == alone


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"model": "other"}, 404, "there is no model 'other'"),
        ({"extra_body": {"tool_choice": "required"}}, 400, 'give "none" or "auto"'),
        ({"n": 0}, 400, "n: Input should be greater than or equal to 1"),
        ({"n": 35, "prompt": ["a", "b"]}, 400, "has 2 prompts with 35 answers each, this server"),
        ({"temperature": 3.0}, 400, "temperature: Input should be less than or equal to 2"),
        ({"max_tokens": 65}, 400, "max_tokens is 65, this server gives at most 64"),
        ({"presence_penalty": 2.5}, 400, "presence_penalty: Input should be less than or equal"),
        ({"extra_body": {"best": 1}}, 400, "unknown field 'best'"),
        ({"extra_body": {"context": "ctx_no"}}, 404, "there is no context 'ctx_no'"),
        ({"prompt": ""}, 400, "prompt must be one text"),
        ({"prompt": ["a", ""]}, 400, "or a list of such, none empty"),
        ({"prompt": ["a"] * 69}, 400, "has 69 prompts, this server takes 68 at a time"),
        ({"prompt": ["a", 1]}, 400, "prompt.1: Input should be a text or a list of token ids"),
        ({"prompt": ["a", "key " * 600]}, 400, "are longer than the 512 tokens"),
        ({"max_tokens": 0}, 400, "give at least 1, or echo: true"),
        ({"echo": True, "logprobs": 1, "prompt": "key " * 600}, 400, "longer than the 512 tokens"),
        ({"prompt": [1 << 20]}, 400, "token id"),
        ({"prompt": [1, 2**63]}, 400, "Input should be less than 2147483648"),
        ({"prompt": [[2**70]]}, 400, "Input should be less than 2147483648"),
        ({"prompt": [-1]}, 400, "Input should be greater than or equal to 0"),
        ({"prompt": "key " * 600}, 400, "are longer than the 512 tokens"),
        ({"stop": ["a"] * 17}, 400, "expected at most 16 strings"),
    ],
)
def test_errors_are_one_clear_line(client, changes, status, said):
    given = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, **changes}
    with pytest.raises(openai.APIStatusError) as caught:
        client.completions.create(**given)
    assert caught.value.status_code == status
    assert said in caught.value.body["message"]
    assert "\n" not in caught.value.body["message"]


GUIDE = (Path(__file__).parents[3] / "docs/guides/serve.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


@pytest.fixture
def guided(serve, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text(BOOK)
    return serve(tiny, name="demo-model")


def test_python_examples_run(guided, capsys):
    first, second, third = blocks("python")
    exec(first.replace(ADDRESS, guided.url), {})
    assert capsys.readouterr().out
    exec(second.replace(ADDRESS, guided.url), {})
    told = capsys.readouterr().out.split()
    count = guided.served.contexts.listed()[0].record()["tokens"]
    assert told.count(str(count)) == 2
    exec(third.replace(ADDRESS, guided.url), {})
    assert re.fullmatch(r"number=\d+\n", capsys.readouterr().out)


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_shell_example_runs(guided):
    (command,) = blocks("sh")
    done = subprocess.run(
        command.replace(ADDRESS, guided.url),
        shell=True,
        capture_output=True,
        text=True,
        timeout=patience(60),
    )
    record = json.loads(done.stdout)
    assert record["state"] == "ready" and record["ttl"] == 3600
