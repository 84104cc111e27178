"""Sinks, soft caps and queries that grow under every method that leaves nothing out, by numpy."""

import numpy as np
import pytest

from jax_longctx.methods import METHODS, make_method
from jax_longctx.models.rope import RopeConfig
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import (
    answer_logits,
    check_rows,
    oracle_params,
    row_logits,
    texts,
    whole_rows,
)
from tests.oracle import forward, rope, weighted_values
from tests.small_methods import EVERYTHING
from tests.support import tiny_config, tiny_engine

ROWS = texts([(33, 4), (5, 2)], answer=8)
WINDOW = 7
MODELS = {
    # Scores that go far beyond the cap.
    "caps": tiny_config(attention_multiplier=12.0, attention_cap=1.5),
    "growth": tiny_config(
        rope=RopeConfig(kind="default", theta=1e4, trained_length=5, query_growth=0.7)
    ),
    "sinks": tiny_config(windows=(WINDOW, None), sinks=True),
    "both": tiny_config(attention_multiplier=12.0, attention_cap=1.5, sinks=True),
}


def by_definition(config, params):
    """Every score, capped, and the sink as one more column of the softmax."""

    def attend(layer, q, k, v):
        at, window = np.arange(len(q)), config.windows[layer] or len(q)
        q, k = (rope(x, at, config.rope.theta) for x in (q, k))
        grown = 1 + config.rope.query_growth * np.log(1 + at // config.rope.trained_length)
        q = q * grown[:, None, None]
        keys = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
        scores = np.einsum("tnh,snh->nts", q, keys) * config.softmax_scale
        if config.attention_cap:
            scores = config.attention_cap * np.tanh(scores / config.attention_cap)
        back = at[:, None] - at
        weights = np.exp(np.where((back >= 0) & (back < window), scores, -np.inf))
        total = weights.sum(-1, keepdims=True)
        if config.sinks:
            total = total + np.exp(params["layers"][str(layer)]["attn"]["sinks"])[:, None, None]
        return weighted_values(weights / total, v)

    return attend


def expected_of(engine):
    params = oracle_params(engine)
    attend = by_definition(engine.config, params)
    return [forward(engine.config, params, row, attend) for row in whole_rows(ROWS)]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        (name, model)
        for name in METHODS
        for model in ("caps", "growth", "sinks")
        # It would scale the embedding by the trained length, which is short here.
        if name not in ("ring", "star") and (name, model) != ("dynamic-ntk", "growth")
    ],
)
@pytest.mark.quick("full", "snapkv-caps", "quest-caps", "snapkv-growth")
def test_every_method_has_them(name, model):
    engine = tiny_engine(make_method(name, EVERYTHING[name]), config=MODELS[model], by_layer=True)
    check_rows(answer_logits(engine, ROWS), [logits[-8:] for logits in expected_of(engine)])


@pytest.mark.parametrize("name", ["full", "ring", "star"])
@pytest.mark.slow
def test_on_a_mesh_and_in_parts_too(name):
    method = make_method(name, EVERYTHING[name])
    engine = tiny_engine(method, config=MODELS["both"], mesh=make_mesh(1, 2, 2))
    found = answer_logits(engine, ROWS)
    check_rows(found, [logits[-8:] for logits in expected_of(engine)])


def test_they_change_the_answers():
    engine = tiny_engine(config=MODELS["both"])
    found = row_logits(engine, ROWS)
    check_rows(found, expected_of(engine))
    for changes in ({"sinks": False}, {"attention_cap": None}):
        plain = tiny_config(**{"attention_multiplier": 12.0, "attention_cap": 1.5} | changes)
        other = row_logits(tiny_engine(config=plain), ROWS)
        assert np.abs(other[0] - found[0]).max() > 1e-2
