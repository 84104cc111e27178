"""Shapes of published models, for planning and benchmarks without their files."""

from typing import Any

from jax_longctx.errors import ConfigError
from jax_longctx.models.config import ModelConfig

__all__ = ["PRESETS", "preset"]

_LLAMA_3_1_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": _LLAMA_3_1_ROPE,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **changes,
    }


# What the models' config.json files say of their shapes.
PRESETS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _llama(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "llama-3.2-1b": _llama(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
        rope_scaling={**_LLAMA_3_1_ROPE, "factor": 32.0},
    ),
}


def preset(name: str) -> ModelConfig:
    """The configuration of a published model. Raises ConfigError for one that is not listed."""
    if name not in PRESETS:
        raise ConfigError(f"unknown model preset {name!r}; known: {', '.join(PRESETS)}")
    return ModelConfig.from_hf(PRESETS[name])
