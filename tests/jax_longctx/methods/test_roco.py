"""RoCo against its definition in numpy, and its equivalences."""

import dataclasses

import numpy as np
import pytest

from jax_longctx.errors import ConfigError
from jax_longctx.methods import H2O, RoCo
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
from tests.jax_longctx.methods.oracles.evictors import THETA, RoCoRule
from tests.oracle import forward, probabilities, rope, weighted_values
from tests.support import tiny_config, tiny_engine

OWN = RoCo(budget=16, chunk=8, sink=2, recent_ratio=0.2, protected_last=3)
CITRUS = dataclasses.replace(
    OWN, budget=24, protected_last=6, warm_start=False, positions="shifted", protocol="citrus"
)


def rule(method):
    return RoCoRule(
        method.budget,
        method.sink,
        method.recent_ratio,
        method.decode_recent_ratio,
        method.protected_last,
        method.warm_start,
    )


@pytest.fixture(scope="module")
def own():
    return tiny_engine(OWN, chunk=8)


def test_x22_ragged_rows_keep_what_each_keeps_alone(own):
    compare(own, rule(OWN), answers=ANSWERS, sums=3)


@pytest.mark.thorough
def test_x22_as_a_baseline_of_citrus():
    engine = tiny_engine(CITRUS, config=tiny_config(num_layers=1), chunk=8)
    compare(engine, rule(CITRUS), CONTEXTS, QUESTIONS, sums=3, until="query")


@pytest.mark.thorough
def test_a_mesh_keeps_what_one_device_keeps():
    method = dataclasses.replace(OWN, recent_ratio=0.5)
    engine = tiny_engine(method, config=tiny_config(num_layers=1), mesh=make_mesh(2, 2, 2))
    compare(engine, rule(method), sums=3)


def test_rc_1_x1_a_budget_for_all_is_full_attention(own):
    row = CONTEXTS[1] + ANSWERS[1]
    expected = full_logits(own, row)
    at = 0
    for step in steps(own, CONTEXTS, NOTHING, ANSWERS):
        size = int(step.valid[1])
        np.testing.assert_allclose(step.logits[1, :size], expected[at : at + size], atol=1e-5)
        at += size
    assert at == len(row)


def test_rc_2_x9_with_all_in_scope_it_is_h2o_normalized():
    robust = RoCo(budget=16, chunk=8, sink=0, protected_last=0, scope="all")
    mean = H2O(budget=16, chunk=8, recent=0, normalize=True)
    config = tiny_config(num_layers=1)
    engines = [tiny_engine(method, config=config, chunk=8) for method in (robust, mean)]
    runs = (steps(engine, CONTEXTS, NOTHING) for engine in engines)
    for a, b in zip(*runs, strict=True):
        assert kept_tokens(a.caches) == kept_tokens(b.caches)
        for row, size in enumerate(a.valid):
            np.testing.assert_allclose(a.logits[row, :size], b.logits[row, :size], atol=1e-5)


def test_rc_3_counts_are_the_queries_since_a_token_joined(own):
    for step in steps(own, CONTEXTS, NOTHING, ANSWERS):
        for cache in step.caches:
            token, sums = np.asarray(cache.token), np.asarray(cache.statistics)
            for row, length in enumerate(np.asarray(cache.length)):
                since = int(cache.position[row]) - token[row, :, :length]
                np.testing.assert_array_equal(sums[row, :, :length, 2], since)


def test_rc_4_statistics_without_eviction_do_not_depend_on_the_chunk(own):
    """Chunks of 8 and 1, then tokens one by one, against the whole text at once."""
    row = CONTEXTS[1] + ANSWERS[1]
    expected = []

    def attend(layer, q, k, v):
        at = np.arange(len(q))
        p = probabilities(rope(q, at, THETA), rope(k, at, THETA), at[:, None] >= at[None])
        mean = p.reshape(k.shape[1], -1, *p.shape[1:]).mean(1)
        count = np.broadcast_to(len(q) - at, (k.shape[1], len(q)))
        expected.append(np.stack([mean.sum(1), (mean**2).sum(1), count], axis=-1))
        return weighted_values(p, v)

    forward(own.config, oracle_params(own), row, attend)
    *_, last = steps(own, CONTEXTS, NOTHING, ANSWERS)
    for cache, sums in zip(last.caches, expected, strict=True):
        got = np.asarray(cache.statistics)[1, :, : len(row)]
        np.testing.assert_allclose(got, sums, atol=1e-5)


def test_a_second_question_and_a_saved_context(own, tmp_path):
    ask_twice(own, tmp_path)


def test_bad_settings():
    for settings, said in [
        ({"sink": -1}, "roco: sink must be at least 0, got -1"),
        ({"protected_last": -2}, "roco: protected_last must be at least 0, got -2"),
        ({"recent_ratio": 1.0}, "roco: recent_ratio must be at least 0 and below 1, got 1.0"),
        ({"decode_recent_ratio": -0.1}, "roco: decode_recent_ratio must be at least 0"),
        ({"budget": 13}, "budget 13 leaves 13 tokens, but the method always keeps 14"),
        (
            {"budget": 32, "chunk": 19, "protocol": "citrus"},
            "budget 32 less chunk 19 leaves 13 tokens, but the method always keeps 14",
        ),
    ]:
        with pytest.raises(ConfigError, match=said):
            RoCo(**settings)
