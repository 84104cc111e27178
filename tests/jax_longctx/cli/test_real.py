"""The real thing on a tiny checkpoint: convert, ask, export, and what damage looks like."""

import dataclasses
import json
import shutil

import numpy as np
import safetensors.numpy
import tokenizers

from jax_longctx.models.storage import describe_files, read_manifest


def refused(result, message):
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and message in result.stderr, result.stderr
    assert result.stderr.count("\n") == 1


def test_two_questions_and_the_python_api_agree(run, checkpoint, book):
    import jax_longctx
    from jax_longctx.text import chat_layout

    result = run("ask", book, "Who?", "Why?", "-c", checkpoint, "--max-tokens", 8, "--json")
    assert result.exit_code == 0, result.output
    model = jax_longctx.load(checkpoint)
    layout = chat_layout(model.tokenizer)
    context = model.prefill(layout.context(book.read_text()))
    for line, question in zip(result.stdout.splitlines(), ("Who?", "Why?"), strict=True):
        (answer,) = model.ask(context, layout.question(question), max_tokens=8)
        assert json.loads(line)["answer"] == answer.text


def test_export_gives_the_same_bits_back(run, source, checkpoint, tmp_path):
    result = run("convert", checkpoint, tmp_path / "hf", "--to-hf")
    assert result.exit_code == 0, result.output
    before = safetensors.numpy.load_file(source / "model.safetensors")
    after = safetensors.numpy.load_file(tmp_path / "hf" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, array in before.items():
        assert np.array_equal(array, after[name]), name


def test_not_a_checkpoint(run, tmp_path):
    for folder in (tmp_path, tmp_path / "none"):
        result = run("generate", "The", "-c", folder)
        refused(result, str(folder))
    refused(run("convert", tmp_path, tmp_path / "new"), str(tmp_path))
    assert not (tmp_path / "new").exists()


def test_corrupt_parameters(run, checkpoint, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    for path in (damaged / "params").rglob("*"):
        if path.is_file() and path.stat().st_size > 4096:
            path.write_bytes(path.read_bytes()[:1000])
    refused(run("generate", "The", "-c", damaged), "damaged")


def test_wrong_tokenizer(run, checkpoint, tmp_path):
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
    refused(run("generate", "The", "-c", wrong), "wrong tokenizer: its ids reach 300")


def test_mesh_that_does_not_divide_the_model(run, checkpoint):
    result = run("generate", "The", "-c", checkpoint, "--mesh", "tensor=8")
    refused(result, "does not divide")
