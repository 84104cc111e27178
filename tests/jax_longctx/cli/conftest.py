"""A tiny random model with a real tokenizer, and the command line run over it."""

import itertools
import json
import os
from unittest.mock import create_autospec

import pytest
from typer.testing import CliRunner

import jax_longctx
from jax_longctx import api
from jax_longctx.cli.main import app
from jax_longctx.jobs import lines
from jax_longctx.models.params import init_params
from jax_longctx.run_spec import RunSpec
from jax_longctx.text import Tokenizer
from tests.jax_longctx.cli.tiny_model import converted, hf_config, write_source, write_tokenizer
from tests.support import engine_over


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tokenizer_folder):
    """The tiny model under full attention, as `jax_longctx.load` would return it."""
    tokenizer = Tokenizer.load(tokenizer_folder)
    config = jax_longctx.ModelConfig.from_hf(hf_config(tokenizer.vocab_size))
    mesh, method = jax_longctx.make_mesh(), jax_longctx.make_method("full")
    params = init_params(config, RunSpec(mesh=mesh), seed=1)
    return api.LongContext(engine_over(config, params, method, mesh, chunk=64), tokenizer)


@pytest.fixture
def loads(tiny, tmp_path_factory, monkeypatch):
    """`load` returns the tiny model for the folders `m` and `model`; its arguments are listed."""
    folder, calls = tmp_path_factory.mktemp("checkpoints"), []
    for name in ("m", "model"):
        (folder / name).mkdir()
        (folder / name / "manifest.json").touch()
    monkeypatch.chdir(folder)

    def given(checkpoint, spec, **options):
        calls.append((checkpoint, vars(spec) | options))
        if (check := options.get("check")) is not None:
            check(tiny)
        return tiny

    # The real function's signature is checked.
    monkeypatch.setattr(api, "load", create_autospec(api.load, side_effect=given))
    return calls


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A Hugging Face directory with the tiny model and its tokenizer."""
    folder = tmp_path_factory.mktemp("source") / "hf"
    write_source(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(source, tmp_path_factory):
    return converted(tmp_path_factory, source)


def die_at(patch, count):
    """The process dies at its `count`-th write of lines, half of the bytes written."""
    append, writes = lines.append, itertools.count(1)

    def dying(file, rows):
        if next(writes) < count:
            return append(file, rows)
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        os.write(file.fileno(), text.encode()[: len(text) // 2])
        raise SystemError("killed")

    patch.setattr(lines, "append", dying)


def refused(result, message):
    """A command ended with exit code 2 and one line, which holds the message."""
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith("error: ") and message in result.stderr, result.stderr
    assert result.stderr.count("\n") == 1


def last_of_each(options):
    """The options and their values, of each the last one: given twice they are refused."""
    found: dict[str, list[str]] = {}
    for word in map(str, options):
        if word.startswith("-"):
            found[word] = [word]
            values = found[word]
        else:
            values.append(word)
    return [word for words in found.values() for word in words]


@pytest.fixture
def run():
    """Runs the command line in this process, which ends with this exit code where it is given."""

    def invoke(*args, stdin=None, code=None):
        result = CliRunner().invoke(app, [str(arg) for arg in args], input=stdin)
        assert code in (None, result.exit_code), result.output
        return result

    return invoke


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("The pass key is 12345. Remember it. " * 5)
    return path
