"""The engine's programs compiled ahead of time for v5e, on one chip and sharded over four."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from jax_longctx.engine import programs
from jax_longctx.methods import Full
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.engine.lowering import (
    cache_bytes,
    compile_decode,
    compile_segment,
    no_persistent_cache,
)
from tests.support import tiny_config

pytestmark = pytest.mark.optimized

pytest.importorskip("libtpu")

SLOTS = 32768
SIZES = {
    "num_layers": 4,
    "model_dim": 512,
    "mlp_dim": 1024,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 128,
    "vocab_size": 1024,
}


@pytest.fixture(autouse=True, scope="module")
def _as_users_compile():
    """The tests' exact matmuls are for CPU."""
    with no_persistent_cache(), jax.default_matmul_precision("default"):
        yield


@pytest.fixture(scope="module", params=[(1, 1, 1), (1, 2, 2)], ids=str)
def setup(request):
    from jax.experimental import topologies

    v5e = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    mesh = make_mesh(*request.param, devices=v5e.devices)
    config = tiny_config(**SIZES)
    return programs.Setup(config, Full(), mesh, jnp.dtype(jnp.bfloat16), 512)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_tpu_decode_compiles_in_place(setup, batch):
    memory = compile_decode(setup, batch, SLOTS).memory_analysis()
    cache = cache_bytes(setup, batch, SLOTS)
    assert memory.temp_size_in_bytes < cache / 20
    assert memory.alias_size_in_bytes >= cache


@pytest.mark.parametrize(
    ("batch", "tokens"), [(1, 256), pytest.param(2, 512, marks=pytest.mark.thorough)]
)
def test_tpu_segment_compiles_in_place_with_its_kernel(setup, batch, tokens):
    """Temporaries below one layer's keys and values: no copy of any buffer.

    Splash attention is given a layer's slice, which may be a copy.
    """
    # Two layers: a kernel takes a second to compile.
    setup = dataclasses.replace(setup, config=tiny_config(**SIZES | {"num_layers": 2}))
    compiled = compile_segment(setup, batch, SLOTS, tokens)
    memory, cache = compiled.memory_analysis(), cache_bytes(setup, batch, SLOTS)
    assert memory.alias_size_in_bytes >= cache
    assert memory.temp_size_in_bytes < cache / setup.config.num_layers
    assert "tpu_custom_call" in compiled.as_text()
