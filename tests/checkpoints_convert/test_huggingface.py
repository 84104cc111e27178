import dataclasses
import hashlib
import itertools
import json

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import load_file

import jax_longctx
from checkpoints_convert import convert, export, read_config
from checkpoints_convert.config import model_config
from checkpoints_convert.importing import open_source
from jax_longctx.cli import warm
from jax_longctx.errors import CheckpointError, ConfigError
from jax_longctx.models.storage import load_params, read_manifest
from jax_longctx.run_spec import RunSpec
from tests.checkpoints_convert.test_names import assert_same_parameters, internlm2_state
from tests.checkpoints_convert.tiny import (
    DTYPES,
    FAMILIES,
    hf_config,
    packed_experts,
    params_from_hf,
    random_state,
    write_checkpoint,
)

LLAMA = hf_config("llama")


def load_all(folder):
    state = {}
    for path in sorted(folder.glob("*.safetensors")):
        state |= load_file(path)
    return state


def assert_same_state(found, expected):
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert found[name].tobytes() == value.tobytes(), name


def there_and_back(folder, described, state, expected=None, *, shards=1, **options):
    """Converts a checkpoint and exports it: the expected tensors come back, or the same.

    Returns the manifest of the conversion.
    """
    source = write_checkpoint(folder / "hf", described, state, shards=shards)
    manifest = convert(source, folder / "ours", **options)
    export(folder / "ours", folder / "back")
    assert_same_state(load_all(folder / "back"), state if expected is None else expected)
    return manifest


# Every type, and every family.
ROUND_TRIPS = [("llama", dtype) for dtype in DTYPES]
ROUND_TRIPS += zip([*FAMILIES][1:], itertools.cycle(DTYPES), strict=False)


@pytest.mark.parametrize(("family", "dtype"), ROUND_TRIPS)
@pytest.mark.quick("llama", "mixtral", "phi3", "cohere-")
def test_round_trip_gives_back_every_bit(tmp_path, family, dtype):
    described = hf_config(family)
    # Names of folders may hold anything.
    folder = tmp_path / "a b%20ü#?& it's $x"
    manifest = there_and_back(folder, described, random_state(described, dtype), shards=2)
    assert manifest.dtype == dtype
    assert manifest.config == model_config(described)
    written = json.loads((folder / "back" / "config.json").read_text())
    assert model_config(written) == manifest.config
    assert written["torch_dtype"] == dtype
    assert (written["bos_token_id"], written["eos_token_id"]) == (256, [257])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (folder / "back" / name).read_bytes() == (folder / "hf" / name).read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["back", "hf", "ours"]
    # The manifest names what was read.
    assert read_manifest(folder / "ours") == manifest
    assert manifest.source == str(folder / "hf")
    assert sorted(manifest.tokenizer_files) == ["tokenizer.json", "tokenizer_config.json"]
    files = {path.name: path.read_bytes() for path in (folder / "hf").iterdir()}
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    assert manifest.sources == digests


def test_stored_types_may_differ_and_come_back_but_for_float64(tmp_path):
    state = random_state(LLAMA)
    found = {name: value.astype(np.float64) for name, value in state.items()}
    found["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4)
    assert there_and_back(tmp_path / "64", LLAMA, found, state).dtype == "float32"
    state = random_state(LLAMA, "bfloat16")
    state["model.norm.weight"] = state["model.norm.weight"].astype(np.float32) + 1e-7
    manifest = there_and_back(tmp_path, LLAMA, state)
    assert manifest.dtype == "bfloat16"
    assert manifest.tensors["final_norm.scale"].dtype == "float32"
    # A model computes in one type.
    params = load_params(tmp_path / "ours")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(params)} == {"bfloat16"}


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": 256}, None, (257, 256)),
        ({"eos_token_id": [257, 5]}, None, (257, 5)),
        ({"eos_token_id": None, "text_config": {"eos_token_id": [256]}}, None, (257, 256)),
        # Beside generation_config.json only added tokens count: 5 is a letter.
        ({"eos_token_id": [5, 256]}, 7, (257, 7, 256)),
        ({"eos_token_id": [-1, 2**32 - 1]}, [2**40], (257,)),
    ],
)
def test_answers_end_with_the_ids_of_all_files(tmp_path, config, generation, ends):
    described = hf_config("llama", num_hidden_layers=1) | config
    source = write_checkpoint(tmp_path / "hf", described, random_state(described))
    if generation is not None:
        named = json.dumps({"eos_token_id": generation})
        (source / "generation_config.json").write_text(named)
    convert(source, tmp_path / "ours")
    assert jax_longctx.load(tmp_path / "ours").end_ids((), True) == [*ends]
    # `warm` compiles for as many of them.
    assert warm._Model(str(tmp_path / "ours"), RunSpec()).stop_ids == ends


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_values_are_cast_to_the_type_asked_for(tmp_path, monkeypatch, dtype):
    # A tensor is read in several pieces.
    monkeypatch.setattr("checkpoints_convert.files.PIECE", 4 * 32 * 7)
    state = random_state(LLAMA, "float32")
    cast = {name: value.astype(DTYPES[dtype]) for name, value in state.items()}
    there_and_back(tmp_path, LLAMA, state, cast, dtype=dtype)
    expected = params_from_hf(model_config(LLAMA), cast)
    assert_same_parameters(load_params(tmp_path / "ours"), expected)
    assert_same_parameters(ocp.load(tmp_path / "ours" / "params"), expected)


def test_packed_experts_of_gpt_oss_are_widened_and_exported_in_bfloat16(tmp_path, monkeypatch):
    # A tensor is read in several pieces.
    monkeypatch.setattr("checkpoints_convert.files.PIECE", 4 * 32 * 7)
    described = hf_config("gpt-oss", num_hidden_layers=1)
    described |= {"quantization_config": {"quant_method": "mxfp4"}}
    files, plain = packed_experts(random_state(described, "bfloat16"))
    manifest = there_and_back(tmp_path, described, files, plain, shards=2)
    assert manifest.dtype == "bfloat16"
    expected = params_from_hf(model_config(described), plain)
    assert_same_parameters(load_params(tmp_path / "ours"), expected)
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())
    convert(tmp_path / "hf", tmp_path / "int8", weights="int8")
    rounded = load_params(tmp_path / "ours", RunSpec(weights="int8"))
    assert_same_parameters(load_params(tmp_path / "int8"), rounded)
    name = "model.layers.0.mlp.experts.down_proj"
    for lacking, left in (("_blocks", "_scales"), ("_scales", "_blocks")):
        other = {key: value for key, value in files.items() if key != name + lacking}
        source = write_checkpoint(tmp_path / f"no{lacking}", described, other)
        with pytest.raises(CheckpointError, match=f"{name}{left} is there, but {name}{lacking} is"):
            convert(source, tmp_path / "other")
    scales, none = files[f"{name}_scales"], np.array(1, np.uint8)
    some = {key: value for key, value in files.items() if not key.startswith(f"{name}_")}
    for number, (held, said) in enumerate(
        [
            (files | {f"{name}_scales": scales[:, :-1]}, f"{name}_blocks .* are no numbers in M"),
            (files | {"a_blocks": none, "a_scales": none}, "a_scales .* are no numbers in MXFP4"),
            # Plain experts have their inputs before their outputs.
            (some | {name: plain[name]}, f"tensor {name} is stored plain beside "),
            (files | {name: plain[name]}, f"tensor {name} is stored plain beside "),
        ]
    ):
        source = write_checkpoint(tmp_path / f"misfit{number}", described, held)
        with pytest.raises(CheckpointError, match=said):
            convert(source, tmp_path / "other")


def test_internlm2_is_split_and_exported_as_llama(tmp_path):
    dynamic = {"type": "dynamic", "factor": 2.0}
    described = hf_config("llama", num_attention_heads=8, rope_scaling=dynamic)
    config = model_config(described)
    state = random_state(described, "bfloat16")
    theirs = {"architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2", "bias": False}
    fused = internlm2_state(state, config)
    assert there_and_back(tmp_path, described | theirs, fused, state).config == config
    # Its own class has biases unless it is told otherwise.
    del theirs["bias"]
    biased = model_config(described | theirs)
    assert biased == dataclasses.replace(config, qkv_bias=True, o_bias=True)
    assert read_config(tmp_path / "back" / "config.json") == config


def test_export_splits_into_shards_with_an_index_and_progress_counts_every_byte(tmp_path):
    state = random_state(LLAMA)
    source = write_checkpoint(tmp_path / "hf", LLAMA, state)
    total = sum(value.nbytes for value in state.values())
    for action, paths, options in (
        (convert, (source, tmp_path / "ours"), {"dtype": "source"}),
        (export, (tmp_path / "ours", tmp_path / "back"), {"shard_bytes": 40_000}),
        (convert, (tmp_path / "back", tmp_path / "again"), {"dtype": "float16"}),
    ):
        seen = []
        action(*paths, progress=lambda *at, seen=seen: seen.append(at), **options)
        at = total // 2 if "float16" in options.values() else total
        assert seen[-1] == (at, at) and seen == sorted(seen) and len(seen) > 10
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 2 and files == sorted(set(index["weight_map"].values()))
    assert index["metadata"]["total_size"] == total
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "back" / file)
    assert_same_state(load_all(tmp_path / "back"), state)


def test_a_stored_head_that_is_tied_is_left_out_when_it_is_the_embedding(tmp_path):
    described = hf_config("llama-tied-biased", num_hidden_layers=1)
    state = random_state(described)
    state["lm_head.weight"] = state["model.embed_tokens.weight"].copy()
    convert(write_checkpoint(tmp_path / "same", described, state), tmp_path / "ours")
    assert "head.table" not in read_manifest(tmp_path / "ours").tensors
    state["lm_head.weight"][-1, -1] += 1
    other = write_checkpoint(tmp_path / "other", described, state)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        convert(other, tmp_path / "no")


def test_a_hub_id_is_read_from_the_local_cache(tmp_path, monkeypatch):
    """The layout of huggingface_hub's cache: blobs, and a snapshot of links to them."""
    import huggingface_hub.constants

    state = random_state(LLAMA)
    repository = tmp_path / "cache" / "models--someone--tiny"
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = write_checkpoint(repository / "snapshots" / commit, LLAMA, state)
    (repository / "blobs").mkdir()
    for path in list(snapshot.iterdir()):
        blob = repository / "blobs" / f"blob-of-{path.name}"
        path.rename(blob)
        path.symlink_to(blob)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    assert convert("someone/tiny", tmp_path / "ours").source == "someone/tiny"
    export(tmp_path / "ours", tmp_path / "back")
    assert_same_state(load_all(tmp_path / "back"), state)
    convert(f"someone/tiny@{commit}", tmp_path / "by-commit")
    with pytest.raises(CheckpointError, match=r"someone/other.*hub"):
        convert("someone/other", tmp_path / "no")


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
@pytest.mark.parametrize("family", ["gemma3", "mistral"])
@pytest.mark.quick("mistral")
def test_the_text_model_of_one_of_text_and_images(tmp_path, family, prefix):
    text = hf_config(family)
    tied, state = text["tie_word_embeddings"], random_state(text)
    kind = text.pop("architectures")[0].replace("CausalLM", "ConditionalGeneration")
    text |= {"model_type": "gemma3_text" if family == "gemma3" else family}
    # The outer level says otherwise, as some published files do.
    outer = {"architectures": [kind], "model_type": "both", "tie_word_embeddings": not tied}
    described = outer | {"text_config": text, "vision_config": {"hidden_size": 8}}
    held = {name.replace("model.", prefix, 1): array for name, array in state.items()}
    if "lm_head.weight" in held and prefix.startswith("language"):
        held["language_model.lm_head.weight"] = held.pop("lm_head.weight")
    for part in ("model.vision_tower.a", "model.vision_tower.b", "multi_modal_projector.c"):
        held[f"{part}.weight"] = np.ones((2, 3), np.float32)
    source, told = write_checkpoint(tmp_path / "hf", described, held), []
    (source / "chat_template.json").write_text('{"chat_template": "x"}')
    manifest = convert(source, tmp_path / "ours", tell=told.append)
    assert told == [
        "it is the text model alone: left out 3 tensors of vision_tower, multi_modal_projector"
    ]
    assert manifest.config == model_config(hf_config(family))
    assert manifest.extras["eos_token_id"] == [257]
    assert "chat_template.json" in manifest.tokenizer_files
    export(tmp_path / "ours", tmp_path / "back")
    assert_same_state(load_all(tmp_path / "back"), state)
    assert read_config(tmp_path / "back" / "config.json") == manifest.config


@pytest.mark.parametrize(
    ("inner", "outer", "renamed", "tied"),
    [
        ({}, {}, False, True),
        ({}, {"tie_word_embeddings": True}, False, True),
        ({}, {"tie_word_embeddings": False}, False, False),
        ({"tie_word_embeddings": False}, {"tie_word_embeddings": False}, False, False),
        ({}, {}, True, False),
    ],
)
def test_a_text_model_without_a_head_is_tied_unless_its_config_denies_it(
    tmp_path, inner, outer, renamed, tied
):
    state, text = random_state(LLAMA), {**LLAMA, "model_type": "llama"}
    del text["architectures"], text["tie_word_embeddings"]
    head = state.pop("lm_head.weight")
    held = {name.replace("model.", "language_model.model.", 1): state[name] for name in state}
    held |= {"model.lm_head.weight": head} if renamed else {}
    described = {"architectures": ["Any"], **outer, "text_config": text | inner}
    source = write_checkpoint(tmp_path / "hf", described, held)
    if tied:
        assert open_source(source).config.tie_embeddings
        return
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight .* is missing"):
        convert(source, tmp_path / "ours")


def test_a_text_model_that_is_not_implemented_is_refused_by_name(tmp_path):
    outer = {"architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4"}
    described = outer | {"text_config": {"model_type": "llama4_text"}}
    source = write_checkpoint(tmp_path / "hf", described, random_state(LLAMA))
    with pytest.raises(ConfigError, match="model_type 'llama4_text' is not implemented"):
        convert(source, tmp_path / "ours")
