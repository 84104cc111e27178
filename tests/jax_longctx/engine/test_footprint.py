"""The bytes that `methods` shows are those of the compiled programs' own accounts."""

import jax
import jax.numpy as jnp
import pytest

from jax_longctx.engine import programs
from jax_longctx.engine.capacity import bucket, footprint
from jax_longctx.methods import METHODS
from jax_longctx.sharding import make_mesh
from tests.small_methods import SMALL, small_method
from tests.support import tiny_config

# A reserve that is not rounded up.
BATCH, CONTEXT, RESERVE = 2, 900, 128


def test_every_method_has_small_settings():
    assert set(SMALL) == set(METHODS)


def size_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compiled(program, *args, **options):
    memory = program.lower(*args, **options).compile().memory_analysis()
    beside = BATCH * jnp.dtype(jnp.int32).itemsize  # the rows' total lengths
    taken = memory.argument_size_in_bytes - beside
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return taken, made, memory.temp_size_in_bytes


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_claims_are_what_the_compiler_counts(name):
    setup = programs.Setup(
        tiny_config(), small_method(name), make_mesh(), jnp.dtype(jnp.float32), 16
    )
    claimed = footprint(setup, batch=BATCH, context=CONTEXT, reserve=RESERVE)
    slots = bucket(CONTEXT + RESERVE + 1)
    empty = programs.abstract_caches(setup, BATCH, slots, RESERVE)
    total = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    finish = programs.finish_donated
    taken, made, _ = compiled(finish, setup, empty, total, "context", RESERVE)
    # XLA leaves out what `finish` drops unread, which is in memory all the same.
    peaks = [max(taken, size_of(empty)) + made]
    kept = jax.eval_shape(lambda c, t: programs.finish_context(setup, c, t, RESERVE), empty, total)
    answering = size_of(kept)
    assert claimed.kept == answering
    if setup.method.info.answers_apart:
        finish = programs.whole_finish
        taken, made, _ = compiled(finish, setup, kept, total, "question", bucket(RESERVE))
        # Nothing was donated, and a few numbers a row may be handed on.
        peaks.append(max(taken, size_of(kept)) + made)
        answering = made
    # XLA counts what it can pass through in place; a row's few numbers may be copied.
    assert claimed.peak == pytest.approx(max(peaks), rel=0.01, abs=256)
    assert claimed.resident == pytest.approx(answering, rel=0.01, abs=256)
    assert 0 < claimed.read <= claimed.resident


def test_a_budget_does_not_grow_with_the_context():
    for name in ("streaming-llm", "h2o", "tova", "roco"):
        setup = programs.Setup(
            tiny_config(), small_method(name), make_mesh(), jnp.dtype(jnp.float32), 16
        )
        short, long = (
            footprint(setup, batch=1, context=n, reserve=RESERVE) for n in (1000, 100_000)
        )
        assert short == long
        # The answer's own cache lies in whole tiles of 128 slots.
        slots = 60 + (128 if setup.method.info.answers_apart else 0)
        assert long.peak < slots * setup.config.num_layers * 2 * 2 * 8 * 4 * 1.2
