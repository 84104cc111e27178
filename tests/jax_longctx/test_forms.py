import json
from typing import Annotated, Literal

import numpy as np
import pydantic
import pytest
import tokenizers
from pydantic import Field
from tokenizers import decoders

from jax_longctx.api import LongContext
from jax_longctx.engine import Ask, RunningBatch
from jax_longctx.errors import InputError
from jax_longctx.forms import MOST_CHARACTERS, Forms, json_form
from jax_longctx.settings import Sampling
from jax_longctx.text import Tokenizer
from tests.jax_longctx.cli.conftest import book, loads, refused, run, tiny, tokenizer_folder
from tests.jax_longctx.engine.test_running import compilations
from tests.small_methods import small_method
from tests.support import random_rows, tiny_config, tiny_engine

__all__ = ["book", "loads", "run", "tiny", "tokenizer_folder"]


class Closed(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)


class Place(Closed):
    name: Annotated[str, Field(max_length=5)]
    year: Annotated[int, Field(ge=-40, le=2030)]
    kind: Literal["town", "sea", "Straße 東京"]


class Trip(Closed):
    places: Annotated[list[Place], Field(max_length=1)]
    by: Annotated[str, Field(pattern=r"^[a-z]{2}-\d{2}$")] | None
    sure: bool


class Tree(Closed):
    word: Annotated[str, Field(min_length=1, max_length=3)]
    left: "Tree | None" = None


MODELS = [Place, Trip, Tree]


def sentencepiece():
    """A tokenizer whose other characters are bytes, as Llama 2's and Mistral's."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["\u2581", "e", "\u2581town", "\u00e9", "name", '":', '{"', "\u6771\u4eac", "12"]
    ids = {piece: number for number, piece in enumerate(pieces)}
    model = tokenizers.models.BPE(ids, merges=[], unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(model)
    backend.add_special_tokens(["</s>", "<unk>"])
    spaces, strip = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([spaces, decoders.ByteFallback(), decoders.Fuse(), strip])
    return Tokenizer(backend, {"eos_token": "</s>"})


def model_over(tokenizer, seed=0, method="full"):
    """A random model with two tokens more than the tokenizer has."""
    config = tiny_config(vocab_size=tokenizer.vocab_size + 2)
    method = small_method(method)
    return LongContext(tiny_engine(method, config=config, seed=seed, chunk=16), tokenizer)


def answers(model, schema, rows, max_tokens=100, **how):
    """Answers of random models to random questions, in a form."""
    sampling = Sampling(form=json_form(schema), temperature=1.5, seed=7, **how)
    context = model.prefill(random_rows([40] * rows, vocab=200))
    return model.ask(context, ["town"] * rows, sampling=sampling, max_tokens=max_tokens)


def check_valid(found, kind):
    """Every answer that has ended is valid; how many have."""
    ended = [answer for answer in found if answer.finish == "stop"]
    for answer in ended:
        kind.model_validate_json(answer.text)
    return len(ended)


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("made", ["bytes", "sentencepiece"])
def test_what_a_random_model_finishes_is_valid_for_the_schema(tiny, kind, made):
    model = tiny if made == "bytes" else model_over(sentencepiece(), seed=3)
    found = answers(model, kind.model_json_schema(), rows=12, max_tokens=130)
    assert check_valid(found, kind) >= 3
    assert len({answer.text for answer in found}) > 6


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.slow
def test_what_many_random_models_finish_is_valid(seed):
    tokenizer = sentencepiece()
    for kind in MODELS:
        model = model_over(tokenizer, seed)
        found = answers(model, kind.model_json_schema(), rows=32, min_p=0.02 * seed)
        assert check_valid(found, kind) >= 8


def test_any_object_and_characters_of_many_bytes(tiny):
    found = answers(tiny, {"type": "object"}, rows=8, max_tokens=60)
    assert all(isinstance(json.loads(a.text), dict) for a in found if a.finish == "stop")
    word = {"enum": ["\U0001f30a\u6f22\u5b57"]}
    schema = {"type": "object", "properties": {"w": word}, "required": ["w"]}
    for model in (tiny, model_over(sentencepiece())):
        for answer in answers(model, {**schema, "additionalProperties": False}, rows=2):
            assert json.loads(answer.text) == {"w": "\U0001f30a\u6f22\u5b57"}
            assert answer.finish == "stop"


@pytest.mark.parametrize("name", ["quest", "snapkv", "refreshkv", "citrus"])
@pytest.mark.quick("quest")
def test_forms_hold_under_other_methods(name):
    model = model_over(sentencepiece(), method=name)
    questions = ["town"] * 4
    context = model.prefill(random_rows([40] * 4, vocab=200), questions=questions)
    sampling = Sampling(form=json_form(Place.model_json_schema()), temperature=1.5)
    assert check_valid(model.ask(context, questions, sampling=sampling), Place)


def test_rows_with_and_without_a_form_run_side_by_side():
    model = model_over(sentencepiece())
    engine, form = model.engine, json_form(Place.model_json_schema())
    samplings = [
        Sampling(temperature=0.9, seed=(5,)),
        Sampling(temperature=1.5, seed=(6,), form=form),
        Sampling(presence_penalty=1.0, seed=(7,)),
        Sampling(temperature=1.5, seed=(8,), form=form, frequency_penalty=0.4),
    ]
    context = model.prefill(random_rows([40], vocab=200), reserve=120)
    question = random_rows([3], vocab=200, seed=1)
    ends = {"max_tokens": 90, "stop_ids": model.tokenizer.eos_ids}
    alone = [
        [t for (new,) in engine.stream(context, question, sampling=each, **ends) for t in new]
        for each in samplings
    ]
    batch = RunningBatch(engine, places=3, slots=engine.slots_for(256), reserve=120)
    found, places, waiting = dict[int, list[int]](), {}, list(range(4))
    while waiting or batch.running:
        if waiting and batch.free:
            number = waiting.pop(0)
            place, first = batch.join(context, Ask(question[0], samplings[number], **ends))
            places[place], found[number] = number, [first.token]
        for place, chosen in batch.step().items():
            found[places[place]] += [each.token for each in chosen]
            # Others wait no longer than a token for the row with a form.
            assert len(chosen) <= 1 or not any(a.sampling.form for a in batch.running.values())
    assert [found[number] for number in range(4)] == alone
    for number in (1, 3):
        Place.model_validate_json(model.tokenizer.decode(found[number]))


def test_a_batch_without_forms_and_penalties_calls_the_programs_that_it_called():
    model = model_over(sentencepiece())
    engine = model.engine
    context = model.prefill(random_rows([40], vocab=200), reserve=64)
    batch = RunningBatch(engine, places=2, slots=engine.slots_for(128), reserve=64)

    def run(*samplings):
        for each in samplings:
            batch.join(context, Ask([1, 2], each, max_tokens=8))
        while batch.running:
            batch.step()

    run(Sampling())
    with compilations() as first:
        run(Sampling(), Sampling(temperature=1.0))
    with compilations() as second:
        run(Sampling(), Sampling(form=json_form({"type": "object"}), frequency_penalty=1.0))
    with compilations() as third:
        run(Sampling(temperature=1.0), Sampling())
    assert (first, third) == ([], []) and second


def test_an_answer_ends_at_its_longest_before_its_form_does(tiny):
    for answer in answers(tiny, Trip.model_json_schema(), rows=4, max_tokens=5):
        assert answer.finish == "length" and len(answer.tokens) == 5


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        (
            {"type": "number", "not": {}},
            'Unimplemented keys: \\["not"\\]',
        ),
        ({"type": "wrong"}, "Invalid type: wrong"),
        ({"$ref": "#/nope"}, "Pointer '/nope' does not exist"),
        ({"enum": ["a" * MOST_CHARACTERS]}, "characters; at most 65,536 are taken"),
        ({"enum": []}, "is refused: "),
    ],
)
def test_schemas_that_cannot_be_followed_are_refused_in_one_line(tiny, schema, said):
    with pytest.raises(InputError, match=said) as caught:
        answers(tiny, schema, rows=1)
    assert "\n" not in str(caught.value)


def test_forms_need_a_tokenizer_with_an_end():
    engine = tiny_engine()
    sampling = Sampling(form=json_form({"type": "object"}))
    with pytest.raises(InputError, match="needs the tokenizer; ask with LongContext"):
        next(engine.generate([[1, 2]], max_tokens=4, sampling=sampling))
    endless = Tokenizer(sentencepiece()._backend, {})
    with pytest.raises(InputError, match="no token that ends an answer"):
        Forms(endless, endless.vocab_size)(sampling.form)
    # Models over one engine keep forms of their own tokenizers.
    first = LongContext(engine, sentencepiece())
    second = LongContext(first.engine, endless)
    assert first.engine.forms is first.forms and second.engine.forms is second.forms


def test_a_form_allows_every_token_that_goes_on_and_no_other():
    tokenizer = sentencepiece()
    size = tokenizer.vocab_size
    form = Forms(tokenizer, size + 40)(json_form({"type": "string", "maxLength": 1}))
    ids = {tokenizer.piece(token): token for token in range(size)}
    letters = {f"<0x{byte:02X}>" for byte in (*range(0x20, 0x7F), *range(0xC2, 0xF5))}
    for piece, allowed in [
        ('"', {"<0x22>", '":'}),
        ("<0xC3>", {*letters, "\u2581", "e", "\u00e9", '{"'}),
        ("<0xA9>", {f"<0x{byte:02X}>" for byte in range(0x80, 0xC0)}),
        ('"', {"<0x22>"}),
        ("</s>", {"</s>"}),
    ]:
        bits = np.unpackbits(form.allowed().view(np.uint8), bitorder="little")
        assert bits.size >= size + 40
        assert {tokenizer.piece(int(token)) for token in np.flatnonzero(bits)} == allowed
        form.take([ids[{'"': "<0x22>"}.get(piece, piece)]])


def test_the_commands_take_a_schema(loads, run, book, tmp_path, monkeypatch):
    schema, rows, out = (tmp_path / name for name in ("schema.json", "in.jsonl", "out.jsonl"))
    schema.write_text(json.dumps(Place.model_json_schema()))
    options = ["-c", "m", "--schema", schema, "--temperature", 1.5]
    (answer,) = run("ask", book, "Which?", *options, "--json", code=0).stdout.splitlines()
    record = json.loads(answer)
    Place.model_validate_json(record["answer"])
    assert record["sampling"]["form"] == json_form(Place.model_json_schema())
    rows.write_text(json.dumps({"prompt": "The pass key"}) + "\n")
    run("batch", rows, out, *options, code=0)
    Place.model_validate_json(json.loads(out.read_text())["answer"])
    for text, words in [("{", "is no JSON schema: Expecting"), ("[]", "it holds a list")]:
        schema.write_text(text)
        refused(run("ask", book, "Which?", *options), words)
    refused(run("ask", book, "Which?", "-c", "m", "--schema", tmp_path / "no"), "cannot be read")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refused(run("ask", book, "Which?", *options), "pip install 'jax-longctx[forms]'")
