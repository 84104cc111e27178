import json
from unittest.mock import create_autospec

import jax
import numpy as np
import pytest

from jax_longctx.bench import decode, steps
from jax_longctx.bench.asked import Decode
from jax_longctx.bench.steps import Answering, Kernels, Step
from jax_longctx.engine import Context, Engine
from jax_longctx.engine.capacity import footprint
from jax_longctx.engine.runs import per_layer
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import CapacityError, LongctxError
from jax_longctx.methods import METHODS, Full, make_method
from jax_longctx.models import presets
from jax_longctx.run_spec import RunSpec
from jax_longctx.settings import Offload
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.bench.conftest import LAYER, bench, measured
from tests.support import joined, random_rows, tiny_engine


@pytest.fixture
def tiny_preset(tiny_shape, monkeypatch):
    monkeypatch.setattr(decode, "copy_bandwidth", lambda: 1e11)


@pytest.mark.slow
def test_times_beside_limits(tiny_preset, tmp_path):
    out = tmp_path / "steps.json"
    args = ["decode", "--preset", "tiny", "-m", "snapkv:budget=64", "--case", "2x600"]
    args += ["-m", "snapkv:budget=64 > quest:budget=16,local=8"]
    record = measured(*args, "--blocks", 1, "--out", out)
    assert record == json.loads(out.read_text())
    assert record["layers"] == {"timed": 2, "of": 2}
    full, snapkv, pair = record["rows"]
    assert (pair["method"], pair["settings"]["first.budget"]) == ("snapkv > quest", "64")
    assert (full["batch"], full["context"], full["speedup"]) == (2, 600, 1.0)
    assert snapkv["speedup"] == pytest.approx(full["seconds"] / snapkv["seconds"])
    # A token's keys and values: 2 layers x 2 heads x 8 x 2 x 2 bytes.
    token = 2 * 2 * 8 * 2 * 2
    assert full["read"] == pytest.approx(2 * 896 * token, rel=0.01)
    weights = full["bytes"] - full["read"]
    assert weights == snapkv["bytes"] - snapkv["read"]
    for row in (full, snapkv, pair):
        assert row["limit_seconds"] == pytest.approx(row["bytes"] / 1e11)
        assert row["share"] == pytest.approx(row["limit_seconds"] / row["seconds"])
        # A CPU's profile has no streams.
        assert not [key for key in row if "kernel" in key or "gap" in key]


@pytest.mark.slow
def test_offloaded_contexts_are_timed_and_what_they_fetch_is_told(tiny_preset, monkeypatch):
    real = decode.step_of

    def timed(engine, *given):
        # Full attention stays on the device, and takes no time here.
        return Step(0.5, None) if isinstance(engine.method, Full) else real(engine, *given)

    monkeypatch.setattr(decode, "step_of", create_autospec(real, side_effect=timed))
    args = ["decode", "--preset", "tiny", "-m", "quest:budget=32,local=16", "--case", "2x600"]
    args += ["--blocks", 1, "--chunk", 128, "--offload", "host", "--working-set", 192]
    for drawn in ([], ["--random-cache"]):
        record = measured(*args, "--kv", "int8", *drawn)
        assert (record["offload"], record["kv"]) == ("host", "int8")
        full, quest = record["rows"]
        assert "fetched" not in full and full["host"] == 0 < quest["host"]
        found = quest["fetched"]
        # The question's last token, read once, and blocks of 32 steps, of both layers and rows.
        assert found["steps"] % 4 == 0 and found["steps"] >= 2 * 2 * 3 * 32
        assert found["hits"] > 0 and found["misses"] > 0
        assert found["hit_rate"] == found["hits"] / (found["hits"] + found["misses"])
        assert 0 < found["waited_share"] <= 1


def _stub(monkeypatch, timed):
    stub = create_autospec(decode.step_of, side_effect=lambda *given: timed(given[0], given[2]))
    monkeypatch.setattr(decode, "step_of", stub)
    monkeypatch.setattr(decode, "one_row", create_autospec(decode.one_row, return_value=None))


def test_some_layers_stand_for_all(tiny_preset, monkeypatch):
    found = {2: Step(0.5, Kernels(24, 0.4)), 1: Step(0.3, Kernels(14, 0.25))}
    found[5] = Step(1.0, Kernels(50, 0.75))
    _stub(monkeypatch, lambda engine, rows: found[engine.config.num_layers])
    shape = presets.PRESETS["tiny"]
    monkeypatch.setitem(presets.PRESETS, "tiny", {**shape, "num_hidden_layers": 5})
    how = {"methods": ["full"], "cases": ["1x300"], "blocks": 1, "random_cache": True}
    asked = (Decode(model="tiny", layers=n, **how) for n in (2, None))
    row, whole = (decode.run(each, RunSpec())["rows"][0] for each in asked)
    assert row["seconds"] == pytest.approx(0.5 + 3 * 0.2)
    assert (row["kernels"], row["kernels_layer"]) == pytest.approx((24 + 3 * 10, 10))
    assert row["gap_seconds"] == pytest.approx(1.1 - (0.4 + 3 * 0.15))
    assert (whole["seconds"], whole["kernels_layer"], whole["gap_seconds"]) == (1.0, 10, 0.25)
    assert (row["bytes"], row["read"]) == (whole["bytes"], whole["read"])
    # Embedding rows but one are not read; the head is.
    assert whole["bytes"] - whole["read"] == 2 * (5 * LAYER + 32 + 128 * 32)


def test_forms_and_tiers_are_those_asked_for_and_count_as_bytes(tiny_preset, monkeypatch):
    forms, tiers = [], []

    def timed(engine, rows):
        forms.append((engine.setup.kv, engine.setup.weights))
        tiers.append(engine.setup.offload)
        return Step(0.5, None)

    _stub(monkeypatch, timed)
    args = ["decode", "--model", "tiny", "--case", "1x300", "-m"]
    given = ((), ("--kv", "int8"), ("--kv", "int8", "--weights", "int8"))
    records = [measured(*args, "full", *options) for options in given]
    said = [(record["kv"], record["weights"]) for record in records]
    assert forms == said == [(None, None), ("int8", None), ("int8", "int8")]
    wide, kept, both = (record["rows"][0] for record in records)
    # Of a layer's matrices a byte of two, and four bytes for each of their outputs.
    outputs = 32 + 2 * 16 + 32 + 2 * 64 + 32
    assert kept["bytes"] - both["bytes"] == 2 * (LAYER - 2 * 32 - 4 * outputs)
    # Of a token of a head 8 numbers in bfloat16, or in 8 bits beside a scale.
    assert kept["read"] == wide["read"] * 10 / 16
    assert wide["bytes"] - kept["bytes"] == wide["read"] - kept["read"]
    tier = ["quest:budget=32", "--offload", "host", "--working-set", 192]
    assert measured(*args, *tier)["offload"] == "host"
    # Full attention stays on the device.
    assert tiers[-2:] == [None, Offload(192)]


def test_failures_are_rows_without_a_ratio(tiny_preset, monkeypatch, tmp_path):
    def timed(engine, rows):
        if isinstance(engine.method, Full):
            raise CapacityError("too much")
        return Step(0.5, Kernels(50, 0.3))

    _stub(monkeypatch, timed)
    monkeypatch.setenv("COLUMNS", "200")
    out = tmp_path / "found.json"
    given = ("--mesh", "tensor=2", "--case", "1x300", "--out", out)
    result = bench("decode", "--model", "tiny", "-m", "quest", *given)
    assert "cpu (2), tiny in bfloat16" in result.stdout
    full, quest = json.loads(out.read_text())["rows"]
    assert full["failed"] == "too much" and quest["seconds"] == 0.5
    assert "speedup" not in quest
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("quest"))
    assert line.split()[-1] == "-" and ["25.0", "200.00", "ms"] == line.split()[-4:-1]
    # All methods are timed unless named; those that refuse the model have a row that says so.
    rows = measured("decode", "--model", "tiny")["rows"]
    assert [row["method"] for row in rows] == list(METHODS)
    failed = {row["method"]: row["failed"] for row in rows if "failed" in row}
    assert [*failed] == ["full", "duo-attention", "dynamic-ntk", "q-filters"]
    assert "rope" in failed["dynamic-ntk"]
    assert all("calibrate" in failed[name] for name in ("duo-attention", "q-filters"))


@pytest.mark.slow
def test_the_largest_batch_fills_the_memory(tiny_preset, monkeypatch):
    tried = []

    def timed(engine, rows):
        tried.append(rows)
        if len(tried) == 2:
            raise jax.errors.JaxRuntimeError("out of memory")
        return Step(0.5, Kernels(50, 0.3))

    _stub(monkeypatch, timed)
    monkeypatch.setattr(decode, "available_bytes", lambda mesh: int(0.01 * 2**30))
    args = ["decode", "--model", "tiny", "-m", "snapkv:budget=64", "--blocks", 1]
    full, snapkv = measured(*args, "--case", 2000)["rows"]
    assert tried == [full["batch"], snapkv["by_arithmetic"], snapkv["batch"]]
    assert snapkv["batch"] == snapkv["by_arithmetic"] - snapkv["by_arithmetic"] // 16
    assert snapkv["batch"] > 4 * full["batch"]
    for row, method in ((full, Full()), (snapkv, make_method("snapkv", {"budget": "64"}))):
        setup = decode.Shape.make("tiny", RunSpec(), lambda _: None)
        sizes = {"context": 2000, "reserve": 1 + steps.answer_tokens(1)}
        held = [
            footprint(setup.setup(method), batch=row["by_arithmetic"] + more, **sizes).resident
            for more in (0, 1)
        ]
        assert held[0] <= 0.9 * 0.01 * 2**30 < held[1]
        assert row["tokens_per_second"] == row["batch"] / 0.5
    assert snapkv["speedup"] == snapkv["tokens_per_second"] / full["tokens_per_second"]
    monkeypatch.setenv("COLUMNS", "200")
    lines = [line.split() for line in bench(*args, "--case", 2000).stdout.splitlines()]
    (shown,) = [line for line in lines if line[:1] == ["snapkv"]]
    assert shown[2:5] == [f"{snapkv['by_arithmetic']}", "x", "2,000"]
    # Where no row fits, or the memory is not known, that is said.
    monkeypatch.setattr(decode, "available_bytes", lambda mesh: 1000)
    (row,) = measured(*args[:3], "-m", "full", "--case", 4000)["rows"]
    assert row["failed"] == "no row fits the memory"
    monkeypatch.setattr(decode, "available_bytes", lambda mesh: None)
    assert "give BATCHxCONTEXT" in bench(*args, "--case", 2000, code=2).stderr


@pytest.mark.parametrize(
    ("name", "settings", "mesh", "by_layer"),
    [
        ("full", {}, {}, False),
        ("snapkv", {"budget": "64"}, {"seq": 2, "tensor": 2}, False),
        ("refreshkv", {"budget": "64"}, {}, True),
        ("citrus", {"budget": "64", "chunk": "16"}, {}, False),
    ],
)
@pytest.mark.slow
def test_copied_rows_answer_as_the_row(name, settings, mesh, by_layer):
    options = {"mesh": make_mesh(**mesh), "chunk": 32, "by_layer": by_layer}
    engine = tiny_engine(make_method(name, settings), **options)
    rows, asked = random_rows([150], engine.config.vocab_size), [list(steps.QUESTION)]
    tokens = steps.answer_tokens(1)
    contexts = [engine.prefill(rows, reserve=1 + tokens, questions=asked) for _ in range(2)]
    (answer,) = joined(engine.stream(contexts[0], asked, max_tokens=tokens, keep=False))
    answering = Answering(engine, contexts[1], 3, tokens, answer[0])
    found = np.concatenate([answering.block() for _ in range(4)], axis=1)
    np.testing.assert_array_equal(found, [answer[1:129]] * 3)
    answering.check()
    with pytest.raises(ValueError, match="step 161 of an answer of 129 tokens"):
        answering.block()
    assert contexts[1].caches is None


@pytest.mark.parametrize("counted", [True, False])
def test_the_kernels_of_a_step_are_those_of_one_block_after_the_timed_ones(monkeypatch, counted):
    """The profiled block slows down: it is not among the timed ones."""
    done = []
    answering = create_autospec(Answering, instance=True)
    answering.block.side_effect = lambda: done.append("block")
    answering.check.side_effect = lambda: done.append("check")
    answering.fetched.return_value = None

    def profiled(run):
        run()
        done.append("profile")
        return Kernels(32 * 40, 32 * 4e-3)

    engine = create_autospec(Engine, instance=True)
    engine.setup = create_autospec(Setup, instance=True, platform="gpu")
    made = create_autospec(Answering, return_value=answering)
    monkeypatch.setattr(steps, "Answering", made)
    monkeypatch.setattr(steps, "profiled", profiled)
    found = steps.step_of(engine, create_autospec(Context, instance=True), 3, 2, counted)
    assert made.call_args.args[2:] == (3, steps.answer_tokens(2))
    timed = ["block"] * (1 + 1 + 2)
    assert done == [*timed, *(["block", "profile"] if counted else []), "check"]
    assert steps.answer_tokens(2) == 1 + 32 * (len(timed) + 1)
    if counted:
        assert (found.kernels.number, found.kernels.seconds) == pytest.approx((40, 4e-3))
    else:
        assert found.kernels is None


def test_kernels_are_those_of_the_streams():
    """Of two devices the mean; the host's lines and others of a device do not count."""
    line = 'lines { name: "%s" events { metadata_id: 1 duration_ps: %d } }'
    kind = 'event_metadata { key: 1 value { id: 1 name: "fusion" } }'
    plane = 'planes { name: "%s" %s ' + kind + " }"
    one = line % ("Stream #1(Compute)", 3_000_000) + line % ("Stream #2(Memcpy)", 2_000_000)
    other = line % ("Stream #1(Compute)", 4_000_000) + line % ("XLA Ops", 9_000_000)
    host = plane % ("/host:CPU", line % ("Stream", 7_000_000))
    text = plane % ("/device:GPU:0", one) + plane % ("/device:GPU:1", other)
    read = jax.profiler.ProfileData.from_text_proto
    found = steps.kernels_of(read(text + host))
    assert (found.number, found.seconds) == (1.5, pytest.approx(4.5e-6))
    assert steps.kernels_of(read(host)) is None
    with pytest.raises(LongctxError, match="the profile has no kernels of a GPU"):
        steps.profiled(lambda: jax.numpy.ones(3).block_until_ready())


def test_a_random_cache_stands_for_a_context(tiny_preset):
    engine = tiny_engine()
    context = steps.random_context(engine, 2, 100, 16)
    for cache in per_layer(context.caches):
        np.testing.assert_array_equal(cache.length, [100, 100])
        np.testing.assert_array_equal(cache.context_length, [100, 100])
        assert 0.9 < float(cache.k[:, :, :100].std()) < 1.1
    leaves = jax.tree.leaves(context.caches)
    assert not np.array_equal(leaves[0], leaves[1])
    assert [len(row) for row in next(engine.stream(context, [[1], [2]], max_tokens=4))] == [1, 1]


def test_bad_options_are_named(tiny_preset):
    for args, said in [
        ("decode --layers 1", "--layers must be from 2 to 2, got 1"),
        ("decode --layers 3", "--layers must be from 2 to 2, got 3"),
        *(
            (f"decode --case {bad}", "expected BATCHxCONTEXT or CONTEXT")
            for bad in ("0", "0x5", "ax5", "5x")
        ),
        ("decode --mesh data=2", "for one part of the data axis; leave data out"),
        ("prefill --case 1024:", "expected TOKENS or TOKENS:BLOCK"),
        ("prefill --case 0", "expected TOKENS or TOKENS:BLOCK"),
        ("prefill --case 40", "--case 40: question and answer need 130 tokens"),
        ("prefill --out /proc/found.json", "nothing can be written to the folder /proc"),
        ("prefill --mesh seq=64", "needs 64 devices, 8 found"),
    ]:
        result = bench(*args.split(), "--model", "tiny", "-m", "full", code=2)
        assert said in result.stderr and result.stderr.count("\n") <= 2
