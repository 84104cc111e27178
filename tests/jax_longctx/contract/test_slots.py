import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_longctx.caches import Scope
from jax_longctx.contract import STRIPE, SlotLayout
from jax_longctx.engine.capacity import grow
from jax_longctx.engine.context_io import load_context, save_context
from jax_longctx.engine.running import Ask, RunningBatch
from jax_longctx.engine.runs import each_layer
from jax_longctx.methods import Full, ReAttention, Ring, make_method
from jax_longctx.sharding import RULES, make_mesh
from tests.small_methods import SMALL, small_method
from tests.support import random_rows, tiny_config, tiny_engine

# (shards, slots of a shard, slots of a stripe or None for blocks, slots of a page).
LAYOUTS = [
    *((2, 48, 16, 1), (4, 32, 8, 4), (4, 32, 32, 1), (3, 24, 8, 8)),
    *((4, 32, None, 4), (1, 40, 8, 1), (1, 40, None, 2)),
]


def entries_of(shards, size, stripe, page):
    """[shards, entries]: which entry lies at each index of each shard."""
    each, run = size // page, (stripe or size) // page
    every = np.arange(shards * each)
    return np.stack([every[every // run % shards == shard] for shard in range(shards)])


@pytest.mark.parametrize(("shards", "size", "stripe", "page"), LAYOUTS)
def test_a_shard_finds_and_counts_its_entries(shards, size, stripe, page):
    layout, expected = SlotLayout(shards, stripe), entries_of(shards, size, stripe, page)
    count = expected.size
    asked = jnp.arange(-3, count + 5)
    for shard, entries in enumerate(expected):
        own = layout.of_shard(size // page, page, shard)
        np.testing.assert_array_equal(own.at(jnp.arange(len(entries))), entries)
        places = {entry: index for index, entry in enumerate(entries)}
        np.testing.assert_array_equal(own.find(asked), [places.get(int(e), -1) for e in asked])
        np.testing.assert_array_equal(own.below(asked), [np.sum(entries < int(e)) for e in asked])
        for run in (1, 2, 5, 9, 17, count):
            inside = [np.sum((entries >= a) & (entries < a + run)) for a in range(count)]
            assert max(inside) <= own.most(run) <= min(run, len(entries))


@pytest.mark.parametrize(("shards", "size", "stripe", "page"), LAYOUTS)
def test_arrays_are_dealt_put_in_order_resized_and_cut(shards, size, stripe, page):
    layout, entries = SlotLayout(shards, stripe), entries_of(shards, size, stripe, page)
    slots, count = shards * size, entries.size
    text = np.arange(2 * count * 3).reshape(2, count, 3)
    dealt = np.asarray(layout.dealt(jnp.asarray(text), 1, slots))
    np.testing.assert_array_equal(dealt, text[:, entries.ravel()])
    np.testing.assert_array_equal(layout.in_order(jnp.asarray(dealt), 1, slots), text)
    turn = shards * (stripe or size) // page
    larger = layout.resized(jnp.asarray(dealt), 1, count + turn)
    # The slots of a stripe stay those of the smaller cache.
    wider = entries_of(shards, size + (stripe or size), stripe, page)
    if stripe is None:
        wider = np.arange(count + turn)[None]
        entries = entries.reshape(1, -1)
    padded = np.pad(text, ((0, 0), (0, turn), (0, 0)))
    np.testing.assert_array_equal(larger, padded[:, wider.ravel()])
    np.testing.assert_array_equal(layout.resized(larger, 1, count), dealt)
    # The slots from a whole turn on, as those of a cache of their own.
    rest = layout.from_entry(larger, 1, jnp.int32(turn), count)
    np.testing.assert_array_equal(rest, padded[:, turn:][:, entries.ravel()])


def on_shards(shards, function, out):
    mesh = make_mesh(1, shards, 1)
    run = jax.shard_map(function, mesh=mesh, in_specs=(), out_specs=out, check_vma=False)
    return np.asarray(jax.jit(run)())


@pytest.mark.parametrize(("shards", "size", "stripe", "page"), LAYOUTS)
def test_shards_gather_in_the_texts_order(shards, size, stripe, page):
    layout, each = SlotLayout(shards, stripe), size // page
    text = jnp.arange(2 * shards * each).reshape(2, -1)

    def there_and_back():
        own = layout.of_shard(each, page, jax.lax.axis_index("seq"))
        return own.whole(own.part(text, 1), 1)

    np.testing.assert_array_equal(on_shards(shards, there_and_back, PartitionSpec()), text)


@pytest.mark.parametrize(("shards", "size", "stripe"), [(4, 32, 8), (2, 64, 16), (4, 32, None)])
@pytest.mark.parametrize("but_last", [0, 3])
def test_a_shard_lists_its_part_of_a_scope(shards, size, stripe, but_last):
    """Rows: a kept span across stripes, none, a text as long as the first part, one shorter."""
    low = jnp.array([[6, 15, 40], [20, 0, 0], [0, 0, 0], [0, 0, 0], [5, 9, 0]])
    high = jnp.array([[11, 20, 45], [20, 0, 0], [0, 0, 0], [0, 0, 0], [9, 12, 0]])
    stop, length = jnp.array([100, 70, 5, 4, 12]), jnp.array([127, 80, 9, 4, 17])
    scope = Scope(low, high, stop, length, global_size=5, span=5, local_size=30)
    listed, number = (np.asarray(x) for x in scope.listed())
    np.testing.assert_array_equal(number, scope.number)
    newest = jnp.full_like(length, but_last)
    for shard, entries in enumerate(entries_of(shards, size, stripe, 1)):
        local, place, count = scope.own(SlotLayout(shards, stripe).of_shard(size, 1, shard), newest)
        for row in range(len(number)):
            slots = listed[row, : max(number[row] - but_last, 0)]
            mine = np.flatnonzero(np.isin(slots, entries))
            assert count[row] == len(mine)
            np.testing.assert_array_equal(entries[local[row, : len(mine)]], slots[mine])
            np.testing.assert_array_equal(place[row, : len(mine)], mine)
            np.testing.assert_array_equal(local[row, len(mine) :], -1)


def engine_of(method, shards, **changes):
    config = tiny_config(num_layers=1, max_position=4096, **changes)
    return tiny_engine(method, config=config, mesh=make_mesh(1, shards, 1), chunk=96)


def test_what_is_dealt():
    assert engine_of(Full(), 4).setup.slot_layout.in_stripes
    assert not engine_of(Full(), 1).setup.slot_layout.in_stripes
    assert not engine_of(Ring(), 4).setup.slot_layout.in_stripes
    assert not engine_of(small_method("star"), 4).setup.slot_layout.in_stripes
    assert not engine_of(make_method("infllm", SMALL["infllm"]), 4).setup.slot_layout.in_stripes
    assert ReAttention().stripes


def test_only_slots_and_pages_are_dealt():
    layout = SlotLayout(4, STRIPE)
    assert all(layout.along(name) == layout for name in ("slots", "pages"))
    others = {*RULES, None} - {"slots", "pages"}
    assert not any(layout.along(name).in_stripes for name in others)


def test_an_offset_of_stripes_is_refused():
    setup = engine_of(Full(), 2).setup

    def body():
        return setup.layer_context(setup.layer(0), jnp.zeros(1, jnp.int32)).seq_offset(256)

    with pytest.raises(ValueError, match="dealt to the shards in stripes"):
        on_shards(2, body, PartitionSpec())


def test_a_quarter_of_the_room_fills_every_shard_alike():
    """1,024 tokens of 4,096 slots: each shard holds as many of them as any other."""
    shards = 4
    engine = engine_of(small_method("reattention"), shards)
    (text,) = random_rows([1024])
    context = engine.prefill([text], reserve=16, capacity=4096)
    (cache,) = each_layer(context.usable_caches())
    keys = np.asarray(cache.k)[0, 0].reshape(shards, -1, cache.k.shape[3])
    # Empty slots are zeros.
    filled = np.any(keys != 0, axis=-1)
    np.testing.assert_array_equal(filled.sum(axis=1), 1024 // shards)
    # Its first slots, as kernels need it.
    np.testing.assert_array_equal(filled[:, : 1024 // shards], True)


def answer(engine, context, question, tokens=5):
    return list(engine.stream(context, [question], max_tokens=tokens))


@pytest.mark.parametrize(
    ("name", "meshes"),
    [
        *(("reattention", (1, 2)), ("quest", (1, 2, 4))),
        # More stays than a stripe's part of a context of so few slots, and less than a stripe.
        *(("keydiff:budget=110", (1, 2)), ("keydiff:budget=24", (1, 2, 4))),
        ("keydiff:budget=100,over_heads=ada", (1, 2, 4)),
        ("keydiff:budget=40 > quest:budget=16,page_size=8,local=8", (1, 2)),
    ],
)
@pytest.mark.slow
def test_contexts_move_between_meshes(name, meshes, tmp_path):
    (text,), (question,) = random_rows([700]), random_rows([4], seed=5)
    method = small_method(name) if name in SMALL else make_method(name)
    engines = {shards: engine_of(method, shards) for shards in meshes}
    expected, saved = None, {}
    for shards, engine in engines.items():
        context = engine.prefill([text], reserve=16, capacity=1024)
        save_context(engine, context, tmp_path / str(shards))
        (cache,) = each_layer(load_context(engines[1], tmp_path / str(shards)).usable_caches())
        saved[shards] = np.asarray(cache.store.k)[:, :, : len(text)]
        np.testing.assert_allclose(saved[shards], saved[1], atol=1e-5)
        expected = expected or answer(engine, context, question)
        for other in engines.values():
            loaded = load_context(other, tmp_path / str(shards))
            assert answer(other, loaded, question) == expected


@pytest.mark.slow
def test_slots_stay_where_they_are_as_a_cache_grows():
    (text,), (question,) = random_rows([300]), random_rows([600], seed=5)
    answers = []
    for shards in (1, 4):
        engine = engine_of(small_method("quest"), shards)
        context = engine.prefill([text], reserve=8)
        slots = context.slots
        answers.append(answer(engine, context, question))
        assert context.slots > slots
        (cache,) = each_layer(context.usable_caches())
        assert {len(x.addressable_shards) for x in (cache.store.k, cache.digests.high)} == {shards}
    assert answers[0] == answers[1]
    layout = SlotLayout(4, STRIPE)
    engine = engine_of(Full(), 4)
    caches = engine.prefill([text], reserve=8).usable_caches()
    (old,), (new,) = (each_layer(x) for x in (caches, grow(caches, 512, layout)))
    each = [np.asarray(x.k).reshape(*x.k.shape[:2], 4, -1, x.k.shape[3]) for x in (old, new)]
    np.testing.assert_array_equal(each[1][:, :, :, : each[0].shape[3]], each[0])


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.slow
def test_a_running_batch_answers_as_alone(shares):
    engine = engine_of(Full(), 4)
    (text,), (question,) = random_rows([1200]), random_rows([4], seed=5)
    context = engine.prefill([text], reserve=32)
    expected = [token for block in answer(engine, context, question) for token in block[0]]
    shared = context if shares else None
    batch = RunningBatch(engine, places=2, slots=3000, reserve=32, context=shared)
    place, first = batch.join(context, Ask(question, max_tokens=5))
    found = [first.token]
    while len(found) < 5:
        found += [chosen.token for chosen in batch.step(1)[place]]
    assert found == expected
