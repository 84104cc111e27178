from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common import merge
from pallas_kernels.decode_attention import (
    attend_with_logits,
    decode_attention,
    decode_logits,
    reference,
    xla,
)
from tests.drawing import normal

LENGTHS, SLOTS, HEAD_DIM, SCALE = (0, 1, 31, 32, 33, 64), 64, 16, 0.4


def _inputs(groups, dtype, large=False):
    rows = len(LENGTHS)
    shapes = (rows, 1, 2 * groups, HEAD_DIM), *[(rows, 2, SLOTS, HEAD_DIM)] * 2
    q, k, v = (normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    beyond = (jnp.arange(SLOTS) >= jnp.array(LENGTHS)[:, None])[:, None, :, None]
    k = jnp.where(beyond, jnp.nan, k)  # masked after the matmul, so even NaN may lie there
    return [q * (60 if large else 1), k, jnp.where(beyond, jnp.asarray(1e4, dtype), v)]


@jax.jit
def _by_block(q, k, v, lengths):
    with mock.patch.object(xla, "BLOCK", 16):
        return xla.attend_with_logits(q, k, v, lengths, scale=SCALE)


@jax.jit
def _reference(q, k, v, lengths):
    return reference.attend_with_logits(q, k, v, lengths, scale=SCALE)


def _numpy(q, k, v):
    heads, (q, k, v) = q.shape[2], (np.asarray(x, np.float64) for x in (q, k, v))
    q = q.reshape(len(LENGTHS), 2, -1, HEAD_DIM)
    held = (np.arange(SLOTS) < np.array(LENGTHS)[:, None])[:, None, None]
    logits = np.where(held, SCALE * q @ k.swapaxes(2, 3), -np.inf)
    top = np.maximum(logits.max(axis=-1, keepdims=True), -1e30)
    weights = np.exp(logits - top)
    total = weights.sum(axis=-1, keepdims=True)
    out = weights @ v / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    shape = len(LENGTHS), 1, heads
    return logits.reshape(-1, heads, SLOTS), out.reshape(*shape, -1), lse.reshape(shape)


@pytest.mark.parametrize(
    ("groups", "dtype", "large"),
    [(1, "float32", False), (4, "float32", True), (8, "float32", False), (4, "bfloat16", False)],
)
def test_attention_with_its_logits_is_the_definition(groups, dtype, large):
    q, k, v = _inputs(groups, dtype, large)
    lengths = jnp.array(LENGTHS, jnp.int32)
    logits, out, lse = _numpy(q, k, v)
    for run in (_by_block, _reference):
        got_out, got_lse, got_logits = run(q, k, v, lengths)
        assert (got_logits.dtype, got_out.dtype, got_lse.dtype) == ("float32", dtype, "float32")
        tolerance = 2e-4 if large else 1e-5
        np.testing.assert_allclose(got_logits, logits, atol=tolerance)
        np.testing.assert_allclose(got_lse, lse, atol=tolerance)
        got_out = got_out.astype(jnp.float32)
        np.testing.assert_allclose(got_out, out, atol=2e-2 if dtype == "bfloat16" else tolerance)
        assert (got_out[0] == 0).all()


def test_the_doors_clip_lengths_and_agree():
    lengths, rows = jnp.array([-3, 0, 1, 63, 64, 99], jnp.int32), len(LENGTHS)
    q, v = normal(rows, 1, 8, HEAD_DIM), normal(rows, 2, SLOTS, HEAD_DIM, seed=1)

    @jax.jit
    def run(q, v):
        whole = decode_attention(q, v, v, lengths, scale=SCALE)
        *attended, kept = attend_with_logits(q, v, v, lengths, scale=SCALE)
        return whole, attended, kept, decode_logits(q, v, lengths, scale=SCALE)

    whole, attended, kept, logits = run(q, v)
    held = np.clip(lengths, 0, SLOTS)
    np.testing.assert_array_equal(np.isfinite(logits).sum(-1), held[:, None].repeat(8, 1))
    seen = np.isfinite(logits)
    np.testing.assert_array_equal(np.asarray(kept)[seen], np.asarray(logits)[seen])
    for one, two in zip(whole, attended, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2**-6)])
def test_parts_weigh_as_their_log_sum_exps_say(dtype, tolerance):
    """An empty part weighs nothing even if its output is garbage; rows empty in all are zero."""
    rng = np.random.default_rng(1)
    outs, lses = rng.normal(size=(3, 2, 5, 4, 8)), rng.normal(size=(3, 2, 5, 4))
    outs[0, 0], lses[0, 0], lses[:, 1, 2] = np.nan, -np.inf, -np.inf
    weights = np.exp(lses)
    total = weights.sum(0)
    expected = (weights[..., None] * np.nan_to_num(outs)).sum(0)
    expected /= np.where(total == 0, 1, total)[..., None]
    pairs = [(jnp.asarray(outs[i], dtype), jnp.asarray(lses[i], "float32")) for i in range(3)]
    for parts in (pairs, pairs[1:] + pairs[:1]):
        out, lse = merge(parts)
        assert out.dtype == dtype and lse.dtype == jnp.float32
        np.testing.assert_allclose(out.astype("float32"), expected, atol=tolerance)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(lse, np.log(total), atol=1e-6)


@pytest.mark.parametrize("gap", [1e4, -1e4, 3e38])
def test_far_apart_parts_stay_finite_and_the_larger_wins(gap):
    a, b = np.random.default_rng(2).normal(size=(2, 5, 4, 8)).astype(np.float32)
    zero = jnp.zeros((5, 4))
    out, lse = merge([(jnp.asarray(a), zero), (jnp.asarray(b), zero + gap)])
    np.testing.assert_allclose(out, b if gap > 0 else a, rtol=1e-6)
    np.testing.assert_allclose(lse, zero + max(gap, 0), rtol=1e-6)


def test_nothing_to_merge_is_an_error():
    with pytest.raises(ValueError, match="no parts"):
        merge([])
