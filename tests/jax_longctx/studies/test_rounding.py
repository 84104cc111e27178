"""The study of rounded keys and values: its forms, and that one pass is decoding token by token."""

import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.evaluation.perplexity import score_texts
from pallas_kernels.quantised import dequantised, quantise
from tests.jax_longctx.studies.rounding import Rounded, compared, rounded
from tests.support import random_rows, tiny_engine

RANDOM = np.random.default_rng(0)


@pytest.mark.parametrize("keys", [True, False], ids=["keys", "values"])
def test_four_bits_are_sixteen_numbers_of_each_group(keys):
    """By numpy: steps from the least to the largest, along the tokens or along the channels."""
    x = RANDOM.normal(size=(1, 2, 12, 8)).astype(np.float32)
    found = np.asarray(rounded(jnp.array(x), "int4", 4, keys=keys))
    along = x.swapaxes(2, 3) if keys else x
    groups = along.reshape(*along.shape[:3], -1, 4)
    least = groups.min(-1, keepdims=True).astype(np.float16).astype(np.float32)
    step = ((groups.max(-1, keepdims=True) - least) / 15).astype(np.float16).astype(np.float32)
    expected = np.clip(np.round((groups - least) / step), 0, 15) * step + least
    expected = expected.reshape(along.shape)
    # Steps may differ in the last bit of a float16.
    np.testing.assert_allclose(found, expected.swapaxes(2, 3) if keys else expected, atol=4e-3)
    assert 0 < np.abs(found - x).max() < step.max()
    # What fills the last group widens no range.
    x = RANDOM.normal(size=(1, 1, 7, 4)).astype(np.float32) + 100
    found = rounded(jnp.array(x), "int4", 4, keys=True)
    assert np.abs(np.asarray(found) - x).max() < 0.3


def test_eight_bits_are_those_of_kv():
    x = jnp.array(RANDOM.normal(size=(1, 1, 200, 16)), jnp.float32)
    np.testing.assert_array_equal(rounded(x, "int8", 1, keys=True), dequantised(quantise(x)))
    with pytest.raises(ValueError, match="unknown form 'int3'"):
        rounded(x, "int3", 1, keys=True)


def test_one_pass_scores_what_decoding_scores():
    """As `--kv` stores them: every token is read alone, and attends what is stored."""
    texts = np.array(random_rows([24, 24], seed=1), np.int32)
    study = tiny_engine(Rounded(keys="int8", values="int8"), chunk=24)
    engines = (study, tiny_engine(chunk=1, kv="int8"), tiny_engine(chunk=1))
    found, expected, exact = (
        score_texts(engine, texts, through="context", batch=2).losses for engine in engines
    )
    np.testing.assert_allclose(found, expected, atol=1e-4)
    assert np.abs(exact - expected).max() > 1e-2


def test_the_newest_tokens_are_not_rounded():
    """Before a block of keys is full, and for values that `newest` tokens have not followed."""
    method = Rounded(keys="int4", values="int4", newest=8)
    lengths = jnp.array([7, 8, 15, 16, 17])
    np.testing.assert_array_equal(method._stored(lengths, blocks=True), [0, 8, 8, 16, 16])
    np.testing.assert_array_equal(method._stored(lengths, blocks=False), [-1, 0, 7, 8, 9])
    texts = np.array(random_rows([24], seed=2), np.int32)
    losses = [
        score_texts(tiny_engine(each, chunk=24), texts, through="context").losses[0]
        for each in (Rounded(), method)
    ]
    np.testing.assert_allclose(losses[0][:7], losses[1][:7], atol=1e-5)
    assert np.abs(losses[0][7:] - losses[1][7:]).max() > 1e-4


def test_differences_are_paired():
    base = np.array([1.0, 2.0, 3.0])
    found = compared(base + 0.01, base)
    assert found["more"] == 1.0 and found["interval"] == [1.0, 1.0] and found["n"] == 3
    assert found["perplexity"] == round(float(np.exp(2.01)), 4)
