"""What the engine's programs hold in memory beside weights and caches, read from the programs.

The programs are those of a CPU, a layer's each; `test_tpu_compile` and `test_gpu_compile` look at
those that loop over the layers.
"""

import jax
import jax.numpy as jnp
import pytest

from jax_longctx.engine.prefill import finish_donated
from jax_longctx.engine.setup import Setup
from jax_longctx.methods import Full
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.engine.lowering import (
    cache_bytes,
    compile_layer,
    compile_segment,
    no_persistent_cache,
    sharded_caches,
)
from tests.support import tiny_config

pytestmark = pytest.mark.optimized


@pytest.fixture(autouse=True, scope="module")
def _compiled_here():
    with no_persistent_cache():
        yield


def setup_of(layers=1):
    """Heads of Llama 3.1 8B, and few weights: XLA on CPU keeps some of them a second time."""
    config = tiny_config(num_layers=layers, num_heads=32, num_kv_heads=8, head_dim=128)
    return Setup(config, Full(), make_mesh(), jnp.dtype(jnp.bfloat16), 512, by_layer=True)


def test_decode_copies_no_cache_and_full_attention_finishes_in_place():
    # A layer's step stays far below the cache that it updates.
    setup, batch, slots = setup_of(), 4, 16384
    memory = compile_layer(setup, batch, slots, 1).memory_analysis()
    cache = cache_bytes(setup, batch, slots)
    assert memory.temp_size_in_bytes < cache / 10
    assert memory.alias_size_in_bytes >= cache
    setup, batch, slots = setup_of(layers=2), 4, 4096
    total = jax.ShapeDtypeStruct((batch,), jnp.int32)
    caches = sharded_caches(setup, batch, slots)
    finish = finish_donated.lower(setup, caches, total, "context", 0)
    memory = finish.compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4096
    # All but the numbers that say where the context ended, which are replaced.
    replaced = 2 * 2 * batch * jnp.dtype(jnp.int32).itemsize
    assert memory.alias_size_in_bytes >= cache_bytes(setup, batch, slots) - replaced


def test_a_segment_takes_no_memory_for_more_slots_nor_for_logits_but_the_last():
    setup, tokens, slots = setup_of(), 256, 16384
    short, long = (
        compile_layer(setup, 1, room, tokens).memory_analysis() for room in (4096, slots)
    )
    assert long.alias_size_in_bytes >= cache_bytes(setup, 1, slots)
    assert long.temp_size_in_bytes <= short.temp_size_in_bytes * 1.01
    # A row's scores in one layer, of which there is never more than a block.
    scores = tokens * slots * setup.config.num_heads * jnp.dtype(jnp.float32).itemsize
    assert long.temp_size_in_bytes < scores / 5
    # A segment's logits are taken at each row's end, not at every column.
    tokens, vocabulary = 256, 65536
    config = tiny_config(num_layers=1, vocab_size=vocabulary)
    setup = Setup(config, Full(), make_mesh(), jnp.dtype(jnp.bfloat16), 512)
    every = tokens * vocabulary * jnp.dtype(jnp.float32).itemsize
    memory = compile_segment(setup, 1, 4096, tokens, "last").memory_analysis()
    assert memory.temp_size_in_bytes < every / 2
