import asyncio
import json
import re

import httpx
import pytest
from typer.testing import CliRunner

from jax_longctx.cli.main import app
from jax_longctx.errors import CheckpointError
from jax_longctx.serving.schema import Sampled
from jax_longctx.serving.server import LongServer
from tests.jax_longctx.cli.tiny_model import converted, write_source
from tests.jax_longctx.serving.tiny import chat, complete, generated

GENERATION = {"temperature": 0.3, "top_k": 3, "repetition_penalty": 1.3, "do_sample": False}
PROMPT = "The pass key is"


def test_requests_take_the_models_sampling_for_what_they_do_not_say(serve, tiny):
    sampled = Sampled.of_model({**GENERATION, "eos_token_id": 2, "min_p": None})
    with serve(tiny, sampled=sampled).client() as client:
        for said in [{}, {"temperature": 1.5, "top_k": 0}, {"top_p": 0.0}, {"min_p": None}]:
            how = {**sampled.model_dump(), **{k: v for k, v in said.items() if v is not None}}
            how["top_p"] = how["top_p"] or 1e-9
            expected = generated(tiny, PROMPT, seed=4, max_tokens=24, **how).text
            found = complete(client, PROMPT, seed=4, max_tokens=24, extra_body=said)
            assert found.choices[0].text == expected
        rendered = tiny.tokenizer.chat([{"role": "user", "content": "Why?"}])
        expected = generated(tiny, rendered, seed=4, **sampled.model_dump()).text
        assert chat(client, "Why?", seed=4, max_tokens=12).choices[0].message.content == expected


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"temperature": "warm"}, "temperature: Input should be a valid number; got 'warm'"),
        ({"temperature": -1}, "greater than or equal to 0; got -1"),
        ({"top_k": -2}, "top_k: Input should be greater than or equal to 0"),
        ({"repetition_penalty": 0}, "repetition_penalty: Input should be greater than 0"),
    ],
)
def test_a_wrong_value_of_the_model_is_one_line(said, words):
    with pytest.raises(CheckpointError, match="--sampling-defaults openai") as caught:
        Sampled.of_model(said)
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert Sampled.of_model({"top_k": -1}) == Sampled()


def test_the_command_says_what_it_takes_of_the_model(tmp_path_factory, monkeypatch):
    source = tmp_path_factory.mktemp("source") / "hf"
    write_source(source)
    older = converted(tmp_path_factory, source)
    (source / "generation_config.json").write_text(json.dumps(GENERATION))
    newer, given = converted(tmp_path_factory, source), []

    def run(server, listening, *, on_ready):
        async def ask():
            transport = httpx.ASGITransport(server.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://box") as http:
                assert (await http.get("/health")).status_code == 200

        on_ready()
        asyncio.run(ask())
        given.append(server.options.sampled)
        server.contexts.close()
        return 0

    monkeypatch.setattr(LongServer, "run", run)
    line = r'^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d 127\.0\.0\.1:\d+ "GET /health" 200 \d\.\d{3}s$'
    for folder, options, sampled in [
        (older, [], {}),
        (newer, [], {name: GENERATION[name] for name in Sampled.model_fields & GENERATION.keys()}),
        (newer, ["--sampling-defaults", "openai"], {}),
        (newer, ["--no-request-log", "--sampling-defaults", "openai"], {}),
    ]:
        words = ["serve", "-c", str(folder), "--port", "0", "--length", "128", *options]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
        assert given.pop() == Sampled(**sampled)
        noted = "temperature 0.3, top_k 3, repetition_penalty 1.3" in result.stderr
        assert noted == bool(sampled)
        logged = re.findall(line, result.stderr, re.MULTILINE)
        assert len(logged) == ("--no-request-log" not in options)
