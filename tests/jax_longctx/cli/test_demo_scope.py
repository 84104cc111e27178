import functools

import jax
import numpy as np
import pytest

from jax_longctx.cli.demo_scope import WatchedReAttention, scope_shares
from jax_longctx.errors import InputError
from jax_longctx.methods import ReAttention
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.oracles.reattention import Rules, calls_of, follow
from tests.oracle import to_numpy
from tests.support import joined, random_rows, tiny_engine

SETTINGS = {"global_size": 4, "local_size": 16, "span": 3, "count": 2, "kept": 3, "chunk": 8}
RULES = Rules(g=4, w=16, m=3, k=2, kept=3, c=8)
CONTEXTS = random_rows([61, 45], seed=3)
QUESTIONS = random_rows([5, 7], seed=4)
ANSWER = 6


def expected(engine, context, question, answer):
    """The share of steps in which numpy's ReAttention attends each token of the context."""
    tokens = [*context, *question, *answer[:-1]]
    calls = calls_of(RULES, len(context), len(question), len(answer) - 1)
    trace = follow(RULES, engine.config, to_numpy(jax.device_get(engine.params)), tokens, calls)
    counts = np.zeros((engine.config.num_layers, len(context)))
    alone = trace.indices[-len(answer) :]
    for layers in alone:
        for layer, indices in enumerate(layers):
            held = np.unique(indices)
            counts[layer, held[held < len(context)]] += 1
    return counts / len(alone)


@functools.cache
def plain_answers():
    engine = tiny_engine(ReAttention(**SETTINGS), chunk=8)
    context = engine.prefill(CONTEXTS, reserve=16)
    return [
        joined(engine.stream(context, questions, max_tokens=ANSWER))
        for questions in (QUESTIONS[::-1], QUESTIONS)
    ]


@pytest.mark.parametrize(
    ("by_layer", "sizes"), [(True, {}), (False, {}), (False, {"seq": 2, "tensor": 2})]
)
@pytest.mark.slow
def test_it_answers_as_reattention_and_counts_what_was_attended(by_layer, sizes):
    method = WatchedReAttention(**SETTINGS)
    watched = tiny_engine(method, mesh=make_mesh(**sizes), chunk=8, by_layer=by_layer)
    context = watched.prefill(CONTEXTS, reserve=16)
    # The second question's counts begin anew.
    for questions, plain in zip((QUESTIONS[::-1], QUESTIONS), plain_answers(), strict=True):
        answers = joined(watched.stream(context, questions, max_tokens=ANSWER))
        assert answers == plain
        for row, asked in enumerate(zip(CONTEXTS, questions, answers, strict=True)):
            shares = expected(watched, *asked)
            np.testing.assert_allclose(scope_shares(context, row), shares)


def test_scopes_of_short_texts_and_of_other_contexts():
    engine = tiny_engine(WatchedReAttention(**SETTINGS), chunk=8)
    context = engine.prefill([text[:10] for text in CONTEXTS], reserve=16)
    with pytest.raises(InputError, match="nothing was asked of this context yet"):
        scope_shares(context)
    joined(engine.stream(context, QUESTIONS, max_tokens=ANSWER))
    assert np.all(scope_shares(context) == 1)
    with pytest.raises(InputError, match="was not read by WatchedReAttention"):
        scope_shares(tiny_engine(chunk=8).prefill([[1, 2]], reserve=4))
