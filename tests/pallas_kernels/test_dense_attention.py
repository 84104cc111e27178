"""Every implementation of dense attention that runs on a CPU, against the definition."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.common import Window
from pallas_kernels.decode_attention import xla as decode_xla
from pallas_kernels.prefill_attention import reference, tpu, xla

# Compiled once for all implementations of a case.
STATIC = ("scale", "window")
cache_reference = jax.jit(reference.cache_attention, static_argnames="scale")
causal_reference = jax.jit(reference.causal_attention, static_argnames=STATIC)

# The blocks of the implementations are 512 slots: rows that end beside their edges.
SLOTS = 1024
LENGTHS = (0, 1, 511, 512, 513, 1024)

CACHE: dict[str, Callable] = {
    "xla": xla.cache_attention,
    "decode": decode_xla.decode_attention,
    "splash": partial(tpu.cache_attention, interpret=True),
}
CAUSAL: dict[str, Callable] = {
    "xla": xla.causal_attention,
    "splash": partial(tpu.causal_attention, interpret=True),
}


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
    def scale(self) -> float:
        return {"random": 1.0, "large": 60.0, "equal": 0.0}[self.logits] * self.head_dim**-0.5


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


# Splash attention is interpreted: of its cases against a cache these are `slow`.
SLOW = ("one-query", "mqa-of-eight", "bfloat16", "large-logits", "equal-logits")


def _random(case: Case, *shapes: tuple[int, ...]) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(7), len(shapes))
    return [
        jax.random.normal(key, shape).astype(case.dtype)
        for key, shape in zip(keys, shapes, strict=True)
    ]


def _assert_close(
    result: tuple[jax.Array, jax.Array], expected: tuple[jax.Array, jax.Array], case: Case
) -> None:
    """Outputs are means of unit-variance values; a log-sum-exp carries the scores' rounding."""
    out, lse = result
    assert out.dtype == case.dtype and lse.dtype == jnp.float32
    exact = case.dtype == "float32"
    largest = float(np.max(np.abs(expected[1]), where=np.isfinite(expected[1]), initial=1.0))
    out_tolerance, lse_tolerance = (1e-5, 1e-6 * largest + 1e-5) if exact else (2e-2, 2e-2)
    if exact and case.logits == "large":
        out_tolerance = 2e-4  # exp turns the rounding of scores near 500 into relative errors
    np.testing.assert_allclose(
        out.astype(jnp.float32), expected[0].astype(jnp.float32), atol=out_tolerance
    )
    np.testing.assert_allclose(lse, expected[1], atol=lse_tolerance)


def _supported(implementations: dict[str, Callable], cases: dict[str, Case]) -> list:
    """The table's cells: splash leaves out narrow heads, and windows against a cache."""
    slow = [("splash", label) for label in SLOW if implementations is CACHE]
    return [
        pytest.param(
            name,
            case,
            id=f"{name}-{label}",
            marks=pytest.mark.slow if (name, label) in slow else (),
        )
        for name in implementations
        for label, case in cases.items()
        if name != "splash"
        or (case.head_dim >= 64 and (case.window is None or implementations is CAUSAL))
    ]


@pytest.mark.parametrize(("name", "case"), _supported(CACHE, CACHE_CASES))
def test_cache_attention(name: str, case: Case) -> None:
    """Ragged rows, one empty and one full; garbage beyond a row's length is not seen."""
    heads = case.kv_heads * case.groups
    lengths = jnp.array(LENGTHS, jnp.int32)
    cache = len(LENGTHS), case.kv_heads, SLOTS, case.head_dim
    q, k, v = _random(case, (len(LENGTHS), case.queries, heads, case.head_dim), cache, cache)
    options = dict(scale=case.scale)
    if case.window is not None:
        # The first queries stand 0, 10, ... tokens after the last slot of their row.
        start = case.slot_start + lengths + 10 * jnp.arange(len(LENGTHS))
        options["window"] = Window(size=case.window, query_start=start, slot_start=case.slot_start)
    expected = cache_reference(q, k, v, lengths, **options)
    attend = jax.jit(partial(CACHE[name], **options))
    # Of both signs, as queries are: whichever slot were seen, some head's scores would soar.
    slot = jnp.arange(SLOTS)
    beyond = (slot >= lengths[:, None])[:, None, :, None]
    garbage = jnp.where(slot // 3 % 2, -1e4, 1e4).astype(case.dtype)[:, None]
    result = attend(q, *(jnp.where(beyond, garbage, x) for x in (k, v)), lengths)
    assert bool(jnp.all(result[0][0] == 0)) and bool(jnp.all(jnp.isneginf(result[1][0])))
    _assert_close(result, expected, case)


@pytest.mark.parametrize(("name", "case"), _supported(CAUSAL, CAUSAL_CASES))
def test_causal_attention(name: str, case: Case) -> None:
    heads = case.kv_heads * case.groups
    chunk = 2, case.queries, case.kv_heads, case.head_dim
    q, k, v = _random(case, (2, case.queries, heads, case.head_dim), chunk, chunk)
    options = dict(scale=case.scale, window=case.window)
    expected = causal_reference(q, k, v, **options)
    _assert_close(jax.jit(partial(CAUSAL[name], **options))(q, k, v), expected, case)


@dataclass(frozen=True)
class _Small:
    """The functions of one pair of shapes, compiled once for all that hypothesis draws."""

    queries: int
    slots: int
    window: int | None

    @functools.cached_property
    def compiled(self) -> dict[str, Callable]:
        cache = {
            "reference": reference.cache_attention,
            "xla": xla.cache_attention,
            "decode": partial(decode_xla.decode_attention, block=8),
        }
        causal = {"reference": reference.causal_attention, "xla": xla.causal_attention}
        windowed = dict(scale=0.3, window=self.window)
        return {
            **{f"cache-{name}": jax.jit(partial(f, scale=0.3)) for name, f in cache.items()},
            **{f"causal-{name}": jax.jit(partial(f, **windowed)) for name, f in causal.items()},
        }


SMALL = [_Small(9, 40, None), _Small(9, 40, 6), _Small(3, 13, 20)]


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    small=st.sampled_from(SMALL),
    filled=st.tuples(st.integers(0, 40), st.integers(0, 40)),
    slot_start=st.integers(0, 20),
    behind=st.tuples(st.integers(0, 30), st.integers(0, 30)),
)
def test_any_raggedness_streams_like_the_definition(
    small: _Small, filled: tuple[int, int], slot_start: int, behind: tuple[int, int]
) -> None:
    """Blocks of 8 keys and 4 queries that divide neither S nor T."""
    case = Case(head_dim=8)
    cache = 2, case.kv_heads, small.slots, 8
    q, k, v = _random(case, (2, small.queries, 6, 8), cache, cache)
    fresh_k, fresh_v = (x[:, :, : small.queries].swapaxes(1, 2) for x in (k, v))
    lengths = jnp.minimum(jnp.array(filled, jnp.int32), small.slots)
    start = slot_start + lengths + jnp.array(behind, jnp.int32)
    window = Window.of(small.window, start, jnp.array(slot_start, jnp.int32))
    run = small.compiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "_KEY_BLOCK", 8)
        patch.setattr(xla, "_query_block", lambda shape, _: min(4, shape[1]))
        expected = run["cache-reference"](q, k, v, lengths, window=window)
        _assert_close(run["cache-xla"](q, k, v, lengths, window=window), expected, case)
        _assert_close(run["cache-decode"](q, k, v, lengths, window=window), expected, case)
        expected = run["causal-reference"](q, fresh_k, fresh_v)
        _assert_close(run["causal-xla"](q, fresh_k, fresh_v), expected, case)


def test_a_window_does_not_visit_the_blocks_outside_it() -> None:
    """Keys that no query of the chunk sees may be NaN even below the length."""
    case = Case(window=100)
    q, k, v = _random(case, (1, 5, 6, 64), (1, 2, 4096, 64), (1, 2, 4096, 64))
    unseen = (jnp.arange(4096) < 3584)[:, None]  # 7 blocks of 512; the window begins in the 8th
    k, v = (jnp.where(unseen, jnp.nan, x) for x in (k, v))
    lengths = jnp.array([4096], jnp.int32)
    options = dict(scale=case.scale, window=Window(size=100, query_start=lengths))
    result = xla.cache_attention(q, k, v, lengths, **options)
    _assert_close(
        result,
        reference.cache_attention(q, *(jnp.nan_to_num(x) for x in (k, v)), lengths, **options),
        case,
    )
