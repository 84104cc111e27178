import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.caches import BudgetCache
from jax_longctx.contract import LayerContext, chunk_segments
from jax_longctx.engine.capacity import read_bytes, staged_caches
from jax_longctx.errors import ConfigError
from jax_longctx.methods.h2o import H2O
from jax_longctx.methods.roco import RoCo
from jax_longctx.methods.streaming_llm import StreamingLLM
from jax_longctx.methods.tova import TOVA
from jax_longctx.models.rope import RopeConfig
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.evicting import (
    ANSWERS,
    CONTEXTS,
    NOTHING,
    QUESTIONS,
    compare,
    kept_tokens,
)
from tests.jax_longctx.methods.harness import ask_twice, check_rows, full_logits, steps
from tests.jax_longctx.methods.oracles.evictors import (
    THETA,
    H2ORule,
    RoCoRule,
    StreamingRule,
    TOVARule,
)
from tests.support import random_rows, tiny_config, tiny_engine

OWN = {
    "h2o": H2O(budget=16, recent=5, chunk=8),
    "tova": TOVA(budget=16, chunk=8),
    "roco": RoCo(budget=16, chunk=8, sink=2, recent_ratio=0.2, protected_last=3),
    # One layer, whose keys do not depend on what was dropped before them.
    "streaming-llm": StreamingLLM(budget=16, sink=3, chunk=1),
}
# In CItruS's setting, to be its baselines.
CITRUS = {
    "h2o": H2O(budget=24, chunk=8, over_group="max", positions="shifted", protocol="citrus"),
    "tova": TOVA(budget=24, chunk=8, positions="shifted", protocol="citrus"),
    "roco": RoCo(
        **{"budget": 24, "chunk": 8, "sink": 2, "recent_ratio": 0.2, "protected_last": 6},
        **{"positions": "shifted", "protocol": "citrus"},
    ),
    "streaming-llm": StreamingLLM(budget=24, sink=3, chunk=8, protocol="citrus"),
}
# Settings that a mesh must see.
ON_A_MESH = {
    "h2o": dataclasses.replace(OWN["h2o"], over_group="max"),
    "tova": OWN["tova"],
    "roco": dataclasses.replace(OWN["roco"], recent_ratio=0.5),
    "streaming-llm": StreamingLLM(budget=16, sink=3, chunk=8, positions="true"),
}
RULES = {H2O: H2ORule, TOVA: TOVARule, RoCo: RoCoRule, StreamingLLM: StreamingRule}


@functools.cache
def engine_of(method, layers=1, mesh=(1, 1, 1)):
    config = tiny_config(num_layers=layers)
    return tiny_engine(method, config=config, mesh=make_mesh(*mesh), chunk=method.chunk)


def own(name):
    return engine_of(OWN[name], layers=1 if name == "streaming-llm" else 2)


def each(quick=tuple(OWN)):
    thorough = pytest.mark.thorough
    cases = [name if name in quick else pytest.param(name, marks=thorough) for name in OWN]
    return pytest.mark.parametrize("name", cases)


def with_questions(name):
    """In CItruS's setting positions are shifted, and contexts are read beside questions."""
    return (own(name), NOTHING) if name in OWN else (engine_of(CITRUS["h2o"]), QUESTIONS)


@each()
def test_x22_ragged_rows_keep_what_each_keeps_alone(name):
    """Also H2-2, RC-4: statistics without eviction are full attention's columns in any chunks.

    RC-3: counts are the queries since a token joined. SL-2: sinks and window at their slots.
    """
    compare(own(name), RULES[type(OWN[name])](OWN[name]), answers=ANSWERS)


@each(quick=("h2o", "tova"))
def test_a_learned_sink_takes_its_share_of_the_mass(name):
    method = OWN[name]
    config = tiny_config(num_layers=1, sinks=True)
    engine = tiny_engine(method, config=config, chunk=method.chunk)
    compare(engine, RULES[type(method)](method), answers=ANSWERS)


def test_sl_3_sinks_alone():
    method = StreamingLLM(budget=4, sink=4, chunk=1)
    oracles = compare(engine_of(method), StreamingRule(method))
    assert [list(head) for head in oracles[0].layers[0].token] == [[0, 1, 2, 3]] * 2


@each(quick=("streaming-llm",))
def test_x22_as_a_baseline_of_citrus(name):
    method = CITRUS[name]
    compare(engine_of(method), RULES[type(method)](method), CONTEXTS, QUESTIONS, ANSWERS)


@each(quick=("tova",))
def test_a_mesh_keeps_what_one_device_keeps(name):
    method = ON_A_MESH[name]
    compare(engine_of(method, mesh=(2, 2, 2)), RULES[type(method)](method))


@pytest.mark.parametrize("name", [*OWN, pytest.param("citrus", marks=pytest.mark.slow)])
def test_h2_1_tv_1_rc_1_sl_1_x1_x20_a_budget_for_all_is_full_attention(name):
    engine, questions = with_questions(name)
    row = [[part[1]] for part in (CONTEXTS, questions, ANSWERS)]
    seen = steps(engine, CONTEXTS, questions, ANSWERS)
    got = [s.logits[1, : s.valid[1]] for s in seen if s.segment.role != "probe"]
    check_rows([np.concatenate(got)], full_logits(engine, row), atol=1e-5)


@pytest.mark.parametrize("name", [*OWN, "citrus"])
def test_a_second_question_and_a_saved_context(name, tmp_path):
    engine, questions = with_questions(name)
    others = questions, random_rows([6] * 4, seed=3)
    ask_twice(engine, tmp_path, (CONTEXTS, questions, ANSWERS), others)


def test_defaults():
    assert (H2O(budget=16).window, H2O(budget=300, protocol="citrus").window) == (8, 0)


def test_h2_3_x2_sl_4_without_heavy_hitters_h2o_is_streaming_llm():
    methods = (
        H2O(budget=16, recent=16, chunk=1, positions="shifted"),
        StreamingLLM(budget=16, sink=0, chunk=1),
    )
    both = (steps(engine_of(method), CONTEXTS, NOTHING) for method in methods)
    for a, b in zip(*both, strict=True):
        assert kept_tokens(a.caches) == kept_tokens(b.caches)
        for row, size in enumerate(a.valid):
            np.testing.assert_allclose(a.logits[row, :size], b.logits[row, :size], atol=1e-5)


def test_h2_5_one_query_head_a_kv_head_leaves_nothing_to_reduce():
    config = tiny_config(num_kv_heads=4, num_layers=1)
    # H2-4: without a recent window every token competes, the newest too.
    method = H2O(budget=16, recent=0, chunk=8, over_group="max")
    mean = H2ORule(dataclasses.replace(method, over_group="mean"))
    oracles = compare(tiny_engine(method, config=config, chunk=8), mean)
    newest = [head[-1] for head in oracles[0].layers[0].token]
    assert min(newest) < len(CONTEXTS[0]) - 1


def test_an_evicting_step_reads_the_statistics_too():
    # Two heads of 16 slots, 8 numbers each for key and value, then token and sum; two row numbers.
    # In CItruS's setting 24 slots and 128 for question and answer, and nothing is ranked any more.
    both = own("h2o"), engine_of(CITRUS["h2o"])
    for engine, numbers in zip(both, (4 * 2 * 16 * 18 + 2 * 4, 4 * 2 * 152 * 2 * 8), strict=True):
        answering = staged_caches(engine.setup, 4, 100, 32)[2]
        assert read_bytes(engine.setup, answering, 100) == engine.config.num_layers * 4 * numbers


@pytest.mark.parametrize("positions", ["shifted", pytest.param("true", marks=pytest.mark.slow)])
def test_x22_an_answer_turns_the_ring_of_newest_tokens_several_times(positions):
    method = StreamingLLM(budget=8, sink=3, chunk=4, positions=positions)
    engine = engine_of(method)
    rows, answers = random_rows([13, 2, 0, 8], seed=4), random_rows([25] * 4, seed=5)
    oracles = compare(engine, StreamingRule(method), rows, NOTHING, answers)
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
