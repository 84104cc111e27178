"""H2O against its definition in numpy, and its equivalences."""

import dataclasses

import numpy as np
import pytest

from jax_longctx.engine.capacity import read_bytes, staged_caches
from jax_longctx.errors import ConfigError
from jax_longctx.methods import H2O, StreamingLLM
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.evicting import (
    ANSWERS,
    CONTEXTS,
    NOTHING,
    QUESTIONS,
    ask_twice,
    compare,
    full_logits,
    kept_tokens,
    oracle_params,
)
from tests.jax_longctx.methods.harness import steps
from tests.jax_longctx.methods.oracles.evictors import THETA, H2ORule
from tests.oracle import forward, probabilities, rope, weighted_values
from tests.support import tiny_config, tiny_engine

OWN = H2O(budget=16, recent=5, chunk=8)
CITRUS = H2O(
    budget=24, chunk=8, over_group="max", normalize=True, positions="shifted", protocol="citrus"
)


@pytest.fixture(scope="module")
def own():
    return tiny_engine(OWN, chunk=8)


@pytest.fixture(scope="module")
def citrus():
    return tiny_engine(CITRUS, config=tiny_config(num_layers=1), chunk=8)


def column_sums(engine, row):
    """Each layer's attention mass on every token under full attention, by kv head `[K, L]`."""
    found = []

    def attend(layer, q, k, v):
        at = np.arange(len(q))
        p = probabilities(rope(q, at, THETA), rope(k, at, THETA), at[:, None] >= at[None])
        found.append(p.sum(1).reshape(k.shape[1], -1, len(q)).mean(1))
        return weighted_values(p, v)

    forward(engine.config, oracle_params(engine), row, attend)
    return found


def test_x22_ragged_rows_keep_what_each_keeps_alone(own):
    compare(own, H2ORule(recent=5), answers=ANSWERS, sums=1)


@pytest.mark.thorough
def test_x22_as_a_baseline_of_citrus(citrus):
    compare(citrus, H2ORule(0, "max", normalize=True, own=False), CONTEXTS, QUESTIONS, ANSWERS, 1)


@pytest.mark.thorough
def test_a_mesh_keeps_what_one_device_keeps():
    method, config = dataclasses.replace(OWN, over_group="max"), tiny_config(num_layers=1)
    engine = tiny_engine(method, config=config, mesh=make_mesh(2, 2, 2))
    compare(engine, H2ORule(5, "max"), sums=1)


def test_h2_1_x1_a_budget_for_all_is_full_attention(own):
    row = CONTEXTS[1] + ANSWERS[1]
    expected = full_logits(own, row)
    at = 0
    for step in steps(own, CONTEXTS, NOTHING, ANSWERS):
        size = int(step.valid[1])
        np.testing.assert_allclose(step.logits[1, :size], expected[at : at + size], atol=1e-5)
        at += size
    assert at == len(row)


def test_x20_shifted_positions_without_eviction_are_the_true_ones(citrus):
    expected = full_logits(citrus, CONTEXTS[1] + QUESTIONS[1] + ANSWERS[1])
    at = 0
    for step in steps(citrus, CONTEXTS, QUESTIONS, ANSWERS):
        size = 0 if step.segment.role == "probe" else int(step.valid[1])
        np.testing.assert_allclose(step.logits[1, :size], expected[at : at + size], atol=1e-5)
        at += size
    assert at == len(expected)


def test_h2_2_sums_without_eviction_are_the_columns_of_full_attention(own):
    row = CONTEXTS[1] + ANSWERS[1]
    expected = column_sums(own, row)
    *_, last = steps(own, CONTEXTS, NOTHING, ANSWERS)
    for cache, columns in zip(last.caches, expected, strict=True):
        sums = np.asarray(cache.statistics)[1, :, : len(row), 0]
        np.testing.assert_allclose(sums, columns, atol=1e-5)


def test_h2_3_x2_sl_4_without_heavy_hitters_it_is_streaming_llm():
    window = H2O(budget=16, recent=16, chunk=1, positions="shifted")
    stream = StreamingLLM(budget=16, sink=0, chunk=1)
    config = tiny_config(num_layers=1)
    left, right = (tiny_engine(m, config=config, chunk=1) for m in (window, stream))
    columns = column_sums(left, CONTEXTS[0][:16])
    both = zip(steps(left, CONTEXTS, NOTHING), steps(right, CONTEXTS, NOTHING), strict=True)
    for i, (a, b) in enumerate(both):
        assert kept_tokens(a.caches) == kept_tokens(b.caches)
        real = a.valid > 0
        np.testing.assert_allclose(a.logits[real], b.logits[real], atol=1e-5)
        if i == 15:
            # H2-2 with chunks of one token.
            for cache, expected in zip(a.caches, columns, strict=True):
                sums = np.asarray(cache.statistics)[0, ..., 0]
                np.testing.assert_allclose(sums, expected, atol=1e-5)


def test_h2_5_one_query_head_a_kv_head_leaves_nothing_to_reduce():
    config = tiny_config(num_kv_heads=4, num_layers=1)
    # H2-4: without a recent window every token competes, the newest too.
    method = H2O(budget=16, recent=0, chunk=8, over_group="max")
    oracles = compare(tiny_engine(method, config=config, chunk=8), H2ORule(0, "mean"))
    newest = [head[-1] for head in oracles[0].layers[0].token]
    assert min(newest) < len(CONTEXTS[0]) - 1


def test_a_second_question_and_a_saved_context(own, citrus, tmp_path):
    ask_twice(own, tmp_path / "own")
    ask_twice(citrus, tmp_path / "citrus", QUESTIONS)


def test_an_evicting_step_reads_the_statistics_too(own, citrus):
    # Two heads of 16 slots, 8 numbers each for key and value, then token and sum; two row numbers.
    # In CItruS's setting 24 slots and 128 for question and answer, and nothing is ranked any more.
    for engine, numbers in [(own, 4 * 2 * 16 * (2 * 8 + 2) + 2 * 4), (citrus, 4 * 2 * 152 * 2 * 8)]:
        answering = staged_caches(engine.setup, 4, 100, 32)[2]
        assert read_bytes(engine.setup, answering, 100) == engine.config.num_layers * 4 * numbers


def test_defaults_and_bad_settings():
    assert (H2O(budget=16).window, H2O(budget=300, protocol="citrus").window) == (8, 0)
    for settings, said in [
        ({"recent": -1}, "h2o: recent must be at least 0, got -1"),
        ({"budget": 8, "recent": 9}, "budget 8 leaves 8 tokens, but the method always keeps 9"),
        ({"budget": 0, "recent": 0}, "budget 0 leaves 0 tokens, but the method always keeps 1"),
        ({"chunk": 0}, "h2o: chunk must be at least 1, got 0"),
        (
            {"budget": 20, "chunk": 16, "recent": 5, "protocol": "citrus"},
            "budget 20 less chunk 16 leaves 4 tokens, but the method always keeps 5",
        ),
    ]:
        with pytest.raises(ConfigError, match=said):
            H2O(**settings)
