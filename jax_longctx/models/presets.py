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
_MINISTRAL3 = {
    **_MISTRAL,
    "model_type": "ministral3",
    "architectures": ["Ministral3ForCausalLM"],
    "head_dim": 128,
    "rope_parameters": {
        **{"rope_theta": 1000000.0, "rope_type": "yarn", "factor": 16.0},
        **{"original_max_position_embeddings": 16384, "mscale": 1.0, "mscale_all_dim": 1.0},
        **{"beta_fast": 32.0, "beta_slow": 1.0, "llama_4_scaling_beta": 0.1},
    },
}
_GPT_OSS = {
    "model_type": "gpt_oss",
    "architectures": ["GptOssForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        **{"rope_theta": 150000.0, "rope_type": "yarn", "factor": 32.0, "truncate": False},
        **{"original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0},
    },
    "head_dim": 64,
    "attention_bias": True,
    **{"num_local_experts": 32, "num_experts_per_tok": 4},
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
}
_SMOLLM3 = {
    "model_type": "smollm3",
    "architectures": ["SmolLM3ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_theta": 5000000.0, "rope_type": "default"},
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "layer_types": ["full_attention"] * 36,
    "tie_word_embeddings": True,
}
_GRANITE = {
    "model_type": "granite",
    "architectures": ["GraniteForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000000.0, "rope_type": "default"},
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 16.0,
    "tie_word_embeddings": True,
}
_PHI = {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 250000.0, "rope_type": "default"},
    "sliding_window": None,
}
_OLMO3 = {
    "model_type": "olmo3",
    "architectures": ["Olmo3ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {
            "rope_theta": 500000.0,
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
        "sliding_attention": {"rope_theta": 500000.0, "rope_type": "default"},
    },
    "sliding_window": 4096,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
}
_GEMMA3 = {
    "model_type": "gemma3_text",
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "rope_parameters": {
        "full_attention": _PLAIN_ROPE,
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 512,
    "layer_types": ["full_attention" if n % 6 == 5 else "sliding_attention" for n in range(26)],
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
}
_COMMAND = {
    "model_type": "cohere2",
    "architectures": ["Cohere2ForCausalLM"],
    "layer_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 50000.0, "rope_type": "default"},
    "sliding_window": 4096,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    "logit_scale": 0.25,
    "tie_word_embeddings": True,
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
    "smollm3-3b": _shape(_SMOLLM3, 128256, 36, 2048, 11008, 16, 4, 65536),
    "granite-3.3-8b": _shape(_GRANITE, 49159, 40, 4096, 12800, 32, 8, 131072),
    "phi-4": _shape(_PHI, 100352, 40, 5120, 17920, 40, 10, 16384),
    "olmo-3-7b": _shape(_OLMO3, 100278, 32, 4096, 11008, 32, 32, 65536),
    "gemma-3-1b": _shape(_GEMMA3, 262144, 26, 1152, 6912, 4, 1, 32768),
    "command-r7b": _shape(_COMMAND, 256000, 32, 4096, 14336, 32, 8, 132096),
    "mistral-7b": _shape(_MISTRAL, 32768, 32, 4096, 14336, 32, 8, 32768),
    "mixtral-8x7b": _shape(_MIXTRAL, 32000, 32, 4096, 14336, 32, 8, 32768),
    "ministral-3-8b": _shape(_MINISTRAL3, 131072, 34, 4096, 14336, 32, 8, 262144),
    "gpt-oss-20b": _shape(_GPT_OSS, 201088, 24, 2880, 2880, 64, 8, 131072),
    "qwen2-7b": _shape(_QWEN2, 152064, 28, 3584, 18944, 28, 4, 131072),
    "qwen2-72b": _shape(_QWEN2, 152064, 80, 8192, 29568, 64, 8, 131072),
    "qwen3-30b-a3b": _shape(_QWEN3_MOE, 151936, 48, 2048, 6144, 32, 4, 40960),
}


def preset(name: str) -> ModelConfig:
    """The configuration of a published model. Raises ConfigError for one that is not listed."""
    return ModelConfig.from_hf(look_up(PRESETS, name, "model preset"))
