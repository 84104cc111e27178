import json

import pytest

from checkpoints_convert import read_config
from checkpoints_convert.config import model_config
from jax_longctx.errors import CheckpointError, ConfigError
from jax_longctx.models.config import ModelConfig
from tests.checkpoints_convert.tiny import hf_config
from tests.goldens.cases import MODELS
from tests.jax_longctx.models.test_config import EVERYTHING


def write(folder, config):
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return path


def by_transformers(folder):
    """What transformers itself makes of the file in a folder, everything filled in."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()


@pytest.mark.parametrize("name", ["llama_mha", "mistral_window", "qwen2", "qwen3"])
def test_keys_that_a_file_leaves_out_have_the_defaults_of_transformers(tmp_path, name):
    """Llama 2 was published without theta, Mistral 7B without the width of a head."""
    left_out = {"head_dim", "rms_norm_eps", "rope_theta", "sliding_window"}
    left_out |= {"num_key_value_heads"} if name == "llama_mha" else set()
    said = {key: value for key, value in MODELS[name].items() if key not in left_out}
    said["max_position_embeddings"] = 8192
    config = read_config(write(tmp_path, said))
    assert config == ModelConfig.from_hf(by_transformers(tmp_path))
    windows = {"mistral_window": (4096,) * 2}.get(name, (None,) * 2)
    assert (config.rope.theta, config.norm_eps, config.windows) == (1e4, 1e-6, windows)
    assert config.head_dim == (128 if name == "qwen3" else 8)
    assert config.num_kv_heads == (4 if name == "llama_mha" else 2)


def test_a_window_of_all_positions_is_none(tmp_path):
    """Phi-3 with 128K positions has one of 256K."""
    said = MODELS["mistral_window"]
    for window, windows in ((said["max_position_embeddings"], None), (12, 12)):
        config = read_config(write(tmp_path, {**said, "sliding_window": window}))
        assert set(config.windows) == {windows}


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


def test_a_llama_may_be_called_mistral():
    """As in transformers, which then knows no window."""
    named = {"model_type": "llama", "architectures": ["MistralForCausalLM"], "sliding_window": 8}
    assert model_config(hf_config("llama") | named) == model_config(hf_config("llama"))


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
