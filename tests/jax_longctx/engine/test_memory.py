"""What the engine's programs hold in memory beside weights and caches, read from the programs.

The programs are those of a CPU, a layer's each; `test_tpu_compile` and `test_gpu_compile` look at
those that loop over the layers.
"""

import jax.numpy as jnp
import pytest

from jax_longctx.engine import programs
from jax_longctx.methods import Full
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.engine.lowering import (
    cache_bytes,
    compile_finish,
    compile_layer,
    compile_segment,
    no_persistent_cache,
)
from tests.support import tiny_config

pytestmark = pytest.mark.optimized

# dtype, query heads, kv heads, head dim
MODELS = {"float32-small": (jnp.float32, 9, 3, 64), "bfloat16-8b": (jnp.bfloat16, 32, 8, 128)}


@pytest.fixture(autouse=True, scope="module")
def _compiled_here():
    with no_persistent_cache():
        yield


@pytest.fixture(params=[pytest.param("float32-small", marks=pytest.mark.slow), "bfloat16-8b"])
def model(request):
    return MODELS[request.param]


def setup_of(model, layers):
    """Weights as small as can be: XLA on CPU keeps some of them a second time, in float32."""
    dtype, heads, kv_heads, head_dim = model
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    config = tiny_config(num_layers=layers, **sizes)
    return programs.Setup(config, Full(), make_mesh(), jnp.dtype(dtype), 512, by_layer=True)


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_decode_copies_no_cache(model, batch):
    """A layer's step stays far below the cache that it updates."""
    setup, slots = setup_of(model, layers=1), 16384
    memory = compile_layer(setup, batch, slots, 1).memory_analysis()
    cache = cache_bytes(setup, batch, slots)
    assert memory.temp_size_in_bytes < cache / 10
    assert memory.alias_size_in_bytes >= cache


@pytest.mark.parametrize("batch", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_segment_takes_no_more_memory_for_more_slots(model, batch):
    setup, tokens, slots = setup_of(model, layers=1), 256, 16384
    short = compile_layer(setup, batch, 4096, tokens).memory_analysis()
    long = compile_layer(setup, batch, slots, tokens).memory_analysis()
    assert long.alias_size_in_bytes >= cache_bytes(setup, batch, slots)
    assert long.temp_size_in_bytes <= short.temp_size_in_bytes * 1.01
    # One row's scores in one layer, of which there is never more than a block.
    scores = tokens * slots * setup.config.num_heads * jnp.dtype(jnp.float32).itemsize
    assert long.temp_size_in_bytes < batch * scores / 5


def test_the_last_logits_of_a_question_cost_one_row(model):
    """A segment's logits are taken at each row's end, not at every column."""
    tokens, slots, vocabulary = 256, 4096, 65536
    config = tiny_config(num_layers=1, vocab_size=vocabulary)
    setup = programs.Setup(config, Full(), make_mesh(), jnp.dtype(model[0]), 512)
    every = tokens * vocabulary * jnp.dtype(jnp.float32).itemsize
    memory = compile_segment(setup, 1, slots, tokens, "last").memory_analysis()
    assert memory.temp_size_in_bytes < every / 2


def test_full_attention_finishes_in_place(model):
    setup, batch, slots = setup_of(model, layers=2), 4, 4096
    memory = compile_finish(setup, batch, slots).memory_analysis()
    assert memory.temp_size_in_bytes < 4096
    # All but the numbers that say where the context ended, which are replaced.
    replaced = 2 * 2 * batch * jnp.dtype(jnp.int32).itemsize
    assert memory.alias_size_in_bytes >= cache_bytes(setup, batch, slots) - replaced
