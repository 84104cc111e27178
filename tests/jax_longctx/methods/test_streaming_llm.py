"""StreamingLLM against its definition in numpy; SL-4 is with H2O's tests."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.caches import BudgetCache
from jax_longctx.contract import LayerContext, chunk_segments
from jax_longctx.errors import ConfigError
from jax_longctx.methods import TOVA, StreamingLLM
from jax_longctx.models.config import RopeConfig
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.evicting import (
    ANSWERS,
    CONTEXTS,
    NOTHING,
    QUESTIONS,
    ask_twice,
    compare,
    full_logits,
    oracle_params,
)
from tests.jax_longctx.methods.harness import steps
from tests.jax_longctx.methods.oracles.evictors import THETA, StreamingRule
from tests.oracle import forward, probabilities, rope, weighted_values
from tests.support import random_rows, tiny_config, tiny_engine

OWN = StreamingLLM(budget=16, sink=3, chunk=1)


@pytest.fixture(scope="module")
def own():
    return tiny_engine(OWN, config=tiny_config(num_layers=1), chunk=1)


def test_x22_ragged_rows_keep_what_each_keeps_alone(own):
    oracles = compare(own, StreamingRule(3), answers=ANSWERS)
    for layer in oracles[0].layers:
        assert [list(head) for head in layer.token] == [[0, 1, 2, *range(30, 43)]] * 2


@pytest.mark.parametrize("positions", ["shifted", "true"])
def test_x22_an_answer_turns_the_ring_of_newest_tokens_several_times(positions):
    """Rows whose first tokens, which never leave, come with the answer are among them."""
    method = StreamingLLM(budget=8, sink=3, chunk=4, positions=positions)
    engine = tiny_engine(method, config=tiny_config(num_layers=1), chunk=4)
    rows, answers = random_rows([13, 2, 0, 8], seed=4), random_rows([25] * 4, seed=5)
    oracles = compare(engine, StreamingRule(3), rows, NOTHING, answers)
    for oracle, row in zip(oracles, rows, strict=True):
        end = len(row) + 25
        assert list(oracle.layers[0].token[0]) == [0, 1, 2, *range(end - 5, end)]


@pytest.mark.thorough
def test_a_rule_whose_scores_have_another_shape_is_refused():
    class Flat(TOVA):
        def rank(self, seen):
            return seen.order[:, 0]

    with pytest.raises(ConfigError, match=r"Flat.rank gave scores of shape .*expected \[B, K, U\]"):
        tiny_engine(Flat(budget=16, chunk=8)).prefill(random_rows([40]), reserve=8)


def test_x22_as_a_baseline_of_citrus():
    method = StreamingLLM(budget=24, sink=3, chunk=8, protocol="citrus")
    engine = tiny_engine(method, config=tiny_config(num_layers=1), chunk=8)
    oracles = compare(engine, StreamingRule(3), CONTEXTS, QUESTIONS, until="query")
    assert list(oracles[0].layers[0].token[0]) == [0, 1, 2, *range(24, 37)]


@pytest.mark.thorough
def test_a_mesh_keeps_what_one_device_keeps_at_true_positions():
    method = StreamingLLM(budget=16, sink=3, chunk=8, positions="true")
    engine = tiny_engine(method, config=tiny_config(num_layers=1), mesh=make_mesh(2, 2, 2))
    compare(engine, StreamingRule(3))


def test_sl_1_x1_a_budget_for_all_is_full_attention(own):
    expected = full_logits(own, CONTEXTS[1] + ANSWERS[1])
    got = [s.logits[1, 0] for s in steps(own, CONTEXTS, NOTHING, ANSWERS) if s.valid[1]]
    np.testing.assert_allclose(np.stack(got), expected, atol=1e-5)


def test_sl_2_each_token_sees_sinks_and_window_at_their_slots(own):
    """In one layer: there a token's key does not depend on what was dropped before it."""

    def attend(layer, q, k, v):
        out = []
        for t in range(len(q)):
            seen = [s for s in range(t) if s < 3 or s >= t - 13] if t > 16 else list(range(t))
            slots = np.arange(len(seen) + 1)
            keys, values = k[[*seen, t]], v[[*seen, t]]
            p = probabilities(
                rope(q[t : t + 1], slots[-1:], THETA),
                rope(keys, slots, THETA),
                np.ones((1, len(slots)), bool),
            )
            out.append(weighted_values(p, values)[0])
        return np.stack(out)

    check_row(own, CONTEXTS[0], attend)


def test_sl_3_sinks_alone():
    engine = tiny_engine(
        StreamingLLM(budget=4, sink=4, chunk=1), config=tiny_config(num_layers=1), chunk=1
    )

    def attend(layer, q, k, v):
        # The first four tokens at their places, and the token itself in the fifth from then on.
        at = np.minimum(np.arange(len(q)), 4)
        seen = (np.arange(len(q))[None] <= at[:, None]) & (np.arange(len(q))[None] < 4)
        seen |= np.eye(len(q), dtype=bool)
        p = probabilities(rope(q, at, THETA), rope(k, at, THETA), seen)
        return weighted_values(p, v)

    check_row(engine, CONTEXTS[0], attend)


def check_row(engine, row, attend):
    expected = forward(engine.config, oracle_params(engine), row, attend)
    got = [step.logits[0, 0] for step in steps(engine, CONTEXTS, NOTHING)]
    np.testing.assert_allclose(np.stack(got), expected, atol=2e-5)


def test_a_second_question_and_a_saved_context(own, tmp_path):
    ask_twice(own, tmp_path)


def test_bad_settings():
    for settings, said in [
        ({"sink": -1}, "streaming-llm: sink must be at least 0, got -1"),
        ({"budget": 4, "sink": 5}, "budget 4 leaves 4 tokens, but the method always keeps 5"),
        ({"chunk": 0}, "streaming-llm: chunk must be at least 1, got 0"),
        (
            {"budget": 16, "chunk": 13, "protocol": "citrus"},
            "budget 16 less chunk 13 leaves 3 tokens, but the method always keeps 4",
        ),
    ]:
        with pytest.raises(ConfigError, match=said):
            StreamingLLM(**settings)


@pytest.mark.parametrize("tokens", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_rotary_base_follows_the_positions_not_the_text(tokens):
    """A text of 1000 tokens stretches nothing where positions stay below the trained length."""
    rng = np.random.default_rng(0)
    shapes = [(1, tokens, 4, 8), *[(1, tokens, 2, 8)] * 2, *[(1, 2, 13, 8)] * 2]
    q, k, v, *held = (jnp.array(rng.normal(size=shape), jnp.float32) for shape in shapes)
    count = jnp.array([5], jnp.int32)
    cache = BudgetCache(*held, jnp.zeros((1, 2, 13), jnp.int32), None, count, count)

    def read(kind, trained, positions="shifted"):
        rope = RopeConfig(kind=kind, theta=THETA, trained_length=trained, factor=4.0)
        ctx = LayerContext(scale=1.0, window=None, rope=rope, total=jnp.array([1000]))
        method = StreamingLLM(budget=16, chunk=4, protocol="citrus", positions=positions)
        (segment,) = jax.tree.map(jnp.array, list(chunk_segments([[0] * tokens], tokens, "query")))
        return method.attend((q, k, v), cache, segment, ctx)[0][0]

    expected = read("default", 20)
    np.testing.assert_allclose(read("dynamic", 20), expected, atol=1e-6)
    for other in (read("dynamic", 19), read("dynamic", 20, "true")):
        assert np.abs(other - expected).max() > 1e-3


def test_positions_beyond_the_trained_ones_are_refused():
    said = r"budget 125 \+ chunk 4 = 129 positions, more than the 128 that the model was trained to"
    with pytest.raises(ConfigError, match=said):
        StreamingLLM(budget=125, chunk=4).validate(tiny_config())
    StreamingLLM(budget=124, chunk=4).validate(tiny_config())
    StreamingLLM(budget=125, chunk=4, positions="true").validate(tiny_config())


def test_a_window_that_could_hide_kept_tokens_is_refused():
    sliding = tiny_config(windows=(None, 20))
    for method, said in [
        (StreamingLLM(budget=8, sink=2, chunk=4, positions="true"), "does not support; use"),
        (StreamingLLM(budget=17, sink=2, chunk=4), "budget 17 and chunk 4 exceed the model's"),
    ]:
        with pytest.raises(ConfigError, match=said):
            method.validate(sliding)
    StreamingLLM(budget=16, sink=2, chunk=4).validate(sliding)
