"""Where ReAttention looked: its own answers, and the counts that numpy makes of its definition."""

from functools import partial

import jax
import numpy as np
import pytest

from jax_longctx.errors import InputError
from jax_longctx.methods import ReAttention
from jax_longctx.sharding import make_mesh
from jax_longctx.studies.reattention_scope import WatchedReAttention, scope_shares
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


also = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    "how",
    [{}, also({"by_layer": False}), also({"mesh": {"seq": 2}}), also({"mesh": {"tensor": 2}})],
)
@pytest.mark.slow
def test_it_answers_as_reattention_and_counts_what_was_attended(how):
    how = dict(how)
    mesh = make_mesh(**how.pop("mesh", {}))
    options = {"mesh": mesh, "chunk": 8, **how}
    watched = tiny_engine(WatchedReAttention(**SETTINGS), **options)
    plain = tiny_engine(ReAttention(**SETTINGS), **options)
    context = watched.prefill(CONTEXTS, reserve=16)
    other = plain.prefill(CONTEXTS, reserve=16)
    # The second question's counts begin anew.
    for questions in (QUESTIONS[::-1], QUESTIONS):
        answers = joined(watched.stream(context, questions, max_tokens=ANSWER))
        assert answers == joined(plain.stream(other, questions, max_tokens=ANSWER))
        for row, (text, question, answer) in enumerate(
            zip(CONTEXTS, questions, answers, strict=True)
        ):
            np.testing.assert_allclose(
                scope_shares(context, row), expected(watched, text, question, answer)
            )


def test_a_text_within_the_first_scope_is_attended_whole():
    engine = tiny_engine(WatchedReAttention(**SETTINGS), chunk=8)
    context = engine.prefill([CONTEXTS[0][:10]], reserve=16)
    joined(engine.stream(context, [QUESTIONS[0]], max_tokens=2))
    assert np.all(scope_shares(context) == 1)


def test_refuses_other_contexts_and_those_that_were_not_asked():
    engine = tiny_engine(WatchedReAttention(**SETTINGS), chunk=8)
    with pytest.raises(InputError, match="nothing was asked of this context yet"):
        scope_shares(engine.prefill([[1, 2]], reserve=4))
    with pytest.raises(InputError, match="was not read by WatchedReAttention"):
        scope_shares(tiny_engine(chunk=8).prefill([[1, 2]], reserve=4))
