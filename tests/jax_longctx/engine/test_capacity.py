import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.engine.allocate import abstract_caches
from jax_longctx.engine.capacity import bucket, footprint, grow, reserved, slots_for
from jax_longctx.engine.prefill import finish_context, finish_donated, whole_finish
from jax_longctx.engine.setup import Setup
from jax_longctx.methods import METHODS
from jax_longctx.sharding import OwnAxis, axes_field, leaf_axes, make_mesh, tree_specs
from tests.small_methods import small_method
from tests.support import tiny_config

# A reserve that is not rounded up.
BATCH, CONTEXT, RESERVE = 2, 900, 128


def setup_of(name):
    dtype = jnp.dtype(jnp.float32)
    return Setup(tiny_config(), small_method(name), make_mesh(), dtype, 16)


def size_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compiled(program, *args, **options):
    memory = program.lower(*args, **options).compile().memory_analysis()
    beside = BATCH * jnp.dtype(jnp.int32).itemsize  # the rows' total lengths
    taken = memory.argument_size_in_bytes - beside
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return taken, made


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_claims_are_what_the_compiler_counts(name):
    setup = setup_of(name)
    claimed = footprint(setup, batch=BATCH, context=CONTEXT, reserve=RESERVE)
    slots = bucket(CONTEXT + RESERVE + 1)
    empty = abstract_caches(setup, BATCH, slots, RESERVE)
    total = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    finish = finish_donated
    taken, made = compiled(finish, setup, empty, total, "context", RESERVE)
    # XLA leaves out what `finish` drops unread, which is in memory all the same.
    peaks = [max(taken, size_of(empty)) + made]
    kept = jax.eval_shape(lambda c, t: finish_context(setup, c, t, RESERVE), empty, total)
    answering = size_of(kept)
    assert claimed.kept == answering
    if setup.method.info.answers_apart:
        finish = whole_finish
        taken, made = compiled(finish, setup, kept, total, "question", bucket(RESERVE))
        # Nothing was donated, and a few numbers a row may be handed on.
        peaks.append(max(taken, size_of(kept)) + made)
        answering = made
    # XLA counts what it can pass through in place; a row's few numbers may be copied.
    assert claimed.peak == pytest.approx(max(peaks), rel=0.01, abs=256)
    assert claimed.resident == pytest.approx(answering, rel=0.01, abs=256)
    assert 0 < claimed.read <= claimed.resident


def test_a_budget_does_not_grow_with_the_context():
    for name in ("streaming-llm", "h2o", "tova", "roco"):
        setup = setup_of(name)
        short, long = (
            footprint(setup, batch=1, context=n, reserve=RESERVE) for n in (1000, 100_000)
        )
        assert short == long
        # The answer's own cache lies in whole tiles of 128 slots.
        slots = 60 + (128 if setup.method.info.answers_apart else 0)
        assert long.peak < slots * setup.config.num_layers * 2 * 2 * 8 * 4 * 1.2


def test_sizes_are_few_and_waste_at_most_a_sixteenth():
    for tokens in (1, 127, 128, 129, 1000, 4096, 4097, 33_000, 1_000_001):
        slots = bucket(tokens)
        assert tokens <= slots <= max(128, tokens * 17 / 16 + 128)
        assert bucket(tokens, 3) % (3 * 128) == 0
    assert len({bucket(n) for n in range(32_769, 65_537)}) == 64
    for tokens in (16_000, 40_000, 130_000, 1_000_000):
        slots = slots_for(tokens, 200)
        assert tokens + 257 <= slots <= (tokens + 257) * (1 + 1 / 64)
        # As many tokens as there are slots in a step have the same capacity.
        near = range(tokens - tokens // 64, tokens + tokens // 64)
        assert sum(slots_for(one, 200) == slots for one in near) >= tokens // 130
    assert bucket(slots_for(1_000_000)) == slots_for(1_000_000)
    assert [reserved(tokens) for tokens in (0, 1, 128, 129, 256, 300)] == [
        *(0, 128, 128, 256, 256, 384)
    ]
    assert all(reserved(reserved(tokens)) == reserved(tokens) for tokens in range(1, 70_000, 11))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Paged:
    """Slots, what is kept of each page of them, and a list whose axis is its own."""

    slots: Any = axes_field("batch", "slots")
    pages: Any = axes_field("batch", "pages")
    listed: Any = axes_field(OwnAxis("axis"), None)
    axis: str | None = dataclasses.field(default="budget", metadata={"static": True})


def paged(slots, pages, listed=3, axis="budget"):
    arrays = (jnp.ones((2, slots)), jnp.ones((2, pages)), jnp.ones((listed, 5)))
    return Paged(*arrays, axis)


def sizes(cache):
    return cache.slots.shape[1], cache.pages.shape[1], cache.listed.shape[0]


def test_a_page_is_of_its_own_layer_and_whole():
    caches = (paged(256, 16), paged(256, 32), paged(512, 4))
    grown = grow(caches, 128)
    assert [sizes(cache) for cache in grown] == [(384, 24, 3), (384, 48, 3), (640, 5, 3)]
    for old, new in zip(jax.tree.leaves(caches), jax.tree.leaves(grown), strict=True):
        kept = new[tuple(map(slice, old.shape))]
        np.testing.assert_array_equal(kept, old)
        assert new.sum() == old.sum()
    alone = dataclasses.replace(paged(256, 16), slots=None)
    for cache, said in [
        (paged(256, 24), "256 slots in 24 pages, and 128 slots more, are not whole pages"),
        (paged(512, 2), "512 slots in 2 pages, and 128 slots more, are not whole pages"),
        (alone, r"axis 'pages' of 16 is measured by one number of slots, the cache has \[\]"),
    ]:
        with pytest.raises(ValueError, match=f"layer 1: {said}"):
            grow((paged(256, 16), cache), 128)


def test_an_axis_that_each_cache_names_itself():
    for axis, size in [("budget", 3), (None, 3), ("room", 131), ("share", 131)]:
        cache = paged(256, 16, axis=axis)
        assert leaf_axes((cache,))[-1] == (axis, None)
        assert tree_specs(cache).axis == axis
        (grown,) = grow((cache,), 128)
        assert (grown.listed.shape[0], grown.axis) == (size, axis)
    # A share stays one, in whole granules: 300 of 512 slots; 640 more need 375 more, 3 granules.
    (grown,) = grow((paged(512, 4, 300, "share"),), 640)
    assert grown.listed.shape[0] == 300 + 384
