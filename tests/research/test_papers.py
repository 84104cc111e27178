import jax
import numpy as np
import pytest

from jax_longctx.errors import InputError
from jax_longctx.methods import Resa
from research.attention import importance, intersections, spectrum
from research.resa_errors import LAMS, attention_errors
from tests.jax_longctx.methods.oracles.selection import selected
from tests.oracle import causal_attend, forward, probabilities, rope, to_numpy
from tests.support import random_rows, tiny_config, tiny_engine

TEXT = random_rows([40], seed=2)[0]


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(chunk=16)


def rotated(engine, text):
    """Every layer's rotated queries and keys, and its values `[T, heads, H]`."""
    found = []

    def attend(layer, q, k, v):
        at = np.arange(len(q))
        found.append((rope(q, at, 1e4), rope(k, at, 1e4), v))
        return causal_attend(1e4)(layer, q, k, v)

    forward(engine.config, to_numpy(jax.device_get(engine.params)), text, attend)
    return found


def test_importance_is_the_mean_attention_of_what_follows(engine):
    expected = [
        probabilities(q, k, np.tri(40, dtype=bool))[:, 30:, :30].mean((0, 1))
        for q, k, _ in rotated(engine, TEXT)
    ]
    found = importance(engine, TEXT[:30], TEXT[30:])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for context, follower in [([], [1]), ([1], [])]:
        with pytest.raises(InputError, match="both need at least one"):
            importance(engine, context, follower)
    # Intersections are of the best of each layer.
    one = np.array([[5.0, 4, 3, 0], [0, 1, 2, 3]])
    other = np.array([[0.0, 9, 8, 1], [3, 2, 1, 0]])
    assert intersections(one, other, 2).tolist() == [0.5, 0]
    assert intersections(one, other, 4).tolist() == [1, 1]
    for count in (0, 5):
        with pytest.raises(InputError, match="from 1 to 4"):
            intersections(one, other, count)


def test_the_spectrum_is_that_of_the_whole_matrix(engine):
    found = spectrum(engine, TEXT)
    for layer, (q, k, _) in enumerate(rotated(engine, TEXT)):
        for head in range(4):
            logits = q[:, head] @ k[:, head // 2].T / np.sqrt(8)
            _, values, right = np.linalg.svd(logits)
            mean = logits.mean(0)
            cosine = abs(mean @ right[0]) / np.linalg.norm(mean)
            at = (layer, head)
            assert found["first"][at] == pytest.approx(values[0], rel=1e-4)
            assert found["share"][at] == pytest.approx(values[0] / values.sum(), rel=1e-4)
            assert found["prior"][at] == pytest.approx(cosine, rel=1e-3)


TEXTS, QUERIES = random_rows([60, 50]), 5
FIXED = {"sink": 2, "local": 4}
METHODS = {
    "quest": Resa(budget=12, page_size=4, **FIXED),
    "arkvale": Resa(
        **{"budget": 12, "page_size": 4, "selector": "arkvale", "granularity": "kv_head"},
        **{"allocation": "ada-floor", **FIXED},
    ),
    "ideal": Resa(budget=12, selector="ideal", **FIXED),
}


@pytest.fixture(scope="module")
def shallow():
    return tiny_engine(config=tiny_config(num_layers=1), chunk=16)


def resa_expected(engine, kind, method):
    """Mean errors `[2, lams]` over texts, queries and heads; mean share of the keys."""
    found, shares = [], []
    for text in TEXTS:
        ((q, k, v),) = rotated(engine, text)
        k, v, prompt = np.repeat(k, 2, axis=1), np.repeat(v, 2, axis=1), len(text) - QUERIES
        mean_q = q[:prompt].mean(0)
        for t in range(prompt, len(text)):
            chosen = selected(kind, method.base, q[t], k[: t + 1, ::2], prompt)
            mean_k = k[: t + 1].mean(0)
            exact = np.einsum("nh,snh->ns", q[t], k[: t + 1]) * 8**-0.5
            bias = ((q[t] - mean_q) * mean_k).sum(1) * 8**-0.5
            prior = np.einsum("nh,snh->ns", mean_q, k[: t + 1]) * 8**-0.5 + bias[:, None]
            weights = np.exp(np.where(chosen, exact, prior))
            full = np.exp(exact) / np.exp(exact).sum(1, keepdims=True)
            out = np.einsum("ns,snh->nh", full, v[: t + 1])
            row = []
            for lam in LAMS:
                scaled = weights * np.where(chosen, 1.0, lam)
                share = scaled / scaled.sum(1, keepdims=True)
                away = np.einsum("ns,snh->nh", share, v[: t + 1]) - out
                relative = np.linalg.norm(away, axis=1) / np.linalg.norm(out, axis=1)
                row.append([np.abs(share - full).sum(1).mean(), relative.mean()])
            found.append(np.array(row).T)
            shares.append(chosen.mean())
    return np.mean(found, axis=0), np.mean(shares)


@pytest.mark.parametrize(
    "kind",
    [
        "quest",
        pytest.param("arkvale", marks=pytest.mark.slow),
        pytest.param("ideal", marks=pytest.mark.thorough),
    ],
)
def test_errors_equal_numpy(shallow, kind):
    records = attention_errors(shallow, TEXTS, [METHODS[kind]], queries=QUERIES)
    errors, share = resa_expected(shallow, kind, METHODS[kind])
    assert [record["settings"]["lam"] for record in records] == list(LAMS)
    for i, record in enumerate(records):
        got = [record["score_error"], record["output_error"]]
        np.testing.assert_allclose(got, errors[:, i], rtol=1e-3)
        np.testing.assert_allclose(record["kept"], share, rtol=1e-5)
        np.testing.assert_allclose(record["by_layer"], [got])
        assert record["queries"] == 2 * QUERIES


def test_nothing_left_out_is_no_error(shallow):
    records = attention_errors(shallow, TEXTS, [Resa(budget=64, page_size=4)], queries=QUERIES)
    for record in records:
        assert record["kept"] == 1
        assert max(record["score_error"], record["output_error"]) < 1e-5
    # Bad input says what is wrong.
    for texts, method, said in [
        ([[1] * 5], Resa(), "the shortest has 5"),
        ([], Resa(), "the shortest has 0"),
        (TEXTS, Resa(allocation="psa-oracle"), "fixed budgets"),
    ]:
        with pytest.raises(InputError, match=said):
            attention_errors(shallow, texts, [method], queries=QUERIES)
