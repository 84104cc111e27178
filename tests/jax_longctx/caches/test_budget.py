import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.caches import BudgetCache, Joining, choose

SIZE = 5
# Rows that have room, are full, take nothing, and are empty; the score of the newest comes last.
LENGTH = np.array([3, 5, 5, 4, 0, 5, 5])
READ = np.array([1, 1, 1, 0, 1, 1, 1])
SCORES = np.array(
    [
        [2, 1, 3, 0, 0, 1],
        [2, 1, 3, 4, 5, 9],
        [2, 3, 4, 5, 6, 1],
        [2, 1, 3, 4, 0, 0],
        [0, 0, 0, 0, 0, 1],
        # Of equals the newest leaves, be it in the cache or not.
        [4, 1, 3, 1, 5, 7],
        [2, 1, 3, 1, 5, 1],
    ],
    np.float32,
)
KEPT = [
    [10, 11, 12, 13],
    [10, 12, 13, 14, 15],
    [10, 11, 12, 13, 14],
    [10, 11, 12, 13],
    [10],
    [10, 11, 12, 14, 15],
    [10, 11, 12, 13, 14],
]


@pytest.mark.parametrize("one", [False, True])
def test_the_best_stay_in_order_with_their_sums(one):
    rows = len(LENGTH)
    slots = 10.0 + np.arange(SIZE + 1)
    # Key, value, token and sums of a slot all tell its number; slots beyond the length are garbage.
    held = np.where(np.arange(SIZE) < LENGTH[:, None], slots[:SIZE], 99)[:, None]
    newest = (10.0 + LENGTH)[:, None, None, None]
    sums = np.concatenate([held, newest[:, :, 0]], axis=2)[..., None]
    cache = BudgetCache(
        jnp.array(held[..., None]),
        jnp.array(-held[..., None]),
        jnp.array(held, jnp.int32),
        jnp.array(sums[:, :, :SIZE]),
        jnp.array(LENGTH),
        jnp.array(LENGTH) + 10,
    )
    present = np.concatenate([np.arange(SIZE) < LENGTH[:, None], READ[:, None] > 0], axis=1)
    scores = np.where(present, SCORES, -np.inf)[:, None]
    count = np.minimum(LENGTH + READ, SIZE)
    new = Joining(*(jnp.array(x) for x in (newest, -newest, sums, count, READ)))
    got = jax.jit(functools.partial(choose, one=one))(cache, new, jnp.array(scores))
    np.testing.assert_array_equal(got.length, count)
    np.testing.assert_array_equal(got.position, LENGTH + 10 + READ)
    for row in range(rows):
        kept = slice(0, count[row])
        np.testing.assert_array_equal(got.token[row, 0, kept], KEPT[row])
        np.testing.assert_array_equal(got.k[row, 0, kept, 0], KEPT[row])
        np.testing.assert_array_equal(-got.v[row, 0, kept, 0], KEPT[row])
        np.testing.assert_array_equal(got.statistics[row, 0, kept, 0], KEPT[row])
