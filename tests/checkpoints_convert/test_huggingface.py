"""Hugging Face directories in and out, bit by bit; types, shards, meshes, the hub."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints_convert import convert, export, read_config
from checkpoints_convert.config import model_config
from jax_longctx.errors import CheckpointError
from jax_longctx.models.storage import load_params, read_manifest
from jax_longctx.sharding import make_mesh
from tests.checkpoints_convert.test_names import flat, internlm2_state
from tests.checkpoints_convert.tiny import (
    DTYPES,
    FAMILIES,
    hf_config,
    params_from_hf,
    random_state,
    same_bits,
    write_checkpoint,
)


def load_all(folder):
    state = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= load_file(path)
    return state


def assert_same_state(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert same_bits(found[name], value), name


ROUND_TRIPS = [
    *(("llama", dtype) for dtype in DTYPES),
    *(("qwen2", dtype) for dtype in DTYPES),
    *(("qwen3", dtype) for dtype in DTYPES),
    *((family, "bfloat16") for family in FAMILIES if family not in ("llama", "qwen2", "qwen3")),
]


@pytest.mark.parametrize(("family", "dtype"), ROUND_TRIPS)
def test_round_trip_gives_back_every_bit(tmp_path, family, dtype):
    described = hf_config(family)
    state = random_state(described, dtype)
    source = write_checkpoint(tmp_path / "hf", described, state, shards=2)
    manifest = convert(source, tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "back")

    assert manifest.dtype == dtype
    assert manifest.config == model_config(described)
    assert_same_state(load_all(tmp_path / "back"), state)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert model_config(written) == manifest.config
    assert written["torch_dtype"] == dtype
    assert (written["bos_token_id"], written["eos_token_id"]) == (256, [257])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["back", "hf", "ours"]


def test_stored_types_may_differ_and_come_back(tmp_path):
    described = hf_config("llama")
    state = random_state(described, "bfloat16")
    state["model.norm.weight"] = state["model.norm.weight"].astype(np.float32) + 1e-7
    source = write_checkpoint(tmp_path / "hf", described, state)
    manifest = convert(source, tmp_path / "ours")
    assert manifest.dtype == "bfloat16"
    assert manifest.tensors["final_norm.scale"].dtype == "float32"
    # A model computes in one type.
    params = load_params(tmp_path / "ours", make_mesh())
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}
    export(tmp_path / "ours", tmp_path / "back")
    assert_same_state(load_all(tmp_path / "back"), state)


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_are_cast_to_the_type_asked_for(tmp_path, dtype):
    described = hf_config("llama")
    state = random_state(described, "float32")
    convert(write_checkpoint(tmp_path / "hf", described, state), tmp_path / "ours", dtype=dtype)
    params = load_params(tmp_path / "ours", make_mesh())
    cast = {name: value.astype(DTYPES[dtype]) for name, value in state.items()}
    expected = params_from_hf(model_config(described), cast)
    assert {path for path, _ in flat(params)} == {path for path, _ in flat(expected)}
    for (path, ours), (_, theirs) in zip(sorted(flat(params)), sorted(flat(expected)), strict=True):
        assert same_bits(np.asarray(ours), np.asarray(theirs)), path


def test_pieces_of_a_tensor_are_joined_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("checkpoints_convert.files.PIECE", 4 * 32 * 7)
    described = hf_config("llama")
    state = random_state(described, "float32")
    source = write_checkpoint(tmp_path / "hf", described, state)
    convert(source, tmp_path / "ours", dtype="bfloat16")
    export(tmp_path / "ours", tmp_path / "back")
    cast = {name: value.astype(jnp.bfloat16) for name, value in state.items()}
    assert_same_state(load_all(tmp_path / "back"), cast)


def test_a_sharded_mesh_writes_and_reads_the_same(tmp_path):
    described = hf_config("qwen2")
    state = random_state(described)
    source = write_checkpoint(tmp_path / "hf", described, state)
    mesh = make_mesh(data=2, seq=2, tensor=2)
    convert(source, tmp_path / "ours", mesh=mesh)
    export(tmp_path / "ours", tmp_path / "back")
    assert_same_state(load_all(tmp_path / "back"), state)
    params = load_params(tmp_path / "ours", mesh)
    q = params["layers"]["0"]["attn"]["q"]
    assert q.sharding.spec == jax.sharding.PartitionSpec(None, "tensor", "seq")
    assert {shard.data.shape for shard in q.addressable_shards} == {(32, 2, 4)}
    whole = load_params(tmp_path / "ours", make_mesh())
    np.testing.assert_array_equal(q, whole["layers"]["0"]["attn"]["q"])


def test_a_file_that_leaves_keys_out_converts(tmp_path):
    """As Llama 2 was published, without theta and head size; here without kv heads as well."""
    described = hf_config("llama", num_key_value_heads=4)
    state = random_state(described)
    said = {key: value for key, value in described.items() if key != "num_key_value_heads"}
    del said["rope_theta"]
    manifest = convert(write_checkpoint(tmp_path / "hf", said, state), tmp_path / "ours")
    assert manifest.config == model_config(described)
    assert (manifest.config.rope.theta, manifest.config.num_kv_heads) == (10000.0, 4)
    export(tmp_path / "ours", tmp_path / "back")
    assert_same_state(load_all(tmp_path / "back"), state)
    assert read_config(tmp_path / "back" / "config.json") == manifest.config


def test_internlm2_is_split_and_exported_as_llama(tmp_path):
    described = hf_config("llama", num_attention_heads=8, num_key_value_heads=2)
    config = model_config(described)
    state = random_state(described, "bfloat16")
    theirs = {**described, "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2"}
    source = write_checkpoint(
        tmp_path / "hf", {**theirs, "bias": False}, internlm2_state(state, config)
    )
    manifest = convert(source, tmp_path / "ours")
    assert manifest.config == config
    export(tmp_path / "ours", tmp_path / "back")
    assert_same_state(load_all(tmp_path / "back"), state)
    written = json.loads((tmp_path / "back" / "config.json").read_text())
    assert model_config(written) == config


def test_export_splits_into_shards_with_an_index(tmp_path):
    described = hf_config("llama")
    state = random_state(described)
    source = write_checkpoint(tmp_path / "hf", described, state)
    convert(source, tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "back", shard_bytes=40_000)
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in state.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "back" / file)
    assert_same_state(load_all(tmp_path / "back"), state)
    convert(tmp_path / "back", tmp_path / "again")


def test_names_of_folders_may_hold_anything(tmp_path):
    described = hf_config("llama")
    state = random_state(described)
    folder = tmp_path / "a b%20ü#?&"
    source = write_checkpoint(folder / "hf", described, state)
    convert(source, folder / "our's $x")
    export(folder / "our's $x", folder / "back")
    assert_same_state(load_all(folder / "back"), state)


def test_progress_counts_every_byte(tmp_path):
    described = hf_config("llama")
    source = write_checkpoint(tmp_path / "hf", described, random_state(described))
    seen = []
    convert(source, tmp_path / "ours", dtype="float16", progress=lambda *at: seen.append(at))
    total = 2 * sum(value.size for value in random_state(described).values())
    assert seen[-1] == (total, total) and seen == sorted(seen) and len(seen) > 10
    seen.clear()
    export(tmp_path / "ours", tmp_path / "back", progress=lambda *at: seen.append(at))
    assert seen[-1] == (total, total) and seen == sorted(seen) and len(seen) > 10


def test_manifest_names_what_was_read(tmp_path):
    import hashlib

    described = hf_config("llama")
    source = write_checkpoint(tmp_path / "hf", described, random_state(described), shards=2)
    convert(source, tmp_path / "ours")
    manifest = read_manifest(tmp_path / "ours")
    names = {path.name for path in source.iterdir()}
    assert set(manifest.sources) == names
    for name, digest in manifest.sources.items():
        assert digest == hashlib.sha256((source / name).read_bytes()).hexdigest()
    assert sorted(manifest.tokenizer_files) == ["tokenizer.json", "tokenizer_config.json"]
    assert manifest.source == str(source)


def test_a_stored_head_that_is_tied_is_left_out_when_it_is_the_embedding(tmp_path):
    described = hf_config("llama-tied-biased")
    state = random_state(described)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].copy()
    convert(write_checkpoint(tmp_path / "same", described, state), tmp_path / "ours")
    assert "head.table" not in read_manifest(tmp_path / "ours").tensors
    state["lm_head.weight"][-1, -1] += 1
    other = write_checkpoint(tmp_path / "other", described, state)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        convert(other, tmp_path / "no")


def test_rotary_tables_in_old_checkpoints_are_left_out(tmp_path):
    described = hf_config("llama")
    state = random_state(described)
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    convert(write_checkpoint(tmp_path / "hf", described, state), tmp_path / "ours")
    export(tmp_path / "ours", tmp_path / "back")
    del state["model.layers.0.self_attn.rotary_emb.inv_freq"]
    assert_same_state(load_all(tmp_path / "back"), state)


def test_a_hub_id_is_read_from_the_local_cache(tmp_path, monkeypatch):
    """The layout of huggingface_hub's cache: blobs, and a snapshot of links to them."""
    import huggingface_hub.constants

    described = hf_config("llama")
    state = random_state(described)
    repository = tmp_path / "cache" / "models--someone--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = write_checkpoint(repository / "snapshots" / commit, described, state)
    (repository / "blobs").mkdir()
    for path in list(snapshot.iterdir()):
        blob = repository / "blobs" / f"blob-of-{path.name}"
        path.rename(blob)
        path.symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    manifest = convert("someone/tiny", tmp_path / "ours")
    assert manifest.source == "someone/tiny"
    export(tmp_path / "ours", tmp_path / "back")
    assert_same_state(load_all(tmp_path / "back"), state)
    convert(f"someone/tiny@{commit}", tmp_path / "by-commit")
    with pytest.raises(CheckpointError, match=r"someone/other.*hub"):
        convert("someone/other", tmp_path / "no")


def test_float64_is_stored_as_float32_unless_asked_otherwise(tmp_path):
    described = hf_config("llama")
    state = random_state(described)
    folder = write_checkpoint(tmp_path / "hf", described, state)
    doubled = {name: value.astype(np.float64) for name, value in state.items()}
    save_file(doubled, folder / "model.safetensors")
    assert convert(folder, tmp_path / "ours").dtype == "float32"
    export(tmp_path / "ours", tmp_path / "back")
    assert_same_state(load_all(tmp_path / "back"), state)
