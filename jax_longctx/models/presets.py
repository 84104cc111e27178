"""Shapes of published models, for planning and benchmarks without their files."""

from typing import Any

from jax_longctx.models.config import SIZES, ModelConfig
from jax_longctx.settings import look_up

_LLAMA_ROPE = {
    "rope_theta": 500000.0,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_PLAIN_ROPE = {"rope_theta": 1000000.0, "rope_type": "default"}
_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_parameters": _LLAMA_ROPE,
    "attention_bias": False,
    "mlp_bias": False,
}
# Llama 3.2 shares its embedding and was extended further.
_SMALL_LLAMA = {
    **_LLAMA,
    "tie_word_embeddings": True,
    "rope_parameters": {**_LLAMA_ROPE, "factor": 32.0},
}
# v0.3, which has no sliding window.
_MISTRAL = {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_parameters": _PLAIN_ROPE,
    "sliding_window": None,
}
_QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_parameters": _PLAIN_ROPE,
    "sliding_window": None,
    "use_sliding_window": False,
}
_QWEN3_MOE = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_parameters": _PLAIN_ROPE,
    "head_dim": 128,
    "attention_bias": False,
    **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "norm_topk_prob": True,
}
_MIXTRAL = {
    **_MISTRAL,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    **{"num_local_experts": 8, "num_experts_per_tok": 2},
}


def _shape(base: dict[str, Any], *sizes: int) -> dict[str, Any]:
    """A whole Hugging Face config; the sizes in the order of `SIZES`."""
    config: dict[str, Any] = dict(zip(SIZES.values(), sizes, strict=True))
    if base is _QWEN2:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    return {"hidden_act": "silu", "tie_word_embeddings": False, **base, **config}


# What transformers makes of the models' config.json files: words, layers, width, MLP, heads of
# queries, of keys and values, and the longest text.
PRESETS: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": _shape(_LLAMA, 128256, 32, 4096, 14336, 32, 8, 131072),
    "llama-3.2-1b": _shape(_SMALL_LLAMA, 128256, 16, 2048, 8192, 32, 8, 131072),
    "llama-3.2-3b": _shape(_SMALL_LLAMA, 128256, 28, 3072, 8192, 24, 8, 131072),
    "llama-3.1-70b": _shape(_LLAMA, 128256, 80, 8192, 28672, 64, 8, 131072),
    "llama-3.1-405b": _shape(_LLAMA, 128256, 126, 16384, 53248, 128, 8, 131072),
    "mistral-7b": _shape(_MISTRAL, 32768, 32, 4096, 14336, 32, 8, 32768),
    "mixtral-8x7b": _shape(_MIXTRAL, 32000, 32, 4096, 14336, 32, 8, 32768),
    "qwen2-7b": _shape(_QWEN2, 152064, 28, 3584, 18944, 28, 4, 131072),
    "qwen2-72b": _shape(_QWEN2, 152064, 80, 8192, 29568, 64, 8, 131072),
    "qwen3-30b-a3b": _shape(_QWEN3_MOE, 151936, 48, 2048, 6144, 32, 4, 40960),
}


def preset(name: str) -> ModelConfig:
    """The configuration of a published model. Raises ConfigError for one that is not listed."""
    return ModelConfig.from_hf(look_up(PRESETS, name, "model preset"))
