import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import dispatch, hopper
from pallas_kernels.select_large_k import reference, select_large_k, select_mask, xla

ROWS, SLOTS, SIZE = 2, 13, 9


@functools.cache
def _compiled(name, size=SIZE):
    """One program for every draw of one shape; as on CPU, compacted as on TPU, and as on GPU."""
    if name == "mask":
        return jax.jit(select_mask)
    if name == "reference":
        return jax.jit(functools.partial(reference.select, size=size))
    if name == "gpu":

        def on_gpu(scores, k):
            with mock.patch.object(xla.dispatch, "platform", lambda: "gpu"):
                return xla.select(scores, jnp.clip(k, 0, size), size)

        return jax.jit(on_gpu)
    compact = {"scatter": xla._by_scatter, "search": xla._by_search}[name]
    return jax.jit(lambda scores, k: compact(xla.select(scores, k, None), size))


def _expected(scores, k, size):
    chosen = np.full((len(scores), size), -1, np.int32)
    for row, values, count in zip(chosen, scores, k, strict=True):
        order = np.argsort(-values, kind="stable")
        kept = np.sort(order[values[order] > -np.inf][: max(count, 0)])
        row[: len(kept)] = kept
    return chosen


def _check(scores, k, size=SIZE):
    expected = _expected(scores, k, size)
    for name in ("scatter", "search", "gpu", "reference"):
        result = _compiled(name, size)(scores, k)
        assert result.dtype == jnp.int32
        np.testing.assert_array_equal(result, expected, err_msg=name)


TINY = float(np.float32(1e-45))  # subnormal: taken for zero by comparisons of floats on CPU
SPECIAL = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0, 2.0, 3e38, -3e38]
SCORE = st.one_of(st.sampled_from(SPECIAL), st.floats(width=32, allow_subnormal=False))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    rows=st.lists(st.lists(SCORE, min_size=SLOTS, max_size=SLOTS), min_size=ROWS, max_size=ROWS),
    k=st.lists(st.integers(-2, SIZE), min_size=ROWS, max_size=ROWS),
)
def test_any_scores_are_chosen_as_a_stable_sort_would(rows, k):
    _check(np.array(rows, np.float32), np.array(k, np.int32))


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, np.nan, -np.nan])
def test_equal_scores_go_to_the_lowest_slots_unless_they_cannot_be_selected(value):
    scores = np.full((ROWS, SLOTS), value, np.float32)
    _check(scores, np.array([4, SIZE], np.int32))
    scores[1, [3, 7]] = -5.0
    _check(scores, np.array([SIZE, SIZE], np.int32))
    mask = _compiled("mask")(scores, np.array([SLOTS + 5] * ROWS, np.int32))
    np.testing.assert_array_equal(mask, scores > -np.inf)


def test_zeros_of_either_sign_tie_and_the_smallest_numbers_do_not():
    scores = np.full((ROWS, SLOTS), -1.0, np.float32)
    scores[0, :4] = -0.0, 0.0, -0.0, 0.0
    scores[1, :4] = -TINY, -0.0, TINY, 0.0
    result = _compiled("scatter")(scores, np.array([2, 2], np.int32))
    np.testing.assert_array_equal(result[:, :3], [[0, 1, -1], [1, 2, -1]])
    result = _compiled("search")(scores, np.array([3, 4], np.int32))
    np.testing.assert_array_equal(result[:, :5], [[0, 1, 2, -1, -1], [0, 1, 2, 3, -1]])


@pytest.mark.slow
def test_thousands_of_slots_and_borders():
    rng = np.random.default_rng(0)
    slots, size = 5000, 5003
    scores = rng.integers(-3, 4, (6, slots)).astype(np.float32)
    scores[0] = rng.normal(size=slots)
    scores[5, 4000:] = -np.inf
    _check(scores, np.array([2048, 0, 1, slots - 1, slots, 4500], np.int32), size)


def test_the_door_takes_a_number_or_one_for_each_row_of_any_rank():
    rng = np.random.default_rng(1)
    scores = jnp.asarray(rng.normal(size=(2, 3, SLOTS)), jnp.float32)
    k = jnp.array([[0, 1, 20], [-4, 5, 4]], jnp.int32)

    @jax.jit
    def run(scores, k):
        return (
            select_large_k(scores, k, size=4),
            select_large_k(scores[0, 0], 3, size=5),
            select_mask(scores, k),
            select_mask(scores, k, implementation="reference"),
        )

    each, three, mask, by_definition = run(scores, k)
    flat = np.asarray(scores).reshape(6, SLOTS)
    expected = _expected(flat, np.array([0, 1, 4, 0, 4, 4]), 4).reshape(2, 3, 4)
    np.testing.assert_array_equal(each, expected)
    np.testing.assert_array_equal(three, _expected(flat[:1], np.array([3]), 5)[0])
    np.testing.assert_array_equal(mask.sum(-1), [[0, 1, SLOTS], [0, 5, 4]])
    np.testing.assert_array_equal(mask, by_definition)
    with pytest.raises(ValueError, match="k 6 does not fit size 5"):
        select_large_k(scores, 6, size=5)


def test_selection_on_cpu_sorts_nothing_and_holds_little():
    scores = jax.ShapeDtypeStruct((4, 65536), jnp.float32)
    k = jax.ShapeDtypeStruct((4,), jnp.int32)
    run = jax.jit(functools.partial(select_large_k, size=2048, implementation="xla"))
    compiled = run.lower(scores, k).compile()
    assert " sort(" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 5 * scores.size * 4


def test_the_gpu_takes_its_kernels_for_long_rows_and_short_lists(monkeypatch):
    """By what was measured: XLA's form is quicker than a cluster below 65,536 scores."""
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(hopper, "compute_capability", lambda: hopper.CAPABILITY)

    def kernels(slots, size=5):
        scores = jax.ShapeDtypeStruct((2, slots), jnp.float32)
        traced = jax.jit(lambda scores: select_large_k(scores, 5, size=size)).trace(scores)
        return str(traced.jaxpr).count("kernel_name")

    assert kernels(65_535) == 0
    assert kernels(65_536) > 0
    assert (kernels(16_384), kernels(16_385)) == (1, 0)
    assert (kernels(8192, 512), kernels(8192, 513)) == (1, 0)
