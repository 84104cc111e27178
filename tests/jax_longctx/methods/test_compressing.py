"""What stays of a text that is compressed before the question is known."""

import json
from pathlib import Path

import numpy as np
import pytest

from jax_longctx.api import LongContext
from jax_longctx.engine.places import Whole
from jax_longctx.engine.runs import per_layer
from jax_longctx.errors import CapacityError, ConfigError, InputError
from jax_longctx.methods import METHODS, make_method, settings_of
from jax_longctx.methods.full import Full
from jax_longctx.parts.compressing import Compressing
from jax_longctx.parts.tables import shape_of, write_numbers
from jax_longctx.sharding import make_mesh
from tests.goldens.cases import KVPRESS
from tests.goldens.weights import hf_shapes, random_state
from tests.jax_longctx.methods.harness import prefill, under
from tests.small_methods import small_method
from tests.support import engine_from_hf, random_rows, tiny_engine, word_tokenizer

GOLDENS = np.load(Path(__file__).parents[2] / "goldens" / "data" / "kvpress.npz")
# As the goldens are made.
SEED, OWN = 1, {"lagkv": {"lag": 16}, "kvzip": {"chunk": 64}}
OWN |= {name: {"sink": 0} for name in ("knorm", "keydiff", "q-filters")}
NAMES = [name for name in METHODS if issubclass(METHODS[name], Compressing)]
LENGTHS = [61, 1, 30, 45]


def stores(engine, rows):
    return [cache.store for cache in per_layer(prefill(engine, rows).usable_caches())]


def keys_of(store):
    return np.asarray(store.k), np.asarray(store.length)


def kept(engine, whole, rows):
    """Positions that stay, by layer, row and kv head, ascending as they lie in the cache."""
    found = []
    for store, every in zip(stores(engine, rows), whole, strict=True):
        np.testing.assert_array_equal(store.position, [len(row) for row in rows])
        (keys, counts), (all_keys, lengths) = keys_of(store), keys_of(every)
        found.append([])
        for b, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            # A program that keeps queries too may round a key otherwise.
            apart = np.abs(keys[b, :, :count, None] - all_keys[b, :, None, :length])
            same = apart.max(-1) < 1e-5
            assert (same.sum(-1) == 1).all()
            found[-1].append(np.argmax(same, axis=-1).tolist())
    return found


def kept_unevenly(engine, whole, rows):
    """`kept` where heads keep numbers of their own, in pages."""
    found = []
    for cache, every in zip(per_layer(prefill(engine, rows).usable_caches()), whole, strict=True):
        all_keys, lengths = keys_of(every)
        keys, head, count = (np.asarray(x) for x in (cache.k, cache.head, cache.count))
        found.append([[[] for _ in all_keys[0]] for _ in rows])
        for b, p in np.argwhere(count):
            mine = all_keys[b, head[b, p], : lengths[b]]
            same = (keys[b, p, : count[b, p], None] == mine).all(-1)
            assert (same.sum(-1) == 1).all()
            found[-1][b][head[b, p]] += np.argmax(same, axis=-1).tolist()
    return found


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    """The goldens' model and text, every key of it, and how its methods are made."""
    engine = engine_from_hf(
        KVPRESS, random_state(hf_shapes(KVPRESS), SEED), Full(), chunk=64, by_layer=True
    )
    engine.asks, rows = json.loads(str(GOLDENS["asks"])), [GOLDENS["tokens"].tolist()]
    file = tmp_path_factory.mktemp("filters") / "filters.tsv"
    write_numbers(GOLDENS["filters"].reshape(2, -1), file)

    def made(name, **settings):
        own = {"filters": str(file)} if name == "q-filters" else {}
        return make_method(name, settings | own | OWN.get(name, {}))

    return engine, stores(engine, rows), rows, made


@pytest.mark.parametrize("case", [case for case in GOLDENS if case.count(".") == 1])
def test_the_positions_that_stay_are_kvpress_s_in_every_layer_and_head(golden, case):
    engine, whole, rows, made = golden
    name, _, budget = case.partition(".")
    layers = kept(under(engine, made(name, budget=budget)), whole, rows)
    assert [layer[0] for layer in layers] == GOLDENS[case].tolist()


@pytest.mark.parametrize("case", [case for case in GOLDENS if case.count(".") == 2])
def test_what_heads_keep_of_a_budget_that_they_share_is_kvpress_s(golden, case):
    engine, whole, rows, made = golden
    name, way, budget = case.split(".")
    method = made(name, budget=budget, over_heads=way)
    layers = kept_unevenly(under(engine, method), whole, rows)
    expected = [[np.flatnonzero(head).tolist() for head in layer] for layer in GOLDENS[case]]
    assert [layer[0] for layer in layers] == expected


@pytest.fixture(scope="module")
def ragged():
    """A tiny model's engines on one device and on a mesh, rows, and every key of these."""
    engines = [tiny_engine(Full(), mesh=make_mesh(*n), chunk=16) for n in ((1, 1, 1), (2, 2, 2))]
    # Of equal tokens the keys of the first layer have norms that differ by rounding alone.
    order = np.random.default_rng(0).permutation(64)
    rows = [np.roll(order, length)[:length].tolist() for length in LENGTHS]
    return engines, rows, [stores(engine, rows) for engine in engines]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.quick("knorm", "kvzip", "q-filters", "r-kv")
def test_a_mesh_keeps_the_same_of_each_row_with_its_first_and_last_tokens(ragged, name):
    engines, rows, whole = ragged
    method = small_method(name)
    one, mesh = (
        kept(under(engine, method), every, rows)
        for engine, every in zip(engines, whole, strict=True)
    )
    assert one == mesh
    for layer in one:
        for length, heads in zip(LENGTHS, layer, strict=True):
            fixed = {
                *range(min(method.sink, length)),
                *range(max(length - method.local, 0), length),
            }
            for head in heads:
                assert len(head) == min(length, method.budget) and fixed <= set(head)
    # No head of a layer keeps what another one does.
    assert len({tuple(layer[0][head]) for layer in one for head in range(2)}) == 4


def test_filters_are_each_layer_s_own_and_of_this_model(ragged, tmp_path):
    _, rows, (whole, _) = ragged
    file, table = tmp_path / "of#1.tsv", np.random.default_rng(0).standard_normal((2, 16))

    def keeps(*lines, by_layer=False):
        write_numbers(table[[*lines]], file)
        method = make_method("q-filters", {"filters": str(file), "budget": 24})
        return kept(tiny_engine(method, chunk=16, by_layer=by_layer), whole, rows)

    # In a loop over layers too.
    looped = keeps(0, 1)
    assert looped == keeps(0, 1, by_layer=True)
    assert looped[0] == keeps(0)[0] and looped[1] != keeps(0)[1]
    with pytest.raises(ConfigError, match="write a file of them with jax-longctx calibrate"):
        tiny_engine(make_method("q-filters"))
    with pytest.raises(ConfigError, match="filters: none cannot be read: No such file"):
        make_method("q-filters", {"filters": "none"})
    with pytest.raises(ConfigError, match="not fit this model of 2 layers with 2 kv heads of 8 n"):
        keeps(0, 1, 0)
    method = make_method("q-filters", {"filters": str(file)})
    # A record of it makes the same method, while the file is the same.
    assert make_method(**settings_of(method)) == method
    with pytest.raises(ConfigError, match="has changed, its numbers are not 012345678901 any more"):
        tiny_engine(make_method("q-filters", {"filters": f"{file}#012345678901"}))


def test_files_that_were_measured_on_another_model_are_refused(tmp_path):
    engine, file = tiny_engine(), tmp_path / "numbers.tsv"
    here = {**shape_of(engine.config), "weights": engine.identity}

    def under(setting, width, **other):
        write_numbers(np.ones((2, width)), file, here | other)
        method = make_method(setting.partition(":")[0], {setting.partition(":")[2]: str(file)})
        assert engine.under(method).method == make_method(**settings_of(method))

    filters, heads = ("q-filters:filters", 16), ("duo-attention:heads", 2)
    for each in (filters, heads):
        under(*each)
        with pytest.raises(
            ConfigError, match=r"measured on other weights .0000000000000000, these"
        ):
            under(*each, weights="0" * 16)
    # Other heads, as many numbers.
    with pytest.raises(ConfigError, match="a model with kv_heads 4, head_dim 4; take a file"):
        under(*filters, kv_heads=4, head_dim=4)
    with pytest.raises(ConfigError, match=r"numbers\.tsv does not say of which model it is"):
        under(*heads, weights=3)


def test_a_share_of_each_row_s_own_length(ragged):
    (engine, _), rows, (whole, _) = ragged
    for layer in kept(under(engine, make_method("knorm", {"ratio": 0.3})), whole, rows):
        assert [[len(head) for head in heads] for heads in layer] == [
            [max(int(0.3 * length), 1)] * 2 for length in LENGTHS
        ]


def test_a_pyramid_of_budgets_is_kvpress_s_and_keeps_as_many_in_its_layers(ragged):
    """PyramidKV; `SnapKV` counts its window too."""
    method, layers = make_method("snapkv", {"budget": 1000, "over_layers": "pyramid"}), range(28)
    assert [method.of_layer(n, 28).budget for n in layers] == GOLDENS["pyramid"].tolist()
    share = make_method("knorm", {"ratio": 0.6, "over_layers": "pyramid"})
    assert [share.of_layer(n, 3).ratio for n in range(3)] == [1.0, 0.6, 0.2]
    with pytest.raises(ConfigError, match=r"beta must be at least 1, got 0\.5"):
        make_method("knorm", {"beta": 0.5})
    engines, rows, whole = ragged
    small = make_method("knorm", {"budget": 24, "over_layers": "pyramid", "beta": 3})
    one, mesh = (
        kept(under(engine, small), every, rows)
        for engine, every in zip(engines, whole, strict=True)
    )
    assert one == mesh
    for budget, of_rows in zip((40, 8), one, strict=True):
        assert [len(heads[0]) for heads in of_rows] == [min(n, budget) for n in LENGTHS]
    assert small.of_layer(1, 2) == make_method("knorm", {"budget": 8, "beta": 3})


def test_memory_is_freed_in_fact():
    engine = tiny_engine(small_method("knorm"), chunk=16)
    context = engine.prefill(random_rows([700]), reserve=24)
    # Two layers of keys and values: two heads of 8 float32 numbers, in one tile and the reserve's.
    assert context.resident_bytes == 2 * 2 * (2 * 256 * 8 * 4) + 2 * 4 * 4


def test_a_place_of_a_batch_is_as_long_as_what_stays_and_the_reserve():
    engine = tiny_engine(small_method("knorm"), chunk=16)
    context, batch = engine.prefill(random_rows([60]), reserve=24), Whole(engine, 128, 2, 1024)
    batch.check(context, 0, 100, 28, 1024)
    with pytest.raises(CapacityError, match="100 tokens and an answer of 29 need 129 slots"):
        batch.check(context, 0, 100, 29, 1024)


def test_kvzip_asks_in_the_words_of_the_checkpoint_s_tokenizer():
    engine = tiny_engine(small_method("kvzip"))
    assert not engine.asks
    LongContext(engine, word_tokenizer(64))
    assert [len(words) for words in engine.asks] == [5, 10, 0]
    # Beside which a repetition has no room for what many tokens would take.
    feed = engine.setup.feed("context", 128, context=[[1]], asks=[[0] * 121, [], []])
    with pytest.raises(InputError, match="are 121 tokens for this tokenizer, 120 fit"):
        list(engine.method.segments(feed))


def test_a_budget_below_what_always_stays_is_refused():
    with pytest.raises(ConfigError, match="budget 8 must hold sink \\+ local = 68 tokens"):
        make_method("random", {"budget": 8})
