import dataclasses
import functools
import re
import struct
import time

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from checkpoints_convert import convert
from checkpoints_convert.config import model_config
from checkpoints_convert.gguf import llama3_scaling
from checkpoints_convert.importing import open_source
from checkpoints_convert.names import expected_tensors
from jax_longctx.errors import CheckpointError, ConfigError, LongctxError
from jax_longctx.models.storage import load_params
from tests.checkpoints_convert.test_names import assert_same_parameters, paired_rows
from tests.checkpoints_convert.tiny import (
    FAMILIES,
    hf_config,
    packed_experts,
    params_from_hf,
    random_state,
)
from tests.patience import patience

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}


def stacked_experts(state):
    """llama.cpp's files hold the experts of a layer in one tensor."""
    found, stacks = {}, {}
    for name, value in state.items():
        if (place := name.removesuffix("_bias")).endswith("experts.gate_up_proj"):
            # gpt-oss has gate and up in turn, and inputs before outputs.
            kind = "weight" if place == name else "bias"
            for index, part in enumerate(("gate", "up")):
                own = value[..., index::2]
                own = own.swapaxes(1, 2) if own.ndim == 3 else own
                found[place.replace("gate_up", part) + f".{kind}"] = np.ascontiguousarray(own)
            continue
        if name.endswith("experts.down_proj"):
            name, value = f"{name}.weight", np.ascontiguousarray(value.swapaxes(1, 2))
        name = name.replace("proj_bias", "proj.bias").replace(".sinks", ".sinks.weight")
        if (match := EXPERT.fullmatch(name)) is None:
            found[name] = value
            continue
        place, _, part = match.groups()
        place = place.replace("block_sparse_moe", "mlp")
        stacks.setdefault(f"{place}.{MIXTRAL.get(part, part)}.weight", []).append(value)
    return found | {name: np.stack(values) for name, values in stacks.items()}


# llama.cpp's names of architectures, where they are no family's.
ARCHITECTURES = {"mistral": "llama", "mixtral": "llama", "olmo3": "olmo2", "cohere": "command-r"}
ARCHITECTURES |= {"gptoss": "gpt-oss", "ministral3": "mistral3"}
# It pairs the rows of queries and keys in these.
PAIRED = ("llama", "mistral3", "smollm3", "granite")


def architecture_of(config):
    name = config["architectures"][0].removesuffix("ForCausalLM").lower()
    return ARCHITECTURES.get(name, name)


@functools.cache
def gguf_names(architecture):
    """llama.cpp's own table."""
    (kind,) = (kind for kind, own in gguf.MODEL_ARCH_NAMES.items() if own == architecture)
    return gguf.get_tensor_name_map(kind, 32)


def gguf_name(architecture, name):
    names = gguf_names(architecture)
    return names.get_name(name, try_suffixes=(".weight", ".bias")) or name


def write_gguf(path, config, state, *, kind=Kind.F32, raw=None, tweak=None):
    """A file as llama.cpp's conversion script writes it.

    Args:
      kind: of the matrices, or of stacked experts where the model has them.
      raw: tensors already quantised, each with its kind.
    """
    architecture = architecture_of(config)
    heads, kv = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(path, architecture)
    layer_norm = config.get("layer_norm_eps")
    letters = [chr(0x4E00 + i) for i in range(config["vocab_size"] - 1)]
    for name, value in {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "head_count": heads,
        "head_count_kv": kv,
        "key_length": head_dim,
        "value_length": head_dim,
        f"layer_norm{'' if layer_norm else '_rms'}_eps": layer_norm or config["rms_norm_eps"],
        "rope_freq_base": config["rope_theta"],
        "rope_dimension_count": head_dim,
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "gpt-2",
        "token_list": [*letters, letters[0] + letters[1]],
        "token_types": [gguf.TokenType.NORMAL] * config["vocab_size"],
        "token_merges": [f"{letters[0]} {letters[1]}"],
        "eos_token_id": 5,
    }.items():
        getattr(writer, f"add_{name}")(value)
    if experts := config.get("num_experts", config.get("num_local_experts")):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
        if width := config.get("moe_intermediate_size"):
            writer.add_expert_feed_forward_length(width)
    if tweak is not None:
        tweak(writer)
    matrices = max(value.ndim for value in state.values())
    for name, value in stacked_experts(state).items():
        stored = kind if value.ndim == matrices else Kind.F32
        if raw is not None and name in raw:
            value, stored = raw[name]
        elif stored != Kind.F32:
            value = gguf.quants.quantize(value, stored)
        letter = name.rpartition("self_attn.")[2][:6]
        if architecture in PAIRED and letter in ("q_proj", "k_proj"):
            value = paired_rows(value, heads if letter == "q_proj" else kv)
        if architecture.startswith("gemma") and "norm" in name:
            value = value + 1
        raw_dtype = stored if stored != Kind.F32 else None
        writer.add_tensor(gguf_name(architecture, name), value, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def converted(folder, config, state, **how):
    write_gguf(folder / "m.gguf", config, state, **how)
    return convert(folder / "m.gguf", folder / "ours", dtype="source")


def assert_params(folder, config, state):
    expected = params_from_hf(model_config(config), state)
    assert_same_parameters(load_params(folder / "ours"), expected)


def say(config, writer):
    """What llama.cpp's conversion script says of some families."""
    architecture = architecture_of(config)
    # It makes a Mistral of a Llama, and an OLMo 3 of an OLMo 2.
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if architecture == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])
    if "logit_scale" in config:
        writer.add_logit_scale(config["logit_scale"])
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(50.0)
        writer.add_final_logit_softcapping(30.0)
    if architecture == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(1.0)
        writer.add_attn_temperature_scale(config["rope_parameters"]["llama_4_scaling_beta"])
        writer.add_rope_scaling_yarn_beta_fast(32.0)
        writer.add_rope_scaling_yarn_beta_slow(1.0)
    if architecture in ("gpt-oss", "mistral3"):
        scaling = config.get("rope_scaling", config.get("rope_parameters"))
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    if share := config.get("partial_rotary_factor"):
        del writer.kv_data[0][f"{architecture}.rope.dimension_count"]
        writer.add_rope_dimension_count(int(config["hidden_size"] / 4 * share))
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
        for kind in ("long", "short"):
            factors = np.array(config["rope_scaling"][f"{kind}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.quick("llama", "mixtral", "phi3", "stablelm")
def test_plain_values_and_config(tmp_path, family):
    config = hf_config(family)
    state = random_state(config)

    manifest = converted(tmp_path, config, state, tweak=functools.partial(say, config))
    assert manifest.config == model_config(config)
    architecture = architecture_of(config)
    named = {
        gguf_name(architecture, name): value.shape for name, value in stacked_experts(state).items()
    }
    expected = expected_tensors(manifest.config, "gguf").items()
    assert {name: tensor.shape for name, tensor in expected} == named
    assert manifest.dtype == "float32" and list(manifest.sources) == ["m.gguf"]
    assert manifest.extras == {"eos_token_id": 5}
    if not family.startswith("gemma"):
        assert_params(tmp_path, config, state)
        return
    # The file has 1 + scale.
    norms = {name: (value + 1) - 1 for name, value in state.items() if "norm" in name}
    assert_params(tmp_path, config, state | norms)


def test_norms_keep_their_precision_and_a_window_that_is_not_said_is_the_familys(tmp_path):
    config = hf_config("gemma2", num_hidden_layers=2, max_position_embeddings=8192)
    del config["sliding_window"]
    state = random_state(config)
    path = write_gguf(tmp_path / "m.gguf", config, state, tweak=functools.partial(say, config))
    manifest = convert(path, tmp_path / "ours", dtype="bfloat16")
    assert set(manifest.config.windows) == {4096, None}
    scale = load_params(tmp_path / "ours")["final_norm"]["scale"]
    expected = (state["model.norm.weight"] + 1 - 1).astype(scale.dtype)
    np.testing.assert_array_equal(np.asarray(scale), expected)


@pytest.mark.parametrize("said", [3, 1, 0, [True, False, True, True]])
def test_a_pattern_of_windows_is_a_list_or_the_length_of_a_turn(tmp_path, said):
    # In a file of Gemma 3's larger models, whose text part alone it holds.
    eighth = {"rope_type": "linear", "factor": 8.0}
    config = hf_config("gemma3", num_hidden_layers=4, rope_scaling=eighth)
    path = tmp_path / "m.gguf"

    def tweak(writer):
        say(config, writer)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
        writer.add_sliding_window_pattern(said)

    write_gguf(path, config, random_state(config), tweak=tweak)
    slides = {3: [1, 1, 0, 1], 1: [0] * 4, 0: [1] * 4}.get(
        said if type(said) is int else None, said
    )
    windows = tuple(config["sliding_window"] if it else None for it in slides)
    assert open_source(path).config == dataclasses.replace(model_config(config), windows=windows)


# Where a block has its scales, and where they end.
SCALES = {"Q8_0": (0, 2), "Q4_0": (0, 2), "Q4_1": (0, 4), "Q5_0": (0, 2), "Q5_1": (0, 4)}
SCALES |= {"Q2_K": (80, 84), "Q3_K": (108, 110), "Q4_K": (0, 4), "Q5_K": (0, 4)}
SCALES |= {"Q6_K": (208, 210), "IQ4_XS": (0, 2), "IQ4_NL": (0, 2), "IQ3_S": (0, 2)}
SCALES |= {"IQ2_XXS": (0, 2), "TQ1_0": (52, 54)}
# Its scale is an exponent of one byte.
SCALES |= {"MXFP4": (0, 1)}


def test_quantised_values(tmp_path, monkeypatch):
    """Each matrix of a file may be of another kind."""
    monkeypatch.setattr("checkpoints_convert.files.PIECE", 4 * 256 * 5)
    rng, sizes = np.random.default_rng(2), {"hidden_size": 256, "intermediate_size": 512}
    config = hf_config("llama", **sizes)
    state, raw = random_state(config), {}
    matrices = [name for name, value in state.items() if value.ndim == 2]
    for name, key in zip(SCALES, matrices, strict=True):
        (rows, columns), (block, size) = state[key].shape, gguf.GGML_QUANT_SIZES[Kind[name]]
        begin, end = SCALES[name]
        blocks = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
        scales = rng.uniform(1e-4, 1e-2, (*blocks.shape[:2], max(1, (end - begin) // 2)))
        stored = scales.astype(np.float16).view(np.uint8)
        blocks[..., begin:end] = 120 if name == "MXFP4" else stored
        raw[key] = blocks.reshape(rows, -1), Kind[name]
        state[key] = gguf.quants.dequantize(*raw[key])
    converted(tmp_path, config, state, raw=raw)
    assert_params(tmp_path, config, state)


def test_experts_of_gpt_oss_in_mxfp4(tmp_path):
    config = hf_config("gpt-oss", num_hidden_layers=1)
    _, plain = packed_experts(random_state(config))
    tweak = functools.partial(say, config)
    assert converted(tmp_path, config, plain, kind=Kind.MXFP4, tweak=tweak).dtype == "float32"
    assert_params(tmp_path, config, plain)


@pytest.mark.parametrize(
    ("name", "value"), [("attention.head_count_kv", 2), ("feed_forward_length", 48)]
)
def test_numbers_of_layers_that_are_all_equal_are_one_number(tmp_path, refused, name, value):
    state = random_state(CONFIG)

    def write(*values):
        def by_layer(writer):
            del writer.kv_data[0][f"llama.{name}"]
            writer.add_array(f"llama.{name}", values)

        return write_gguf(tmp_path / "m.gguf", CONFIG, state, tweak=by_layer)

    assert open_source(write(value, value)).config == model_config(CONFIG)
    refused(write(value, value + 1), f"llama.{name} differs by layer", kind=ConfigError)


@pytest.mark.parametrize(("kind", "dtype"), [("F16", "float16"), ("BF16", "bfloat16")])
def test_two_byte_files_keep_their_type(tmp_path, kind, dtype):
    config = hf_config("llama", num_hidden_layers=1)
    state = random_state(config, dtype)
    exact = {name: value.astype(np.float32) for name, value in state.items()}
    assert converted(tmp_path, config, exact, kind=Kind[kind]).dtype == dtype
    assert_params(tmp_path, config, state)


def divisors(config, factor, high, low=1.0, trained=8192):
    """What llama.cpp's conversion script stores for llama3 scaling."""
    head_dim = config["head_dim"]
    wave = 2 * np.pi * config["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((trained / wave - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def llama3(factor, high):
    scaling = {"rope_type": "llama3", "factor": factor, "low_freq_factor": 1.0}
    return scaling | {"high_freq_factor": high, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("factor", "high"), [(8.0, 4.0), (32.0, 4.0), (16.0, 3.0)])
def test_llama3_scaling_is_found_in_the_divisors(tmp_path, head_dim, factor, high):
    config = {"head_dim": head_dim, "rope_theta": 500000.0}
    stored = divisors(config, factor, high)
    assert llama3_scaling(tmp_path, config, stored) == llama3(factor, high)
    stored[head_dim // 4 :] *= 1.01
    with pytest.raises(ConfigError, match="no llama3 scaling"):
        llama3_scaling(tmp_path, config, stored)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "attention_factor": 1.25,
        },
        {"rope_type": "linear", "factor": 2.0},
        llama3(8.0, 4.0),
    ],
    ids=["yarn", "yarn with a factor", "linear", "llama3"],
)
def test_scalings_of_a_file(tmp_path, scaling):
    """Llama 3's has no name, but a tensor."""
    config = hf_config("llama", head_dim=64, rope_theta=500000.0, max_position_embeddings=131072)
    state, kind = random_state(config), scaling["rope_type"]
    if kind == "llama3":
        state["rope_freqs.weight"] = divisors(config, 8.0, 4.0)

    def tweak(writer):
        if kind != "llama3":
            writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
            writer.add_rope_scaling_factor(scaling["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "attention_factor" in scaling:
            writer.add_rope_scaling_yarn_attn_factor(scaling["attention_factor"])

    path = write_gguf(tmp_path / "m.gguf", config, state, tweak=tweak)
    assert open_source(path).config == model_config({**config, "rope_scaling": scaling})


UINT8, INT32, FLOAT32, STRING, ARRAY, UINT64 = 0, 5, 6, 8, 9, 10
CONFIG = hf_config("llama")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("good") / "m.gguf"
    return write_gguf(path, CONFIG, random_state(CONFIG)).read_bytes()


@pytest.fixture
def refused(tmp_path):
    """Checks the error of a file, or of its bytes: one line with these words; no traces on disk."""

    def check(file, *words, kind=CheckpointError, converting=True):
        path = tmp_path / "m.gguf"
        if isinstance(file, bytes):
            path.write_bytes(file)
        begin = time.process_time()
        with pytest.raises(kind) as caught:
            convert(path, tmp_path / "ours") if converting else open_source(path)
        assert time.process_time() - begin < patience(5)
        assert "\n" not in str(caught.value)
        for word in (path, *words):
            assert str(word) in str(caught.value)
        assert [entry.name for entry in tmp_path.iterdir()] == [path.name]

    return check


def header(entries=b"", *, tensors=0, count=1):
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + entries + b"\0" * 64


def entry(kind, payload, key=b"a"):
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + payload


def array(kind, count, nested=1):
    return header(entry(ARRAY, struct.pack("<IQ", kind, count) * nested))


CASES = {
    "entries": (header(count=2**62), "4611686018427387904 metadata entries, expected at most"),
    "tensors": (header(count=0, tensors=2**62), "4611686018427387904 tensors, expected at most"),
    "string": (header(entry(STRING, struct.pack("<Q", 2**62))), "truncated or damaged at byte"),
    "key": (header(struct.pack("<Q", 2**64 - 1)), "truncated or damaged at byte"),
    "array": (array(UINT8, 2**62), "4611686018427387904 entries of an array, expected at most"),
    "array past the end": (array(UINT64, 10**6), "truncated or damaged at byte"),
    "nested arrays": (array(ARRAY, 1, nested=200_000), "nests arrays"),
    "no architecture": (header(count=0), "architecture 'None' is not implemented"),
}


@pytest.mark.parametrize(("raw", "words"), CASES.values(), ids=CASES)
def test_lengths_that_no_file_has(refused, raw, words):
    refused(raw, words, kind=LongctxError)


def patched(raw, key, value, after=4):
    """The file with another value behind a key and `after` bytes more."""
    at = raw.index(key) + len(key) + after
    return raw[:at] + value + raw[at + len(value) :]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("block_count", 10**9, "'num_hidden_layers' holds 1000000000, expected at"),
        ("block_count", 5000, "5000 layers, but the files hold 21"),
        ("attention.head_count", 0, "llama.attention.head_count is 0"),
        ("embedding_length", 2**32 - 1, "holds 4294967295, expected at most"),
        ("feed_forward_length", 2**31 - 1, "the config says [32, 2147483647]"),
    ],
)
def test_sizes_are_checked_before_anything_is_made_of_them(refused, good, key, value, words):
    raw = patched(good, f"llama.{key}".encode(), struct.pack("<I", value))
    refused(raw, words, kind=LongctxError, converting=False)


def test_damage_and_tensors_that_are_no_model(refused, good, tmp_path):
    refused(good[:-100], "truncated: tensor", "fetch it again")
    for size in (0, 3, 10, 100, 1000):
        refused(good[:size], "not a GGUF file")
    raw = patched(good, b"llama.block_count", struct.pack("<I", FLOAT32), 0)
    refused(raw, "llama.block_count is ", ", expected int", converting=False)
    # A length in the metadata: the kinds of the field and of its items stand before it.
    key = b"tokenizer.ggml.token_type"
    assert patched(good, key, struct.pack("<II", ARRAY, INT32), 0) == good
    raw = patched(good, key, struct.pack("<Q", 1 << 50), 8)
    refused(raw, "entries of an array, expected at most")
    path, state = tmp_path / "m.gguf", random_state(CONFIG)
    extra = {**state, "blk.0.ffn_gate_inp.weight": np.ones((4, 32), np.float32)}
    refused(write_gguf(path, CONFIG, extra), "blk.0.ffn_gate_inp.weight", "unknown")
    del extra["blk.0.ffn_gate_inp.weight"], extra["model.layers.1.self_attn.v_proj.weight"]
    refused(write_gguf(path, CONFIG, extra), "blk.1.attn_v.weight", "missing")
    state["model.layers.1.mlp.up_proj.weight"][2, 3] = np.nan
    refused(write_gguf(path, CONFIG, state), "blk.1.ffn_up.weight", "NaN")


def test_random_bytes_are_refused_in_one_line_or_read(tmp_path, good):
    """Flipped bytes of the metadata: a changed number may be a model, but never a traceback."""
    rng = np.random.default_rng(0)
    end = good.index(b"token_embd.weight")
    for _ in range(60):
        raw = bytearray(good)
        for at in rng.integers(4, end, 3):
            raw[at] = rng.integers(256)
        (tmp_path / "m.gguf").write_bytes(raw)
        try:
            open_source(tmp_path / "m.gguf")
        except LongctxError as error:
            assert "\n" not in str(error)


def test_what_is_not_implemented(tmp_path, refused, good):
    path, config = tmp_path / "m.gguf", hf_config("llama", hidden_size=256, intermediate_size=256)
    state = random_state(config)
    write_gguf(path, config, {"lm_head.weight": np.ones((300, 256), np.float64)})
    refused(path, "F64", "output.weight", "Q4_K")
    longrope = gguf.RopeScalingType.LONGROPE
    for tweak, words, error in (
        (lambda writer: writer.add_expert_count(4), ["expert_used_count"], CheckpointError),
        (lambda writer: writer.add_uint16("split.count", 3), ["3 parts", "merge"], CheckpointError),
        (lambda writer: writer.add_rope_scaling_type(longrope), [], (CheckpointError, ConfigError)),
    ):
        refused(write_gguf(path, config, state, tweak=tweak), *words, kind=error)
    refused(good.replace(b"llama", b"mamba"), "mamba", "qwen3", kind=ConfigError)
    granite = hf_config("granite")

    def unrotated(writer):
        say(granite, writer)
        writer.add_rope_scaling_finetuned(False)

    write_gguf(path, granite, random_state(granite), tweak=unrotated)
    refused(path, "no rotary embedding (rope.scaling.finetuned is false)", kind=ConfigError)


def test_a_model_in_parts(tmp_path):
    """Metadata and some tensors in the first, the other tensors in the second."""
    state, names = random_state(CONFIG), [tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2)]
    parts = dict(list(state.items())[:9]), dict(list(state.items())[9:])
    for path, part in zip(names, parts, strict=True):

        def tweak(writer):
            writer.add_uint16("split.count", 2)
            writer.add_int32("split.tensors.count", len(state))

        write_gguf(path, CONFIG, part, tweak=tweak)
    for number, path in enumerate(names):
        manifest = convert(path, tmp_path / f"ours{number}")
        assert sorted(manifest.sources) == [path.name for path in names]
        expected = params_from_hf(model_config(CONFIG), state)
        assert_same_parameters(load_params(tmp_path / f"ours{number}"), expected)
    write_gguf(names[1], CONFIG, dict(list(parts[1].items())[1:]), tweak=tweak)
    with pytest.raises(CheckpointError, match=r"the parts hold 20 tensors, expected 21"):
        open_source(names[0])
    names[1].unlink()
    with pytest.raises(CheckpointError, match=r"00002-of-00002.gguf is missing: .* 2 parts"):
        open_source(names[0])
