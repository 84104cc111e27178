"""A shape that a CPU times in seconds."""

import pytest

from jax_longctx.models import presets


@pytest.fixture
def tiny_shape(monkeypatch):
    """The preset `tiny`, which a test may change."""
    shape = dict(
        presets.PRESETS["llama-3.1-8b"],
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
    )
    monkeypatch.setitem(presets.PRESETS, "tiny", shape)
    return shape
