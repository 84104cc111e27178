"""A shape that a CPU times in seconds, and the commands that time it."""

import json

import pytest
from typer.testing import CliRunner

from jax_longctx.cli.main import app
from jax_longctx.models import presets


@pytest.fixture
def tiny_shape(monkeypatch):
    """The preset `tiny`, which a test may change."""
    shape = dict(
        presets.PRESETS["llama-3.1-8b"],
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    monkeypatch.setitem(presets.PRESETS, "tiny", shape)
    return shape


def bench(*args, code=0):
    """A command of `bench`, which ends with this exit code."""
    result = CliRunner().invoke(app, ["bench", *map(str, args)])
    assert result.exit_code == code, result.output
    return result


def measured(*args):
    """What a command of `bench` hands over."""
    return json.loads(bench(*args, "--json").stdout)
