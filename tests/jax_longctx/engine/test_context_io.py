import dataclasses
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from jax_longctx.engine.context_io import Saving, load_context, method_of, save_context
from jax_longctx.errors import CheckpointError, ConfigError, InputError
from jax_longctx.files import read_sealed, seal
from jax_longctx.locks import only_writer
from jax_longctx.methods import DynamicNTK, make_method, settings_of
from jax_longctx.models import storage
from jax_longctx.sharding import make_mesh
from tests.chunks import wrong_chunks
from tests.support import engine_over, random_rows, tiny_config, tiny_engine

QUESTIONS = random_rows([4, 2], seed=5)


def answer(engine, context):
    return list(engine.stream(context, QUESTIONS[: context.batch], max_tokens=6))


def change(folder, **fields):
    """Another manifest, with a digest of its own."""
    path = folder / "context.json"
    path.write_text(json.dumps(seal(3, read_sealed(path, 3, "") | fields)))


@pytest.fixture(scope="module")
def engine():
    return tiny_engine(chunk=16)


@pytest.fixture(scope="module")
def written(engine, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "context"
    # Slots for a loader that has two shards of them.
    save_context(engine, engine.prefill(random_rows([45, 9]), reserve=16, capacity=256), folder)
    return folder


@pytest.fixture
def saved(written, tmp_path):
    return Path(shutil.copytree(written, tmp_path / "context"))


@pytest.fixture
def pool():
    with ThreadPoolExecutor(1) as made:
        yield made


@pytest.mark.parametrize(
    ("by_layer", "sizes"),
    [
        (True, (1, 1, 1)),
        *(pytest.param(False, sizes, marks=pytest.mark.slow) for sizes in ((1, 1, 1), (2, 2, 2))),
    ],
    ids=str,
)
def test_a_context_is_saved_beside_questions(tmp_path, pool, by_layer, sizes):
    engine = tiny_engine(chunk=64, by_layer=by_layer, mesh=make_mesh(*sizes))
    # Beyond the first stripe of each shard.
    context = engine.prefill(random_rows([300, 9]), reserve=16, capacity=512)
    expected = answer(engine, context)
    saving = Saving(engine, context, tmp_path / "context", pool)
    for _ in range(3):
        saving.go_on()
        assert answer(engine, context) == expected
    assert saving.go_on(wait=True)
    loaded = load_context(engine, tmp_path / "context")
    assert answer(engine, loaded) == expected and loaded.lengths == [300, 9]
    alone = tiny_engine(chunk=64)
    assert answer(alone, load_context(alone, tmp_path / "context")) == expected


def test_a_save_that_fails_leaves_nothing_behind(engine, tmp_path, pool, monkeypatch):
    context = engine.prefill(random_rows([45, 9]), reserve=4)
    (tmp_path / "taken").mkdir()
    with pytest.raises(InputError, match="exists; choose another"):
        Saving(engine, context, tmp_path / "taken", pool).go_on(wait=True)

    def full(*given):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    with monkeypatch.context() as patched:
        patched.setattr("jax_longctx.engine.context_io.copied_layer", full)
        with pytest.raises(CheckpointError, match="no room for a copy of a layer"):
            Saving(engine, context, tmp_path / "context", pool).go_on()
    saving = Saving(engine, context, tmp_path / "context", pool)
    engine.ensure_reserve(context, 200)
    with pytest.raises(InputError, match="the context grew from 256 to 384 slots"):
        saving.go_on()
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    # The thread is free for the next.
    assert Saving(engine, context, tmp_path / "context", pool).go_on(wait=True)


def test_asking_growing_and_padding_do_not_change_what_is_saved(engine, tmp_path):
    context = engine.prefill(random_rows([45, 9]), reserve=4)
    first = answer(engine, context)
    list(engine.stream(context, QUESTIONS, max_tokens=150))
    save_context(engine, context, tmp_path / "grown")
    assert answer(engine, load_context(engine, tmp_path / "grown")) == first
    wide = tiny_engine(chunk=16, mesh=make_mesh(2, 2, 2))
    for saver, loader in [(wide, engine), (engine, wide)]:
        context = saver.prefill(random_rows([45]), reserve=16, capacity=256)
        expected = answer(saver, context)
        folder = tmp_path / str(saver is wide)
        save_context(saver, context, folder)
        assert answer(loader, load_context(loader, folder)) == expected


def test_what_cannot_be_saved_now_is_refused(engine, tmp_path):
    context, folder = engine.prefill(random_rows([45, 9]), reserve=16), tmp_path / "context"
    with only_writer(folder):
        with pytest.raises(CheckpointError, match=r"another process is writing .*; wait for it"):
            save_context(engine, context, folder)
    stream = engine.stream(context, QUESTIONS, max_tokens=6)
    next(stream)
    with pytest.raises(InputError, match="answering another question"):
        save_context(engine, context, folder)
    stream.close()
    assert not folder.exists()
    save_context(engine, context, folder)
    with pytest.raises(InputError, match="exists"):
        save_context(engine, context, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["context"]
    assert answer(engine, load_context(engine, folder)) == answer(engine, context)


def test_another_engine_is_refused(saved):
    for named, other in [
        ("method", {"method": DynamicNTK(factor=2.0)}),
        ("model", {"config": tiny_config(mlp_dim=64)}),
        ("weights", {"seed": 7}),
    ]:
        with pytest.raises(CheckpointError, match=f"was made with {named}"):
            load_context(tiny_engine(chunk=16, **other), saved)
    params = tiny_engine(chunk=16).params
    scale = params["final_norm"]["scale"].at[-1].add(1.0)
    near = engine_over(tiny_config(), {**params, "final_norm": {"scale": scale}})
    with pytest.raises(CheckpointError, match="was made with all_weights '"):
        load_context(near, saved)
    # Slots divide over two shards, but not in the runs of 128 that pages divide.
    change(saved, slots=384)
    said = "384 slots, which do not divide over 2 shards in runs of 128; .* seq divides 3,"
    with pytest.raises(CheckpointError, match=said):
        load_context(tiny_engine(chunk=16, mesh=make_mesh(seq=2)), saved)


def test_what_an_unreleased_version_compressed_is_refused(engine, saved, tmp_path):
    """It dealt the slots of what stays over a mesh as if they were all of the context's."""
    # What no tokens left is read without shapes.
    change(saved, shapes=None)
    assert answer(engine, load_context(engine, saved))
    keydiff, folder = tiny_engine(make_method("keydiff:budget=24"), chunk=16), tmp_path / "kept"
    save_context(keydiff, keydiff.prefill(random_rows([300]), reserve=16), folder)
    assert answer(keydiff, load_context(keydiff, folder))
    change(folder, shapes=None)
    refused(keydiff, folder, "written by an unreleased version", "under keydiff", "prefill again")


def refused(engine, folder, *words):
    with pytest.raises(CheckpointError) as caught:
        load_context(engine, folder)
    for word in [folder, *words]:
        assert str(word) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damage_is_named(engine, saved):
    refused(engine, saved / "nothing", "is not a saved context")
    manifest = saved / "context.json"
    text = manifest.read_text()
    for damaged in (
        "{",
        "[]",
        text[:-9],
        text.replace('"slots": 256', '"slots": 384'),
        "[" * 2**18,
    ):
        manifest.write_text(damaged)
        refused(engine, saved, "context.json is damaged", "prefill again")
    manifest.write_text(text.replace('"format": 3', '"format": 1'))
    refused(engine, saved, "context.json has format 1, expected 3", "prefill again")
    manifest.write_text(text)
    shutil.rmtree(saved / "caches")
    refused(engine, saved, saved / "caches", "cannot be read: No such file", "prefill again")


def test_a_flipped_bit_or_a_missing_end_of_the_arrays_is_refused(engine, saved, capfd):
    files = [path for path in (saved / "caches").rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 1
    largest.write_bytes(content)
    refused(engine, saved, "caches is damaged", "prefill again")
    largest.write_bytes(content[:middle])
    refused(engine, saved, f"{largest} is damaged: {middle} bytes, expected {len(content)}")
    assert "Traceback" not in capfd.readouterr().err


def test_chunks_of_another_array_or_context_are_refused(engine, tmp_path, monkeypatch):
    """Without compression chunks of one shape are of one size."""
    saved, other = tmp_path / "saved", tmp_path / "other"
    monkeypatch.setattr(storage, "SMALLER", ())
    for seed, folder in enumerate((saved, other)):
        context = engine.prefill(random_rows([45, 9], seed=seed), reserve=16)
        save_context(engine, context, folder)
    for _ in wrong_chunks(saved / "caches/state", other / "caches/state"):
        refused(engine, saved, "caches is damaged", "has other chunks than", "prefill again")
    shutil.copytree(other / "caches", saved / "caches", dirs_exist_ok=True)
    refused(engine, saved, "caches", "damaged", "prefill again")


def test_a_context_of_an_earlier_version_answers_the_same(engine, saved):
    """It had no digests of arrays or of all weights, and knew fewer fields of a model."""
    expected, path = answer(engine, load_context(engine, saved)), saved / "context.json"
    fields = read_sealed(path, 3, "")
    del fields["arrays"], fields["made_by"]["all_weights"]
    del fields["made_by"]["model"]["sinks"], fields["made_by"]["model"]["rope"]["share"]
    del fields["made_by"]["model"]["rope"]["query_growth"]
    path.write_text(json.dumps(seal(2, fields)))
    assert answer(engine, load_context(engine, saved)) == expected


def test_a_setting_that_is_gone_may_be_saved_as_the_method_is_now(tmp_path):
    engine, saved = tiny_engine(make_method("ring"), chunk=16), tmp_path / "context"
    save_context(engine, engine.prefill(random_rows([45, 9]), reserve=16), saved)
    made_by = read_sealed(saved / "context.json", 3, "")["made_by"]
    expected = answer(engine, load_context(engine, saved))
    for hops, loads in ((-1, True), (1, False)):
        made_by["method"]["settings"]["hops"] = hops
        change(saved, made_by=made_by)
        if loads:
            assert method_of(saved) == engine.method
            assert answer(engine, load_context(engine, saved)) == expected
        else:
            with pytest.raises(ConfigError, match=r"ring: setting hops is gone.*has hops=1"):
                method_of(saved)
            refused(engine, saved, "method.settings.hops 1, now it is None")


def test_a_saved_method_does_not_depend_on_defaults(saved):
    """FreePages had pages of 16 tokens by default, which its contexts of that time say."""
    earlier = make_method("free-pages", {"page_size": 16})
    described = settings_of(make_method("free-pages"))
    assert described["settings"].keys() == dataclasses.asdict(earlier).keys()
    described["settings"]["page_size"] = 16
    made_by = read_sealed(saved / "context.json", 3, "")["made_by"]
    change(saved, made_by=made_by | {"method": described})
    assert method_of(saved) == earlier


def test_what_no_engine_writes_is_refused(engine, saved):
    """A manifest with a right digest, as a program that writes others would leave it."""
    text = (saved / "context.json").read_text()
    for fields, named in [
        ({"slots": 10**13}, "slots 10000000000000 is not"),
        ({"slots": 2**31 - 128}, "is stored with shape"),
        ({"slots": 384}, "is stored with shape"),
        ({"slots": None}, "slots None is not"),
        ({"batch": 3}, "batch 3 is not"),
        ({"reserve": -1}, "reserve -1 is not"),
        ({"total": [0]}, "total [0] is not"),
        ({"total": [0, 0]}, "a row of 45 tokens in a total of 0"),
        ({"rows": [[64], [1]]}, "rows [[64], [1]] is not"),
        ({"rows": [[True], [1]]}, "rows [[True], [1]] is not"),
        ({"questions": [[1]]}, "questions [[1]] is not"),
        ({"made_by": []}, "made_by [] is not"),
        ({"files": {"a": 1}}, "files {'a': 1} is not"),
        ({"arrays": []}, "arrays [] is not"),
        ({"shapes": [2]}, "shapes [2] is not"),
        ({"more": 1}, "it holds"),
    ]:
        change(saved, **fields)
        refused(engine, saved, named, "prefill again")
        (saved / "context.json").write_text(text)
