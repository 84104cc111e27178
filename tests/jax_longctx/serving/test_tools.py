import itertools
import json
from typing import Annotated, Literal

import openai
import pydantic
import pytest
from pydantic import Field

from jax_longctx.answers import AnswerReader
from jax_longctx.api import LongContext
from jax_longctx.serving.prompts import Lengths
from jax_longctx.serving.tools import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    ToolReader,
    tool_form,
)
from jax_longctx.settings import Sampling
from jax_longctx.text import Tokenizer
from tests.jax_longctx.serving.tiny import chat
from tests.jax_longctx.test_forms import model_over, sentencepiece

TEMPLATE = (
    "{% if tools %}<|turn|>system\nCall by <tool_call>: {{ tools | tojson }}<|end|>\n{% endif %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls %}"
    "{{ c.id }}: {{ c.function.name }} {{ c.function.arguments.year }}{% endfor %}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


class Look(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")

    kind: Literal["town", "sea"]
    year: Annotated[int, Field(ge=0, le=99)]


LOOK = {"name": "look", "description": "Looks.", "parameters": Look.model_json_schema()}
TOOLS = [{"type": "function", "function": each} for each in (LOOK, {"name": "end"})]
# What each form makes of two calls of `look`.
A, B = '{"kind": "sea", "year": 7}', '{"kind": "town", "year": 1}'
FIRST, SECOND = (f'{{"name": "look", "arguments": {each}}}' for each in (A, B))
WRITTEN = [
    (HERMES, f"<tool_call>\n{FIRST}\n</tool_call>\n<tool_call>\n{SECOND}\n</tool_call>"),
    (MISTRAL, f"[TOOL_CALLS] [{FIRST}, {SECOND}]"),
    (MISTRAL_NAMED, f"[TOOL_CALLS]look[ARGS]{A}[TOOL_CALLS]look[ARGS]{B}"),
    (LLAMA, f"<|python_tag|>{FIRST}; {SECOND}".replace("arguments", "parameters")),
]
FORMS, NAMES = [form for form, _ in WRITTEN], ["look", "end"]


def arguments(calls):
    assert all(call["type"] == "function" and len(call["id"]) == 9 for call in calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize(("form", "written"), WRITTEN)
def test_calls_are_read_however_their_text_comes(form, written):
    expected = [("look", json.loads(each)) for each in (A, B)]
    before = "" if form is LLAMA else "I look [it] up. <"
    for size in (1, 3, 7, 400):
        reader, text = ToolReader(form, NAMES, None), before + written
        told = [reader.push("".join(part)) for part in itertools.batched(text, size)]
        rest, calls = reader.end()
        assert "".join(told) + rest == before and arguments(calls) == expected
    other = written.replace("look", "Bob")
    for plain in ("It is 7.", " ", written[:-20], form.begin + "[1, 2]", '{"year": 7}', other):
        reader = ToolReader(form, NAMES, None)
        told = "".join(map(reader.push, plain))
        assert (told + reader.end()[0], reader.end()[1]) == (plain, [])
    reader = ToolReader(form, NAMES, 1)
    reader.push(written)
    assert arguments(reader.end()[1]) == expected[:1]


def test_forms_are_known_by_their_templates():
    for template, form in [
        (None, None),
        ("{{ messages }} <tool_call>", None),
        (TEMPLATE, HERMES),
        ("{% if tools %}<tool_call><function=name>", None),
        ("{% if tools %}[AVAILABLE_TOOLS] [TOOL_CALLS] [", MISTRAL),
        ("{% if tools %}[TOOL_CALLS]name[ARGS]", MISTRAL_NAMED),
        ('{% if tools %}{"name": name, "parameters": {}}<|eot_id|>', LLAMA),
        ("{% if tools %}{{ tools }}", None),
    ]:
        assert tool_form(template) is form


@pytest.mark.parametrize("form", FORMS)
def test_a_random_model_that_has_to_call_writes_what_is_read(form):
    tokenizer = sentencepiece()
    tokenizer._backend.add_special_tokens(["[TOOL_CALLS]", "[ARGS]"])
    model = model_over(Tokenizer(tokenizer._backend, {"eos_token": "</s>"}))
    grammar = form.grammar([LOOK, {"name": "end"}], model.tokenizer)
    sampling = Sampling(form=grammar, temperature=1.5)
    found = set()
    for answer in model.generate(["town"] * 8, sampling=sampling, max_tokens=150):
        reader = AnswerReader(model.tokenizer, (), (), model.tokenizer.eos_ids, form.marks)
        text, calls = reader.push(answer.tokens) + reader.flush(), ToolReader(form, NAMES, None)
        assert calls.push(text) == ""
        if answer.finish == "stop":
            ((name, given),) = arguments(calls.end()[1])
            found.add(name)
            assert name == "end" or Look.model_validate(given)
    assert "look" in found


@pytest.fixture(scope="module")
def caller(tiny):
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    tokenizer = Tokenizer(tiny.tokenizer._backend, settings, chat_template=TEMPLATE)
    return LongContext(tiny.engine, tokenizer)


LONG = Lengths(whole=1024, question=128, answer=120, keep_from=32, share_from=1024)
MUST = {"type": "function", "function": {"name": "look"}}


def test_the_official_client_gets_calls_whole_and_streamed(serve, caller):
    with serve(caller, lengths=LONG).client() as client:
        how = {"tools": TOOLS[:1], "tool_choice": "required", "max_tokens": 110}
        for seed in (1,):
            whole = chat(client, "Which?", seed=seed, **how).choices[0]
            assert whole.finish_reason == "tool_calls" and whole.message.content is None
            (call,) = whole.message.tool_calls
            look = Look.model_validate_json(call.function.arguments)
            assert call.function.name == "look"
            chunks = list(chat(client, "Which?", seed=seed, stream=True, **how))
            *_, last = (chunk.choices[0] for chunk in chunks)
            (streamed,) = [c.choices[0].delta for c in chunks if c.choices[0].delta.tool_calls]
            assert streamed.tool_calls[0].function.model_dump() == call.function.model_dump()
            assert last.finish_reason == "tool_calls" and streamed.tool_calls[0].index == 0
        asked = [{"role": "user", "content": "Which?"}]
        parsed = client.chat.completions.parse(
            model="tiny",
            messages=asked,
            tools=[openai.pydantic_function_tool(Look)],
            tool_choice={"type": "function", "function": {"name": "Look"}},
            seed=1,
        )
        assert parsed.choices[0].message.tool_calls[0].function.parsed_arguments == look
        # The call and its result, with words that only look like special tokens.
        result = {"role": "tool", "tool_call_id": call.id, "content": "The <|end|> sea"}
        history = [*asked, {**whole.message.model_dump(exclude_none=True)}, result]
        found = client.chat.completions.create(
            model="tiny", messages=history, tools=TOOLS, seed=3, max_tokens=8
        )
        written = f"<|turn|>assistant\n{call.id}: look {look.year}<|end|>\n<|turn|>tool\nThe "
        given = [TOOLS[0], {"type": "function", "function": {"name": "end"}}]
        messages = [
            *asked,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"id": call.id, "function": {"name": "look", "arguments": look.model_dump()}}
                ],
            },
            {"role": "tool", "content": "The <|end|> sea"},
        ]
        prompt = caller.tokenizer.chat(messages, tools=given)
        assert written in prompt.text and json.dumps(given) in prompt.text
        sampling = Sampling(temperature=1.0, seed=3)
        (alone,) = caller.generate(prompt, sampling=sampling, max_tokens=8)
        assert found.choices[0].message.content == alone.text
        assert found.choices[0].message.tool_calls is None


@pytest.mark.parametrize(
    ("given", "param", "words"),
    [
        ({"tools": TOOLS}, "tools", "the template defines no form of calls"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "names no function of tools"),
        (
            {"tools": TOOLS, "tool_choice": {**MUST, "function": {"name": "no"}}},
            "tool_choice",
            "no f",
        ),
        (
            {"tools": [{"type": "function", "function": {**LOOK, "strict": True}}]},
            "tools",
            "strict is not supported where the answer need not call",
        ),
        (
            {"tools": TOOLS, "response_format": {"type": "json_object"}},
            "response_format",
            "exclude each other",
        ),
        ({"functions": [LOOK]}, "functions", "functions is not supported"),
    ],
)
def test_what_is_not_supported_names_its_field(client, given, param, words):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, "Which?", **given)
    assert caught.value.param == param and words in caught.value.body["message"]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "tool", "content": "7"}, "a message of the role tool has a tool_call_id"),
        ({"role": "user", "content": "a", "tool_call_id": "1"}, "and no other has one"),
        (
            {
                "role": "assistant",
                "tool_calls": [{"id": "1", "function": {"name": "a", "arguments": "{"}}],
            },
            "the arguments of the call '1' are no JSON",
        ),
    ],
)
def test_histories_that_cannot_be_are_named(client, message, words):
    with pytest.raises(openai.BadRequestError, match=words):
        client.chat.completions.create(model="tiny", messages=[message])
