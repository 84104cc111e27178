"""A family that only this test knows: one entry of the table, one function a new kind of thing."""

import functools
import json
import math

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import AutoConfig, LlamaConfig

from checkpoints_convert import convert, export
from jax_longctx.engine import Engine
from jax_longctx.errors import ConfigError
from jax_longctx.methods import make_method
from jax_longctx.models import llama
from jax_longctx.models.checkpoint import load_params
from jax_longctx.models.families import FAMILIES, LLAMA_NAMES, Family
from jax_longctx.sharding import make_mesh
from tests.checkpoints_convert.tiny import hf_config, random_state, same_bits, write_checkpoint
from tests.oracle import probabilities, rope, weighted_values

TOY = Family(
    architecture="ToyForCausalLM",
    # Its own names, and one tensor for both halves of the MLP's input.
    names={
        **{ours: theirs.replace("model.", "toy.") for ours, theirs in LLAMA_NAMES.items()},
        "layers.*.mlp.gate": "toy.layers.*.mlp.gate_up",
        "layers.*.mlp.up": "toy.layers.*.mlp.gate_up",
        "head": "out",
    },
    activation="gelu",
    norm="one plus",
    softmax_scale=lambda head_dim: 0.5 / head_dim,
    embed_scale=math.sqrt,
    rope_kinds=("default",),
)


class ToyConfig(LlamaConfig):
    model_type = "toy"


def one_plus(x, scale, eps):
    """An RMS norm whose stored scale is what the scale exceeds 1 by, as in Gemma."""
    return llama.rms_norm(x, 1 + scale, eps)


@pytest.fixture
def toy(monkeypatch):
    """The family's entry, and its config and tensors."""
    monkeypatch.setitem(FAMILIES, "toy", TOY)
    monkeypatch.setitem(
        llama.ACTIVATIONS, "gelu", functools.partial(jax.nn.gelu, approximate=False)
    )
    monkeypatch.setitem(llama.NORMS, "one plus", one_plus)
    AutoConfig.register("toy", ToyConfig, exist_ok=True)
    described = hf_config("llama") | {"architectures": ["ToyForCausalLM"], "model_type": "toy"}
    described["hidden_act"] = "gelu"
    state = random_state(hf_config("llama"))
    for index in range(described["num_hidden_layers"]):
        gate, up = (state.pop(f"model.layers.{index}.mlp.{x}_proj.weight") for x in ("gate", "up"))
        state[f"model.layers.{index}.mlp.gate_up.weight"] = np.concatenate([gate, up])
    state["out.weight"] = state.pop("lm_head.weight")
    return described, {name.replace("model.", "toy."): value for name, value in state.items()}


def toy_logits(described, state, tokens):
    """The whole model in numpy, from the file's tensors: `[T, V]`."""
    n, k = described["num_attention_heads"], described["num_key_value_heads"]
    length, width = len(tokens), described["hidden_size"]
    h = width // n
    at = np.arange(length)

    def norm(x, name):
        rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + described["rms_norm_eps"])
        return x / rms * (1 + state[name])

    x = state["toy.embed_tokens.weight"][tokens].astype(np.float64) * math.sqrt(width)
    for index in range(described["num_hidden_layers"]):
        prefix = f"toy.layers.{index}."
        q, k_, v = (
            (
                norm(x, prefix + "input_layernorm.weight")
                @ state[f"{prefix}self_attn.{y}_proj.weight"].T
            ).reshape(length, heads, h)
            for y, heads in (("q", n), ("k", k), ("v", k))
        )
        # The oracle divides by the root of the head's width.
        q = rope(q, at, described["rope_theta"]) * (0.5 / h * math.sqrt(h))
        k_ = rope(k_, at, described["rope_theta"])
        p = probabilities(q, k_, at[:, None] >= at)
        out = weighted_values(p, v).reshape(length, -1)
        x = x + out @ state[prefix + "self_attn.o_proj.weight"].T
        fused = norm(x, prefix + "post_attention_layernorm.weight")
        gate, up = np.split(fused @ state[prefix + "mlp.gate_up.weight"].T, 2, axis=-1)
        gelu = gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2))) / 2
        x = x + (gelu * up) @ state[prefix + "mlp.down_proj.weight"].T
    return norm(x, "toy.norm.weight") @ state["out.weight"].T


def test_a_new_family_is_converted_run_and_exported(tmp_path, toy):
    described, state = toy
    source = write_checkpoint(tmp_path / "hf", described, state)
    manifest = convert(source, tmp_path / "ours")
    assert manifest.config.family == "toy"
    params = load_params(tmp_path / "ours", make_mesh())
    tokens = np.random.default_rng(3).integers(0, 300, 40).tolist()
    engine = Engine(manifest.config, params, make_method("full", {}), make_mesh())
    (ours,) = engine.score([tokens])
    np.testing.assert_allclose(ours, toy_logits(described, state, tokens), atol=2e-4)
    export(tmp_path / "ours", tmp_path / "back")
    again = load_file(tmp_path / "back" / "model.safetensors")
    assert again.keys() == state.keys()
    assert all(same_bits(again[name], value) for name, value in state.items())
    assert json.loads((tmp_path / "back" / "config.json").read_text())["hidden_act"] == "gelu"


def test_a_kind_of_rope_that_the_family_does_not_have_is_refused(tmp_path, toy):
    described, state = toy
    described["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    source = write_checkpoint(tmp_path / "hf", described, state)
    with pytest.raises(ConfigError, match="'linear' is not implemented for family 'toy'"):
        convert(source, tmp_path / "ours")
