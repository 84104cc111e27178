"""`config.json` files as they were published, and as they come damaged."""

import json
from pathlib import Path
from typing import Any

import pytest

from checkpoints_convert import read_config
from checkpoints_convert.config import model_config
from jax_longctx.errors import CheckpointError, ConfigError
from jax_longctx.models.config import ModelConfig, RopeConfig
from tests.checkpoints_convert.tiny import hf_config
from tests.goldens.cases import MODELS
from tests.jax_longctx.models.test_config import EVERYTHING

# What three published files say, without what is never read.
ALIKE: dict[str, Any] = {"hidden_act": "silu", "tie_word_embeddings": False, "vocab_size": 32000}
ALIKE |= {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32}
PUBLISHED: dict[str, dict[str, Any]] = {
    "llama-2-7b": {
        **ALIKE,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
    },
    "mistral-7b-v0.1": {
        **ALIKE,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 8,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
    },
    "qwen2-7b-instruct": {
        **ALIKE,
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "num_attention_heads": 28,
        "num_hidden_layers": 28,
        "num_key_value_heads": 4,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "use_sliding_window": False,
    },
}
# Head width, kv heads, theta, trained length, biases, windows: some of it the files leave out.
EXPECTED = {
    "llama-2-7b": (128, 32, 1e4, 4096, False, (None,) * 32),
    "mistral-7b-v0.1": (128, 8, 1e4, 32768, False, (4096,) * 32),
    "qwen2-7b-instruct": (128, 4, 1e6, 32768, True, (None,) * 28),
}


def write(folder: Path, config: dict[str, Any]) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def by_transformers(folder: Path) -> dict[str, Any]:
    """What transformers itself makes of the file in a folder, everything filled in."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_files_are_read_with_the_defaults_of_transformers(tmp_path, name):
    config = read_config(write(tmp_path, PUBLISHED[name]))
    assert config == ModelConfig.from_hf(by_transformers(tmp_path))
    rope = RopeConfig(kind="default", theta=config.rope.theta, trained_length=config.max_position)
    assert config.rope == rope
    found = (config.head_dim, config.num_kv_heads, rope.theta, rope.trained_length)
    assert (*found, config.qkv_bias, config.windows) == EXPECTED[name]


def test_qwen2_slides_from_the_layer_its_file_names():
    slides = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 21}
    config = model_config(PUBLISHED["qwen2-7b-instruct"] | slides)
    assert config.windows == (None,) * 21 + (4096,) * 7


@pytest.mark.parametrize("name", EVERYTHING)
def test_what_transformers_saves_and_what_is_exported_are_read_the_same(tmp_path, name):
    ours = ModelConfig.from_hf(EVERYTHING[name])
    # A preset leaves nothing out, a golden does.
    described = MODELS.get(name, EVERYTHING[name])
    before = json.dumps(described)
    assert model_config(described) == ours
    assert json.dumps(described) == before
    exported = ours.to_hf()
    assert read_config(write(tmp_path, exported)) == ours
    assert ModelConfig.from_hf(by_transformers(tmp_path)) == ours
    # What version 4 of transformers reads of it.
    assert model_config({**exported, "rope_parameters": None}) == ours


def test_internlm2_is_read_as_the_llama_it_is():
    flags = {"model_type": "internlm2", "architectures": ["InternLM2ForCausalLM"]}
    llama = hf_config("llama", rope_scaling={"type": "dynamic", "factor": 2.0})
    config = model_config(llama | flags | {"bias": False})
    assert config == model_config(llama)
    assert config.rope == RopeConfig(kind="dynamic", theta=1e4, trained_length=128, factor=2.0)
    # Its own class has biases unless it is told otherwise.
    assert model_config(llama | flags).o_bias and model_config(llama | flags).qkv_bias


def test_a_trained_length_beside_the_rope_settings_wins():
    yarn = {"type": "yarn", "factor": 4.0}
    unnamed = model_config(hf_config("llama", rope_scaling=yarn))
    assert (unnamed.rope.trained_length, unnamed.trained_length) == (128, 512)
    both = {**yarn, "original_max_position_embeddings": 64}
    assert model_config(hf_config("llama", rope_scaling=both)).rope.trained_length == 64
    beside = hf_config("llama", rope_scaling=both, original_max_position_embeddings=32)
    assert model_config(beside).rope.trained_length == 32


def test_code_of_a_checkpoint_is_not_run(tmp_path):
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = hf_config("llama", auto_map={"AutoConfig": "evil.Config"})
    assert read_config(write(tmp_path, config)) == model_config(hf_config("llama"))
    theirs = {**config, "model_type": "evil", "architectures": ["EvilForCausalLM"]}
    with pytest.raises(ConfigError, match="architecture 'EvilForCausalLM' is not implemented"):
        read_config(write(tmp_path, theirs))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GemmaForCausalLM"]},
            "architecture 'GemmaForCausalLM' is not implemented; implemented: LlamaForCausalLM",
        ),
        ({"architectures": "LlamaForCausalLM"}, "'architectures' must be a list"),
        ({"architectures": None, "model_type": "x"}, "'x' is not implemented; implemented: llama"),
        ({"architectures": [], "model_type": None}, "model_type None is not"),
        ({"model_type": "mistral"}, "'LlamaForCausalLM' contradicts model_type 'mistral'"),
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers' holds 1000000000, expected at most"),
        ({"hidden_size": -(10**30)}, "'hidden_size' holds -1000000000000000000, expected"),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 10**19}},
            "'rope_scaling' holds 10000000000000000000, expected at most 2147483647",
        ),
        ({"num_hidden_layers": 2.0}, "cannot be used: "),
        ({"num_attention_heads": 0}, "cannot be used: "),
        ({"hidden_size": "64"}, "cannot be used: "),
        ({"rope_scaling": {"type": "linear"}}, "Missing required keys in `rope_param"),
        ({"rope_scaling": "linear"}, "cannot be used: "),
        ({"rms_norm_eps": float("nan")}, "'rms_norm_eps' must be a finite number"),
        (
            {"architectures": ["MistralForCausalLM"], "layer_types": ["full_attention"] * 2},
            "layer_types is not part of family 'mistral'",
        ),
    ],
)
def test_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError) as caught:
        model_config(hf_config("llama", **changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_config_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: No such file"):
        read_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[" * 200_000)
    with pytest.raises(CheckpointError, match=r"config\.json is not a JSON file: .*too deeply"):
        read_config(tmp_path / "config.json")
