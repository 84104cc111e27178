"""What the compiled attentions keep in memory, read from the programs."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention_mass import Reduction, attention_mass
from pallas_kernels.decode_attention import attend_with_logits, decode_attention
from pallas_kernels.prefill_attention import cache_attention, causal_attention
from pallas_kernels.sparse_decode_attention import Pages, sparse_decode_attention
from pallas_kernels.topk_scores import topk_scores

pytestmark = pytest.mark.optimized


def _temporaries(function, *shapes, donate=(), dtype="float32"):
    arguments = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, dtype if len(shape) > 1 else "int32"),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int),
    )
    compiled = jax.jit(function, donate_argnums=donate).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def _cache_temporaries(queries, slots):
    attend = functools.partial(cache_attention, scale=0.1, implementation="xla")
    cache = 1, 2, slots, 64
    return _temporaries(attend, (1, queries, 8, 64), cache, cache, (1,))


def test_streaming_takes_no_more_memory_than_its_queries_ask_for():
    # None for a longer cache; beyond a block of scores only copies of q, out and lse grow.
    short, middle, long = (_cache_temporaries(1024, slots) for slots in (4096, 8192, 65536))
    assert long <= short * 1.01
    assert long < 1024 * 65536 * 8 * 4 / 20  # a twentieth of the T x S scores
    assert _cache_temporaries(8192, 8192) <= middle + 4 * 8192 * 8 * (64 + 1) * 4
    attend = functools.partial(causal_attention, scale=0.1, implementation="xla")
    fresh = 1, 8192, 2, 64
    assert _temporaries(attend, (1, 8192, 8, 64), fresh, fresh) < 8192**2 * 8 * 4 / 20


def _decode(q, k, v, held):
    return decode_attention(q, k, v, held, scale=0.1)[0], ()


def _with_logits(q, k, v, held):
    q, _, logits = attend_with_logits(q, k, v, held, scale=0.1)
    return q, logits.max(1)


def _mass(q, k, v, held):
    q, lse = decode_attention(q, k, v, held, scale=0.1)
    return q, attention_mass(q, k, lse, held, Reduction(0.1)).max(1)


def _topk(q, k, v, held):
    values, _ = topk_scores(q, k, (jnp.zeros_like(held), held), count=4)
    return q + jnp.sum(values, axis=-1, keepdims=True), ()


def _sparse(q, k, v, held):
    pages = jnp.broadcast_to(held // 16 - jnp.arange(8), (1, k.shape[1], 8))
    chosen = Pages(pages, jnp.zeros_like(held), held, 16)
    return sparse_decode_attention(q, k, v, chosen, scale=0.1)[0], ()


SMALL, AS_8B = ("float32", 9, 3, 64), ("bfloat16", 32, 8, 128)


@pytest.mark.parametrize(
    ("attend", "dtype", "heads", "kv_heads", "head_dim"),
    [
        *((_decode, *AS_8B), (_with_logits, *AS_8B)),
        *(pytest.param(it, *SMALL, marks=pytest.mark.slow) for it in (_decode, _with_logits)),
        *((_topk, *SMALL), (_sparse, *SMALL), (_mass, *AS_8B)),
    ],
)
def test_a_step_after_an_append_copies_no_cache(attend, dtype, heads, kv_heads, head_dim):
    """Below a twentieth of the caches: a layer's scores, and no block of a cache but one."""

    def step(q, fresh, caches, lengths):
        put = jax.vmap(lambda row, x, at: jax.lax.dynamic_update_slice_in_dim(row, x, at, axis=1))
        updated, others = [], []
        for k, v in caches:
            k, v = (put(x, jnp.moveaxis(fresh, 1, 2), lengths) for x in (k, v))
            q, other = attend(q, k, v, lengths + 1)
            updated.append((k, v))
            others.append(other)
        return q, others, updated

    layers, slots = 4, 8192
    cache = 1, kv_heads, slots, head_dim
    fresh = [(1, 1, count, head_dim) for count in (heads, kv_heads)]
    caches = [(cache, cache)] * layers
    temporaries = _temporaries(step, *fresh, caches, (1,), donate=2, dtype=dtype)
    item = jnp.dtype(dtype).itemsize
    assert temporaries < layers * 2 * kv_heads * slots * head_dim * item / 20
