"""The two halves of one query's attention, against numpy and against the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention import (
    attend_logits,
    decode_attention,
    decode_logits,
    reference,
    xla,
)

LENGTHS, SLOTS, HEAD_DIM, SCALE = (0, 1, 31, 32, 33, 64), 64, 16, 0.4


def _inputs(groups: int, dtype: str, large: bool = False) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(3), 3)
    rows = len(LENGTHS)
    shapes = (rows, 1, 2 * groups, HEAD_DIM), *[(rows, 2, SLOTS, HEAD_DIM)] * 2
    q, k, v = (jax.random.normal(key, s).astype(dtype) for key, s in zip(keys, shapes, strict=True))
    beyond = (jnp.arange(SLOTS) >= jnp.array(LENGTHS)[:, None])[:, None, :, None]
    k = jnp.where(beyond, jnp.nan, k)  # masked after the matmul, so even NaN may lie there
    return [q * (60 if large else 1), k, jnp.where(beyond, jnp.asarray(1e4, dtype), v)]


def _clean() -> tuple[jax.Array, jax.Array]:
    """A query and one array for keys and values, every slot of which is filled."""
    rng = np.random.default_rng(5)
    q = rng.normal(size=(len(LENGTHS), 1, 8, HEAD_DIM)).astype(np.float32)
    v = rng.normal(size=(len(LENGTHS), 2, SLOTS, HEAD_DIM)).astype(np.float32)
    return jnp.asarray(q), jnp.asarray(v)


@jax.jit
def _halves(q, k, v, lengths):
    logits = decode_logits(q, k, lengths, scale=SCALE)
    return logits, *xla.attend_logits(logits, v, block=16)


@jax.jit
def _reference(q, k, v, lengths):
    logits = reference.decode_logits(q, k, lengths, scale=SCALE)
    return logits, *reference.attend_logits(logits, v)


def _numpy(q, k, v) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    rows, _, heads, _ = q.shape
    logits = np.full((rows, heads, SLOTS), -np.inf)
    out, lse = np.zeros((rows, 1, heads, HEAD_DIM)), np.full((rows, 1, heads), -np.inf)
    for row, length in enumerate(LENGTHS):
        for head in range(heads if length else 0):
            kv_head = head // (heads // 2)
            some = SCALE * k[row, kv_head, :length] @ q[row, 0, head]
            logits[row, head, :length] = some
            weights = np.exp(some - some.max())
            lse[row, 0, head] = some.max() + np.log(weights.sum())
            out[row, 0, head] = weights / weights.sum() @ v[row, kv_head, :length]
    return logits, out, lse


@pytest.mark.parametrize(
    ("groups", "dtype", "large"),
    [(1, "float32", False), (4, "float32", True), (8, "float32", False), (4, "bfloat16", False)],
)
def test_halves_and_reference_are_the_definition(groups: int, dtype: str, large: bool) -> None:
    """Ragged rows, one empty and one full; garbage beyond the lengths is not seen."""
    q, k, v = _inputs(groups, dtype, large)
    lengths = jnp.array(LENGTHS, jnp.int32)
    logits, out, lse = _numpy(q, k, v)
    for run in (_halves, _reference):
        got_logits, got_out, got_lse = run(q, k, v, lengths)
        assert (got_logits.dtype, got_out.dtype, got_lse.dtype) == ("float32", dtype, "float32")
        tolerance = 2e-4 if large else 1e-5
        np.testing.assert_allclose(got_logits, logits, atol=tolerance)
        np.testing.assert_allclose(got_lse, lse, atol=tolerance)
        got_out = got_out.astype(jnp.float32)
        np.testing.assert_allclose(got_out, out, atol=2e-2 if dtype == "bfloat16" else tolerance)
        assert (got_out[0] == 0).all()


def test_the_doors_take_lengths_beyond_the_capacity_and_equal_the_whole() -> None:
    q, v = _clean()
    lengths = jnp.array([-3, 0, 1, 63, 64, 99], jnp.int32)

    @jax.jit
    def run(q, v):
        whole = decode_attention(q, v, v, lengths, scale=SCALE)
        logits = decode_logits(q, v, lengths, scale=SCALE)
        return logits, whole, attend_logits(logits, v)

    logits, whole, halves = run(q, v)
    held = np.clip(lengths, 0, SLOTS)
    np.testing.assert_array_equal(np.isfinite(logits).sum(-1), held[:, None].repeat(8, 1))
    for one, two in zip(whole, halves, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-5)


def test_a_method_may_hide_slots_between_the_halves() -> None:
    """Slots set to -inf are unseen: as attention to a cache without them."""
    q, v = _clean()
    every = v[:, :, ::2]
    short = jnp.full(len(LENGTHS), SLOTS // 2)

    @jax.jit
    def run(q, v):
        logits = decode_logits(q, v, 2 * short, scale=SCALE)
        hidden = jnp.where(jnp.arange(SLOTS) % 2 == 0, logits, -jnp.inf)
        expected = reference.decode_attention(q, every, every, short, scale=SCALE)
        return (
            attend_logits(hidden, v),
            reference.attend_logits(hidden, v),
            expected,
        )

    halves, by_definition, expected = run(q, v)
    for one, two, three in zip(expected, halves, by_definition, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(three, one, rtol=1e-5, atol=1e-5)


def test_heads_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="3 heads of logits over 2 kv heads"):
        attend_logits(jnp.zeros((1, 3, 8)), jnp.zeros((1, 2, 8, 4)))
