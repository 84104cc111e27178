"""Every implementation of dense attention that runs on a CPU, against the definition.

Each runs through the public function, asked for by its name. The interpreter stands in for a TPU.
"""

import functools
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import dispatch
from pallas_kernels.common import Window
from pallas_kernels.decode_attention import decode_attention, shared_decode_attention
from pallas_kernels.decode_attention import tpu as decode_tpu
from pallas_kernels.decode_attention import xla as decode_xla
from pallas_kernels.prefill_attention import cache_attention, causal_attention, reference, tpu, xla
from tests.drawing import normal

# Compiled once for all implementations of a case.
STATIC = ("scale", "window")
cache_reference = jax.jit(reference.cache_attention, static_argnames="scale")
cache_streamed = jax.jit(xla.cache_attention, static_argnames="scale")
causal_reference = jax.jit(reference.causal_attention, static_argnames=STATIC)

# The blocks of the implementations are 512 slots: rows that end beside their edges.
SLOTS = 1024
LENGTHS = (0, 1, 511, 512, 513, 1024)

# The public functions, and their implementations by the names that these take.
CACHE, CAUSAL = (cache_attention, decode_attention), (causal_attention,)
NAMES = "xla", "tpu", "reference"
# Runs on its device alone: `test_gpu_kernels.py`, `test_cudnn_attention.py`.
ELSEWHERE = ("gpu",)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table: shapes, dtype, window and what is special about the scores."""

    queries: int = 5
    kv_heads: int = 2
    groups: int = 3
    head_dim: int = 64
    dtype: str = "float32"
    window: int | None = None
    slot_start: int = 0
    logits: str = "random"

    @property
    def scale(self):
        return {"random": 1.0, "large": 60.0, "equal": 1.0}[self.logits] * self.head_dim**-0.5


CACHE_CASES = {
    "one-query": Case(queries=1),
    "mha": Case(groups=1),
    "groups-of-four": Case(kv_heads=1, groups=4, head_dim=128),
    "mqa-of-eight": Case(kv_heads=1, groups=8),
    "narrow-heads": Case(head_dim=16),
    "bfloat16": Case(dtype="bfloat16"),
    "bfloat16-wide": Case(dtype="bfloat16", head_dim=128, groups=1),
    "large-logits": Case(logits="large"),
    "equal-logits": Case(logits="equal"),
    "window": Case(window=100),
    "window-of-one": Case(window=1),
    "window-and-start": Case(window=700, slot_start=300),
}
CAUSAL_CASES = {
    "one-token": Case(queries=1),
    "below-a-block": Case(queries=511, groups=1, kv_heads=1),
    "a-block": Case(queries=512, groups=1, kv_heads=1),
    "above-a-block": Case(queries=513, kv_heads=1),
    "groups-of-four": Case(queries=130, groups=4, head_dim=128),
    "mqa-of-eight": Case(queries=130, kv_heads=1, groups=8),
    "narrow-heads": Case(queries=130, head_dim=16),
    "bfloat16": Case(queries=600, dtype="bfloat16"),
    "large-logits": Case(queries=130, logits="large"),
    "equal-logits": Case(queries=130, logits="equal"),
    "window": Case(queries=600, window=100),
    "window-of-one": Case(queries=130, window=1),
    "window-of-all": Case(queries=130, window=130),
}


# What is interpreted is slow: only these cases are not `slow`.
QUICK = ("bfloat16-wide", "window")
QUICK_CAUSAL = ("window",)
# The definition against itself: that it runs by its name too.
OF_REFERENCE = ("mha", "window", "one-token")


def _random(case, *shapes):
    arrays = [normal(*shape, seed=7 + i, dtype=case.dtype) for i, shape in enumerate(shapes)]
    if case.logits == "equal":
        arrays[0] = jax.device_put(np.zeros_like(arrays[0]))
    return arrays


def _assert_close(result, expected, case):
    """Outputs are means of unit-variance values; a log-sum-exp carries the scores' rounding."""
    out, lse = result
    assert out.dtype == case.dtype and lse.dtype == jnp.float32
    exact = case.dtype == "float32"
    largest = float(np.max(np.abs(expected[1]), where=np.isfinite(expected[1]), initial=1.0))
    out_tolerance, lse_tolerance = (1e-5, 1e-6 * largest + 1e-5) if exact else (2e-2, 2e-2)
    if exact and case.logits == "large":
        out_tolerance = 2e-4  # exp turns the rounding of scores near 500 into relative errors
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (out, expected[0])), atol=out_tolerance
    )
    np.testing.assert_allclose(lse, expected[1], atol=lse_tolerance)


def _cells(operations, cases, quick):
    """Splash leaves out narrow heads, and windows against a cache."""
    return [
        pytest.param(
            *(operation, name, case),
            id=f"{operation.__name__}-{name}-{label}",
            marks=pytest.mark.slow if name == "tpu" and label not in quick else (),
        )
        for operation in operations
        for name in NAMES
        for label, case in cases.items()
        if (name != "reference" or label in OF_REFERENCE)
        and (name != "tpu" or case.head_dim >= 64)
        and (name != "tpu" or operation is not cache_attention or case.window is None)
    ]


@pytest.fixture
def interpreted(monkeypatch):
    def interpret(name):
        if name != "tpu":
            return
        monkeypatch.setattr(dispatch, "platform", lambda: name)
        for module, function in (
            (tpu, "cache_attention"),
            (tpu, "causal_attention"),
            (decode_tpu, "decode_attention"),
        ):
            found = partial(getattr(module, function), interpret=True)
            monkeypatch.setattr(module, function, found)

    return interpret


def _window(size, *start):
    return None if size is None else Window(size, *start)


@pytest.mark.parametrize("operation", [*CACHE, *CAUSAL], ids=lambda f: f.__name__)
def test_every_implementation_is_in_the_table(operation):
    q, k = jnp.ones((1, 2, 2, 64)), jnp.ones((1, 2, 2, 64))
    lengths = () if operation in CAUSAL else (jnp.array([2], jnp.int32),)
    call = partial(operation, q, k, k, *lengths, scale=1.0)
    offered = dispatch.offered(lambda name: call(implementation=name))
    assert {*offered} == {*NAMES, *ELSEWHERE}


@pytest.mark.parametrize(("operation", "name", "case"), _cells(CACHE, CACHE_CASES, QUICK))
def test_attention_to_a_cache(operation, name, case, interpreted):
    heads = case.kv_heads * case.groups
    lengths = np.array(LENGTHS, np.int32)
    cache = len(LENGTHS), case.kv_heads, SLOTS, case.head_dim
    q, k, v = _random(case, (len(LENGTHS), case.queries, heads, case.head_dim), cache, cache)
    # The first queries stand 0, 10, ... tokens after the last slot of their row.
    start = jax.device_put(case.slot_start + lengths + 10 * np.arange(len(LENGTHS), dtype=np.int32))
    options = dict(scale=case.scale, window=_window(case.window, start, case.slot_start))
    expected = cache_reference(q, k, v, lengths, **options)
    interpreted(name)
    attend = jax.jit(partial(operation, implementation=name, **options))
    # Of both signs, as queries are: whichever slot were seen, some head's scores would soar.
    slot = np.arange(SLOTS)
    beyond = (slot >= lengths[:, None])[:, None, :, None]
    garbage = np.where(slot // 3 % 2, -1e4, 1e4).astype(k.dtype)[:, None]
    result = attend(q, *(np.where(beyond, garbage, np.asarray(x)) for x in (k, v)), lengths)
    assert (np.asarray(result[0])[0] == 0).all() and np.isneginf(np.asarray(result[1])[0]).all()
    _assert_close(result, expected, case)


@pytest.mark.parametrize(("operation", "name", "case"), _cells(CAUSAL, CAUSAL_CASES, QUICK_CAUSAL))
def test_causal_attention(operation, name, case, interpreted):
    heads = case.kv_heads * case.groups
    chunk = 2, case.queries, case.kv_heads, case.head_dim
    q, k, v = _random(case, (2, case.queries, heads, case.head_dim), chunk, chunk)
    options = dict(scale=case.scale, window=case.window)
    expected = causal_reference(q, k, v, **options)
    interpreted(name)
    attend = jax.jit(partial(operation, implementation=name, **options))
    _assert_close(attend(q, k, v), expected, case)


# Rows, and query heads of a kv head.
SHARING = [(1, 2), (5, 1), (16, 4), (17, 4), (9, 16)]
# Queries, slots and a window.
SMALL = [(9, 40, None), (9, 40, 6), (3, 13, 20)]


@functools.cache
def _small(operation, name, window):
    """Compiled once for all that hypothesis draws; a cache comes with its bounds."""

    def run(q, k, v, lengths=None, start=None, slot_start=None):
        options = dict(scale=0.3, implementation=name)
        if operation in CAUSAL:
            return operation(q, k, v, window=window, **options)
        return operation(q, k, v, lengths, window=_window(window, start, slot_start), **options)

    return jax.jit(run)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    small=st.sampled_from(SMALL),
    filled=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    slot_start=st.integers(0, 20),
    behind=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_any_raggedness_streams_like_the_definition(small, filled, slot_start, behind):
    case, (queries, slots, window) = Case(head_dim=8), small
    cache = 2, case.kv_heads, slots, 8
    q, k, v = _random(case, (2, queries, 6, 8), cache, cache)
    fresh_k, fresh_v = (x[:, :, :queries].swapaxes(1, 2) for x in (k, v))
    lengths = jnp.minimum(jnp.array(filled, jnp.int32), slots)
    start = slot_start + lengths + jnp.array(behind, jnp.int32)
    cached = q, k, v, lengths, start, jnp.array(slot_start, jnp.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "_KEY_BLOCK", 8)
        patch.setattr(xla, "_CPU_CAUSAL_BLOCK", 8)
        patch.setattr(xla, "_query_block", lambda shape, _: min(4, shape[1]))
        patch.setattr(decode_xla, "BLOCK", 8)
        for operation in (*CACHE, *CAUSAL):
            arguments = cached if operation in CACHE else (q, fresh_k, fresh_v)
            found, expected = (
                _small(operation, name, window)(*arguments) for name in ("xla", "reference")
            )
            _assert_close(found, expected, case)


def test_a_window_does_not_visit_the_blocks_outside_it():
    """Keys that no query of the chunk sees may be NaN even below the length."""
    case = Case(window=100)
    q, k, v = _random(case, (1, 5, 6, 64), (1, 2, 4096, 64), (1, 2, 4096, 64))
    unseen = (np.arange(4096) < 3584)[:, None]  # 7 blocks of 512; the window begins in the 8th
    k, v = (np.where(unseen, np.float32(np.nan), x) for x in (k, v))
    lengths = jnp.array([4096], jnp.int32)
    options = dict(scale=case.scale, window=Window(size=100, query_start=lengths))
    result = jax.jit(partial(xla.cache_attention, **options))(q, k, v, lengths)
    there = (np.nan_to_num(x) for x in (k, v))
    _assert_close(result, cache_reference(q, *there, lengths, **options), case)


def test_a_cpus_smaller_blocks_give_the_same(monkeypatch):
    case = Case(head_dim=16)
    q, k, v = _random(case, (1, 512, 9, 16), *[(1, 3, 1600, 16)] * 2)
    fresh_k, fresh_v = (x[:, :, :512].swapaxes(1, 2) for x in (k, v))
    sizes, results = set(), []
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(xla, "platform", lambda platform=platform: platform)
        sizes.add(xla._query_block(q.shape, 512))
        cached = jax.jit(lambda *args: xla.cache_attention(*args, scale=0.25))
        causal = jax.jit(lambda *args: xla.causal_attention(*args, scale=0.25))
        results.append((cached(q, k, v, jnp.array([1500])), causal(q, fresh_k, fresh_v)))
    assert sizes == {256, 512}
    for found, expected in zip(*results, strict=True):
        _assert_close(found, expected, case)


@pytest.mark.parametrize("lengths", [(1024, 1024), (1024, 1100), (1600, 511), (1535, 0)])
def test_blocks_that_all_rows_fill_need_no_mask(lengths):
    case = Case(head_dim=16)
    q, k, v = _random(case, (2, 40, 6, 16), (2, 2, 1600, 16), (2, 2, 1600, 16))
    lengths_B = np.array(lengths, np.int32)
    beyond = (np.arange(1600) >= lengths_B[:, None])[:, None, :, None]
    k, v = (np.where(beyond, np.float32(1e4), x) for x in (k, v))
    given = q, k, v, lengths_B
    _assert_close(cache_streamed(*given, scale=0.25), cache_reference(*given, scale=0.25), case)


alone = jax.jit(partial(decode_attention, implementation="reference"), static_argnames="scale")


@pytest.mark.parametrize(("rows", "groups"), SHARING)
@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.quick("xla", "tpu-5", "tpu-17", "reference-17")
def test_rows_that_share_a_cache_attend_it_as_each_alone(interpreted, implementation, rows, groups):
    case = Case(queries=1, kv_heads=2, groups=groups)
    shape = 1, case.kv_heads, SLOTS, case.head_dim
    q, k, v = _random(case, (rows, 1, case.kv_heads * groups, case.head_dim), shape, shape)
    length = np.array([513], np.int32)
    copies = (np.repeat(np.asarray(x), rows, axis=0) for x in (k, v))
    expected = alone(q, *copies, np.repeat(length, rows), scale=case.scale)
    interpreted(implementation)
    how = {"scale": case.scale, "implementation": implementation}
    found = jax.jit(partial(shared_decode_attention, **how))(q, k, v, length)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
