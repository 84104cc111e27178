"""InfLLM: what a decode step reads, what prefill holds in memory, and words about bad settings."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jax_longctx.contract import CacheShape, Prompt
from jax_longctx.engine import programs
from jax_longctx.engine.capacity import grow
from jax_longctx.errors import ConfigError
from jax_longctx.methods import InfLLM, make_method
from tests.jax_longctx.methods.oracles.infllm import Rules
from tests.jax_longctx.methods.remembering import (
    method_of,
)
from tests.support import random_rows, tiny_config, tiny_engine

SMALL = Rules(i0=4, w=16, bs=4, kb=2, r=2, x=8)
# Where more layers would only take longer to compile.
ONE_LAYER = tiny_config(num_layers=1)


def test_bytes_of_a_decode_step_do_not_grow_with_the_text():
    shape = CacheShape(
        batch=1,
        slots=4096,
        reserve=0,
        chunk=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        dtype=jnp.float32,
        layer=0,
        num_layers=1,
        window=None,
    )
    method = method_of(SMALL)
    cache = method.init_cache(shape)
    fixed = 4 * 1024 * 8 * 4 + 4 * (16 + 4 + 8 - 1) * 4  # representatives and the ring
    token = 2 * 2 * 8 * 4
    assert method.read_bytes(cache, 10) == fixed + 10 * token
    assert method.read_bytes(cache, 4000) == fixed + (4 + 16 + 3 * 4) * token
    dense = dataclasses.replace(method, decode="dense")
    assert dense.read_bytes(cache, 4000) == 4096 * token
    # A longer question makes room for its units, too.
    (grown,) = jax.eval_shape(lambda caches: grow(caches, 128), (cache,))
    assert grown.units.shape[2] == (4096 + 128) // 4


@pytest.mark.slow
def test_memory_beside_the_cache_does_not_grow_with_it():
    engine = tiny_engine(method_of(SMALL), config=ONE_LAYER)
    caches = programs.abstract_caches(engine.setup, 1, 65536, 0)
    (segment,) = engine.method.segments(Prompt("context", 8, random_rows([8])))
    total = jnp.array([8])
    run = programs.whole_segment.lower(
        engine.setup, engine.params, caches, segment, total, None, "none"
    )
    memory = run.compile().memory_analysis()
    cached = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))
    assert memory is not None and memory.alias_size_in_bytes >= cached
    assert memory.temp_size_in_bytes < cached / 32


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk": 17}, "n_local 16 must hold a chunk of 17"),
        ({"repr_topk": 5}, "repr_topk 5 tokens cannot be chosen of block_size 4"),
        ({"n_init": -1}, "n_init must be at least 0, got -1"),
        ({"topk": -1}, "topk must be at least 0, got -1"),
        ({"repr_topk": 0}, "repr_topk must be at least 1, got 0"),
        ({"block_size": 0}, "block_size must be at least 1, got 0"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"far_distance": -1}, "far_distance must be at least 0, got -1"),
        ({"score": "sum"}, "expected one of mass, logit"),
        ({"max_cached_block": -1}, "max_cached_block must be at least 0, got -1"),
        ({"max_cached_block": 1}, "max_cached_block 1 must hold the topk 2"),
        ({"max_cached_block": 9, "granularity": "query_head"}, "granularity layer, got query_head"),
        ({"max_cached_block": 9, "score_decay": 2}, "score_decay must be from 0 to 1, got 2.0"),
        ({"max_cached_block": 9, "cache_policy": "fifo"}, "expected one of lru, lru-s"),
    ],
)
def test_bad_settings(settings, message):
    given: dict[str, Any] = {
        "n_init": 4,
        "n_local": 16,
        "block_size": 4,
        "topk": 2,
        "repr_topk": 2,
        "chunk": 8,
    }
    assert make_method("infllm", given) == InfLLM(**given)
    with pytest.raises(ConfigError, match=message):
        name = "infllm-accounted" if "max_cached_block" in settings else "infllm"
        make_method(name, {**given, **settings})


def test_models_that_it_cannot_run_on():
    with pytest.raises(
        ConfigError, match="n_local 4096 and far_distance None reach beyond the 128"
    ):
        InfLLM().validate(tiny_config())
    with pytest.raises(ConfigError, match="n_local 16 and far_distance 128 reach beyond"):
        method_of(dataclasses.replace(SMALL, far=128)).validate(tiny_config())
    method_of(dataclasses.replace(SMALL, far=127)).validate(tiny_config(windows=(None, 16)))
    with pytest.raises(ConfigError, match="sliding window of 15 tokens is less than n_local 16"):
        method_of(SMALL).validate(tiny_config(windows=(None, 15)))
