"""`bench tpu-check` checks every TPU kernel, sees a wrong one, and says where there is no TPU."""

import dataclasses
import json
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels
from jax_longctx.bench import decode, kernels, tpu_check
from tests.jax_longctx.bench.conftest import bench, measured


@pytest.mark.slow
def test_the_command_in_the_interpreter(tmp_path, monkeypatch):
    monkeypatch.setattr(tpu_check, "LENGTHS", (0, 129, tpu_check.SLOTS))
    out = tmp_path / "found.json"
    record = measured("tpu-check", "--interpret", "--out", out)
    assert record == json.loads(out.read_text())
    assert record["interpreted"] and not {"kernels", "steps"} & set(record)
    assert all(row["passed"] and row["error"] <= row["tolerance"] for row in record["checks"])
    # Kernels that read planes are checked with them too.
    planes = {row["kernel"] for row in record["checks"] if row["case"] == "planes"}
    names = {row["kernel"] for row in record["checks"]}
    assert names - planes == {"cache_attention", "causal_attention"}


def test_every_tpu_kernel_has_a_check_and_no_tpu_is_one_line(tmp_path):
    folders = {path.parent.name for path in Path(pallas_kernels.__path__[0]).glob("*/tpu.py")}
    checked = {check.run.func.__module__.split(".")[1] for check in tpu_check.checks()}
    assert checked == folders
    result = bench("tpu-check", "--out", tmp_path / "found.json", code=2)
    (line,) = (line for line in result.stderr.splitlines() if "TPU" in line)
    assert "no TPU: JAX runs on cpu here" in line and "--interpret" in line


@pytest.mark.optimized
@pytest.mark.slow
def test_the_checks_compile_for_tpus():
    """The first person with a TPU learns something of the kernels, and not of the checks.

    The kernels' own tests compile for TPUs of other kinds too.
    """
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
    mesh = Mesh(np.array(devices[:1]), ("device",))
    sharding = NamedSharding(mesh, PartitionSpec())
    for check in tpu_check.checks():
        for given in check.cases().values():
            shapes = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), given
            )
            with jax.default_matmul_precision("default"):
                with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                    program = jax.jit(partial(check.run, interpret=False)).lower(*shapes)
            assert "tpu_custom_call" in program.compile().as_text()


def test_a_wrong_kernel_is_seen(tmp_path, monkeypatch):
    """One that is off, one that reads what it must not, and one that does not compile."""
    base = next(c for c in tpu_check.checks() if c.kernel == "attention_mass")

    def broken(*args, interpret):
        raise NotImplementedError("no such layout")

    def off(*args, interpret):
        return [x * 1.01 for x in base.definition(*args) if x is not None]

    def careless(*args, interpret):
        return base.definition(*args)

    def definition(*args):
        return [x for x in base.definition(*args) if x is not None]

    how = {"given": base.inputs, "caches": (), "definition": definition}
    made = [dataclasses.replace(base, kernel=run.__name__, run=run, **how) for run in (off, broken)]
    read = jnp.full_like(base.inputs[3], tpu_check.SLOTS)
    given = (*base.given[:3], read)
    made.append(dataclasses.replace(base, kernel="careless", run=careless, given=given, caches=()))
    monkeypatch.setattr(tpu_check, "checks", lambda: made)
    out = tmp_path / "found.json"
    bench("tpu-check", "--interpret", "--out", out, code=3)
    first, second, third = json.loads(out.read_text())["checks"]
    assert first["error"] == pytest.approx(0.01, rel=1e-3)
    assert second["failed"] == "NotImplementedError: no such layout"
    assert "NaN or infinities are not the definition's" in third["failed"]
    assert not any(row["passed"] for row in (first, second, third))


def test_difference():
    for found, expected, error in [
        ([1.0, 4.0], [1.0, 5.0], 0.2),
        ([-np.inf, 5.0], [-np.inf, 5.0], 0.0),
        ([-np.inf, 5.0], [0.0, 5.0], np.inf),
        ([np.nan, 5.0], [1.0, 5.0], np.inf),
        ([1, 2], [1, 3], np.inf),
        ([1.0], [1.0, 1.0], np.inf),
    ]:
        assert tpu_check.difference(np.array(found), np.array(expected)) == pytest.approx(error)


def test_on_a_tpu_it_times_kernels_and_steps(tmp_path, monkeypatch, steady):
    """The commands that time are given the time that is left; their faults are kept."""
    monkeypatch.setattr(tpu_check, "checks", list)
    monkeypatch.setattr(tpu_check.jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda size: 1e10)
    monkeypatch.setattr(kernels, "_matmul_rate", lambda size: 1e11)
    case = next(c for c in kernels.cases(64) if c.operation == "page_scores")

    def broken(*args):
        raise LookupError("no such layout")

    changes = ({}, {"others": {"chosen": broken}}, {"inputs": broken})
    cases = [dataclasses.replace(case, **changed) for changed in changes]
    monkeypatch.setattr(kernels, "cases", lambda shrink: cases)

    def fails(**how):
        assert how["layers"] == 4 and how["cases"] == [(1, 32768)]
        raise LookupError("no such device")

    monkeypatch.setattr(decode, "run", fails)
    out = tmp_path / "found.json"
    result = bench("tpu-check", "--out", out)
    found = json.loads(out.read_text())
    timed, *failed = found["kernels"]["rows"]
    assert timed["seconds"] > 0 and timed["share"] > 0
    assert [row["failed"] for row in failed] == ["LookupError: no such layout"] * 2
    assert found["steps"] == {"failed": "LookupError: no such device"}
    assert "steps: LookupError: no such device" in result.stdout
    bench("tpu-check", "--out", out, "--minutes", 1e-9)
    found = json.loads(out.read_text())
    assert {row["failed"] for row in found["kernels"]["rows"]} == {"no time was left"}
    assert found["steps"] == {"failed": "no time was left"}
