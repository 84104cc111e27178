import functools
import itertools
import json
import shutil
import tracemalloc
from typing import Any

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

import jax_longctx
from checkpoints_convert import convert, export, files, importing
from checkpoints_convert.files import HashedFile, read_quantised
from checkpoints_convert.gguf import read_directory
from jax_longctx.errors import CheckpointError, ConfigError
from jax_longctx.files import read_sealed
from jax_longctx.models.params import param_infos
from jax_longctx.models.storage import load_params, read_manifest
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh
from pallas_kernels.quantised_matrix import QuantisedMatrix
from tests.checkpoints_convert.test_gguf import write_gguf
from tests.checkpoints_convert.test_interruption import interrupt
from tests.checkpoints_convert.test_names import assert_same_parameters, flat
from tests.checkpoints_convert.tiny import hf_config, random_state, write_checkpoint
from tests.jax_longctx.models.test_checkpoint import change, refused


def written(folder, family="llama", dtype="bfloat16", **changes):
    config = hf_config(family, **changes)
    return write_checkpoint(folder / "hf", config, random_state(config, dtype))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eight")
    source = written(folder)
    convert(source, folder / "floats", dtype="bfloat16")
    convert(source, folder / "int8", dtype="bfloat16", weights="int8")
    return folder


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama-tied-biased", "bfloat16"),
        ("qwen3", "source"),
        ("qwen3-moe", "bfloat16"),
        ("gpt-oss", "bfloat16"),
        pytest.param("llama-tied-biased", "float16", marks=pytest.mark.slow),
        pytest.param("qwen3", "float32", marks=pytest.mark.slow),
    ],
)
def test_stored_weights_are_those_made_at_loading(tmp_path, monkeypatch, family, dtype):
    # A tensor is read in several pieces.
    monkeypatch.setattr(files, "PIECE", 4 * 32 * 5)
    source = written(tmp_path, family, "float32")
    floats = convert(source, tmp_path / "floats", dtype=dtype)
    ours = tmp_path / "int8"
    manifest = convert(source, ours, dtype=dtype, weights="int8")
    assert (manifest.dtype, manifest.weights) == (floats.dtype, "int8")
    assert (floats.weights, read_manifest(ours)) == (None, manifest)
    # A matrix takes a byte a number, and what the manifest says is compared with what is stored.
    matrices = [path for path, info in param_infos(manifest.config).items() if info.in_8_bits]
    stored = {manifest.tensors[f"{path}.values"].dtype for path in matrices}
    assert matrices and stored == {"int8"} and not manifest.tensors.keys() & {*matrices}
    for mesh in (make_mesh(), make_mesh(1, 2, 2)):
        expected = load_params(tmp_path / "floats", RunSpec(mesh=mesh, weights="int8"))
        assert_same_parameters(load_params(ours, RunSpec(mesh=mesh)), expected, sharded=True)
        again = load_params(ours, RunSpec(mesh=mesh, weights="int8"))
        assert_same_parameters(again, expected, sharded=True)


def test_loads_without_a_flag_and_answers_the_same(whole):
    made = jax_longctx.load(whole / "floats", weights="int8")
    model = jax_longctx.load(whole / "int8")
    assert model.engine.setup.weights == made.engine.setup.weights == "int8"
    assert model.engine.setup.dtype == jnp.bfloat16
    # So a context that was saved by one is asked by the other.
    assert model.engine.fingerprint == made.engine.fingerprint
    said = [
        each.ask(each.prefill("Once upon a time"), "?", max_tokens=12, stop_at_eos=False)[0].tokens
        for each in (made, model)
    ]
    assert said[0] == said[1] and len(said[0]) == 12
    model = jax_longctx.load(whole / "int8", dtype="float32")
    query = dict(flat(load_params(whole / "int8")))["layers.0.attn.q"]
    wider = dict(flat(load_params(whole / "int8", RunSpec(dtype="float32"))))["layers.0.attn.q"]
    assert isinstance(query, QuantisedMatrix) and model.engine.setup.dtype == jnp.float32
    assert (query.dtype, wider.dtype) == (jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(query.values, wider.values)


def test_another_form_what_needs_floats_and_earlier_versions_are_refused(whole, tmp_path):
    """Earlier versions read a manifest of floats; one of 8 bits has a format of its own."""
    floats = json.loads((whole / "floats" / "manifest.json").read_text())
    assert floats["format"] == 2 and "weights" not in floats
    with pytest.raises(CheckpointError, match="format 3, expected 2: another version wrote it"):
        read_sealed(whole / "int8" / "manifest.json", 2, "")
    with pytest.raises(ConfigError, match=r"weights bfloat16: .* converted with weights int8"):
        jax_longctx.load(whole / "int8", weights="bfloat16")
    with pytest.raises(ConfigError, match="holds its matrices in int8"):
        export(whole / "int8", tmp_path / "back")
    assert not any(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="unknown weights 'bfloat16'; known: int8"):
        convert(whole / "hf", tmp_path / "ours", weights="bfloat16")


@pytest.mark.slow
def test_an_interrupted_conversion_goes_on(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(importing, "GROUP", 1)
    how: Any = {"dtype": "bfloat16", "weights": "int8"}
    interrupt(whole / "hf", tmp_path / "ours", **how)
    with pytest.raises(CheckpointError, match="begun with another weights"):
        convert(whole / "hf", tmp_path / "ours", dtype="bfloat16")
    shares = []
    how["progress"] = lambda done, total: shares.append(done / total)
    convert(whole / "hf", tmp_path / "ours", **how)
    assert shares[0] > 0.5 and shares[-1] == 1
    expected = load_params(whole / "int8")
    assert_same_parameters(load_params(tmp_path / "ours"), expected)


def test_a_damaged_checkpoint_is_refused(whole, tmp_path):
    changed = functools.partial(change, version=3)
    copy = shutil.copytree(whole / "int8", tmp_path / "ours")
    tensors = read_sealed(copy / "manifest.json", 3, "")["tensors"]
    kept = {path: entry for path, entry in tensors.items() if path != "layers.1.mlp.up.scales"}
    changed(copy, tensors=kept)
    refused(copy, "parameter layers.1.mlp.up.scales is missing")
    changed(copy, tensors=tensors, weights="fp8")
    refused(copy, "holds its matrices in fp8", "convert the source again with --weights int8")
    changed(copy, weights="int3")
    refused(copy, "manifest.json is damaged", "int3")


def test_blocks_are_rounded_once(tmp_path):
    """Q8_0: each number is the nearest one to the block's own, which bfloat16 would not hold."""
    config = hf_config("llama", hidden_size=64, intermediate_size=96)
    state = random_state(config)
    path = write_gguf(tmp_path / "m.gguf", config, state, kind=Kind.Q8_0)
    convert(path, tmp_path / "ours", dtype="bfloat16", weights="int8")
    convert(path, tmp_path / "detour", dtype="bfloat16")
    found = dict(flat(load_params(tmp_path / "ours")))
    detour = dict(flat(load_params(tmp_path / "detour", RunSpec(weights="int8"))))
    farther = 0
    for layer, name in itertools.product(range(2), ("gate", "up", "down")):
        blocks = gguf.quants.quantize(
            state[f"model.layers.{layer}.mlp.{name}_proj.weight"], Kind.Q8_0
        )
        exact = gguf.quants.dequantize(blocks, Kind.Q8_0).astype(np.float64)
        w, other = (tree[f"layers.{layer}.mlp.{name}"] for tree in (found, detour))
        step = np.asarray(w.scales, np.float64).T
        np.testing.assert_allclose(step[:, 0], np.abs(exact).max(1) / 127, rtol=2e-7)
        error = np.abs(np.asarray(w.values, np.float64).T * step - exact)
        best = np.abs(np.round(exact / step) * step - exact)
        assert (error <= best + 1e-5 * step).all()
        farther += (np.asarray(other.values) != np.asarray(w.values)).sum()
    # The detour through bfloat16 is another rounding.
    assert farther > 0


def test_no_matrix_of_floats_is_made(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "PIECE", 1 << 18)
    # The bytes before the tensor are read to be hashed.
    monkeypatch.setattr(files, "STEP", 1 << 18)
    config = hf_config("llama", hidden_size=2048, intermediate_size=4096, num_hidden_layers=1)
    up = np.random.default_rng(0).standard_normal((4096, 2048), np.float32)
    state = {"model.norm.weight": up[0], "model.layers.0.mlp.up_proj.weight": up}
    path = write_gguf(tmp_path / "m.gguf", config, state, kind=Kind.Q8_0)
    tensor = next(x for x in read_directory(path)[1] if x.name == "blk.0.ffn_up.weight")
    file = HashedFile(path)
    tracemalloc.start()
    values, scales = read_quantised(file, tensor, np.dtype(jnp.bfloat16))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    file.close()
    assert (values.shape, scales.shape) == ((4096, 2048), (4096, 1))
    # The numbers, and some pieces of floats; all in bfloat16 would be twice the numbers.
    assert peak < values.nbytes + scales.nbytes + 10 * files.PIECE < 1.4 * values.nbytes
