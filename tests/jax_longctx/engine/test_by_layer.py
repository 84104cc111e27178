"""Programs of one layer each: the same answers, and one program for all layers that are alike."""

import collections
import contextlib

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.contract import CHUNK_ROWS, RowGroup, Segment
from jax_longctx.engine import Sampling, programs
from jax_longctx.engine.scoring import loglikelihoods
from jax_longctx.methods import Full, SnapKV
from jax_longctx.sharding import make_mesh
from tests.support import random_rows, tiny_config, tiny_engine

ROWS, QUESTIONS = random_rows([45, 9], seed=3), random_rows([5, 2], seed=4)


@contextlib.contextmanager
def compilations():
    """How often each function is compiled meanwhile."""
    found = collections.Counter()

    def listen(event, seconds, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            found[about["fun_name"]] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def answers(engine, **options):
    context = engine.prefill(ROWS, reserve=24)
    rows = [[] for _ in ROWS]
    for block in engine.stream(context, QUESTIONS, max_tokens=12, **options):
        for row, new in zip(rows, block, strict=True):
            row.extend(new)
    return rows


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        pytest.param(Full(), (2, 2, 2), id="full", marks=pytest.mark.slow),
        pytest.param(SnapKV(budget=16, window=4), (1, 1, 1), id="snapkv", marks=pytest.mark.slow),
    ],
)
def test_answers_are_those_of_whole_programs(method, sizes):
    mesh = make_mesh(*sizes)
    whole, by_layer = (
        tiny_engine(method, mesh=mesh, chunk=16, by_layer=by_layer) for by_layer in (False, True)
    )
    sampling = Sampling(temperature=0.8, repetition_penalty=1.3, seed=5)
    expected = answers(whole, sampling=sampling)
    assert answers(by_layer, sampling=sampling) == expected
    # A row's end ends it; the other goes on.
    stop = expected[0][3]
    ended = answers(by_layer, sampling=sampling, stop_ids=[stop])
    assert ended == answers(whole, sampling=sampling, stop_ids=[stop])
    assert ended[0] == expected[0][: expected[0].index(stop) + 1]


@pytest.mark.slow
def test_given_text_has_the_likelihoods_of_whole_programs():
    whole, by_layer = (tiny_engine(chunk=16, by_layer=by_layer) for by_layer in (False, True))
    for expected, found in zip(whole.score(ROWS), by_layer.score(ROWS), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    told, heard = (loglikelihoods(engine, ROWS, QUESTIONS) for engine in (whole, by_layer))
    for expected, found in zip(told, heard, strict=True):
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


def test_layers_that_are_alike_share_a_program_and_take_their_caches():
    windows = (7, None, 7, None, None)
    engine = tiny_engine(config=tiny_config(num_layers=5, windows=windows), by_layer=True)
    caches = programs.init_caches(engine.setup, 1, 128, 0)
    tokens, ends = np.ones((1, 24), np.int32), np.array([True])
    segment = Segment(
        tokens, np.array([[24]], np.int32), ends, "context", (RowGroup(CHUNK_ROWS, 0, 24),)
    )
    total = jnp.array([24], jnp.int32)
    with compilations() as compiled:
        new, _ = programs.run_segment(
            engine.setup, engine.params, caches, segment, total, None, "all"
        )
    assert compiled["jit(_through_layer)"] == 2
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves([cache.k for cache in caches]))
    finished = programs.finish_context(engine.setup, new, total, 0)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves([cache.k for cache in new]))
    assert [int(cache.length[0]) for cache in finished] == [24] * 5
