import json
import os
import shutil
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from checkpoints_convert import convert, export
from jax_longctx.errors import CheckpointError, ConfigError, InputError, LongctxError
from tests.checkpoints_convert.tiny import hf_config, random_state, write_checkpoint
from tests.patience import patience

ONE, TWO = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
INDEX, CONFIG = "model.safetensors.index.json", "config.json"
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture
def source(tmp_path):
    described = hf_config("llama")
    return write_checkpoint(tmp_path / "hf", described, random_state(described), shards=2)


@pytest.fixture
def refused(tmp_path, source):
    """Converts `source` and checks the error: one line with these words; no traces on disk."""

    def check(*words, kind=CheckpointError, source=source, **options):
        before = sorted(path.name for path in tmp_path.iterdir())
        with pytest.raises(kind) as caught:
            convert(source, tmp_path / "ours", **options)
        message = str(caught.value)
        assert "\n" not in message and isinstance(caught.value, LongctxError)
        for word in words:
            assert str(word) in message, message
        assert sorted(path.name for path in tmp_path.iterdir()) == before

    return check


def cut(name, size):
    """Leaves so many bytes of a file, from its end if negative."""
    return lambda source: (source / name).write_bytes((source / name).read_bytes()[:size])


def written(name, content):
    return lambda source: (source / name).write_bytes(content)


def gone(*names):
    return lambda source: [(source / name).unlink() for name in names]


def edited(change, name=UP):
    """Rewrites a tensor in its shard; None removes it."""

    def edit(source):
        path = next(path for path in source.glob("*.safetensors") if name in load_file(path))
        state = load_file(path)
        value = change(state.pop(name).copy())
        save_file(state if value is None else state | {name: value}, path)

    return edit


def with_json(name, **changes):
    def edit(source):
        values = json.loads((source / name).read_text()) | changes
        (source / name).write_text(json.dumps(values))

    return edit


def index_of(file):
    return with_json(INDEX, weight_map={UP: file})


def missing_tensor_without_an_index(source):
    edited(lambda _: None)(source)
    save_file(load_file(source / ONE) | load_file(source / TWO), source / "model.safetensors")
    (source / INDEX).unlink()


def instead(name, *others, make=lambda path: path.write_bytes(b"IQ== 0\nIg== 1\n")):
    """A file in place of others; by default as tiktoken's are."""

    def edit(source):
        gone(*others)(source)
        make(source / name)

    return edit


def tokenizer_of_another_model(source):
    words = tokenizers.models.WordLevel({str(i): i for i in range(301)}, unk_token="0")
    tokenizers.Tokenizer(words).save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").unlink()


def nested(name):
    """With the length of a header, where it is a file of tensors."""
    header = struct.pack("<Q", 200_000) if name.endswith(".safetensors") else b""
    return written(name, header + b"[" * 200_000 + b" " * 8)


NO_HEADER = struct.pack("<Q", 20) + b"not a JSON header at all, no" * 10

# What is done to the source, and the words of the error; "{}" is the source's folder.
CASES = {
    "cut in a tensor": (cut(TWO, -10), ["{}/" + TWO, "truncated", ".weight", "fetch it again"]),
    "cut before its header": (cut(ONE, 0), ["{}/" + ONE, "truncated"]),
    "cut in the header's length": (cut(ONE, 4), ["{}/" + ONE, "truncated"]),
    "cut in its header": (cut(ONE, 60), ["{}/" + ONE, "truncated"]),
    "another format": (written(ONE, NO_HEADER), ["{}/" + ONE, "not a safetensors file"]),
    "bytes at the end": (
        lambda source: (source / ONE).write_bytes((source / ONE).read_bytes() + b"more"),
        ["{}/" + ONE, "4 bytes follow"],
    ),
    "missing tensor": (edited(lambda _: None), [UP, "does not hold", "index"]),
    "no index": (missing_tensor_without_an_index, ["{}", UP, "missing", "[48, 32]"]),
    "wrong shape": (edited(lambda x: x[:40].copy()), ["{}/" + TWO, UP, "[40, 32]", "[48, 32]"]),
    "another type": (edited(lambda x: x.astype(np.int8)), ["{}/" + TWO, UP, "I8", "GGUF"]),
    "missing shard": (gone(TWO), ["{}/" + TWO, "missing", "model."]),
    # Permissions do not stop the superuser that tests may run as.
    "unreadable": (instead(ONE, ONE, make=Path.mkdir), ["{}/" + ONE, "cannot be read"]),
    "index without a map": (written(INDEX, b"{}"), [INDEX, "weight_map"]),
    "index beside": (index_of("../hf2/" + ONE), ["{}/" + INDEX, "../hf2/", "the same folder"]),
    "index elsewhere": (index_of("/tmp/" + ONE), ["{}/" + INDEX, "/tmp/", "the same folder"]),
    "index of a folder": (index_of("."), ["{}/" + INDEX, "'.'", "the same folder"]),
    "config cut": (written(CONFIG, b"{"), ["{}/" + CONFIG]),
    "config a list": (written(CONFIG, b"[1]"), ["{}/" + CONFIG]),
    "config no text": (written(CONFIG, b"\xff\xfe{}"), ["{}/" + CONFIG]),
    "nested tensors": (nested(ONE), ["{}/" + ONE, "nested too deeply"]),
    "nested index": (nested(INDEX), ["{}/" + INDEX, "nested too deeply"]),
    "nested config": (nested(CONFIG), ["{}/" + CONFIG, "nested too deeply"]),
    "no end": (with_json(CONFIG, eos_token_id="2"), ["{}: config.json: eos_token_id is '2', exp"]),
    "no tokenizer": (gone("tokenizer.json"), ["{}", "no tokenizer"]),
    "another tokenizer": (tokenizer_of_another_model, ["{}", "wrong tokenizer", "300"]),
}
WEIGHTS = ONE, TWO, INDEX
CASES["shards alone"] = gone(INDEX), ["{}", ONE, "without its index; fetch " + INDEX]
CASES |= {
    f"instead: {name}": (instead(name, *others), ["{}", name, words])
    for name, others, words in [
        ("w.safetensors", WEIGHTS, "has another name; rename it"),
        ("consolidated.safetensors", WEIGHTS, "fetch the files for transformers"),
        ("consolidated.00.pth", (*WEIGHTS, CONFIG), "fetch the files for transformers"),
        ("adapter_config.json", (*WEIGHTS, CONFIG), "is of a LoRA adapter"),
        ("m-Q8_0.gguf", WEIGHTS, "name that file"),
        ("pytorch_model.bin", WEIGHTS, "is not read; save it as safetensors"),
        ("tokenizer.model", ["tokenizer.json"], "is a vocabulary of tiktoken"),
        ("qwen.tiktoken", ["tokenizer.json"], "is not read"),
    ]
}
CASES |= {
    f"a FIFO: {name}": (instead(name, name, make=os.mkfifo), ["{}", name, "read: it is a FIFO"])
    for name in (ONE, INDEX, CONFIG, "tokenizer.json", "tokenizer_config.json")
}
# A copy of the hub's cache without its blobs: files that may be missing too.
CASES |= {
    f"a broken link: {name}": (
        instead(name, *others, make=lambda path: path.symlink_to("../blobs/1")),
        ["{}/" + name, "a link to ../blobs/1, where no file is; fetch it again"],
    )
    for name, others in [
        *((name, [name]) for name in (ONE, INDEX, CONFIG, "tokenizer_config.json")),
        *((name, []) for name in ("generation_config.json", "chat_template.jinja")),
    ]
}
# A file of the tokenizer that other commands would refuse.
CASES |= {
    f"{name}: {text[:29]}": (written(name, text.encode()), ["{}: ", words])
    for name, text, words in [
        ("tokenizer_config.json", "[" * 200_000, "tokenizer_config.json"),
        ("tokenizer_config.json", '{"eos_token": "<none>"}', "'<none>' is not in the tokenizer's"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "is not valid at its line 1: "),
        ("tokenizer_config.json", '{"chat_template": "{{ range(10**9) }}"}', "; repair it in the"),
        (
            "special_tokens_map.json",
            "[]",
            "special_tokens_map.json is not a JSON file: it holds a list",
        ),
        ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id is '2', expected an id"),
    ]
}


@pytest.mark.parametrize("case", CASES)
def test_a_spoiled_source_is_refused(source, refused, case):
    spoil, words = CASES[case]
    spoil(source)
    refused(*(word.replace("{}", str(source)) for word in words))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_not_finite_weights(tmp_path, source, refused, dtype):
    described = hf_config("llama")
    state = random_state(described, dtype)
    state[UP][3, 3] = np.nan
    refused(UP, "NaN", source=write_checkpoint(tmp_path / "other", described, state))
    for value, word in ((np.nan, "NaN"), (np.inf, "infinite")):

        def spoiled(array, value=value):
            array.flat[-1] = value
            return array

        edited(spoiled)(source)
        for asked in (dtype, "source"):
            refused(source / TWO, UP, word, dtype=asked)


def test_unknown_tensor(tmp_path, refused):
    described, name = hf_config("llama"), "model.layers.0.mlp.experts.0.weight"
    state = random_state(described) | {name: np.ones((3, 3), np.float32)}
    folder = write_checkpoint(tmp_path / "other", described, state)
    refused(folder / "model.safetensors", name, "unknown", source=folder)


def test_what_does_not_fit_the_options_is_refused(source, refused):
    refused("int4", "bfloat16", kind=ConfigError, dtype="int4")
    # Its size was right when the header was read.
    raw = (source / TWO).read_bytes()
    cutting = cut(TWO, 4000)
    refused(source / TWO, "truncated", progress=lambda done, total: cutting(source))
    (source / TWO).write_bytes(raw)
    edited(lambda value: value * 1e6)(source)
    refused(UP, "too large for float16", "bfloat16", dtype="float16")


def test_what_is_no_checkpoint_or_of_sizes_that_no_tensors_have(tmp_path, source, refused):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "not a checkpoint", "config.json", source=empty)
    text = tmp_path / "notes.txt"
    text.write_text("nothing of a model\n" * 20)
    refused(text, "not a GGUF file", source=text)
    refused("nowhere", "does not exist", source=str(tmp_path / "nowhere"))
    os.mkfifo(tmp_path / "m.gguf")
    refused("m.gguf cannot be read: it is a FIFO", source=tmp_path / "m.gguf")
    refused("name its folder", source=source / ONE)
    with_json(CONFIG, architectures=["GPT2LMHeadModel"])(source)
    refused("GPT2LMHeadModel", kind=ConfigError)
    # Lists and names of many layers took a minute and 8 GB.
    begin = time.process_time()
    with_json(CONFIG, architectures=["LlamaForCausalLM"], num_hidden_layers=10_000)(source)
    refused("10000 layers, but the files hold 21 tensors")
    assert time.process_time() - begin < patience(10)  # the first import of transformers is in it


def test_destinations_that_cannot_be_written(tmp_path, source, refused, monkeypatch):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "precious").write_text("keep")
    refused("exists; choose another name")
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["precious"]
    (tmp_path / "ours" / "precious").unlink()
    convert(source, tmp_path / "ours")
    refused("exists; choose another name")
    with pytest.raises(CheckpointError, match="exists; choose another name"):
        export(tmp_path / "ours", source)
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"file/ours cannot be written: "):
        convert(source, tmp_path / "file" / "ours")
    assert (tmp_path / "file").read_text() == "x"
    # Without room on the disk.
    shutil.rmtree(tmp_path / "ours")
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refused("needs", "1000 B are free", "--dtype")


def test_an_export_that_fails_leaves_nothing(tmp_path, source):
    with pytest.raises(CheckpointError, match="not a converted checkpoint"):
        export(source, tmp_path / "back")
    # A template that refuses the messages is whole.
    template = "{{ raise_exception('a system message comes first') }}"
    with_json("tokenizer_config.json", chat_template=template)(source)
    convert(source, tmp_path / "ours")
    (tmp_path / "ours" / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        export(tmp_path / "ours", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]
