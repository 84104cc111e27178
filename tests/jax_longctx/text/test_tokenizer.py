import json
import random
import threading
import time
from types import SimpleNamespace

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import models

from jax_longctx.errors import CheckpointError, ConfigError, InputError
from jax_longctx.text import StopStrings, Tokenizer, chat_layout, check_vocabulary, plain_layout
from jax_longctx.text.child import ChatTemplate
from jax_longctx.text.tokenizer import StreamDecoder, select_template


@pytest.fixture
def directory(tmp_path, byte_level):
    byte_level.save(str(tmp_path / "tokenizer.json"))
    config = {
        "bos_token": "<|begin|>",
        "eos_token": {"content": "<|end|>", "special": True},
        "chat_template": "{{ bos_token }}{{ messages[0]['content'] | trim }}{{ eos_token }}",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def rewrite(path, **changes):
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | changes))


def test_round_trip_and_special_ids_which_are_added_once(directory, text, tmp_path, byte_level):
    tokenizer = Tokenizer.load(directory)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1,))
    assert tokenizer.decode([0, *ids, 1]) == text
    assert tokenizer.vocab_size == 300
    plain = tokenizer.encode("key")
    assert tokenizer.encode("key", bos=True) == [0, *plain]
    rendered = tokenizer.chat([{"role": "user", "content": " key "}])
    assert str(rendered) == "<|begin|>key<|end|>"
    assert tokenizer.encode(rendered, bos=True) == [0, *plain, 1]
    # Truncation saved in the file does not cut the text.
    byte_level.enable_truncation(max_length=5)
    byte_level.enable_padding(length=8)
    byte_level.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("a")) == 1


def test_configs_decide_on_special_tokens(directory):
    for value, expected in ((2, (1, 2)), ([1, 2], (1, 2)), (None, (1,))):
        rewrite(directory / "generation_config.json", eos_token_id=value)
        assert Tokenizer.load(directory).eos_ids == expected
    # The tokenizer's on the first, before the post-processor.
    rewrite(directory / "tokenizer_config.json", add_bos_token=False)
    tokenizer = Tokenizer.load(directory)
    assert tokenizer.bos_id == 0
    assert tokenizer.encode("key", bos=True) == tokenizer.encode("key")
    # Without special tokens there is none.
    (directory / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.load(directory)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.has_chat) == (None, (), False)
    assert tokenizer.encode("a", bos=True) == tokenizer.encode("a")
    (directory / "tokenizer_config.json").write_text("{}")
    rewrite(directory / "special_tokens_map.json", eos_token="<|turn|>")
    assert Tokenizer.load(directory).eos_ids == (2,)


def test_the_end_of_a_message_ends_no_answer_of_gpt_oss():
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    for texts, ends in ((["<|end|>"], (1,)), (["<|return|>"], (2,))):
        backend.add_special_tokens(texts)
        assert Tokenizer(backend, {}, chat_template="<|end|><|return|>").eos_ids == ends


def test_wrong_tokenizer_and_text_are_one_clear_error(directory):
    tokenizer = Tokenizer.load(directory)
    check_vocabulary(tokenizer, SimpleNamespace(vocab_size=300))
    with pytest.raises(CheckpointError, match=r"wrong tokenizer: its ids reach 299.* 299 embed"):
        check_vocabulary(tokenizer, SimpleNamespace(vocab_size=299))
    with pytest.raises(InputError, match="not Unicode"):
        tokenizer.encode("key \udc80")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json not found"):
        Tokenizer.load(directory)
    (directory / "tokenizer.json").mkdir()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read: Is a directory"):
        Tokenizer.load(directory)


def test_other_threads_run_while_a_long_text_is_encoded(directory, text):
    """The one that hears Ctrl-C is among them."""
    tokenizer, ticks, done = Tokenizer.load(directory), [], threading.Event()

    def tick():
        while not done.wait(0.001):
            ticks.append(time.monotonic())

    ticker = threading.Thread(target=tick)
    ticker.start()
    # A busy machine may let others wait: then a longer text is encoded.
    for copies in (2000, 8000, 32000):
        begun = time.monotonic()
        tokenizer.encode(text * copies)
        seconds = time.monotonic() - begun
        within = sum(0.1 * seconds < tick - begun < 0.7 * seconds for tick in ticks)
        if within > 3:
            break
    done.set()
    ticker.join()
    assert within > 3


def test_damaged_files_are_named(directory):
    for name, content, message in [
        ("tokenizer_config.json", b"{", "not a JSON file"),
        ("tokenizer_config.json", b"[]", "holds a list"),
        ("tokenizer_config.json", b'{"bos_token": "<missing>"}', "'<missing>' is not in"),
        ("tokenizer_config.json", b'{"chat_template": 3}', "chat_template is a int"),
        ("chat_template.json", b"{", r"chat_template\.json is not a JSON file"),
        ("tokenizer.json", b"{", "not a tokenizer file"),
        ("tokenizer.json", b'{"a": 1}', "not a tokenizer file"),
        ("tokenizer.json", b"\xff\xfe", "not UTF-8"),
    ]:
        (directory / name).write_bytes(content)
        if name == "tokenizer.json":
            (directory / "tokenizer_config.json").unlink(missing_ok=True)
        with pytest.raises(CheckpointError, match=message) as caught:
            Tokenizer.load(directory)
        assert "\n" not in str(caught.value)


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
    assert str(layout.context("A long text.")) == "<|turn|>user\nA long text."
    assert str(layout.question("Why?")) == "\n\nWhy?<|end|>\n<|turn|>assistant\n"
    whole = tokenizer.chat([{"role": "user", "content": "{{ not jinja }}\n\nWhy?"}])
    assert f"{layout.context('{{ not jinja }}')}{layout.question('Why?')}" == str(whole)
    # A template must show the message once.
    for template in ("nothing", "{{ messages[0]['content'] * 2 }}"):
        with pytest.raises(ConfigError, match="exactly once"):
            chat_layout(make(byte_level, template))
    # Without a template.
    assert str(plain_layout().context("Text.")) == "Text."
    assert str(plain_layout().question("Why?")) == "\n\nQuestion: Why?\nAnswer:"
    assert str(plain_layout(stem=True).question("The pass key is")) == "\n\nThe pass key is"
    with pytest.raises(InputError, match="document is empty"):
        plain_layout().context(" \n")
    with pytest.raises(InputError, match="question is empty"):
        plain_layout().question("")
    with pytest.raises(ConfigError, match="--no-chat"):
        Tokenizer(byte_level, {}).chat([])


def test_helpers_refusals_and_forms_of_templates(tmp_path, byte_level):
    assert render("{{ messages[0] | tojson }}", "é") == '{"role": "user", "content": "é"}'
    assert render("{% for i in [1, 2] %}{{ i }}{% break %}{% endfor %}") == "1"
    assert render("{% generation %}{{ messages[0]['content'] }}{% endgeneration %}") == "x"
    # transformers passes both.
    assert render("{{ tools is none }}, {{ documents is defined }}") == "True, True"
    assert render("{{ bos_token }}", tokens={"bos_token": "<s>"}) == "<s>"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    # A block's own line leaves no blank line behind, as in transformers.
    assert render("{% if true %}\na\n{% endif %}\n") == "a\n"
    with pytest.raises(InputError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match="refuses"):
        render("{{ messages.append(1) }}")
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    assert select_template(None) is None
    assert select_template("X") == "X"
    assert select_template(named) == "D"
    assert select_template(named[:1]) == "T"
    with pytest.raises(CheckpointError, match="chat_template is a list"):
        select_template([1])
    byte_level.save(str(tmp_path / "tokenizer.json"))
    # Older processors of text and images have it in a file of its own.
    rewrite(tmp_path / "chat_template.json", chat_template="own file")
    assert str(Tokenizer.load(tmp_path).chat([])) == "own file"
    config = {"chat_template": "config", "eos_token": "<|end|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert str(Tokenizer.load(tmp_path).chat([])) == "config"
    (tmp_path / "chat_template.jinja").write_text("file{{ eos_token }}")
    assert str(Tokenizer.load(tmp_path).chat([])) == "file<|end|>"
    # Variables of the tokenizer and of one chat; those of the library are its own.
    (tmp_path / "chat_template.jinja").write_text("{{ think }} {{ more is defined }}")
    tokenizer = Tokenizer.load(tmp_path, variables={"think": False})
    assert str(tokenizer.chat([])) == "False False"
    said = tokenizer.chat([], variables={"think": "<|end|>", "more": 1})
    assert str(said) == "<|end|> True" and tokenizer.eos_ids[0] not in tokenizer.encode(said)
    for name in ("messages", "add_generation_prompt", "eos_token"):
        with pytest.raises(InputError, match=f"variable '{name}' is set for you"):
            tokenizer.chat([], variables={name: 1})


SETTINGS = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def split(ids, rng):
    start = 0
    while start < len(ids):
        stop = start + rng.choice([0, 1, 1, 2, 3, 7, 40])
        yield ids[start:stop]
        start = stop


def stream(tokenizer, pieces):
    decoder = tokenizer.stream_decoder()
    shown = [decoder.push(piece) for piece in pieces]
    return shown, decoder.flush()


@SETTINGS
@given(data=st.data())
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_ids_in_any_split(request, kind, text, data):
    """Random ids are mostly invalid UTF-8, with special tokens between; real text is not."""
    tokenizer = Tokenizer(request.getfixturevalue(kind), {})
    some = st.integers(0, tokenizer.vocab_size - 1)
    one = st.one_of(some, st.sampled_from(tokenizer.encode("🙂é€")))
    whole = tokenizer.encode(text)
    ids = data.draw(st.one_of(st.lists(one, max_size=60), st.just(whole)))
    shown, rest = stream(tokenizer, split(ids, random.Random(data.draw(st.integers(0, 99)))))
    assert "".join(shown) + rest == tokenizer.decode(ids)
    assert ids != whole or "\ufffd" not in "".join(shown)


def test_character_is_held_until_it_is_whole_and_no_longer(byte_level, byte_fallback):
    tokenizer = Tokenizer(byte_level, {})
    ids = [byte_level.token_to_id(char) for char in byte_level.encode("🙈").tokens]
    decoder = tokenizer.stream_decoder()
    assert len(ids) >= 2
    assert [decoder.push([token]) for token in ids] == [""] * (len(ids) - 1) + ["🙈"]
    # One that is not whole comes out at the end.
    decoder = tokenizer.stream_decoder()
    assert decoder.push(tokenizer.encode("key 🙈")[:-1]) == "key "
    assert decoder.flush() == "\ufffd"
    decoder = tokenizer.stream_decoder()
    for token in tokenizer.encode("The pass key is 12345."):
        assert decoder.push([token]) == tokenizer.decode([token])
    # A Llama 2 decoder drops a text's first space; an answer is not a text's beginning.
    tokenizer = Tokenizer(byte_fallback, {})
    answer = [byte_fallback.token_to_id("▁the")]
    assert tokenizer.decode(answer) == "the"
    assert tokenizer.stream_decoder(after=tokenizer.encode("the key")).push(answer) == " the"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("sample", ["日本語 text 🙂 ", "\ufffd", "bytes"])
def test_each_id_is_decoded_a_bounded_number_of_times(request, kind, sample, monkeypatch):
    """Counted, not timed: text, and endless invalid bytes, which show no certain character."""
    tokenizer = Tokenizer(request.getfixturevalue(kind), {})
    invalid = tokenizer.encode("日")[-1:] * 3000
    ids = invalid if sample == "bytes" else tokenizer.encode(sample * 3000)[:3000]
    decode, seen = StreamDecoder._decode, []
    monkeypatch.setattr(
        StreamDecoder, "_decode", lambda self: seen.append(len(self._window)) or decode(self)
    )
    shown, rest = stream(tokenizer, ([token] for token in ids))
    assert "".join(shown) + rest == tokenizer.decode(ids)
    assert 0 < sum(seen) <= 30 * len(ids)


def cut(text, stops):
    """What is shown of a whole text: everything before the stop string that starts first."""
    starts = [text.find(stop) for stop in stops if stop in text]
    return text[: min(starts)] if starts else text


def stopped_by(pieces, stops):
    stopper = StopStrings(stops)
    shown = [stopper.push(piece) for piece in pieces]
    return "".join(shown) + stopper.flush(), stopper.stopped


@given(
    st.lists(st.text("ab\n", max_size=5), max_size=8),
    st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
)
def test_any_split_cuts_where_the_whole_text_does(pieces, stops):
    text = "".join(pieces)
    shown, stopped = stopped_by(pieces, stops)
    assert shown == cut(text, stops)
    assert (stopped is not None) == any(stop in text for stop in stops)


def test_stops_by_hand():
    for stop, pieces, shown, rest in [
        ("\n\nUser:", ["Yes.\n", "\nUs", "er: more", "never shown"], ["Yes.", "", "", ""], ""),
        ("END", ["EN", "TER", "E"], ["", "ENTER", ""], "E"),
    ]:
        stopper = StopStrings([stop])
        assert [stopper.push(piece) for piece in pieces] == shown
        assert stopper.stopped == (None if rest else stop) and stopper.flush() == rest
    assert stopped_by(["ab", "c"], ["abc", "b"]) == ("", "abc")
    assert stopped_by(["ab", "d"], ["abc", "b"]) == ("a", "b")
    assert StopStrings().push("any\n") == "any\n"
    with pytest.raises(InputError, match="stop string is empty"):
        StopStrings(["", "x"])
