import dataclasses
import functools
from importlib import metadata
from unittest.mock import create_autospec

import jax
import numpy as np
import pytest
import tokenizers

import jax_longctx
from jax_longctx import api
from jax_longctx.api import LongContext
from jax_longctx.cli.options import run_facts
from jax_longctx.engine import Context, RunningBatch
from jax_longctx.engine.scoring import loglikelihoods
from jax_longctx.errors import ConfigError, InputError, TrainedLengthWarning
from jax_longctx.methods import METHODS
from jax_longctx.models.params import abstract_params
from jax_longctx.models.rope import RopeConfig
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh
from jax_longctx.text import PromptText, Tokenizer
from tests.jax_longctx.cli.tiny_model import write_tokenizer
from tests.jax_longctx.engine.test_running import compilations
from tests.jax_longctx.text.test_encoding import backend_of
from tests.small_methods import small_method
from tests.support import engine_over, joined, tiny_config, tiny_engine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    tokenizer = Tokenizer.load(folder)
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    return LongContext(tiny_engine(config=config, chunk=16), tokenizer)


def longer(model):
    """The model's configuration, trained to 1024 tokens."""
    rope = RopeConfig(kind="default", theta=1e4, trained_length=1024)
    return dataclasses.replace(model.config, rope=rope, max_position=1024)


def test_generate_is_the_engines_tokens_as_text_and_the_layout_may_be_plain(model):
    answer = model.generate("hello there", max_tokens=12, stop_at_eos=False)[0]
    rows = [model.tokenizer.encode("hello there", bos=True)]
    assert answer.tokens == joined(model.engine.generate(rows, max_tokens=12))[0]
    assert answer.text == model.tokenizer.decode(answer.tokens)
    assert answer.finish == "length"
    layout = model.layout(chat=False)
    assert str(layout.question("Why?")) == "\n\nQuestion: Why?\nAnswer:"
    assert model.layout() == model.layout(chat=model.tokenizer.has_chat)


def test_streamed_text_is_the_answer(model):
    context = model.prefill(["some text", "another, longer text"])
    seen = ["", ""]

    def on_text(row, text):
        seen[row] += text

    answers = model.ask(context, ["why", "how so"], max_tokens=40, on_text=on_text)
    assert seen == [answer.text for answer in answers]
    assert all(answer.first_token_seconds > 0 for answer in answers)


def test_an_answer_ends_before_a_stop_string(model):
    context = model.prefill("some text")
    whole = model.ask(context, "why", max_tokens=40, stop_at_eos=False)[0].text
    stop = whole[9:12]
    cut = model.ask(context, "why", max_tokens=40, stop=[stop], stop_at_eos=False)[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish == "stop"
    # No token beyond the one that completed the stop string.
    assert stop in model.tokenizer.decode(cut.tokens)
    assert stop not in model.tokenizer.decode(cut.tokens[:-1])
    # The context is whole after an answer that was cut short.
    assert model.ask(context, "why", max_tokens=40, stop_at_eos=False)[0].text == whole


@pytest.mark.parametrize("name", ["full", "quest", "h2o"])
@pytest.mark.quick("full")
def test_many_questions_over_one_text_are_answered_as_each_alone(model, name, monkeypatch):
    monkeypatch.setattr(jax_longctx.api, "TOGETHER", 2)
    config = longer(model)
    engine = tiny_engine(small_method(name), config=config, chunk=64)
    model = LongContext(engine, model.tokenizer)
    context = model.prefill("some text that is long enough to be shared. " * 9)
    questions = ["why", "how so", "when was it, and where", "who", "what"]
    sampling = jax_longctx.Sampling(temperature=0.8, seed=7)
    how = {"max_tokens": 20, "stop_at_eos": False, "sampling": sampling}
    whole = [
        model.ask(context, question, **{**how, "sampling": sampling.at([(0, number)])})[0]
        for number, question in enumerate(questions)
    ]
    # One of them stops at a text of its own.
    stop = (whole[1].text[5:8],)
    seen = [""] * 5
    join = create_autospec(RunningBatch.join, side_effect=RunningBatch.join)
    monkeypatch.setattr(RunningBatch, "join", join)

    def on_text(number, text):
        seen[number] += text

    answers = model.ask_all(context, questions, stop=stop, on_text=on_text, **how)
    assert seen == [answer.text for answer in answers]
    for found, expected in zip(answers, whole, strict=True):
        assert found.text == expected.text.split(stop[0])[0]
        assert found.tokens == expected.tokens[: len(found.tokens)]
        assert found.first_token_seconds > 0
    assert answers[1].finish == "stop"
    assert join.call_count == (0 if name == "h2o" else 5)
    # The context is whole, until it is given up.
    again = model.ask_all(context, questions[:3], keep=False, **how)
    assert [answer.text for answer in again] == [answer.text for answer in whole[:3]]
    with pytest.raises(InputError, match="given up"):
        model.ask(context, "why")


def test_a_callback_that_fails_leaves_the_context_whole(model):
    context = model.prefill("some text")
    whole = model.ask(context, "why", max_tokens=20)[0].text

    def fail(row, text):
        raise KeyboardInterrupt

    # As a notebook keeps the traceback, and with it every frame.
    with pytest.raises(KeyboardInterrupt) as kept:
        model.ask(context, "why", max_tokens=20, on_text=fail)
    assert model.ask(context, "why", max_tokens=20)[0].text == whole
    assert kept.tb is not None


@pytest.mark.parametrize("reserve", [40, 300])
def test_a_footprint_is_what_a_context_holds_and_a_step_reads(model, reserve):
    texts = ["some text " * 12] * 3
    context = model.prefill(texts, reserve=reserve)
    (tokens,) = set(context.lengths)
    found = model.footprint(tokens, batch=3, reserve=reserve)
    assert found.kept == found.resident == found.peak == context.resident_bytes
    # Of both layers the keys and values of every slot, two kv heads of 8 in float32.
    assert found.read == 3 * context.slots * 2 * 2 * 2 * 8 * 4


@pytest.fixture
def short(model, monkeypatch):
    """The model, as if it had been trained to 24 tokens."""
    config = dataclasses.replace(model.config, max_position=24)
    monkeypatch.setattr(model.engine, "config", config)
    return model


BEYOND = (
    "tokens are more than the 24 that the model was trained to, and under this method the answer "
    "may be noise; methods that go on: dynamic-ntk, free-pages, infllm, reattention"
)


@pytest.mark.parametrize("way", ["prefill", "generate", "load_context"])
def test_a_text_beyond_the_trained_length_is_warned_of_first(short, monkeypatch, tmp_path, way):
    text, saved = "a text of more tokens than that", tmp_path / "saved"
    tokens = len(short.tokenizer.encode(text, bos=True))
    if way == "load_context":
        with pytest.warns(TrainedLengthWarning):
            short.save_context(short.prefill(text), saved)
        act = functools.partial(short.load_context, saved)
    else:
        monkeypatch.setattr(short.engine, "prefill", None)
        act = functools.partial(getattr(short, way), ["short", text])
    # Warnings are errors here: what comes first is what is seen.
    with pytest.raises(TrainedLengthWarning) as warned:
        act()
    assert str(warned.value) == f"{tokens} {BEYOND}"


def test_a_question_and_an_answer_may_go_beyond_the_trained_length(short):
    context = short.prefill("some text")
    (answer,) = short.ask(context, "why", max_tokens=4, stop_at_eos=False)
    assert answer.warning is None
    question = "why is it so, and what is it"
    length = context.lengths[0] + len(short.tokenizer.encode(question))
    assert length > 24
    with pytest.warns(TrainedLengthWarning, match=f"^{length} tokens are more"):
        (answer,) = short.ask(context, question, max_tokens=4, stop_at_eos=False)
    assert answer.warning == f"{length + 4} {BEYOND}"
    # Token ids are counted by who gives them.
    ids = [short.tokenizer.encode(question)]
    for ask in (short.ask, short.ask_all):
        assert ask(context, ids, max_tokens=4, stop_at_eos=False)[0].warning == answer.warning
    # The answer alone: nobody knows before how long it is.
    (answer,) = short.ask(context, "why", max_tokens=40, stop_at_eos=False)
    assert answer.warning is not None and answer.warning.endswith(BEYOND)


def test_methods_that_go_on_are_not_warned_of(short, monkeypatch):
    assert short.length_warning(24) is None
    with monkeypatch.context() as patched:
        # What cannot be imported is not named to go on.
        bad = {"bad": "jax_longctx.methods.no_such"}
        patched.setattr(METHODS, "data", {**METHODS.data, **bad})
        assert short.length_warning(25) == f"25 {BEYOND}"
    llama3 = RopeConfig(kind="llama3", theta=1e4, trained_length=8, factor=4.0)
    scaled = dataclasses.replace(short.config, rope=llama3)
    trained = dataclasses.replace(short.config, max_position=128)
    monkeypatch.setattr(short.engine, "config", trained)
    for name in METHODS:
        monkeypatch.setattr(short.engine, "method", small_method(name))
        goes_on = name == "dynamic-ntk" or name.startswith(("reattention", "infllm", "free-"))
        evicts_at_slots = name in ("streaming-llm", "h2o-shared") or name.startswith("citrus")
        assert (short.length_warning(10**9) is None) == (goes_on or evicts_at_slots), name
    monkeypatch.setattr(short.engine, "config", scaled)
    # It would replace the checkpoint's own scaling, and is refused there.
    said = short.length_warning(10**9)
    assert said is not None and said.endswith("that go on: free-pages, infllm, reattention")


def test_a_score_is_that_of_the_engines_tokens(model):
    pairs = {"some text": "and more", "another, longer text": "x"}
    encode = model.tokenizer.encode
    rows = [encode(text, bos=True) for text in pairs]
    expected = loglikelihoods(model.engine, rows, [encode(text) for text in pairs.values()])
    found = model.score(list(pairs), list(pairs.values()))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert model.score("some text", "and more", through="context")[0].total == pytest.approx(
        expected[0].total, abs=1e-4
    )


def test_each_way_in_encodes_texts_as_text_and_pieces_without_prefix(monkeypatch):
    tokenizer = Tokenizer(tokenizers.Tokenizer.from_str(backend_of("legacy")), {"bos_token": "<s>"})
    model = LongContext(tiny_engine(chunk=16), tokenizer)
    encode, engine = tokenizer.encode, model.engine

    def fed(place, name, call):
        """The arguments with which `place.name` is called."""
        fake = create_autospec(getattr(place, name), side_effect=KeyboardInterrupt)
        monkeypatch.setattr(place, name, fake)
        with pytest.raises(KeyboardInterrupt):
            call()
        return fake.call_args.args

    first, then, special = "The capital of France is", " Paris</s>", set(range(1, 5))
    whole = encode(first + then, begins=True)
    one, two = encode(first, begins=True), encode(then)
    assert one + two == whole and special.isdisjoint(whole)
    (rows,) = fed(engine, "prefill", lambda: model.prefill(first + then))
    assert rows == [whole]
    context = create_autospec(Context, instance=True, lengths=[4], batch=1)
    (_, rows) = fed(engine, "stream", lambda: model.ask(context, then))
    assert rows == [two]
    (_, sizes, _) = fed(model, "_batch", lambda: model.ask_all(context, [then, first]))
    assert sizes == [len(two), len(encode(first))]
    (_, *rows) = fed(api, "loglikelihoods", lambda: model.score([first, ""], [then, first]))
    assert rows == [[one, []], [two, one]]
    # A rendered template, and one of whose parts the library knows.
    prompts = [first + then, PromptText.of("", then)]
    (rows,) = fed(engine, "generate", lambda: model.generate(prompts))
    assert rows == [[*encode(first + " Paris", begins=True), 2], encode(then, begins=True)]


def test_mistakes_are_named(model, tmp_path):
    one, two = model.prefill("some text"), model.prefill(["one text", "another"])
    together = "asked over one text, this context has 2; use `ask`"
    for call, message in [
        (lambda: model.generate(["text", ""]), "prompt 1 is empty"),
        (lambda: model.ask(two, "Why?"), "2 contexts need as many questions, 1 given"),
        (lambda: model.ask(two, ["Why?"] * 3), "2 contexts need as many questions, 3 given"),
        (lambda: model.ask_all(two, ["why", "how so"]), together),
        (lambda: model.ask_all(one, []), "no questions given"),
    ]:
        with pytest.raises(InputError, match=message):
            call()
    for tokens, batch, reserve in ((0, 1, 0), (1, 0, 0), (1, 1, -1)):
        with pytest.raises(InputError, match="at least 1 token, 1 text and a reserve of 0"):
            model.footprint(tokens, batch=batch, reserve=reserve)
    # Before the folder is looked at.
    with pytest.raises(ConfigError, match="unknown dtype 'int8'; known: float32, bfloat16"):
        jax_longctx.load(tmp_path, dtype="int8")
    # A method alone is a run's spec.
    with pytest.raises(ConfigError, match="method and choose exclude each other"):
        jax_longctx.load(tmp_path, small_method("full"), choose=lambda model: small_method("h2o"))


def test_a_source_tree_that_is_not_installed_has_a_version_too(model, monkeypatch):
    found = metadata.version

    def version(name):
        if name == "jax-longctx":
            raise metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(metadata, "version", version)
    assert jax_longctx.__version__ == "not installed"
    facts = run_facts(model.engine)
    assert facts["versions"]["jax_longctx"] == "not installed"
    assert facts["versions"]["jax"] == jax.__version__


def test_names_load_on_first_use():
    for name in jax_longctx.__all__:
        assert getattr(jax_longctx, name) is not None
    assert {"load", "__version__"} <= {*dir(jax_longctx)}
    assert jax_longctx.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jax_longctx.nothing


@pytest.mark.parametrize(
    ("name", "by_layer"), [("full", False), pytest.param("h2o", True, marks=pytest.mark.slow)]
)
def test_the_programs_of_many_questions_compile_ahead(model, name, by_layer):
    """Those that take long; the engine has shapes in place of weights."""
    jax.clear_caches()
    config = longer(model)
    loaded = tiny_engine(small_method(name), config=config, chunk=64, by_layer=by_layer)
    params = abstract_params(config, RunSpec())
    how = {"chunk": 64, "by_layer": by_layer}
    engine = engine_over(config, params, small_method(name), make_mesh(), **how)
    many = LongContext(engine, model.tokenizer)
    text, questions = "some text that is long enough. " * 9, ["why", "how so", "who"]
    sizes = [len(model.tokenizer.encode(question)) for question in questions]
    tokens = len(model.tokenizer.encode(text, bos=True))
    reserve = max(sizes) + 20
    many.compile_all(tokens, sizes, reserve=reserve, max_tokens=20).wait(check=True)
    engine.take_params(loaded.params)
    with compilations() as names:
        context = many.prefill(text, reserve=reserve)
        answers = many.ask_all(context, questions, max_tokens=20)
    large = ("_segment", "_decode_block", "_through_layer", "_finish", "_next_state", "_wanted")
    assert not {f"jit({program})" for program in large} & set(names)
    assert all(answer.tokens for answer in answers)
