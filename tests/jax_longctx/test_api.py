"""Text in, text out: answers, stop strings, and callbacks."""

import numpy as np
import pytest

import jax_longctx
from jax_longctx.api import LongContext
from jax_longctx.errors import InputError
from jax_longctx.text import Tokenizer
from tests.jax_longctx.cli.tiny_model import write_tokenizer
from tests.support import joined, tiny_config, tiny_engine


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    tokenizer = Tokenizer.load(folder)
    config = tiny_config(vocab_size=tokenizer.vocab_size)
    return LongContext(tiny_engine(config=config, chunk=16), tokenizer)


def test_generate_is_the_engines_tokens_as_text(model):
    answer = model.generate("hello there", max_tokens=12, stop_at_eos=False)[0]
    rows = [model.tokenizer.encode("hello there", bos=True)]
    assert answer.tokens == joined(model.engine.generate(rows, max_tokens=12))[0]
    assert answer.text == model.tokenizer.decode(answer.tokens)
    assert answer.finish == "length"


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


def test_a_callback_that_fails_leaves_the_context_whole(model):
    context = model.prefill("some text")
    whole = model.ask(context, "why", max_tokens=20)[0].text

    def fail(row, text):
        raise KeyboardInterrupt

    try:
        model.ask(context, "why", max_tokens=20, on_text=fail)
    except KeyboardInterrupt as kept:
        # As a notebook keeps the traceback, and with it every frame.
        assert model.ask(context, "why", max_tokens=20)[0].text == whole
        assert kept.__traceback__ is not None
    else:
        pytest.fail("the callback's exception was swallowed")


@pytest.mark.parametrize("reserve", [40, 300])
def test_a_footprint_is_what_a_context_holds_and_a_step_reads(model, reserve):
    texts = ["some text " * 30] * 3
    context = model.prefill(texts, reserve=reserve)
    (tokens,) = set(context.lengths)
    found = model.footprint(tokens, batch=3, reserve=reserve)
    assert found.kept == found.resident == found.peak == context.resident_bytes
    # Of both layers the keys and values of every slot, two kv heads of 8 in float32.
    assert found.read == 3 * context.slots * 2 * 2 * 2 * 8 * 4


@pytest.mark.parametrize("sizes", [(0, 1, 0), (1, 0, 0), (1, 1, -1)])
def test_a_footprint_of_nothing_is_refused(model, sizes):
    tokens, batch, reserve = sizes
    with pytest.raises(InputError, match="expected at least 1 token, 1 text and a reserve of 0"):
        model.footprint(tokens, batch=batch, reserve=reserve)


def test_a_score_is_that_of_the_engines_tokens(model):
    pairs = {"some text": "and more", "another, longer text": "x"}
    encode = model.tokenizer.encode
    rows = [encode(text, bos=True) for text in pairs]
    expected = model.engine.loglikelihoods(rows, [encode(text) for text in pairs.values()])
    found = model.score(list(pairs), list(pairs.values()))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)
    assert model.score("some text", "and more", through="context")[0].total == pytest.approx(
        expected[0].total, abs=1e-4
    )


def test_the_layout_is_the_checkpoints_or_plain(model):
    layout = model.layout(chat=False)
    assert layout.question("Why?") == "\n\nQuestion: Why?\nAnswer:"
    assert model.layout() == model.layout(chat=model.tokenizer.has_chat)


def test_an_empty_prompt_is_named(model):
    with pytest.raises(InputError, match="prompt 1 is empty"):
        model.generate(["text", ""])


def test_names_load_on_first_use():
    for name in jax_longctx.__all__:
        assert getattr(jax_longctx, name) is not None
    assert {"load", "__version__"} <= {*dir(jax_longctx)}
    assert jax_longctx.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = jax_longctx.nothing
