"""Chat templates, and where the prompt is cut into context and question."""

import json

import pytest

from jax_longctx.errors import CheckpointError, ConfigError, InputError
from jax_longctx.text import Tokenizer, chat_layout, plain_layout
from jax_longctx.text.tokenizer import ChatTemplate, select_template

TURNS = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def render(source, content="x", tokens=()):
    template = ChatTemplate(source, dict(tokens))
    return template.render([{"role": "user", "content": content}], add_generation_prompt=True)


def make(byte_level, template):
    return Tokenizer(byte_level, {"bos_token": "<|begin|>"}, chat_template=template)


def test_layout_cuts_after_the_document(byte_level):
    tokenizer = make(byte_level, TURNS)
    layout = chat_layout(tokenizer)
    assert layout.context("A long text.") == "<|turn|>user\nA long text."
    assert layout.question("Why?") == "\n\nWhy?<|end|>\n<|turn|>assistant\n"
    whole = tokenizer.chat([{"role": "user", "content": "{{ not jinja }}\n\nWhy?"}])
    assert layout.context("{{ not jinja }}") + layout.question("Why?") == whole


@pytest.mark.parametrize("template", ["nothing", "{{ messages[0]['content'] * 2 }}"])
def test_template_that_does_not_show_the_message_once(byte_level, template):
    with pytest.raises(ConfigError, match="exactly once"):
        chat_layout(make(byte_level, template))


def test_plain_layouts(byte_level):
    assert plain_layout().context("Text.") == "Text."
    assert plain_layout().question("Why?") == "\n\nQuestion: Why?\nAnswer:"
    assert plain_layout(stem=True).question("The pass key is") == "\n\nThe pass key is"
    with pytest.raises(InputError, match="document is empty"):
        plain_layout().context(" \n")
    with pytest.raises(InputError, match="question is empty"):
        plain_layout().question("")
    with pytest.raises(ConfigError, match="--no-chat"):
        Tokenizer(byte_level, {}).chat([])


def test_helpers_that_templates_expect_and_refusals():
    assert render("{{ messages[0] | tojson }}", "é") == '{"role": "user", "content": "é"}'
    assert render("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}") == "1"
    assert render("{% generation %}{{ messages[0]['content'] }}{% endgeneration %}") == "x"
    assert render("{{ bos_token }}", tokens={"bos_token": "<s>"}) == "<s>"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    # A block's own line leaves no blank line behind, as in transformers.
    assert render("{% if true %}\na\n{% endif %}\n") == "a\n"
    with pytest.raises(InputError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match="refuses"):
        render("{{ messages.append(1) }}")


def test_template_forms(tmp_path, byte_level):
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    assert select_template(None) is None
    assert select_template("X") == "X"
    assert select_template(named) == "D"
    assert select_template(named[:1]) == "T"
    with pytest.raises(CheckpointError, match="chat_template is a list"):
        select_template([1])
    byte_level.save(str(tmp_path / "tokenizer.json"))
    config = {"chat_template": "config", "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer.load(tmp_path).chat([]) == "config"
    (tmp_path / "chat_template.jinja").write_text("file{{ eos_token }}")
    assert Tokenizer.load(tmp_path).chat([]) == "file<|end|>"
