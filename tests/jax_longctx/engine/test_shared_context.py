import jax
import pytest

from jax_longctx.engine import Ask, RunningBatch, Sampling
from jax_longctx.errors import CapacityError, InputError
from jax_longctx.methods import METHODS, Star, make_method
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.engine.test_running import alone, compilations, run, tokens
from tests.small_methods import small_method
from tests.support import random_rows, tiny_config, tiny_engine

# Two pages of 128 tokens are shared at most, the rest is each row's own.
CONTEXT, LONG = random_rows([300]), random_rows([700])
QUESTIONS = random_rows([5, 1, 30, 2, 9], seed=1)


def requests():
    limits = [14, 9, 5, 21, 12]
    return [
        Ask(question, Sampling(temperature=0.8, seed=limit), limit)
        for question, limit in zip(QUESTIONS, limits, strict=True)
    ]


def check_method(method, *, sizes=(1, 1, 1), context=CONTEXT, places=3, fitted=False, **options):
    engine = tiny_engine(method, chunk=64, mesh=make_mesh(*sizes), **options)
    held = engine.prefill(context, reserve=64)
    asked = requests()
    expected = [alone(engine, held, request) for request in asked]
    batch = RunningBatch(engine, places=places, reserve=64, context=held, fitted=fitted)
    found, _ = run(batch, [(held, request) for request in asked])
    assert list(map(tokens, found)) == expected
    # The context is as it was.
    assert alone(engine, held, asked[0]) == expected[0]


def test_methods_that_keep_every_key_share():
    sharing = {name for name in METHODS if small_method(name).own_tokens is not None}
    assert {"full", "dynamic-ntk", "ring", "star", "quest", "arkvale"} <= sharing
    # Priors, page caches, and flat lists.
    assert sharing.isdisjoint({"resa", "h2o"})
    assert make_method("quest", {"allocation": "psa-estimate"}).own_tokens is None


@pytest.mark.parametrize(
    ("name", "fitted"),
    [("full", False), ("dynamic-ntk", False), ("star", True), ("quest", True), ("arkvale", False)],
)
@pytest.mark.quick("full", "star")
def test_rows_over_one_context_answer_as_they_do_alone(name, fitted):
    check_method(small_method(name), fitted=fitted)


@pytest.mark.parametrize(
    ("name", "kv", "by_layer"),
    [("full", "int8", False), ("quest", "int8", True), ("arkvale", "int8", True)],
)
@pytest.mark.slow
def test_rows_over_one_context_in_8_bits(name, kv, by_layer):
    check_method(small_method(name), by_layer=by_layer, kv=kv)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("quest", {"granularity": "kv_head", "sink": 0, "local": 0}),
        (
            "quest",
            {"granularity": "layer", "sink": 20, "local": 40, "ratio": 0.2, "skip_layers": 1},
        ),
        # More sinks than slots are shared.
        ("quest", {"sink": 270, "budget": 32}),
        ("arkvale", {"page_size": 16, "digest": "sphere-max"}),
        ("arkvale", {"page_size": 16, "digest": "centroid"}),
    ],
    ids=str,
)
@pytest.mark.quick("kv_head")
def test_pages_are_chosen_for_each_row_as_alone(name, settings):
    check_method(make_method(name, {"budget": 32, "local": 16, "page_size": 8, **settings}))


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("full", {"context": random_rows([length], seed=2)}) for length in (3, 127, 256, 290)),
        # More rows than a pass takes.
        pytest.param("full", {"places": 20}, marks=pytest.mark.slow),
        # Slots of four shards part at multiples of 512.
        *(
            pytest.param(name, {"sizes": sizes, "context": LONG}, marks=pytest.mark.slow)
            for name, sizes in (("full", (1, 4, 1)), ("arkvale", (1, 2, 2)))
        ),
    ],
    ids=[*("3 tokens", "127 tokens", "256 tokens", "290 tokens"), "20 places", "seq", "tensor"],
)
def test_whatever_the_contexts_length_the_places_and_the_mesh(name, how):
    check_method(small_method(name), **how)


@pytest.mark.parametrize("by_layer", [True, False])
@pytest.mark.quick("True")
def test_the_contexts_buffers_are_shared_and_never_copied(by_layer):
    engine = tiny_engine(chunk=64, by_layer=by_layer)
    held = engine.prefill(random_rows([1200]), reserve=64)

    def addresses():
        leaves = jax.tree.leaves(held.caches)
        return [leaf.unsafe_buffer_pointer() for leaf in leaves if leaf.ndim > 2]

    batch = RunningBatch(engine, places=4, reserve=64, context=held)
    # A row has at most 128 slots of the context's, and those of question and answer.
    assert batch.resident_bytes < 4 * held.resident_bytes / 4
    before = addresses()
    for question in QUESTIONS[:4]:
        batch.join(held, Ask(question, max_tokens=20))
    batch.step(3)
    assert before and addresses() == before
    with compilations() as found:
        batch.step(2)
    assert not found


def test_the_context_may_be_asked_between_two_steps():
    engine = tiny_engine(chunk=64)
    held = engine.prefill(CONTEXT, reserve=64)
    request, other = Ask(QUESTIONS[0], max_tokens=20), Ask(QUESTIONS[2], max_tokens=15)
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
    assert tokens(found) == expected


@pytest.mark.slow
def test_rows_share_the_layers_without_windows():
    check_method(small_method("full"), config=tiny_config(windows=(8, None)))


@pytest.mark.slow
def test_what_cannot_share_is_named():
    full, blocks = tiny_engine(chunk=64), Star(block=128, decode=small_method("quest"))
    for engine, texts, said in [
        (tiny_engine(small_method("h2o")), CONTEXT, "under this method rows cannot share"),
        (tiny_engine(small_method("quest"), offload="host"), CONTEXT, "in the host's memory"),
        (
            tiny_engine(config=tiny_config(windows=(8, 9))),
            CONTEXT,
            "where every layer has a sliding window",
        ),
        (full, random_rows([9, 8]), "this context has 2 texts, the mesh data=1"),
        (tiny_engine(blocks, mesh=make_mesh(1, 2, 1)), CONTEXT, "seq=1: this one has seq=2"),
    ]:
        held = engine.prefill(texts, reserve=64)
        with pytest.raises(InputError, match=said):
            RunningBatch(engine, places=2, reserve=64, context=held)
    held, other = (full.prefill(CONTEXT, reserve=64) for _ in range(2))
    batch = RunningBatch(full, places=2, reserve=64, context=held)
    with pytest.raises(InputError, match="go on from another context"):
        batch.join(other, Ask(QUESTIONS[0]))
    with pytest.raises(CapacityError, match="need 129 slots, a place of this batch reserves 128"):
        batch.fits(held, Ask(QUESTIONS[0], max_tokens=124))
