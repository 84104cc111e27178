import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest

from jax_longctx.errors import ConfigError
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.presets import PRESETS
from jax_longctx.models.rope import RopeConfig
from tests.goldens.cases import MODELS

DATA = Path(__file__).parents[2] / "goldens" / "data"

LENGTH = "original_max_position_embeddings"
PLAIN = {"rope_type": "default", "rope_theta": 500000.0}
LLAMA31 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    LENGTH: 8192,
}
YARN = {**PLAIN, "rope_type": "yarn", "factor": 4.0, LENGTH: 32768}


def hf(family="llama", without=(), **changes):
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


def read(family="llama", **changes):
    return ModelConfig.from_hf(hf(family, **changes))


def saved(name):
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


# Biases of q, k and v, of o, and of the MLP; norms of queries and keys.
@pytest.mark.parametrize(
    ("family", "said", "expected"),
    [
        ("llama", {}, (False, False, False, False)),
        ("llama", {"attention_bias": True}, (True, True, False, False)),
        ("llama", {"mlp_bias": True}, (False, False, True, False)),
        # The classes of these two read no such flag.
        ("mistral", {"attention_bias": True}, (False, False, False, False)),
        ("qwen2", {"attention_bias": True}, (True, False, False, False)),
        ("qwen3", {}, (False, False, False, True)),
        ("qwen3", {"attention_bias": True}, (True, True, False, True)),
        ("stablelm", {"layer_norm_eps": 1e-5}, (False, False, False, False)),
        ("stablelm", {"layer_norm_eps": 1e-5, "use_qkv_bias": True}, (True, False, False, False)),
    ],
)
def test_biases_and_norms_of_each_family(family, said, expected):
    config = read(family, **said)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm) == expected


SLIDING = ["sliding_attention", "full_attention"] * 2


@pytest.mark.parametrize(
    ("family", "said", "windows"),
    [
        ("mistral", {"sliding_window": 4096}, (4096,) * 4),
        ("mistral", {"sliding_window": None}, (None,) * 4),
        ("qwen2", {"sliding_window": 99}, (None,) * 4),
        ("qwen3", {"sliding_window": 7, "layer_types": SLIDING}, (7, None, 7, None)),
    ],
)
def test_sliding_windows(family, said, windows):
    assert read(family, **said).windows == windows


def rope(rope_type, **changes):
    return {"rope_parameters": {**PLAIN, "rope_type": rope_type, **changes}}


def test_dynamic_rope_scales_the_length_of_the_config_and_yarn_reads_all_its_settings():
    dynamic = rope("dynamic", factor=2.0, **{LENGTH: 1024})
    found = read(max_position_embeddings=32768, **dynamic).rope
    assert found == RopeConfig(kind="dynamic", theta=5e5, trained_length=32768, factor=2.0)
    settings = {"attention_factor": 1.2, "mscale": 0.9, "mscale_all_dim": 0.8, "beta_fast": 16}
    yarn = read(rope_parameters={**YARN, **settings, "beta_slow": 2, "truncate": False}).rope
    assert (yarn.attention_factor, yarn.mscale, yarn.mscale_all_dim) == (1.2, 0.9, 0.8)
    assert (yarn.beta_fast, yarn.beta_slow, yarn.truncate) == (16.0, 2.0, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "gpt2"}, "unknown family 'gpt2'; known: llama"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented"),
        (
            rope("alibi", factor=4.0),
            "rope type 'alibi' is not implemented; implemented: default, linear, dynamic",
        ),
        ({"without": ("rope_parameters",)}, "config lacks 'rope_parameters'"),
        ({"rope_parameters": {"rope_type": "default"}}, "config lacks 'rope_theta'"),
        (rope("default", rope_theta="1"), "'rope_theta' must be a finite number, got '1'"),
        (rope("default", rope_theta=0.5), "theta must be above 1, got 0.5"),
        (rope("default", rope_theta=float("inf")), "must be a finite number"),
        (rope("linear"), "config lacks 'factor'"),
        (rope("linear", factor=0.5), "rope 'linear': factor must be at least 1, got 0.5"),
        (rope(**{**LLAMA31, LENGTH: None}), f"config lacks '{LENGTH}'"),
        (rope(**{**LLAMA31, "high_freq_factor": None}), "config lacks 'high_freq_factor'"),
        (
            rope(**{**LLAMA31, "high_freq_factor": 1.0}),
            "rope 'llama3': high_freq_factor must be above low_freq_factor 1.0, got 1.0",
        ),
        (
            rope(**{**YARN, "beta_fast": 1, "beta_slow": 32}),
            "rope 'yarn': beta_fast must be above beta_slow 32.0, got 1.0",
        ),
        (rope("default", partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}},
            "rope parameters by layer type (full_attention) not implemented",
        ),
        ({"without": ("rms_norm_eps",)}, "config lacks 'rms_norm_eps'"),
        ({"rms_norm_eps": 0}, "norm_eps must be above 0, got 0.0"),
        ({"without": ("num_hidden_layers",)}, "lacks 'num_hidden_layers'"),
        ({"hidden_size": "64"}, "'hidden_size' must be a whole number above 0, got '64'"),
        ({"vocab_size": 0}, "'vocab_size' must be a whole number above 0, got 0"),
        ({"without": ("num_key_value_heads",)}, "lacks 'num_key_value_heads'"),
        ({"hidden_size": 60, "head_dim": None}, "60 is not a multiple of num_attention_heads=8"),
        ({"num_key_value_heads": 3}, "num_heads=8 is not a multiple of num_kv_heads=3"),
        ({"head_dim": 7}, "head_dim=7 is odd"),
        ({"family": "mistral", "sliding_window": 0}, "'sliding_window' must be a whole number"),
        ({"family": "qwen2", "layer_types": SLIDING}, "config lacks 'sliding_window'"),
        ({"family": "qwen3", "without": ("layer_types",)}, "lacks 'layer_types'"),
        ({"family": "qwen2", "layer_types": ["chunked"] * 4}, "unknown: ['chunked']"),
        ({"family": "qwen2", "layer_types": ["full_attention"]}, "1 layer_types for 4 layers"),
        ({"family": "qwen3_moe", "sliding_window": 9}, "sliding_window=9 is not implemented; impl"),
        (
            {"family": "stablelm", "use_parallel_residual": True},
            "use_parallel_residual=True is not implemented; implemented: False",
        ),
    ],
)
def test_refused_in_one_line(changes, message):
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(hf(**changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


ROPE = RopeConfig(kind="default", theta=1e4, trained_length=8)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (read(), {"family": "gemma"}, "unknown family 'gemma'; known: llama"),
        (read(), {"num_layers": 0}, "num_layers must be at least 1, got 0"),
        (read(), {"windows": (None,)}, "1 windows given for 4 layers"),
        (read(), {"windows": (0, None, None, None)}, "a sliding window must be at least 1 token"),
        (ROPE, {"kind": "alibi"}, "rope type 'alibi' is not implemented"),
        (ROPE, {"trained_length": 0}, "'default': trained_length must be at least 1, got 0"),
    ],
)
def test_config_made_by_hand_is_checked(config, changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(config, **changes)


EVERYTHING = {name: saved(name) for name in MODELS} | PRESETS
# Its window hides nothing, and its layers without rotary embedding stay.
EVERYTHING["cohere2 without windows"] = {**saved("cohere2"), "sliding_window": 256}


@pytest.mark.parametrize("name", EVERYTHING)
def test_round_trips_are_exact(name):
    ours = ModelConfig.from_hf(EVERYTHING[name])
    assert ModelConfig.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours
    assert ModelConfig.from_hf(json.loads(json.dumps(ours.to_hf()))) == ours
    assert hash(ours) == hash(ModelConfig.from_dict(ours.to_dict()))


def test_a_length_under_a_familys_own_key_comes_first():
    long = ModelConfig.from_hf({**saved("cohere"), "model_max_length": 4096})
    assert long.max_position == long.rope.trained_length == 4096
    assert ModelConfig.from_hf(long.to_hf()) == long
    assert ModelConfig.from_hf(saved("cohere")).max_position == 256


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    [
        ("mistral", {"windows": (4, None, 4, None)}, r"windows=\[4, None, 4"),
        ("llama", {"qk_norm": True}, "qk_norm=True"),
    ],
)
def test_export_refuses_what_the_family_cannot_say(family, changes, said):
    config = dataclasses.replace(read(family), **changes)
    with pytest.raises(ConfigError, match=f"family '{family}' cannot say {said}"):
        config.to_hf()


def test_a_damaged_dict_is_refused():
    values = read().to_dict()
    damaged = {
        lost: {name: value for name, value in values.items() if name != lost}
        for lost in ("rope", "windows", "vocab_size")
    }
    for name, fields in {**damaged, "temperature": {**values, "temperature": 1.0}}.items():
        with pytest.raises(ConfigError, match=f"model config is damaged.*{name}"):
            ModelConfig.from_dict(fields)


# As it says, extended by training, from the length before scaling or after it, and any length.
@pytest.mark.parametrize(
    ("length", "scaling", "expected"),
    [
        (131072, PLAIN, 131072),
        (131072, LLAMA31, 131072),
        (4096, {**PLAIN, "rope_type": "linear", "factor": 4.0}, 16384),
        (32768, YARN, 131072),
        (131072, YARN, 131072),
        (2048, {**PLAIN, "rope_type": "dynamic", "factor": 2.0}, math.inf),
    ],
)
def test_the_length_that_a_model_was_trained_or_extended_to(length, scaling, expected):
    config = read(max_position_embeddings=length, rope_parameters=scaling)
    assert config.trained_length == expected


def test_where_every_layer_slides_no_text_is_too_long():
    slides = dataclasses.replace(read(), windows=(4096,) * read().num_layers)
    assert slides.trained_length == math.inf
    some = dataclasses.replace(slides, windows=(None, *slides.windows[1:]))
    wide = dataclasses.replace(slides, windows=(200_000,) * len(slides.windows))
    assert some.trained_length == wide.trained_length == 131072
