"""Reading, writing and refusing model configs."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jax_longctx.errors import ConfigError
from jax_longctx.models.config import ModelConfig, RopeConfig
from jax_longctx.models.presets import PRESETS
from tests.goldens.cases import MODELS

DATA = Path(__file__).parents[2] / "goldens" / "data"

LLAMA31 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def hf(family: str = "llama", without: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    """A config.json of a family, with changes."""
    names = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    config = {
        "model_type": family,
        "architectures": [f"{names.get(family, 'InternLM2')}ForCausalLM"],
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    }
    if family == "mistral":
        config["sliding_window"] = None
    if family == "qwen3":
        config["head_dim"] = 32
    return {key: value for key, value in (config | changes).items() if key not in without}


def read(family: str = "llama", **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(hf(family, **changes))


def test_llama_is_read_field_by_field():
    assert read(rope_scaling=LLAMA31, pretraining_tp=2) == ModelConfig(
        family="llama",
        vocab_size=1000,
        num_layers=4,
        model_dim=64,
        mlp_dim=96,
        num_heads=8,
        num_kv_heads=2,
        head_dim=8,
        norm_eps=1e-6,
        rope=RopeConfig(
            kind="llama3",
            theta=5e5,
            trained_length=8192,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        max_position=131072,
        tie_embeddings=False,
        windows=(None, None, None, None),
    )


def test_the_classic_llama_has_a_key_head_for_every_query_head():
    assert read(without=("num_key_value_heads",)).num_kv_heads == 8
    assert read(num_key_value_heads=None).num_kv_heads == 8


@pytest.mark.parametrize(
    ("family", "said", "expected"),
    [
        ("llama", {}, (False, False, False)),
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("mistral", {}, (False, False, False)),
        ("qwen2", {}, (True, False, False)),
        ("qwen2", {"attention_bias": True}, (True, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
        ("internlm2", {"bias": True}, (True, True, False)),
        ("internlm2", {"bias": False}, (False, False, False)),
    ],
)
def test_biases_of_each_family(family, said, expected):
    config = read(family, **said)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == expected


def test_only_qwen3_norms_queries_and_keys():
    norms = {family: read(family).qk_norm for family in ("llama", "mistral", "qwen2", "qwen3")}
    assert norms == {"llama": False, "mistral": False, "qwen2": False, "qwen3": True}


@pytest.mark.parametrize(
    ("family", "said", "windows"),
    [
        ("mistral", {"sliding_window": 4096}, (4096,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("qwen2", {"sliding_window": 99, "use_sliding_window": False}, (None,) * 4),
        (
            "qwen2",
            {"sliding_window": 99, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 99),
        ),
        (
            "qwen2",
            {"sliding_window": 99, "use_sliding_window": True, "max_window_layers": 28},
            (None,) * 4,
        ),
        (
            "qwen3",
            {
                "sliding_window": 7,
                "use_sliding_window": True,
                "max_window_layers": 3,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (7, None, 7, None),
        ),
        ("qwen3", {"sliding_window": None, "layer_types": ["full_attention"] * 4}, (None,) * 4),
    ],
)
def test_sliding_windows(family, said, windows):
    assert read(family, **said).windows == windows


def test_rope_of_older_and_newer_configs_is_the_same():
    older = read("qwen2", rope_theta=1e6, rope_scaling=YARN)
    newer = read(
        "qwen2",
        without=("rope_theta",),
        rope_parameters={**YARN, "rope_type": "yarn", "rope_theta": 1e6},
    )
    assert older == newer
    assert older.rope == RopeConfig(kind="yarn", theta=1e6, trained_length=32768, factor=4.0)


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_dynamic_rope_scales_the_length_of_the_config(spelling):
    scaling = {spelling: "dynamic", "factor": 2.0, "original_max_position_embeddings": 1024}
    rope = read("internlm2", max_position_embeddings=32768, rope_scaling=scaling).rope
    assert rope == RopeConfig(kind="dynamic", theta=5e5, trained_length=32768, factor=2.0)


def test_yarn_reads_all_its_settings():
    settings = {"attention_factor": 1.2, "mscale": 0.9, "mscale_all_dim": 0.8, "beta_fast": 16}
    rope = read(rope_scaling={**YARN, **settings, "beta_slow": 2, "truncate": False}).rope
    assert (rope.attention_factor, rope.mscale, rope.mscale_all_dim) == (1.2, 0.9, 0.8)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (16.0, 2.0, False)


def test_the_trained_length_may_stand_beside_the_rope_settings():
    scaling = {"type": "yarn", "factor": 4.0}
    assert read(rope_scaling=scaling).rope.trained_length == 131072
    beside = read(rope_scaling=scaling, original_max_position_embeddings=4096)
    assert beside.rope.trained_length == 4096


REFUSED = {
    "architecture": (
        {"architectures": ["GemmaForCausalLM"]},
        "architecture 'GemmaForCausalLM' is not implemented; implemented: LlamaForCausalLM",
    ),
    "model type": (
        {"architectures": None, "model_type": "gpt2"},
        "model_type 'gpt2' is not implemented; implemented: llama",
    ),
    "nothing at all": ({"architectures": [], "model_type": None}, "model_type None is not"),
    "contradiction": (
        {"model_type": "mistral"},
        "architecture 'LlamaForCausalLM' contradicts model_type 'mistral'",
    ),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented"),
    "longrope": (
        {"rope_scaling": {"type": "longrope", "factor": 4.0}},
        "rope type 'longrope' is not implemented; implemented: default, linear, dynamic",
    ),
    "mrope": ({"rope_scaling": {"rope_type": "mrope"}}, "rope type 'mrope' is not implemented"),
    "no theta": (
        {"without": ("rope_theta",)},
        "config.json gives no rope theta ('rope_theta'); it cannot be guessed",
    ),
    "no theta among parameters": (
        {"without": ("rope_theta",), "rope_parameters": {"rope_type": "default"}},
        "config.json gives no rope theta ('rope_theta')",
    ),
    "theta is text": ({"rope_theta": "10000"}, "'rope_theta' must be a number, got '10000'"),
    "theta too small": ({"rope_theta": 0.5}, "theta=0.5 is out of range"),
    "no factor": (
        {"rope_scaling": {"type": "linear"}},
        "rope type 'linear' needs 'factor' in config.json; it has ['type']",
    ),
    "factor below 1": (
        {"rope_scaling": {"type": "linear", "factor": 0.5}},
        "rope 'linear': factor=0.5 is out of range",
    ),
    "llama3 without its length": (
        {"rope_scaling": {**LLAMA31, "original_max_position_embeddings": None}},
        "rope type 'llama3' needs 'original_max_position_embeddings'",
    ),
    "llama3 without its band": (
        {"rope_scaling": {**LLAMA31, "high_freq_factor": None}},
        "rope type 'llama3' needs 'high_freq_factor'",
    ),
    "llama3 with an empty band": (
        {"rope_scaling": {**LLAMA31, "high_freq_factor": 1.0}},
        "rope 'llama3': high_freq_factor=1.0 is out of range",
    ),
    "two trained lengths": (
        {"rope_scaling": YARN, "original_max_position_embeddings": 4096},
        "two values of 'original_max_position_embeddings': [4096, 32768]",
    ),
    "yarn with crossed betas": (
        {"rope_scaling": {**YARN, "beta_fast": 1, "beta_slow": 32}},
        "rope 'yarn': beta_fast=1.0 is out of range",
    ),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not"),
    "rope by layer type": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "rope parameters by layer type (full_attention) not implemented",
    ),
    "no epsilon": ({"without": ("rms_norm_eps",)}, "config.json lacks 'rms_norm_eps'"),
    "epsilon 0": ({"rms_norm_eps": 0}, "norm_eps must be above 0, got 0.0"),
    "no layers": ({"without": ("num_hidden_layers",)}, "lacks 'num_hidden_layers'"),
    "size is text": (
        {"hidden_size": "64"},
        "'hidden_size' must be a whole number above 0, got '64'",
    ),
    "size 0": ({"vocab_size": 0}, "'vocab_size' must be a whole number above 0, got 0"),
    "width over heads": (
        {"hidden_size": 60},
        "hidden_size=60 is not a multiple of num_attention_heads=8",
    ),
    "heads over kv heads": (
        {"num_key_value_heads": 3},
        "num_heads=8 is not a multiple of num_kv_heads=3",
    ),
    "odd head": ({"head_dim": 7}, "head_dim=7 is odd"),
    "foreign flag": ({"bias": True}, "bias=True is not part of family 'llama'"),
    "window in a Llama": ({"sliding_window": 8}, "sliding_window=8 is not part of family 'llama'"),
    "mistral without kv heads": (
        {"family": "mistral", "without": ("num_key_value_heads",)},
        "lacks 'num_key_value_heads'",
    ),
    "mistral with biases": (
        {"family": "mistral", "attention_bias": True},
        "attention_bias=True is not part of family 'mistral'",
    ),
    "mistral without a window key": (
        {"family": "mistral", "without": ("sliding_window",)},
        "lacks 'sliding_window'; null says that there is none",
    ),
    "mistral by layer types": (
        {"family": "mistral", "layer_types": ["full_attention"] * 4},
        "layer_types with 'full_attention' is not part of family 'mistral'",
    ),
    "window 0": (
        {"family": "mistral", "sliding_window": 0},
        "'sliding_window' must be a whole number above 0, got 0",
    ),
    "qwen3 without head_dim": ({"family": "qwen3", "without": ("head_dim",)}, "lacks 'head_dim'"),
    "qwen without first layer": (
        {"family": "qwen2", "use_sliding_window": True, "sliding_window": 8},
        "lacks 'max_window_layers'",
    ),
    "qwen with unused types": (
        {"family": "qwen2", "sliding_window": 8, "layer_types": ["sliding_attention"] * 4},
        "'sliding_attention' but use_sliding_window is not true",
    ),
    "unknown layer type": (
        {"family": "qwen2", "layer_types": ["chunked_attention"] * 4},
        "unknown: ['chunked_attention']",
    ),
    "few layer types": (
        {"family": "qwen2", "layer_types": ["full_attention"]},
        "1 layer_types for 4 layers",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case):
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(hf(**changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "gemma"}, "family 'gemma' is unknown; known: llama"),
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"windows": (None,)}, "1 windows given for 4 layers"),
        ({"windows": (0, None, None, None)}, "a sliding window must be at least 1 token"),
    ],
)
def test_config_made_by_hand_is_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(read(), **changes)


def test_rope_made_by_hand_is_checked():
    with pytest.raises(ConfigError, match="rope type 'alibi' is not implemented"):
        RopeConfig(kind="alibi", theta=1e4, trained_length=8)
    with pytest.raises(ConfigError, match="rope 'default': trained_length=0 is out of range"):
        RopeConfig(kind="default", theta=1e4, trained_length=0)


EVERYTHING = [*MODELS.values(), *PRESETS.values(), hf("internlm2", bias=True)]


@pytest.mark.parametrize("config", EVERYTHING, ids=[*MODELS, *PRESETS, "internlm2"])
def test_round_trips_are_exact(config):
    ours = ModelConfig.from_hf(config)
    assert ModelConfig.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours
    assert ModelConfig.from_hf(json.loads(json.dumps(ours.to_hf()))) == ours
    assert hash(ours) == hash(ModelConfig.from_dict(ours.to_dict()))


@pytest.mark.parametrize("name", MODELS)
def test_what_transformers_saves_is_read_the_same(name):
    saved = json.loads(str(np.load(DATA / f"{name}.npz")["saved_config"]))
    assert ModelConfig.from_hf(saved) == ModelConfig.from_hf(MODELS[name])


@pytest.mark.parametrize("name", MODELS)
def test_transformers_accepts_what_is_exported(name):
    import transformers  # takes seconds, so not at the top

    ours = ModelConfig.from_hf(MODELS[name])
    exported = ours.to_hf()
    theirs = transformers.AutoConfig.for_model(**exported)
    assert ModelConfig.from_hf(theirs.to_dict()) == ours


def test_export_refuses_what_the_family_cannot_say():
    windowed = dataclasses.replace(read("mistral"), windows=(4, None, 4, None))
    with pytest.raises(ConfigError, match=r"family 'mistral' cannot say windows=\[4, None, 4"):
        windowed.to_hf()
    normed = dataclasses.replace(read(), qk_norm=True)
    with pytest.raises(ConfigError, match="family 'llama' cannot say qk_norm=True"):
        normed.to_hf()


@pytest.mark.parametrize("lost", ["rope", "windows", "vocab_size"])
def test_damaged_dict_is_refused(lost):
    values = read().to_dict()
    del values[lost]
    with pytest.raises(ConfigError, match=f"model config is damaged.*{lost}"):
        ModelConfig.from_dict(values)


def test_unknown_field_of_a_dict_is_refused():
    with pytest.raises(ConfigError, match=r"damaged.*temperature"):
        ModelConfig.from_dict({**read().to_dict(), "temperature": 1.0})


LIMITS = {
    "as it says": ({}, 131072),
    "llama3: extended by training": ({"rope_scaling": LLAMA31}, 131072),
    "linear: the length before scaling": (
        {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}},
        16384,
    ),
    "yarn: the length before scaling": (
        {"max_position_embeddings": 32768, "rope_scaling": YARN},
        131072,
    ),
    "yarn: the length after it": ({"rope_scaling": YARN}, 131072),
    "yarn: a length that it does not name": (
        {"max_position_embeddings": 1024, "rope_scaling": {"type": "yarn", "factor": 2.0}},
        2048,
    ),
    "dynamic: stretched to any": (
        {"max_position_embeddings": 2048, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        math.inf,
    ),
}


@pytest.mark.parametrize("case", LIMITS)
def test_the_length_that_a_model_was_trained_or_extended_to(case):
    changes, expected = LIMITS[case]
    assert read(**changes).trained_length == expected


def test_where_every_layer_slides_no_text_is_too_long():
    slides = dataclasses.replace(read(), windows=(4096,) * read().num_layers)
    assert slides.trained_length == math.inf
    some = dataclasses.replace(slides, windows=(None, *slides.windows[1:]))
    wide = dataclasses.replace(slides, windows=(200_000,) * len(slides.windows))
    assert some.trained_length == wide.trained_length == 131072
