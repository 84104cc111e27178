"""SnapKV against numpy: the tokens kept and left, ragged rows, meshes, questions in turn."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.contract import decode_segment
from jax_longctx.engine import programs
from jax_longctx.errors import ConfigError
from jax_longctx.methods import make_method
from jax_longctx.methods.snapkv import SnapKV
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import steps
from tests.jax_longctx.methods.oracles.partial_cache import PartialDecoder, choose
from tests.oracle import causal_attend, forward, probabilities, rope, to_numpy
from tests.support import random_rows, tiny_config, tiny_engine

# With the questions: above the budget, below window and budget, equal to the budget, above it.
CONTEXTS = random_rows([37, 1, 10, 20])
QUESTIONS = random_rows([3, 2, 2, 1], seed=1)
ANSWERS = random_rows([9, 9, 9, 9], seed=2)
PROMPTS = [[*context, *question] for context, question in zip(CONTEXTS, QUESTIONS, strict=True)]
TOTAL = jnp.array([len(row) for row in CONTEXTS], jnp.int32)
METHOD = SnapKV(budget=12, window=4, kernel=3, decode_policy="fifo")


def oracle_params(engine):
    return to_numpy(jax.device_get(engine.params))


def oracle(engine, row, **changes):
    method = dataclasses.replace(METHOD, **changes)
    return PartialDecoder(
        engine.config,
        oracle_params(engine),
        PROMPTS[row],
        window=method.window,
        evict=method.decode_policy == "fifo",
        budget=method.budget,
        kernel=method.kernel,
        kind=method.pool,
        over=method.over_group,
        expand=method.expand_kv,
    )


def in_order(order, limit):
    """Each row's and head's tokens, the first to leave first."""
    tokens = np.asarray(order.tokens(limit, limit))
    written = np.asarray(order.count + order.pushed)
    lists = []
    for row, count in zip(tokens, written, strict=True):
        turn = [slot % limit for slot in range(max(count - limit, 0), count)]
        lists.append([[int(head[slot]) for slot in turn] for head in row])
    return lists


@pytest.fixture(scope="module")
def whole():
    """An engine, and its caches after the questions, on one device."""
    engine = tiny_engine(METHOD, chunk=16)
    *_, last = steps(engine, CONTEXTS, QUESTIONS, reserve=16)
    return engine, last.caches


def decoded(engine, caches, **changes):
    """Logits and caches, token by token of the answers, under a variant of the method."""
    setup = dataclasses.replace(engine.setup, method=dataclasses.replace(METHOD, **changes))
    caches = programs.finish_question(setup, caches, TOTAL, reserve=16)
    ones, no = np.ones((4, 1), np.int32), np.zeros(4, bool)
    for column in zip(*ANSWERS, strict=True):
        tokens = np.array(column, np.int32)[:, None]
        segment = decode_segment(tokens, ones, no, "")
        caches, logits = programs.run_segment(
            setup, engine.params, caches, segment, TOTAL, None, "all"
        )
        yield np.asarray(logits)[:, 0], caches


def compare(engine, caches, **changes):
    """Every row with numpy's, which runs each alone; returns the last lists."""
    method = dataclasses.replace(METHOD, **changes)
    limit = method.budget + 1 if method.decode_policy == "fifo" else 128
    oracles = [oracle(engine, row, **changes) for row in range(4)]
    kept = []
    for column, (logits, held) in enumerate(decoded(engine, caches, **changes)):
        kept = [in_order(cache, limit) for cache in held]
        for row, expected in enumerate(oracles):
            np.testing.assert_allclose(logits[row], expected.step(ANSWERS[row][column]), atol=1e-4)
            for layer, lists in enumerate(kept):
                assert [sorted(ids) for ids in lists[row]] == expected.read[layer]
                if method.decode_policy == "fifo":
                    assert [ids[-method.budget :] for ids in lists[row]] == expected.lists[layer]
    return kept


def test_sn_5_ragged_rows_equal_numpy_row_by_row(whole):
    """Also X21 (the prompt in chunks) and X22: each row is compared with numpy's, alone."""
    kept = compare(*whole)
    # The longest prompt loses tokens while it is answered.
    assert len(kept[0][0][0]) == METHOD.budget + 1


@pytest.mark.thorough
def test_a_mesh_equals_numpy():
    engine = tiny_engine(METHOD, mesh=make_mesh(2, 2, 2), chunk=16)
    *_, last = steps(engine, CONTEXTS, QUESTIONS, reserve=16)
    compare(engine, last.caches)


def test_grow_keeps_every_new_token(whole):
    kept = compare(*whole, decode_policy="grow")
    assert len(kept[0][0][0]) == METHOD.budget + 9


@pytest.mark.thorough
def test_every_query_head_has_its_own_cache_as_in_the_released_code(whole):
    kept = compare(*whole, expand_kv=True, decode_policy="grow")
    heads = [set(ids) for ids in kept[0][0]]
    assert len(heads) == 4
    assert heads[0] != heads[1]


@pytest.mark.parametrize(
    "changes",
    [
        {"kernel": 1},
        {"pool": "avg", "kernel": 5},
        {"pool": "avg", "over_group": "max"},
        {"over_group": "max", "kernel": 7},
        {"over_group": "first"},
        {"over_group": "layer", "kernel": 1},
        {"budget": 5},
        {"expand_kv": True, "pool": "avg"},
    ],
    ids=str,
)
def test_sn_2_what_stays_equals_numpy(whole, changes):
    """`kernel=1` is the raw top-k (SN-2)."""
    engine, caches = whole
    method = dataclasses.replace(METHOD, **changes)
    setup = dataclasses.replace(engine.setup, method=method)
    # A layer's choice depends on its own cache alone; the second is enough.
    (cache,) = programs.finish_question(setup, caches[1:], TOTAL, reserve=8)
    lists = in_order(cache, method.budget + 1)
    assert lists == [oracle(engine, row, **changes).lists[1] for row in range(4)]


def test_sn_1_a_budget_that_holds_all_is_full_attention(whole):
    """X1. (A budget that equals a prompt is among the rows above.)"""
    engine, caches = whole
    params = oracle_params(engine)
    for column, (logits, _) in enumerate(decoded(engine, caches, budget=60)):
        for row, prompt in enumerate(PROMPTS):
            tokens = prompt + ANSWERS[row][: column + 1]
            expected = forward(engine.config, params, tokens, causal_attend(1e4))[-1]
            np.testing.assert_allclose(logits[row], expected, atol=1e-4)


def test_sn_3_x10_window_1_over_the_layer_is_tova_at_once(whole):
    """TOVA keeps the best by the last query's probability, mean over all heads, itself always."""
    engine, caches = whole
    method = SnapKV(budget=9, window=1, kernel=1, over_group="layer")
    setup = dataclasses.replace(engine.setup, method=method)
    one = {"queries": caches[1].queries[:, -1:], "lse": caches[1].lse[:, -1:]}
    (kept,) = programs.finish_question(
        setup, (dataclasses.replace(caches[1], **one),), TOTAL, reserve=8
    )
    for row, prompt in enumerate(PROMPTS):
        expected = {}

        def attend(layer, q, k, v, expected=expected):
            at = np.arange(len(q))
            p = probabilities(rope(q, at, 1e4), rope(k, at, 1e4), at[:, None] >= at[None, :])
            scores = p[:, -1].mean(0)
            scores[-1] = np.inf
            expected[layer] = sorted(np.argsort(-scores, kind="stable")[:9].tolist())
            return causal_attend(1e4)(layer, q, k, v)

        forward(engine.config, oracle_params(engine), prompt, attend)
        assert all(sorted(ids) == expected[1] for ids in in_order(kept, 128)[row])


def test_answering_reads_the_budget():
    """What one step reads does not depend on the context, whose cache is given up."""
    (shape, _) = programs.cache_shapes(tiny_engine(METHOD).setup, 2, 256, 8)
    cache = METHOD.init_cache(shape)
    # keys and values x 2 rows x 2 heads x 12 tokens x 8 x float32
    assert METHOD.read_bytes(cache, 200) == 2 * 2 * 2 * 12 * 8 * 4
    assert METHOD.read_bytes(cache, 7) == 2 * 2 * 2 * 7 * 8 * 4
    expanded = dataclasses.replace(METHOD, expand_kv=True)
    assert expanded.read_bytes(cache, 200) == 2 * 2 * 4 * 12 * 8 * 4


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"budget": "32"}, "budget 32 must exceed window 32; raise budget"),
        ({"window": "0"}, "window must be at least 1, got 0"),
        ({"kernel": "4"}, "kernel must be odd and at least 1, got 4"),
        ({"kernel": "-1"}, "kernel must be odd and at least 1, got -1"),
        (
            {"expand_kv": "true", "over_group": "max"},
            "expand_kv chooses for each query head, so that over_group max has nothing to reduce; "
            "leave over_group away",
        ),
    ],
    ids=str,
)
def test_sn_4_bad_settings_are_refused(settings, said):
    with pytest.raises(ConfigError) as error:
        make_method("snapkv", settings)
    assert str(error.value) == f"snapkv: {said}"


def test_a_sliding_window_is_refused():
    with pytest.raises(ConfigError, match=r"snapkv: .* sliding window of 16 tokens"):
        SnapKV().validate(tiny_config(windows=(None, 16)))


def test_the_oracle_breaks_ties_as_the_specification_does():
    """A plateau of the pool: the older stay, and the younger leave first."""
    p = np.array([[[0.1, 0.2, 0.1, 0.1, 0.5]]])
    how = {"kernel": 3, "kind": "max", "over": "max", "forced": 1}
    assert choose(p, 1, budget=4, **how) == [[2, 1, 0, 4]]
    assert choose(p, 1, budget=3, **how) == [[1, 0, 4]]
