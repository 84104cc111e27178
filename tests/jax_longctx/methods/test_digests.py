import dataclasses
import functools
import itertools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.caches import AppendCache, digests
from jax_longctx.caches.digests import digest_scores
from jax_longctx.methods import ArkVale, IdealTopK, Quest
from jax_longctx.methods.arkvale import Digest
from tests.jax_longctx.methods.oracles.selection import page_score, softmax_output
from tests.jax_longctx.methods.selecting import (
    case,
    layer_shape,
    on_one_device,
    plain_context,
    step,
)

KINDS = ("quest", *typing.get_args(Digest))
PAGE, PAGES, HEADS, KV_HEADS, WIDTH = 4, 6, 4, 2, 8


def method_of(kind):
    return Quest(page_size=PAGE) if kind == "quest" else ArkVale(page_size=PAGE, digest=kind)


@pytest.fixture(scope="module")
def scores():
    """`scores(q, keys, lengths)` of every kind, from one program."""

    @jax.jit
    def run(q, keys, lengths):
        held = (jnp.arange(PAGES * PAGE) < lengths[:, None]).reshape(-1, PAGES, PAGE)
        paged = jnp.swapaxes(keys, 1, 2).reshape(-1, KV_HEADS, PAGES, PAGE, WIDTH)
        return {
            kind: digest_scores(q, method_of(kind).summarise(paged, held), lengths, PAGE)
            for kind in KINDS
        }

    return lambda *args: {kind: np.asarray(x) for kind, x in run(*args).items()}


def data(seed=0, lengths=(24, 13, 1)):
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(3, HEADS, WIDTH)).astype(np.float32)
    keys = rng.normal(size=(3, PAGES * PAGE, KV_HEADS, WIDTH)).astype(np.float32)
    for row, length in enumerate(lengths):
        keys[row, length:] = 1e4
    return q, keys, np.array(lengths, np.int32)


def each_page(lengths):
    for row, head in itertools.product(range(3), range(HEADS)):
        for page in range(-(-int(lengths[row]) // PAGE)):
            stop = min((page + 1) * PAGE, lengths[row])
            yield row, head, page, slice(page * PAGE, stop)


def test_av_2_scores_equal_the_form_with_a_maximum_for_every_digest(scores):
    q, keys, lengths = data()
    got = scores(q, keys, lengths)
    for row, head, page, at in each_page(lengths):
        held = keys[row, at, head // 2].astype(float)
        for kind in KINDS:
            family = "quest" if kind == "quest" else "arkvale"
            expected = page_score(family, kind, held, q[row, head].astype(float))
            np.testing.assert_allclose(got[kind][row, head, page], expected, rtol=2e-5, atol=2e-5)
    assert np.isneginf(got["quest"][1, :, 4:]).all()


def test_qs_3_av_1_x18_av_4_qs_5_bounds_whatever_the_order_within_a_page(scores):
    q, keys, lengths = data(1)
    got = scores(q, keys, lengths)
    np.testing.assert_array_equal(got["cuboid-max"], got["quest"])
    finite = got["quest"] > -np.inf
    assert (got["cuboid-mean"][finite] <= got["cuboid-max"][finite] + 1e-5).all()
    for row, head, page, at in each_page(lengths):
        best = (keys[row, at, head // 2] @ q[row, head]).max()
        assert got["quest"][row, head, page] >= best - 1e-5
        assert got["sphere-max"][row, head, page] >= best - 1e-5
    q, keys, lengths = data(2, (24, 24, 24))
    order = np.random.default_rng(0).permuted(np.tile(np.arange(PAGE), (PAGES, 1)), axis=1)
    shuffled = keys[:, (np.arange(PAGES)[:, None] * PAGE + order).reshape(-1)]
    got, other = scores(q, keys, lengths), scores(q, shuffled, lengths)
    for kind in KINDS:
        np.testing.assert_allclose(other[kind], got[kind], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("held", [0, 1, 3, PAGE])
def test_a_page_slot_after_slot_has_the_same_digest(monkeypatch, kind, held):
    rng = np.random.default_rng(held)
    keys = jnp.array(rng.normal(size=(2, KV_HEADS, 1, PAGE, WIDTH)), jnp.float32)
    inside = jnp.broadcast_to(jnp.arange(PAGE) < held, (2, 1, PAGE))
    expected = method_of(kind).summarise(keys, inside)
    monkeypatch.setattr(digests, "platform", lambda: "gpu")
    found = method_of(kind).summarise(keys, inside)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-6)


def test_qs_4_digests_kept_up_are_digests_made_anew():
    method = ArkVale(page_size=PAGE, digest="sphere-mean")
    q, keys, _ = data(3, (24, 24, 24))
    k = jnp.asarray(np.swapaxes(keys, 1, 2))
    made = {}

    def after(digests, past, length, added):
        if added not in made:

            def body(digests, k, past, length):
                store = AppendCache(k, k, length, length, length, length)
                cache = dataclasses.replace(fresh, store=store, digests=digests)
                return method.refreshed(cache, past, added, plain_context()).digests

            made[added] = on_one_device(body)
        return made[added](digests, k, *(jnp.array(x, jnp.int32) for x in (past, length)))

    fresh = method.init_cache(layer_shape(q, k))
    empty = fresh.digests
    digests, lengths = empty, np.array([0, 0, 0])
    for added, counts in [(7, (7, 3, 7)), (7, (5, 0, 7)), (1, (1, 1, 1)), (1, (1, 0, 1))]:
        digests = after(digests, lengths, lengths + counts, added)
        lengths = lengths + counts
    rewound = np.array([10, 2, 9])
    digests = after(digests, rewound, rewound + 1, 1)
    anew = after(empty, [0, 0, 0], rewound + 1, 24)
    score = functools.partial(digest_scores, jnp.asarray(q), page_size=PAGE)
    now = jnp.asarray(rewound + 1, jnp.int32)
    np.testing.assert_array_equal(
        score(digests=digests, length=now), score(digests=anew, length=now)
    )


def ideal_masses(ratio_prompts, n=12):
    """Kept mass and logits of one row of n tokens, for budgets of a quarter of each prompt."""
    given = case((n,), answered=0, seed=4)
    method = IdealTopK(ratio=0.25, sink=1, local=1)
    for prompt in ratio_prompts:
        got = step(method, given._replace(prompts=np.array([prompt], np.int32)))
        yield given, np.exp(got.lse[0])


def test_it_3_no_other_set_of_that_size_holds_more():
    ((given, mass),) = ideal_masses([12])
    k = np.repeat(given.k[0, :12], 2, axis=1).astype(float)
    weights = np.exp(np.einsum("nh,snh->ns", given.q[0].astype(float), k) * WIDTH**-0.5)
    for head in range(HEADS):
        sets = itertools.combinations(range(1, 11), 3)
        best = max(sum(weights[head, list(chosen)]) for chosen in sets)
        np.testing.assert_allclose(mass[head], best + weights[head, [0, 11]].sum(), rtol=1e-5)


def test_it_4_a_larger_budget_adds_the_next_best():
    found = list(ideal_masses(range(4, 41, 4)))
    given = found[0][0]
    k = np.repeat(given.k[0, :12], 2, axis=1).astype(float)
    weights = np.exp(np.einsum("nh,snh->ns", given.q[0].astype(float), k) * WIDTH**-0.5)
    steps = np.diff([mass for _, mass in found], axis=0)
    expected = np.sort(weights[:, 1:11], axis=1)[:, ::-1][:, 1:].T
    np.testing.assert_allclose(steps, expected, rtol=1e-3, atol=1e-4)
    v = given.v[0, :12].astype(float)
    kept = np.ones((HEADS, 12), bool)
    whole = step(IdealTopK(ratio=0.25, sink=1, local=1), given._replace(prompts=np.int32([40])))
    expected = softmax_output(given.q[0].astype(float), given.k[0, :12].astype(float), v, kept)
    np.testing.assert_allclose(whole.out[0], expected, atol=1e-5)
