import dataclasses
import functools
import json
from unittest.mock import create_autospec

import jax
import pytest

from jax_longctx.engine.capacity import bytes_per_device, staged_caches
from jax_longctx.methods import make_method
from jax_longctx.planning import compiled
from jax_longctx.planning.collectives import count_collectives
from jax_longctx.planning.plan import PlanRequest, make_plan
from jax_longctx.planning.targets import parse_target
from jax_longctx.planning.work import weight_bytes
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh
from tests.small_methods import small_method
from tests.support import tiny_config

RESERVE, CHUNK = 40, 32


def request(method, context, batch=1, target="cpux8", layers=2):
    return PlanRequest(
        config=tiny_config(num_layers=layers),
        spec=RunSpec(method=method, dtype="float32", chunk=CHUNK),
        target=parse_target(target),
        **{"context": context, "batch": batch, "reserve": RESERVE},
    )


@pytest.mark.parametrize(
    ("method", "context", "sizes", "named"),
    [
        # Four chunks, the last one short; a full step beside the partial ones.
        (small_method("refreshkv"), 100, {}, "decode, partial and check steps"),
        # Anchors, whole blocks in turns, the last one short.
        (make_method("star", {"block": 32, "anchor": 8}), 200, {"seq": 2}, "decode"),
    ],
    ids=["refreshkv", "star"],
)
def test_each_program_of_a_run_has_a_name(method, context, sizes, named):
    """`test_ahead` compares the list that they are of with the calls of a run."""
    wanted = request(method, context)
    used = compiled.used_programs(wanted, wanted.setup(make_mesh(**sizes)), 1)
    names = {each.name for each in used}
    assert len(names) == len(used) > 3 and named in names
    assert {each.kind for each in used} == {"context", "finish", "question", "decode"}
    assert len({each.function.key(each.args) for each in used}) == len(used)


def test_a_program_holds_the_weights_and_all_caches_also_those_it_does_not_read():
    wanted = request(make_method("star", {"block": 64, "anchor": 8}), 100, target="cpu", layers=1)
    told = []
    sizes = make_plan(wanted, {}, largest=False).mesh
    found = compiled.compile_plan(wanted, sizes, lambda *step: told.append(step))
    assert told == [(done, len(found), name) for done, name in enumerate(found)]
    assert {
        *(f"{part}, {tokens} tokens" for part in ("embedding", "last norm") for tokens in (8, 32)),
        *("context (anchor), 1 x 8 tokens: a layer", "context, 1 x 32 tokens: a layer"),
        *("end of the context: a layer", "question, 32 tokens: a layer", "decode: a layer"),
        *("logits, 32 tokens", "choice of a token, 1 token"),
    } <= found.keys()
    setup = dataclasses.replace(wanted.setup(make_mesh()), by_layer=True)
    empty, kept, _ = staged_caches(setup, 1, 100, RESERVE)
    weights = weight_bytes(setup)
    for each in found.values():
        caches = empty if each.kind in ("context", "finish") else kept
        held = weights + bytes_per_device(setup.mesh, caches) + each.temporaries
        # Beside them the tokens and where the answer stands, of a few hundred bytes.
        assert held <= each.held < held + 2048
    # The end reads a cache without the weights.
    assert found["end of the context: a layer"].arguments < weights
    model = [each.temporaries for each in found.values() if each.kind != "finish"]
    assert compiled.most_temporaries(found) == max(model) > 0


def test_the_verdict_takes_the_most_that_any_compiled_program_does(run, monkeypatch):
    gib, real = 2**30, compiled.compile_plan
    told = {"collectives": 3, "moved": 5, "weights_read": 7, "seconds": 1.0}

    def planned(temporaries, held, *options):
        each = functools.partial(compiled.Compiled, arguments=gib, **told)

        def stand_in(request, sizes, progress):
            progress(0, 2, "first")
            return {
                "first": each(kind="context", temporaries=gib, held=6 * gib),
                "second": each(kind="question", temporaries=temporaries, held=held),
                "end of the context": each(kind="finish", temporaries=15 * gib, held=15 * gib),
            }

        stub = create_autospec(real, side_effect=stand_in)
        monkeypatch.setattr("jax_longctx.planning.compiled.compile_plan", stub)
        given = ("--model", "llama-3.2-1b", "--target", "v5e:1x1", "--context", 65536)
        result = run("plan", *given, "--compile", *options, code=0)
        return json.loads(result.stdout) if options else " ".join(result.stdout.split())

    small = planned(2 * gib, 7 * gib, "--json")
    assert small["memory_bytes"]["temporaries"] == 2 * gib
    assert small["memory_bytes"]["source"].startswith("temporaries are the most")
    assert small["compiled"]["fits"] and small["compiled"]["most_held_by"] == "end of the context"
    assert small["compiled"]["programs"]["second"]["held"] == 7 * gib
    shown = planned(2 * gib, 7 * gib)
    assert "compiled: the most that a program takes" in shown and "first, compiled 6.0 GiB" in shown
    assert "fits: as compiled, 'end of the context' holds the most, 15.0 GiB" in shown
    large = planned(4 * gib, 20 * gib, "--json")
    assert large["memory_bytes"]["fits"] and not large["compiled"]["fits"]
    assert large["compiled"]["most_held_by"] == "second"
    assert large["memory_bytes"]["largest_context"] < small["memory_bytes"]["largest_context"]
    said = "65,536 tokens do not fit: as compiled, 'second' holds the most, 20.0 GiB"
    assert said in planned(4 * gib, 20 * gib)


# A loop of {outer} passes as TPUs write it, around one of five as CPUs and GPUs do; one that ends
# by what it computes; a kernel whose attributes take several lines; a collective in two halves.
HLO = """HloModule jit_step

%inner_body (state.2: (s32[], bf16[2,8])) -> (s32[], bf16[2,8]) {{
  %state.2 = (s32[], bf16[2,8]{{1,0}}) parameter(0)
  %part = bf16[2,8]{{1,0:T(8,128)(2,1)}} get-tuple-element(%state.2), index=1
  %kernel = bf16[2,8]{{1,0:T(8,128)(2,1)}} custom-call(%part), frontend_attributes={{kernel={{
"metadata":"{{}}"
}}}}, backend_config={{}}
  %gather = bf16[2,8]{{1,0:T(8,128)(2,1)}} all-gather(%kernel), dimensions={{0}}
  %count.2 = s32[] get-tuple-element(%state.2), index=0
  ROOT %next.2 = (s32[], bf16[2,8]{{1,0}}) tuple(%count.2, %gather)
}}

%outer_body.sunk (state.4: (bf16[2,8], s32[])) -> (bf16[2,8], s32[]) {{
  %state.4 = (bf16[2,8]{{1,0}}, s32[]) parameter(0)
  %part.4 = bf16[2,8]{{1,0}} get-tuple-element(%state.4), index=0
  %begin.4 = s32[] constant(0)
  %tuple.4 = (s32[], bf16[2,8]{{1,0}}) tuple(%begin.4, %part.4)
  %while.4 = (s32[], bf16[2,8]{{1,0}}) while(%tuple.4), condition=%inner_condition, \
body=%inner_body, backend_config={{"known_trip_count":{{"n":"5"}},"known_init_step":{{}}}}
  %whole.4 = bf16[2,8]{{1,0}} get-tuple-element(%while.4), index=1
  %reduced = bf16[2,8]{{1,0}} all-reduce(%whole.4), to_apply=%add.1
  %count.4 = s32[] get-tuple-element(%state.4), index=1
  %step.4 = s32[] constant({step})
  %more.4 = s32[] add(%count.4, %step.4)
  ROOT %next.4 = (bf16[2,8]{{1,0}}, s32[]) tuple(%reduced, %more.4)
}}

%outer_condition (state.5: (bf16[2,8], s32[])) -> pred[] {{
  %state.5 = (bf16[2,8]{{1,0}}, s32[]) parameter(0)
  %bound.5 = s32[] constant({bound})
  %count.5 = s32[] get-tuple-element(%state.5), index=1
  ROOT %less.5 = pred[] compare(%count.5, %bound.5), direction={direction}
}}

%until_done_body (state.6: (bf16[2,8], s32[])) -> (bf16[2,8], s32[]) {{
  %state.6 = (bf16[2,8]{{1,0}}, s32[]) parameter(0)
  %copy.6 = s32[] copy(%begin.6)
  %begin.6 = s32[] constant({start})
  %part.6 = bf16[2,8]{{1,0}} get-tuple-element(%state.6), index=0
  %tuple.6 = (bf16[2,8]{{1,0}}, s32[]) tuple(%part.6, %copy.6)
  ROOT %while.6 = (bf16[2,8]{{1,0}}, s32[]) while(%tuple.6), condition=%outer_condition, \
body=%outer_body.sunk
}}

%until_done (state.7: (bf16[2,8], s32[])) -> pred[] {{
  %state.7 = (bf16[2,8]{{1,0}}, s32[]) parameter(0)
  ROOT %done.7 = pred[] constant(false)
}}

ENTRY %main (part.8: bf16[2,8], begin.8: s32[]) -> (bf16[2,8], s32[]) {{
  %part.8 = bf16[2,8]{{1,0}} parameter(0)
  %begin.8 = s32[] parameter(1)
  %start = (f32[4], f32[8]) all-gather-start(%part.8), dimensions={{0}}
  %done = f32[8] all-gather-done(%start)
  %pair = (f32[3]{{0}}, f32[5]{{0}}) all-reduce(%u, %v), to_apply=%add.1
  %tuple.8 = (bf16[2,8]{{1,0}}, s32[]) tuple(%part.8, %begin.8)
  ROOT %while.8 = (bf16[2,8]{{1,0}}, s32[]) while(%tuple.8), condition=%until_done, \
body=%until_done_body
}}
"""


@pytest.mark.parametrize(
    ("start", "bound", "step", "direction", "passes"),
    [
        *((0, 3, 1, "LT", 3), (0, 3, 1, "LE", 4), (-2, 3, 1, "LT", 5)),
        *((1, 8, 3, "LT", 3), (5, 3, 1, "LT", 0)),
        # Of unknown length.
        (0, 3, 1, "NE", 1),
    ],
)
def test_nested_loops_multiply(start, bound, step, direction, passes):
    text = HLO.format(start=start, bound=bound, step=step, direction=direction)
    # Five gathers and a reduction of 32 bytes in each pass; one of each of eight numbers.
    assert count_collectives(text) == (passes * 6 + 2, passes * 6 * 32 + 64)


# One gather, cut into fusions with what runs beside it, and another one in a fusion of its own.
FUSED = """
%begun (x.1: bf16[2,8]) -> bf16[4,8] {
  ROOT %gather.1 = bf16[4,8]{1,0} all-gather(%x.1), channel_id=3, dimensions={0}
}

%beside (x.2: bf16[2,8], y.2: f32[8]) -> f32[8] {
  %gather.2 = bf16[4,8]{1,0} all-gather(%x.2), channel_id=3, dimensions={0}
  ROOT %twice.2 = f32[8]{0} add(%y.2, %y.2)
}

%ended (x.3: bf16[2,8]) -> bf16[4,8] {
  ROOT %gather.3 = bf16[4,8]{1,0} all-gather(%x.3), channel_id=3, dimensions={0}
}

%other (x.4: bf16[2,8]) -> bf16[4,8] {
  ROOT %gather.4 = bf16[4,8]{1,0} all-gather(%x.4), channel_id=4, dimensions={0}
}

ENTRY %main (x.5: bf16[2,8], y.5: f32[8]) -> bf16[4,8] {
  %async-collective-start = bf16[4,8]{1,0} fusion(%x.5), kind=kCustom, calls=%begun
  %fusion.5 = f32[8]{0} fusion(%x.5, %y.5), kind=kOutput, calls=%beside
  %async-collective-done = bf16[4,8]{1,0} fusion(%x.5), kind=kCustom, calls=%ended
  ROOT %fusion.6 = bf16[4,8]{1,0} fusion(%x.5), kind=kCustom, calls=%other
}
"""


def test_a_collective_that_is_cut_into_fusions_counts_once():
    assert count_collectives(FUSED) == (2, 2 * 4 * 8 * 2)


def _compiled(target, layers):
    config = tiny_config(num_layers=layers, num_kv_heads=2, head_dim=128)
    wanted = dataclasses.replace(request(small_method("full"), 100, target=target), config=config)
    wanted = dataclasses.replace(wanted, spec=dataclasses.replace(wanted.spec, dtype="bfloat16"))
    # The tests' exact matmuls are for CPU.
    with jax.default_matmul_precision("default"):
        return compiled.compile_plan(wanted, {"data": 1, "seq": 2, "tensor": 2})


@pytest.mark.slow
def test_the_programs_of_a_layer_are_those_of_every_model():
    one, two = (_compiled("cpux4", layers) for layers in (1, 2))
    assert one.keys() == two.keys()
    for name, found in one.items():
        assert (found.collectives, found.moved) == (two[name].collectives, two[name].moved)
    layers = [found for name, found in one.items() if name.endswith(": a layer")]
    assert {found.kind for found in layers} == {"context", "finish", "question", "decode"}
    assert all(found.moved > 0 for found in layers if found.kind != "finish")


@pytest.mark.slow
@pytest.mark.optimized
@pytest.mark.parametrize("target", ["v5e:2x2", "v6e:2x2"])
def test_each_layer_adds_the_same(target):
    pytest.importorskip("libtpu")
    # A loop over one layer is none.
    one, two, four = (_compiled(target, layers) for layers in (1, 2, 4))
    for name in (name for name, found in one.items() if found.kind != "finish"):
        for figure in ("collectives", "moved"):
            first, second, fourth = (getattr(each[name], figure) for each in (one, two, four))
            assert second - first > 0
            assert fourth - second == 2 * (second - first)
        # What a layer needs is needed once.
        assert four[name].temporaries <= two[name].temporaries * 1.05
