"""Rows that share a context's keys and values answer as rows that each have their own."""

import jax
import pytest

from jax_longctx.contract import own_tokens
from jax_longctx.engine import Request, RunningBatch, Sampling
from jax_longctx.errors import CapacityError, InputError
from jax_longctx.methods import METHODS, ArkVale, Quest, Star, make_method
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.engine.test_running import alone, compilations, run
from tests.small_methods import small_method
from tests.support import random_rows, tiny_config, tiny_engine

CONFIG = tiny_config(num_layers=2)
# Two pages of 128 tokens are shared at most, the rest is each row's own.
CONTEXT = random_rows([300])
QUESTIONS = random_rows([5, 1, 30, 2, 9], seed=1)
SHARING = [name for name in METHODS if own_tokens(small_method(name)) is not None]


def requests():
    limits = [14, 9, 5, 21, 12]
    return [
        Request(question, Sampling(temperature=0.8, seed=limit), limit)
        for question, limit in zip(QUESTIONS, limits, strict=True)
    ]


def check_method(method, *, by_layer=None, mesh=None, context=CONTEXT, places=3, kv=None):
    engine = tiny_engine(method, config=CONFIG, chunk=64, by_layer=by_layer, mesh=mesh, kv=kv)
    held = engine.prefill(context, reserve=64)
    asked = requests()
    expected = [alone(engine, held, request) for request in asked]
    batch = RunningBatch(engine, places=places, reserve=64, context=held)
    found, _ = run(batch, [(held, request) for request in asked])
    assert [[chosen.token for chosen in row] for row in found] == expected
    # The context is as it was.
    assert alone(engine, held, asked[0]) == expected[0]


def test_methods_that_keep_every_key_share():
    assert {"full", "dynamic-ntk", "ring", "star", "quest", "arkvale"} <= set(SHARING)
    # Flat lists, priors, and page caches.
    psa = make_method("quest", {"allocation": "psa-estimate"})
    assert all(own_tokens(x) is None for x in (psa, small_method("resa"), small_method("h2o")))
    assert own_tokens(small_method("arkvale-paged")) is None


@pytest.mark.parametrize("name", ["full", "dynamic-ntk", "star", "quest", "arkvale"])
@pytest.mark.quick("full", "quest")
def test_rows_over_one_context_answer_as_they_do_alone(name):
    check_method(small_method(name))


@pytest.mark.parametrize(
    ("name", "kv", "by_layer"),
    [("full", "int8", False), ("quest", "int8", True), ("arkvale", "int8", True)],
)
@pytest.mark.quick("full")
def test_rows_over_one_context_in_8_bits(name, kv, by_layer):
    check_method(small_method(name), by_layer=by_layer, kv=kv)


@pytest.mark.parametrize(
    "settings",
    [
        {"granularity": "kv_head", "sink": 0, "local": 0},
        {"granularity": "layer", "whole_pages": True, "sink": 20, "local": 40}
        | {"ratio": 0.2, "skip_layers": 1, "min_pages": 3},
        # More sinks than slots are shared.
        {"sink": 270, "count_fixed": True, "budget": 330},
    ],
    ids=str,
)
@pytest.mark.quick("kv_head")
def test_pages_are_chosen_for_each_row_as_alone(settings):
    check_method(Quest(**{"budget": 32, "page_size": 8, "local": 16, **settings}))


@pytest.mark.parametrize("digest", ["sphere-max", "centroid"])
@pytest.mark.slow
def test_digests_of_any_form_are_shared(digest):
    settings = {"budget": 32, "page_size": 16, "local": 16, "digest": digest}
    check_method(ArkVale(**settings), by_layer=False)


@pytest.mark.parametrize("length", [3, 127, 256, 290])
def test_whatever_the_contexts_length(length):
    check_method(small_method("full"), context=random_rows([length], seed=2))


@pytest.mark.slow
def test_more_rows_than_a_pass_takes():
    check_method(small_method("full"), places=20)


@pytest.mark.parametrize(("name", "sizes"), [("full", (1, 4, 1)), ("arkvale", (1, 2, 2))])
@pytest.mark.slow
def test_on_a_mesh(name, sizes):
    # Slots of four shards part at multiples of 512.
    check_method(small_method(name), mesh=make_mesh(*sizes), context=random_rows([700]))


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.quick("True")
def test_the_contexts_buffers_are_shared_and_never_copied(by_layer):
    engine = tiny_engine(config=CONFIG, chunk=64, by_layer=by_layer)
    held = engine.prefill(random_rows([1200]), reserve=64)

    def addresses():
        return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(held.caches)]

    def large(before, after):
        """Those of keys and values."""
        leaves = jax.tree.leaves(held.caches)
        return [old == new for old, new, x in zip(before, after, leaves, strict=True) if x.ndim > 2]

    batch = RunningBatch(engine, places=4, reserve=64, context=held)
    # A row has at most 128 slots of the context's, and those of question and answer.
    assert batch.resident_bytes < 4 * held.resident_bytes / 4
    before = addresses()
    for question in QUESTIONS[:4]:
        batch.join(held, Request(question, max_tokens=20))
    batch.step(3)
    shared = large(before, addresses())
    assert shared and all(shared)
    with compilations() as found:
        batch.step(2)
    assert not found


def test_the_context_may_be_asked_between_two_steps():
    engine = tiny_engine(config=CONFIG, chunk=64)
    held = engine.prefill(CONTEXT, reserve=64)
    request, other = Request(QUESTIONS[0], max_tokens=20), Request(QUESTIONS[2], max_tokens=15)
    expected, beside = alone(engine, held, request), alone(engine, held, other)
    batch = RunningBatch(engine, places=2, reserve=64, context=held)
    place, first = batch.join(held, request)
    found = [first, *batch.step(4)[place]]
    assert alone(engine, held, other) == beside
    found += batch.step(4)[place]
    # A long question makes the context's cache grow.
    long = random_rows([200], seed=3)
    assert len(list(engine.stream(held, long, max_tokens=3))) > 0
    found += batch.step(32)[place]
    assert [chosen.token for chosen in found] == expected


@pytest.mark.slow
def test_what_cannot_share_is_named():
    engine = tiny_engine(small_method("h2o"), config=CONFIG, chunk=16)
    held = engine.prefill(CONTEXT, reserve=64)
    with pytest.raises(InputError, match="under this method rows cannot share a context"):
        RunningBatch(engine, places=2, reserve=64, context=held)
    windows = tiny_config(num_layers=2, windows=(8, None))
    engine = tiny_engine(config=windows, chunk=16)
    with pytest.raises(InputError, match="layers with a sliding window"):
        RunningBatch(engine, places=2, reserve=64, context=engine.prefill(CONTEXT, reserve=64))
    engine = tiny_engine(config=CONFIG, chunk=64)
    two = engine.prefill(random_rows([9, 8]), reserve=8)
    with pytest.raises(InputError, match="this context has 2 texts, the mesh data=1"):
        RunningBatch(engine, places=2, reserve=64, context=two)
    held, other = (engine.prefill(CONTEXT, reserve=64) for _ in range(2))
    batch = RunningBatch(engine, places=2, reserve=64, context=held)
    blocks = Star(block=128, decode=small_method("quest"))
    over_seq = tiny_engine(blocks, config=CONFIG, mesh=make_mesh(1, 2, 1))
    spread = over_seq.prefill(CONTEXT, reserve=64)
    with pytest.raises(InputError, match="on a mesh with seq=1: this one has seq=2"):
        RunningBatch(over_seq, places=2, reserve=64, context=spread)
    with pytest.raises(InputError, match="go on from another context"):
        batch.join(other, Request(QUESTIONS[0]))
    with pytest.raises(CapacityError, match="need 129 slots, a place of this batch reserves 128"):
        batch.fits(held, Request(QUESTIONS[0], max_tokens=124))
