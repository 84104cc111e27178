"""A family that only its tutorial knows: one entry of the table, one line a new kind of thing."""

import dataclasses
import json
import math
import textwrap

import numpy as np
import pytest
from typer.testing import CliRunner

from checkpoints_convert import convert, export
from jax_longctx.cli.main import app
from jax_longctx.errors import CheckpointError, ConfigError
from jax_longctx.methods import make_method
from jax_longctx.models import families, llama
from jax_longctx.models.families import FAMILIES, LLAMA_NAMES, Family
from jax_longctx.models.storage import load_params, read_manifest
from jax_longctx.sharding import make_mesh
from tests.checkpoints_convert.test_huggingface import assert_same_state, load_all
from tests.checkpoints_convert.tiny import hf_config, random_state, write_checkpoint
from tests.oracle import probabilities, rope, weighted_values
from tests.outside import files_of
from tests.support import engine_over, score

# Llama's names -> Robin's, written down apart from the table.
RENAMED = {
    "model.embed_tokens": "robin.words",
    "model.layers": "robin.blocks",
    "input_layernorm": "norm_in",
    "self_attn.q_proj": "attn.query",
    "self_attn.k_proj": "attn.key",
    "self_attn.v_proj": "attn.value",
    "self_attn.o_proj": "attn.out",
    "post_attention_layernorm": "norm_mid",
    "mlp.down_proj": "ff.down",
    "model.norm": "robin.norm_out",
    "lm_head": "robin.out",
}


@pytest.fixture
def robin(monkeypatch):
    """The tutorial's code as if it stood in the files, and a config and tensors of the family."""
    for name in ("ACTIVATIONS", "NORMS"):
        monkeypatch.setattr(llama, name, dict(getattr(llama, name)))
    files = files_of("model_family")
    exec(files["jax_longctx/models/llama.py"], dict(vars(llama)))
    entry = textwrap.dedent(files["jax_longctx/models/families.py"])
    for name, family in eval(f"{{{entry}}}", dict(vars(families))).items():
        monkeypatch.setitem(FAMILIES, name, family)
    described = hf_config("llama") | {"architectures": ["RobinForCausalLM"], "model_type": "robin"}
    described["hidden_act"] = "gelu"
    del described["rope_theta"]
    # Qwen2 has biases on q, k and v.
    state = random_state(hf_config("qwen2"))
    for index in range(described["num_hidden_layers"]):
        gate, up = (state.pop(f"model.layers.{index}.mlp.{x}_proj.weight") for x in ("gate", "up"))
        state[f"model.layers.{index}.ff.gate_up.weight"] = np.concatenate([gate, up])
    for old, new in RENAMED.items():
        state = {name.replace(old, new): value for name, value in state.items()}
    return described, state


def robin_logits(described, state, tokens):
    """The whole model in numpy, from the file's tensors: `[T, V]`."""
    n, k = described["num_attention_heads"], described["num_key_value_heads"]
    length, width = len(tokens), described["hidden_size"]
    h = width // n
    at = np.arange(length)

    def norm(x, name):
        rms = np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + described["rms_norm_eps"])
        return x / rms * (1 + state[name])

    x = state["robin.words.weight"][tokens].astype(np.float64) * math.sqrt(width)
    for index in range(described["num_hidden_layers"]):
        prefix = f"robin.blocks.{index}."
        fed = norm(x, prefix + "norm_in.weight")
        q, k_, v = (
            (fed @ state[f"{prefix}attn.{y}.weight"].T + state[f"{prefix}attn.{y}.bias"]).reshape(
                length, heads, h
            )
            for y, heads in (("query", n), ("key", k), ("value", k))
        )
        # The oracle divides by the root of the head's width.
        q = rope(q, at, 10000.0) * (0.5 / h * math.sqrt(h))
        k_ = rope(k_, at, 10000.0)
        p = probabilities(q, k_, at[:, None] >= at)
        out = weighted_values(p, v).reshape(length, -1)
        x = x + out @ state[prefix + "attn.out.weight"].T
        fused = norm(x, prefix + "norm_mid.weight")
        gate, up = np.split(fused @ state[prefix + "ff.gate_up.weight"].T, 2, axis=-1)
        gelu = gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2))) / 2
        x = x + (gelu * up) @ state[prefix + "ff.down.weight"].T
    return norm(x, "robin.norm_out.weight") @ state["robin.out.weight"].T


def test_a_new_family_is_converted_run_and_exported(tmp_path, robin):
    described, state = robin
    source = write_checkpoint(tmp_path / "hf", described, state)
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "ours")])
    assert result.exit_code == 0, result.output
    config = read_manifest(tmp_path / "ours").config
    assert config.family == "robin"
    params = load_params(tmp_path / "ours")
    tokens = np.random.default_rng(3).integers(0, 300, 40).tolist()
    (ours,) = score(engine_over(config, params, make_method("full", {}), make_mesh()), [tokens])
    np.testing.assert_allclose(ours, robin_logits(described, state, tokens), atol=2e-4)
    export(tmp_path / "ours", tmp_path / "back")
    assert_same_state(load_all(tmp_path / "back"), state)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (written["model_type"], written["hidden_act"]) == ("robin", "gelu")


def test_a_family_that_always_ties_names_no_head(tmp_path, robin, monkeypatch):
    described, state = robin
    entry = FAMILIES["robin"]
    names = {ours: theirs for ours, theirs in entry.names.items() if ours != "head"}
    monkeypatch.setitem(FAMILIES, "robin", dataclasses.replace(entry, names=names))
    del described["tie_word_embeddings"], state["robin.out.weight"]
    source = write_checkpoint(tmp_path / "hf", described, state)
    assert convert(source, tmp_path / "ours").config.tie_embeddings
    export(tmp_path / "ours", tmp_path / "back")
    assert load_all(tmp_path / "back").keys() == state.keys()
    untied = write_checkpoint(tmp_path / "un", described | {"tie_word_embeddings": False}, state)
    with pytest.raises(ConfigError, match=r"'robin' has no head .* set tie_word_embeddings to"):
        convert(untied, tmp_path / "other")


def test_what_a_family_lacks_is_told(tmp_path, robin, monkeypatch):
    described, state = robin
    source = write_checkpoint(tmp_path / "hf", described, state)
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    scaled = write_checkpoint(tmp_path / "scaled", described | linear, state)
    with pytest.raises(ConfigError, match="'linear' is not implemented for family 'robin'"):
        convert(scaled, tmp_path / "ours")
    headless = {name: value for name, value in state.items() if name != "robin.out.weight"}
    headless = write_checkpoint(tmp_path / "headless", described, headless)
    with pytest.raises(CheckpointError, match=r"robin\.out\.weight .*\(set tie_word_embeddings"):
        convert(headless, tmp_path / "ours")
    entry = FAMILIES["robin"]
    monkeypatch.setitem(FAMILIES, "robin", dataclasses.replace(entry, defaults=None))
    with pytest.raises(ConfigError, match="family 'robin': transformers knows no model_type 'rob"):
        convert(source, tmp_path / "ours")
    monkeypatch.delitem(FAMILIES, "robin")
    del described["architectures"]
    source = write_checkpoint(tmp_path / "unknown", described, state)
    result = CliRunner().invoke(app, ["convert", str(source), str(tmp_path / "ours")])
    assert result.exit_code == 2
    said = " ".join(result.stderr.split())
    assert "model_type 'robin' is not implemented; implemented: llama (LlamaForCausalLM)," in said


def test_an_entry_that_lacks_a_name_is_refused():
    lacking = {ours: theirs for ours, theirs in LLAMA_NAMES.items() if "k" not in ours}
    k = r"layers\.\*\.attn\.k"
    for qk_norm, names in ((None, k), ("head", f"{k}, {k}_norm")):
        with pytest.raises(ConfigError, match=f"`names` lacks {names}$"):
            Family(architecture="ToyForCausalLM", names=lacking, qk_norm=qk_norm)
