"""A million tokens: the programs for a GPU, lowered where there is none, hold no more than keys."""

import math
import re

import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jax_longctx.methods import make_method
from jax_longctx.planning.compiled import used_programs
from jax_longctx.planning.plan import PlanRequest, make_plan
from jax_longctx.planning.targets import parse_target
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import MESH_AXES
from tests.support import tiny_config

TOKENS = 2**20
# Heads as SmolLM2-135M has them, in one layer.
HEADS = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "model_dim": 576, "mlp_dim": 64}


@pytest.fixture
def wanted():
    return PlanRequest(
        config=tiny_config(num_layers=1, max_position=8192, **HEADS),
        spec=RunSpec(method=make_method("reattention", {"local_size": 1024, "kept": 63})),
        target=parse_target("h100x1"),
        context=TOKENS,
        reserve=32,
    )


@pytest.mark.slow
def test_no_program_holds_more_than_a_layers_keys_at_once(wanted):
    mesh = AbstractMesh(
        (1, 1, 1),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * 3,
        abstract_device=AbstractDevice(device_kind="H100", num_cores=None, platform="gpu"),
    )
    ranked, used = set(), used_programs(wanted, wanted.setup(mesh), 1)
    slots = used[0].args[2][0].k.shape[2]
    assert TOKENS < slots < TOKENS * 17 / 16
    for program in used:
        traced = program.function.trace(*program.args)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        if "custom_call @mosaic_gpu" in text:
            ranked.add(program.name)
        shapes = re.findall(r"tensor<((?:\d+x)+)[a-z]+\d+>", text)
        elements = {math.prod(map(int, shape[:-1].split("x"))) for shape in shapes}
        # Keys or values of a layer, in the layouts of cache, kernels and lines; a chunk's scores of
        # all slots would be 25 times as many.
        assert {size for size in elements if size > 4 * TOKENS} <= {3 * 64 * slots}
    # The first chunks are attended whole.
    assert ranked == {"context, 512 tokens", "question, 32 tokens", "question, 1 token", "decode"}


def test_a_model_of_30_layers_fits_one_gpu_with_room(wanted):
    plan = make_plan(wanted, {}, largest=False)
    # Keys and values of 3 heads of 64, two bytes each, a sixteenth of slots to spare at most.
    layer = TOKENS * 2 * 3 * 64 * 2
    assert layer < plan.cache < layer * 17 / 16
    assert 30 * plan.cache < 0.4 * plan.memory
