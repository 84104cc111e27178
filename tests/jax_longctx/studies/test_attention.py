"""CItruS's overlap of selections and RESA's singular values, against numpy's whole matrices."""

import jax
import numpy as np
import pytest

from jax_longctx.errors import InputError
from jax_longctx.studies.attention import importance, intersections, spectrum
from tests.oracle import causal_attend, forward, probabilities, rope, to_numpy
from tests.support import random_rows, tiny_engine

TEXT = random_rows([40], seed=2)[0]


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(chunk=16)


def rotated(engine, text):
    """Every layer's rotated queries and keys `[T, heads, H]`."""
    found = []

    def attend(layer, q, k, v):
        at = np.arange(len(q))
        found.append((rope(q, at, 1e4), rope(k, at, 1e4)))
        return causal_attend(1e4)(layer, q, k, v)

    forward(engine.config, to_numpy(jax.device_get(engine.params)), text, attend)
    return found


def test_importance_is_the_mean_attention_of_what_follows(engine):
    expected = [
        probabilities(q, k, np.tri(40, dtype=bool))[:, 30:, :30].mean((0, 1))
        for q, k in rotated(engine, TEXT)
    ]
    found = importance(engine, TEXT[:30], TEXT[30:])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    for context, follower in [([], [1]), ([1], [])]:
        with pytest.raises(InputError, match="both need at least one"):
            importance(engine, context, follower)


def test_intersections_are_of_the_best_of_each_layer():
    one = np.array([[5.0, 4, 3, 0], [0, 1, 2, 3]])
    other = np.array([[0.0, 9, 8, 1], [3, 2, 1, 0]])
    assert intersections(one, other, 2).tolist() == [0.5, 0]
    assert intersections(one, other, 4).tolist() == [1, 1]
    for count in (0, 5):
        with pytest.raises(InputError, match="from 1 to 4"):
            intersections(one, other, count)


def test_the_spectrum_is_that_of_the_whole_matrix(engine):
    found = spectrum(engine, TEXT)
    for layer, (q, k) in enumerate(rotated(engine, TEXT)):
        for head in range(4):
            logits = q[:, head] @ k[:, head // 2].T / np.sqrt(8)
            _, values, right = np.linalg.svd(logits)
            mean = logits.mean(0)
            cosine = abs(mean @ right[0]) / np.linalg.norm(mean)
            at = (layer, head)
            assert found["first"][at] == pytest.approx(values[0], rel=1e-4)
            assert found["share"][at] == pytest.approx(values[0] / values.sum(), rel=1e-4)
            assert found["prior"][at] == pytest.approx(cosine, rel=1e-3)
