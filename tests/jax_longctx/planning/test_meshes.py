"""Predicted steps beside measured ones, and the meshes that are chosen by them."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest

from jax_longctx.engine import capacity
from jax_longctx.errors import ConfigError
from jax_longctx.methods import make_method
from jax_longctx.models.presets import preset
from jax_longctx.planning import plan, targets
from jax_longctx.planning.plan import candidates, make_plan, on_best_mesh
from jax_longctx.planning.targets import CHIPS, target_at_hand
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import parse_mesh, parse_pairs
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.planning.test_plan import eight_billion, request
from tests.support import tiny_config

RESULTS = Path(__file__).parents[3] / "docs/results"


@pytest.mark.parametrize("name", ["decode-two-gpus", "decode-steps"])
def test_steps_are_predicted_within_15_percent_of_measured_ones(name):
    """On one H200, two and four, where the GPUs exchange numbers through their memory."""
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    rows = [row for row in rows if row.get("through") != "NCCL"]
    assert len(rows) > 4
    for row in rows:
        mesh, settings = row.get("mesh", "one"), row.get("settings", "").split(",")
        method = plan.make_method(row["method"], parse_pairs(filter(None, settings), "settings"))
        sizes = {"context": row.get("context", 131072), "batch": row.get("batch", 1)}
        how = {"config": preset("llama-3.1-8b"), "dtype": "bfloat16", "chunk": 512, **sizes}
        axes = {} if mesh == "one" else parse_mesh(mesh)
        wanted = request(method, f"h200x{max(axes.values(), default=2)}", reserve=256, **how)
        found = make_plan(wanted, axes, largest=False)
        assert found.step == pytest.approx(row["seconds"], rel=0.15), row


@pytest.mark.slow
def test_the_choice_of_keys_exchanges_what_its_program_does():
    """The numbers are those of `test_gpu_compile`'s programs; what is kept whole needs none."""
    how = {"config": eight_billion(), "context": 16000, "dtype": "bfloat16"}
    for name, seq, tensor in [("full", 4, 2), ("quest", 6, 2), ("arkvale", 6, 3), ("snapkv", 3, 2)]:
        for sizes, number in [({"seq": 8}, seq), ({"tensor": 8}, tensor)]:
            made = make_plan(request(name, "h200x8", **how), sizes, largest=False)
            assert made.decode.collectives == 4 * number, (name, sizes)


@pytest.mark.slow
def test_the_best_mesh_fits_and_has_the_fastest_steps():
    how = {"context": 131072, "dtype": "bfloat16", "batch": 2}
    wanted = request(config=eight_billion(), target="v5e:4x4", **how)
    best, *others = candidates(wanted)
    assert best.fits and {plan.mesh["data"] for plan in others} == {1, 2}
    assert best.step <= 1.06 * min(plan.step for plan in others if plan.fits)
    assert all(plan.mesh["data"] == 1 for plan in candidates(wanted, {"data": 1}))
    # Collectives of a small model take longer than its weights.
    assert candidates(request(target="h200x8"))[0].axes == ""
    huge = request(config=eight_billion(200), target="v5e:2x2", dtype="bfloat16")
    nowhere = candidates(huge)
    assert not nowhere[0].fits and nowhere[0].used == min(plan.used for plan in nowhere)
    with pytest.raises(ConfigError, match="star cannot be offloaded"):
        candidates(request("star", "h200x8", offload="host"))


@pytest.fixture
def free(monkeypatch):
    """Collectives of these CPUs take no time."""
    chip = dataclasses.replace(CHIPS["cpu"], latency=0.0, link=1e15)
    monkeypatch.setitem(CHIPS, "cpu", chip)


@pytest.mark.usefixtures("free")
def test_auto_is_a_mesh_of_the_devices_at_hand(monkeypatch):
    spec, told = RunSpec(mesh="auto", dtype="float32"), []
    config = tiny_config(num_heads=8, num_kv_heads=8)
    found = on_best_mesh(spec, config, say=told.append, context=4096, batch=2, divide={"data": 1})
    assert parse_mesh(found.mesh) == {"tensor": 8} and found.devices().shape["tensor"] == 8
    assert told[0].startswith("mesh tensor=8: a step over 2 x 4,096 tokens takes, by arithmetic, ")
    assert found == dataclasses.replace(spec, mesh="tensor=8")
    # Runs of 128 slots that do not divide over eight shards; one device that holds too little.
    odd = tiny_config(num_heads=3, num_kv_heads=3)
    found = on_best_mesh(spec, odd, context=300, divide={"seq": 12})
    assert found.mesh == "seq=4"
    # The method is chosen later: this one could not be offloaded.
    offloaded = dataclasses.replace(spec, offload="host")
    assert on_best_mesh(offloaded, odd, context=300) == dataclasses.replace(offloaded, mesh="")
    with pytest.raises(ConfigError, match="full cannot be offloaded"):
        on_best_mesh(dataclasses.replace(offloaded, method=make_method("full")), odd)
    # A mesh that is named stays, and so does one device.
    assert on_best_mesh(found, config) is found
    with pytest.raises(ConfigError, match="mesh auto is chosen for a text"):
        spec.devices()
    device = jax.devices()[0]
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert on_best_mesh(spec, config, say=pytest.fail) is spec
    assert spec.devices() == make_mesh()
    for name, kind in [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "rtx4090")]:
        monkeypatch.setattr(jax, "devices", lambda name=name: [Kind(name)])
        assert target_at_hand() == targets.Target(f"{kind}x1", kind, 1, None)
    for name, kind in [("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e")]:
        monkeypatch.setattr(jax, "devices", lambda name=name: [Kind(name, "tpu")])
        assert (target_at_hand().kind, target_at_hand().topology) == (kind, f"tpu{kind}")
    monkeypatch.setattr(jax, "devices", lambda: [Kind("NVIDIA T4")])
    with pytest.raises(ConfigError, match="does not know the rates of NVIDIA T4; name the axes"):
        target_at_hand()
    assert device.device_kind == "cpu"


def test_devices_at_hand_have_the_memory_that_they_have(monkeypatch):
    """An A100 of 40 GB is not one of 80; without the exchange's time one device would do."""
    spec, config, told = RunSpec(mesh="auto", dtype="float32"), tiny_config(), []
    whole = make_plan(request(config=config, target="cpux8", context=65536), {}).used
    for bytes_free, mesh in [(2 * whole, ""), (0.8 * whole, "tensor=2")]:
        monkeypatch.setattr(capacity, "_available_here", lambda *_, n=bytes_free: int(n))
        monkeypatch.setitem(CHIPS, "cpu", dataclasses.replace(CHIPS["cpu"], latency=1.0))
        found = on_best_mesh(spec, config, context=65536, say=told.append)
        assert found.mesh == mesh, told
    # Meshes that do not fit are not among the told ones.
    assert "one device " in told[0] and "one device" not in told[1]


@dataclasses.dataclass
class Kind:
    device_kind: str
    platform: str = "gpu"
