import json
import shutil
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from flax import traverse_util
from orbax.checkpoint import v1 as ocp

from jax_longctx.errors import CheckpointError, ConfigError, DamagedError
from jax_longctx.files import read_sealed, seal
from jax_longctx.models import storage
from jax_longctx.models.params import init_params, param_infos, quantised_weights
from jax_longctx.models.storage import (
    Manifest,
    TensorEntry,
    array_digests,
    describe_files,
    join_arrays,
    load_params,
    read_manifest,
    save_arrays,
    tokenizer_folder,
)
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh
from tests.chunks import chunks_in, wrong_chunks
from tests.support import tiny_config


def written(folder, seed):
    config = tiny_config()
    params, infos = init_params(config, seed=seed), param_infos(config)
    save_arrays(folder / "params", traverse_util.flatten_dict(params, sep="."))
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    files, digests = join_arrays(folder / "params")
    manifest = Manifest(
        config=config,
        dtype="float32",
        tensors={
            path: TensorEntry(it.shape, "float32", digests[path]) for path, it in infos.items()
        },
        source="nowhere",
        sources={"model.safetensors": "00ff"},
        files=files,
        tokenizer_files=describe_files(folder / "tokenizer"),
        extras={"eos_token_id": 2},
    )
    (folder / "manifest.json").write_text(manifest.to_json())
    return folder, manifest, params


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return written(tmp_path_factory.mktemp("checkpoint"), 3)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return written(tmp_path_factory.mktemp("other"), 4)[0]


@pytest.fixture
def copy(tmp_path, whole):
    shutil.copytree(whole[0], tmp_path / "copy")
    return tmp_path / "copy"


def change(folder, *, version=2, **fields):
    """Another manifest, with a digest of its own."""
    path = folder / "manifest.json"
    path.write_text(json.dumps(seal(version, read_sealed(path, version, "") | fields)))


def refused(folder, *words, mesh=None, kind=CheckpointError):
    with pytest.raises(kind) as caught:
        load_params(folder, RunSpec(mesh=mesh))
    for word in words:
        assert str(word) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [{}, {"data": 2, "seq": 2, "tensor": 2}])
def test_parameters_are_restored_onto_the_mesh(whole, shape):
    folder, _, params = whole
    mesh = make_mesh(**shape)
    loaded = load_params(folder, RunSpec(mesh=mesh))
    assert jax.tree.structure(loaded) == jax.tree.structure(params)
    for ours, theirs in zip(jax.tree.leaves(loaded), jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.sharding.mesh == mesh
    up = loaded["layers"]["1"]["mlp"]["up"]
    width = 48 // (shape.get("tensor", 1) * shape.get("seq", 1))
    assert {shard.data.shape for shard in up.addressable_shards} == {(32, width)}


def test_type_is_the_manifests_unless_asked_for(copy, whole):
    q = whole[2]["layers"]["0"]["attn"]["q"]
    half = load_params(copy, RunSpec(dtype="bfloat16"))["layers"]["0"]["attn"]["q"]
    np.testing.assert_array_equal(half, q.astype(jnp.bfloat16))
    change(copy, dtype="float16")
    assert load_params(copy)["layers"]["0"]["attn"]["q"].dtype == jnp.float16


def test_a_manifest_is_read_as_written_and_what_is_none_or_does_not_fit_refused(tmp_path, whole):
    assert read_manifest(whole[0]) == read_manifest(str(whole[0])) == whole[1]
    refused(tmp_path, tmp_path, "not a converted checkpoint", "jax-longctx convert")
    refused(tmp_path / "nowhere", "not a converted checkpoint")
    refused(whole[0], "kv_heads=2", mesh=make_mesh(tensor=4), kind=ConfigError)


def replaced(text):
    return lambda folder: (folder / "manifest.json").write_text(text, encoding="latin-1")


def said(**fields):
    return lambda folder: change(folder, **fields)


def edited(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace("10000.0", "30000.0"))


def unreadable(folder):
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").mkdir()


def overwritten(name):
    def spoil(folder):
        path = folder / "params" / "state" / name
        path.write_bytes(b"\x5a" * path.stat().st_size)

    return spoil


def tensors_of(config):
    infos = param_infos(config).items()
    return {path: {"shape": list(info.shape), "dtype": "float32"} for path, info in infos}


def of(config):
    return said(config=config.to_dict(), tensors=tensors_of(config))


AGAIN = "convert the source again"
TENSORS = tensors_of(tiny_config())
WIDER, DEEPER = tiny_config(mlp_dim=64), tiny_config(num_layers=3)
NARROW = {"layers.0.mlp.up": {"shape": [32, 47], "dtype": "float32"}}
TEXTS = ("", "{", "[]", '{"format": 2}', json.dumps(seal(2, {"x": 2})), "[" * 200_000, "\xff")
DAMAGE = [
    *((replaced(text), ("manifest.json", "damaged", AGAIN)) for text in TEXTS),
    *((said(format=it), (f"format {it}, expected 2", AGAIN)) for it in (1, 9, None, [1])),
    (edited, ("manifest.json", "damaged", "sha256 does not match")),
    (unreadable, ("manifest.json", "cannot be read")),
    (overwritten("manifest.ocdbt"), ("manifest.ocdbt", "damaged", AGAIN)),
    # The manifest contradicts its config.
    (said(tensors=TENSORS | NARROW), ("layers.0.mlp.up has shape [32, 47]", "[32, 48]")),
    (
        said(tensors={path: it for path, it in TENSORS.items() if path != "head.table"}),
        (f"head.table is missing; {AGAIN}",),
    ),
    (said(tensors=TENSORS | {"extra": TENSORS["head.table"]}), (f"extra is unknown; {AGAIN}",)),
    # The two agree, and the stored arrays are others.
    (of(WIDER), ("layers.0.mlp.down is stored with shape (48, 32), expected (64, 32)",)),
    (of(DEEPER), ("damaged", "layers.2.", "does not exist")),
]


@pytest.mark.parametrize(("spoil", "words"), DAMAGE, ids=[words[0] for _, words in DAMAGE])
def test_a_damaged_checkpoint_is_refused(copy, spoil, words, capfd):
    spoil(copy)
    refused(copy, copy, *words)
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.slow
def test_every_file_that_is_missing_cut_or_changed_is_named(copy, whole):
    for name, (size, digest) in whole[1].files.items():
        path = copy / "params" / name
        content = path.read_bytes()
        path.unlink()
        refused(copy, path, "No such file")
        if size:
            path.write_bytes(content[:-1])
            refused(copy, path, f"{size - 1} bytes, expected {size}")
        if size and digest is not None:
            path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
            refused(copy, path, "damaged", "SHA-256")
        path.write_bytes(content)
    load_params(copy)
    path = copy / "tokenizer" / "tokenizer.json"
    path.write_text("[]")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is damaged: its SHA-256"):
        tokenizer_folder(copy, whole[1])


@pytest.mark.parametrize("shape", [{}, {"data": 2, "seq": 2, "tensor": 2}])
def test_a_flipped_bit_of_an_array_is_refused(copy, whole, shape, capfd):
    _, manifest, params = whole
    names = [name for name, (_, digest) in manifest.files.items() if digest is None]
    contents = {copy / "params" / name: (copy / "params" / name).read_bytes() for name in names}
    mesh, rng, flipped = make_mesh(**shape), np.random.default_rng(0), 0
    for leaf in jax.tree.leaves(params):
        if leaf.ndim == 1:  # ones, stored more than once
            continue
        stored = np.asarray(leaf).tobytes()
        (path,) = (path for path, content in contents.items() if stored in content)
        broken = bytearray(contents[path])
        broken[broken.index(stored) + rng.integers(len(stored))] ^= 1 << rng.integers(8)
        path.write_bytes(broken)
        refused(copy, copy / "params", "damaged", "convert the source again", mesh=mesh)
        path.write_bytes(contents[path])
        flipped += 1
    assert flipped == 16
    load_params(copy, RunSpec(mesh=mesh))
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize("name", ["chunk_grid", "configuration", "chunk_shape", "codecs"])
def test_a_changed_name_in_the_description_of_an_array_is_refused(copy, name):
    """It is valid JSON as before."""
    files = [path for path in (copy / "params").rglob("*") if path.is_file()]
    path = next(path for path in files if f'"{name}"'.encode() in path.read_bytes())
    path.write_bytes(path.read_bytes().replace(f'"{name}"'.encode(), f'"{name[1:]}s"'.encode()))
    refused(copy, copy / "params", "damaged", AGAIN)


def test_chunks_and_files_of_another_array_or_checkpoint_are_refused(copy, other, capfd):
    state, theirs = copy / "params" / "state", other / "params" / "state"
    for _ in wrong_chunks(state, theirs):
        refused(copy, copy / "params", "has other chunks than", AGAIN)
    # Whole files, also with the index that names them.
    for path in {path for path, *_ in chunks_in(state).values()}:
        shutil.copy(next((theirs / path.parent.relative_to(state)).iterdir()), path)
    refused(copy, copy / "params", "damaged", AGAIN)
    shutil.copytree(other / "params", copy / "params", dirs_exist_ok=True)
    refused(copy, copy / "params", "damaged", AGAIN)
    assert "Traceback" not in capfd.readouterr().err


def test_digests_of_an_index_of_several_levels_and_of_chunks_in_parts(tmp_path):
    """Both are only written when asked, or for tens of thousands of arrays."""
    parts = [{"name": "sharding_indexed", "configuration": {"chunk_shape": [4]}}]
    metadata = {"chunk_grid": {"configuration": {"chunk_shape": [8]}}, "codecs": parts}
    config = {"max_decoded_node_bytes": 600, "max_inline_value_bytes": 16}

    def digests(name, first):
        base = {"driver": "file", "path": f"{tmp_path}/{name}/"}
        store = ts.KvStore.open({"driver": "ocdbt", "base": base, "config": config}).result()
        for number in range(8):
            store[f"a.{number}/zarr.json"] = json.dumps(metadata)
            # It differs in the first part of its chunk.
            store[f"a.{number}/c/0"] = bytes([first if number == 7 else 1]) + bytes(99)
        return array_digests(tmp_path / name)

    one, another = digests("one", 1), digests("another", 2)
    assert len(one) == 8 and one == digests("again", 1)
    assert [path for path in one if one[path] != another[path]] == ["a.7"]


def test_a_checkpoint_without_digests_of_arrays_loads(copy, whole):
    change(copy, tensors=TENSORS)
    jax.tree.map(np.testing.assert_array_equal, load_params(copy), whole[2])


DENIED = ValueError("PERMISSION_DENIED: Failed to open: x [os_error_code='13'] [spec]")
STALE = ValueError("DATA_LOSS: Error reading [os_error_code='116']")


@pytest.mark.parametrize(
    ("owner", "name", "error", "said"),
    [
        (ts, "open", DENIED, "Permission denied"),
        (ts, "open", STALE, "Stale file handle"),
        (ts.ocdbt, "dump", ValueError("RESOURCE_EXHAUSTED: x"), "RESOURCE_EXHAUSTED: x"),
        (storage, "sha256_of", OSError(24, "Too many open files"), "Too many open files"),
    ],
)
def test_what_cannot_be_read_is_not_called_damaged(copy, monkeypatch, owner, name, error, said):
    """No digest says anything of bytes that were not read, so nothing is to be made again."""
    monkeypatch.setattr(owner, name, Mock(side_effect=error))
    with pytest.raises(CheckpointError, match=f"params.* cannot be read: .*{said}") as caught:
        load_params(copy)
    assert not isinstance(caught.value, DamagedError) and AGAIN not in str(caught.value)


def test_arrays_without_checksums_or_a_chunk_are_refused(tmp_path, monkeypatch):
    """Orbax writes no checksums unless it is told."""
    monkeypatch.setattr(storage, "CHECKSUM", {"name": "zstd"})
    save_arrays(tmp_path, {"a": jnp.ones(3)})
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="is damaged: a has no checksums; do"):
        storage.load_arrays(tmp_path, wanted_of(a=jnp.ones(3)), "do")
    save_arrays(tmp_path, {"a": jnp.ones(3)})
    base = {"driver": "file", "path": f"{tmp_path}/state/"}
    del ts.KvStore.open({"driver": "ocdbt", "base": base}).result()["a/c/0"]
    with pytest.raises(DamagedError, match="is damaged"):
        storage.load_arrays(tmp_path, wanted_of(a=jnp.ones(3)), "do")


def wanted_of(**arrays):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for name, x in arrays.items()
    }


@pytest.mark.filterwarnings("ignore:.*mesh.*:UserWarning")
def test_orbax_loads_what_is_written(whole):
    folder, _, params = whole
    loaded = ocp.load(folder.absolute() / "params")
    jax.tree.map(np.testing.assert_array_equal, loaded, params)


def test_what_several_processes_write_is_joined_and_written_again_where_it_is_there(
    tmp_path, monkeypatch
):
    """As earlier versions wrote it in one process too."""
    arrays = {"a": jnp.arange(300.0), "b": np.zeros((2, 70), np.int8), "c": jnp.int32(7)}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    for process, names in enumerate(("a", "bc")):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        for write in storage.begin_arrays(tmp_path, {name: arrays[name] for name in names}):
            write.commit.result()
    monkeypatch.undo()
    assert {*join_arrays(tmp_path)[1]} == {"a", "b", "c"}
    jax.tree.map(np.testing.assert_array_equal, ocp.load(tmp_path), arrays)
    for changed in ({}, {"b": np.ones((3, 50), np.int8)}):
        save_arrays(tmp_path, changed, compress=True)
        arrays |= changed
        found = storage.load_arrays(tmp_path, wanted_of(**arrays), "do")
        jax.tree.map(np.testing.assert_array_equal, found, arrays)


@pytest.mark.parametrize("piece", [1, 1 << 30])
def test_weights_load_in_8_bits(whole, monkeypatch, piece):
    """In pieces, so that of the matrices in their own dtype only some are there at a time."""
    folder, manifest, _ = whole
    mesh, made = make_mesh(1, 1, 2), []
    load = storage.load_arrays
    monkeypatch.setattr(storage, "PIECE", piece)
    monkeypatch.setattr(
        storage, "load_arrays", lambda *args: made.append(load(*args)) or dict(made[-1])
    )
    found = load_params(folder, RunSpec(mesh=mesh, dtype="bfloat16", weights="int8"))
    assert len(made) == (1 if piece > 1 else len(manifest.tensors))
    floats = load_params(folder, RunSpec(mesh=mesh, dtype="bfloat16"))
    expected = quantised_weights(manifest.config, mesh, floats)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    query = found["layers"]["0"]["attn"]["q"]
    assert (query.values.dtype, query.dtype) == (jnp.int8, jnp.bfloat16)
    assert found["embed"]["table"].dtype == jnp.bfloat16
