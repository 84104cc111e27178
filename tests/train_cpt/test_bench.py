"""The training benchmark: what it measures, and what it says where the baseline cannot run."""

import dataclasses
import json
from unittest.mock import create_autospec

import pytest
from typer.testing import CliRunner

from jax_longctx.cli.main import app
from tests.support import tiny_config
from tests.train_cpt.tiny_run import tiny_setup
from train_cpt import bench


@pytest.mark.slow
def test_a_step_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "preset", lambda name: tiny_config(num_layers=1))
    words = ["train", "bench", "--length", "16", "--rows", "4", "--steps", "2", "--tail", "4"]
    out = tmp_path / "bench.json"
    result = CliRunner().invoke(app, [*words, "--no-peer", "--out", str(out)])
    assert result.exit_code == 0, result.stderr
    found = json.loads(out.read_text())
    ours = found["ours"]
    assert ours["tokens_per_second"] == pytest.approx(64 / ours["seconds"], rel=1e-3)
    assert (ours["rows"], ours["pattern"]["tail"], ours["mesh"]["data"]) == (4, 4, 1)
    # Random weights and tokens: no better than chance.
    assert 4 < ours["loss"] < 6 and 0 < ours["mfu"] < 1
    assert f"MFU {ours['mfu']:.1%}" in result.stdout and found["transformers"] is None


def test_the_baseline_counts_as_one_device(monkeypatch):
    monkeypatch.setattr(bench, "preset", lambda name: tiny_config(num_layers=1))
    # A new record each time: `run` adds to it.
    peer = create_autospec(bench.run_peer, side_effect=lambda *_, **__: {"seconds": 1e-3})
    monkeypatch.setattr(bench, "run_peer", peer)
    monkeypatch.setattr(bench, "measure", create_autospec(bench.measure, return_value={"rows": 4}))

    def rates(mesh):
        setup = dataclasses.replace(tiny_setup(mesh), dtype="float32")
        how = {"remat": "none", "length": 16, "rows": 4, "steps": 1, "with_peer": True}
        return bench.run("any", lambda config: setup, **how)["transformers"]

    one, four = rates((1, 1, 1)), rates((2, 1, 2))
    assert one["tokens_per_second"] == four["tokens_per_second"] == 64_000
    assert one["mfu"] == pytest.approx(four["mfu"], rel=1e-3)


def test_a_baseline_that_cannot_run_is_one_line():
    result = CliRunner().invoke(app, ["train", "bench"])
    assert result.exit_code == 2 and "error: the transformers baseline failed" in result.stderr
