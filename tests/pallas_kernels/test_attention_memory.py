"""What the compiled attentions keep in memory, read from the programs."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.prefill_attention import cache_attention, causal_attention

pytestmark = pytest.mark.optimized


def _temporaries(function, *shapes, donate=(), dtype="float32") -> int:
    arguments = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype if len(shape) > 1 else "int32"),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int),
    )
    compiled = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def _cache_temporaries(queries: int, slots: int) -> int:
    cache = 1, 2, slots, 64
    return _temporaries(
        lambda q, k, v, n: cache_attention(q, k, v, n, scale=0.1, implementation="xla"),
        (1, queries, 8, 64),
        cache,
        cache,
        (1,),
    )


def test_streaming_takes_no_more_memory_for_a_longer_cache() -> None:
    short, long = _cache_temporaries(1024, 4096), _cache_temporaries(1024, 65536)
    assert long <= short * 1.01
    assert long < 1024 * 65536 * 8 * 4 / 20  # a twentieth of the T x S scores


def test_streaming_takes_no_more_memory_than_its_queries_ask_for() -> None:
    """Beyond one block of scores only copies of q, out and lse grow with T."""
    short, long = _cache_temporaries(1024, 8192), _cache_temporaries(8192, 8192)
    rows = 8192 * 8 * (64 + 1) * 4
    assert long <= short + 4 * rows


def test_causal_attention_does_not_hold_the_square_of_scores() -> None:
    fresh = 1, 8192, 2, 64
    temporaries = _temporaries(
        lambda q, k, v: causal_attention(q, k, v, scale=0.1, implementation="xla"),
        (1, 8192, 8, 64),
        fresh,
        fresh,
    )
    assert temporaries < 8192**2 * 8 * 4 / 20


def append_and_decode(q, fresh, caches, lengths):
    """One decode step of several layers: append a token to every cache in place, attend to it."""
    put = jax.vmap(lambda row, x, at: jax.lax.dynamic_update_slice_in_dim(row, x, at, axis=1))
    updated = []
    for k, v in caches:
        k, v = (put(x, jnp.moveaxis(fresh, 1, 2), lengths) for x in (k, v))
        q, _ = decode_attention(q, k, v, lengths + 1, scale=0.1)
        updated.append((k, v))
    return q, updated


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "head_dim"),
    [("float32", 9, 3, 64), ("bfloat16", 32, 8, 128)],
    ids=["float32-small", "bfloat16-8b"],
)
def test_decode_after_an_append_copies_no_cache(
    dtype: str, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Below a twentieth of the cache: a layer's scores, and no block of the cache but one."""
    layers, slots = 8, 8192
    cache = 1, kv_heads, slots, head_dim
    temporaries = _temporaries(
        append_and_decode,
        (1, 1, heads, head_dim),
        (1, 1, kv_heads, head_dim),
        [(cache, cache)] * layers,
        (1,),
        donate=2,
        dtype=dtype,
    )
    item = jnp.dtype(dtype).itemsize
    assert temporaries < layers * 2 * kv_heads * slots * head_dim * item / 20
