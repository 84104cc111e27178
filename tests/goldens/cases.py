"""The tiny models of the goldens: a Hugging Face config each, every option at least once."""

from collections.abc import Mapping
from functools import partial
from typing import Any

__all__ = ["GEMMA", "GRANITE", "KVPRESS", "MODELS", "PHI4", "ROPES", "SEEDS", "SIZES"]

Config = dict[str, Any]


# What the tiny models have in common.
SIZES: Config = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}


# Where it is not the model_type with a capital.
ARCHITECTURES = {
    "smollm3": "SmolLM3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "stablelm": "StableLmForCausalLM",
}


def _config(model_type: str, **changes: Any) -> Config:
    architecture = ARCHITECTURES.get(model_type, f"{model_type.capitalize()}ForCausalLM")
    return {"model_type": model_type, "architectures": [architecture], **SIZES} | changes


_llama, _mistral, _qwen2 = (partial(_config, it) for it in ("llama", "mistral", "qwen2"))
_qwen3 = partial(_config, "qwen3", head_dim=16)
_qwen3_moe = partial(
    *(_config, "qwen3_moe"),
    architectures=["Qwen3MoeForCausalLM"],
    **{"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
)
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
# Families whose padding token lies in a large vocabulary.
_own = partial(_config, pad_token_id=None)


def _new_style(config: Config, rope: Mapping[str, Any]) -> Config:
    """As transformers 5 writes it: everything of the rotary embedding in `rope_parameters`."""
    theta = config.pop("rope_theta")
    return {**config, "rope_parameters": {"rope_theta": theta, **rope}}


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Long enough that both ends of the ramp fall between the first and the last channel.
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

_TIED = {"num_hidden_layers": 3, "tie_word_embeddings": True}
_SLIDING = {"num_hidden_layers": 3, "use_sliding_window": True}
_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_THREE = {"num_hidden_layers": 3}
GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 5.0,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.5,
}
# 10 of 16 channels turn.
PHI4: Config = {
    "hidden_size": 64,
    "partial_rotary_factor": 0.625,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.1, 1.3, 1.6, 2.0],
        "long_factor": [1.0, 1.5, 2.5, 4.0, 7.0],
    },
}
GEMMA: Config = {
    "num_hidden_layers": 3,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": 9,
    "tie_word_embeddings": True,
}
_EIGHTH = {"rope_type": "linear", "factor": 8.0}
_GROWING = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4}
_DYNAMIC = {"type": "dynamic", "factor": 2.0}
_LONG = {"head_dim": 16, "max_position_embeddings": 4096}

# Seed and config of each. With these seeds the continuations are varied and no choice is a near tie
# (`make_goldens.MIN_GAP`).
_MODELS: dict[str, tuple[int, Config]] = {
    "llama_mha": (2, _llama(num_key_value_heads=4, pretraining_tp=2, rms_norm_eps=0.1)),
    "llama_gqa_tied": (1, _llama(**_TIED, num_attention_heads=6, hidden_size=48)),
    "llama_mqa": (0, _llama(num_key_value_heads=1)),
    "llama_attention_bias": (0, _llama(attention_bias=True)),
    "llama_mlp_bias": (5, _llama(mlp_bias=True)),
    "llama_head_dim": (1, _llama(head_dim=16, rope_theta=500000.0)),
    "mistral": (2, _mistral(sliding_window=None)),
    "mistral_window": (1, _mistral(sliding_window=12)),
    "ministral3": (
        6,
        _new_style(
            _own("ministral3", head_dim=16),
            {**YARN, "original_max_position_embeddings": 16, **_GROWING},
        ),
    ),
    "qwen2": (3, _qwen2(sliding_window=12, max_window_layers=1, use_sliding_window=False)),
    "qwen2_window": (3, _qwen2(**_SLIDING, sliding_window=9, max_window_layers=1)),
    "qwen3": (7, _qwen3(tie_word_embeddings=True)),
    "qwen3_layer_types": (
        0,
        _new_style(
            _qwen3(**_SLIDING, attention_bias=True, sliding_window=10, layer_types=_TYPES),
            {"rope_type": "default"},
        ),
    ),
    "qwen3_moe": (2, _qwen3_moe(norm_topk_prob=False)),
    "mixtral": (2, _config("mixtral", **_EXPERTS)),
    "gpt_oss": (
        8,
        _own(
            *("gpt_oss",),
            **{**_THREE, **_LONG, **_EXPERTS, "rope_scaling": {**YARN, "truncate": False}},
            # Wide inputs of the experts, so that their gates are clamped.
            **{"sliding_window": 9, "hidden_size": 256, "intermediate_size": 8},
        ),
    ),
    "gpt_oss_plain": (
        3,
        _own("gpt_oss", **_EXPERTS, head_dim=8, attention_bias=False, layer_types=_TYPES[:2]),
    ),
    "smollm3": (1, _own("smollm3", **_TIED, no_rope_layers=[1, 0, 1], mlp_bias=True)),
    "smollm3_window": (
        1,
        _own("smollm3", **_SLIDING, sliding_window=10, no_rope_layer_interval=2),
    ),
    "granite": (0, _own("granite", **GRANITE, attention_bias=True)),
    "phi3": (2, _own("phi3", sliding_window=20)),
    "phi3_short": (0, _own("phi3", **PHI4, original_max_position_embeddings=128)),
    "phi3_long": (0, _own("phi3", **PHI4, original_max_position_embeddings=32)),
    "olmo2": (7, _own("olmo2", attention_bias=True, num_key_value_heads=4)),
    "olmo3": (
        0,
        _own("olmo3", **_THREE, **_LONG, sliding_window=9, layer_types=_TYPES, rope_scaling=YARN),
    ),
    "gemma3_text": (2, _own("gemma3_text", **GEMMA, layer_types=_TYPES, rope_scaling=_EIGHTH)),
    "gemma3_text_capped": (
        2,
        _own("gemma3_text", **GEMMA, sliding_window_pattern=3, final_logit_softcapping=9.0),
    ),
    "gemma2": (0, _own("gemma2", **GEMMA)),
    "cohere": (0, _own("cohere", logit_scale=0.8, attention_bias=True, layer_norm_eps=1e-3)),
    "cohere2": (0, _own("cohere2", **_TIED, sliding_window=9, sliding_window_pattern=3)),
    "stablelm": (0, _own("stablelm", layer_norm_eps=1e-3)),
    "stablelm_bias": (0, _own("stablelm", use_qkv_bias=True, partial_rotary_factor=0.5)),
    "rope_linear": (2, _llama(rope_scaling={"type": "linear", "factor": 4.0})),
    "rope_dynamic": (3, _llama(max_position_embeddings=32, rope_scaling=_DYNAMIC)),
    "rope_llama3": (0, _new_style(_llama(head_dim=16), {"rope_type": "llama3", **LLAMA3})),
    "rope_yarn": (1, _qwen2(**_LONG, rope_scaling=YARN)),
    "rope_yarn_attention_factor": (
        0,
        _llama(**_LONG, rope_scaling={**YARN, "attention_factor": 1.4, "truncate": False}),
    ),
    "rope_yarn_mscale": (
        0,
        _new_style(
            _llama(**_LONG),
            {**YARN, "mscale": 1.5, "mscale_all_dim": 0.7, "beta_fast": 12.0, "beta_slow": 2.0},
        ),
    ),
}

MODELS = {name: config for name, (_, config) in _MODELS.items()}
SEEDS = {name: seed for name, (seed, _) in _MODELS.items()}


def _wide(
    kind: str, head_dim: int, theta: float, longest: int, trained: int = 0, **rope: Any
) -> Config:
    """`trained`: the length of the training, where the kind has one."""
    sizes = {"hidden_size": 4 * head_dim, "head_dim": head_dim, "max_position_embeddings": longest}
    config = _llama(**sizes, rope_theta=theta, rms_norm_eps=1e-6)
    if trained:
        rope["original_max_position_embeddings"] = trained
    return _new_style(config, {"rope_type": kind, **rope})


_BETAS = {"beta_fast": 20.0, "beta_slow": 3.0}
_SCALES = {"mscale": 1.0, "mscale_all_dim": 0.5}
# Rotary embeddings of published sizes, whose frequencies are compared without a model.
ROPES: dict[str, Config] = {
    "default": _wide("default", 128, 1e4, 4096),
    "smollm2": _wide("default", 64, 1e5, 8192),
    "linear": _wide("linear", 128, 1e4, 16384, factor=4.0),
    "dynamic": _wide("dynamic", 128, 1e6, 32768, factor=2.0),
    "dynamic_small": _wide("dynamic", 16, 1e4, 100, factor=4.0),
    "llama31": _wide("llama3", 128, 5e5, 131072, 8192, **LLAMA3),
    "llama32": _wide("llama3", 64, 5e5, 131072, 8192, **{**LLAMA3, "factor": 32.0}),
    "qwen25_yarn": _wide("yarn", 128, 1e6, 131072, 32768, factor=4.0),
    "yarn_untruncated": _wide("yarn", 64, 1e4, 65536, 4096, factor=16.0, truncate=False),
    "yarn_betas": _wide("yarn", 128, 1e4, 32768, 4096, factor=8.0, attention_factor=0.9, **_BETAS),
    "yarn_mscale": _wide("yarn", 64, 1e4, 163840, 4096, factor=40.0, **_SCALES),
    # So short a trained length that both ends of the ramp fall on channel 0.
    "yarn_flat": _wide("yarn", 16, 1e6, 24, 6, factor=4.0),
}

# The model whose texts kvpress compresses.
KVPRESS = _qwen2(vocab_size=400)
