import dataclasses
import json
from functools import partial
from pathlib import Path
from unittest.mock import Mock, create_autospec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import pallas_kernels
from jax_longctx.bench import decode, kernels, tpu_check
from jax_longctx.bench.kernels import markdown
from jax_longctx.bench.timing import measure
from jax_longctx.errors import InputError
from tests.absent import tpu
from tests.jax_longctx.bench.conftest import bench, measured


@pytest.fixture(autouse=True)
def _peaks(monkeypatch):
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda size: 1e10)
    monkeypatch.setattr(kernels, "_matmul_rate", lambda size: 1e11)


def test_every_run_of_a_step_takes_place_and_a_longer_one_takes_longer():
    """Neither its unused results nor its constant arguments let a run be dropped."""
    seen, given = [], (jnp.arange(4.0), jnp.ones(3))

    def step(i, q, table):
        io_callback(lambda index: seen.append(int(index)), None, i, ordered=True)
        return q.sum() + table, jnp.argmax(table)

    timing = measure(step, *given, repeats=2, inner=5)
    jax.effects_barrier()
    assert seen == list(range(5)) * 3  # once to warm up
    assert 0 <= timing.least <= timing.seconds <= timing.most
    seen.clear()
    measure(step, *given, repeats=2, inner=5, least=1e3)
    jax.effects_barrier()
    assert seen == list(range(5)) * 3 + list(range(5 * 64)) * 3
    x = jnp.ones((64, 64)), jnp.ones((512, 512))
    short, long = (measure(lambda _, x: x @ x @ x, each, repeats=5, inner=8) for each in x)
    assert long.least > 2 * short.least


def test_files_and_figures(tmp_path, steady):
    args = ["kernels", "--shrink", 64, "--repeats", 1, "--only", "select_large_k"]
    record = measured(*args, "--out", tmp_path / "kernels.json")
    assert record == json.loads((tmp_path / "kernels.json").read_text())
    chosen, xla, library = record["rows"]
    assert [row["run"] for row in (chosen, xla, library)] == ["chosen", "xla", "lax.top_k"]
    for row in record["rows"]:
        assert row["moved"] == 8 * (2048 + 256) * 4
        assert row["floor_seconds"] == pytest.approx(row["moved"] / 1e10)
        assert row["share"] == pytest.approx(row["floor_seconds"] / row["seconds"])
    ratio = f"{library['seconds'] / chosen['seconds']:.2f}x"
    assert markdown(record).splitlines()[-1].endswith(f"| {ratio} |")


def test_a_name_of_no_case_is_refused_and_a_failure_is_a_row(monkeypatch, steady):
    monkeypatch.setattr(kernels, "copy_bandwidth", Mock(side_effect=AssertionError))
    with pytest.raises(InputError, match=r"^no case's name holds --only 'nope'; without it all"):
        kernels.run(only="nope", shrink=64)
    case = next(c for c in kernels.cases(64) if c.operation == "page_scores")
    broken = Mock(side_effect=ValueError("no such | thing"))
    case = dataclasses.replace(case, others={"broken": broken, **case.others})
    failed, chosen = kernels._rows(case, 1e10, 1e11, 9, lambda text: None)
    assert failed["failed"] == "ValueError: no such | thing" and "seconds" not in failed
    assert chosen["seconds"] > 0
    result = dict(device="cpu", jax="0", copy_bandwidth=1e10, matmul_rate=1e11)
    table = markdown(result | dict(rows=[failed, chosen]))
    assert "| broken | ValueError: no such / thing |" in table and "| 1.00x |" in table


def test_the_runs_of_a_case_agree():
    found = {case.name: case for case in kernels.cases(512)}
    case = next(c for name, c in found.items() if name.startswith("topk_scores 4 best, 1 x"))
    q, k = case.inputs()
    chosen, xla, library = (step(jnp.int32(0), q, k) for step in case.steps((q, k)).values())
    np.testing.assert_array_equal(chosen[1], xla[1])
    np.testing.assert_allclose(library[0].reshape(1, 1, kernels.N, 4), chosen[0], atol=1e-3)
    sparse = next(c for c in found.values() if c.operation == "sparse_decode_attention")
    inputs = sparse.inputs()
    first, later = (sparse.run("xla", jnp.int32(i), *inputs) for i in (0, 1))
    assert not np.array_equal(first[1], later[1])  # other pages every time
    operations = {case.operation for case in found.values()}
    assert len(operations) == 9
    assert all(case.run or "chosen" in case.others for case in found.values())


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
    devices = tpu()
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
    base = next(c for c in tpu_check.checks() if c.kernel == "attention_mass")

    def definition(*args):
        return [x for x in base.definition(*args) if x is not None]

    off = Mock(side_effect=lambda *args, interpret: [x * 1.01 for x in definition(*args)])
    broken = Mock(side_effect=NotImplementedError("no such layout"))
    careless = Mock(side_effect=lambda *args, interpret: base.definition(*args))
    how = {"given": base.inputs, "definition": definition}
    read = jnp.full_like(base.inputs[3], tpu_check.SLOTS)
    made = [
        dataclasses.replace(base, kernel=name, run=run, caches=(), **changes)
        for name, run, changes in (
            ("off", off, how),
            ("broken", broken, how),
            ("careless", careless, {"given": (*base.given[:3], read)}),
        )
    ]
    monkeypatch.setattr(tpu_check, "checks", lambda: made)
    out = tmp_path / "found.json"
    bench("tpu-check", "--interpret", "--out", out, code=3)
    first, second, third = json.loads(out.read_text())["checks"]
    assert first["error"] == pytest.approx(0.01, rel=1e-3)
    assert second["failed"] == "NotImplementedError: no such layout"
    assert "NaN or infinities are not the definition's" in third["failed"]
    assert not any(row["passed"] for row in (first, second, third))
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
    monkeypatch.setattr(tpu_check, "checks", list)
    monkeypatch.setattr(tpu_check.jax, "default_backend", lambda: "tpu")
    case = next(c for c in kernels.cases(64) if c.operation == "page_scores")
    broken = Mock(side_effect=LookupError("no such layout"))
    changes = ({}, {"others": {"chosen": broken}}, {"inputs": broken})
    cases = [dataclasses.replace(case, **changed) for changed in changes]
    monkeypatch.setattr(kernels, "cases", lambda shrink: cases)
    fails = create_autospec(decode.run, side_effect=LookupError("no such device"))
    monkeypatch.setattr(decode, "run", fails)
    out = tmp_path / "found.json"
    result = bench("tpu-check", "--out", out)
    asked, spec, _ = fails.call_args.args
    assert asked.layers == 4 and asked.sizes == [(1, 32768)] and spec.chunk == 8192
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
