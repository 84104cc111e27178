import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.caches import AppendCache
from jax_longctx.contract import Feed
from jax_longctx.methods import Quest, Resa
from jax_longctx.parts import residual
from jax_longctx.parts.appending import Exact
from jax_longctx.sharding import make_mesh
from pallas_kernels.common import Capped
from tests.jax_longctx.methods.harness import oracle_params, row_logits, texts
from tests.jax_longctx.methods.oracles.selection import decode_logits
from tests.jax_longctx.methods.selecting import (
    HEADS,
    KV_HEADS,
    LAMS,
    WIDTH,
    case,
    filled,
    layer_shape,
    on_one_device,
    plain_context,
    step,
)
from tests.jax_longctx.methods.test_refusals import made
from tests.jax_longctx.methods.test_selection import CASES, full, prior_of, row_of
from tests.support import joined, tiny_config, tiny_engine

CHUNK = 8
# Rows that reach a second shard's slots (128 a shard) in the answer and in the question, one that
# is attended whole, one without a context. One question is longer than a chunk, so that rows'
# questions end in different segments.
ROWS = CONTEXTS, QUESTIONS, ANSWERS = texts([(122, 3), (124, 11), (7, 5), (0, 2)], 7)
ONE_LAYER = tiny_config(num_layers=1)
# Method, its settings beside `FIXED`, what it ranks by, mesh.
FIXED = "sink=2 local=5"
MODELS = {
    "arkvale": ("arkvale", "ratio=0.3 page_size=4 digest=sphere-mean", "arkvale", (1, 4, 1)),
    "resa": ("resa", "budget=8 page_size=4 lam=0.5", "quest", (1, 1, 1)),
    "resa ada": (
        "resa",
        "budget=8 page_size=4 selector=arkvale granularity=kv_head allocation=ada-floor",
        *("arkvale", (2, 2, 2)),
    ),
}


@functools.cache
def engine_of(model):
    name, settings, _, sizes = MODELS[model]
    method = made(name, f"{settings} {FIXED}")
    return tiny_engine(method, config=ONE_LAYER, mesh=make_mesh(*sizes), chunk=CHUNK)


# What quest does alone, it does in `resa` too.
@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=() if name == "resa" else pytest.mark.thorough) for name in MODELS],
)
def test_x21_rs_7_rs_8_logits_of_every_step_equal_numpy(model):
    """Whatever the chunks, and on any mesh; RESA's p0 and mu_k grow as if made anew."""
    engine, last = engine_of(model), []
    logits = row_logits(engine, ROWS, lambda step: last.append(step.caches))
    cache, shares = last[-1][0], []
    for row, (context, question, answer) in enumerate(zip(*ROWS, strict=True)):
        prompt, numpys = context + question, (engine.config, oracle_params(engine))
        expected, kept = decode_logits(MODELS[model][2], engine.method, *numpys, prompt, answer)
        np.testing.assert_allclose(logits[row][-8:], expected, atol=1e-4)
        np.testing.assert_array_equal(cache.kept[row], kept[0])
        assert int(cache.steps[row]) == len(answer)
        shares.append(kept[0] / len(answer) / (len(prompt) + len(answer)))
    assert (shares[0] < 0.6).any(), "much must be left out"


def test_a_prompts_last_token_alone_is_a_question():
    """`generate` feeds it so; the prior must be made after it, and with it."""
    engine, prompts = engine_of("resa"), [context or [1] for context in CONTEXTS]
    answers = joined(engine.generate(prompts, max_tokens=9))
    numpys = engine.config, oracle_params(engine)
    for prompt, answer in zip(prompts, answers, strict=True):
        logits, _ = decode_logits("quest", engine.method, *numpys, prompt, answer[:-1])
        assert logits.argmax(-1).tolist() == answer


def test_only_segments_that_end_a_question_make_the_prior():
    question = Feed("question", 8, question=[[1] * 20, [2] * 17])
    context = Feed("context", 8, context=[[1] * 20, [2] * 17])
    method = Resa()
    assert [segment.variant for segment in method.segments(question)] == ["", "", "ends"]
    assert [segment.variant for segment in method.segments(context)] == ["", "", ""]


RESA_CASES = [
    "resa quest",
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("resa arkvale", "resa ada")),
]
GIVEN = case((50, 33, 9, 64), answered=2)


@pytest.mark.parametrize("name", RESA_CASES)
def test_rs_4_the_mean_query_gets_full_attention(name):
    given = GIVEN._replace(mean_q=GIVEN.q)
    got = step(*(CASES[name][0], given, CASES[name][1]))
    for row in range(4):
        np.testing.assert_allclose(got.swept[row, :, -1], full(given, row), atol=5e-5)


def test_rs_5_equal_keys_get_full_attention():
    given = GIVEN._replace(k=np.broadcast_to(GIVEN.k[:, :1], GIVEN.k.shape).copy())
    got = step(CASES["resa quest"][0], given)
    for row in range(4):
        np.testing.assert_allclose(got.swept[row, :, -1], full(given, row), atol=5e-5)


def test_equal_keys_get_their_capped_scores():
    rng, ctx = np.random.default_rng(6), plain_context()
    ctx = dataclasses.replace(ctx, scale=Capped(WIDTH**-0.5, 1.5))
    q, mean = (jnp.asarray(3 * rng.normal(size=(1, HEADS, WIDTH)), jnp.float32) for _ in range(2))
    key = jnp.asarray(rng.normal(size=(1, KV_HEADS, 1, WIDTH)), jnp.float32)
    background = residual.empty_background(layer_shape(q, key))
    sums = {"key_sum": 9 * key[:, :, 0], "counted": jnp.array([9])}
    background = dataclasses.replace(background, mean=mean, **sums)
    own = np.repeat(np.asarray(key[0, :, 0]), HEADS // KV_HEADS, axis=0)

    def score(query):
        return 1.5 * np.tanh((np.asarray(query[0]) * own).sum(-1) * WIDTH**-0.5 / 1.5)

    said = score(mean) + residual.prior_of(background, q[:, None], ctx).bias[0]
    np.testing.assert_allclose(said, score(q), atol=1e-6)


def test_rs_6_rs_12_what_the_prior_says_of_a_key():
    """Right in the mean; wrong for a key by what query and key differ from their means by."""
    got = step(CASES["resa quest"][0], GIVEN)
    for row in range(4):
        q, k, _ = row_of(GIVEN, row)
        k = np.repeat(k, HEADS // KV_HEADS, axis=1)
        true = np.einsum("nh,snh->ns", q, k) * WIDTH**-0.5
        said = np.einsum("nh,snh->ns", got.mean_q[row], k) * WIDTH**-0.5 + got.bias[row][:, None]
        np.testing.assert_allclose(said.mean(1), true.mean(1), atol=2e-5)
        away_q, away_k = q - GIVEN.mean_q[row], k - k.mean(0)
        error = np.einsum("nh,snh->ns", away_q, away_k) * WIDTH**-0.5
        np.testing.assert_allclose(true - said, error, atol=5e-5)
        p0, _ = prior_of(GIVEN, row)
        np.testing.assert_allclose(got.prior_lse[row], np.log(np.exp(p0).sum(1)), atol=2e-5)


def test_rs_11_shifting_every_key_changes_nothing():
    shift = np.random.default_rng(5).normal(size=WIDTH).astype(np.float32)
    method = CASES["resa quest"][0]
    got, shifted = step(method, GIVEN), step(method, GIVEN._replace(k=GIVEN.k + shift))
    np.testing.assert_array_equal(got.kept, shifted.kept)
    np.testing.assert_allclose(shifted.swept, got.swept, atol=1e-4)
    assert got.swept.shape[2] == len(LAMS)


def test_rs_7_growth():
    ctx, given = plain_context(), case((40, 21), answered=3)
    base = CASES["resa quest"][0].base
    began, stopped = given.prompts, given.prompts + np.array([3, 2], np.int32)

    def body(q, k, v, mean_q):
        prompts, lengths = jnp.asarray(began), jnp.asarray(stopped)
        tokens = jnp.swapaxes(k, 1, 2)

        def begin(length):
            background = residual.empty_background(layer_shape(q, k))
            queries = jnp.repeat(tokens, HEADS // KV_HEADS, axis=2)
            seen = residual.observe(background, queries, tokens, length, length)
            # mu_q stays the prompt's mean whatever follows.
            seen = dataclasses.replace(seen, query_sum=mean_q * length[:, None, None])
            store = AppendCache(k, v, length, length, length, length)
            return residual.begin_answer(seen, store, jnp.ones(2, bool), ctx)

        def grow(background):
            for i in range(3):
                slot = (prompts + i)[:, None, None, None]
                new = (jnp.take_along_axis(jnp.swapaxes(x, 1, 2), slot, axis=1) for x in (k, v))
                # The second row stops before its last token.
                valid = jnp.array([1, i < 2], jnp.int32)
                new_k, new_v = new
                length = background.counted + valid
                background = residual.observe(background, None, new_k, valid, length)
                background = residual.grow(background, new_k, new_v, valid, ctx)
            return background

        def answer(background):
            cache = filled(base, q, k, v, lengths, prompts)
            prior = residual.prior_of(background, q[:, None], ctx)
            chosen = base.attend_selected(q[:, None], cache, ctx, prior)
            everything = jnp.zeros(q.shape[:2], bool)
            return residual.combine(chosen, prior, everything, lam=0.7)

        each = begin(lengths), grow(begin(prompts))
        return each, [answer(background)[0] for background in each]

    k, v = (np.swapaxes(x, 1, 2) for x in (given.k, given.v))
    (anew, grown), outputs = on_one_device(body)(given.q, k, v, given.mean_q)
    for field in ("mean", "lse", "out"):
        np.testing.assert_allclose(getattr(grown, field), getattr(anew, field), atol=2e-5)
    np.testing.assert_allclose(grown.key_sum, anew.key_sum, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(grown.counted, stopped)
    np.testing.assert_allclose(outputs[1], outputs[0], atol=2e-5)


@pytest.mark.parametrize("method", [Quest(), Resa()], ids=["quest", "resa"])
def test_skipped_layers_stay_exact(method):
    skipping = dataclasses.replace(method, skip_layers=1)
    assert method.of_layer(0, 2) is method and skipping.of_layer(1, 2) is skipping
    assert skipping.of_layer(0, 2) == Exact()
