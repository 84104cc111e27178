"""Merging partial attentions by their log-sum-exp."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.common import merge


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("bfloat16", 2**-6)])
def test_parts_weigh_as_their_log_sum_exps_say(dtype: str, tolerance: float) -> None:
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
def test_far_apart_parts_stay_finite_and_the_larger_wins(gap: float) -> None:
    a, b = np.random.default_rng(2).normal(size=(2, 5, 4, 8)).astype(np.float32)
    zero = jnp.zeros((5, 4))
    out, lse = merge([(jnp.asarray(a), zero), (jnp.asarray(b), zero + gap)])
    np.testing.assert_allclose(out, b if gap > 0 else a, rtol=1e-6)
    np.testing.assert_allclose(lse, zero + max(gap, 0), rtol=1e-6)


def test_nothing_to_merge_is_an_error() -> None:
    with pytest.raises(ValueError, match="no parts"):
        merge([])
