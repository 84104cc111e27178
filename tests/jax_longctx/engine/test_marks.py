import functools

import numpy as np
import pytest

from jax_longctx.engine.marks import check_where, weights_of
from jax_longctx.errors import InputError
from jax_longctx.evaluation.agreement import attention_weights
from jax_longctx.sharding import make_mesh
from tests.small_methods import KINDS, small_method
from tests.support import joined, random_rows, tiny_engine

# So short that the small methods leave nothing out.
CONTEXTS = random_rows([28, 19], seed=3)
QUESTIONS = random_rows([5, 7], seed=4)
ANSWERS = random_rows([4, 4], seed=5)
SPANS = [(3, 27), (0, 19)]
WIDTH = 2


@functools.cache
def dense(alone=False):
    """The squares of full attention's weights, by layer and part, of each row.

    Those of the question's last token alone, or of the answer's too.
    """
    engine, found = tiny_engine(chunk=16), []
    for context, question, answer, (first, last) in zip(
        CONTEXTS, QUESTIONS, ANSWERS, SPANS, strict=True
    ):
        text = [*context, *question, *answer]
        weights = attention_weights(engine, text, queries=len(answer))[..., first:last]
        weights = weights[:, :, :1] if alone else weights
        parts = -(-(last - first) // WIDTH)
        short = parts * WIDTH - (last - first)
        padded = np.pad(weights, [(0, 0)] * 3 + [(0, short)])
        found.append((padded.reshape(*padded.shape[:3], parts, WIDTH).sum(-1) ** 2).sum((1, 2)))
    return found


def check(engine):
    context = engine.prefill(CONTEXTS, reserve=24, questions=QUESTIONS)
    before = joined(engine.stream(context, QUESTIONS, max_tokens=3))
    found = weights_of(engine, context, QUESTIONS, ANSWERS, SPANS, width=WIDTH)
    alone = engine.method.answers_apart
    for each, expected, (first, _) in zip(found, dense(alone), SPANS, strict=True):
        assert (each.first, each.width) == (first, WIDTH)
        np.testing.assert_allclose(each.read[:, : expected.shape[1]], expected, atol=1e-4)
        assert not each.read[:, expected.shape[1] :].any()
    # The context is as it was.
    assert joined(engine.stream(context, QUESTIONS, max_tokens=3)) == before


@pytest.mark.parametrize("by_layer", [True, False])
def test_an_answers_weights_are_those_of_its_tokens_attention(by_layer):
    check(tiny_engine(chunk=16, by_layer=by_layer))


# InfLLM gives all far tokens one position, so that its weights are others; two are refused.
OTHERS = ("infllm", "citrus", "r-kv")


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow) for x in KINDS if x not in OTHERS],
)
def test_every_kind_of_method_shows_them(name):
    check(tiny_engine(small_method(name), chunk=16))


@pytest.mark.parametrize("name", ["citrus", "knorm", "r-kv", "duo-attention", "knorm > quest"])
def test_what_cannot_say_where_is_refused_before_anything_is_read(name):
    why = "citrus reads a text for one question" if name == "citrus" else "do not say which tokens"
    with pytest.raises(InputError, match=f"nobody can say where .*{why}"):
        check_where(tiny_engine(small_method(name), chunk=16))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["h2o", "streaming-llm", "snapkv", "snapkv > quest", "star"])
def test_of_a_text_of_which_tokens_left_those_that_stay_are_named(name):
    engine = tiny_engine(small_method(name), chunk=16)
    (text,) = random_rows([120], seed=6)
    context = engine.prefill([text], reserve=24)
    (found,) = weights_of(engine, context, QUESTIONS[:1], ANSWERS[:1], [(0, 120)])
    assert found.read.any(axis=1).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["full", "reattention", "h2o"])
def test_they_are_the_same_on_a_mesh_and_in_8_bits(name):
    method = small_method(name)
    check(tiny_engine(method, chunk=16, mesh=make_mesh(seq=2, tensor=2)))
    engine = tiny_engine(method, chunk=16, kv="int8")
    context = engine.prefill(CONTEXTS, reserve=24)
    found = weights_of(engine, context, QUESTIONS, ANSWERS, SPANS, width=WIDTH)
    for each, expected in zip(found, dense(), strict=True):
        assert np.abs(each.read[:, : expected.shape[1]] - expected).max() < 0.05


def test_a_context_of_another_method_is_refused():
    context = tiny_engine(chunk=16).prefill(CONTEXTS, reserve=24)
    with pytest.raises(InputError, match="ask it under the method that made it"):
        weights_of(tiny_engine(small_method("h2o"), chunk=16), context, QUESTIONS, ANSWERS, SPANS)
