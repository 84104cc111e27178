"""Reading, writing and refusing whole model configs; `config.json` files: checkpoints_convert."""

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

PLAIN = {"rope_type": "default", "rope_theta": 500000.0}
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {**PLAIN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def hf(family: str = "llama", without: tuple[str, ...] = (), **changes: Any) -> dict[str, Any]:
    """A whole config of a family, with changes."""
    config = {
        "model_type": family,
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "rope_parameters": PLAIN,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 4,
    }
    return {key: value for key, value in (config | changes).items() if key not in without}


def read(family: str = "llama", **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(hf(family, **changes))


def saved(name: str) -> dict[str, Any]:
    """The whole config that transformers saved for a golden model."""
    return json.loads(str(np.load(DATA / f"{name}.npz")["saved_config"]))


def test_llama_is_read_field_by_field():
    assert read(rope_parameters=LLAMA31, pretraining_tp=2) == ModelConfig(
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


@pytest.mark.parametrize(
    ("family", "said", "expected"),
    [
        ("llama", {}, (False, False, False)),
        ("llama", {"attention_bias": True}, (True, True, False)),
        ("llama", {"mlp_bias": True}, (False, False, True)),
        ("mistral", {}, (False, False, False)),
        ("qwen2", {}, (True, False, False)),
        # The classes of these two read no such flag.
        ("mistral", {"attention_bias": True}, (False, False, False)),
        ("qwen2", {"attention_bias": True}, (True, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
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
        ("qwen2", {"sliding_window": 99}, (None,) * 4),
        (
            "qwen3",
            {
                "sliding_window": 7,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (7, None, 7, None),
        ),
    ],
)
def test_sliding_windows(family, said, windows):
    assert read(family, **said).windows == windows


def test_dynamic_rope_scales_the_length_of_the_config():
    scaling = {**PLAIN, "rope_type": "dynamic", "factor": 2.0}
    scaling["original_max_position_embeddings"] = 1024
    rope = read(max_position_embeddings=32768, rope_parameters=scaling).rope
    assert rope == RopeConfig(kind="dynamic", theta=5e5, trained_length=32768, factor=2.0)


def test_yarn_reads_all_its_settings():
    settings = {"attention_factor": 1.2, "mscale": 0.9, "mscale_all_dim": 0.8, "beta_fast": 16}
    rope = read(rope_parameters={**YARN, **settings, "beta_slow": 2, "truncate": False}).rope
    assert (rope.attention_factor, rope.mscale, rope.mscale_all_dim) == (1.2, 0.9, 0.8)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (16.0, 2.0, False)


def rope(kind: str, **changes: Any) -> dict[str, Any]:
    return {"rope_parameters": {**PLAIN, "rope_type": kind, **changes}}


REFUSED = {
    "family": ({"family": "gpt2"}, "unknown family 'gpt2'; known: llama"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented"),
    "longrope": (
        rope("longrope", factor=4.0),
        "rope type 'longrope' is not implemented; implemented: default, linear, dynamic",
    ),
    "no rope": ({"without": ("rope_parameters",)}, "config lacks 'rope_parameters'"),
    "no theta": ({"rope_parameters": {"rope_type": "default"}}, "config lacks 'rope_theta'"),
    "theta is text": (
        rope("default", rope_theta="10000"),
        "'rope_theta' must be a finite number, got '10000'",
    ),
    "theta too small": (rope("default", rope_theta=0.5), "theta must be above 1, got 0.5"),
    "theta infinite": (rope("default", rope_theta=float("inf")), "must be a finite number"),
    "no factor": (rope("linear"), "config lacks 'factor'"),
    "factor below 1": (
        rope("linear", factor=0.5),
        "rope 'linear': factor must be at least 1, got 0.5",
    ),
    "llama3 without its length": (
        {"rope_parameters": {**LLAMA31, "original_max_position_embeddings": None}},
        "config lacks 'original_max_position_embeddings'",
    ),
    "llama3 without its band": (
        {"rope_parameters": {**LLAMA31, "high_freq_factor": None}},
        "config lacks 'high_freq_factor'",
    ),
    "llama3 with an empty band": (
        {"rope_parameters": {**LLAMA31, "high_freq_factor": 1.0}},
        "rope 'llama3': high_freq_factor must be above low_freq_factor 1.0, got 1.0",
    ),
    "yarn with crossed betas": (
        {"rope_parameters": {**YARN, "beta_fast": 1, "beta_slow": 32}},
        "rope 'yarn': beta_fast must be above beta_slow 32.0, got 1.0",
    ),
    "partial rotary": (
        rope("default", partial_rotary_factor=0.5),
        "partial_rotary_factor=0.5 is not",
    ),
    "rope by layer type": (
        {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
        "rope parameters by layer type (full_attention) not implemented",
    ),
    "no epsilon": ({"without": ("rms_norm_eps",)}, "config lacks 'rms_norm_eps'"),
    "epsilon 0": ({"rms_norm_eps": 0}, "norm_eps must be above 0, got 0.0"),
    "no layers": ({"without": ("num_hidden_layers",)}, "lacks 'num_hidden_layers'"),
    "size is text": (
        {"hidden_size": "64"},
        "'hidden_size' must be a whole number above 0, got '64'",
    ),
    "size 0": ({"vocab_size": 0}, "'vocab_size' must be a whole number above 0, got 0"),
    "no kv heads": ({"without": ("num_key_value_heads",)}, "lacks 'num_key_value_heads'"),
    "width over heads": (
        {"hidden_size": 60, "head_dim": None},
        "hidden_size=60 is not a multiple of num_attention_heads=8",
    ),
    "heads over kv heads": (
        {"num_key_value_heads": 3},
        "num_heads=8 is not a multiple of num_kv_heads=3",
    ),
    "odd head": ({"head_dim": 7}, "head_dim=7 is odd"),
    "window 0": (
        {"family": "mistral", "sliding_window": 0},
        "'sliding_window' must be a whole number above 0, got 0",
    ),
    "no window": (
        {"family": "qwen2", "layer_types": ["sliding_attention"] * 4},
        "config lacks 'sliding_window'",
    ),
    "no layer types": ({"family": "qwen3", "without": ("layer_types",)}, "lacks 'layer_types'"),
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
        ({"family": "gemma"}, "unknown family 'gemma'; known: llama"),
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
    with pytest.raises(
        ConfigError, match="rope 'default': trained_length must be at least 1, got 0"
    ):
        RopeConfig(kind="default", theta=1e4, trained_length=0)


EVERYTHING = {name: saved(name) for name in MODELS} | PRESETS


@pytest.mark.parametrize("name", EVERYTHING)
def test_round_trips_are_exact(name):
    ours = ModelConfig.from_hf(EVERYTHING[name])
    assert ModelConfig.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours
    assert ModelConfig.from_hf(json.loads(json.dumps(ours.to_hf()))) == ours
    assert hash(ours) == hash(ModelConfig.from_dict(ours.to_dict()))


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
    "llama3: extended by training": ({"rope_parameters": LLAMA31}, 131072),
    "linear: the length before scaling": (
        {"max_position_embeddings": 4096, **rope("linear", factor=4.0)},
        16384,
    ),
    "yarn: the length before scaling": (
        {"max_position_embeddings": 32768, "rope_parameters": YARN},
        131072,
    ),
    "yarn: the length after it": ({"rope_parameters": YARN}, 131072),
    "dynamic: stretched to any": (
        {"max_position_embeddings": 2048, **rope("dynamic", factor=2.0)},
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
