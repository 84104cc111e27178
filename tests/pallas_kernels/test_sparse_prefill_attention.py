"""Attention to listed blocks: each implementation through the public function, beside a masked
dense one. The interpreter stands in for a GPU."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch
from pallas_kernels.common import Capped
from pallas_kernels.prefill_attention import reference as dense
from pallas_kernels.quantised import dequantised, quantise
from pallas_kernels.sparse_prefill_attention import (
    BLOCK,
    Blocks,
    block_masses,
    gpu,
    gpu_masses,
    sparse_prefill_attention,
    tpu,
)
from tests.drawing import computed, normal

SLOTS, SCALE = 768, 0.3


def call(implementation, *arguments, scale=SCALE):
    if implementation == "gpu":  # as the public function hands it on, but interpreted
        interpret = plgpu.InterpretGPUParams(inline_mgpu="ignore")
        return computed(gpu.sparse_prefill_attention, *arguments, scale=scale, interpret=interpret)
    if implementation == "tpu":
        interpret = pltpu.InterpretParams()
        return computed(tpu.sparse_prefill_attention, *arguments, scale=scale, interpret=interpret)
    run = partial(sparse_prefill_attention, implementation=implementation)
    return computed(run, *arguments, scale=scale)


def drawn(queries, heads, lengths, *, width=64, dtype="float32", density=0.5):
    """Queries, keys, values, lengths, and which blocks each head and run of queries sees."""
    rng, (query_heads, kv_heads), rows = np.random.default_rng(0), heads, len(lengths)
    q = normal(rows, queries, query_heads, width, dtype=dtype)
    k, v = (normal(rows, kv_heads, SLOTS, width, seed=i, dtype=dtype) for i in (1, 2))
    lengths = jax.device_put(np.array(lengths, np.int32))
    tiles, size = -(-queries // BLOCK), SLOTS // BLOCK
    chosen = rng.random((rows, query_heads, tiles, size)) < density
    chosen &= (np.arange(size) * BLOCK < np.array(lengths)[:, None])[:, None, None]
    return q, k, v, lengths, chosen


def masked(q, k, v, lengths, chosen, scale=SCALE):
    """Every head and query alone, in float64, over the slots that it sees."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[1]
    out, lse = np.zeros(q.shape), np.full(q.shape[:3], -np.inf)
    for b, t, n in np.ndindex(*q.shape[:3]):
        seen = np.repeat(chosen[b, n, t // BLOCK], BLOCK) & (np.arange(SLOTS) < lengths[b])
        if seen.any():
            logits = scale * k[b, n // group, seen] @ q[b, t, n]
            weights = np.exp(logits - logits.max())
            out[b, t, n] = weights @ v[b, n // group, seen] / weights.sum()
            lse[b, t, n] = logits.max() + np.log(weights.sum())
    return out, lse


NAMES = ("reference", "xla", "gpu")
CASES: dict[str, dict[str, Any]] = {
    "ragged": dict(queries=130, heads=(4, 2), lengths=(300, 0, 1)),
    "a-block": dict(queries=128, heads=(2, 2), lengths=(128, 129)),
    "few-queries": dict(queries=3, heads=(8, 1), lengths=(512,)),
    "nothing": dict(queries=130, heads=(2, 1), lengths=(512,), density=0),
}


def masses(implementation, *arguments, **how):
    if implementation == "gpu":
        interpret = plgpu.InterpretGPUParams(inline_mgpu="ignore")
        return computed(gpu_masses.block_masses, *arguments, **how, interpret=interpret)
    return computed(partial(block_masses, implementation=implementation), *arguments, **how)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stride", [16, 8])
def test_masses_of_blocks(name, stride):
    dtype = "bfloat16" if name == "gpu" else "float32"
    slots, lengths = 2048, np.array([2048, 777, 0, 1], np.int32)
    q = normal(4, 2, 70, stride * 8, dtype=dtype)
    keys = normal(4, 2, slots, 8, seed=1, dtype=dtype)
    beyond = np.arange(slots) // stride * stride >= lengths[:, None]
    far = jnp.where(beyond[:, None, :, None], 3e4, keys).astype(dtype)
    found = masses(name, q, far, lengths, scale=0.1, stride=stride)
    runs = np.asarray(keys, np.float64).reshape(4, 2, slots // BLOCK, BLOCK // stride, -1)
    s = 0.1 * np.einsum("bkmx,bkcrx->bkcrm", np.asarray(q, np.float64), runs)
    begins = np.arange(0, slots, stride) < lengths[:, None]
    weights = np.where(begins.reshape(4, 1, slots // BLOCK, -1, 1), np.exp(s), 0)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(found, np.log(weights.sum(3)), atol=1e-4)


def test_masses_of_keys_in_8_bits():
    q, keys = normal(1, 2, 70, 128), normal(1, 2, 512, 8, seed=1)
    kept, how = jax.jit(quantise)(keys), dict(scale=0.1, stride=16)
    found = masses("xla", q, kept, np.array([400], np.int32), **how)
    expected = masses("xla", q, computed(dequantised, kept), np.array([400], np.int32), **how)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_all_implementations_are_tried():
    q, k, v, lengths, chosen = drawn(**CASES["a-block"])
    blocks = Blocks.of(jnp.asarray(chosen))
    run = partial(sparse_prefill_attention, q, k, v, lengths, blocks, scale=SCALE)
    assert set(dispatch.offered(lambda name: run(implementation=name))) == {*NAMES, "tpu"}
    run = partial(block_masses, q[:, :2], k, lengths, scale=SCALE, stride=2)
    assert set(dispatch.offered(lambda name: run(implementation=name))) == set(NAMES)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", [*NAMES, "tpu"])
def test_lists_are_a_mask_of_dense_attention(name, case):
    kind: dict[str, Any] = dict(dtype="bfloat16") if name == "gpu" else {}
    q, k, v, lengths, chosen = drawn(**CASES[case], **kind)
    # What lies beyond a length, and in a list beyond its count, is not read.
    beyond = (np.arange(SLOTS) >= np.array(lengths)[:, None])[:, None, :, None]
    far_k, far_v = (jnp.where(beyond, 3e4, x).astype(x.dtype) for x in (k, v))
    blocks = Blocks.of(jnp.asarray(chosen))
    out, lse = call(name, q, far_k, far_v, lengths, blocks)
    expected, expected_lse = masked(q, k, v, lengths, chosen)
    atol = 2e-2 if name == "gpu" else 1e-5
    np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=atol)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-4)


@pytest.mark.parametrize("scale", [SCALE, Capped(SCALE, 2.0)], ids=["plain", "capped"])
@pytest.mark.parametrize(("name", "width"), [("xla", 64), ("tpu", 64), ("tpu", 128)])
def test_all_blocks_are_dense_attention(name, width, scale):
    # A TPU's kernel takes two turns for six blocks.
    q, k, v, lengths, _ = drawn(queries=200, heads=(4, 2), lengths=(SLOTS - 1, 300), width=width)
    every = np.arange(SLOTS // BLOCK) * BLOCK < np.array(lengths)[:, None]
    every = np.broadcast_to(every[:, None, None], (2, 4, 2, SLOTS // BLOCK))
    found = call(name, q, k, v, lengths, Blocks.of(jnp.asarray(every)), scale=scale)
    expected = computed(dense.cache_attention, q, k, v, lengths, scale=scale)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


def test_keys_and_values_in_8_bits():
    q, k, v, lengths, chosen = drawn(queries=130, heads=(4, 2), lengths=(512, 300))
    blocks = Blocks.of(jnp.asarray(chosen))
    kept = [jax.jit(quantise)(x) for x in (k, v)]
    found = call("xla", q, *kept, lengths, blocks)
    expected = call("xla", q, *(computed(dequantised, x) for x in kept), lengths, blocks)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_what_does_not_fit_is_refused():
    q, k, v, lengths, chosen = drawn(queries=200, heads=(4, 2), lengths=(512,))
    blocks = Blocks.of(jnp.asarray(chosen))
    run = partial(sparse_prefill_attention, lengths=lengths, scale=SCALE)
    with pytest.raises(ValueError, match=r"500 slots and lists .* expected whole blocks of 128"):
        run(q, k[:, :, :500], v[:, :, :500], blocks=blocks)
    with pytest.raises(ValueError, match=r"expected whole .* lists \(1, 4, 1, 'C'\)"):
        run(q[:, :100], k, v, blocks=blocks)
