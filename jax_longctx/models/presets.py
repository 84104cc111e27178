"""Shapes of published models, for planning and benchmarks without their files."""

from typing import Any

from jax_longctx.errors import ConfigError
from jax_longctx.models.config import ModelConfig

_LLAMA_3_1_ROPE = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_PLAIN_ROPE = {"rope_theta": 1000000.0, "rope_type": "default"}


def _llama(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _LLAMA_3_1_ROPE,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        **changes,
    }


def _qwen2(**changes: Any) -> dict[str, Any]:
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": 152064,
        "rms_norm_eps": 1e-6,
        "rope_parameters": _PLAIN_ROPE,
        "max_position_embeddings": 131072,
        "sliding_window": None,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * changes["num_hidden_layers"],
        "tie_word_embeddings": False,
        **changes,
    }


# What transformers makes of the models' config.json files.
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
        rope_parameters={**_LLAMA_3_1_ROPE, "factor": 32.0},
    ),
    "llama-3.2-3b": _llama(
        hidden_size=3072,
        intermediate_size=8192,
        num_hidden_layers=28,
        num_attention_heads=24,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        rope_parameters={**_LLAMA_3_1_ROPE, "factor": 32.0},
    ),
    "llama-3.1-70b": _llama(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
    "llama-3.1-405b": _llama(
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
    ),
    # v0.3, which has no sliding window.
    "mistral-7b": {
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "vocab_size": 32768,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _PLAIN_ROPE,
        "max_position_embeddings": 32768,
        "sliding_window": None,
        "tie_word_embeddings": False,
    },
    "qwen2-7b": _qwen2(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    ),
    "qwen2-72b": _qwen2(
        hidden_size=8192,
        intermediate_size=29568,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    ),
}


def preset(name: str) -> ModelConfig:
    """The configuration of a published model. Raises ConfigError for one that is not listed."""
    if name not in PRESETS:
        raise ConfigError(f"unknown model preset {name!r}; known: {', '.join(PRESETS)}")
    return ModelConfig.from_hf(PRESETS[name])
