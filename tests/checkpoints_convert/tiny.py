"""Tiny Hugging Face checkpoints with random weights, written by the `safetensors` package."""

import contextlib
import json
import resource
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

BASE = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": [257],
}

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
    "qwen3-tied": {
        "architectures": ["Qwen3ForCausalLM"],
        "head_dim": 16,
        "tie_word_embeddings": True,
    },
}

DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


def hf_config(family: str, **changes: Any) -> dict[str, Any]:
    return {**BASE, **FAMILIES[family], **changes}


def hf_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers has them, written down apart from the converter's table."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    h = config.get("head_dim") or d // heads
    family = config["architectures"][0]
    qkv_bias = family == "Qwen2ForCausalLM" or config.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = (d,)
        shapes[layer + "post_attention_layernorm.weight"] = (d,)
        for name, rows in (("q", heads * h), ("k", kv * h), ("v", kv * h)):
            shapes[layer + f"self_attn.{name}_proj.weight"] = (rows, d)
            if qkv_bias:
                shapes[layer + f"self_attn.{name}_proj.bias"] = (rows,)
        shapes[layer + "self_attn.o_proj.weight"] = (d, heads * h)
        if config.get("attention_bias"):
            shapes[layer + "self_attn.o_proj.bias"] = (d,)
        if family == "Qwen3ForCausalLM":
            shapes[layer + "self_attn.q_norm.weight"] = (h,)
            shapes[layer + "self_attn.k_norm.weight"] = (h,)
        for name, shape in (("gate", (f, d)), ("up", (f, d)), ("down", (d, f))):
            shapes[layer + f"mlp.{name}_proj.weight"] = shape
            if config.get("mlp_bias"):
                shapes[layer + f"mlp.{name}_proj.bias"] = shape[:1]
    shapes["model.norm.weight"] = (d,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, d)
    return shapes


def random_state(
    config: dict[str, Any], dtype: str = "float32", seed: int = 0
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) / 4).astype(DTYPES[dtype])
        for name, shape in hf_shapes(config).items()
    }


def params_from_hf(config: ModelConfig, state: dict[str, np.ndarray]) -> dict[str, Any]:
    """Our nested parameters from a Hugging Face state dict in memory."""
    params = {}
    for name, tensor in expected_tensors(config, naming_of(state)).items():
        assert state[name].shape == tensor.shape, name
        for part in tensor.parts:
            params[part.path] = jnp.asarray(part.from_file(state[name]))
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
    folder: Path,
    config: dict[str, Any],
    state: dict[str, np.ndarray],
    *,
    shards: int = 1,
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
def full_disk():
    """The system refuses to write more than this to a file, as a full disk would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )
