"""Clients of other projects, unmodified, ask the server; `.ci/clients.txt` has their versions."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.jax_longctx.serving.test_response_format import Fact
from tests.jax_longctx.serving.tiny import BOOK, chat, read
from tests.patience import patience

ROOT = Path(__file__).parents[3]
CLIENTS = ROOT / ".cache/clients"
MADE = "python -m venv .cache/clients && .cache/clients/bin/pip install -r .ci/clients.txt"
QUESTION = "What is the pass key?"

LITELLM = """
import json, sys
import litellm
address, context, question = sys.argv[1:]
how = {"model": "openai/tiny", "api_base": address, "api_key": "none", "temperature": 0}
how |= {"messages": [{"role": "user", "content": question}], "max_tokens": 12}
how |= {"extra_body": {"context": context}}
whole = litellm.completion(**how).choices[0].message.content
pieces = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(stream=True, **how)]
print(json.dumps([whole, "".join(pieces)]))
"""
LANGCHAIN = """
import json, sys
from typing import Annotated, Literal
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

class Fact(BaseModel):
    kind: Literal["town", "sea"]
    year: Annotated[int, Field(ge=0, le=99)]

address, context, question = sys.argv[1:]
how = {"model": "tiny", "base_url": address, "api_key": "none", "temperature": 0}
model = ChatOpenAI(max_tokens=12, extra_body={"context": context}, **how)
pieces = [chunk.text for chunk in model.stream(question)]
drawn = ChatOpenAI(max_tokens=64, seed=0, **how | {"temperature": 1})
assert isinstance(drawn.with_structured_output(Fact).invoke("Which?"), Fact)
print(json.dumps([model.invoke(question).text, "".join(pieces)]))
"""


def ran(program, *arguments, **variables):
    """What the program of the clients' environment prints."""
    done = subprocess.run(
        [CLIENTS / "bin" / program, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CLIENTS / "bin/llm").exists(), reason=f"no environment of clients: {MADE}"
    ),
]


@pytest.mark.parametrize("script", [LITELLM, LANGCHAIN], ids=["litellm", "langchain"])
def test_a_python_client_asks_about_a_context(server, client, script):
    with server.http() as http:
        context = read(http, text=BOOK)["id"]
    expected = chat(client, QUESTION, context, temperature=0, max_tokens=12)
    arguments = [f"{server.url}/v1", context, QUESTION]
    # Else litellm asks the network what models cost.
    found = ran("python", "-c", script, *arguments, LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert json.loads(found) == [expected.choices[0].message.content] * 2


def llm(server, folder, *given):
    entry = {"model_id": "ours", "model_name": "tiny", "api_base": f"{server.url}/v1"}
    entries = json.dumps([{**entry, "supports_schema": True}])
    (folder / "extra-openai-models.yaml").write_text(entries)
    return ran("llm", "-m", "ours", "--key", "none", *given, LLM_USER_PATH=str(folder)).strip()


@pytest.mark.parametrize("how", [[], ["--no-stream"]])
def test_llm_asks(server, client, tmp_path, how):
    found = llm(
        server, tmp_path, *how, "-o", "temperature", "0", "-o", "max_tokens", "12", QUESTION
    )
    expected = chat(client, QUESTION, temperature=0, max_tokens=12).choices[0].message.content
    assert found == expected.strip() != ""


def test_llm_gets_an_answer_in_a_form(server, tmp_path):
    form = json.dumps(Fact.model_json_schema())
    how = ["-o", "temperature", "1", "-o", "seed", "0", "-o", "max_tokens", "64"]
    Fact.model_validate_json(llm(server, tmp_path, "--schema", form, *how, "Which?"))
