"""Reading a cache's slots holds no copy of it, compiled ahead of time for v5e."""

import jax
import jax.numpy as jnp
import pytest

from jax_longctx.engine.prefill import whole_finish
from jax_longctx.engine.setup import Setup
from jax_longctx.methods import InfLLM, ReAttention, SnapKV
from jax_longctx.sharding import make_mesh
from tests.absent import tpu
from tests.jax_longctx.engine.lowering import (
    cache_bytes,
    compile_decode,
    no_persistent_cache,
    sharded_caches,
)
from tests.support import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.optimized]

SLOTS = 65536
SIZES = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_position": 8192}


def compile_question_end(setup):
    caches = sharded_caches(setup, 1, SLOTS)
    total = jax.ShapeDtypeStruct((1,), jnp.int32)
    return whole_finish.lower(setup, caches, total, "question", 64).compile()


def compile_step(setup):
    return compile_decode(setup, 1, SLOTS)


@pytest.mark.parametrize(
    ("method", "compiled"),
    [(SnapKV(), compile_question_end), (InfLLM(), compile_step), (ReAttention(), compile_step)],
    ids=["snapkv", "infllm", "reattention"],
)
def test_reads_copy_no_cache_compiled_for_tpu(method, compiled):
    """SnapKV's choice of what stays; a decode step of methods that append beside their reads.

    A gather along the slots, beside the append, would move the cache's axes and back.
    """
    mesh = make_mesh(devices=tpu())
    config = tiny_config(num_layers=1, **SIZES)
    setup = Setup(config, method, mesh, jnp.dtype(jnp.bfloat16), 512)
    with no_persistent_cache(), jax.default_matmul_precision("default"):
        memory = compiled(setup).memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < cache_bytes(setup, 1, SLOTS) / 20
