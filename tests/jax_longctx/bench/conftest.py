"""A shape that a CPU times in seconds, and the commands that time it."""

import itertools
import json
from unittest.mock import create_autospec

import pytest
from typer.testing import CliRunner

from jax_longctx.bench import timing
from jax_longctx.cli.main import app
from jax_longctx.models import presets

# Numbers of the tiny shape's weights in a layer.
LAYER = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32


@pytest.fixture
def tiny_shape(monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 128}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    shape = {**presets.PRESETS["llama-3.1-8b"], **sizes}
    monkeypatch.setitem(presets.PRESETS, "tiny", shape)
    return shape


@pytest.fixture
def steady(monkeypatch):
    """Each loop of calls takes a millisecond a call more than the one before: no clock is read."""
    milliseconds = itertools.count(1)

    def call_times(call, repeats):
        call()
        return [1e-3 * next(milliseconds)] * repeats

    stub = create_autospec(timing.call_times, side_effect=call_times)
    monkeypatch.setattr(timing, "call_times", stub)


def bench(*args, code=0):
    result = CliRunner().invoke(app, ["bench", *map(str, args)])
    assert result.exit_code == code, result.output
    return result


def measured(*args):
    return json.loads(bench(*args, "--json").stdout)
