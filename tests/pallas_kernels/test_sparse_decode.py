from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.common import merge
from pallas_kernels.sparse_decode_attention import (
    Around,
    Pages,
    Shared,
    reference,
    sparse_decode_attention,
    xla,
)
from tests.absent import tpu

# The last page of 8 has 3 slots, that of 7 only one. The first row's bounds lie outside the cache.
SLOTS, LISTED = 43, 4
STARTS = (-9, 4, 7, 8, 9, 20, 0)
STOPS = (60, 40, 41, 32, 33, 20, 1)
BOUNDS = jnp.array(STARTS, jnp.int32), jnp.array(STOPS, jnp.int32)
ROWS = len(STARTS)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table: shapes, dtype, entries of a block, and the kind of lists."""

    kv_heads: int = 2
    groups: int = 4
    page_size: int = 8
    lists: str = "kv heads"
    dtype: str = "float32"
    block: int | None = None
    prior: bool = True
    scale: float = 0.4
    reference: bool = False


CASES = {
    "one-block": Case(reference=True),
    "blocks": Case(block=3),
    "no-prior": Case(prior=False, block=1, reference=True),
    "query-heads": Case(lists="query heads", block=3, reference=True),
    "mha": Case(groups=1),
    "mqa-of-eight": Case(kv_heads=1, groups=8, lists="query heads"),
    "slots": Case(page_size=1, block=3),
    "odd-pages": Case(page_size=7),
    "a-page-larger-than-the-cache": Case(page_size=64),
    "bfloat16": Case(dtype="bfloat16", block=3),
    "large-logits": Case(scale=60.0, block=1),
    "flat": Case(lists="flat", reference=True),
    "flat-blocks": Case(lists="flat", block=5),
    "flat-no-prior": Case(lists="flat", prior=False, groups=1, reference=True),
    "flat-slots": Case(lists="flat", page_size=1, block=3),
    "flat-bfloat16": Case(lists="flat", dtype="bfloat16", block=5),
    "flat-large-logits": Case(lists="flat", scale=60.0, block=5),
}


def _inputs(case, seed=0):
    rng = np.random.default_rng(seed)
    heads = case.kv_heads * case.groups
    q = rng.normal(size=(ROWS, 1, heads, 8))
    k, v = (rng.normal(size=(ROWS, case.kv_heads, SLOTS, 8)) for _ in range(2))
    slots = np.arange(SLOTS)
    held = (slots >= np.array(STARTS)[:, None]) & (slots < np.array(STOPS)[:, None])
    k, v = (np.where(held[:, None, :, None], x, np.nan) for x in (k, v))
    prior = rng.normal(size=q.shape)
    return tuple(jnp.asarray(x, case.dtype) for x in (q, k, v, prior))


def _lists(case, seed=0):
    """[B,X,C] different pages of every list in random order, some -1 and the row 2's all."""
    rng = np.random.default_rng(seed)
    count = case.kv_heads * (case.groups if case.lists == "query heads" else 1)
    pages = -(-SLOTS // case.page_size)
    ids = np.arange(max(pages, LISTED))
    lists = rng.permuted(np.broadcast_to(ids, (ROWS, count, len(ids))), axis=2)[..., :LISTED]
    lists = np.where((lists >= pages) | (rng.random(lists.shape) < 0.2), -1, lists)
    lists[2] = -1
    return jnp.asarray(lists, jnp.int32)


def _flat(lists, seed=0):
    """The same sets as shuffled (kv head, page) entries; an absent one has -1 in one or both."""
    rng = np.random.default_rng(seed)
    rows, heads, listed = lists.shape
    order = rng.permutation(heads * listed)
    owners = np.broadcast_to(np.arange(heads)[:, None], lists.shape).reshape(rows, -1)[:, order]
    pages = np.asarray(lists).reshape(rows, -1)[:, order]
    owners = np.where((pages < 0) & (rng.random(pages.shape) < 0.5), -1, owners)
    pages = np.where((owners < 0) & (rng.random(pages.shape) < 0.5), 0, pages)
    return jnp.asarray(owners, jnp.int32), jnp.asarray(pages, jnp.int32)


def _by_numpy(case, lists, arrays):
    """Softmax over a Python list of slots, head by head, in float64."""
    q, k, v, prior = (np.asarray(x.astype(jnp.float32), np.float64) for x in arrays)
    heads = q.shape[2]
    out, out_prior = np.zeros((2, *q.shape))
    lse, lse_prior = np.full((2, ROWS, 1, heads), -np.inf)
    for b, n in np.ndindex(ROWS, heads):
        kv = n // case.groups
        pages = set(np.asarray(lists)[b, n * lists.shape[1] // heads].tolist())
        held = range(max(0, STARTS[b]), min(STOPS[b], SLOTS))
        slots = [s for s in held if s // case.page_size in pages]
        for query, o, e in ((q, out, lse), (prior, out_prior, lse_prior)):
            logits = case.scale * k[b, kv, slots] @ query[b, 0, n]
            if slots:
                weights = np.exp(logits - logits.max())
                o[b, 0, n] = weights @ v[b, kv, slots] / weights.sum()
                e[b, 0, n] = logits.max() + np.log(weights.sum())
    return [out, lse, out_prior, lse_prior] if case.prior else [out, lse]


def _run(case, module, arrays, lists):
    q, k, v, prior = arrays
    options = dict(scale=case.scale)
    if module is xla:
        options |= dict(block=case.block)
    run = jax.jit(partial(module.sparse_decode_attention, **options))
    heads, lists = _flat(lists) if case.lists == "flat" else (None, lists)
    pages = Pages(lists, *BOUNDS, case.page_size, heads)
    return run(q, k, v, pages, prior=prior if case.prior else None)


# What the other cases have too.
SLOW = ("mha", "mqa-of-eight", "blocks", "a-page-larger-than-the-cache", "large-logits")
SLOW += ("flat-blocks", "flat-bfloat16")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.slow if name in SLOW else ())
        for name, case in CASES.items()
    ],
)
def test_attention_to_chosen_pages(case):
    arrays, lists = _inputs(case), _lists(case)
    expected = _by_numpy(case, lists, arrays)
    for module in (xla, reference) if case.reference else (xla,):
        results = _run(case, module, arrays, lists)
        dtypes = [case.dtype, "float32", "float32", "float32"][: len(expected)]
        assert [str(x.dtype) for x in results] == dtypes
        exact = case.dtype == "float32"
        for found, right in zip(results, expected, strict=True):
            tolerance = 1e-4 if exact else 2e-2
            np.testing.assert_allclose(
                np.asarray(found, np.float64), right, rtol=1e-5, atol=tolerance
            )
    assert np.isneginf(expected[1][[2, 5]]).all() and np.isfinite(expected[1]).any()


# Compiled once for all that hypothesis draws; two entries a block.
small = jax.jit(partial(xla.sparse_decode_attention, scale=0.5, block=2))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    bounds=st.tuples(*[st.tuples(st.integers(0, 18), st.integers(0, 18))] * 2),
    seed=st.integers(0, 100),
)
def test_any_bounds_and_lists_attend_alike_in_every_form(bounds, seed):
    rng = np.random.default_rng(seed)
    q, k, v, prior = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((2, 1, 4, 3), (2, 2, 18, 3), (2, 2, 18, 3), (2, 1, 4, 3))
    )
    order = rng.permuted(np.broadcast_to(np.arange(5), (2, 2, 5)), axis=2)
    chosen = rng.random(order.shape) < 0.5
    lists, others = (jnp.asarray(np.where(x, order, -1), jnp.int32) for x in (chosen, ~chosen))
    limits = tuple(jnp.array(x, jnp.int32) for x in zip(*bounds, strict=True))

    def attend(listed, heads=None):
        return small(q, k, v, Pages(listed, *limits, 4, heads), prior=prior)

    near = partial(np.testing.assert_allclose, atol=1e-5)
    results, rest = attend(lists), attend(others)
    heads, pages = _flat(lists, seed)
    jax.tree.map(near, attend(jnp.repeat(lists, 2, axis=1)), results)
    jax.tree.map(near, attend(pages, heads), results)
    everything = attend(jnp.broadcast_to(jnp.arange(5, dtype=jnp.int32), (2, 2, 5)))
    for i in (0, 2):
        merged = merge([results[i : i + 2], rest[i : i + 2]])
        jax.tree.map(near, merged, tuple(everything[i : i + 2]))


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_one_list_may_be_for_all_heads_and_begin_at_any_page(implementation):
    case = Case(dtype="float32")
    *arrays, _ = _inputs(case)
    lists = _lists(case)[:, :1]
    how = dict(scale=case.scale, implementation=implementation)
    attend = jax.jit(partial(sparse_decode_attention, *arrays, **how))

    def run(listed, first=0):
        return attend(Pages(listed, *BOUNDS, case.page_size, first=first))

    each = jnp.broadcast_to(lists, (ROWS, case.kv_heads, lists.shape[2]))
    expected, found = run(each), run(lists)
    later = run(jnp.where(lists > 0, lists - 1, -1), first=1)
    without = run(jnp.where(each == 0, -1, each))
    assert np.any(np.isfinite(expected[1])) and np.any(expected[1] != without[1])
    for one, other in ((found, expected), (later, without)):
        for x, y in zip(one, other, strict=True):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("split", [0, 8, 24])
@pytest.mark.parametrize("lists", ["kv heads", "query heads"])
@pytest.mark.quick("kv heads-24", "query heads-8")
def test_rows_that_share_slots_attend_as_alone(lists, split):
    case = Case(lists=lists, prior=False)
    q, k, v, _ = _inputs(case)
    # Garbage for no row lies in the shared slots.
    rng = np.random.default_rng(5)
    theirs = [rng.normal(size=(1, *k.shape[1:])).astype(np.float32) for _ in range(2)]
    k, v = (np.nan_to_num(x) for x in (k, v))
    start, stop = np.full(ROWS, 4, np.int32), np.maximum(np.array(STOPS, np.int32), split)
    beyond = (np.arange(SLOTS) >= stop[:, None])[:, None, :, None]
    for x, y in zip((k, v), theirs, strict=True):
        x[:, :, :split] = y[:, :, :split]
        x[np.broadcast_to(beyond, x.shape)] = 0
    listed = _lists(case)
    define = jax.jit(partial(reference.sparse_decode_attention, scale=0.4))
    pages = Pages(listed, *jax.device_put((start, stop)), 8)
    expected = define(q, k, v, pages)
    shared = Shared(*jax.device_put(theirs), jnp.array([split], jnp.int32))
    for name in (None, "reference"):
        run = jax.jit(partial(sparse_decode_attention, scale=0.4, implementation=name))
        found = run(q, k[:, :, split:], v[:, :, split:], pages, shared=shared)
        np.testing.assert_allclose(found[0], expected[0], atol=1e-5)
        np.testing.assert_allclose(found[1], expected[1], atol=1e-5)


@pytest.mark.parametrize(
    ("page_size", "lists"),
    [(16, (8, 4096)), (16, (32, 512)), (16, (32768,)), (1, (8, 16384)), (1, (32768,))],
)
def test_long_lists_copy_blocks_of_pages_and_never_the_cache(page_size, lists):
    """Of 32 heads over 8 of 128 and a bfloat16 cache of a million slots, 4 GB.

    Up to 65,536 slots a head are chosen: 268 MB of keys and values.
    """
    shape = jax.ShapeDtypeStruct
    cache = shape((1, 8, 2**20, 128), jnp.bfloat16)
    q = shape((1, 1, 32, 128), jnp.bfloat16)
    ids, bounds = shape((1, *lists), jnp.int32), [shape((1,), jnp.int32)] * 2

    @jax.jit
    def run(q, k, v, ids, *bounds):
        pages = Pages(ids, *bounds, page_size, ids if ids.ndim == 2 else None)
        return sparse_decode_attention(q, k, v, pages, scale=0.1, prior=q)

    compiled = run.lower(q, cache, cache, ids, *bounds).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 128 * 2**20


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.quick("True")
def test_on_a_tpu_the_cache_is_not_copied(flat):
    """Compiled for v5e, 128 pages of 16 a kv head: beside them only small lists."""
    device = tpu()[0]
    mesh = Mesh(np.array([device]), ("tensor",))
    shape = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, P()))
    cache = shape((1, 8, 2**17, 128), jnp.bfloat16)
    lists = shape((1, 1024) if flat else (1, 8, 128), jnp.int32)

    def run(q, k, v, *lists):
        heads, *listed = lists
        pages = Pages(*listed, 16, heads if flat else None)
        how = dict(scale=0.1, prior=q, implementation="xla")
        return sparse_decode_attention(q, k, v, pages, **how)

    q = shape((1, 1, 32, 128), jnp.bfloat16)
    arguments = q, cache, cache, lists, lists, *[shape((1,), jnp.int32)] * 2
    manual = jax.shard_map(run, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with jax.default_matmul_precision("default"):  # as users run it
        memory = jax.jit(manual).lower(*arguments).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 4 * 2**20  # a cache is 256 MiB


def test_partial_results_of_a_head_are_summed_at_the_highest_precision():
    """The default precision of a TPU would round them to bfloat16; a CPU's does not."""
    case = CASES["flat"]
    q, k, v, _ = _inputs(case)
    heads, listed = _flat(_lists(case))
    pages = Pages(listed, *BOUNDS, 8, heads)
    run = partial(sparse_decode_attention, scale=0.1, implementation="xla")
    with jax.default_matmul_precision("default"):
        program = str(jax.make_jaxpr(run)(q, k, v, pages))
    assert program.count("Precision.HIGHEST") == 4  # both operands of two sums


def test_bad_arguments_are_named(unchecked_signatures):
    case = Case()
    q, k, v, _ = _inputs(case)
    lists = _lists(case)
    pages, split = Pages(lists, *BOUNDS, 8), jnp.array([8], jnp.int32)
    shared = dict(shared=Shared(k[:1], v[:1], split))
    every = replace(pages, listed=jnp.tile(lists, (1, 2, 1))[:, :3])
    around = replace(pages, around=Around(BOUNDS[1], 1, 1))
    flat = replace(pages, listed=lists[:, 0], heads=lists[:, 0])
    for changed, message in (
        (dict(pages=every), "2 kv heads or 8 query heads, or for all"),
        (dict(pages=replace(pages, size=0)), "pages of 0 slots"),
        (dict(prior=q[:, :, 1:]), "as q has"),
        (dict(pages=replace(flat, listed=lists[:, 0, 1:])), "one shape"),
        (dict(pages=around), "attend to those slots in a call of their own"),
        (dict(q=q[:, :, :3]), "does not fit"),
        (dict(pages=replace(flat, first=1)), "a first page given with a flat list"),
        (shared | dict(pages=replace(pages, first=1)), "a flat list, a prior or a first page"),
        (shared | dict(prior=q), "shared slots given with a flat list, a prior"),
        (dict(shared=Shared(k, v, split)), "does not fit"),
    ):
        with pytest.raises(ValueError, match=message):
            sparse_decode_attention(**dict(q=q, k=k, v=v, pages=pages) | changed, scale=1.0)
