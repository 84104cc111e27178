"""Random weights that both sides of a comparison fill in: only numpy, no stored arrays.

A tensor depends on the seed, its name and its shape alone, not on the order of the others.
"""

import itertools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["as_in_files", "hf_shapes", "random_state", "random_tokens"]

# What a weight's uniform distribution is scaled to: its standard deviation times sqrt(fan in).
# Queries and keys are large, so that attention is uneven and depends on positions.
GAINS = {"q_proj": 1.6, "k_proj": 1.6, "lm_head": 2.0}

NORMS = ("input", "post_attention")
OUT_NORMS = ("post_attention", "post_feedforward")
FOUR_NORMS = ("input", "post_attention", "pre_feedforward", "post_feedforward")
PHI3_FUSED = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")


def random_state(shapes: Mapping[str, Sequence[int]], seed: int) -> dict[str, np.ndarray]:
    """A float32 state dict of these names and shapes."""
    return {name: _tensor(name, tuple(shape), seed) for name, shape in shapes.items()}


def hf_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes as transformers has them, written down apart from the converter's table."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    h = config.get("head_dim") or d // heads
    family = config["architectures"][0]
    biased, mlp_biased = (config.get(f"{part}_bias", False) for part in ("attention", "mlp"))
    qkv_biased = biased or config.get("use_qkv_bias", family == "Qwen2ForCausalLM")
    kind = family.removesuffix("ForCausalLM").rstrip("3")
    norms = {
        "Cohere": ("input",),
        "Cohere2": ("input",),
        "Olmo2": OUT_NORMS,
        "Olmo": OUT_NORMS,
        "Gemma2": FOUR_NORMS,
        "Gemma": FOUR_NORMS,
    }
    layer = {f"{name}_layernorm.weight": (d,) for name in norms.get(kind, NORMS)}
    matrices = [
        ("self_attn.q", heads * h, d, qkv_biased),
        ("self_attn.k", kv * h, d, qkv_biased),
        ("self_attn.v", kv * h, d, qkv_biased),
        ("self_attn.o", d, heads * h, biased),
    ]
    if (experts := config.get("num_experts")) is not None:
        f, layer["mlp.gate.weight"] = config["moe_intermediate_size"], (experts, d)
        places = [f"mlp.experts.{expert}" for expert in range(experts)]
    elif family == "GptOssForCausalLM":
        count, places = config["num_local_experts"], []
        layer |= {"mlp.router.weight": (count, d), "mlp.router.bias": (count,)}
        layer |= {"mlp.experts.gate_up_proj": (count, d, 2 * f), "self_attn.sinks": (heads,)}
        layer |= {"mlp.experts.gate_up_proj_bias": (count, 2 * f)}
        layer |= {"mlp.experts.down_proj": (count, f, d), "mlp.experts.down_proj_bias": (count, d)}
    elif (experts := config.get("num_local_experts")) is not None:
        layer["block_sparse_moe.gate.weight"] = (experts, d)
        for expert, (w, rows, columns) in itertools.product(
            range(experts), (("w1", f, d), ("w2", d, f), ("w3", f, d))
        ):
            layer[f"block_sparse_moe.experts.{expert}.{w}.weight"] = (rows, columns)
        places = []
    else:
        places = ["mlp"]
    for place in places:
        sizes = (("gate", f, d), ("up", f, d), ("down", d, f))
        matrices += [(f"{place}.{name}", *shape, mlp_biased) for name, *shape in sizes]
    for name, rows, columns, has_bias in matrices:
        layer[f"{name}_proj.weight"] = (rows, columns)
        if has_bias:
            layer[f"{name}_proj.bias"] = (rows,)
    if kind == "Phi":
        # Queries, keys and values are one tensor, and so are gate and up.
        layer = {name: it for name, it in layer.items() if name.split(".")[1] not in PHI3_FUSED}
        layer["self_attn.qkv_proj.weight"] = ((heads + 2 * kv) * h, d)
        layer["mlp.gate_up_proj.weight"] = (2 * f, d)
    if kind in ("Qwen", "Qwen3Moe", "Gemma"):
        layer |= {f"self_attn.{name}_norm.weight": (h,) for name in "qk"}
    if kind in ("Olmo2", "Olmo"):
        layer["self_attn.q_norm.weight"] = (heads * h,)
        layer["self_attn.k_norm.weight"] = (kv * h,)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, d)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (d,)
    if kind == "StableLm":
        norms = [name for name in shapes if "norm" in name]
        shapes |= {name.replace(".weight", ".bias"): (d,) for name in norms}
    return shapes if config["tie_word_embeddings"] else shapes | {"lm_head.weight": (v, d)}


def as_in_files(state: dict[str, np.ndarray], architecture: str) -> dict[str, np.ndarray]:
    """The state of transformers' model by the names of its files: there each expert is apart."""
    if architecture == "GptOssForCausalLM":
        return state
    found: dict[str, np.ndarray] = {}
    for name, x in state.items():
        place, _, kind = name.rpartition(".experts.")
        mixtral = architecture == "MixtralForCausalLM"
        if mixtral:
            place = place.replace(".mlp", ".block_sparse_moe")
            name = name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
        if kind not in ("gate_up_proj", "down_proj"):
            found[name] = x
            continue
        parts = {"down_proj": x}
        if kind == "gate_up_proj":
            parts = dict(zip(("gate_proj", "up_proj"), np.split(x, 2, axis=1), strict=True))
        names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if mixtral else {}
        for part, stacked in parts.items():
            for expert, own in enumerate(stacked):
                found[f"{place}.experts.{expert}.{names.get(part, part)}.weight"] = own
    return found


def random_tokens(count: int, vocab: int, seed: int) -> np.ndarray:
    """Token ids of a prompt."""
    return np.random.default_rng([seed, 1]).integers(0, vocab, count)


def _tensor(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    # Of standard deviation 1. `random` is the bit generator's own output, in every numpy.
    values = (rng.random(shape) * 2 - 1) * 3**0.5
    if "norm" in name:
        values = 1 + 0.3 * values
    elif name.endswith("bias"):
        values = 0.3 * values
    elif "embed" in name:
        # Small, so that what the layers add decides, also where this is the head too.
        values = 0.3 * values
    else:
        gain = next((gain for part, gain in GAINS.items() if part in name), 1.0)
        values = gain * values / shape[-1] ** 0.5
    return values.astype(np.float32)
