"""ArkVale's page cache, step by step, against sets of pages."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from research.arkvale_paged import ArkValePaged
from tests.jax_longctx.methods.oracles import selection as oracle
from tests.jax_longctx.methods.selecting import (
    KV_HEADS,
    SLOTS,
    WIDTH,
    case,
    filled,
    on_one_device,
    plain_context,
)

METHOD = ArkValePaged(budget=8, page_size=4, resident=20, sink=2, local=5)


def test_pages_enter_are_recalled_and_leave_as_in_the_released_code():
    """A row that leaves its cache behind, and one that never fills it."""
    rng = np.random.default_rng(3)
    given = case((30, 14), answered=0)
    k = rng.normal(size=(2, SLOTS, KV_HEADS, WIDTH)).astype(np.float32)

    def body(q, k, lengths, resident):
        ctx, ones = plain_context(), jnp.ones(2, jnp.int32)
        cache = filled(METHOD, q, k, k, lengths, lengths)
        cache = dataclasses.replace(cache, resident=resident)
        earlier = dataclasses.replace(cache.store, length=lengths - 1)
        span, before = (METHOD.selectable(store, ctx) for store in (cache.store, earlier))
        listed = METHOD.choose(q[:, None], cache, span, ctx).pages
        after = cache.counted(METHOD.attend_selected(q[:, None], cache, ctx), ones)
        held = resident | ((span.tokens > 0) & (before.tokens == 0))
        return listed[:, 0], after.resident, held

    step = on_one_device(body)
    resident = np.zeros((2, SLOTS // METHOD.page_size), bool)
    expected: list[set[int]] = []
    for row, length in enumerate(given.lengths):
        q = rng.normal(size=given.q[row].shape)
        expected.append(oracle.page_cache(METHOD, q, k[row, :length], None)[0])
        resident[row, sorted(expected[row])] = True
    left, recalled = 0, 0
    for more in range(1, 12):
        q = rng.normal(size=given.q.shape).astype(np.float32)
        lengths = given.lengths + np.int32(more)
        before = [set(pages) for pages in expected]
        listed, resident, held = (
            np.asarray(x) for x in step(q, np.swapaxes(k, 1, 2), lengths, resident)
        )
        for row in range(2):
            mine = q[row].astype(float), k[row, : lengths[row]].astype(float)
            expected[row], _ = oracle.page_cache(METHOD, *mine, expected[row])
            assert set(np.flatnonzero(resident[row])) == expected[row]
            assert [p for p in listed[row] if p >= 0] == sorted(expected[row])
            left += len(before[row] - expected[row])
            recalled += len(expected[row] - set(np.flatnonzero(held[row])))
    assert left > 5
    assert recalled > 5
    assert expected[1] == set(range(5)), "all that may be selected"
