"""Tiny Hugging Face checkpoints with random weights, written by the `safetensors` package."""

import contextlib
import json
import resource
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import tokenizers
from flax import traverse_util
from safetensors.numpy import save_file

from checkpoints_convert.names import expected_tensors, naming_of
from jax_longctx.models.config import ModelConfig
from tests.goldens.cases import GEMMA, GRANITE, PHI4, SIZES
from tests.goldens.weights import hf_shapes

BASE = {**SIZES, "vocab_size": 300, "intermediate_size": 48, "max_position_embeddings": 128}
BASE |= {"bos_token_id": 256, "eos_token_id": [257]}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "llama-tied-biased": {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": 16},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "qwen2-tied": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16},
}
FAMILIES["qwen3-moe"] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    **{"head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    "norm_topk_prob": True,
}
FAMILIES["mixtral"] = {
    "architectures": ["MixtralForCausalLM"],
    **{"num_local_experts": 3, "num_experts_per_tok": 2},
}
FAMILIES["gpt-oss"] = {
    "architectures": ["GptOssForCausalLM"],
    **{"head_dim": 16, "num_local_experts": 3, "num_experts_per_tok": 2, "intermediate_size": 64},
    **{"sliding_window": 16, "attention_bias": True, "rope_theta": 150000.0},
    "rope_scaling": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        "truncate": False,
    },
}
FAMILIES["ministral3"] = {
    "architectures": ["Ministral3ForCausalLM"],
    "head_dim": 16,
    "rope_parameters": {
        **{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0},
        **{"llama_4_scaling_beta": 0.1, "rope_theta": SIZES["rope_theta"]},
    },
}
FAMILIES["qwen3-tied"] = FAMILIES["qwen3"] | {"tie_word_embeddings": True}
FAMILIES |= {
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "num_hidden_layers": 5},
    "granite": {"architectures": ["GraniteForCausalLM"], **GRANITE},
    "phi3": {"architectures": ["Phi3ForCausalLM"], **PHI4, "original_max_position_embeddings": 64},
    "olmo2": {"architectures": ["Olmo2ForCausalLM"]},
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": 16,
        "num_hidden_layers": 5,
        "rope_theta": 500000.0,
    },
    "cohere": {
        "architectures": ["CohereForCausalLM"],
        **{"tie_word_embeddings": True, "layer_norm_eps": 1e-4, "logit_scale": 0.8},
    },
    "gemma3": {
        **GEMMA,
        "architectures": ["Gemma3ForCausalLM"],
        "num_hidden_layers": 7,
        "query_pre_attn_scalar": 16,
    },
}
FAMILIES["stablelm"] = {
    "architectures": ["StableLmForCausalLM"],
    **{"layer_norm_eps": 1e-4, "use_qkv_bias": True, "partial_rotary_factor": 0.5},
}
FAMILIES["cohere2"] = FAMILIES["cohere"] | {
    **{"architectures": ["Cohere2ForCausalLM"], "sliding_window": 16, "num_hidden_layers": 5}
}
FAMILIES["gemma2"] = FAMILIES["gemma3"] | {"architectures": ["Gemma2ForCausalLM"]}

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def hf_config(family: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, **FAMILIES[family], **changes}


def random_state(
    config: dict[str, Any], dtype: str = "float32", seed: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) / 4).astype(DTYPES[dtype])
        for name, shape in hf_shapes(config).items()
    }


# E2M1 by its bits: sign, exponent, mantissa.
MINIFLOATS = [(m / 2 if e == 0 else (1 + m / 2) * 2.0 ** (e - 1)) for e in range(4) for m in (0, 1)]


def packed_experts(state):
    """The state as gpt-oss is published, with random experts in MXFP4; and their numbers."""
    rng, files, plain = np.random.default_rng(4), {}, {}
    for name, value in state.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            files[name] = plain[name] = value
            continue
        experts, inputs, outputs = value.shape
        bits = rng.integers(0, 16, (experts, outputs, inputs // 32, 32), dtype=np.uint8)
        scales = rng.integers(110, 130, bits.shape[:3], dtype=np.uint8)
        files[f"{name}_blocks"] = bits[..., ::2] | bits[..., 1::2] << 4
        files[f"{name}_scales"] = scales
        numbers = np.array(MINIFLOATS)[bits & 7] * np.where(bits & 8, -1, 1)
        numbers = (numbers * 2.0 ** (scales[..., None].astype(int) - 127)).reshape(
            experts, outputs, inputs
        )
        plain[name] = np.ascontiguousarray(numbers.swapaxes(1, 2)).astype(value.dtype)
    return files, plain


def params_from_hf(config: ModelConfig, state: dict[str, np.ndarray]) -> dict[str, Any]:
    """Our nested parameters from a Hugging Face state dict in memory."""
    params: dict[str, Any] = {}
    for name, tensor in expected_tensors(config, naming_of(state)).items():
        assert state[name].shape == tensor.shape, name
        for part in tensor.parts:
            array = part.from_file(tensor.turned(state[name]))
            if part.expert is not None:
                whole = params.setdefault(part.path, np.empty(part.info.shape, array.dtype))
                whole[part.expert] = array
            else:
                params[part.path] = array
    params = {path: jnp.asarray(array) for path, array in params.items()}
    return traverse_util.unflatten_dict(params, sep=".")


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer with 256 bytes and two special tokens."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|begin|>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "chat_template": "{{ 'x' }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_checkpoint(
    folder: Path, config: dict[str, Any], state: dict[str, np.ndarray], *, shards: int = 1
) -> Path:
    """The directory that `save_pretrained` would write."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    if shards == 1:
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = list(state)
    placed = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        own = names[index::shards]
        save_file({name: state[name] for name in own}, folder / file)
        placed |= dict.fromkeys(own, file)
    described = {"metadata": {}, "weight_map": placed}
    (folder / "model.safetensors.index.json").write_text(json.dumps(described))
    return folder


@contextlib.contextmanager
def full_disk(size=30_000):
    """The system refuses to write more than this to a file, as a full disk would."""
    limits, kept = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    # Python would keep a module's bytecode cut off, and never be able to import it again.
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = kept
