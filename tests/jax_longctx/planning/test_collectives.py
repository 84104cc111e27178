"""Collectives in the body of a loop count as often as the loop runs."""

import jax
import pytest

from jax_longctx.planning.collectives import count_collectives
from jax_longctx.planning.compiled import compile_plan
from jax_longctx.planning.plan import PlanRequest
from jax_longctx.planning.targets import parse_target
from tests.small_methods import small_method
from tests.support import tiny_config

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
    # Five gathers and a reduction of 32 bytes in each pass; one gather and one reduction of eight
    # numbers.
    assert count_collectives(text) == (passes * 6 + 2, passes * 6 * 32 + 64)


# One gather, cut into fusions with what runs beside it, and another one in a fusion of its own.
FUSED = """
%begun (x.1: bf16[2,8]) -> bf16[4,8] {
  %x.1 = bf16[2,8]{1,0} parameter(0)
  ROOT %gather.1 = bf16[4,8]{1,0} all-gather(%x.1), channel_id=3, dimensions={0}
}

%beside (x.2: bf16[2,8], y.2: f32[8]) -> f32[8] {
  %x.2 = bf16[2,8]{1,0} parameter(0)
  %y.2 = f32[8]{0} parameter(1)
  %gather.2 = bf16[4,8]{1,0} all-gather(%x.2), channel_id=3, dimensions={0}
  ROOT %twice.2 = f32[8]{0} add(%y.2, %y.2)
}

%ended (x.3: bf16[2,8]) -> bf16[4,8] {
  %x.3 = bf16[2,8]{1,0} parameter(0)
  ROOT %gather.3 = bf16[4,8]{1,0} all-gather(%x.3), channel_id=3, dimensions={0}
}

%other (x.4: bf16[2,8]) -> bf16[4,8] {
  %x.4 = bf16[2,8]{1,0} parameter(0)
  ROOT %gather.4 = bf16[4,8]{1,0} all-gather(%x.4), channel_id=4, dimensions={0}
}

ENTRY %main (x.5: bf16[2,8], y.5: f32[8]) -> bf16[4,8] {
  %x.5 = bf16[2,8]{1,0} parameter(0)
  %y.5 = f32[8]{0} parameter(1)
  %async-collective-start = bf16[4,8]{1,0} fusion(%x.5), kind=kCustom, calls=%begun
  %fusion.5 = f32[8]{0} fusion(%x.5, %y.5), kind=kOutput, calls=%beside
  %async-collective-done = bf16[4,8]{1,0} fusion(%x.5), kind=kCustom, calls=%ended
  ROOT %fusion.6 = bf16[4,8]{1,0} fusion(%x.5), kind=kCustom, calls=%other
}
"""


def test_a_collective_that_is_cut_into_fusions_counts_once():
    assert count_collectives(FUSED) == (2, 2 * 4 * 8 * 2)


def _compiled(target, layers):
    wanted = PlanRequest(
        config=tiny_config(num_layers=layers, num_kv_heads=2, head_dim=128),
        method=small_method("full"),
        target=parse_target(target),
        **{"context": 100, "reserve": 40, "chunk": 32},
    )
    # The tests' exact matmuls are for CPU.
    with jax.default_matmul_precision("default"):
        return compile_plan(wanted, {"data": 1, "seq": 2, "tensor": 2})


@pytest.mark.slow
def test_the_programs_of_a_layer_are_those_of_every_model():
    """On a CPU the host calls a layer's programs."""
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
