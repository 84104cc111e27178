"""`bench kernels` on tiny shapes: what is timed really runs, and the figures follow from it."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jax_longctx.bench import kernels
from jax_longctx.bench.kernels import markdown
from jax_longctx.bench.timing import measure
from tests.jax_longctx.bench.conftest import measured


@pytest.fixture(autouse=True)
def _peaks(monkeypatch):
    monkeypatch.setattr(kernels, "copy_bandwidth", lambda size: 1e10)
    monkeypatch.setattr(kernels, "_matmul_rate", lambda size: 1e11)


def test_every_run_of_a_step_takes_place_and_a_longer_one_takes_longer():
    """Neither its unused results nor its constant arguments let a run be dropped."""
    seen = []

    def step(i, q, table):
        io_callback(lambda index: seen.append(int(index)), None, i, ordered=True)
        return q.sum() + table, jnp.argmax(table)

    q = jnp.arange(4.0)
    timing = measure(step, q, jnp.ones(3), repeats=2, inner=5)
    jax.effects_barrier()
    assert seen == list(range(5)) * 3  # once to warm up
    assert 0 <= timing.least <= timing.seconds <= timing.most
    seen.clear()
    measure(step, q, jnp.ones(3), repeats=2, inner=5, least=1e3)
    jax.effects_barrier()
    assert seen == list(range(5)) * 3 + list(range(5 * 64)) * 3
    x = jnp.ones((64, 64)), jnp.ones((512, 512))
    short, long = (measure(lambda _, x: x @ x @ x, each, repeats=5, inner=8) for each in x)
    assert long.least > 2 * short.least


def test_files_and_figures(tmp_path, steady):
    args = ["kernels", "--shrink", 64, "--repeats", 1, "--only", "select_large_k"]
    record = measured(*args, "--out", tmp_path)
    assert record == json.loads((tmp_path / "kernels.json").read_text())
    chosen, xla, library = record["rows"]
    assert [row["run"] for row in (chosen, xla, library)] == ["chosen", "xla", "lax.top_k"]
    for row in record["rows"]:
        assert row["moved"] == 8 * (2048 + 256) * 4
        assert row["floor_seconds"] == pytest.approx(row["moved"] / 1e10)
        assert row["share"] == pytest.approx(row["floor_seconds"] / row["seconds"])
    ratio = f"{library['seconds'] / chosen['seconds']:.2f}x"
    assert (tmp_path / "kernels.md").read_text().splitlines()[-1].endswith(f"| {ratio} |")
    assert (tmp_path / "kernels.png").read_bytes()[:4] == b"\x89PNG"


def test_a_failure_is_a_row_and_the_others_run(steady):
    case = next(c for c in kernels.cases(64) if c.operation == "page_scores")

    def broken(*args):
        raise ValueError("no such | thing")

    case = replace(case, others={"broken": broken, **case.others})
    failed, chosen = kernels._rows(case, 1e10, 1e11, 9, lambda text: None)
    assert failed["failed"] == "ValueError: no such | thing" and "seconds" not in failed
    assert chosen["seconds"] > 0
    result = dict(device="cpu", jax="0", copy_bandwidth=1e10, matmul_rate=1e11)
    table = markdown(result | dict(rows=[failed, chosen]))
    assert "| broken | ValueError: no such / thing |" in table and "| 1.00x |" in table


@pytest.mark.thorough
def test_the_step_with_resa_corrects_the_sparse_one():
    """Where nearly all mass is the prior's, its output comes back."""
    case = next(c for c in kernels.cases(512) if c.operation == "resa_step")
    *inputs, background = case.inputs()
    far = replace(background, lse=background.lse + 60)
    for corrected, without in (
        ("chosen", "without RESA"),
        ("its attention", "attention without RESA"),
    ):
        out, _ = case.others[corrected](jnp.int32(0), *inputs, far)
        plain, _ = case.others[without](jnp.int32(0), *inputs, far)
        np.testing.assert_allclose(np.asarray(out[:, 0], np.float32), far.out, atol=2e-2)
        assert not np.allclose(np.asarray(out, np.float32), np.asarray(plain, np.float32), atol=0.1)


def test_the_runs_of_a_case_agree():
    """Implementations and the library are timed on the same question."""
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
    assert len(operations) == 10 and all(
        case.run or "chosen" in case.others for case in found.values()
    )
