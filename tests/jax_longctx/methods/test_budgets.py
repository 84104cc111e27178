import itertools
from fractions import Fraction

import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.methods import IdealTopK
from jax_longctx.parts import head_budgets
from tests.jax_longctx.methods.selecting import case, on_one_device, plain_context, step

HEADS, PAGES, MOST = 4, 12, 6


def masses(seed=0, rows=2):
    x = np.random.default_rng(seed).gamma(0.3, size=(rows, HEADS, PAGES)).astype(np.float32)
    x[0, :, 9:] = -np.inf
    return x


@pytest.fixture(scope="module")
def ada():
    """Pages kept by each head of each row, `ada(mass, count, alpha, blend)`; compiled once each."""
    made = {}

    def run(mass, count, alpha, blend):
        if (alpha, blend) not in made:

            def body(mass, count):
                with pytest.MonkeyPatch.context() as patched:
                    patched.setattr(head_budgets, "ALPHA", alpha)
                    ctx = plain_context()
                    lists = head_budgets.ada_kv(mass, count, MOST, ctx, blend=blend)
                return lists.heads, lists.pages[:, 0]

            made[alpha, blend] = on_one_device(body)
        heads, pages = (np.asarray(x) for x in made[alpha, blend](mass, count))
        return [
            [
                sorted(p for h, p in zip(*row, strict=True) if h == head and p >= 0)
                for head in range(HEADS)
            ]
            for row in zip(heads, pages, strict=True)
        ]

    return run


def best(row, count):
    finite = [p for p in np.argsort(-row, kind="stable") if row[p] > -np.inf]
    return sorted(map(int, finite[:count]))


COUNT = np.array([3, 5], np.int32)


@pytest.mark.parametrize("blend", [False, True])
def test_bu_1_x19_a_share_of_one_is_uniform(ada, blend):
    mass = masses()
    got = ada(mass, COUNT, 1.0, blend)
    assert got == [[best(mass[b, h], COUNT[b]) for h in range(HEADS)] for b in range(2)]


def test_bu_2_bu_4_equal_heads_and_one_are_uniform_and_shares_exact(ada):
    mass = np.repeat(masses()[:, :1], HEADS, axis=1)
    got = ada(mass, COUNT, 0.2, False)
    assert got == [[best(mass[b, h], COUNT[b]) for h in range(HEADS)] for b in range(2)]
    mass = masses()[:, :1]
    got = ada(mass, COUNT, 0.2, False)
    for b in range(2):
        assert got[b] == [best(mass[b, 0], COUNT[b]), [], [], []]
    counts = np.array([0, 1, 100, 1000, 8192, 1_000_003], np.int32)
    for ratio in (0.025, 0.29, 0.1, 0.7, 1.0, 0.3333):
        exact = [int(Fraction(str(ratio)) * int(n)) for n in counts]
        assert np.asarray(head_budgets.share(ratio, jnp.asarray(counts))).tolist() == exact
        assert [head_budgets.share(ratio, int(n)) for n in counts] == exact


def test_bu_3_the_floor_holds_and_the_total_is_exact(ada):
    for seed in range(5):
        mass = masses(seed)
        got = ada(mass, COUNT, 0.4, False)
        for b in range(2):
            safe = int(Fraction("0.4") * int(COUNT[b]))
            assert sum(map(len, got[b])) == HEADS * COUNT[b]
            for h in range(HEADS):
                assert set(best(mass[b, h], safe)) <= set(got[b][h])
            # No page that was left out beats one that was taken beyond the floor.
            taken = [mass[b, h, p] for h in range(HEADS) for p in got[b][h]]
            beyond = [
                mass[b, h, p]
                for h in range(HEADS)
                for p in set(got[b][h]) - set(best(mass[b, h], safe))
            ]
            out = set(itertools.product(range(HEADS), range(PAGES)))
            out -= {(h, p) for h in range(HEADS) for p in got[b][h]}
            assert min(beyond) >= max(mass[b][e] for e in out)
            assert len({len(pages) for pages in got[b]}) > 1 or len(taken) == 0


def test_the_blend_is_the_authors_rounding(ada):
    mass = masses(3)
    got = ada(mass, COUNT, 0.2, True)
    for b in range(2):
        order = sorted(itertools.product(range(HEADS), range(PAGES)), key=lambda e: -mass[b][e])
        free = [h for h, _ in order[: HEADS * COUNT[b]]]
        for h in range(HEADS):
            count = round(free.count(h) * 0.8) + int(COUNT[b] * 0.2)
            assert got[b][h] == best(mass[b, h], count)


def logs(seed):
    rng = np.random.default_rng(seed)
    pages = np.sort(rng.normal(size=(2, 3, 7)) * 2)[..., ::-1].astype(np.float32)
    forced = rng.normal(size=(2, 3)).astype(np.float32)
    rest = rng.normal(size=(2, 3)).astype(np.float32)
    whole = np.log(np.exp(forced) + np.exp(pages).sum(-1) + np.exp(rest)).astype(np.float32)
    return forced, pages, whole


def until(epsilon, forced, pages, whole):
    return np.asarray(
        head_budgets.pages_until(
            epsilon, *map(jnp.asarray, (forced, pages, whole[..., None])), whole=True
        )
    )


def test_bu_6_7_8_pages_until_enough_and_no_more():
    forced, pages, whole = logs(0)
    before = np.zeros(forced.shape, int)
    for epsilon in (1e-6, 0.2, 0.5, 0.8, 0.95, 1.0):
        kept = until(epsilon, forced, pages, whole)
        count = kept.sum(-1)
        assert (kept == (np.arange(7) < count[..., None])).all(), "a prefix"
        assert (count >= np.maximum(before, 1)).all(), "more for more"
        mass = np.exp(forced)[..., None] + np.exp(pages).cumsum(-1)
        share = mass / np.exp(whole)[..., None]
        last = np.take_along_axis(share, count[..., None] - 1, -1)[..., 0]
        assert ((last >= epsilon) | (count == 7)).all()
        previous = np.take_along_axis(share, np.maximum(count - 2, 0)[..., None], -1)[..., 0]
        assert ((previous < epsilon) | (count == 1)).all()
        before = count
    assert (before == 7).all()


def test_a_head_without_fixed_tokens_or_pages_is_no_nan():
    nothing = np.full((1, 1), -np.inf, np.float32)
    assert until(0.5, nothing, nothing[..., None], nothing).tolist() == [[[True]]]


@pytest.mark.parametrize(
    "allocation", [pytest.param("psa-oracle", marks=pytest.mark.slow), "psa-estimate"]
)
def test_bu_5_x1_all_of_the_mass_is_full_attention(allocation):
    given = case((50, 33, 9, 1), answered=0)
    method = IdealTopK(budget=64, sink=3, local=5, allocation=allocation, epsilon=1.0)
    got = step(method, given)
    every = step(IdealTopK(budget=64, sink=3, local=5), given)
    np.testing.assert_array_equal(every.kept, np.repeat(given.lengths[:, None], 4, 1))
    # A page whose mass is lost in rounding may be left out.
    np.testing.assert_allclose(got.out, every.out, atol=1e-5)
    assert (got.kept > 0.9 * every.kept).all()
