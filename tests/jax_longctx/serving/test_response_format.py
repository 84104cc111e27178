import json
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import openai
import pydantic
import pytest
from pydantic import Field

from jax_longctx.forms import json_form
from jax_longctx.settings import Sampling
from tests.jax_longctx.serving.tiny import chat, complete


class Fact(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    kind: Literal["town", "sea"]
    year: Annotated[int, Field(ge=0, le=99)]


def said(schema, name="fact"):
    return {"type": "json_schema", "json_schema": {"name": name, "schema": schema}}


FACT = said(Fact.model_json_schema())


def test_the_official_client_parses_answers_in_a_form(client):
    messages = [{"role": "user", "content": "Which?"}]
    for seed in range(3):
        how = {"model": "tiny", "messages": messages, "response_format": Fact, "seed": seed}
        found = client.chat.completions.parse(**how, max_tokens=64).choices[0]
        assert isinstance(found.message.parsed, Fact) and found.finish_reason == "stop"
    with pytest.raises(openai.LengthFinishReasonError):
        client.chat.completions.parse(**how, max_tokens=5)


@pytest.mark.parametrize("stream", [False, True])
def test_answers_with_and_without_a_form_are_those_alone(client, tiny, stream):
    def asked(number):
        form = {"response_format": FACT} if number % 2 else {}
        how = {"seed": number, "max_tokens": 40, "stream": stream, "extra_body": form}
        answer = complete(client, "The pass key", **how)
        return "".join(each.choices[0].text for each in (answer if stream else [answer]))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(asked, range(4)))
    for number, text in enumerate(found):
        form = json_form(Fact.model_json_schema()) if number % 2 else None
        sampling = Sampling(temperature=1.0, seed=number, form=form)
        (alone,) = tiny.generate("The pass key", sampling=sampling, max_tokens=40)
        assert text == alone.text
        if form is not None:
            Fact.model_validate_json(text)


def test_json_objects_and_several_answers(client):
    how = {"max_tokens": 64, "n": 4, "response_format": {"type": "json_object"}}
    for choice in chat(client, "Which?", seed=2, **how).choices:
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(choice.message.content), dict)
        else:
            assert choice.message.content.startswith("{")
    plain = chat(client, "Which?", seed=2, response_format={"type": "text"}, max_tokens=8)
    assert (
        plain.choices[0].message.content
        == chat(client, "Which?", seed=2, max_tokens=8).choices[0].message.content
    )


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"type": "xml"}, "response_format.type", "Input should be 'text', 'json_object' or"),
        ({"type": "json_schema"}, "response_format.json_schema", "has a json_schema where its"),
        (said({"type": "wrong"}), "response_format", "is refused: Invalid type: wrong"),
        (said({"not": {}}), "response_format", 'Unimplemented keys: ["not"]'),
        (said({"enum": ["a" * 70_000]}), "response_format", "at most 65,536 are taken"),
        ({**FACT, "extra": 1}, "response_format.extra", "unknown field"),
    ],
)
def test_what_cannot_be_followed_is_an_error_that_names_the_field(client, given, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "The pass key", extra_body={"response_format": given})
    assert caught.value.param == param and words in caught.value.body["message"]
