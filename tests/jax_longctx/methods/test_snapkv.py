import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.engine.prefill import finish_question
from jax_longctx.methods.snapkv import SnapKV
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import (
    FedRows,
    check_rows,
    full_logits,
    last_logits,
    oracle_params,
    steps,
    under,
)
from tests.jax_longctx.methods.oracles.partial_cache import PartialDecoder
from tests.oracle import forward, probabilities, rope, weighted_values
from tests.support import random_rows, tiny_config, tiny_engine

# With the questions: above the budget, below window and budget, equal to the budget, above it.
CONTEXTS = random_rows([37, 1, 10, 20])
QUESTIONS = random_rows([3, 2, 2, 1], seed=1)
ANSWERS = random_rows([9, 9, 9, 9], seed=2)
PROMPTS = [[*context, *question] for context, question in zip(CONTEXTS, QUESTIONS, strict=True)]
TOTAL = jnp.array([len(row) for row in CONTEXTS], jnp.int32)
METHOD = SnapKV(budget=12, window=4, kernel=3)


def oracle(engine, row, **changes):
    method = dataclasses.replace(METHOD, **changes)
    return PartialDecoder(
        engine.config,
        oracle_params(engine),
        PROMPTS[row],
        window=method.window,
        evict=False,
        budget=method.budget,
        kernel=method.kernel,
        kind=method.pool,
        over=method.over_group,
    )


def in_order(order, limits, size=None):
    """Each row's and head's tokens, the first to leave first."""
    tokens = np.asarray(order.tokens(limits, limits if size is None else size))
    written = np.asarray(order.count + order.pushed)
    lists = []
    for row, count, limit in zip(tokens, written, np.broadcast_to(limits, 4), strict=True):
        turn = [slot % limit for slot in range(max(count - limit, 0), count)]
        lists.append([[int(head[slot]) for slot in turn] for head in row])
    return lists


@pytest.fixture(scope="module")
def whole():
    engine = tiny_engine(METHOD, chunk=16)
    *_, last = steps(engine, CONTEXTS, QUESTIONS, reserve=16)
    return engine, last.caches


def decoded(engine, caches, **changes):
    """Logits and caches, token by token of the answers, under a variant of the method."""
    engine = under(engine, dataclasses.replace(METHOD, **changes))
    caches = finish_question(engine.setup, caches, TOTAL, reserve=16)
    for step in FedRows(engine, 128, 16, TOTAL, caches).tokens(ANSWERS):
        yield last_logits(step), step.caches


def compare(engine, caches):
    oracles = [oracle(engine, row) for row in range(4)]
    for column, (logits, held) in enumerate(decoded(engine, caches)):
        kept = [in_order(cache, 128) for cache in held]
        for row, expected in enumerate(oracles):
            np.testing.assert_allclose(logits[row], expected.step(ANSWERS[row][column]), atol=1e-4)
            for layer, lists in enumerate(kept):
                assert [sorted(ids) for ids in lists[row]] == expected.read[layer]


def test_sn_5_sn_1_rows_equal_numpy_and_with_room_for_all_full_attention(whole):
    # Also X21 (the prompt in chunks) and X22: each row is compared with numpy's, alone.
    compare(*whole)
    # X1. (A budget that equals a prompt is among the rows above.)
    engine, caches = whole
    full = full_logits(engine, (CONTEXTS, QUESTIONS, ANSWERS))
    for column, (logits, _) in enumerate(decoded(engine, caches, budget=60)):
        check_rows(logits, [row[column - 9] for row in full])


def test_a_learned_sink_takes_its_share_of_the_mass():
    engine = tiny_engine(METHOD, config=tiny_config(sinks=True), chunk=16)
    *_, last = steps(engine, CONTEXTS, QUESTIONS, reserve=16)
    compare(engine, last.caches)


@pytest.mark.thorough
def test_a_mesh_equals_numpy():
    engine = tiny_engine(METHOD, mesh=make_mesh(2, 2, 2), chunk=16)
    *_, last = steps(engine, CONTEXTS, QUESTIONS, reserve=16)
    compare(engine, last.caches)


@pytest.mark.parametrize(
    "changes",
    [
        {"pool": "avg", "kernel": 5},
        {"over_group": "first"},
        {"over_group": "layer", "kernel": 1},
        {"budget": 5},
        *(
            pytest.param(changes, marks=pytest.mark.slow)
            for changes in (
                {"kernel": 1},
                {"pool": "avg", "over_group": "max"},
                {"over_group": "max", "kernel": 7},
            )
        ),
    ],
    ids=str,
)
def test_sn_2_what_stays_equals_numpy(whole, changes):
    engine, caches = whole
    method = dataclasses.replace(METHOD, **changes)
    setup = dataclasses.replace(engine.setup, method=method)
    # A layer's choice depends on its own cache alone; the second is enough.
    (cache,) = finish_question(setup, caches[1:], TOTAL, reserve=8)
    lists = in_order(cache, method.budget + 1)
    assert lists == [oracle(engine, row, **changes).lists[1] for row in range(4)]


def test_sn_3_x10_window_1_over_the_layer_is_tova_at_once(whole):
    """TOVA keeps the best by the last query's probability, mean over all heads, itself always."""
    engine, caches = whole
    method = SnapKV(budget=9, window=1, kernel=1, over_group="layer")
    setup = dataclasses.replace(engine.setup, method=method)
    one = {"queries": caches[1].queries[:, -1:], "lse": caches[1].lse[:, -1:]}
    newest = (dataclasses.replace(caches[1], **one),)
    (kept,) = finish_question(setup, newest, TOTAL, reserve=8)
    expected = []

    def attend(layer, q, k, v):
        at = np.arange(len(q))
        p = probabilities(rope(q, at, 1e4), rope(k, at, 1e4), at[:, None] >= at[None, :])
        scores = p[:, -1].mean(0)
        scores[-1] = np.inf
        expected.append(sorted(np.argsort(-scores, kind="stable")[:9].tolist()))
        return weighted_values(p, v)

    for prompt, heads in zip(PROMPTS, in_order(kept, 128), strict=True):
        forward(engine.config, oracle_params(engine), prompt, attend)
        assert all(sorted(ids) == expected[-1] for ids in heads)
