import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_longctx.caches import (
    AppendCache,
    append_only,
    gather_slots,
    local_run,
    local_slots,
    read_lines,
    where_rows,
    write_run,
)
from jax_longctx.engine.setup import Setup
from jax_longctx.methods import Full
from jax_longctx.sharding import logical_spec, make_mesh, on_devices, tree_specs
from pallas_kernels.plane import Plane, written
from tests.jax_longctx.methods.selecting import layer_shape
from tests.support import tiny_config

HEADS, SLOTS, HEAD_DIM = 2, 64, 4
BUFFER, ROW = logical_spec(("batch", "kv_heads", "slots", None)), logical_spec(("batch",))
KV_HEADS = logical_spec(("batch", None, "kv_heads", None))
CHOSEN = logical_spec(("batch", "kv_heads", None))
KEPT = logical_spec(("batch", "kv_heads", None, None))


@pytest.fixture(params=[(1, None), (4, None), (4, 8)], ids=["one", "blocks", "stripes"])
def setup(request, monkeypatch):
    """Shards of the slots, and slots of a stripe: each of the four shards holds two of them."""
    shards, stripe = request.param
    monkeypatch.setattr("jax_longctx.engine.setup.STRIPE", stripe)
    return Setup(tiny_config(), Full(), make_mesh(seq=shards), jnp.dtype(jnp.float32), 512)


def dealt(setup, x):
    """An array in the text's order as the setup has it, and back."""
    return setup.slot_layout.dealt(jnp.asarray(x), 2, SLOTS)


def ordered(setup, x):
    return np.array(setup.slot_layout.in_order(x, 2, SLOTS))


def slots_of(setup):
    """[shards, size]: the slots of each shard."""
    every = setup.slot_layout.dealt(jnp.arange(SLOTS), 0, SLOTS)
    return np.array(every).reshape(setup.mesh.shape["seq"], -1)


@pytest.fixture(params=["cpu", "tpu"])
def platform(request, monkeypatch):
    monkeypatch.setattr(append_only, "platform", lambda: request.param)
    return request.param


def compiled(setup, function, in_specs, out_specs):
    """`function(*arrays, ctx)` on every shard, as the engine runs a method's `attend`."""

    def local(*arrays):
        return function(*arrays, setup.layer_context(setup.layer(0), jnp.zeros((1,), jnp.int32)))

    return jax.jit(on_devices(setup.mesh, local, in_specs, out_specs))


def random_arrays(batch, tokens, seed=0):
    rng = np.random.default_rng(seed)
    buffer = rng.normal(size=(batch, HEADS, SLOTS, HEAD_DIM)).astype(np.float32)
    return buffer, rng.normal(size=(batch, tokens, HEADS, HEAD_DIM)).astype(np.float32)


def runs(tokens):
    """Starts and valid counts of three rows; a single row takes the first of each."""
    half, end = -(-tokens // 2), SLOTS - tokens
    yield [0, 0, 0], [tokens, 0, half]
    yield [20, 3, 41], [half, tokens, 0]
    # Across the borders of four shards of 16 slots.
    yield [14, 31, 47], [tokens, tokens, half]
    yield [30, 0, SLOTS - 1], [0, 0, 0]
    # To the last slot, also by a chunk whose padding reaches beyond it.
    yield [end, end, SLOTS - half], [tokens, half, half]
    yield [SLOTS - half, SLOTS - 1, end], [half, 1, tokens]


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        *((1, 1), (1, 16), (3, 1), (3, 5), (3, 16), (3, 17)),
        *(pytest.param(1, tokens, marks=pytest.mark.slow) for tokens in (5, 17)),
    ],
)
def test_a_run_lands_where_numpy_puts_it(setup, platform, batch, tokens):
    write = compiled(setup, write_run, (BUFFER, KV_HEADS, ROW, ROW), BUFFER)
    buffer, new = random_arrays(batch, tokens)
    for starts, counts in runs(tokens):
        start, valid = np.array(starts[:batch], np.int32), np.array(counts[:batch], np.int32)
        got = ordered(setup, write(dealt(setup, buffer), new, start, valid))
        expected = buffer.copy()
        for b in range(batch):
            stop = start[b] + valid[b]
            expected[b, :, start[b] : stop] = np.swapaxes(new[b, : valid[b]], 0, 1)
            # The slot after a row's last one is the storage's to spoil, and no other.
            got[b, :, stop : stop + 1] = expected[b, :, stop : stop + 1]
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("layer", [0, 1])
def test_both_forms_write_the_same_shard(layer):
    """Runs that lie before, across and behind what a shard holds (`start` is local to it).

    The rows are those of a layer of two, as in a `Plane`.
    """
    buffer, new = jnp.asarray(random_arrays(4, 5)[0]), jnp.asarray(random_arrays(2, 5)[1])
    own = 2 * layer
    new_BKTH = jnp.swapaxes(new, 1, 2)

    @jax.jit
    def both(starts, valids):
        rows = buffer
        for row in range(2):
            rows = append_only._write_row(row, rows, new_BKTH, starts, valids, own)
        return append_only._write_lines(buffer, new_BKTH, starts, valids, own), rows

    starts = [-20, -5, -3, 0, 7, 59, 62, 64, 90]
    for start, valid in itertools.product(starts, [0, 3, 5]):
        expected = np.array(buffer)
        for b, (first, count) in enumerate([(start, valid), (11, 2)]):
            for step in range(count):
                if 0 <= first + step < SLOTS:
                    expected[own + b, :, first + step] = new_BKTH[b, :, step]
        for found in both(np.array([start, 11]), np.array([valid, 2])):
            np.testing.assert_array_equal(found, expected, err_msg=f"{start=} {valid=}")


def taken(buffer, slots):
    lines = np.take_along_axis(buffer, np.maximum(slots, 0)[..., None], axis=2)
    return np.where((slots < 0)[..., None], 0.0, lines)


@pytest.mark.parametrize("batch", [1, 3])
def test_slots_are_gathered_from_every_shard(setup, batch):
    buffer, _ = random_arrays(batch, 1)
    rng = np.random.default_rng(1)
    slots = rng.integers(0, SLOTS, (batch, HEADS, 24)).astype(np.int32)
    slots[:, :, :4] = [0, SLOTS - 1, 15, 16]
    slots[:, :, 4:6] = -1
    got = compiled(setup, gather_slots, (BUFFER, CHOSEN), KEPT)(dealt(setup, buffer), slots)
    np.testing.assert_array_equal(got, taken(buffer, slots))


@pytest.mark.parametrize("lists", [1, HEADS])
def test_lines_are_read_of_one_list_or_of_one_a_head(lists):
    buffer, _ = random_arrays(3, 1)
    slots = np.random.default_rng(2).integers(-1, SLOTS, (3, lists, 40)).astype(np.int32)
    slots[..., :3] = [0, SLOTS - 1, -1]
    got = read_lines(jnp.asarray(buffer), jnp.asarray(slots))
    np.testing.assert_array_equal(got, taken(buffer, slots))


# What every shard of the slots says of itself, side by side.
BY_SHARD = PartitionSpec("data", "seq")
LISTS = logical_spec(("batch", None))


def test_each_shard_counts_its_own_slots(setup):
    index = np.array([[-1, 0, 15, 16, SLOTS - 1], [-16, 31, 32, 47, 48]], np.int32)
    size = SLOTS // setup.mesh.shape["seq"]
    run = compiled(setup, lambda i, ctx: local_slots(i, size, ctx), (LISTS,), BY_SHARD)
    got = np.array(run(index)).reshape(2, -1, 5)
    for shard, slots in enumerate(slots_of(setup).tolist()):
        expected = [[slots.index(i) if i in slots else -1 for i in row] for row in index]
        np.testing.assert_array_equal(got[:, shard], expected)


@pytest.mark.parametrize("but_last", [0, 20])
def test_each_shard_says_what_it_holds(setup, but_last):
    cache = dataclasses.replace(cache_of(4), length=jnp.array([0, 17, 37, SLOTS], jnp.int32))

    def held(cache, ctx):
        return cache.held(ctx, but_last=but_last)[:, None]

    got = np.array(compiled(setup, held, (tree_specs(cache),), BY_SHARD)(cache))
    for row, length in zip(got, cache.length, strict=True):
        counted = slots_of(setup) < int(length) - but_last
        np.testing.assert_array_equal(row, np.sum(counted, axis=1))


@pytest.mark.parametrize("descending", [False, True])
def test_shards_hold_runs_of_a_monotone_list(setup, descending):
    """Rows that lie on one shard, on all, on none; longer than a shard; garbage behind.

    In stripes what a shard holds is no run.
    """
    size = SLOTS // setup.mesh.shape["seq"]
    lists = [[3, 5, 14, 15, 16, 47, 63], [33, 34], [], list(range(10, 34)), list(range(16, 32))]
    number = np.array([len(row) for row in lists], np.int32)
    slots = np.random.default_rng(3).integers(-9, SLOTS, (5, 24)).astype(np.int32)
    for row, entries in zip(slots, lists, strict=True):
        row[: len(entries)] = entries[::-1] if descending else entries

    def run(slots, number, ctx):
        local, first, count = local_run(slots, number, size, ctx, descending=descending)
        return jnp.concatenate([first[:, None], count[:, None], local], axis=1)

    listing = compiled(setup, run, (LISTS, ROW), BY_SHARD)
    if setup.slot_layout.in_stripes:
        with pytest.raises(ValueError, match="in stripes"):
            listing(slots, number)
        return
    got = np.array(listing(slots, number))
    got = got.reshape(5, SLOTS // size, -1)
    assert got.shape[2] == 2 + min(24, size)
    for b in range(5):
        entries = slots[b, : number[b]]
        for shard in range(SLOTS // size):
            first, count, *local = got[b, shard]
            mine = entries[entries // size == shard]
            assert count == len(mine)
            np.testing.assert_array_equal(local[:count], mine - shard * size)
            np.testing.assert_array_equal(local[count:], -1)
            np.testing.assert_array_equal(entries[first : first + count], mine)


def test_rows_are_chosen_in_every_leaf_and_in_a_plane_where_they_lie():
    pick = jnp.array([True, False, True])
    old = (jnp.zeros(3), jnp.zeros((3, 2, 2)))
    for leaf in where_rows(pick, (jnp.ones(3), jnp.ones((3, 2, 2))), old):
        np.testing.assert_array_equal(leaf.reshape(3, -1).mean(axis=1), [1, 0, 1])
    old, ones = Plane(jnp.zeros((2, 3, 4)), jnp.int32(1)), jnp.ones((3, 4))
    assert where_rows(pick, old, old) is old
    for new in (ones, written(old, ones)):
        got = where_rows(pick, new, old)
        np.testing.assert_array_equal(got.whole.mean(axis=2), [[0, 0, 0], [1, 0, 1]])


def cache_of(batch):
    sizes = [(batch, 4, HEAD_DIM), (batch, HEADS, SLOTS, HEAD_DIM)]
    shape = layer_shape(*(np.zeros(size, np.float32) for size in sizes))
    return append_only.empty_append_cache(shape)


def append_tokens(setup, cache, tokens, valid, seed):
    batch = cache.k.shape[0]
    _, k = random_arrays(batch, tokens, seed)
    _, v = random_arrays(batch, tokens, seed + 1)
    specs = tree_specs(cache)
    run = compiled(setup, AppendCache.append, (specs, KV_HEADS, KV_HEADS, ROW), specs)
    return run(cache, k, v, np.array(valid, np.int32)), (k, v)


def test_buffers_are_a_caches_own_unless_it_is_rewound():
    cache = cache_of(3)
    assert cache.k.shape == cache.v.shape == (3, HEADS, SLOTS, HEAD_DIM)
    leaves = jax.tree.leaves(cache)
    assert not any(np.any(leaf) for leaf in leaves)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    # A fork is donated to its steps while the context keeps the counts it started from.
    cache = cache_of(1).end_context(reserve=0)
    back = cache.rewind()
    assert back.k is cache.k and back.v is cache.v
    donate = jax.jit(lambda length, position: (length + 1, position + 1), donate_argnums=(0, 1))
    donate(back.length, back.position)
    assert not cache.context_length.is_deleted() and not cache.context_position.is_deleted()
    assert int(cache.context_length[0]) == 0


def test_the_context_is_found_again_after_a_question(setup):
    """What a rewound cache counts as valid is the context, whatever the question wrote behind.

    Positions run ahead of the slots where a method has dropped tokens.
    """
    cache = dataclasses.replace(cache_of(3), position=jnp.array([0, 0, 40]))
    cache, (k, v) = append_tokens(setup, cache, 16, [16, 0, 9], seed=2)
    np.testing.assert_array_equal(cache.context_length, [0, 0, 0])
    cache = cache.end_context(reserve=0)
    asked, (more, _) = append_tokens(setup, cache, 5, [5, 2, 0], seed=4)
    np.testing.assert_array_equal(asked.length, [21, 2, 9])
    np.testing.assert_array_equal(asked.position, [21, 2, 49])
    keys = ordered(setup, asked.k)
    np.testing.assert_array_equal(keys[0, :, 16:21], np.swapaxes(more[0], 0, 1))
    back = asked.rewind()
    np.testing.assert_array_equal(back.length, [16, 0, 9])
    np.testing.assert_array_equal(back.position, [16, 0, 49])
    keys, values = ordered(setup, back.k), ordered(setup, back.v)
    for b, count in enumerate([16, 0, 9]):
        np.testing.assert_array_equal(keys[b, :, :count], np.swapaxes(k[b, :count], 0, 1))
        np.testing.assert_array_equal(values[b, :, :count], np.swapaxes(v[b, :count], 0, 1))
    # A second question lands where the first did.
    again, (other, _) = append_tokens(setup, back, 5, [5, 5, 5], seed=6)
    np.testing.assert_array_equal(ordered(setup, again.k)[1, :, :5], np.swapaxes(other[1], 0, 1))
