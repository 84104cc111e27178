"""GGUF metadata -> the entries of a Hugging Face config.

llama.cpp writes a model's numbers under its architecture's name (`llama.block_count`). Three things
are not said there and follow from the tensors: tied embeddings (no `output.weight`), biases, and
llama3's rotary scaling, of which the file keeps only the divisor of every frequency
(`rope_freqs.weight`).
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jax_longctx.errors import CheckpointError, ConfigError

__all__ = ["INTERLEAVED", "config_from_metadata", "llama3_scaling"]

# Architectures whose q and k rows llama.cpp pairs for interleaved rotary embedding.
INTERLEAVED = ("llama", "internlm2")

CLASSES = {
    "llama": ("llama", "LlamaForCausalLM"),
    # Once its fused projection is split, as in GGUF it is, InternLM2 is a Llama.
    "internlm2": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
}

# The format's value where a file says nothing (llama.cpp, `rope_freq_base`).
DEFAULT_THETA = 10000.0


def config_from_metadata(
    path: Path,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    factors: np.ndarray | None,
) -> dict[str, Any]:
    """A config as `model_config` reads it.

    Raises:
      CheckpointError: the metadata lacks something.
      ConfigError: an architecture or rotary scaling that is not implemented.
    """
    architecture = str(metadata.get("general.architecture"))
    if architecture not in CLASSES:
        raise ConfigError(
            f"{path}: architecture {architecture!r} is not implemented; "
            f"implemented are {', '.join(CLASSES)}"
        )
    said = _Said(path, metadata, architecture)
    model_type, class_name = CLASSES[architecture]
    heads, width = said.need("attention.head_count"), said.need("embedding_length")
    if "token_embd.weight" not in shapes:
        raise CheckpointError(f"{path}: tensor token_embd.weight is missing")
    config = {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": shapes["token_embd.weight"][0],
        "hidden_size": width,
        "intermediate_size": said.need("feed_forward_length"),
        "num_hidden_layers": said.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": said.get("attention.head_count_kv", heads),
        "head_dim": said.get("attention.key_length", width // heads),
        "hidden_act": "silu",
        "rms_norm_eps": _decimal(said.need("attention.layer_norm_rms_epsilon", float)),
        "rope_theta": _decimal(said.get("rope.freq_base", DEFAULT_THETA, float)),
        "max_position_embeddings": said.need("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
    }
    config["rope_scaling"] = _rope_scaling(said, config, factors)
    if (window := said.get("attention.sliding_window", None)) and architecture == "llama":
        config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        config["sliding_window"] = window
    for key in ("bos_token_id", "eos_token_id"):
        if isinstance(token := metadata.get(f"tokenizer.ggml.{key}"), int):
            config[key] = token
    _check_plain(said, config)
    return config


class _Said:
    """The entries of one architecture."""

    def __init__(self, path: Path, metadata: Mapping[str, Any], architecture: str):
        self.path, self._metadata, self._prefix = path, metadata, architecture

    def get(self, key: str, default: Any, kind: type = int) -> Any:
        value = self._metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(value, list):
            raise ConfigError(f"{self.path}: {self._prefix}.{key} differs by layer: {value!s:.80}")
        if value is not default and not isinstance(value, kind):
            raise CheckpointError(
                f"{self.path}: {self._prefix}.{key} is {value!r:.80}, expected {kind.__name__}"
            )
        return value

    def need(self, key: str, kind: type = int) -> Any:
        value = self.get(key, None, kind)
        if value is None:
            raise CheckpointError(f"{self.path}: the metadata has no {self._prefix}.{key}")
        if value == 0:
            raise CheckpointError(f"{self.path}: {self._prefix}.{key} is 0")
        return value


def _decimal(value: float) -> float:
    """The number that was written, not its float32 neighbour: 1e-05 for 9.999999747e-06."""
    return float(str(np.float32(value)))


def _check_plain(said: _Said, config: Mapping[str, Any]) -> None:
    if said.get("expert_count", 0):
        raise ConfigError(f"{said.path}: mixtures of experts are not implemented")
    rotated = said.get("rope.dimension_count", config["head_dim"])
    if rotated != config["head_dim"]:
        raise ConfigError(
            f"{said.path}: rotates {rotated} of {config['head_dim']} dimensions of a head; "
            f"partial rotary embedding is not implemented"
        )
    if said.get("attention.value_length", config["head_dim"]) != config["head_dim"]:
        raise ConfigError(f"{said.path}: values of another size than keys are not implemented")


def _rope_scaling(
    said: _Said, config: Mapping[str, Any], factors: np.ndarray | None
) -> dict[str, Any] | None:
    kind = said.get("rope.scaling.type", "none", str)
    # Files from before scaling had a type.
    linear = said.get("rope.scale_linear", 1.0, float)
    if kind == "none" and linear != 1.0:
        return {"rope_type": "linear", "factor": _decimal(linear)}
    if factors is not None and not np.all(factors == 1.0):
        if kind != "none":
            raise ConfigError(f"{said.path}: rope_freqs.weight together with {kind} scaling")
        return llama3_scaling(said.path, config, factors)
    if kind == "none":
        return None
    factor = _decimal(said.need("rope.scaling.factor", float))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise ConfigError(f"{said.path}: rotary scaling {kind!r} is not implemented")
    scaling = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": said.need("rope.scaling.original_context_length"),
    }
    names = (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow"))
    for key, name in names:
        if (value := said.get(f"rope.scaling.{key}", None, float)) is not None:
            scaling[name] = _decimal(value)
    older = said.get("rope.scaling.attn_factor", 1.0, float)
    attention = said.get("rope.scaling.yarn_attn_factor", older, float)
    if attention != 1.0:
        # llama.cpp multiplies this with YaRN's own factor, which Hugging Face replaces.
        scaling["attention_factor"] = _decimal(attention) * (0.1 * math.log(max(factor, 1.0)) + 1.0)
    return scaling


def llama3_scaling(path: Path, config: Mapping[str, Any], factors: np.ndarray) -> dict[str, Any]:
    """llama3's parameters from the divisor of each frequency.

    A frequency of wavelength w is divided by 1 / ((1 - s) / factor + s), where
    s = (trained / w - low) / (high - low) clipped to 0..1. So s is linear in 1 / w between the two
    ends: a line through the divisors that are neither 1 nor `factor` gives trained / low and
    high / low. Only these ratios matter; low is 1 in every Llama.

    Raises:
      ConfigError: the divisors do not follow this formula.
    """
    head_dim = config["head_dim"]
    wrong = ConfigError(f"{path}: rope_freqs.weight is no llama3 scaling")
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    inverse_wave = config["rope_theta"] ** -exponents / (2 * math.pi)
    divisors = factors.astype(np.float64)
    if divisors.shape != inverse_wave.shape or not np.all((divisors >= 1) & np.isfinite(divisors)):
        raise wrong
    factor = _decimal(divisors.max())
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    between = (divisors > 1.0) & (divisors < divisors.max())
    if between.sum() < 2:
        raise wrong
    slope, offset = np.polyfit(inverse_wave[between], smooth[between], 1)
    low = 1.0
    # The line falls below 0 where frequencies are divided by the whole factor.
    if not offset < 0 < slope:
        raise wrong
    high, trained = low - low / offset, -slope * low / offset
    high, trained = round(high, 2), round(trained)
    line = (trained * inverse_wave - low) / (high - low)
    again = 1 / ((1 - line.clip(0, 1)) / factor + line.clip(0, 1))
    if not np.allclose(again, divisors, rtol=1e-4):
        raise wrong
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }
