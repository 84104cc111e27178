import dataclasses
import json
import os
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tokenizers

import checkpoints_convert
import jax_longctx
from jax_longctx.models.storage import describe_files, read_manifest
from jax_longctx.text import chat_layout
from tests.jax_longctx.cli.conftest import refused


@pytest.fixture
def calls(monkeypatch):
    made = []

    def record(name):
        def call(source, destination, **options):
            options.pop("progress")(1, 2)
            options.pop("tell", print)("left out 2 tensors")
            made.append((name, str(source), Path(destination), options))

        return call

    for name in ("convert", "export"):
        monkeypatch.setattr(checkpoints_convert, name, record(name), raising=False)
    monkeypatch.setattr("jax_longctx.cli.convert._tell", lambda *_: None)
    return made


def test_options_and_directions(run, calls, tmp_path):
    for args, message in [
        ("--dtype int8", "unknown --dtype 'int8'; known: float32, bfloat16"),
        ("--to-hf --dtype float32", "leave out --dtype"),
        ("--to-hf --weights int8", "leave out --weights"),
        ("--weights bfloat16", "--weights takes int8 alone here; for floats give --dtype"),
    ]:
        refused(run("convert", "source", tmp_path / "new", *args.split()), message)
    assert calls == []
    source = tmp_path / "model.gguf"
    source.touch()
    forms = ("--dtype", "bfloat16", "--weights", "int8")
    result = run("convert", source, tmp_path / "new", *forms, code=0)
    assert f"left out 2 tensors\nwritten to {tmp_path / 'new'}" in result.stderr
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "manifest.json").touch()
    assert run("convert", tmp_path / "new", tmp_path / "hf", "--to-hf").exit_code == 0
    assert calls == [
        ("convert", str(source), tmp_path / "new", {"dtype": "bfloat16", "weights": "int8"}),
        ("export", str(tmp_path / "new"), tmp_path / "hf", {}),
    ]


@pytest.mark.parametrize("there", ["../", "~/"])
def test_commands_take_any_path(run, source, book, tmp_path, monkeypatch, there):
    for name in ("here", "home ü"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("HOME", str(tmp_path / "home ü"))
    model, asked = f"{there}model", ("--max-tokens", 2, "-m", "full", "--json")
    written, made, after = run("convert", source, model, code=0).stderr.splitlines()[-3:]
    shown = str(Path(model).expanduser())
    assert written == f"written to {shown}" and made.startswith("2 layers, float32, "), made
    assert after == f"next: jax-longctx ask FILE QUESTION -c {shlex.quote(shown)}"
    unread = run("generate", "The", "-c", source)
    refused(unread, f"once: jax-longctx convert {source} {source.name}-converted")
    run("generate", "The", f"--checkpoint={model}", *asked, code=0)
    keep = (f"--save-context={there}read", "-c", model)
    first = run("ask", book, "Who?", *keep, *asked, code=0)
    load = (f"--load-context={there}read", "-c", model)
    again = run("ask", "Who?", *load, *asked, code=0)
    assert json.loads(again.stdout)["answer"] == json.loads(first.stdout)["answer"]
    refused(run("ask", book, "Who?", *keep, *asked), "exists; choose another name")
    run("convert", model, f"{there}hf", "--to-hf", code=0)
    assert "exists; choose another" in run("convert", source, f"{there}hf", code=2).stderr
    run("plan", f"--model={model}", "--target", "h200x1", "--context", 64, code=0)
    assert os.listdir(".") == []


def test_names_that_are_too_long_are_refused_before_anything_is_read(run, checkpoint, book, loads):
    for name in ("n" * 250, "n" * 300):
        refused(run("ask", book, "Who?", "-c", "m", "--save-context", name), "File name too long")
        refused(run("convert", checkpoint, name, "--to-hf"), "File name too long")
    refused(run("generate", "The", "-c", "n" * 300), "cannot be read: File name too long")
    assert loads == []


@pytest.mark.slow
def test_commands_take_a_checkpoint_in_8_bits(run, source, checkpoint, book, tmp_path):
    folder = tmp_path / "eight"
    assert run("convert", source, folder, "--weights", "int8").exit_code == 0
    ask = ("ask", book, "What is the pass key?", "--max-tokens", 8, "--json", "-m", "full")
    eight, both = (
        json.loads(run(*ask, *options).stdout)
        for options in (("-c", folder), ("-c", checkpoint, "--weights", "int8"))
    )
    assert eight["answer"] == both["answer"] and eight["weights"] == "int8"
    plan = ("plan", "--target", "h200x1", "--context", 64, "--json", "--model")
    small, large = (json.loads(run(*plan, each).stdout) for each in (folder, checkpoint))
    assert (small["weights"], large["weights"]) == ("int8", None)
    assert small["memory_bytes"]["weights"] < large["memory_bytes"]["weights"]
    assert run("methods", "full", "-c", folder, "--context", 64).exit_code == 0
    run("warm", folder, "--length", 20, "--question", 4, "--answer", 4, code=0)
    for again in ((*plan, folder), ("warm", folder), (*ask, "-c", folder)):
        result = run(*again, "--weights", "bfloat16")
        assert result.exit_code == 2 and "converted with weights int8" in result.stderr, again
    refused(run("convert", folder, tmp_path / "hf", "--to-hf"), "holds its matrices in int8")


def test_the_python_api_agrees_and_exports_are_the_same(run, checkpoint, book, source, tmp_path):
    result = run("ask", book, "Who?", "Why?", "-c", checkpoint, "--max-tokens", 8, "--json", code=0)
    model = jax_longctx.load(checkpoint)
    layout = chat_layout(model.tokenizer)
    context = model.prefill(layout.context(book.read_text()))
    for line, question in zip(result.stdout.splitlines(), ("Who?", "Why?"), strict=True):
        (answer,) = model.ask(context, layout.question(question), max_tokens=8)
        assert json.loads(line)["answer"] == answer.text
    result = run("convert", checkpoint, tmp_path / "hf", "--to-hf", code=0)
    before, after = (
        safetensors.numpy.load_file(folder / "model.safetensors")
        for folder in (source, tmp_path / "hf")
    )
    np.testing.assert_equal(after, before)


def test_what_is_no_checkpoint_or_does_not_go_with_it(run, checkpoint, tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        refused(run("generate", "The", "-c", folder), str(folder))
    refused(run("convert", tmp_path, tmp_path / "new"), str(tmp_path))
    assert not (tmp_path / "new").exists()
    for mesh, wrong in [("tensor=8", "does not divide"), ("data=4096", "needs 4096 devices")]:
        refused(run("generate", "The", "-c", checkpoint, "--mesh", mesh), wrong)
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    for path in (damaged / "params").rglob("*"):
        if path.is_file() and path.stat().st_size > 4096:
            path.write_bytes(path.read_bytes()[:1000])
    refused(run("generate", "The", "-c", damaged), "damaged")
    # A tokenizer that is not the checkpoint's.
    wrong = tmp_path / "wrong"
    shutil.copytree(checkpoint, wrong)
    path = str(wrong / "tokenizer" / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(path)
    known = backend.get_vocab_size()
    backend.add_tokens([f"<|more {index}|>" for index in range(301 - known)])
    backend.save(path)
    refused(run("generate", "The", "-c", wrong), "tokenizer.json is damaged")
    # As if it had been written so.
    manifest = read_manifest(wrong)
    files = describe_files(wrong / "tokenizer")
    whole = dataclasses.replace(manifest, tokenizer_files=files)
    (wrong / "manifest.json").write_text(whole.to_json())
    # Which has no embedding for the last added token.
    last = f"<|more {300 - known}|>"
    result = run("generate", f"The {last}", "-c", wrong, code=2)
    assert "error: row 0 holds token id 300, the model's vocabulary is 0..299" in result.stderr
    run("generate", "The", "-c", wrong, "--max-tokens", 2, code=0)
