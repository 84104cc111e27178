"""GGUF files whose metadata cannot be believed: one line, at once."""

import struct
import time

import numpy as np
import pytest

from checkpoints_convert import convert
from checkpoints_convert.importing import open_source
from jax_longctx.errors import CheckpointError, LongctxError
from tests.checkpoints_convert.test_gguf import write_gguf
from tests.checkpoints_convert.tiny import hf_config, random_state

UINT8, STRING, ARRAY, UINT64 = 0, 8, 9, 10


def header(entries=b"", *, tensors=0, count=1):
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + entries + b"\0" * 64


def entry(kind, payload, key=b"a"):
    return struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + payload


CASES = {
    "entries": (header(count=2**62), "4611686018427387904 metadata entries, expected at most"),
    "tensors": (header(count=0, tensors=2**62), "4611686018427387904 tensors, expected at most"),
    "string": (header(entry(STRING, struct.pack("<Q", 2**62))), "truncated or damaged at byte"),
    "key": (header(struct.pack("<Q", 2**64 - 1)), "truncated or damaged at byte"),
    "array": (
        header(entry(ARRAY, struct.pack("<IQ", UINT8, 2**62))),
        "4611686018427387904 entries of an array, expected at most",
    ),
    "array past the end": (
        header(entry(ARRAY, struct.pack("<IQ", UINT64, 10**6))),
        "truncated or damaged at byte",
    ),
    "nested arrays": (
        header(entry(ARRAY, struct.pack("<IQ", ARRAY, 1) * 200_000)),
        "nests arrays",
    ),
    "no architecture": (header(count=0), "architecture 'None' is not implemented"),
}


@pytest.mark.parametrize("case", CASES)
def test_lengths_that_no_file_has(tmp_path, case):
    raw, words = CASES[case]
    (tmp_path / "m.gguf").write_bytes(raw)
    begin = time.process_time()
    with pytest.raises(LongctxError) as caught:
        convert(tmp_path / "m.gguf", tmp_path / "ours")
    assert words in str(caught.value) and str(tmp_path / "m.gguf") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.process_time() - begin < 5
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


@pytest.fixture
def good(tmp_path):
    config = hf_config("llama")
    return write_gguf(tmp_path / "good.gguf", config, random_state(config)).read_bytes()


def patched(raw, key, value):
    """The file with another number behind a key."""
    at = raw.index(key) + len(key) + 4
    return raw[:at] + value + raw[at + len(value) :]


NUMBERS = {
    "layers": (b"llama.block_count", 10**9, "'num_hidden_layers' holds 1000000000, expected at"),
    "more layers than tensors": (b"llama.block_count", 5000, "5000 layers, but the files hold 21"),
    "heads 0": (b"llama.attention.head_count", 0, "llama.attention.head_count is 0"),
    "width": (b"llama.embedding_length", 2**32 - 1, "holds 4294967295, expected at most"),
    "feed forward": (b"llama.feed_forward_length", 2**31 - 1, "the config says [32, 2147483647]"),
}


@pytest.mark.parametrize("case", NUMBERS)
def test_sizes_are_checked_before_anything_is_made_of_them(tmp_path, good, case):
    key, value, words = NUMBERS[case]
    (tmp_path / "m.gguf").write_bytes(patched(good, key, struct.pack("<I", value)))
    with pytest.raises(LongctxError) as caught:
        open_source(tmp_path / "m.gguf")
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_a_value_of_another_type(tmp_path, good):
    raw = patched(good, b"llama.block_count", b"")
    at = raw.index(b"llama.block_count") + len(b"llama.block_count")
    (tmp_path / "m.gguf").write_bytes(raw[:at] + struct.pack("<I", 6) + raw[at + 4 :])
    with pytest.raises(CheckpointError, match=r"llama.block_count is .*, expected int"):
        open_source(tmp_path / "m.gguf")


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
