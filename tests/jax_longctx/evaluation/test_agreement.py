import functools

import jax
import numpy as np
import pytest

from jax_longctx.engine import scoring
from jax_longctx.engine.scoring import loglikelihoods
from jax_longctx.errors import InputError
from jax_longctx.evaluation import agreement
from jax_longctx.evaluation.agreement import attention_weights, scored_states, shows_weights
from jax_longctx.methods import METHODS, StreamingLLM
from jax_longctx.sharding import make_mesh
from tests.oracle import causal_attend, forward, probabilities, rope, to_numpy
from tests.small_methods import KINDS, small_method
from tests.support import random_rows, tiny_engine

TEXT = random_rows([120], seed=2)[0]
# So short that the small methods leave nothing out.
SHORT = TEXT[:30]
QUERIES = 4


@functools.cache
def engine_of(method, mesh=(1, 1, 1)):
    return tiny_engine(method, chunk=16, mesh=make_mesh(*mesh))


def full_engine():
    return engine_of(small_method("full"))


def dense_weights(text):
    """Full attention's weights `[L, N, Q, S]` for the newest queries."""
    engine, found = full_engine(), []

    def attend(layer, q, k, v):
        at = np.arange(len(q))
        found.append(probabilities(rope(q, at, 1e4), rope(k, at, 1e4), at[:, None] >= at[None, :]))
        return causal_attend(1e4)(layer, q, k, v)

    forward(engine.config, to_numpy(jax.device_get(engine.params)), text[:-1], attend)
    return np.stack(found)[:, :, -QUERIES:]


def test_full_attentions_weights_are_the_dense_ones():
    # 119 tokens in runs of 8, in batches of 8, the last of which is not full.
    weights = attention_weights(full_engine(), TEXT, queries=QUERIES, score=6)
    np.testing.assert_allclose(weights, dense_weights(TEXT), atol=1e-5)
    # Texts that are too short and methods that choose by values are refused.
    for queries, score in [(4, 3), (4, 119), (0, 4)]:
        with pytest.raises(InputError, match="ask for fewer"):
            attention_weights(full_engine(), TEXT, queries=queries, score=score)
    texts = np.array([TEXT], np.int32)
    for score, batch in [(119, 1), (0, 1), (4, 0)]:
        with pytest.raises(InputError, match="ask for fewer"):
            scored_states(full_engine(), texts, score=score, batch=batch)
    engine = engine_of(ByValues(budget=20, chunk=8))
    assert not shows_weights(engine)
    with pytest.raises(InputError, match="chooses by values"):
        attention_weights(engine, TEXT, queries=QUERIES)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "quest" else pytest.mark.thorough)
        for name in (*KINDS, "dynamic-ntk")
        if name != "star" and not METHODS[name].by_values
    ],
)
def test_weights_are_full_attentions_until_something_is_left_out_and_add_up(name):
    engine = engine_of(small_method(name))
    weights = attention_weights(engine, SHORT, queries=QUERIES)
    np.testing.assert_allclose(weights, dense_weights(SHORT), atol=1e-4)
    weights = attention_weights(engine, TEXT, queries=QUERIES)
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-4)
    # Every query could see these; RefreshKV leaves tokens out in its partial steps only.
    left_out = weights[..., :-QUERIES] == 0
    assert left_out.any() == (name not in ("full", "dynamic-ntk"))


@pytest.mark.slow
def test_what_was_evicted_has_no_weight():
    """StreamingLLM: the first 4 and the newest, of 20 tokens that were there before a token."""
    engine = engine_of(StreamingLLM(budget=20, chunk=8))
    weights = attention_weights(engine, TEXT, queries=QUERIES)
    for query in range(QUERIES):
        newest = len(TEXT) - 1 - QUERIES + query
        kept = {*range(4), *range(newest - 15, newest + 1)}
        for found in weights[:, :, query].reshape(2 * 4, -1):
            # What was there, and the token itself.
            attended = set(np.flatnonzero(found))
            assert kept - {newest - 15} <= attended <= kept | {newest - 16}
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)


class ByValues(StreamingLLM):
    by_values = True


@pytest.mark.slow
def test_a_mesh_shows_the_weights_of_one_device():
    method = small_method("snapkv")
    one = attention_weights(engine_of(method), TEXT, queries=QUERIES)
    # Three copies together are four on two parts.
    mesh = attention_weights(engine_of(method, (2, 2, 2)), TEXT, queries=QUERIES, batch=3)
    np.testing.assert_allclose(mesh, one, atol=1e-5)


def log_probabilities(states, params):
    logits = states @ params["head"]["table"].T
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.slow
def test_divergences_are_those_of_the_whole_distributions(monkeypatch):
    # Blocks of two columns, the last of which is not full.
    monkeypatch.setattr(scoring, "LOGITS", 2 * 64)
    texts = np.array(random_rows([120] * 3, seed=2), np.int32)
    full_engine, engine = engine_of(small_method("full")), engine_of(small_method("snapkv"))
    how = {"score": 5, "batch": 2}
    full, other = (scored_states(each, texts, **how) for each in (full_engine, engine))
    kl, same = agreement.divergences(full_engine, full, other)
    params = to_numpy(jax.device_get(full_engine.params))
    for text, states, others, kl_S, same_S in zip(texts, full, other, kl, same, strict=True):
        logits = forward(full_engine.config, params, text[:-1].tolist(), causal_attend(1e4))[-5:]
        np.testing.assert_allclose(states @ params["head"]["table"].T, logits, atol=1e-4)
        p, q = (log_probabilities(each, params) for each in (states, others))
        np.testing.assert_allclose(kl_S, (np.exp(p) * (p - q)).sum(-1), atol=1e-4)
        np.testing.assert_array_equal(same_S, p.argmax(-1) == q.argmax(-1))
    assert kl.max() > 1e-3
    # The method's losses are those of its states.
    context, asked, scored = (part.tolist() for part in np.split(texts[:2], (114, 115), axis=1))
    scores = loglikelihoods(engine, context, scored, questions=asked)
    q = log_probabilities(other[0], params)
    np.testing.assert_allclose(scores[0].logprobs, q[np.arange(5), texts[0, 115:]], atol=1e-4)


def test_measures_by_hand_and_their_table():
    full = np.array([0.4, 0.1, 0.3, 0.2])
    other = np.array([0.0, 0.25, 0.25, 0.5])
    # Two heads, the second full attention's own; two layers the other way round.
    layers = np.stack([[[other], [full]], [[full], [full]]])
    found = agreement.attention_measures(np.broadcast_to(full, layers.shape), layers, top=2)
    own = -(full * np.log(full)).sum()
    assert found["mass"] == pytest.approx([0.8, 1])
    assert found["recall"] == pytest.approx([0.75, 1])
    assert found["attended"] == [3.5, 4]
    assert found["entropy"] == pytest.approx([(1.5 * np.log(2) + own) / 2, own])
    chosen = agreement.top_tokens(np.array([[0.2, 0.3, 0.3, 0.2], [0.0, 0.0, 1.0, 0.0]]), 3)
    assert chosen.tolist() == [[True, True, True, False], [True, True, True, False]]
    attended = np.array([[True, False, True, True], [False] * 4])
    assert agreement.recall(chosen, attended).tolist() == [pytest.approx(2 / 3), 0]
    texts = [
        {"mass": [0.5, 0.7], "recall": [0.2, 0.4], "attended": [3.0, 5.0], "entropy": [1.0, 2.0]},
        {"mass": [0.9, 0.7], "recall": [0.6, 0.4], "attended": [7.0, 5.0], "entropy": [1.0, 2.0]},
    ]
    sizes = {"length": 50, "score": 4, "queries": 2, "top": 3}
    common = {"given": {"budget": "4"}, "kl": [0.1, 0.3], "same": [0.5, 1.0], **sizes}
    run = {"method": "quest", "attention": texts, **common}
    other = {"method": "ring", "attention": None, **common}
    table = agreement.markdown([run, other])
    assert "recall of the best 3, %" in table
    both = "0.2000 [0.1000, 0.3000] | 75.0 [50.0, 100.0]"
    assert f"| `quest budget=4` | {both} | 5.0 | 70.00 | 40.0 | 1.500 |" in table
    assert f"| `ring budget=4` | {both} | - | - | - | - |" in table
    assert "2 texts of 50 tokens, the last 4 decoded" in table and "newest 2 queries" in table
    assert "newest" not in agreement.markdown([other])


@pytest.mark.slow
def test_methods_are_compared_on_the_same_texts():
    texts = np.array([TEXT], np.int32)
    engines = [engine_of(small_method(name)) for name in ("full", "ring", "snapkv")]
    done = []
    how = {"queries": QUERIES, "score": QUERIES, "top": 3, "batch": 8}
    how["progress"] = lambda *at: done.append(at)
    found = agreement.compare(full_engine(), engines, texts, **how)
    exact, ring, snapkv = (each["attention"] for each in found)
    assert ring is None and not shows_weights(engines[1])
    (exact,), (snapkv,) = exact, snapkv
    assert exact["mass"] == pytest.approx([1, 1]) and exact["recall"] == [1, 1]
    # Tokens 115 to 118 see those before them and themselves.
    assert exact["attended"] == [117.5] * 2
    # The question's token sees all 116, those after it the 48 that were kept and each other.
    assert snapkv["attended"] == [(116 + 49 + 50 + 51) / 4] * 2 and max(snapkv["mass"]) < 0.95
    assert done == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(InputError, match="shows no weights"):
        attention_weights(engines[1], TEXT, queries=2)
