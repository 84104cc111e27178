import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch, hopper
from pallas_kernels.page_scores import page_scores
from pallas_kernels.plane import Plane
from pallas_kernels.select_pages import Best, Digests, SharedPages, select_pages

ROWS, KV_HEADS, GROUP, PAGES, HEAD_DIM, SIZE = 4, 2, 3, 24, 8, 7
FIRST = jnp.array([0, 3, 20, 5], jnp.int32)
LAST = jnp.array([24, 22, 23, 5], jnp.int32)
COUNT = jnp.array([7, 5, 7, 7], jnp.int32)
BEST = Best(FIRST, LAST, COUNT)


def _digests(kind, dtype="float32", seed=0):
    """q and a box, ball or point a page, of few whole numbers: many scores tie, all are exact."""
    random = np.random.default_rng(seed)
    q = random.integers(-1, 2, (ROWS, KV_HEADS * GROUP, HEAD_DIM))
    high = random.integers(-2, 3, (ROWS, KV_HEADS, PAGES, HEAD_DIM))
    low = jnp.asarray(high - random.integers(0, 3, high.shape), dtype) if kind == "box" else None
    radius = random.integers(0, 3, high.shape[:3])
    # The norm of every query is a whole number.
    q[..., 0], q[..., 1:5] = 0, np.where(q[..., 1:5] == 0, 1, q[..., 1:5])
    q[..., 5:] = 0
    ball = jnp.asarray(radius, jnp.float32) if kind == "ball" else None
    return jnp.asarray(q, dtype), Digests(jnp.asarray(high, dtype), low, ball)


@functools.cache
def _run(together, name=None, size=SIZE):
    return jax.jit(
        functools.partial(select_pages, size=size, together=together, implementation=name)
    )


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["box", "ball", "point"])
@pytest.mark.quick("box-float32", "ball-bfloat16", "point-float16-True")
def test_ragged_rows_are_listed_as_the_definition_says(kind, dtype, together):
    arguments = *_digests(kind, dtype), BEST
    lists = np.asarray(_run(together)(*arguments))
    assert lists.shape == (ROWS, 1 if together else KV_HEADS * GROUP, SIZE)
    np.testing.assert_array_equal(lists, _run(together, "reference")(*arguments))
    # The third row has fewer pages than are asked for, the fourth none.
    assert (lists[2] == np.array([20, 21, 22, -1, -1, -1, -1])).all()
    assert (lists[3] == -1).all() and ((lists[1] >= 0).sum(axis=-1) == 5).all()


def test_pages_outside_the_bounds_may_hold_anything():
    q, digests = _digests("box")
    page = jnp.arange(PAGES)
    outside = ((page < FIRST[:, None]) | (page >= LAST[:, None]))[:, None, :, None]
    garbage = jax.tree.map(lambda x: jnp.where(outside, jnp.nan, x), digests)
    for together in (False, True):
        lists = _run(together)(q, garbage, BEST)
        expected = _run(together)(q, digests, BEST)
        np.testing.assert_array_equal(lists, expected)


def test_equal_scores_go_to_the_lowest_pages_and_longer_lists_end_in_none():
    q, digests = _digests("box")
    same = jax.tree.map(lambda x: jnp.broadcast_to(x[:, :, :1], x.shape), digests)
    lists = _run(False)(q, same, BEST)
    assert (lists[0] == jnp.arange(SIZE)).all()
    assert (lists[1] == jnp.array([3, 4, 5, 6, 7, -1, -1])).all()
    arguments = *_digests("box"), BEST._replace(count=COUNT * 10)
    lists = _run(False, size=PAGES + 9)(*arguments)
    assert (lists[0] == jnp.where(jnp.arange(33) < PAGES, jnp.arange(33), -1)).all()
    np.testing.assert_array_equal(lists, _run(False, "reference", PAGES + 9)(*arguments))


def test_planes_are_their_layers_part_and_one_count_serves_all_rows():
    q, digests = _digests("box")

    @jax.jit
    def of_planes(q, digests):
        planes = [Plane(jnp.stack([x * 0, x, -x]), jnp.int32(1)) for x in digests[:2]]
        return select_pages(q, Digests(*planes), BEST._replace(count=4), size=SIZE)

    expected = _run(False)(q, digests, BEST._replace(count=jnp.full_like(COUNT, 4)))
    np.testing.assert_array_equal(of_planes(q, digests), expected)


# The first row has no page of its own, the third no other; the fourth has none.
SPLIT, SHARED_FIRST = 16, jnp.array([0, 3, 17, 16], jnp.int32)
SHARED_LAST = jnp.array([16, 22, 23, 16], jnp.int32)


def _shared(kind, dtype, *, spare=3):
    """Digests of rows that share the first pages: whole, and parted, with garbage in between."""
    q, whole = jax.tree.map(np.array, _digests(kind, dtype))
    room = [(0, 0), (0, 0), (0, spare), (0, 0)]

    def parted(x):
        x[:, :, :SPLIT] = x[:1, :, :SPLIT]
        return np.pad(x[:1, :, :SPLIT], room[: x.ndim], constant_values=99)

    shared = SharedPages(jax.tree.map(parted, whole), np.array([SPLIT], np.int32))
    own = jax.tree.map(lambda x: x[:, :, SPLIT:], whole)
    return jax.device_put(((q, whole), (q, own, shared)))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["box", "ball", "point"])
@pytest.mark.quick("box-bfloat16-True", "ball-float32-False", "point-float32-True")
def test_rows_that_share_pages_list_what_each_lists_alone(kind, dtype, together):
    whole, (*parted, shared) = _shared(kind, dtype)
    best = Best(SHARED_FIRST, SHARED_LAST, COUNT)
    planes = [
        x if x is None else Plane(jax.device_put(np.stack([x, -np.asarray(x)])), jnp.int32(0))
        for x in shared.digests[:2]
    ]
    of_planes = shared._replace(digests=Digests(*planes, shared.digests.radius))
    expected = np.asarray(_run(together, "reference")(*parted, best, shared=shared))
    for given in (shared, of_planes):
        lists = _run(together)(*parted, best, shared=given)
        np.testing.assert_array_equal(lists, expected)
    for row in range(ROWS):
        alone = jax.tree.map(lambda x, row=row: np.asarray(x)[row : row + 1], (*whole, best))
        np.testing.assert_array_equal(expected[row : row + 1], _run(together)(*alone))
    np.testing.assert_array_equal(expected[2, 0], [17, 18, 19, 20, 21, 22, -1])


def test_a_gpu_takes_its_kernel_where_it_can(monkeypatch):
    monkeypatch.setattr(hopper, "compute_capability", lambda: hopper.CAPABILITY)
    shape, found = jax.ShapeDtypeStruct, []

    def kernels(rows=1, head_dim=128, *, size=64, **how):
        q, high = (shape((rows, *x, head_dim), jnp.bfloat16) for x in ((32,), (8, 2048)))
        number = shape((rows,), jnp.int32)
        run = functools.partial(select_pages, size=size, **how)
        with mock.patch.object(dispatch, "platform", lambda: "gpu"):
            traced = jax.jit(run).trace(q, Digests(high, high), Best(number, number, number))
        found.append(str(traced.jaxpr))
        return found[-1].count("kernel_name")

    assert kernels() == 2
    assert "score_pages" in found[0] and "choose_best" in found[0]
    assert kernels(together=True) == 2
    # The choice alone: products by XLA.
    assert kernels(head_dim=96) == 1
    assert kernels(size=1000) == 0
    # Of rows that share pages two, however many rows there are.
    pages = jnp.zeros((1, 8, 2048, 128), jnp.bfloat16)
    shared = SharedPages(Digests(pages, pages), jnp.array([2000], jnp.int32))
    for rows in (1, 16, 50):
        for together in (False, True):
            assert kernels(rows, together=together, shared=shared) == 2


def test_what_does_not_fit_is_refused(unchecked_signatures):
    q, box = _digests("box")
    split = jnp.array([8], jnp.int32)
    shared = SharedPages(jax.tree.map(lambda x: x[:1], box), split)
    for digests, changed, message in (
        (box, dict(q=q[:, :5]), "query heads a multiple"),
        (box._replace(radius=box.high[..., 0]), {}, "a box or a ball"),
        (Digests(box.high), dict(shared=shared), "of another form than the rows' own"),
        (box, dict(shared=SharedPages(box, split)), "query heads a multiple"),
        (box, dict(best=Best(FIRST, LAST, 8)), "count 8 does not fit size 7"),
    ):
        with pytest.raises(ValueError, match=message):
            select_pages(**dict(q=q, digests=digests, best=BEST, size=SIZE) | changed)


FILLED = jnp.array([0, 1, 5, 6], jnp.int32)
SCORES = jax.jit(lambda q, high, low, pages: page_scores(q, Digests(high, low), pages))


def _bounds(kv_heads, groups, dtype):
    """q [B,N,H], keys [B,K,6,4,H] of several magnitudes as `dtype` holds them, and their ends."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(len(FILLED), kv_heads * groups, 16))
    keys = rng.normal(size=(len(FILLED), kv_heads, 6, 4, 16))
    keys *= 10.0 ** rng.integers(-2, 3, size=keys.shape)
    q, keys = (np.asarray(jnp.asarray(x, dtype).astype(jnp.float32)) for x in (q, keys))
    return q, keys, keys.max(axis=3), keys.min(axis=3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kv_heads", "groups"), [(2, 4), (3, 1), (1, 8)])
def test_page_scores_bound_every_key(dtype, kv_heads, groups):
    """The score is the box's best corner; only the sum rounds. Nothing unfilled is looked at."""
    q, keys, *bounds = _bounds(kv_heads, groups, dtype)
    filled = np.arange(6) < np.asarray(FILLED)[:, None, None]
    stored = (np.where(filled[..., None], x, np.nan) for x in bounds)
    scores = SCORES(*(jnp.asarray(x, dtype) for x in (q, *stored)), FILLED)
    assert scores.dtype == jnp.float32
    filled = np.broadcast_to(filled, scores.shape)
    assert np.isneginf(np.asarray(scores)[~filled]).all()
    q, keys, *bounds = (x.astype(np.float64) for x in (q, keys, *bounds))
    keys, *bounds = (np.repeat(x, groups, axis=1) for x in (keys, *bounds))
    terms = np.maximum(*(q[:, :, None] * x for x in bounds))
    rounding = 1e-6 * np.abs(terms).sum(axis=3)
    scores = np.where(filled, scores, terms.sum(axis=3))
    assert (np.abs(scores - terms.sum(axis=3)) <= rounding).all()
    assert (scores >= np.einsum("bnh,bnpzh->bnpz", q, keys).max(axis=3) - rounding).all()


def test_float32_bounds_are_multiplied_at_the_highest_precision():
    """The default precision of a TPU would round them to bfloat16; a CPU's does not."""
    q, _, *bounds = _bounds(2, 4, "float32")
    with jax.default_matmul_precision("default"):
        program = str(jax.make_jaxpr(SCORES)(q, *bounds, FILLED))
    assert program.count("Precision.HIGHEST") == 4  # both operands of two matmuls


def test_bounds_of_other_shapes_are_refused(unchecked_signatures):
    q, _, *bounds = map(jnp.asarray, _bounds(2, 4, "float32"))
    with pytest.raises(ValueError, match="query heads a multiple"):
        page_scores(q[:, :3], Digests(*bounds), FILLED)
    with pytest.raises(ValueError, match="one dtype"):
        page_scores(q, Digests(bounds[0], bounds[1].astype(jnp.bfloat16)), FILLED)
