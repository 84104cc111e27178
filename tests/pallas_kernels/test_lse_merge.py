"""Merging partial attentions by their log-sum-exp."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common import merge
from pallas_kernels.prefill_attention import cache_attention


def _parts(seed: int, count: int = 3) -> list[tuple[jax.Array, jax.Array]]:
    keys = jax.random.split(jax.random.key(seed), 2 * count)
    return [
        (
            jax.random.normal(keys[2 * i], (2, 5, 4, 8)),
            jax.random.normal(keys[2 * i + 1], (2, 5, 4)),
        )
        for i in range(count)
    ]


def test_merging_the_parts_of_a_cache_is_attention_to_all_of_it() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (2, 5, 4, 16))
    k, v = (jax.random.normal(key, (2, 2, 60, 16)) for key in keys[1:])

    def attend(lo: int, hi: int) -> tuple[jax.Array, jax.Array]:
        lengths = jnp.full((2,), hi - lo, jnp.int32)
        return cache_attention(
            q, k[:, :, lo:hi], v[:, :, lo:hi], lengths, scale=0.25, implementation="reference"
        )

    out, lse = merge([attend(0, 7), attend(7, 33), attend(33, 60)])
    whole_out, whole_lse = attend(0, 60)
    np.testing.assert_allclose(out, whole_out, atol=1e-6)
    np.testing.assert_allclose(lse, whole_lse, atol=1e-6)


@pytest.mark.parametrize("gap", [1e4, -1e4, 3e38])
def test_far_apart_parts_stay_finite_and_the_larger_wins(gap: float) -> None:
    (a, zero), (b, _) = _parts(1, 2)
    zero = jnp.zeros_like(zero)
    out, lse = merge([(a, zero), (b, zero + gap)])
    np.testing.assert_allclose(out, b if gap > 0 else a, rtol=1e-6)
    np.testing.assert_allclose(lse, zero + max(gap, 0), rtol=1e-6)


def test_an_empty_part_weighs_nothing_even_when_its_out_is_garbage() -> None:
    (a, a_lse), (b, b_lse), _ = _parts(2)
    expected = merge([(a, a_lse), (b, b_lse)])
    garbage = jnp.full_like(a, jnp.nan), jnp.full_like(a_lse, -jnp.inf)
    for result in (
        merge([garbage, (a, a_lse), (b, b_lse)]),
        merge([(a, a_lse), (b, b_lse), garbage]),
    ):
        np.testing.assert_array_equal(result[0], expected[0])
        np.testing.assert_array_equal(result[1], expected[1])


def test_rows_empty_in_every_part_give_zero_and_minus_infinity() -> None:
    (a, a_lse), (b, b_lse), _ = _parts(3)
    empty = jnp.zeros_like(a_lse, bool).at[0, 1].set(True)
    a_lse, b_lse = (jnp.where(empty, -jnp.inf, lse) for lse in (a_lse, b_lse))
    out, lse = merge([(a, a_lse), (b, b_lse)])
    assert bool(jnp.all(out[0, 1] == 0)) and bool(jnp.all(jnp.isneginf(lse[0, 1])))
    assert bool(jnp.all(jnp.isfinite(out))) and bool(jnp.all(jnp.isfinite(lse[~empty])))


def test_bfloat16_parts_are_merged_in_float32_and_returned_in_bfloat16() -> None:
    parts = _parts(4)
    out, lse = merge([(out.astype(jnp.bfloat16), lse) for out, lse in parts])
    exact, exact_lse = merge(parts)
    assert out.dtype == jnp.bfloat16 and lse.dtype == jnp.float32
    np.testing.assert_allclose(out.astype(jnp.float32), exact, atol=2**-6)
    np.testing.assert_array_equal(lse, exact_lse)


def test_nothing_to_merge_is_an_error() -> None:
    with pytest.raises(ValueError, match="no parts"):
        merge([])
