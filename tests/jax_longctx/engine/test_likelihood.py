import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from jax_longctx.engine import scoring
from jax_longctx.engine.scoring import loglikelihoods
from jax_longctx.errors import InputError
from jax_longctx.models.rope import RopeConfig
from jax_longctx.sharding import make_mesh
from tests.oracle import causal_attend, forward, to_numpy
from tests.small_methods import KINDS, small_method
from tests.support import joined, random_rows, score, tiny_config, tiny_engine

WAYS = ["decode", "question", "context"]
LENGTHS, AFTER = [70, 1, 20], [9, 40, 1]
CONTEXTS, CONTINUATIONS = random_rows(LENGTHS), random_rows(AFTER, seed=1)
ONE_LAYER = tiny_config(num_layers=1)
OF_BLOCKS = tiny_config(num_layers=1, norm_eps=2e-5)
# Smaller caches for an answer, and steps of two kinds; the others are `thorough`.
MARKS = {"snapkv": (), "refreshkv": pytest.mark.slow}
EVERY = [pytest.param(name, marks=MARKS.get(name, pytest.mark.thorough)) for name in KINDS]
# The authors' mask may show another token. A decode step has one token, and none after it.
WAYS_OF_EVERY = [
    pair
    for pair in itertools.product([*KINDS, "citrus-standard"], WAYS)
    if pair[1] != "decode" or pair[0] in MARKS
]


@functools.cache
def engine_of(name="full", mesh=(1, 1, 1), config=ONE_LAYER):
    return tiny_engine(small_method(name), config=config, chunk=16, mesh=make_mesh(*mesh))


def dense(engine, before, after):
    """Log-probabilities of a continuation and whether each was the best, by numpy."""
    params = to_numpy(jax.device_get(engine.params))
    logits = forward(engine.config, params, [*before, *after], causal_attend(1e4))
    logits = logits[len(before) - 1 : -1]
    best = logits.max(-1, keepdims=True)
    logprobs = logits - best - np.log(np.exp(logits - best).sum(-1, keepdims=True))
    return logprobs[np.arange(len(after)), after], logits.argmax(-1) == after


@pytest.mark.parametrize("through", ["decode", "context"])
def test_dynamic_ntk_scores_as_one_forward_over_the_tokens_that_are_fed(through):
    """The last token is only predicted: rotary embedding does not count it."""
    rope = RopeConfig(kind="default", theta=1e4, trained_length=16)
    engine = tiny_engine(
        small_method("dynamic-ntk"), config=tiny_config(num_layers=1, rope=rope), chunk=16
    )
    before, after = CONTEXTS[2], CONTINUATIONS[0]
    (found,) = loglikelihoods(engine, [before], [after], through=through)
    logits = score(engine, [[*before, *after[:-1]]])[0][len(before) - 1 :]
    expected = np.asarray(jax.nn.log_softmax(logits))[np.arange(len(after)), after]
    np.testing.assert_allclose(found.logprobs, expected, atol=1e-5)


@pytest.mark.parametrize("through", WAYS)
@pytest.mark.parametrize(
    "mesh", [(1, 1, 1), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str
)
def test_full_attention_scores_as_a_dense_pass(through, mesh, monkeypatch):
    # Several blocks of logits, the last of which is not full; in a model that no other test has, so
    # that nothing else runs the programs traced with them.
    monkeypatch.setattr(scoring, "LOGITS", 3 * 4 * 64)
    engine = engine_of(mesh=mesh, config=OF_BLOCKS)
    # A continuation that is greedy, and one that is but for its last token.
    answer = joined(engine.generate([CONTEXTS[0]], max_tokens=6))[0]
    contexts = [*CONTEXTS, CONTEXTS[0]]
    continuations = [*CONTINUATIONS, answer]
    found = loglikelihoods(engine, contexts, continuations, through=through)
    for before, after, scores in zip(contexts, continuations, found, strict=True):
        logprobs, greedy = dense(engine, before, after)
        np.testing.assert_allclose(scores.logprobs, logprobs, atol=1e-4)
        np.testing.assert_array_equal(scores.greedy, greedy)
        assert scores.total == pytest.approx(logprobs.sum(), abs=1e-3)
    assert [scores.is_greedy for scores in found] == [False, False, False, True]


@pytest.mark.parametrize("name", EVERY)
def test_what_a_method_answers_is_what_it_finds_most_likely(name):
    engine, questions = engine_of(name), random_rows([3, 2, 5], seed=1)
    contexts = random_rows([90, 40, 17])
    context = engine.prefill(contexts, reserve=16, questions=questions)
    answers = joined(engine.stream(context, questions, max_tokens=9))
    answers = [answer[: 9 - 3 * row] for row, answer in enumerate(answers)]
    options = {"questions": questions, "total": list(map(len, contexts))}
    found = loglikelihoods(engine, contexts, answers, **options)
    assert [len(scores.greedy) for scores in found] == [9, 6, 3]
    assert all(scores.is_greedy for scores in found)
    worse = [[*answer[:-1], (answer[-1] + 1) % 64] for answer in answers]
    changed = loglikelihoods(engine, contexts, worse, **options)
    for one, other in zip(found, changed, strict=True):
        np.testing.assert_array_equal(other.greedy, [*one.greedy[:-1], False])
        np.testing.assert_allclose(other.logprobs[:-1], one.logprobs[:-1], atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "through"), WAYS_OF_EVERY)
def test_no_token_helps_to_predict_an_earlier_one(name, through):
    engine = engine_of(name)
    before, (after,) = random_rows([90]), random_rows([30], seed=1)
    asked = through == "context" and engine.method.info.needs_question
    options = {"through": through, "questions": [[1, 2, 3]] if asked else None}

    def scores(kept):
        row = after[:kept] + [(token + 7) % 64 for token in after[kept:]]
        return loglikelihoods(engine, before, [row], **options)[0].logprobs

    try:
        whole = scores(30)
    except InputError as error:
        assert through != "decode"
        said = {"chooses what stays by the whole question", "attend together", "side by side"}
        assert any(words in str(error) for words in said)
        if through == "context" and name in ("reattention", "infllm"):
            assert "attend together" in str(error)
        return
    assert (name, through) not in (("reattention", "context"), ("infllm", "context"))
    for kept in (1, 11):
        found = scores(kept)
        np.testing.assert_allclose(found[:kept], whole[:kept], atol=1e-5)
        assert np.abs(found - whole).max() > 1e-2


@pytest.mark.thorough
@pytest.mark.parametrize("name", KINDS)
def test_ragged_rows_score_as_they_do_alone(name):
    engine = engine_of(name)
    together = loglikelihoods(engine, CONTEXTS, CONTINUATIONS)
    for before, after, scores in zip(CONTEXTS, CONTINUATIONS, together, strict=True):
        alone = loglikelihoods(engine, [before], [after])[0]
        np.testing.assert_allclose(scores.logprobs, alone.logprobs, atol=1e-5)


def test_logits_are_made_a_few_columns_at_a_time():
    """128 rows of 4,096 tokens and a vocabulary of 64: 32 Mi logits, in blocks of 16 Mi."""
    engine = engine_of()
    hidden = jax.ShapeDtypeStruct((128, 4096, 32), jnp.float32)
    targets = jax.ShapeDtypeStruct((128, 4096), jnp.int32)
    traced = jax.make_jaxpr(functools.partial(scoring.token_scores, engine.setup.ends))(
        engine.params, hidden, targets
    )
    sizes = _sizes(traced.jaxpr)
    assert scoring.LOGITS in sizes and max(sizes) == scoring.LOGITS


def _sizes(jaxpr):
    """Elements of every intermediate array, in programs within programs too."""
    found = {var.aval.size for eqn in jaxpr.eqns for var in eqn.outvars}
    for eqn in jaxpr.eqns:
        for inner in jaxprs_in_params(eqn.params):
            found |= _sizes(inner)
    return found


def test_bad_input_is_named_and_a_question_is_given_where_it_is_needed():
    for contexts, continuations, questions, said in [
        ([[1], []], [[2], [2]], None, "row 1 has 0 tokens before the 1 that are scored"),
        ([[1]], [[]], None, "row 0 has 1 tokens before the 0 that are scored"),
        ([[1]], [[2], [3]], None, "1 contexts need as many continuations and questions, 2 and 1"),
        ([[1]], [[2]], [[1], [2]], "1 and 2 given"),
        ([[1, 2]] * 2, [[3]] * 2, [[4], []], "question of row 1 is empty"),
        ([[1]], [[64]], None, "token id 64"),
    ]:
        with pytest.raises(InputError, match=said):
            loglikelihoods(engine_of(), contexts, continuations, questions=questions)
    engine = engine_of("citrus")
    with pytest.raises(InputError, match="needs the question at prefill"):
        loglikelihoods(engine, CONTEXTS, CONTINUATIONS, through="context")
    asked = [[5, 6]] * 3
    found = loglikelihoods(engine, CONTEXTS, CONTINUATIONS, through="context", questions=asked)
    # The question is no part of the text: what fits the cache is full attention's.
    logprobs, _ = dense(engine, CONTEXTS[2], CONTINUATIONS[2])
    np.testing.assert_allclose(found[2].logprobs, logprobs, atol=1e-4)
