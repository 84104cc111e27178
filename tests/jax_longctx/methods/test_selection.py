import dataclasses

import numpy as np
import pytest

from jax_longctx.methods.arkvale import ArkVale
from jax_longctx.methods.ideal_topk import IdealTopK
from jax_longctx.methods.quest import Quest
from jax_longctx.methods.resa import Resa
from jax_longctx.parts.selecting import Selecting, SelectingPages
from tests.jax_longctx.methods.oracles.selection import resa_output, selected, softmax_output
from tests.jax_longctx.methods.selecting import (
    KV_HEADS,
    LAMS,
    WIDTH,
    case,
    filled,
    on_one_device,
    plain_context,
    step,
)

FIXED = {"sink": 3, "local": 5}
QUEST = Quest(budget=12, page_size=4, **FIXED)
ARKVALE = ArkVale(budget=12, page_size=4, **FIXED)
IDEAL = IdealTopK(budget=9, **FIXED)
ADA = dataclasses.replace(QUEST, granularity="kv_head", allocation="ada-floor")
PSA = dataclasses.replace(QUEST, budget=40, allocation="psa-oracle", epsilon=0.6)
RESA = Resa(budget=12, page_size=4, lam=0.5, **FIXED)
ONE, CUBE, SEQ = (1, 1, 1), (2, 2, 2), (1, 4, 1)
CASES = {
    "quest": (QUEST, ONE),
    "quest kv_head ratio": (dataclasses.replace(QUEST, granularity="kv_head", ratio=0.29), CUBE),
    "quest nothing fixed": (dataclasses.replace(QUEST, sink=0, local=0), SEQ),
    "arkvale": (ARKVALE, CUBE),
    "ideal": (IDEAL, ONE),
    "ideal kv_head": (dataclasses.replace(IDEAL, granularity="kv_head"), SEQ),
    "ada floor": (ADA, CUBE),
    "ada blend": (dataclasses.replace(ADA, allocation="ada-blend"), ONE),
    "ada arkvale": (
        dataclasses.replace(ARKVALE, granularity="kv_head", allocation="ada-floor"),
        ONE,
    ),
    "psa oracle": (PSA, SEQ),
    "psa estimate": (
        dataclasses.replace(IDEAL, budget=40, allocation="psa-estimate", epsilon=0.7),
        ONE,
    ),
    "resa quest": (RESA, ONE),
    "resa arkvale": (dataclasses.replace(RESA, selector="arkvale", granularity="layer"), SEQ),
    "resa ada": (
        dataclasses.replace(RESA, granularity="kv_head", allocation="ada-floor"),
        CUBE,
    ),
}
# Cases whose parts the others have are `slow`.
MORE = ("ideal", "ada blend", "ada arkvale", "resa arkvale")
EACH = [pytest.param(name, marks=pytest.mark.slow if name in MORE else ()) for name in CASES]
GIVEN = case((50, 33, 9, 64), answered=2)


def settings_of(method):
    return method.base if isinstance(method, Resa) else method


KINDS = {Quest: "quest", ArkVale: "arkvale", IdealTopK: "ideal"}


def row_of(given, row):
    n = given.lengths[row]
    return (x.astype(float) for x in (given.q[row], given.k[row, :n], given.v[row, :n]))


def prior_of(given, row):
    """p0 `[N, n]` and bias `[N]` of a row."""
    q, k, _ = row_of(given, row)
    k = np.repeat(k, len(q) // KV_HEADS, axis=1)
    mean_q = given.mean_q[row].astype(float)
    p0 = np.einsum("nh,snh->ns", mean_q, k) * WIDTH**-0.5
    return p0, ((q - mean_q) * k.mean(0)).sum(1) * WIDTH**-0.5


def full(given, row):
    q, k, v = row_of(given, row)
    return softmax_output(q, k, v, np.ones((len(q), len(k)), bool))


@pytest.mark.parametrize("name", EACH)
def test_x22_a_step_equals_numpy_on_each_row_alone(name):
    method, sizes = CASES[name]
    got = step(method, GIVEN, sizes)
    shares = []
    for row in range(4):
        prior = prior_of(GIVEN, row)
        q, k, v = row_of(GIVEN, row)
        prompt = int(GIVEN.prompts[row])
        kept = selected(KINDS[type(settings_of(method))], settings_of(method), q, k, prompt)
        np.testing.assert_array_equal(got.kept[row], kept.sum(1))
        shares.extend(kept.mean(1))
        if not isinstance(method, Resa):
            np.testing.assert_allclose(got.out[row], softmax_output(q, k, v, kept), atol=2e-5)
            logits = np.einsum("nh,snh->ns", q, np.repeat(k, 2, 1)) * WIDTH**-0.5
            lse = np.log(np.where(kept, np.exp(logits), 0).sum(1))
            np.testing.assert_allclose(got.lse[row], lse, atol=2e-5)
            continue
        # RS-1, RS-2, RS-9, RS-10, X16: every factor of the residual.
        for i, lam in enumerate(LAMS):
            out = resa_output(q, k, v, kept, *prior, lam)
            np.testing.assert_allclose(got.swept[row, :, i], out, atol=5e-5)
        np.testing.assert_array_equal(got.out[row], got.swept[row, :, 2])
    assert min(shares) < 0.7, "much must be left out"


@pytest.mark.parametrize("name", ["resa quest", "resa arkvale", "resa ada"])
@pytest.mark.quick("quest", "ada")
def test_rs_1_x15_bu_9_without_residual_resa_is_its_selector(name):
    method, sizes = CASES[name]
    bases = {CASES[key][0]: CASES[key] for key in ("quest", "arkvale", "ada floor")}
    plain = step(*(bases[method.base][0], GIVEN, bases[method.base][1]))
    np.testing.assert_allclose(step(method, GIVEN, sizes).swept[:, :, 0], plain.out, atol=2e-5)


SHORT = case((15, 9, 1, 5), answered=0, seed=1)


@pytest.mark.parametrize("name", [each for each in EACH if "psa" not in each.values[0]])
def test_x1_rs_3_qs_1_av_5_it_1_a_budget_for_all_is_full_attention(name):
    """The fixed tokens and three pages hold these rows; the longest needs the fixed ones."""
    method, sizes = CASES[name]
    if method.allocation == "ada-blend":
        # Its counts are shares of the budget, rounded.
        method = dataclasses.replace(method, budget=2 * method.budget)
    got = step(method, SHORT, sizes)
    for row in range(4):
        if row == 0 and ("ratio" in name or "nothing" in name):
            continue
        np.testing.assert_array_equal(got.kept[row], SHORT.lengths[row])
        np.testing.assert_allclose(got.out[row], full(SHORT, row), atol=1e-5)


def test_x17_qs_2_av_3_pages_of_one_token_are_ideal():
    ideal = step(IDEAL, GIVEN)
    for method in (
        Quest(budget=9, page_size=1, **FIXED),
        ArkVale(budget=9, page_size=1, granularity="query_head", **FIXED),
    ):
        got = step(method, GIVEN)
        np.testing.assert_allclose(got.scores, ideal.scores, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(got.out, ideal.out, atol=1e-5)


@pytest.mark.parametrize(
    "base",
    [
        QUEST,
        dataclasses.replace(QUEST, sink=0, ratio=0.2),
        ARKVALE,
        *(
            pytest.param(dataclasses.replace(ARKVALE, **changes), marks=pytest.mark.slow)
            for changes in (
                {"granularity": "query_head", "digest": "sphere-max"},
                {"digest": "centroid", "budget": 160},
            )
        ),
    ],
)
def test_pages_chosen_at_once_are_those_of_the_best_scores(base, monkeypatch):
    given = case((64, 33, 9, 0), answered=0, seed=3)
    k, v = (np.swapaxes(x, 1, 2) for x in (given.k, given.v))

    def lists():
        def choose(q, *rows):
            cache, ctx = filled(base, q, *rows), plain_context()
            return base.choose(q[:, None], cache, base.selectable(cache.store, ctx), ctx).pages

        return np.asarray(on_one_device(choose)(given.q, k, v, given.lengths, given.prompts))

    at_once = lists()
    assert (at_once[0] >= 0).any() and (at_once < 0).any()
    monkeypatch.setattr(SelectingPages, "select", Selecting.select)
    expected = lists()
    # One list may stand for those of all kv heads.
    np.testing.assert_array_equal(np.broadcast_to(at_once, expected.shape), expected)
