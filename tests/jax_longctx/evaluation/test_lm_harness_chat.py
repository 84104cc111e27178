"""What lm-evaluation-harness asks beside tasks: chat layouts, ids of special tokens, processes."""

import logging

import jax
import pytest

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install '.[harness]'")

from jax_longctx.api import LongContext
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.evaluation.lm_harness import LongctxLM
from jax_longctx.text import Tokenizer
from jax_longctx.text.tokenizer import ChatTemplate
from tests.goldens.harness_cases import write_model
from tests.support import tiny_config, tiny_engine

SYSTEM = {"role": "system", "content": "s"}
USER = {"role": "user", "content": "hello "}
REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.fixture
def model(tmp_path):
    tokenizer = Tokenizer.load(write_model(tmp_path, adds_bos=True))
    engine = tiny_engine(config=tiny_config(vocab_size=tokenizer.vocab_size, num_layers=1))
    return LongctxLM(LongContext(engine, tokenizer))


@pytest.fixture
def template(model, monkeypatch):
    """Gives the model's tokenizer another chat template."""

    def give(source):
        monkeypatch.setattr(model.tokenizer, "_chat", ChatTemplate(source, {}))

    return give


def test_a_template_that_refuses_the_system_gets_the_other_messages(model, template, caplog):
    template(REFUSES + "{{ messages[0]['content'] }}!")
    with caplog.at_level(logging.WARNING):
        assert model.apply_chat_template([SYSTEM, USER]) == "hello !"
    assert "no system; the system's message is left out" in " ".join(caplog.text.split())
    assert model.apply_chat_template([USER]) == "hello !"


def test_a_template_that_refuses_everything_is_an_error_at_once(model, template, caplog):
    template("{{ raise_exception('never') }}")
    with caplog.at_level(logging.WARNING), pytest.raises(InputError, match="never"):
        model.apply_chat_template([USER])
    assert caplog.text == ""


def test_the_start_of_an_answer_is_left_open(model, template):
    for source, text in [
        ("{{ messages[0]['content'] }}<end>", "hello "),
        ("{{ messages[0]['content'] | trim }}<end>", "hello"),
        ("hello {{ messages[0]['content'] | trim }}<end>", "hello hello"),
    ]:
        template(source)
        assert model.apply_chat_template([USER], add_generation_prompt=False) == text
    name = model.tokenizer_name
    template("{{ 'other' }}")
    # Prompts of a template of another name have another cache.
    assert model.tokenizer_name != name
    with pytest.raises(InputError, match="changes the last message"):
        model.apply_chat_template([USER], add_generation_prompt=False)


def test_a_text_begins_with_the_tokens_that_the_tokenizer_has(model, monkeypatch):
    begin, end = model.tokenizer.special_id("<|begin|>"), model.tokenizer.special_id("<|end|>")
    assert (model.prefix_token_id, model.eot_token_id) == (begin, end)
    assert model.tok_encode("a", add_special_tokens=False) == model.tok_encode("a")[1:]
    assert model.tok_encode("a")[0] == begin
    monkeypatch.setattr(model.tokenizer, "bos_id", None)
    assert model.prefix_token_id == end
    monkeypatch.setattr(model.tokenizer, "eos_ids", ())
    with pytest.raises(ConfigError, match="no end-of-text token"):
        _ = model.eot_token_id


def test_several_processes_are_refused(model, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(ConfigError, match="runs in one process"):
        LongctxLM(model.model)
