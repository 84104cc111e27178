from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.quantised import quantise
from pallas_kernels.topk_scores import merge_topk, reference, topk_scores, xla
from tests.drawing import normal

# Of a block of 32 keys: rows that begin and end beside its edges, an empty one, one that is whole.
SLOTS = 80
STARTS = (0, 1, 31, 32, 33, 5, 7)
STOPS = (80, 33, 33, 64, 65, 5, 9)
ROWS = len(STARTS)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table: shapes, dtype, how many keys, and what is special about the scores."""

    queries: int = 5
    kv_heads: int = 2
    groups: int = 3
    count: int = 4
    dtype: str = "float32"
    blocks: tuple[int, int] | None = (2, 32)
    values: str = "normal"
    # Scores are integers, and every slot's have noise; the tolerance is beyond it and below 1.
    noise: float = 0.0
    tolerance: float = 0.0


CASES = {
    "one-pass": Case(blocks=None),
    "one-query": Case(queries=1, blocks=(1, 32)),
    "a-key-each-block": Case(blocks=(5, 1), count=3),
    "mha-of-one-key": Case(groups=1, count=1),
    "groups-of-four": Case(groups=4, blocks=(5, 32)),
    "mqa-of-eight": Case(kv_heads=1, groups=8),
    "sixteen-keys": Case(count=16),
    "bfloat16": Case(dtype="bfloat16"),
    "ties": Case(values="ties"),
    "ties-in-one-pass": Case(values="ties", blocks=None, count=16),
    "all-equal": Case(values="zero"),
    "large": Case(values="large"),
    "near-ties": Case(values="ties", noise=0.1, tolerance=0.25),
    "near-ties-in-one-pass": Case(values="ties", noise=0.1, tolerance=0.25, blocks=None, count=16),
    "near-ties-a-key-each-block": Case(values="ties", noise=0.1, tolerance=0.25, blocks=(5, 1)),
}


def _bounds(start, stop):
    return jnp.array(start, jnp.int32), jnp.array(stop, jnp.int32)


def _inputs(case, seed=0):
    rng = np.random.default_rng(seed)
    draw: dict[str, Callable] = {
        "normal": lambda *shape: rng.normal(size=shape),
        "ties": lambda *shape: rng.integers(-1, 2, size=shape),
        "zero": lambda *shape: np.where(rng.random(shape) < 0.5, 0.0, -0.0),
        "large": lambda *shape: 1e17 * rng.normal(size=shape),
    }
    q = draw[case.values](ROWS, case.queries, case.kv_heads * case.groups, 8)
    k = draw["normal" if case.values == "zero" else case.values](ROWS, case.kv_heads, SLOTS, 8)
    if case.noise:
        # The last number of a key adds the noise to all of its scores.
        q[..., -1], k[..., -1] = 1, rng.uniform(-case.noise, case.noise, k.shape[:-1])
    slots = np.arange(SLOTS)
    held = (slots >= np.array(STARTS)[:, None]) & (slots < np.array(STOPS)[:, None])
    k = np.where(held[:, None, :, None], k, np.nan)
    q, k = (jnp.asarray(x, case.dtype) for x in (q, k))
    return q, k, _bounds(STARTS, STOPS), jnp.full(q.shape[:3], case.tolerance, jnp.float32)


def _by_numpy(case, q, k):
    """Sort (score, slot) pairs in Python; the definition that the reference has to meet."""
    rows, queries, heads, _ = q.shape
    values = np.full((rows, queries, heads, case.count), -np.inf, np.float32)
    indices = np.full(values.shape, -1)
    for b, t, n in np.ndindex(rows, queries, heads):
        keys = k[b, n // case.groups, STARTS[b] : STOPS[b]]
        scores = keys @ q[b, t, n]
        if case.noise:
            scores = np.round(scores)
        pairs = [(-score, s) for s, score in enumerate(scores.tolist(), STARTS[b])]
        best = sorted(pairs)[: case.count]
        slots = [slot for _, slot in best]
        values[b, t, n, : len(best)] = keys[np.array(slots, int) - STARTS[b]] @ q[b, t, n]
        indices[b, t, n, : len(best)] = slots
    return values, indices


def _run(count, implementation="xla"):
    return jax.jit(partial(topk_scores, count=count, implementation=implementation))


# What the other cases have too.
SLOW = ("mha-of-one-key", "mqa-of-eight", "ties-in-one-pass", "near-ties")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.slow if name in SLOW else ())
        for name, case in CASES.items()
    ],
)
def test_best_keys(case):
    q, k, *rest = _inputs(case)
    values, indices = _by_numpy(case, *(np.asarray(x.astype(jnp.float32)) for x in (q, k)))
    runs = {
        "xla": jax.jit(partial(xla.topk_scores, count=case.count, blocks=case.blocks)),
        "reference": jax.jit(partial(reference.topk_scores, count=case.count)),
    }
    for name, run in runs.items():
        found, slots = run(q, k, *rest)
        assert found.dtype == jnp.float32 and slots.dtype == jnp.int32
        np.testing.assert_array_equal(slots, indices, err_msg=name)
        np.testing.assert_allclose(found, values, rtol=1e-5, atol=1e-5, err_msg=name)
    assert (indices[5] == -1).all() and np.isneginf(values[5]).all()


INF, NAN = np.inf, np.nan
FEW = [1.0, NAN, 3.0, -INF, NAN, NAN, INF, 2.0]
PLANTED = [0.0] * 130 + [1.0, 2, 3, 4] + [0.0] * 378


@pytest.mark.parametrize(
    ("scores", "start", "expected"),
    [
        pytest.param([-0.0, 0.0, -0.0, 0.0, 0.0], 0, [0, 1, 2, 3], id="zeros-of-both-signs"),
        pytest.param([-0.0, 0.0], 0, [0, 1, -1, -1], id="few-zeros"),
        pytest.param(FEW, 0, [6, 2, 7, 0, -1], id="no-numbers"),
        # All are in one tile.
        pytest.param(PLANTED, 1, [133, 132, 131, 130], id="planted"),
    ],
)
@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_the_slots_of_few_scores(scores, start, expected, implementation):
    q = jnp.ones((1, 2, 1, 1)).at[0, 1].set(jnp.nan)
    k = jnp.array(scores)[None, None, :, None]
    run = _run(len(expected), implementation)
    values, indices = run(q, k, _bounds((start,), (len(scores),)))
    np.testing.assert_array_equal(indices[0, 0, 0], expected)
    np.testing.assert_array_equal(indices[0, 1, 0], [-1] * len(expected))
    found = [scores[slot] if slot >= 0 else -INF for slot in expected]
    np.testing.assert_array_equal(values[0, 0, 0], found)
    assert implementation == "reference" or not np.signbit(np.asarray(values)[values == 0]).any()


def test_padded_queries_get_nothing_and_bounds_are_clipped():
    q, k, *_ = _inputs(CASES["one-pass"])
    q, k = q[4:5, :, :, :], jnp.nan_to_num(k[4:5])
    valid = jnp.array([3], jnp.int32)
    values, indices = _run(2)(q, k, _bounds((-9,), (SLOTS + 9,)), valid=valid)
    assert (indices[0, 3:] == -1).all() and jnp.isneginf(values[0, 3:]).all()
    assert (indices[0, :3] >= 0).all() and jnp.isfinite(values[0, :3]).all()
    expected = _run(2, "reference")(q, k, _bounds((0,), (SLOTS,)))
    np.testing.assert_array_equal(indices[0, :3], expected[1][0, :3])


# Compiled once for all that hypothesis draws; the keys of a block do not divide the slots.
SMALL = {
    "xla": jax.jit(partial(xla.topk_scores, count=3, blocks=(2, 8))),
    "reference": jax.jit(partial(reference.topk_scores, count=3)),
}
merged = jax.jit(merge_topk, static_argnums=2)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    bounds=st.tuples(*[st.tuples(st.integers(0, 45), st.integers(0, 45))] * 2),
    split=st.integers(0, 45),
    seed=st.integers(0, 3),
)
def test_any_bounds_stream_like_the_definition_and_merge(bounds, split, seed):
    rng = np.random.default_rng(seed)
    q, k = (
        jnp.asarray(rng.integers(-2, 3, shape), jnp.float32)
        for shape in ((2, 3, 4, 3), (2, 2, 45, 3))
    )
    start, stop = _bounds(*zip(*bounds, strict=True))
    # Scores differ by 1 if at all: noise in a fourth dimension is within the tolerance.
    noise = jnp.asarray(rng.uniform(-0.1, 0.1, k.shape[:-1]), jnp.float32)
    noisy = jnp.pad(q, [(0, 0)] * 3 + [(0, 1)], constant_values=1), jnp.c_[k, noise[..., None]]
    exact, tolerance = jnp.zeros(q.shape[:3]), jnp.full(q.shape[:3], 0.25)
    expected = SMALL["reference"](q, k, (start, stop), exact)
    jax.tree.map(np.testing.assert_array_equal, SMALL["xla"](q, k, (start, stop), exact), expected)
    for name in ("reference", "xla"):
        _, slots = SMALL[name](*noisy, (start, stop), tolerance)
        np.testing.assert_array_equal(slots, expected[1], err_msg=name)
    middle = jnp.clip(split, start, jnp.maximum(start, stop))
    for arrays, allowed in (((q, k), exact), (noisy, tolerance)):
        parts = [
            SMALL["xla"](*arrays, bounds, allowed) for bounds in ((start, middle), (middle, stop))
        ]
        listed = (np.concatenate(x, axis=-1) for x in zip(*parts[::-1], strict=True))
        _, slots = merged(*listed, 3, allowed)
        np.testing.assert_array_equal(slots, expected[1])


def test_merging_orders_by_score_then_slot_and_pads():
    values = jnp.array([5.0, 7.0, 99.0, 7.0, -jnp.inf, -0.0, 0.0])
    indices = jnp.array([4, 9, -1, 3, -1, 8, 2], jnp.int32)
    best, slots = merged(values, indices, 8, jnp.float32(0))
    np.testing.assert_array_equal(slots, [3, 9, 4, 2, 8, -1, -1, -1])
    np.testing.assert_array_equal(best, [7, 7, 5, 0, 0, -np.inf, -np.inf, -np.inf])
    np.testing.assert_array_equal(merged(values, indices, 2, jnp.float32(0))[1], [3, 9])
    np.testing.assert_array_equal(merged(values, indices, 4, jnp.float32(2))[1], [3, 4, 9, 2])


def test_of_a_chain_parts_may_rank_otherwise_than_the_whole():
    """The limit of ties by tolerance: 9.3 ties with 10 and 10 with 10.5, but 9.3 not with 10.5."""
    q, k = jnp.ones((1, 1, 1, 1)), jnp.array([9.3, 10.0, 10.5])[None, None, :, None]
    given = q, k, _bounds((0,), (3,)), jnp.ones((1, 1, 1))
    # Of the first two alone the first comes first, and then loses to the third.
    in_blocks = partial(xla.topk_scores, blocks=(1, 2))
    for run, first in ((reference.topk_scores, 1), (xla.topk_scores, 1), (in_blocks, 2)):
        assert jax.jit(partial(run, count=1))(*given)[1].item() == first


def test_blocks_outside_the_bounds_are_not_visited():
    """A block's worth of queries against NaN everywhere else takes one turn, not a thousand."""
    visited = []

    def count_turns(*args, **options):
        jax.debug.callback(lambda: visited.append(1))
        return merge(*args, **options)

    merge = xla._merge_block
    q, k = jnp.ones((1, 2, 2, 4)), jnp.ones((1, 1, 4096, 4))
    given = q, k, _bounds((1030,), (1100,)), jnp.zeros(q.shape[:3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(xla, "_merge_block", count_turns)
        _, indices = jax.jit(partial(xla.topk_scores, count=2, blocks=(2, 64)))(*given)
        jax.effects_barrier()
    np.testing.assert_array_equal(indices[0, 0, 0], [1030, 1031])
    assert len(visited) == 2


@pytest.mark.parametrize(("queries", "slots"), [(1, 2**19), (512, 2**20)])
def test_long_caches_take_bounded_memory(queries, slots):
    """The keys are 1 and 2 GB; the scores of 512 queries would be 69 GB."""
    shapes = (1, queries, 32, 128), (1, 8, slots, 128)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    bounds = (jax.ShapeDtypeStruct((1,), jnp.int32),) * 2
    run = jax.jit(partial(topk_scores, count=4))
    memory = run.lower(*arguments, bounds).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 256 * 2**20


def test_bad_arguments_are_named():
    q, k, bounds, _ = _inputs(CASES["one-pass"])
    for changed, message in (
        (dict(count=17), "count 17"),
        (dict(q=q.astype(jnp.bfloat16)), "one dtype"),
    ):
        with pytest.raises(ValueError, match=message):
            topk_scores(**dict(q=q, k=k, bounds=bounds, count=1) | changed)


def test_a_cpus_smaller_blocks_rank_the_same(monkeypatch):
    q, k = normal(1, 512, 9, 16), normal(1, 3, 5000, 16, seed=1)
    given = q, k, _bounds((32,), (4700,)), jnp.full((1, 512, 9), 1e-4)
    sizes, results = set(), []
    for platform in ("cpu", "gpu"):
        monkeypatch.setattr(xla, "platform", lambda platform=platform: platform)
        sizes.add(xla._blocks(q, k))
        run = jax.jit(lambda *args: xla.topk_scores(*args, count=4))
        results.append(run(*given))
    assert sizes == {(64, 2048), (256, 1024)}
    np.testing.assert_array_equal(results[0][1], results[1][1])
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-5)


def test_few_scores_pass_at_once_unless_keys_in_8_bits_would_be_many_floats(monkeypatch):
    q, k = jnp.zeros((1, 8, 2, 16)), jnp.zeros((1, 1, 4096, 16))
    assert xla._blocks(q, k) == xla._blocks(q, quantise(k)) == (8, 4096)
    monkeypatch.setattr(xla, "_KEY_BYTES", k.nbytes - 1)
    assert xla._blocks(q, k) == (8, 4096)
    assert xla._blocks(q, quantise(k)) == (8, 2048)
