import contextlib
import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jax_longctx.api import LongContext
from jax_longctx.engine import Ask, RunningBatch, allocate, capacity
from jax_longctx.engine.allocate import held_bytes, host_zeros, pinned_bytes
from jax_longctx.engine.capacity import footprint, slots_for, stores_of
from jax_longctx.engine.context_io import load_context, save_context
from jax_longctx.errors import CapacityError, ConfigError
from jax_longctx.methods import make_method
from jax_longctx.settings import Offload
from jax_longctx.sharding import HOST, make_mesh
from tests.jax_longctx.engine.test_running import run, tokens
from tests.jax_longctx.methods.harness import steps
from tests.small_methods import SMALL
from tests.support import joined, random_rows, tiny_engine, word_tokenizer

# All that can be offloaded under their default settings (a test compares).
NAMES = ("infllm", "quest", "arkvale", "resa", "reattention", "free-pages")
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
also = functools.partial(pytest.param, marks=pytest.mark.thorough)
# Settings beside the small ones: heads that choose apart, priors.
OTHERS = [
    ("infllm", {"n_init": 8}),
    ("quest", {"granularity": "kv_head", "sink": 0, "local": 0}),
    ("arkvale", {"granularity": "query_head", "digest": "sphere-max"}),
    ("resa", {"selector": "arkvale", "page_size": 8}),
    ("reattention", {"span": 21, "global_size": 20, "kept": 3}),
    ("reattention", {"count": 1}),
    ("free-pages", {"lam": 0.0, "digest": "cuboid-mean", "page_size": 1, "count": 3}),
]
LOOPS = {True: "host loops", False: "device loops"}
# The small settings of others, which cannot be offloaded, have all that the method can do.
ABLE = {"free-pages": {"lam": 0.0}}
LENGTHS = [[300, 70, 1, 180], [9, 3, 5, 1], [24, 24, 24, 24]]


def named(value):
    return LOOPS[value] if isinstance(value, bool) else None


def rows_of():
    return [random_rows(lengths, seed=seed) for seed, lengths in enumerate(LENGTHS)]


def small_method(name):
    return other(name, ABLE.get(name, {}))


def other(name, settings):
    return make_method(name, SMALL[name] | settings)


@functools.cache
def logits(method, offload, kv=None, by_layer=None, working_set=None):
    """Logits of four rows' questions and answers, the answers given; and the stores after them."""
    how = {"chunk": 16, "kv": kv, "by_layer": by_layer, "offload": offload}
    engine = tiny_engine(method, **how, working_set=working_set)
    found, caches = [], ()
    # As many slots as contexts of these texts have with a reserve of 64: programs are shared.
    for step in steps(engine, *rows_of(), reserve=128):
        caches = step.caches
        if step.segment.role in ("query", "decode"):
            for row in range(4):
                found.append(step.logits[row, : step.valid[row]])
    return np.concatenate(found), stores_of(caches)


def host_arrays(store):
    """What lies in the host's memory: keys too, unless steps read all of them."""
    assert (store.k is None) == (store.keys is not None)
    return [x for x in (store.k, store.v) if x is not None]


def check_same(method, **how):
    """Bit for bit, and not because nothing was chosen of the host."""
    there, stores = logits(method, "host", **how)
    how.pop("working_set", None)
    here, none = logits(method, None, **how)
    np.testing.assert_array_equal(there, here)
    assert not none and stores
    for store in stores:
        assert int(np.max(store.base)) > 0
        assert int(np.sum(store.frames.misses)) > 0 and int(np.sum(store.frames.hits)) > 0
        assert {x.sharding.memory_kind for x in host_arrays(store)} == {HOST}


@pytest.mark.parametrize(
    # Units in either mode, and values alone; a stored byte each.
    ("name", "by_layer", "kv"),
    [("infllm", True, None), ("infllm", False, "int8"), ("reattention", False, "int8")],
    ids=named,
)
@pytest.mark.slow
def test_offloaded_contexts_give_the_same_logits(name, by_layer, kv):
    check_same(small_method(name), by_layer=by_layer, kv=kv)
    _, (store, *_) = logits(small_method(name), "host", by_layer=by_layer, kv=kv)
    assert {x.dtype.itemsize for x in host_arrays(store)} == {1 if kv else 4}


@pytest.mark.parametrize(("name", "settings"), OTHERS, ids=str)
@pytest.mark.slow
def test_other_settings_give_the_same_logits(name, settings):
    check_same(other(name, settings))


@pytest.mark.slow
def test_the_least_working_set_gives_the_same_logits():
    """As many pages as a step chooses: every other page is a miss."""
    method, how = small_method("infllm"), {"by_layer": True, "kv": None}
    check_same(method, **how, working_set=16)
    _, few = logits(method, "host", **how, working_set=16)
    _, usual = logits(method, "host", **how)
    assert pages_of(few, "misses") > pages_of(usual, "misses")


@pytest.mark.slow
def test_units_larger_than_the_window_give_the_same_logits():
    """The list of a lone token may name pages that the pool has no room for: they are left out."""
    method = other("infllm", {"block_size": 64, "n_init": 16, "n_local": 16, "chunk": 8})
    check_same(method, working_set=128)
    _, (store, *_) = logits(method, "host", working_set=128)
    size, page = store.pool_k.shape[2], store.page
    behind = (store.base + size - store.before_tail * page)[:, None]
    np.testing.assert_array_equal(store._placed(behind - 1), [[size - 1]] * 4)
    np.testing.assert_array_equal(store._placed(behind), [[-1]] * 4)


def answers(engine, context, seed, lengths=(7, 4, 1, 12), tokens=24):
    questions = random_rows([*lengths], seed=seed)
    return joined(engine.stream(context, questions, max_tokens=tokens))


def engines(name, by_layer=None, **options):
    """One whose contexts lie on the device, and one whose contexts lie in the host's memory."""
    return [
        tiny_engine(small_method(name), chunk=16, by_layer=by_layer, offload=place, **options)
        for place in (None, "host")
    ]


@pytest.mark.parametrize(
    # Units, pages, and values alone.
    ("name", "by_layer", "kv"),
    [("infllm", True, None), slow("quest", False, "int8"), also("reattention", True, "int8")],
    ids=named,
)
def test_a_context_is_asked_and_saved_and_loaded_either_way(name, by_layer, kv, tmp_path):
    both, found = engines(name, by_layer, kv=kv), []
    for engine in both:
        context = engine.prefill(rows_of()[0], reserve=64)
        told = footprint(engine.setup, batch=4, context=300, reserve=64)
        assert held_bytes(context.caches) == (told.kept, told.host)
        found.append(answers(engine, context, 7))
        folder = tmp_path / str(engine.setup.offload is None)
        save_context(engine, context, folder)
        for loader in both:
            loaded = load_context(loader, folder)
            assert bool(stores_of(loaded.caches)) == (loader.setup.offload is not None)
            found.append(answers(loader, loaded, 7))
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize(("name", "by_layer"), [("infllm", True), ("quest", False)], ids=named)
@pytest.mark.slow
def test_a_cache_that_grows(name, by_layer):
    found = []
    for engine in engines(name, by_layer):
        context = engine.prefill(rows_of()[0], reserve=64)
        slots = context.slots
        for _ in range(2):
            found.append(answers(engine, context, 6, (200, 30, 17, 1), 40))
            assert context.slots > slots
        before = [array for store in stores_of(context.caches) for array in host_arrays(store)]
        engine.ensure_reserve(context, 1000)
        after = jax.tree.leaves(context.caches)
        # What does not grow stays where it is.
        assert all(any(new is old for new in after) for old in before)
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("name", ["infllm", "quest"])
@pytest.mark.slow
def test_rows_and_heads_are_divided_over_a_mesh(name):
    found = []
    for engine in engines(name, mesh=make_mesh(2, 1, 2)):
        context = engine.prefill(random_rows([110, 70, 1]), reserve=48)
        found.append(answers(engine, context, 8, (7, 4, 1)))
    assert found[0] == found[1]
    assert engine.fetched.hits and engine.fetched.misses


def test_another_method_takes_what_it_can_of_an_offloaded_model():
    def tier(model, name, **asked):
        return model.with_method(small_method(name), **asked).engine.setup.offload

    here, there = (
        LongContext(tiny_engine(small_method("quest"), **how), word_tokenizer(64))
        for how in ({}, {"offload": "host", "working_set": 128})
    )
    assert tier(there, "infllm") == Offload(working_set=128)
    assert tier(there, "infllm", working_set=256) == Offload(working_set=256)
    assert tier(there, "infllm", offload="host") == Offload()
    assert tier(here, "infllm") is None
    with pytest.raises(ConfigError, match="is for offloaded contexts; give offload host"):
        tier(here, "infllm", working_set=128)


def test_what_was_fetched_is_counted():
    here, there = engines("infllm")
    # As many rows as other tests have, whose programs these are.
    rows, question = random_rows([300] * 4, seed=9), random_rows([5] * 4, seed=10)
    for engine in (here, there):
        context = engine.prefill(rows, reserve=48)
        joined(engine.stream(context, question, max_tokens=24))
    assert here.fetched is None
    found, layers, steps = there.fetched, 2, 24
    assert found.steps == layers * len(rows) * steps
    assert 0 < found.waited <= found.steps
    # Two units of two pages each; those of the tail are not counted.
    assert 0 < found.hits + found.misses <= 4 * found.steps
    assert found.misses >= found.waited
    assert found.hit_rate == found.hits / (found.hits + found.misses)
    joined(there.stream(context, question, max_tokens=2))
    assert there.fetched.steps == layers * len(rows) * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_footprint_tells_device_and_host_apart(name):
    for kv, size in ((None, 4), ("int8", 1)):
        whole, found = (
            footprint(engine.setup, batch=4, context=300, reserve=48)
            for engine in engines(name, kv=kv)
        )
        # All keys and values lie in the host's memory, but for the scales of 8 bits.
        assert whole.host == 0 and whole.kept > found.host
        parts = 1 if name == "reattention" else 2
        assert found.host == parts * 2 * 4 * 2 * slots_for(300, 48) * 8 * size


@pytest.mark.slow
def test_a_device_without_room_for_the_context_takes_it_offloaded():
    here, there = engines("infllm")
    room = {"batch": 1, "context": 3000, "reserve": 32}
    whole, need = (footprint(engine.setup, **room).peak for engine in (here, there))
    assert need < whole / 2
    here.memory_limit = there.memory_limit = int(1.3 * need)
    there.prefill(random_rows([3000]), reserve=32)
    with pytest.raises(CapacityError, match="a cache of"):
        here.prefill(random_rows([3000]), reserve=32)


def test_a_host_without_room_is_refused_with_arithmetic(monkeypatch):
    _, engine = engines("quest")
    host = footprint(engine.setup, batch=1, context=2000, reserve=32).host
    monkeypatch.setattr(capacity, "available_host_bytes", lambda mesh: host // 2)
    with pytest.raises(
        CapacityError, match=r"of the host's memory, .* free is usable; about 45% of"
    ):
        engine.prefill(random_rows([2000]), reserve=32)


REFUSED = {
    "full": {},
    "snapkv": {},
    "ideal-topk": {},
    "infllm": {"decode": "dense"},
    "free-pages": {"lam": 0.5},
    "quest": {"allocation": "psa-estimate"},
    "resa": {"selector": "ideal", "page_size": 1},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_offloaded_is_refused_with_what_can(name):
    with pytest.raises(ConfigError) as error:
        tiny_engine(other(name, REFUSED[name]), offload="host")
    said = str(error.value)
    assert said.startswith(f"{name} cannot be offloaded: ")
    assert said.endswith(f"; with default settings these can: {', '.join(sorted(NAMES))}")


def test_settings_that_make_no_sense_are_refused():
    quest = small_method("quest")
    with pytest.raises(ConfigError, match="unknown offload 'disk'; known: host"):
        tiny_engine(quest, offload="disk")
    with pytest.raises(ConfigError, match="give offload host too"):
        tiny_engine(quest, working_set=100)
    for name in NAMES:
        with pytest.raises(ConfigError, match="a working set of 8 tokens is too small: ") as error:
            tiny_engine(small_method(name), offload="host", working_set=8)
        # The size that it names is taken for every text.
        size = int(re.findall(r"chooses up to ([\d,]+)", str(error.value))[0].replace(",", ""))
        setup = tiny_engine(small_method(name), offload="host", working_set=size).setup
        footprint(setup, batch=1, context=3000, reserve=48)
    with pytest.raises(ConfigError, match="the mesh has seq=2; leave seq out, or offload"):
        tiny_engine(quest, offload="host", mesh=make_mesh(1, 2, 1))


@pytest.mark.slow
def test_questions_about_one_text_follow_one_another():
    found = []
    for engine in engines("quest"):
        model = LongContext(engine, word_tokenizer(64))
        context = engine.prefill(random_rows([200]), reserve=48)
        given = model.ask_all(context, random_rows([4, 6], seed=3), max_tokens=8)
        found.append([answer.tokens for answer in given])
    assert found[0] == found[1] and all(answer.fetched.steps for answer in given)


def pages_of(stores, count):
    return sum(int(np.sum(getattr(store.frames, count))) for store in stores)


def ran(engine):
    """Answers in a running batch: rows of texts of two sizes join and leave, one place each.

    The last answer is that of the first context, asked alone after that.
    """
    sizes, limits = (512, 256, 256, 512), (20, 5, 12, 9)
    contexts = [
        engine.prefill([row], reserve=64, capacity=size)
        for row, size in zip(random_rows([300, 70, 100, 9], seed=4), sizes, strict=True)
    ]
    assert {context.slots for context in contexts} == {256, 512}
    questions = random_rows([5, 9, 1, 12], seed=5)
    asked = [
        Ask(question, max_tokens=limit) for question, limit in zip(questions, limits, strict=True)
    ]
    batch = RunningBatch(engine, places=2, slots=512, reserve=64)
    found, _ = run(batch, list(zip(contexts, asked, strict=True)))
    again = joined(engine.stream(contexts[0], questions[:1], max_tokens=limits[0]))
    return [*map(tokens, found), *again], batch


@pytest.mark.parametrize(
    ("name", "by_layer", "kv"),
    # Units, and values alone.
    [("infllm", True, None), ("reattention", False, "int8")],
    ids=named,
)
@pytest.mark.slow
def test_rows_join_and_leave_a_running_batch(name, by_layer, kv):
    (here, _), (there, batch) = map(ran, engines(name, by_layer, kv=kv))
    assert here == there and here[-1] == here[0]
    stores = stores_of(batch._caches.held)
    kinds = {x.sharding.memory_kind for store in stores for x in host_arrays(store)}
    assert kinds == {HOST}
    assert pages_of(stores, "misses") > 0


def test_what_is_pinned_is_counted_and_never_lies_on_the_device_as_a_whole():
    _, engine = engines("infllm", True)
    before = pinned_bytes()
    context = engine.prefill(random_rows([3000]), reserve=32)
    stores = stores_of(context.caches)
    held = sum(x.nbytes for store in stores for x in host_arrays(store))
    assert held and pinned_bytes() == before + held
    largest = max(
        leaf.nbytes for leaf in jax.tree.leaves(context.caches) if leaf.sharding.memory_kind != HOST
    )
    assert stores[0].pool_k.shape[2] < context.slots / 8
    assert largest <= stores[0].k.nbytes / 4
    del stores
    context.caches = None
    assert pinned_bytes() == before


def test_what_xla_keeps_pinned_can_be_promised_again(monkeypatch, tmp_path):
    """XLA keeps what it pinned for GPUs, and the system counts it as used."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 1000 kB\n", encoding="ascii")
    monkeypatch.setattr(capacity, "MEMINFO", meminfo)
    monkeypatch.setattr(allocate, "_most_pinned", 0)
    monkeypatch.setattr(capacity, "keeps_pinned", lambda mesh: True)
    monkeypatch.setattr(capacity, "bytes_per_device", lambda mesh, need, host: need)
    mesh, refused = make_mesh(), pytest.raises(CapacityError, match="the offloaded context needs")
    # What was promised and never allocated is nobody's to promise again.
    capacity.check_host(mesh, 900_000)
    assert capacity.kept_bytes(mesh) == 0
    with refused:
        capacity.check_host(mesh, 1_700_000)
    place = NamedSharding(mesh, PartitionSpec(), memory_kind=HOST)
    held = host_zeros(jax.ShapeDtypeStruct((900_000,), np.int8), place)
    meminfo.write_text("MemAvailable: 1 kB\n", encoding="ascii")
    # While arrays hold it, it is not there again.
    assert capacity.kept_bytes(mesh) == 0
    with refused:
        capacity.check_host(mesh, 900_000)
    held.delete()
    assert capacity.kept_bytes(mesh) == 900_000
    capacity.check_host(mesh, 900_000)
    with refused:
        capacity.check_host(mesh, 910_000)


def test_a_running_batch_checks_its_room_and_the_mesh(monkeypatch):
    _, engine = engines("infllm")
    context = engine.prefill(random_rows([300]), reserve=64, capacity=512)
    batch = RunningBatch(engine, places=2, slots=256, reserve=64)
    with pytest.raises(CapacityError, match="a place of this batch has 256"):
        batch.join(context, Ask([1, 2], max_tokens=4))
    _, two = engines("infllm", mesh=make_mesh(2, 1, 1))
    sizes = {"places": 2, "slots": 512, "reserve": 64}
    with pytest.raises(ConfigError, match="divides them over data=2; leave data out, or offload"):
        RunningBatch(two, **sizes)
    # For a row on its way to its place too.
    held = RunningBatch(engine, **sizes)._caches.held
    own = capacity.bytes_per_device(engine.mesh, held)
    # Of one row.
    layer = capacity.bytes_per_device(engine.mesh, held, host=True) // engine.config.num_layers // 2
    for layers, fits in ((1, False), (2, True)):
        engine.memory_limit = int((own + layers * layer) / capacity.USABLE) + 1
        with contextlib.nullcontext() if fits else pytest.raises(CapacityError):
            RunningBatch(engine, **sizes)
    monkeypatch.setattr(capacity, "available_host_bytes", lambda mesh: 10_000)
    with pytest.raises(CapacityError, match="of the host's memory"):
        RunningBatch(engine, **sizes)
