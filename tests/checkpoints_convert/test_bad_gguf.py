"""GGUF files that are damaged, or whose metadata cannot be believed: one line, at once."""

import struct
import time

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from checkpoints_convert import convert
from checkpoints_convert.importing import open_source
from jax_longctx.errors import CheckpointError, ConfigError, LongctxError
from tests.checkpoints_convert.test_gguf import write_gguf
from tests.checkpoints_convert.tiny import hf_config, random_state

UINT8, INT32, FLOAT32, STRING, ARRAY, UINT64 = 0, 5, 6, 8, 9, 10
CONFIG = hf_config("llama")


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """A whole file's bytes."""
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
        assert time.process_time() - begin < 5
        assert "\n" not in str(caught.value)
        for word in (path, *words) if converting else words:
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


@pytest.mark.parametrize("case", CASES)
def test_lengths_that_no_file_has(refused, case):
    raw, words = CASES[case]
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


def test_damage(refused, good):
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


def test_tensors_that_are_no_model(tmp_path, refused):
    path, state = tmp_path / "m.gguf", random_state(CONFIG)
    extra = {**state, "blk.0.ffn_gate_inp.weight": np.ones((4, 32), np.float32)}
    refused(write_gguf(path, CONFIG, extra), "blk.0.ffn_gate_inp.weight", "unknown")
    del extra["blk.0.ffn_gate_inp.weight"], extra["model.layers.1.self_attn.v_proj.weight"]
    refused(write_gguf(path, CONFIG, extra), "blk.1.attn_v.weight", "missing")
    state["model.layers.1.mlp.up_proj.weight"][2, 3] = np.nan
    refused(write_gguf(path, CONFIG, state), "blk.1.ffn_up.weight", "NaN")


def test_what_is_not_implemented(tmp_path, refused):
    path, config = tmp_path / "m.gguf", hf_config("llama", hidden_size=256, intermediate_size=256)
    state, kind = random_state(config), Kind.TQ1_0
    small = {"lm_head.weight": state["lm_head.weight"]}
    raw = {"lm_head.weight": gguf.quants.quantize(state["lm_head.weight"], kind)}
    write_gguf(path, config, small, kind=kind, raw=raw)
    refused(path, "TQ1_0", "output.weight", "Q4_K")
    longrope = gguf.RopeScalingType.LONGROPE
    for tweak, words, error in (
        (lambda writer: writer.add_expert_count(4), ["experts"], ConfigError),
        (lambda writer: writer.add_uint16("split.count", 3), ["3 parts", "merge"], CheckpointError),
        (lambda writer: writer.add_rope_scaling_type(longrope), [], (CheckpointError, ConfigError)),
    ):
        refused(write_gguf(path, config, state, tweak=tweak), *words, kind=error)
    writer = gguf.GGUFWriter(path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(path, "mamba", "qwen3", kind=ConfigError)
