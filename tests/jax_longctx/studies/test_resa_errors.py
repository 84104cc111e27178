"""Errors of sparse attention are those of numpy's definition, and vanish where they must."""

import jax
import numpy as np
import pytest

from jax_longctx.errors import InputError
from jax_longctx.methods import Resa
from jax_longctx.studies.resa_errors import LAMS, attention_errors
from tests.jax_longctx.methods.oracles.selection import selected
from tests.oracle import causal_attend, forward, rope, to_numpy
from tests.support import random_rows, tiny_config, tiny_engine

TEXTS, QUERIES = random_rows([60, 50]), 5
FIXED = {"sink": 2, "local": 4}
METHODS = {
    "quest": Resa(budget=12, page_size=4, **FIXED),
    "arkvale": Resa(
        budget=12,
        page_size=4,
        selector="arkvale",
        granularity="kv_head",
        allocation="ada-floor",
        growth="append-fixed-mean",
        lambda_mode="paper_literal",
        **FIXED,
    ),
    "ideal": Resa(
        budget=12,
        selector="ideal",
        growth="rebuild",
        rebuild_every=2,
        prior_group="mean",
        **FIXED,
    ),
}


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(config=tiny_config(num_layers=1), chunk=16)


def expected(engine, kind, method):
    """Mean errors `[2, lams]` over texts, queries and heads; mean share of the keys."""
    config, params = engine.config, to_numpy(jax.device_get(engine.params))
    found, shares = [], []
    for text in TEXTS:
        kept_arrays = {}

        def record(layer, q, k, v, kept_arrays=kept_arrays):
            at = np.arange(len(q))
            kept_arrays.update(q=rope(q, at, 1e4), k=rope(k, at, 1e4), v=v)
            return causal_attend(1e4)(layer, q, k, v)

        forward(config, params, text, record)
        q, k, v = (kept_arrays[name] for name in "qkv")
        k, v, prompt = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1), len(text) - QUERIES
        mean_q = q[:prompt].mean(0)
        for t in range(prompt, len(text)):
            chosen = selected(kind, method.base, q[t], k[: t + 1, ::2], prompt)
            mean_k = k[: prompt if "fixed" in method.growth else t + 1].mean(0)
            if method.growth == "rebuild":
                new = (t + 1 - prompt) // method.rebuild_every * method.rebuild_every
                mean_q = q[: prompt + new].mean(0)
            if method.prior_group == "mean":
                mean_q = np.repeat(mean_q.reshape(-1, 2, mean_q.shape[-1]).mean(1), 2, axis=0)
            exact = np.einsum("nh,snh->ns", q[t], k[: t + 1]) * 8**-0.5
            bias = ((q[t] - mean_q) * mean_k).sum(1) * 8**-0.5
            prior = np.einsum("nh,snh->ns", mean_q, k[: t + 1]) * 8**-0.5 + bias[:, None]
            weights = np.exp(np.where(chosen, exact, prior))
            full = np.exp(exact) / np.exp(exact).sum(1, keepdims=True)
            out = np.einsum("ns,snh->nh", full, v[: t + 1])
            row = []
            for lam in LAMS:
                scaled = weights * np.where(chosen, 1.0, lam)
                whole = weights if method.lambda_mode == "paper_literal" else scaled
                share = scaled / whole.sum(1, keepdims=True)
                away = np.einsum("ns,snh->nh", share, v[: t + 1]) - out
                relative = np.linalg.norm(away, axis=1) / np.linalg.norm(out, axis=1)
                row.append([np.abs(share - full).sum(1).mean(), relative.mean()])
            found.append(np.array(row).T)
            shares.append(chosen.mean())
    return np.mean(found, axis=0), np.mean(shares)


@pytest.mark.parametrize(
    "kind", ["quest", "arkvale", pytest.param("ideal", marks=pytest.mark.thorough)]
)
def test_errors_equal_numpy(engine, kind):
    records = attention_errors(engine, TEXTS, [METHODS[kind]], queries=QUERIES)
    errors, share = expected(engine, kind, METHODS[kind])
    assert [record["settings"]["lam"] for record in records] == list(LAMS)
    for i, record in enumerate(records):
        got = [record["score_error"], record["output_error"]]
        np.testing.assert_allclose(got, errors[:, i], rtol=1e-3)
        np.testing.assert_allclose(record["kept"], share, rtol=1e-5)
        np.testing.assert_allclose(record["by_layer"], [got])
        assert record["queries"] == 2 * QUERIES


def test_nothing_left_out_is_no_error(engine):
    records = attention_errors(engine, TEXTS, [Resa(budget=64, page_size=4)], queries=QUERIES)
    for record in records:
        assert record["kept"] == 1
        assert max(record["score_error"], record["output_error"]) < 1e-5


@pytest.mark.parametrize(
    ("texts", "method", "said"),
    [
        ([[1] * 5], Resa(), "the shortest has 5"),
        ([], Resa(), "the shortest has 0"),
        (TEXTS, Resa(allocation="psa-oracle"), "fixed budgets"),
    ],
)
def test_bad_input_says_what_is_wrong(engine, texts, method, said):
    with pytest.raises(InputError, match=said):
        attention_errors(engine, texts, [method], queries=QUERIES)
