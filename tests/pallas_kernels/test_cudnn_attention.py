"""cuDNN's attention without a GPU: what it is asked to do, and the program that asks it."""

import inspect
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as binding

from pallas_kernels.prefill_attention import gpu, reference
from tests.drawing import normal

SIGNATURE = inspect.signature(binding.dot_product_attention)
SLOTS, LENGTHS = 1024, (0, 1, 511, 512, 513, 1024)


def _like_cudnn(*args, **kwargs):
    """What the binding promises: out as q's layout, lse [B,N,T]; an empty row is undefined."""
    call = SIGNATURE.bind(*args, **kwargs)
    call.apply_defaults()
    given = call.arguments
    assert given["return_residual"] and given["bias"] is given["mask"] is None
    q, k, v = (given[name] for name in ("query", "key", "value"))
    if given["mask_type"] == binding.MaskType.CAUSAL:
        assert given["qkv_layout"] == "BTNH"
        out, lse = reference.causal_attention(
            q, k, v, scale=given["scale"], window=given["sliding_window_length"]
        )
        return out, jnp.swapaxes(lse, 1, 2)
    assert given["mask_type"] == binding.MaskType.PADDING and given["qkv_layout"] == "BNTH"
    lengths = given["kv_seqlen"]
    assert np.all(given["q_seqlen"] == q.shape[2]) and np.all(lengths > 0)
    q_BTNH = jnp.swapaxes(q, 1, 2)
    out, lse = reference.cache_attention(q_BTNH, k, v, lengths, scale=given["scale"])
    return jnp.swapaxes(out, 1, 2), jnp.swapaxes(lse, 1, 2)


@pytest.fixture
def _cudnn(monkeypatch):
    monkeypatch.setattr(binding, "check_cudnn_version", lambda: 91200)


def _program(*arguments):
    traced = jax.jit(partial(gpu.cache_attention, scale=0.2)).trace(*arguments)
    return traced.lower(lowering_platforms=("cuda",)).as_text()


def _inputs(dtype="float32"):
    rows = len(LENGTHS)
    shapes = (rows, 5, 6, 64), *[(rows, 2, SLOTS, 64)] * 2
    q, k, v = (normal(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))
    return q, k, v, jnp.array(LENGTHS, jnp.int32)


@pytest.mark.parametrize("parts", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_ragged_rows_and_garbage_beyond_them(monkeypatch, parts):
    monkeypatch.setattr(binding, "dot_product_attention", _like_cudnn)
    q, k, v, lengths = _inputs()
    beyond = (jnp.arange(SLOTS) >= lengths[:, None])[:, None, :, None]
    expected = reference.cache_attention(q, k, v, lengths, scale=0.2)
    k, v = (jnp.where(beyond, 1e4, x) for x in (k, v))
    out, lse = gpu.cache_attention(q, k, v, lengths, scale=0.2, parts=parts)
    np.testing.assert_allclose(out, expected[0], atol=1e-5)
    np.testing.assert_allclose(lse, expected[1], atol=1e-5)


def test_a_question_fills_the_processors(monkeypatch):
    monkeypatch.setattr(gpu.hopper, "processors", lambda: 132)
    assert [gpu._parts(8, 4 * queries, 131072) for queries in (32, 64, 256, 512)] == [32, 16, 4, 1]
    assert [gpu._parts(8, 4 * 64, slots) for slots in (6144, 4160, 4095)] == [2, 2, 1]
    assert gpu._parts(8 * 4, 4 * 64, 131072) == 4


@pytest.mark.parametrize("window", [None, 3])
def test_a_chunk_against_itself(monkeypatch, window):
    monkeypatch.setattr(binding, "dot_product_attention", _like_cudnn)
    q, k, v, _ = _inputs()
    k, v = (jnp.swapaxes(x[:, :, :5], 1, 2) for x in (k, v))
    out, lse = gpu.causal_attention(q, k, v, scale=0.2, window=window)
    expected = reference.causal_attention(q, k, v, scale=0.2, window=window)
    np.testing.assert_allclose(out, expected[0], atol=1e-6)
    np.testing.assert_allclose(lse, expected[1], atol=1e-6)


def test_the_program_for_cuda_hands_cudnn_the_cache_as_it_lies_or_parts_of_it(_cudnn, monkeypatch):
    q, *rest = _inputs("bfloat16")
    assert gpu.unsupported_causal(q) is None is gpu.unsupported_cache(q, None)
    text = _program(q, *rest)
    assert "@__cudnn$fmhaSoftmax(%" in text
    assert ", %arg1, %arg2, " in text.split("@__cudnn$fmhaSoftmax")[1]
    assert "bf16>, tensor<6x6x5xf32>" in text  # the log-sum-exp [B,N,T], not rounded
    # The rows of one key head that the program gives cuDNN: two heads in 32 parts.
    monkeypatch.setattr(gpu.hopper, "processors", lambda: 132)
    q, k = (jnp.zeros((1, *shape, 64), jnp.bfloat16) for shape in ((5, 6), (2, 65536)))
    text = _program(q, k, k, jnp.array([9]))
    assert "tensor<64x1x2048x64xbf16>" in text and "tensor<64x1x15x64xbf16>" in text


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_on_a_gpu(head_dim, window):
    shapes = (2, 1000, 8, head_dim), *[(2, 1000, 2, head_dim)] * 2, *[(2, 2, 2048, head_dim)] * 2
    q, k, v, *cache = (normal(*x, seed=i, dtype="bfloat16") for i, x in enumerate(shapes))
    options = dict(scale=head_dim**-0.5, window=window)
    pairs = [(gpu.causal_attention, reference.causal_attention, (q, k, v), options)]
    lengths = jnp.array([0, 1500], jnp.int32)
    if window is None:
        cached = q, *cache, lengths
        options = dict(scale=head_dim**-0.5)
        pairs.append((gpu.cache_attention, reference.cache_attention, cached, options))
        in_parts = partial(gpu.cache_attention, parts=4)
        pairs.append((in_parts, reference.cache_attention, (q[:, :24], *cache, lengths), options))
    for run, definition, arguments, options in pairs:
        found = jax.jit(partial(run, **options))(*arguments)
        for x, y in zip(found, definition(*arguments, **options), strict=True):
            np.testing.assert_allclose(np.float32(x), np.float32(y), atol=2e-2)
