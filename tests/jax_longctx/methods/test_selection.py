"""What selectors and budgets have in common, against numpy: sets, outputs, ragged rows, meshes."""

import dataclasses

import numpy as np
import pytest

from jax_longctx.methods import ArkVale, IdealTopK, Quest, Resa
from tests.jax_longctx.methods.oracles.selection import resa_output, selected, softmax_output
from tests.jax_longctx.methods.selecting import KV_HEADS, WIDTH, case, step

FIXED = {"sink": 3, "local": 5}
QUEST = Quest(budget=12, page_size=4, **FIXED)
ARKVALE = ArkVale(budget=12, page_size=4, **FIXED)
IDEAL = IdealTopK(budget=9, **FIXED)
ADA = dataclasses.replace(QUEST, granularity="kv_head", allocation="ada-floor", alpha=0.4)
SELECTORS = {
    "quest": ("quest", QUEST),
    "quest kv_head ratio": (
        "quest",
        dataclasses.replace(QUEST, granularity="kv_head", ratio=0.29),
    ),
    "quest whole_pages count_fixed": (
        "quest",
        dataclasses.replace(QUEST, whole_pages=True, count_fixed=True, budget=24),
    ),
    "quest nothing fixed": ("quest", dataclasses.replace(QUEST, sink=0, local=0, min_pages=3)),
    "arkvale": ("arkvale", ARKVALE),
    "arkvale query_head": ("arkvale", dataclasses.replace(ARKVALE, granularity="query_head")),
    "ideal": ("ideal", IDEAL),
    "ideal kv_head": ("ideal", dataclasses.replace(IDEAL, granularity="kv_head")),
    "ada floor": ("quest", ADA),
    "ada blend": ("quest", dataclasses.replace(ADA, allocation="ada-blend")),
    "ada arkvale": (
        "arkvale",
        dataclasses.replace(ARKVALE, granularity="kv_head", allocation="ada-floor"),
    ),
    "psa oracle": (
        "quest",
        dataclasses.replace(QUEST, budget=40, allocation="psa-oracle", epsilon=0.6),
    ),
    "psa estimate": (
        "ideal",
        dataclasses.replace(IDEAL, budget=40, allocation="psa-estimate", epsilon=0.7),
    ),
    "resa psa": (
        "quest",
        Resa(page_size=4, budget=40, allocation="psa-resa", epsilon=0.8, lam=0.5, **FIXED),
    ),
}
GIVEN = case()


def prior_of(given, row):
    """p0 and bias of every key of a row."""
    n, scale = given.lengths[row], WIDTH**-0.5
    k = np.repeat(given.k[row, :n], len(given.q[row]) // KV_HEADS, axis=1).astype(float)
    mean_q, q = given.mean_q[row].astype(float), given.q[row]
    p0 = scale * np.einsum("nh,snh->ns", mean_q, k)
    return p0, scale * ((q - mean_q) * k.mean(0)).sum(1)


def expected(kind, method, given, row):
    n = given.lengths[row]
    q, k, v = (x.astype(float) for x in (given.q[row], given.k[row, :n], given.v[row, :n]))
    if not isinstance(method, Resa):
        kept = selected(kind, method, q, k, int(given.prompts[row]))
        return kept, softmax_output(q, k, v, kept)
    prior = prior_of(given, row)
    kept = selected(kind, method.base, q, k, int(given.prompts[row]), prior)
    return kept, resa_output(q, k, v, kept, *prior, method.lam)


@pytest.mark.parametrize("name", SELECTORS)
def test_x22_a_step_equals_numpy_on_each_row_alone(name):
    kind, method = SELECTORS[name]
    got = step(method, GIVEN)
    sizes = set()
    for row in range(3):
        kept, out = expected(kind, method, GIVEN, row)
        np.testing.assert_array_equal(got.kept[row], kept.sum(1))
        np.testing.assert_allclose(got.out[row], out, atol=2e-5)
        sizes |= set(kept[:, : GIVEN.lengths[row]].mean(1).tolist())
    assert min(sizes) < 1, "something must be left out"
