"""Ring Attention against numpy and full attention, on meshes of up to 8 devices (spec: R1-R6)."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.engine.allocate import abstract_caches
from jax_longctx.engine.prefill import whole_segment
from jax_longctx.engine.runs import per_layer
from jax_longctx.methods import Full
from jax_longctx.methods.ring import Ring
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import check_rows, full_logits, texts, with_caches
from tests.support import score, tiny_engine

# Beyond three shards of four; an odd length within the second; within the first; one token.
ROWS = CONTEXTS, *_ = texts([(450, 3), (201, 2), (77, 20), (1, 1)], 3)


def engine_of(mesh, **settings):
    return tiny_engine(Ring(**settings), mesh=make_mesh(*mesh), chunk=16)


@functools.cache
def expected():
    """Logits `[B, 4, V]` of each row's question's last token and of its answer."""
    return [logits[-4:] for logits in full_logits(tiny_engine(), ROWS)]


@functools.cache
def plain():
    context = tiny_engine(Full(), chunk=64).prefill(CONTEXTS, reserve=40)
    return per_layer(context.caches)


@pytest.mark.parametrize(
    ("mesh", "order"),
    [
        ((1, 4, 1), "zigzag"),
        *(
            pytest.param(mesh, order, marks=pytest.mark.thorough)
            for mesh, order in [
                *(((1, 4, 1), "contiguous"), ((2, 2, 2), "zigzag"), ((1, 1, 1), "zigzag")),
                *(((1, 8, 1), "zigzag"), ((2, 2, 2), "contiguous"), ((1, 2, 1), "contiguous")),
            ]
        ),
    ],
)
def test_r1_r2_r4_it_is_full_attention(mesh, order):
    logits, held = with_caches(engine_of(mesh, order=order), ROWS)
    for ours, theirs in zip(held, plain(), strict=True):
        for row, tokens in enumerate(CONTEXTS):
            for name in "kv":
                both = (
                    x[row, :, : len(tokens)] for x in (getattr(ours, name), getattr(theirs, name))
                )
                np.testing.assert_allclose(*map(np.asarray, both), atol=2e-5)
    check_rows([row[-4:] for row in logits], expected())


@pytest.mark.parametrize(("order", "back"), [("contiguous", 0), ("zigzag", 2)])
def test_r6_keys_and_values_are_sent_once_less_than_there_are_shards(order, back):
    """In zigzag order twice more, back to the order of the text."""
    engine = engine_of((1, 4, 1), order=order)
    setup = engine.setup
    caches = abstract_caches(setup, 1, 512, 8)
    (segment,) = setup.method.segments(engine.setup.feed("context", 512, context=[[1] * 300]))
    total = jax.ShapeDtypeStruct((1,), jnp.int32)
    lowered = whole_segment.lower(setup, engine.params, caches, segment, total, None, "none")
    layer = lowered.as_text().count("collective_permute")
    # One function that all layers call.
    assert layer == 2 * (3 + back)


@pytest.mark.thorough
def test_a_context_can_be_empty_or_hold_an_empty_row():
    engine = engine_of((1, 2, 1))
    for contexts in ([[]], [[], CONTEXTS[1]]):
        context = engine.prefill(contexts, reserve=8)
        assert per_layer(context.caches)[0].length.tolist() == [len(row) for row in contexts]
        assert list(engine.stream(context, [[5]] * len(contexts), max_tokens=2))


def test_logits_of_a_text_are_refused():
    with pytest.raises(Exception, match="cannot score one"):
        score(engine_of((1, 2, 1)), [CONTEXTS[1]])
