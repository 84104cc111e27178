import dataclasses
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jax_longctx.engine.allocate import abstract_caches
from jax_longctx.engine.capacity import bytes_per_device, slots_for
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.memory import shown_bytes
from jax_longctx.methods import METHODS, make_method
from jax_longctx.models.params import init_params
from jax_longctx.models.presets import preset
from jax_longctx.planning.compiled import compile_plan
from jax_longctx.planning.plan import PlanRequest, candidates, make_plan
from jax_longctx.planning.targets import parse_target
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.cli.conftest import refused
from tests.small_methods import small_method
from tests.support import tiny_config

EIGHT = {"data": 2, "seq": 2, "tensor": 2}
CONTEXT = 1000


def request(method="full", target="cpux8", config=None, **changes):
    made = make_method(method, {}) if isinstance(method, str) else method
    sizes = {"context": CONTEXT, "batch": 1, "reserve": 100}
    sizes = {name: changes.pop(name, size) for name, size in sizes.items()}
    return PlanRequest(
        config=config or tiny_config(),
        spec=RunSpec(**{"method": made, "dtype": "float32", "chunk": 64, **changes}),
        target=parse_target(target),
        **sizes,
    )


def eight_billion(layers=4):
    return dataclasses.replace(preset("llama-3.1-8b"), num_layers=layers, windows=(None,) * layers)


@pytest.mark.parametrize("method", ["full", "h2o", "quest", "refreshkv"])
def test_bytes_are_those_of_arrays_on_the_mesh(method):
    wanted, mesh = request(small_method(method), batch=2), make_mesh(**EIGHT)
    plan, params = make_plan(wanted, EIGHT), init_params(wanted.config, RunSpec(mesh=mesh))
    shards = [shard for leaf in jax.tree.leaves(params) for shard in leaf.addressable_shards]
    device = mesh.devices[1, 0, 1]
    assert plan.weights == sum(each.data.nbytes for each in shards if each.device == device)
    setup = Setup(wanted.config, wanted.spec.method, mesh, jnp.dtype("float32"), 64)
    empty = abstract_caches(setup, 2, slots_for(CONTEXT, 100, 2), 128)
    # The peak is that of the context's own caches, and more where the answer has its own.
    assert plan.cache >= bytes_per_device(mesh, empty)
    if not wanted.spec.method.info.answers_apart and method != "refreshkv":
        assert plan.cache == bytes_per_device(mesh, empty)


def test_work_of_an_8b_model_written_down_anew():
    length = 32768
    made = {"config": eight_billion(), "context": length, "dtype": "bfloat16"}
    wanted = request(target="h100x4", chunk=8192, **made)
    plan = make_plan(wanted, {"tensor": 4})
    layer, head = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336, 128256 * 4096
    linear = 2 * 4 * layer * length / 4
    assert plan.prefill.linear == pytest.approx(linear, rel=1e-3)
    assert plan.prefill.attention == pytest.approx(4 * 4 * 4096 * length**2 / 2 / 4, rel=1e-3)
    # Two all-reduces a layer of bfloat16 activations, each 2 x 3/4 of them.
    assert plan.prefill.received == pytest.approx(4 * 2 * 1.5 * length * 4096 * 2)
    weights, cache = 2 * (4 * layer + head) / 4, 4 * 2 * 8 * 128 * 2 * length / 4
    assert plan.decode.read == pytest.approx(weights + cache, rel=0.01)
    chip = wanted.target.chip
    assert plan.step > plan.decode.read / chip.bandwidth
    assert plan.first_token > linear / chip.flops
    # Over all devices of a row each weight is on one device of `seq` x `tensor`.
    plan = make_plan(request(target="h100x8", **made), {"seq": 4, "tensor": 2})
    weights, head = (4 * layer + head) / 8, head / 8
    assert plan.undivided == ()
    assert plan.weights == pytest.approx(2 * (weights + head), rel=1e-3)
    assert plan.decode.read == pytest.approx(2 * weights + cache / 2, rel=0.01)
    assert plan.decode.linear == 2 * weights
    assert plan.prefill.linear == pytest.approx(linear / 2, rel=1e-3)
    # A layer gathers q, k and v, merges the shards' attention, and adds up its two projections.
    assert plan.decode.collectives == 4 * 4
    gathered = 24 * 128 * 2 * 3 / 4
    merged, summed = 3 * 16 * (128 * 2 + 4), 2 * 2 * 4096 * 2 * 7 / 8
    assert plan.decode.received == pytest.approx(4 * (gathered + merged + summed))


def test_blocks_that_are_read_count_by_their_density():
    def work(reading):
        sizes = {"context": 32768, "chunk": 4096, "reading": reading}
        return make_plan(request("full", target="h100x1", **sizes), {}).prefill.attention

    dense = work(None)
    # A chunk's own pairs are an eighth; each estimate stands for 16 tokens' products.
    expected = 1 / 8 + 7 / 8 * (0.25 + 0.5 / 16)
    assert work("xattention:density=0.25") == pytest.approx(dense * expected, rel=1e-3)
    assert work("xattention") == dense


def test_a_ring_divides_the_work_and_zigzag_halves_the_last_shards():
    def work(method):
        return make_plan(request(method, target="h100x4"), {"seq": 4}).prefill

    full, ring = work("full"), work("ring")
    zigzag = work(make_method("ring", {"order": "zigzag"}))
    # Full attention's shards have the same tokens and each its own weights, a ring's the opposite.
    assert ring.linear == pytest.approx(full.linear, rel=0.1)
    # The last of four shards attends to 3.5 shards of 4, where the mean is 2.
    assert ring.attention == pytest.approx(zigzag.attention * 3.5 / 2, rel=0.01)
    assert zigzag.attention == pytest.approx(full.attention, rel=0.01)
    # Keys and values of three other shards, in both layers; three quarters of all weights.
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48) + 64 * 32
    assert ring.received == 2 * 3 * CONTEXT / 4 * 2 * 2 * 8 * 4 + weights * 4 * 3 / 4
    # Each layer's weights are four arrays.
    assert (ring.collectives, zigzag.collectives) == (2 * (3 + 4) + 1, 2 * (4 + 4) + 1)


@pytest.mark.parametrize("name", ["snapkv > quest", "knorm > quest", "snapkv", "r-kv"])
def test_a_step_reads_a_part_where_an_answer_s_caches_are_divided(name):
    one, four = (
        make_plan(request(name, target="h100x4", context=8192), {"seq": n}, largest=False)
        for n in (1, 4)
    )
    # Slots are rounded to the shards.
    parts = 4 if ">" in name else 1
    assert one.decode.attention / four.decode.attention == pytest.approx(parts, rel=0.01)


@pytest.mark.parametrize("kv", ["recompute", "broadcast"])
def test_stars_busiest_shard_reads_its_blocks_behind_the_anchor(kv):
    """1,900 tokens in blocks of 256 behind 100: two shards of four blocks, the last of 108."""
    method = make_method("star", {"block": 256, "anchor": 100, "anchor_kv": kv})
    wanted = request(method, target="h100x2", context=1900)
    plan = make_plan(wanted, {"seq": 2}, largest=False)
    star, head = plan.prefill, 64 * 32
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48

    def causal(tokens):
        return tokens * (tokens + 1) / 2

    # The second shard has three whole blocks and one of 108 tokens, all behind an anchor; the
    # first has four whole ones, three of them behind it, and more to do either way.
    first = [4 * 256, 4 * causal(256) + 3 * 100 * 256]
    if kv == "recompute":
        first = [first[0] + 100, first[1] + causal(100)]
    assert star.linear == 2 * (wanted.config.num_layers * layer * first[0] + head / 2)
    assert star.attention == 2 * 4 * 4 * 8 * first[1]
    # In chunks of 64: two for an anchor, four for a block; a block whose head is sent in one.
    passes = 2 + 4 * 4 if kv == "recompute" else 1 + 3 * 4
    sent = 2 * 100 / 2 * (2 * 2 * 8 * 4) * 2 if kv == "broadcast" else 0
    # Each pass gathers the other half of the weights and of the embedding.
    assert star.received == sent + passes * (2 * layer + head) * 4 / 2
    # Keys and values in each of two layers; four arrays of weights in each, and the embedding.
    assert star.collectives == (4 if kv == "broadcast" else 0) + passes * (2 * 4 + 1)
    assert star.read == passes * (plan.weights + 2 * layer * 4)


@pytest.mark.slow
def test_an_offloaded_context_is_counted_apart_from_the_devices():
    """8B's keys and values of 131,072 tokens, which only pass the device where all are read."""

    def planned(name, **offload):
        how = {"context": 131072, "dtype": "bfloat16", "reserve": 256, "chunk": 512, **offload}
        wanted = request(name, "h200x1", preset("llama-3.1-8b"), **how)
        return make_plan(wanted, {"data": 1, "seq": 1, "tensor": 1})

    made = {name: planned(name, offload="host") for name in ("infllm", "quest", "reattention")}
    slots = slots_for(131072, 256)
    whole = 32 * 2 * 8 * slots * 128 * 2
    here = planned("quest")
    assert here.host == here.moved == 0 and here.cache > whole
    for name, plan in made.items():
        # Of ReAttention values alone.
        assert plan.host == (whole // 2 if name == "reattention" else whole)
        assert plan.weights == here.weights and plan.step == pytest.approx(here.step, rel=0.5)
    # Representatives, rings and the pool: a window of 4,096, units of 128 and a chunk.
    assert made["infllm"].cache < whole / 5
    # All keys, and the pool of values: the scope, a chunk, and frames for four times its spans.
    tokens = 32 + 4096 + 512 + 4 * 2 * 127 * 32
    assert made["reattention"].cache == pytest.approx(whole / 2 * (1 + tokens / slots), rel=0.01)
    # Digests, the pool, and twice a layer while a chunk is read.
    assert whole / 16 + 2 * whole / 32 < made["quest"].cache < whole / 3
    assert made["infllm"].moved == pytest.approx(whole / 48e9)
    assert made["reattention"].moved == pytest.approx(whole / 2 / 48e9)
    assert made["quest"].moved == pytest.approx((1 + 131072 / 512) * whole / 48e9)
    assert made["quest"].first_token > made["quest"].moved


def test_a_mesh_for_an_offloaded_context_does_not_divide_the_text(run):
    meshes = [plan.mesh for plan in candidates(request("quest", "cpux8", offload="host", batch=2))]
    assert meshes and all(mesh["seq"] == 1 for mesh in meshes)
    given = ("plan", "--target", "h200x1", "-m", "quest", "--offload", "host", "--json")
    memory = json.loads(run(*given, "--context", 65536, code=0).stdout)["memory_bytes"]
    assert memory["host"] > memory["cache"] > 0
    result = run(*given, "--mesh", "seq=1,tensor=1", "--set", "allocation=psa-estimate")
    refused(result, "quest cannot be offloaded: allocation=psa-estimate")


def test_weights_that_do_not_divide_over_seq_stay_whole_and_are_named(run, monkeypatch):
    config = tiny_config(vocab_size=68)
    plan = make_plan(request(config=config), {"seq": 4, "tensor": 2})
    assert plan.undivided == ("vocab",)
    whole = make_plan(request(config=config), {"tensor": 2})
    tables = 2 * 68 * 32 * 4 / 2
    norms = 5 * 32 * 4
    assert plan.weights == (whole.weights - tables - norms) / 4 + tables + norms
    monkeypatch.setenv("COLUMNS", "200")
    command = ("plan", "--target", "h100x6", "--model", "llama-3.2-1b", "--mesh")
    shown = run(*command, "seq=3,tensor=2").stdout
    assert "whole on each shard of seq, as they do not divide: head_dim, mlp" in shown
    assert "as they do not divide" not in run(*command, "seq=2,tensor=2").stdout


def test_what_a_budget_bounds_and_where_matrices_in_8_bits_become_floats():
    full, small = (
        make_plan(request(small_method(name), context=100_000), {})
        for name in ("full", "streaming-llm")
    )
    assert small.cache < full.cache / 20
    assert small.prefill.attention < full.prefill.attention / 20
    assert small.decode.read < full.decode.read
    assert small.largest is None and full.largest is not None
    on_gpu, on_tpu = (
        make_plan(request(target=target, weights="int8", dtype="bfloat16"), {}, largest=False)
        for target in ("a100", "v5e:1x1")
    )
    assert on_gpu.temporaries > on_tpu.temporaries


@pytest.mark.parametrize(
    ("method", "target", "sizes"),
    [("full", "v5e:4x4", {"seq": 2, "tensor": 8}), ("ring", "v5p:2x2x2", {"seq": 8})],
)
def test_the_largest_context_fits_and_little_more_does_not(method, target, sizes):
    wanted = request(method, target, eight_billion(), dtype="bfloat16", chunk=512)
    largest = make_plan(wanted, sizes).largest
    assert largest is not None and largest > 100_000
    for context, fits in ((largest, True), (int(largest * 1.05), False)):
        held = make_plan(dataclasses.replace(wanted, context=context), sizes, largest=False)
        assert held.fits is fits
        assert (held.weights + held.cache + held.temporaries < held.memory) or not fits


def test_the_command_prints_its_sources_and_what_the_guide_shows(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for target, told in [
        ("cpu", "constants: 0.3 TFLOP/s, 0.02 TB/s; assumed: link 10 GB/s"),
        ("h200x4", "constants: 989 TFLOP/s, 4.8 TB/s (data sheet); assumed: link 370 GB/s, 9 us"),
        ("h200 -m quest --offload host", "assumed: link 370 GB/s, host link 48 GB/s, 9 us"),
    ]:
        given = ("--mesh", "seq=1", "--target", *target.split())
        assert told in run("plan", "--model", "llama-3.2-1b", *given).stdout
    # The guide's compiled lines are of a compile that takes minutes; those are left out.
    guide = (Path(__file__).parents[3] / "docs/guides/memory.md").read_text()
    pattern = r"```\njax-longctx (plan [^\n]*) --compile\n```\n\n```\n(.*?)```"
    command, block = re.search(pattern, guide, re.DOTALL).groups()
    monkeypatch.setenv("COLUMNS", "200")
    shown = " ".join(run(*command.split()).stdout.split())
    told = [" ".join(line.split()) for line in re.sub(r"\n {2,}", " ", block).splitlines()]
    told = [line for line in told if "compiled" not in line and "together" not in line]
    assert len(told) == 10
    for line in told:
        assert line in shown


def test_what_does_not_go_together_is_refused():
    for sizes, message in (
        ({"seq": 16}, "needs 16 devices, cpux8 has 8"),
        ({"tensor": 8}, "does not divide"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_plan(request(), sizes)
    with pytest.raises(InputError, match="context must be at least 1, got 0"):
        request(context=0)
    with pytest.raises(InputError, match="cannot compile for h100x8 on this machine"):
        compile_plan(request(target="h100x8"), {"tensor": 2})
    # Targets are as their data sheets say, and unknown ones are named.
    h100, h200 = (parse_target(name).chip for name in ("h100x8", "h200x8"))
    assert (h200.memory, h200.flops, h200.bandwidth) == (141 * 10**9, 989e12, 4.8e12)
    assert dataclasses.replace(h200, memory=h100.memory, bandwidth=h100.bandwidth) == h100
    for name in ("a100", "l40sx2", "rtx4090", "rtx5090", "b200x8", "mi300x"):
        chip = parse_target(name).chip
        # A step of a model that fills the memory takes 10 to 60 ms at the whole bandwidth.
        assert 0.01 < chip.memory / chip.bandwidth < 0.06 and chip.flops > 150e12
    for name in ("v5e", "v5e:4", "v5p:4x4", "h100x0", "tpu", "v5e:0x4"):
        with pytest.raises(InputError, match="is not understood; expected v5e:4x4"):
            parse_target(name)


def test_what_would_fit_is_named(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    given = ("plan", "--target", "rtx4090", "--context")
    for tokens, fitting in [
        (60_000, {"--weights int8", "--kv int8", "--offload host -m quest", "-m snapkv"}),
        (131_072, {"--weights int8 --kv int8"}),
    ]:
        record = json.loads(run(*given, tokens, "--json", code=0).stdout)
        found = record["alternatives"]
        assert found and set(found) <= fitting, found
        shown = " ".join(run(*given, tokens).stdout.split())
        for options, need in [*found.items()][:1]:
            other = json.loads(run(*given, tokens, *options.split(), "--json", code=0).stdout)
            memory = other["memory_bytes"]
            assert memory["fits"] and f"{options} ({shown_bytes(need)})" in shown
            assert need == sum(memory[name] for name in ("weights", "cache", "temporaries"))
    everything = ("--weights", "int8", "--kv", "int8", "-m", "snapkv")
    huge = ("plan", "--target", "v5e:1x1", "--model", "llama-3.1-70b", *everything)
    assert json.loads(run(*huge, "--json", code=0).stdout)["alternatives"] == {}


def test_auto_chooses_for_the_target(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    auto = ("plan", "--target", "rtx4090", "--context", 60_000, "-m", "auto", "--questions")
    # Full attention fits with keys and values in 8 bits, and no budget is taken without.
    result = run(*auto, 5, "--kv", "int8", "--json", code=0)
    record = json.loads(result.stdout)
    assert record["method"] == "full" and record["alternatives"] == {}
    assert "method full: 60,256 tokens fit the trained length of 131,072" in result.stderr
    result = run(*auto, 5, code=0)
    assert "full attention's cache of 7.4 GiB does not fit" in result.stderr
    assert "fits; memory does not bound the context; without --method auto this fits: --w" in (
        " ".join(result.stdout.split())
    )
    # A method that reads the text for each question takes part up to four.
    few = json.loads(run(*auto, 4, "--json", code=0).stdout)["method"]
    many = re.search(r"method ([\w-]+)", result.stderr)[1]
    assert METHODS[few]().info.needs_question and not METHODS[many]().info.needs_question


def test_a_text_beyond_the_trained_length_is_told(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    phi = ("plan", "--target", "h200", "--model", "phi-4", "--context")
    said = "30,256 tokens are more than the 16,384 that the model was trained to"
    assert said in run(*phi, 30_000, code=0).stdout
    assert "was trained to" not in run(*phi, 16_000, code=0).stdout
    record = json.loads(run(*phi, 30_000, "-m", "auto", "--json", code=0).stdout)
    assert record["method"] == "dynamic-ntk" and record["beyond_trained"] is None


def test_the_command_tells_what_is_arithmetic(run):
    command = ("plan", "--target", "v5p:2x2x2", "--context", 131072, "--chunk", 4096)
    command += ("--model", "llama-3.2-1b")
    record = json.loads(run(*command, "--json", code=0).stdout)
    assert record["mesh_proposed"] and record["devices"] == 8 and record["compiled"] is None
    memory = record["memory_bytes"]
    assert memory["fits"] and memory["source"].startswith("arithmetic")
    assert memory["largest_context"] > 131072
    assert record["seconds"]["source"].endswith("not measured")
    shown = run(*command, "--mesh", "seq=2,tensor=4").stdout
    assert "arithmetic" in shown and "roofline" in shown and "constants: 459 TFLOP/s" in shown
    assert "the largest context that fits" in shown and "(proposed)" not in shown
    # A mistake is one line.
    result = run("plan", "--target", "cpu", "--mesh", "seq=2")
    refused(result, "needs 2 devices, cpu has 1")


@pytest.mark.thorough
@pytest.mark.optimized
@pytest.mark.parametrize(
    ("method", "sizes"), [("full", {"seq": 2, "tensor": 8}), ("ring", {"seq": 16, "tensor": 1})]
)
def test_sixteen_v5e_chips_are_compiled_for(method, sizes):
    pytest.importorskip("libtpu")
    shape = {"model_dim": 1024, "mlp_dim": 2048, "num_heads": 16, "num_kv_heads": 8}
    config = tiny_config(vocab_size=1024, head_dim=128, **shape)
    wanted = request(method, "v5e:4x4", config, context=16384, dtype="bfloat16", chunk=512)
    plan = make_plan(wanted, {"data": 1, **sizes})
    with jax.default_matmul_precision("default"):
        compiled = compile_plan(wanted, plan.mesh)
    decode, held = compiled["decode"], plan.weights + plan.cache
    # Beside those of the layers: the embedding, the logits, the next token.
    assert 0 <= decode.collectives - plan.decode.collectives <= 4
    assert decode.arguments == pytest.approx(held, rel=0.05)
    # A ring writes the caches it is given without reading them, so that they are no arguments.
    assert decode.held < 1.05 * (held + decode.temporaries)
    assert all(each.held > 0.95 * held for each in compiled.values())
    for program in compiled.values():
        # The end of the context is every shard's own.
        assert (program.collectives > 0) == (program.moved > 0) == (program.kind != "finish")
    # The cache is updated in place.
    assert decode.temporaries < plan.cache / 2
