"""`bench decode` and `bench e2e` on a tiny shape: times and predictions are of what they say."""

import json
from unittest.mock import create_autospec

import jax
import numpy as np
import pytest
from typer.testing import CliRunner

from jax_longctx.bench import decode, e2e
from jax_longctx.cli.main import app
from jax_longctx.engine import programs
from jax_longctx.errors import CapacityError
from jax_longctx.methods import Full
from jax_longctx.models import presets


@pytest.fixture
def tiny_preset(monkeypatch):
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
    monkeypatch.setattr(decode, "copy_bandwidth", lambda: 1e11)


@pytest.mark.slow
def test_ratios_and_predictions(tiny_preset):
    args = ["bench", "decode", "--model", "tiny", "-m", "streaming-llm:budget=128", "--json"]
    args += ["--case", "2x600", "--blocks", "1"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    full, streaming = record["rows"]
    assert (full["batch"], full["context"], full["speedup"]) == (2, 600, 1.0)
    assert streaming["speedup"] == pytest.approx(full["seconds"] / streaming["seconds"])
    # A token's keys and values: 2 layers x 2 heads x 8 x 2 x 2 bytes.
    token = 2 * 2 * 8 * 2 * 2
    assert full["read"] == pytest.approx(2 * 768 * token, rel=0.01)
    weights = full["bytes"] - full["read"]
    assert weights == streaming["bytes"] - streaming["read"]
    assert streaming["predicted_speedup"] == pytest.approx(full["bytes"] / streaming["bytes"])


def test_some_layers_stand_for_all(tiny_preset, monkeypatch):
    """Seconds are scaled; bytes are those of the whole shape."""
    seconds = {2: 0.5, 1: 0.3}
    timed = create_autospec(
        decode.step_seconds, side_effect=lambda engine, context: seconds[engine.config.num_layers]
    )
    monkeypatch.setattr(decode, "step_seconds", timed)
    shape = presets.PRESETS["tiny"]
    monkeypatch.setitem(presets.PRESETS, "tiny", {**shape, "num_hidden_layers": 5})
    methods = {"methods": [], "cases": [(1, 300)], "blocks": 1, "random_cache": True}
    (row,) = decode.run(model="tiny", layers=2, **methods)["rows"]
    assert row["seconds"] == pytest.approx(0.5 + 3 * 0.2)
    seconds[5] = 1.0
    (whole,) = decode.run(model="tiny", **methods)["rows"]
    assert whole["seconds"] == 1.0
    assert {key: row[key] for key in ("bytes", "read")} == {
        key: whole[key] for key in ("bytes", "read")
    }
    # Embedding rows but one are not read; the head is.
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    assert whole["bytes"] - whole["read"] == 2 * (5 * layer + 32 + 128 * 32)


def test_where_full_attention_fails_there_is_no_ratio(tiny_preset, monkeypatch, tmp_path):
    def timed(engine, context):
        if isinstance(engine.method, Full):
            raise CapacityError("too much")
        return 0.5

    stub = create_autospec(decode.step_seconds, side_effect=timed)
    monkeypatch.setattr(decode, "step_seconds", stub)
    monkeypatch.setenv("COLUMNS", "200")
    args = [
        "bench",
        "decode",
        "--model",
        "tiny",
        "-m",
        "quest",
        "--case",
        "1x300",
        "--random-cache",
    ]
    out = tmp_path / "found.json"
    result = CliRunner().invoke(app, [*args, "--out", str(out)])
    assert result.exit_code == 0, result.output
    full, quest = json.loads(out.read_text())["rows"]
    assert full["failed"] == "too much" and quest["seconds"] == 0.5
    assert not {"speedup", "predicted_speedup"} & set(quest)
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("quest"))
    assert line.split().count("-") == 2


@pytest.mark.slow
def test_end_to_end_ratios_are_against_the_roofline_and_the_baseline(tiny_preset, monkeypatch):
    theirs = {"first_token": 2.0, "decode_step": 0.5, "compiled_step": 0.25}
    monkeypatch.setattr(e2e, "copy_bandwidth", lambda: 1e11)
    monkeypatch.setattr(
        e2e, "run_peer", create_autospec(e2e.run_peer, return_value={"100": theirs})
    )
    args = ["bench", "e2e", "--model", "tiny", "--context", "100", "--runs", "1", "--chunk", "64"]
    result = CliRunner().invoke(app, [*args, "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [row["baseline"] for row in rows] == [
        "transformers sdpa",
        "roofline",
        "transformers sdpa",
        "transformers compiled",
    ]
    # Weights but the embedding table, and keys and values of 100 tokens, in bfloat16.
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32
    moved = 2 * (2 * layer + 32 + 128 * 32) + 100 * 2 * 2 * 8 * 2 * 2
    wanted = [2.0, moved / 1e11, 0.5, 0.25]
    assert [row["baseline_seconds"] for row in rows] == pytest.approx(wanted)
    for row in rows:
        assert row["ratio"] == pytest.approx(row["seconds"] / row["baseline_seconds"])


@pytest.mark.parametrize("layers", ["1", "3"])
def test_layers_that_the_shape_has_not_are_refused(tiny_preset, layers):
    args = ["bench", "decode", "--model", "tiny", "-m", "full", "--layers", layers]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 2
    assert f"--layers must be from 2 to 2, got {layers}" in result.stderr


def test_a_random_cache_stands_for_a_context(tiny_preset):
    from tests.support import tiny_engine

    engine = tiny_engine()
    context = decode.random_context(engine, 2, 100, 16)
    for cache in programs.per_layer(context.caches):
        np.testing.assert_array_equal(cache.length, [100, 100])
        np.testing.assert_array_equal(cache.context_length, [100, 100])
        assert 0.9 < float(cache.k[:, :, :100].std()) < 1.1
    leaves = jax.tree.leaves(context.caches)
    assert not np.array_equal(leaves[0], leaves[1])
    assert [len(row) for row in next(engine.stream(context, [[1], [2]], max_tokens=4))] == [1, 1]


@pytest.mark.parametrize("case", ["3", "0x5", "ax5", "5x"])
def test_bad_cases_are_named(case):
    result = CliRunner().invoke(app, ["bench", "decode", "-m", "full", "--case", case])
    assert result.exit_code == 2
    assert "expected BATCHxCONTEXT" in result.stderr
