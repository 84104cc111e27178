"""fp8, once a form of caches and weights: who asks for it, or has it stored, is told of int8."""

from unittest.mock import create_autospec

import pytest

from checkpoints_convert import convert
from jax_longctx import api
from jax_longctx.engine.context_io import load_context, method_of, save_context, saved_manifest
from jax_longctx.errors import CheckpointError, ConfigError
from jax_longctx.evaluation.config import RunOptions
from jax_longctx.settings import from_toml, stored_form
from tests.jax_longctx.engine.test_context_io import change
from tests.support import tiny_engine

INSTEAD = "fp8 is not offered any more: int8 takes the same bytes and loses less; use int8"


@pytest.mark.parametrize(
    ("asked", "noun"),
    [
        (lambda: stored_form("kv", "fp8", "bfloat16"), "kv"),
        (lambda: tiny_engine(kv="fp8"), "kv"),
        (lambda: stored_form("weights", "fp8", "bfloat16"), "weights"),
        (lambda: stored_form("weights", "fp8", "bfloat16", "int8"), "weights"),
        (lambda: convert("source", "new", weights="fp8"), "weights"),
        (lambda: RunOptions(kv="fp8"), "kv"),
        (lambda: from_toml(RunOptions, {"weights": "fp8"}, "run"), "weights"),
    ],
)
def test_what_asks_for_it_in_python(asked, noun):
    with pytest.raises(ConfigError, match=f"^{noun} {INSTEAD}$"):
        asked()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ("generate The -c m --kv", "kv"),
        ("plan --target cpu --weights", "weights"),
        ("bench decode --kv", "kv"),
        ("convert . new --weights", "--weights"),
    ],
)
def test_what_asks_for_it_on_the_command_line(run, loads, args, said):
    result = run(*args.split(), "fp8")
    assert result.exit_code == 2 and loads == []
    assert result.stderr == f"error: {said} {INSTEAD}\n"


def test_a_context_in_fp8_is_refused_before_the_weights_load(
    run, checkpoint, tiny, tmp_path, monkeypatch
):
    folder, engine = tmp_path / "read", tiny.engine
    monkeypatch.setattr(api, "load_params", create_autospec(api.load_params))
    save_context(engine, engine.prefill([[5, 6, 7]], reserve=4), folder)
    assert saved_manifest(folder)["rows"] == [[5, 6, 7]]
    change(folder, made_by={"kv": "fp8", "method": {"name": "full", "settings": {}}})
    said = f"{folder} holds keys and values in fp8, .*; read the text again with kv int8"
    for read in (saved_manifest, method_of, lambda path: load_context(engine, path)):
        with pytest.raises(CheckpointError, match=said):
            read(folder)
    for method in ((), ("-m", "full")):
        result = run("ask", "Who?", "-c", checkpoint, *method, "--load-context", folder)
        assert result.exit_code == 2 and "read the text again with kv int8" in result.stderr
    assert not api.load_params.called
