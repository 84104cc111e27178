import json
import time
from statistics import median
from unittest.mock import create_autospec

import pytest

from jax_longctx.bench import prefill, timing
from jax_longctx.bench.asked import Prefill
from jax_longctx.engine.capacity import SPARE, reserved
from jax_longctx.errors import InputError
from jax_longctx.methods import make_method
from jax_longctx.models import presets
from jax_longctx.run_spec import RunSpec
from tests.jax_longctx.bench.conftest import bench, measured
from tests.patience import patience


@pytest.fixture
def tiny_preset(tiny_shape, monkeypatch):
    tiny_shape["num_hidden_layers"] = 4


ASKED = ("prefill", "--model", "tiny")
# On one device, once.
ONE = ("--mesh", "seq=1", "--runs", 1, "--chunk", 64)


@pytest.mark.slow
def test_a_model_with_sinks_and_experts_is_timed(tiny_shape, monkeypatch):
    shape = {**presets.PRESETS["gpt-oss-20b"], **tiny_shape, "num_local_experts": 4}
    for key in ("model_type", "architectures", "rope_parameters", "max_position_embeddings"):
        shape[key] = presets.PRESETS["gpt-oss-20b"][key]
    shape |= {"head_dim": 8, "layer_types": shape["layer_types"][:2], "sliding_window": 32}
    monkeypatch.setitem(presets.PRESETS, "tiny", shape)
    (row,) = measured(*ASKED, "-m", "full", "--case", 256, *ONE)["rows"]
    assert row["first_token"] > 0


@pytest.mark.thorough
def test_figures_follow_from_each_other(tiny_preset, tmp_path):
    out = tmp_path / "found.json"
    args = ["-m", "ring", "-m", "star:anchor_kv=broadcast", "--case", "1024:256", "--mesh", "seq=4"]
    args += ["--layers", 2, "--runs", 3, "--chunk", 128, "--out", out]
    found = measured(*ASKED, *args)
    assert found == json.loads(out.read_text()) and list(tmp_path.iterdir()) == [out]
    assert found["layers"] == {"timed": 2, "of": 4}
    assert found["mesh"] == {"data": 1, "seq": 4, "tensor": 1}
    ring, star = found["rows"]
    assert star["settings"] == {"block": "256", "anchor_kv": "broadcast"} and not ring["settings"]
    # Question, answer and the spare slot leave the context of four blocks of slots.
    length = 1024 - reserved(2) - SPARE
    assert ring["context"] == star["context"] == length
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64
    head = 2 * 128 * 32 / 4
    assert ring["linear"] == pytest.approx(2 * 4 * layer * length / 4 + head)
    assert ring["attention"] == pytest.approx(4 * 4 * 32 * (length / 4) ** 2 * 3.5)
    # The second and the third shard have whole blocks behind an anchor that was sent to them.
    assert star["linear"] == 2 * 4 * layer * 256 + head
    assert star["attention"] == 4 * 4 * 32 * (256 * 257 / 2 + 256 * 256)
    kv = 2 * 2 * 8 * 2 * 4
    # The one pass of each gathers the weights of the other shards.
    weights = 2 * (4 * layer + 128 * 32) * 3 / 4
    assert ring["received"] == kv * 3 * length / 4 + weights
    assert star["received"] == kv * 2 * 256 * 3 / 4 + weights
    rates = found["rates"]
    for row in found["rows"]:
        by_flops = row["linear"] / rates["linear"] + row["attention"] / rates["attention"]
        assert row["model_seconds"] == pytest.approx(by_flops)
        two, one = (median(row["measured"][n]["first_token"]) for n in "21")
        assert row["first_token"] == pytest.approx(two + 2 * (two - one))
        assert row["first_token_fixed"] == pytest.approx(one - (two - one))
        assert row["of_model"] == pytest.approx(row["first_token"] / by_flops)
        assert row["speedup"] == pytest.approx(ring["first_token"] / row["first_token"])


@pytest.mark.slow
def test_contexts_in_the_hosts_memory_and_in_8_bits_are_timed(tiny_preset, tmp_path):
    method = "infllm:n_local=64,n_init=16,block_size=16,topk=2,repr_topk=2,chunk=32"
    args = ["-m", method, "--case", 600, *ONE, "--kv", "int8", "--weights", "int8"]
    args += ["--offload", "host", "--working-set", 128, "--out", tmp_path / "found.json"]
    result = bench(*ASKED, *args)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["kv"], found["weights"], found["offload"]) == ("int8", "int8", "host")
    assert found["rows"][0]["first_token"] > 0
    said = "bfloat16, weights in int8, keys and values in int8, contexts in host"
    assert said in " ".join(result.output.split())
    some = ("--mesh", "seq=1", "--runs", 3, "--chunk", 64, "--layers", 2)
    found = measured(*ASKED, "-m", "full", "--case", "256:128", *some)
    (row,) = found["rows"]
    assert row["context"] == 256 - reserved(2) - SPARE


@pytest.mark.slow
def test_a_question_is_read_beside_each_chunk_and_memory_is_watched(tiny_preset, monkeypatch):
    asked = []
    monkeypatch.setattr(timing, "_held", lambda: [100 * len(asked)])
    prefilled = create_autospec(timing.Engine.prefill, side_effect=timing.Engine.prefill)

    def prefill_and_count(engine, rows, **given):
        asked.append(given["questions"])
        return prefilled(engine, rows, **given)

    monkeypatch.setattr(timing.Engine, "prefill", prefill_and_count)
    args = ["-m", "citrus:budget=64,chunk=32", "--case", 512, *ONE, "--question"]
    rates = {"linear": 1e12, "attention": 1e12}
    monkeypatch.setattr(prefill, "_rates", create_autospec(prefill._rates, return_value=rates))
    (short,) = measured(*ASKED, *args, 8)["rows"]
    # The longer question is not read: its figures are enough.
    timed = create_autospec(prefill.first_tokens, return_value=[1.0])
    monkeypatch.setattr(prefill, "first_tokens", timed)
    (long,) = measured(*ASKED, *args, 40)["rows"]
    # Warm, timed, and watched; only the last comes after the watch began.
    assert [len(tokens) for (tokens,) in asked] == [8] * 3 and short["peak_bytes"] == 100
    assert [call.args[-1] for call in timed.call_args_list] == [40] * 2
    # Two layers of 64 + 32 + 8 slots at least, of keys and values of two heads, eight wide.
    assert 2 * 2 * 2 * 8 * 2 * 96 < short["said_bytes"] < 2 * 2 * 2 * 8 * 2 * 1024
    # A longer question beside each chunk.
    assert long["linear"] > 1.2 * short["linear"]


def test_memory_beyond_the_start_is_watched(monkeypatch):
    held = iter([[1, 5], [1, 5]])
    monkeypatch.setattr(timing, "_held", lambda: next(held, [4, 7]))
    watch = timing.MemoryWatch()
    assert watch.possible and watch.most is None
    with watch:
        pass
    assert watch.most == 3
    # What was held in between, too.
    looks = []
    monkeypatch.setattr(timing, "_held", lambda: looks.append(0) or [9 if len(looks) == 3 else 1])
    with timing.MemoryWatch() as watch:
        deadline = time.monotonic() + patience(30)
        while len(looks) < 4 and time.monotonic() < deadline:
            time.sleep(0.001)
    assert watch.most == 8
    monkeypatch.setattr(timing, "_held", lambda: [None])
    assert not timing.MemoryWatch().possible


def test_time_is_scaled_from_some_layers_and_one():
    assert timing.scaled("x", {32: 5.0}, 32) == {"x": 5.0}
    # 3 s fixed and 0.5 s a layer.
    wanted = {"x": 19.0, "x_layer": 0.5, "x_fixed": 3.0}
    assert timing.scaled("x", {8: 7.0, 1: 3.5}, 32) == pytest.approx(wanted)
    with pytest.raises(InputError, match="8 layers took less time than one"):
        timing.scaled("x", {8: 3.5, 1: 7.0}, 32)
    settings, method = prefill._made("star", {"anchor": "8"}, 256)
    assert settings == {"block": "256", "anchor": "8"} and method.block == 256
    assert prefill._made("star", {"block": "64"}, 256)[1].block == 64
    assert prefill._made("ring", {}, 256) == ({}, make_method("ring"))
    assert prefill._made("star", {}, None)[1].block == 32768


RATES = {"linear": 6e14, "attention": 5e14, "square": 65536}
RING = {"method": "ring", "settings": {"order": "zigzag"}, "tokens": 131072, "first_token": 8.0}
RING |= {"speedup": 1.0, "linear": 1e15, "attention": 2e15}
RING |= {"received": 1.29e10, "model_seconds": 6.4, "of_model": 1.25, "peak_bytes": 3 * 2**30}
STAR = {"method": "star", "settings": {}, "tokens": 131072, "failed": "too much"}
RESULT = {"model": "tiny", "device": "H", "jax": "0", "mesh": {"data": 1, "seq": 2, "tensor": 1}}
RESULT |= {"chunk": 8192, "layers": {"timed": 8, "of": 32}, "runs": 3, "rates": RATES}
RESULT |= {"rows": [RING | {"said_bytes": 2**30}, STAR]}


def test_where_the_first_method_fails_there_is_no_ratio(tiny_preset, monkeypatch):
    rows = [{"failed": "too much"}, {"first_token": 2.0}, {"first_token": 1.0}]
    monkeypatch.setattr(prefill, "_row", create_autospec(prefill._row, side_effect=rows))
    monkeypatch.setattr(prefill, "_rates", create_autospec(prefill._rates, return_value={}))
    methods = ["full", "reattention", "dynamic-ntk"]
    asked = Prefill(model="tiny", methods=methods, cases=["1024"])
    found = prefill.run(asked, RunSpec(mesh="seq=1"))
    assert [row["method"] for row in found["rows"]] == methods
    assert not any("speedup" in row for row in found["rows"])


def test_a_table_for_people(tiny_preset, monkeypatch):
    monkeypatch.setattr(prefill, "run", create_autospec(prefill.run, return_value=RESULT))
    monkeypatch.setenv("COLUMNS", "200")
    result = bench(*ASKED, "-m", "ring:order=zigzag", "--case", 131072, "--mesh", "seq=2")
    times, work, *facts = result.stdout.split("\n\n")
    times = times.splitlines()
    assert times[1].split() == "ring order=zigzag 131,072 8.00 s 1.00x".split()
    assert times[2].split() == "star 131,072 too much".split()
    row = work.splitlines()[-1]
    said = "ring order=zigzag 131,072 1,000 2,000 12.9 GB 6.40 s 1.25 3.0 GiB 1.0 GiB"
    assert row.split() == said.split()
    said = " ".join(" ".join(facts).split())
    assert "8 layers and 1 timed, scaled to 32" in said and "data=1, seq=2, tensor=1" in said
    assert "linear 600 TFLOP/s, attention 500 TFLOP/s (causal, 65,536 tokens)" in said
