"""Metrics on disk, the plot of them, the FLOPs that MFU counts, and the benchmark of a step."""

import dataclasses
import json
import struct
from unittest.mock import create_autospec

import jax
import pytest
from tensorboardX.proto import event_pb2
from typer.testing import CliRunner

from jax_longctx.cli.main import app
from tests.support import tiny_config
from tests.train_cpt.tiny_run import tiny_setup
from train_cpt import bench
from train_cpt.attention import Pattern
from train_cpt.metrics import device_peak, metrics_log, read_metrics, text_flops


def events_of(directory):
    """(step, name, value) of every scalar, and the steps that readers are told to forget."""
    scalars, forgotten = [], []
    for path in sorted((directory / "tensorboard").iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            # A record is its length, a checksum of that, the event, a checksum.
            (size,) = struct.unpack_from("<Q", data, at)
            event = event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
            at += size + 16
            scalars += [(event.step, item.tag, item.simple_value) for item in event.summary.value]
            if event.session_log.status == event.session_log.START:
                forgotten.append(event.step)
    return scalars, forgotten


def test_lines_are_events_too_and_both_go_on_from_a_step(tmp_path):
    with metrics_log(tmp_path, 0) as write:
        for step in (1, 2, 3):
            write({"step": step, "loss": 1 / step})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    last = {"step": 3, "loss": 7.0, "dev_loss": 8.0}
    with metrics_log(tmp_path, 2) as write:
        write(last)
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}, last]
    scalars, forgotten = events_of(tmp_path)
    assert [(step, name) for step, name, _ in scalars] == [
        *((step, "loss") for step in (1, 2, 3, 3)),
        (3, "dev_loss"),
    ]
    assert [value for _, _, value in scalars] == pytest.approx([1, 0.5, 1 / 3, 7, 8])
    assert forgotten == [3]


def test_flops_count_the_matmuls_and_the_pairs_that_meet():
    # Each layer: q and o 32 x 32, k and v 32 x 16, three of 32 x 48; a table of 64 x 32.
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 64 * 32
    length, heads = 10, 4 * 8
    expected = 6 * weights * length + 12 * heads * 2 * (10 * 11 // 2)
    assert text_flops(tiny_config(), Pattern(), length) == expected
    assert text_flops(tiny_config(tie_embeddings=True), Pattern(), length) == expected
    # The last 4 see 3 of the first 6 each, and their own.
    fewer = 12 * heads * 2 * (55 - (21 + 4 * 3 + 10))
    assert text_flops(tiny_config(), Pattern(tail=4, budget=3), length) == expected - fewer
    assert text_flops(tiny_config(), Pattern(tail=4, budget=99), length) == expected


def test_a_device_without_a_data_sheet_is_measured():
    peak, source = device_peak(jax.devices()[0], "float32")
    assert source == "measured" and 1e8 < peak < 1e14

    class Listed:
        device_kind = "NVIDIA H200"

    assert device_peak(Listed(), "bfloat16") == (989.4e12, "data sheet")


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
