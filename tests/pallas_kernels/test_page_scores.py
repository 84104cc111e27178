"""Page scores as bounds, as digests and against the definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_scores import page_scores

PAGE, PAGES = 4, 6
FILLED = jnp.array([0, 1, 5, 6], jnp.int32)
SCORES = jax.jit(page_scores)


def _keys(kv_heads: int = 2, groups: int = 4, dtype: str = "float32", seed: int = 0) -> tuple:
    """q [B,N,H], and keys [B,K,P,Z,H] of several magnitudes, as float32 that `dtype` can hold."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(len(FILLED), kv_heads * groups, 16))
    keys = rng.normal(size=(len(FILLED), kv_heads, PAGES, PAGE, 16))
    keys *= 10.0 ** rng.integers(-2, 3, size=keys.shape)
    return tuple(np.asarray(jnp.asarray(x, dtype).astype(jnp.float32)) for x in (q, keys))


def _cuboid(keys: np.ndarray, radius: str) -> tuple[np.ndarray, np.ndarray]:
    """ArkVale's digest of every page: the bounding box's centre, the keys' distance from it."""
    centre = (keys.max(axis=3) + keys.min(axis=3)) / 2
    distance = np.abs(keys - centre[:, :, :, None])
    radii = {"mean": distance.mean(axis=3), "max": distance.max(axis=3)}[radius]
    return centre + radii, centre - radii


def _score(q: np.ndarray, bounds: tuple, dtype: str = "float32") -> np.ndarray:
    """Garbage lies beyond the filled pages."""
    beyond = (np.arange(PAGES) >= np.asarray(FILLED)[:, None])[:, None, :, None]
    upper, lower = (jnp.asarray(np.where(beyond, np.nan, x), dtype) for x in bounds)
    scores = SCORES(jnp.asarray(q, dtype), upper, lower, FILLED)
    assert scores.dtype == jnp.float32
    assert np.isneginf(np.asarray(scores))[np.broadcast_to(beyond[..., 0], scores.shape)].all()
    return np.asarray(scores)


def _held(x: np.ndarray) -> np.ndarray:
    """The entries [.., N, P] of the filled pages."""
    return np.concatenate([row[:, :filled].ravel() for row, filled in zip(x, FILLED, strict=True)])


def _largest_product(q: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """max over the page's keys of q.k, [B,N,P], in float64."""
    keys = np.repeat(keys, q.shape[1] // keys.shape[1], axis=1).astype(np.float64)
    return np.einsum("bnh,bnpzh->bnpz", q.astype(np.float64), keys).max(axis=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kv_heads", "groups"), [(2, 4), (3, 1), (1, 8)])
def test_extremes_bound_every_key_of_the_page(dtype: str, kv_heads: int, groups: int) -> None:
    """In bfloat16 as stored; only the float32 sum rounds. The score is the box's best corner."""
    q, keys = _keys(kv_heads, groups, dtype)
    upper, lower = keys.max(axis=3), keys.min(axis=3)
    scores = _held(_score(q, (upper, lower), dtype))
    wide = [np.repeat(x, groups, axis=1).astype(np.float64) for x in (upper, lower)]
    terms = np.maximum(*(q.astype(np.float64)[:, :, None] * x for x in wide))
    rounding = _held(1e-6 * np.abs(terms).sum(axis=3))
    assert (np.abs(scores - _held(terms.sum(axis=3))) <= rounding).all()
    assert (scores >= _held(_largest_product(q, keys)) - rounding).all()


def test_pages_of_one_key_score_its_product() -> None:
    q, keys = _keys()
    keys = keys[:, :, :, :1]
    scores = _score(q, (keys[:, :, :, 0],) * 2)
    np.testing.assert_allclose(_held(scores), _held(_largest_product(q, keys)), rtol=1e-4)


def test_the_order_of_a_pages_keys_does_not_matter() -> None:
    q, keys = _keys()
    shuffled = keys[:, :, :, [2, 0, 3, 1]]
    scores = [_score(q, (x.max(axis=3), x.min(axis=3))) for x in (keys, shuffled)]
    np.testing.assert_array_equal(*scores)


def test_digests_with_the_largest_radius_are_the_bound_and_with_the_mean_radius_below() -> None:
    q, keys = _keys()
    bound = _held(_score(q, (keys.max(axis=3), keys.min(axis=3))))
    largest = _held(_score(q, _cuboid(keys, "max")))
    np.testing.assert_allclose(largest, bound, rtol=1e-4)
    mean = _held(_score(q, _cuboid(keys, "mean")))
    assert (mean <= largest).all() and (mean < 0.9 * largest).any()


@pytest.mark.parametrize("radius", ["mean", "max"])
def test_the_score_is_that_of_centre_and_radius(radius: str) -> None:
    q, keys = _keys()
    upper, lower = _cuboid(keys, radius)
    centre, radii = (np.repeat((upper + x) / 2, 4, axis=1) for x in (lower, -lower))
    expected = np.einsum("bnh,bnph->bnp", q, centre) + np.einsum("bnh,bnph->bnp", abs(q), radii)
    np.testing.assert_allclose(
        _held(_score(q, (upper, lower))), _held(expected), rtol=1e-4, atol=1e-3
    )


def test_float32_bounds_are_multiplied_at_the_highest_precision() -> None:
    """The default precision of a TPU would round them to bfloat16; a CPU's does not."""
    q, keys = _keys()
    with jax.default_matmul_precision("default"):
        program = str(jax.make_jaxpr(SCORES)(q, *(keys[:, :, :, 0],) * 2, FILLED))
    assert program.count("Precision.HIGHEST") == 4  # both operands of two matmuls


def test_bounds_of_other_shapes_are_refused(unchecked_signatures) -> None:
    q, keys = _keys()
    bounds = jnp.asarray(keys[:, :, :, 0])
    with pytest.raises(ValueError, match="query heads a multiple"):
        page_scores(jnp.asarray(q[:, :3]), bounds, bounds, FILLED)
    with pytest.raises(ValueError, match="one dtype"):
        page_scores(jnp.asarray(q), bounds, bounds.astype(jnp.bfloat16), FILLED)
