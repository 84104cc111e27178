"""Every kind of bad source: one line with the file and the tensor, and nothing left behind."""

import json
import os
import shutil
import struct
import time

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file

from checkpoints_convert import convert, export
from jax_longctx.errors import CheckpointError, ConfigError, InputError, LongctxError
from jax_longctx.sharding import make_mesh
from tests.checkpoints_convert.tiny import hf_config, random_state, write_checkpoint

INDEX = "model.safetensors.index.json"
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


def shard(source, number):
    return source / f"model-0000{number}-of-00002.safetensors"


def shard_of(source, name):
    return next(path for path in source.glob("*.safetensors") if name in load_file(path))


def edit(source, name, change):
    """Rewrites a tensor in its shard; None removes it."""
    path = shard_of(source, name)
    state = load_file(path)
    value = change(state[name])
    del state[name]
    if value is not None:
        state[name] = value
    save_file(state, path)
    return path


def edit_json(path, **changes):
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: v for key, v in values.items() if v is not None}))


def test_truncated_file(source, refused):
    path = shard(source, 2)
    os.truncate(path, path.stat().st_size - 10)
    refused(path, "truncated", "fetch it again")


def test_truncated_file_names_the_tensor(source, refused):
    path = shard(source, 1)
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    first = min(header, key=lambda name: header[name]["data_offsets"][0])
    os.truncate(path, 8 + size + 3)
    refused(path, "truncated", first)


def test_file_cut_while_it_is_read(source, refused, monkeypatch):
    """Its size was right when the header was read."""
    path = shard(source, 2)

    def cut(done, total):
        os.truncate(path, 4000)

    refused(path, "truncated", progress=cut)


@pytest.mark.parametrize("keep", [0, 4, 60])
def test_file_cut_in_its_header(source, refused, keep):
    os.truncate(shard(source, 1), keep)
    refused(shard(source, 1), "truncated")


def test_file_of_another_format(source, refused):
    shard(source, 1).write_bytes(struct.pack("<Q", 20) + b"not a JSON header at all, no" * 10)
    refused(shard(source, 1), "not a safetensors file")


def test_bytes_after_the_last_tensor(source, refused):
    with shard(source, 1).open("ab") as file:
        file.write(b"more")
    refused(shard(source, 1), "4 bytes follow")


def test_missing_tensor(source, refused):
    edit(source, UP, lambda _: None)
    refused(UP, "does not hold", "index")
    (source / "model.safetensors.index.json").unlink()
    state = {}
    for number in (1, 2):
        state |= load_file(shard(source, number))
    save_file(state, source / "model.safetensors")
    refused(source, UP, "missing", "[48, 32]")


def test_wrong_shape(source, refused):
    path = edit(source, UP, lambda value: value[:40].copy())
    refused(path, UP, "[40, 32]", "[48, 32]")


def test_unknown_tensor(tmp_path, refused):
    described = hf_config("llama")
    state = random_state(described)
    state["model.layers.0.mlp.experts.0.weight"] = np.ones((3, 3), np.float32)
    folder = write_checkpoint(tmp_path / "other", described, state)
    refused(
        folder / "model.safetensors",
        "model.layers.0.mlp.experts.0.weight",
        "unknown",
        source=folder,
    )


@pytest.mark.parametrize(("value", "word"), [(np.nan, "NaN"), (np.inf, "infinite")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "source"])
def test_not_finite_weights(source, refused, value, word, dtype):
    def spoil(array):
        array = array.copy()
        array[47, 31] = value
        return array

    path = edit(source, UP, spoil)
    refused(path, UP, word, dtype=dtype)


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_not_finite_weights_in_two_bytes(tmp_path, refused, kind):
    described = hf_config("llama")
    state = random_state(described, kind)
    state[UP][3, 3] = np.nan
    folder = write_checkpoint(tmp_path / "other", described, state)
    refused(UP, "NaN", source=folder)


def test_values_that_do_not_fit_the_type(source, refused):
    edit(source, UP, lambda value: value * 1e6)
    refused(UP, "too large for float16", "bfloat16", dtype="float16")


def test_missing_shard(source, refused):
    shard(source, 2).unlink()
    refused(shard(source, 2), "missing", "model.")


def test_unreadable_file(source, refused):
    """A folder in the file's place: permissions do not stop the superuser that tests may run as."""
    shard(source, 1).unlink()
    shard(source, 1).mkdir()
    refused(shard(source, 1), "cannot be read")


def test_weights_of_a_type_that_is_not_implemented(source, refused):
    path = edit(source, UP, lambda value: value.astype(np.int8))
    refused(path, UP, "I8", "GGUF")


def test_not_a_checkpoint(tmp_path, refused):
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "not a checkpoint", "config.json", source=empty)
    text = tmp_path / "notes.txt"
    text.write_text("nothing of a model\n" * 20)
    refused(text, "not a GGUF file", source=text)
    refused("nowhere", "does not exist", source=str(tmp_path / "nowhere"))


def test_a_weights_file_in_place_of_its_folder(source, refused):
    refused("name its folder", source=shard(source, 1))


def test_no_weights(source, refused):
    for path in source.glob("model*"):
        path.unlink()
    (source / "pytorch_model.bin").write_bytes(b"x")
    refused(source, "no weights", "pytorch_model.bin")


def test_index_without_a_map(source, refused):
    (source / "model.safetensors.index.json").write_text("{}")
    refused("model.safetensors.index.json", "weight_map")


@pytest.mark.parametrize("text", ["{", "[1]", b"\xff\xfe{}"])
def test_damaged_config(source, refused, text):
    path = source / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(path)


def test_config_of_another_kind(source, refused):
    path = source / "config.json"
    edit_json(path, architectures=["GPT2LMHeadModel"])
    refused("GPT2LMHeadModel", kind=ConfigError)


def test_sizes_are_checked_against_the_tensors_first(source, refused):
    """Lists and names of a thousand million layers took a minute and 8 GB."""
    begin = time.process_time()
    edit_json(source / "config.json", num_hidden_layers=10**9)
    refused("'num_hidden_layers' holds 1000000000", kind=ConfigError)
    edit_json(source / "config.json", num_hidden_layers=10_000)
    refused(source, "10000 layers, but the files hold 21 tensors")
    assert time.process_time() - begin < 10  # the first import of transformers is in it


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", INDEX, "config.json"])
def test_deep_nesting(source, refused, name):
    header = struct.pack("<Q", 200_000) if name.endswith(".safetensors") else b""
    (source / name).write_bytes(header + b"[" * 200_000 + b" " * 8)
    refused(source / name, "nested too deeply")


@pytest.mark.parametrize("outside", ["../hf2/model.safetensors", "{}/model.safetensors", "."])
def test_index_that_points_outside_its_folder(tmp_path, source, refused, outside):
    (tmp_path / "hf2").mkdir()
    shutil.copyfile(shard(source, 1), tmp_path / "hf2" / "model.safetensors")
    outside = outside.format(tmp_path / "hf2")
    placed = json.loads((source / INDEX).read_text())["weight_map"]
    first = shard(source, 1).name
    moved = {name: outside if file == first else file for name, file in placed.items()}
    edit_json(source / INDEX, weight_map=moved)
    refused(source / INDEX, outside, "the same folder")


BROKEN_TOKENIZERS = [
    ("tokenizer_config.json", "{", "tokenizer_config.json is not JSON"),
    ("tokenizer_config.json", "[" * 200_000, "tokenizer_config.json"),
    ("tokenizer_config.json", '{"eos_token": "<none>"}', "'<none>' is not in the tokenizer's"),
    ("tokenizer_config.json", '{"chat_template": 7}', "chat_template is a int"),
    ("special_tokens_map.json", "[]", "special_tokens_map.json holds a list"),
    ("generation_config.json", '{"eos_token_id": "2"}', "eos_token_id is '2', expected an id"),
    ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer file"),
]


@pytest.mark.parametrize(("name", "text", "words"), BROKEN_TOKENIZERS)
def test_tokenizer_files_that_other_commands_would_refuse(source, refused, name, text, words):
    (source / name).write_text(text)
    refused(f"{source}: ", words)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% if %}", "the chat template is not valid at its line 1: "),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ range(10**9) }}", "the chat template "),
    ],
)
def test_chat_templates_that_cannot_be_rendered(source, refused, template, words):
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    refused(f"{source}: ", words, "; repair it in the source, or remove it")


def test_a_chat_template_that_refuses_the_messages_is_whole(tmp_path, source):
    template = "{{ raise_exception('a system message comes first') }}"
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    convert(source, tmp_path / "ours")


def test_missing_tokenizer(source, refused):
    (source / "tokenizer.json").unlink()
    refused(source, "no tokenizer")


def test_tokenizer_of_another_model(source, refused):
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({str(i): i for i in range(301)}, unk_token="0")
    )
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").unlink()
    refused(source, "wrong tokenizer", "300")


def test_type_that_is_not_known(refused):
    refused("int4", "bfloat16", kind=ConfigError, dtype="int4")


def test_mesh_that_does_not_fit(refused):
    refused("kv_heads=2", kind=ConfigError, mesh=make_mesh(tensor=4))


def test_destination_that_exists(tmp_path, source):
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "precious").write_text("keep")
    with pytest.raises(CheckpointError, match="exists; choose another name"):
        convert(source, tmp_path / "ours")
    assert [path.name for path in (tmp_path / "ours").iterdir()] == ["precious"]
    (tmp_path / "ours" / "precious").unlink()
    convert(source, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="exists; choose another name"):
        convert(source, tmp_path / "ours")
    with pytest.raises(CheckpointError, match="exists; choose another name"):
        export(tmp_path / "ours", source)


def test_disk_without_room(source, refused, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    refused("needs", "0.00 GB are free", "--dtype")


def test_destination_below_a_file(tmp_path, source):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match=r"file/ours cannot be written: "):
        convert(source, tmp_path / "file" / "ours")
    assert (tmp_path / "file").read_text() == "x"


def test_export_of_what_is_no_checkpoint(tmp_path, source):
    with pytest.raises(CheckpointError, match="not a converted checkpoint"):
        export(source, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_export_that_fails_leaves_nothing(tmp_path, source, monkeypatch):
    convert(source, tmp_path / "ours")
    (tmp_path / "ours" / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        export(tmp_path / "ours", tmp_path / "back")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "ours"]
