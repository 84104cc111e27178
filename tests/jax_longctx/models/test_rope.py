import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.contract import context
from jax_longctx.contract.context import apply_rope, rope_angles
from jax_longctx.errors import ConfigError
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.rope import RopeConfig
from tests.goldens.cases import ROPES

GOLDEN = np.load(Path(__file__).parents[2] / "goldens" / "data" / "rope.npz")
DYNAMIC = [name for name in ROPES if name.startswith("dynamic")]


def config_of(name):
    return ModelConfig.from_hf(json.loads(str(GOLDEN[f"{name}.config"])))


def angles_of(rope, head_dim, positions, total):
    """cos and sin [T, H/2] of one row."""
    cos, sin = rope_angles(rope, head_dim, jnp.array([positions]), jnp.array([total]))
    return np.asarray(cos[0]), np.asarray(sin[0])


@pytest.mark.parametrize("name", [name for name in ROPES if name not in DYNAMIC])
def test_frequencies_and_factor_are_those_of_transformers(name):
    config = config_of(name)
    frequencies = config.rope.frequencies(config.head_dim)
    np.testing.assert_allclose(frequencies, GOLDEN[f"{name}.inv_freq"], rtol=1e-6, atol=0)
    assert config.rope.scale == pytest.approx(float(GOLDEN[f"{name}.factor"]), rel=1e-6)


@pytest.mark.parametrize("name", DYNAMIC)
@pytest.mark.parametrize("length", ["below", "at", "above", "thrice"])
def test_dynamic_frequencies_follow_the_total_length(name, length):
    config = config_of(name)
    trained = config.rope.trained_length
    total = {"below": trained - 1, "at": trained, "above": trained + 1, "thrice": 3 * trained}
    # The angle at position 1 is the frequency; none is above 1.
    cos, sin = angles_of(config.rope, config.head_dim, [1], total[length])
    expected = GOLDEN[f"{name}.{total[length]}.inv_freq"]
    np.testing.assert_allclose(np.arctan2(sin, cos)[0], expected, rtol=1e-6, atol=0)


def test_dynamic_frequencies_are_each_rows_own():
    rope = config_of("dynamic_small").rope
    totals = [50, 300, 120]
    together = rope_angles(rope, 16, jnp.full((3, 1), 9), jnp.array(totals))
    for row, total in enumerate(totals):
        alone = angles_of(rope, 16, [9], total)
        np.testing.assert_allclose(together[0][row], alone[0], atol=1e-6)
        np.testing.assert_allclose(together[1][row], alone[1], atol=1e-6)
    assert np.max(np.abs(together[1][1] - together[1][2])) > 0.1


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_other_kinds_do_not_read_the_total_length(kind):
    rope = RopeConfig(kind=kind, theta=1e4, trained_length=64, factor=4.0)
    short, long = (angles_of(rope, 16, [3, 90], total) for total in (10, 1000))
    np.testing.assert_array_equal(short, long)


def test_angles_hold_the_attention_factor_as_in_transformers():
    config = config_of("qwen25_yarn")
    cos, sin = angles_of(config.rope, config.head_dim, GOLDEN["angles.positions"].tolist(), 51)
    half = config.head_dim // 2
    # transformers holds every angle twice, once for each half of a head.
    np.testing.assert_allclose(cos, GOLDEN["angles.cos"][:, :half], atol=5e-6)
    np.testing.assert_allclose(sin, GOLDEN["angles.sin"][:, half:], atol=5e-6)
    assert cos[0, 0] == pytest.approx(0.1 * np.log(4) + 1)


@pytest.mark.parametrize("platform", ["cpu", "gpu"], ids=["joined", "turned over"])
def test_apply_rope_turns_each_pair_as_a_complex_number_in_float32(monkeypatch, platform):
    monkeypatch.setattr(context, "platform", lambda: platform)
    rope = RopeConfig(kind="default", theta=100.0, trained_length=64)
    x = np.random.default_rng(0).normal(size=(2, 3, 2, 8)).astype(np.float32)
    positions = np.array([[0, 5, 9], [7, 1, 40]])
    cos, sin = rope_angles(rope, 8, jnp.array(positions), jnp.array([64, 64]))
    turned = np.asarray(apply_rope(jnp.array(x), cos, sin))
    pairs = x[..., :4] + 1j * x[..., 4:]
    expected = pairs * np.exp(1j * positions[:, :, None, None] * 100.0 ** (-np.arange(4) / 4))
    np.testing.assert_allclose(turned[..., :4], expected.real, atol=1e-5)
    np.testing.assert_allclose(turned[..., 4:], expected.imag, atol=1e-5)
    # Whatever the dtype, which is kept.
    half = jnp.array(x, jnp.bfloat16)
    turned = apply_rope(half, cos, sin)
    assert cos.dtype == sin.dtype == jnp.float32 and turned.dtype == jnp.bfloat16
    exact = apply_rope(half.astype(jnp.float32), cos, sin)
    np.testing.assert_array_equal(turned, exact.astype(jnp.bfloat16))


def test_dynamic_has_no_fixed_frequencies():
    with pytest.raises(ConfigError, match="'dynamic' has no fixed frequencies"):
        RopeConfig(kind="dynamic", theta=1e4, trained_length=8).frequencies(8)
