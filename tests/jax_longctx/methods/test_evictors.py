"""Methods that evict by a rule against their definitions in numpy, and their equivalences."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.caches import BudgetCache
from jax_longctx.contract import LayerContext, chunk_segments
from jax_longctx.engine.capacity import read_bytes, staged_caches
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.methods.h2o import H2O
from jax_longctx.methods.roco import RoCo
from jax_longctx.methods.streaming_llm import StreamingLLM
from jax_longctx.methods.tova import TOVA
from jax_longctx.models.config import RopeConfig
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.evicting import (
    ANSWERS,
    CONTEXTS,
    NOTHING,
    QUESTIONS,
    compare,
    full_logits,
    kept_tokens,
    oracle_params,
)
from tests.jax_longctx.methods.harness import ask_twice, steps
from tests.jax_longctx.methods.oracles.evictors import (
    THETA,
    H2ORule,
    RoCoRule,
    StreamingRule,
    TOVARule,
)
from tests.oracle import forward, probabilities, rope, weighted_values
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
    "h2o": H2O(
        budget=24, chunk=8, over_group="max", normalize=True, positions="shifted", protocol="citrus"
    ),
    "tova": TOVA(budget=24, chunk=8, positions="shifted", protocol="citrus"),
    "roco": dataclasses.replace(
        OWN["roco"],
        budget=24,
        protected_last=6,
        warm_start=False,
        positions="shifted",
        protocol="citrus",
    ),
    "streaming-llm": StreamingLLM(budget=24, sink=3, chunk=8, protocol="citrus"),
}
# Settings that a mesh must see, and the statistics that are compared.
ON_A_MESH = {
    "h2o": dataclasses.replace(OWN["h2o"], over_group="max"),
    "tova": dataclasses.replace(OWN["tova"], protect_current=True),
    "roco": dataclasses.replace(OWN["roco"], recent_ratio=0.5),
    "streaming-llm": StreamingLLM(budget=16, sink=3, chunk=8, positions="true"),
}
SUMS = {"h2o": 1, "tova": 0, "roco": 3, "streaming-llm": 0}
ONE_LAYER = tiny_config(num_layers=1)
each_method = pytest.mark.parametrize("name", OWN)


def rule_of(method):
    """The method's rule in numpy."""
    if isinstance(method, H2O):
        recent = method.recent if method.protocol == "own" else 0
        own = method.protocol == "own"
        return H2ORule(recent, method.over_group, normalize=method.normalize, own=own)
    if isinstance(method, TOVA):
        return TOVARule(protect_current=method.protect_current)
    if isinstance(method, StreamingLLM):
        return StreamingRule(method.sink)
    return RoCoRule(
        method.budget,
        method.sink,
        method.recent_ratio,
        method.decode_recent_ratio,
        method.protected_last,
        method.warm_start,
    )


@functools.cache
def engine_of(method, layers=1, mesh=(1, 1, 1)):
    config = tiny_config(num_layers=layers)
    return tiny_engine(method, config=config, mesh=make_mesh(*mesh), chunk=method.chunk)


def own(name):
    return engine_of(OWN[name], layers=1 if name == "streaming-llm" else 2)


@each_method
def test_x22_ragged_rows_keep_what_each_keeps_alone(name):
    oracles = compare(own(name), rule_of(OWN[name]), answers=ANSWERS, sums=SUMS[name])
    for layer in oracles[0].layers:
        if name == "tova":
            assert len({tuple(head) for head in layer.token}) == 1
        if name == "streaming-llm":
            assert [list(head) for head in layer.token] == [[0, 1, 2, *range(30, 43)]] * 2


def but_thorough(quick):
    """The method's case is quick, the others thorough."""
    return [
        name if name == quick else pytest.param(name, marks=pytest.mark.thorough) for name in OWN
    ]


@pytest.mark.parametrize("name", but_thorough("streaming-llm"))
def test_x22_as_a_baseline_of_citrus(name):
    engine, rule = engine_of(CITRUS[name]), rule_of(CITRUS[name])
    if name == "h2o":
        compare(engine, rule, CONTEXTS, QUESTIONS, ANSWERS, 1)
        return
    oracles = compare(engine, rule, CONTEXTS, QUESTIONS, sums=SUMS[name], until="query")
    if name == "streaming-llm":
        assert list(oracles[0].layers[0].token[0]) == [0, 1, 2, *range(24, 37)]
    if name == "tova":
        said = "question has 25 tokens, more than the cache's budget"
        with pytest.raises(InputError, match=said):
            list(steps(engine, CONTEXTS, random_rows([3, 25, 7, 5])))


@pytest.mark.parametrize("name", but_thorough("tova"))
def test_a_mesh_keeps_what_one_device_keeps(name):
    method = ON_A_MESH[name]
    compare(engine_of(method, mesh=(2, 2, 2)), rule_of(method), sums=SUMS[name])


@each_method
def test_h2_1_tv_1_rc_1_sl_1_x1_a_budget_for_all_is_full_attention(name):
    equals_full_attention(own(name), NOTHING)


def test_x20_shifted_positions_without_eviction_are_the_true_ones():
    equals_full_attention(engine_of(CITRUS["h2o"]), QUESTIONS)


def equals_full_attention(engine, questions):
    """Of the row that loses nothing."""
    expected = full_logits(engine, CONTEXTS[1] + questions[1] + ANSWERS[1])
    seen = steps(engine, CONTEXTS, questions, ANSWERS)
    got = [s.logits[1, : s.valid[1]] for s in seen if s.segment.role != "probe"]
    np.testing.assert_allclose(np.concatenate(got), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("method", "layers", "questions"),
    [
        *((OWN[name], 1 if name == "streaming-llm" else 2, NOTHING) for name in OWN),
        (CITRUS["h2o"], 1, QUESTIONS),
    ],
    ids=[*OWN, "citrus"],
)
def test_a_second_question_and_a_saved_context(method, layers, questions, tmp_path):
    rows = CONTEXTS, questions, ANSWERS
    ask_twice(engine_of(method, layers), tmp_path, rows, (questions, random_rows([6] * 4, seed=3)))


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("h2o", {"recent": -1}, "recent must be at least 0, got -1"),
        ("h2o", {"budget": 8, "recent": 9}, "budget 8 leaves 8 tokens, .* always keeps 9"),
        ("h2o", {"budget": 0, "recent": 0}, "budget 0 leaves 0 tokens, .* always keeps 1"),
        *(
            (name, {"chunk": 0}, "chunk must be at least 1, got 0")
            for name in OWN
            if name != "roco"
        ),
        (
            "h2o",
            {"budget": 20, "chunk": 16, "recent": 5, "protocol": "citrus"},
            "budget 20 less chunk 16 leaves 4 tokens, but the method always keeps 5",
        ),
        ("tova", {"budget": 0}, "budget 0 leaves 0 tokens, but the method always keeps 1"),
        (
            "tova",
            {"budget": 16, "chunk": 16, "protocol": "citrus"},
            "16 leaves 0 tokens",
        ),
        ("roco", {"sink": -1}, "sink must be at least 0, got -1"),
        ("roco", {"protected_last": -2}, "protected_last must be at least 0, got -2"),
        ("roco", {"recent_ratio": 1.0}, "recent_ratio must be at least 0 and below 1, got 1.0"),
        ("roco", {"decode_recent_ratio": -0.1}, "decode_recent_ratio must be at least 0"),
        ("roco", {"budget": 13}, "budget 13 leaves 13 tokens, but the method always keeps 14"),
        (
            "roco",
            {"budget": 32, "chunk": 19, "protocol": "citrus"},
            "budget 32 less chunk 19 leaves 13 tokens, but the method always keeps 14",
        ),
        ("streaming-llm", {"sink": -1}, "sink must be at least 0, got -1"),
        ("streaming-llm", {"budget": 4, "sink": 5}, "budget 4 leaves 4 tokens, .* always keeps 5"),
        (
            "streaming-llm",
            {"budget": 16, "chunk": 13, "protocol": "citrus"},
            "budget 16 less chunk 13 leaves 3 tokens, but the method always keeps 4",
        ),
    ],
)
def test_bad_settings(name, settings, said):
    with pytest.raises(ConfigError, match=f"{name}: .*{said}"):
        type(OWN[name])(**settings)


def test_defaults():
    assert (H2O(budget=16).window, H2O(budget=300, protocol="citrus").window) == (8, 0)


# H2O.


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


def test_h2_2_sums_without_eviction_are_the_columns_of_full_attention():
    row, engine = CONTEXTS[1] + ANSWERS[1], own("h2o")
    expected = column_sums(engine, row)
    *_, last = steps(engine, CONTEXTS, NOTHING, ANSWERS)
    for cache, columns in zip(last.caches, expected, strict=True):
        sums = np.asarray(cache.statistics)[1, :, : len(row), 0]
        np.testing.assert_allclose(sums, columns, atol=1e-5)


def test_h2_3_x2_sl_4_without_heavy_hitters_it_is_streaming_llm():
    window = H2O(budget=16, recent=16, chunk=1, positions="shifted")
    stream = StreamingLLM(budget=16, sink=0, chunk=1)
    left, right = engine_of(window), engine_of(stream)
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


def test_an_evicting_step_reads_the_statistics_too():
    # Two heads of 16 slots, 8 numbers each for key and value, then token and sum; two row numbers.
    # In CItruS's setting 24 slots and 128 for question and answer, and nothing is ranked any more.
    both = own("h2o"), engine_of(CITRUS["h2o"])
    for engine, numbers in zip(both, (4 * 2 * 16 * 18 + 2 * 4, 4 * 2 * 152 * 2 * 8), strict=True):
        answering = staged_caches(engine.setup, 4, 100, 32)[2]
        assert read_bytes(engine.setup, answering, 100) == engine.config.num_layers * 4 * numbers


# TOVA.


def test_tv_4_protection_matters_where_the_current_token_is_the_lowest():
    """Until the newest token is dropped both keep the same; then they differ."""
    free = TOVA(budget=6, chunk=1)
    engines = [engine_of(dataclasses.replace(free, protect_current=it)) for it in (False, True)]
    rows = random_rows([37, 30, 25, 20], seed=4)
    same, agreed = [True] * 4, 0
    runs = (steps(engine, rows, NOTHING) for engine in engines)
    for i, (a, b) in enumerate(zip(*runs, strict=True)):
        kept, protected = kept_tokens(a.caches)[0], kept_tokens(b.caches)[0]
        for row in np.flatnonzero(a.valid):
            assert protected[row][0][-1] == i
            if same[row]:
                same[row] = kept[row][0][-1] == i
                assert (kept[row] == protected[row]) == same[row]
                agreed += same[row] and i >= free.budget
    assert agreed and not all(same)


# RoCo.


def test_rc_2_x9_with_all_in_scope_it_is_h2o_normalized():
    robust = RoCo(budget=16, chunk=8, sink=0, protected_last=0, scope="all")
    mean = H2O(budget=16, chunk=8, recent=0, normalize=True)
    runs = (steps(engine_of(method), CONTEXTS, NOTHING) for method in (robust, mean))
    for a, b in zip(*runs, strict=True):
        assert kept_tokens(a.caches) == kept_tokens(b.caches)
        for row, size in enumerate(a.valid):
            np.testing.assert_allclose(a.logits[row, :size], b.logits[row, :size], atol=1e-5)


def test_rc_3_counts_are_the_queries_since_a_token_joined():
    for step in steps(own("roco"), CONTEXTS, NOTHING, ANSWERS):
        for cache in step.caches:
            token, sums = np.asarray(cache.token), np.asarray(cache.statistics)
            for row, length in enumerate(np.asarray(cache.length)):
                since = int(cache.position[row]) - token[row, :, :length]
                np.testing.assert_array_equal(sums[row, :, :length, 2], since)


def test_rc_4_statistics_without_eviction_do_not_depend_on_the_chunk():
    """Chunks of 8 and 1, then tokens one by one, against the whole text at once."""
    row, engine = CONTEXTS[1] + ANSWERS[1], own("roco")
    expected = []

    def attend(layer, q, k, v):
        at = np.arange(len(q))
        p = probabilities(rope(q, at, THETA), rope(k, at, THETA), at[:, None] >= at[None])
        mean = p.reshape(k.shape[1], -1, *p.shape[1:]).mean(1)
        count = np.broadcast_to(len(q) - at, (k.shape[1], len(q)))
        expected.append(np.stack([mean.sum(1), (mean**2).sum(1), count], axis=-1))
        return weighted_values(p, v)

    forward(engine.config, oracle_params(engine), row, attend)
    *_, last = steps(engine, CONTEXTS, NOTHING, ANSWERS)
    for cache, sums in zip(last.caches, expected, strict=True):
        got = np.asarray(cache.statistics)[1, :, : len(row)]
        np.testing.assert_allclose(got, sums, atol=1e-5)


# StreamingLLM.


@pytest.mark.parametrize("positions", ["shifted", "true"])
def test_x22_an_answer_turns_the_ring_of_newest_tokens_several_times(positions):
    """Rows whose first tokens, which never leave, come with the answer are among them."""
    method = StreamingLLM(budget=8, sink=3, chunk=4, positions=positions)
    engine = engine_of(method)
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


def test_sl_2_each_token_sees_sinks_and_window_at_their_slots():
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

    check_row(own("streaming-llm"), CONTEXTS[0], attend)


def test_sl_3_sinks_alone():
    engine = engine_of(StreamingLLM(budget=4, sink=4, chunk=1))

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
