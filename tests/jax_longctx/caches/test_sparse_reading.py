import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scipy.spatial.distance import jensenshannon

from jax_longctx.caches.sparse_reading import block_shares, chosen_blocks
from jax_longctx.contract import LayerContext, SlotLayout
from jax_longctx.contract.context import STRIPE
from jax_longctx.settings import Reading
from jax_longctx.sharding import make_mesh
from pallas_kernels.sparse_prefill_attention import BLOCK
from tests.drawing import computed, normal
from tests.support import tiny_config

SCALE = 0.2


class Alone(LayerContext):
    """The context of one shard of the slots that has all."""

    seq_size: Any = 1
    seq_index: Any = 0

    def psum_seq(self, x):
        return x

    def pmax_seq(self, x):
        return x


class Half(Alone):
    """That of one of two shards, whose sums are 1."""

    def psum_seq(self, x):
        return jnp.ones_like(x)


def context(kind: type[LayerContext] = Alone):
    total = jnp.zeros(1, jnp.int32)
    return kind(scale=SCALE, window=None, rope=tiny_config().rope, total=total)


def shares(q, k, keys, past, valid, how):
    run = functools.partial(block_shares, how=how, ctx=context())
    return computed(run, q, k, keys, past, valid)


def test_shares_are_of_the_softmax_of_the_antidiagonals_means():
    how, (queries, slots) = Reading(stride=8), (200, 512)
    past, valid = np.array([300, 512, 0], np.int32), np.array([200, 150, 100], np.int32)
    q, k = normal(3, queries, 4, 16), normal(3, queries, 2, 16, seed=1)
    keys = normal(3, 2, slots, 16, seed=2)
    found = shares(q, k, keys, past, valid, how)
    assert found.shape == (3, 4, 2, 4)
    for b, n, tile in np.ndindex(found.shape[:3]):
        rows = []
        for first in range(tile * BLOCK, min((tile + 1) * BLOCK, valid[b]), how.stride):
            mine = np.zeros((how.stride, 16))
            own_q = np.asarray(q)[b, first : min(first + how.stride, valid[b]), n]
            mine[: len(own_q)] = own_q

            def score(run, mine=mine):
                return SCALE * np.mean([mine[s] @ run[how.stride - 1 - s] for s in range(len(run))])

            earlier = [
                score(np.asarray(keys)[b, n // 2, at : at + how.stride])
                for at in range(0, past[b], how.stride)
            ]
            own = np.asarray(k)[b, :, n // 2] * (np.arange(queries) < valid[b])[:, None]
            own = np.concatenate([own, np.zeros((how.stride, 16))])
            within = [score(own[at : at + how.stride]) for at in range(0, first + 1, how.stride)]
            weights = np.exp(np.array([*earlier, *within]))
            weights /= weights.sum()
            sums = np.zeros(slots // BLOCK)
            np.add.at(sums, np.arange(len(earlier)) * how.stride // BLOCK, weights[: len(earlier)])
            rows.append(sums)
        expected = np.mean(rows, axis=0) if rows else np.zeros(slots // BLOCK)
        np.testing.assert_allclose(found[b, n, tile], expected, atol=1e-5)


def chosen(given, past, how, kind=Alone):
    run = functools.partial(chosen_blocks, how=how, ctx=context(kind))
    return computed(run, given, np.array(past, np.int32))


@pytest.mark.parametrize("mass", [0.5, 0.9, 0.99])
def test_the_fewest_blocks_that_keep_the_mass(mass):
    rng = np.random.default_rng(0)
    given = rng.dirichlet(np.full(21, 0.2), size=(1, 5, 3)).astype(np.float32)[..., :20]
    given = jnp.asarray(given)  # the rest is the chunk's own
    found = chosen(given, [20 * BLOCK - 5], Reading(mass=mass))
    missed = np.sum(np.where(found, 0, given), axis=-1)
    assert np.all(missed <= 1 - mass + 1e-6) and np.all(found[..., 0])
    for one, kept in zip(np.asarray(given).reshape(-1, 20), found.reshape(-1, 20), strict=True):
        fewest = next(n for n in range(21) if np.sort(one)[: 20 - n].sum() <= 1 - mass + 1e-7)
        assert kept.sum() <= fewest + 1


def test_a_density_is_a_number_of_blocks_of_those_that_there_are():
    given = jnp.asarray(np.random.default_rng(0).random((2, 4, 2, 20)), jnp.float32)
    past = np.array([20 * BLOCK, 6 * BLOCK + 1])
    begins = np.arange(20) * BLOCK < past[:, None]
    found = chosen(jnp.where(begins[:, None, None], given, 0), past, Reading(density=0.3))
    first = found[..., 0] & (np.argsort(np.argsort(-np.asarray(given)))[..., 0] >= 6)
    np.testing.assert_array_equal(found[0].sum(-1), 6 + first[0])
    assert np.all((found[1].sum(-1) >= 3) & (found[1].sum(-1) <= 4))
    assert not np.any(found & ~begins[:, None, None])


def test_shards_keep_the_mass_together():
    rng = np.random.default_rng(1)
    given = jnp.asarray(rng.dirichlet(np.full(32, 0.1), size=(1, 4, 2)), jnp.float32)
    halves = [given[..., :16], given[..., 16:]]
    found = [chosen(half, [16 * BLOCK], Reading(mass=0.9), Half) for half in halves]
    missed = sum(np.sum(np.where(c, 0, h), -1) for c, h in zip(found, halves, strict=True))
    assert np.all(missed <= 0.1 + 1e-6)


def test_without_earlier_keys_no_block_is_chosen():
    assert not np.any(chosen(jnp.zeros((1, 2, 1, 4)), [0], Reading()))


def brute_force(given, past, valid, how):
    """Shares of one row with whole blocks earlier, by vertical-slash or flex."""
    q, k, keys = given
    earlier, tiles = past // BLOCK, -(-len(q) // BLOCK)
    every = np.concatenate([keys[:past], k[:valid]])
    first = max(valid - BLOCK, 0)
    s = np.where(
        np.arange(past + valid) <= past + np.arange(first, valid)[:, None],
        SCALE * q[first:valid] @ every.T,
        -np.inf,
    )
    weights = np.asarray(jax.nn.softmax(s, axis=-1)).mean(0)
    last = [weights[at : at + BLOCK].sum() for at in range(0, past + valid, BLOCK)]
    newest = (valid - 1) // BLOCK
    found = np.zeros((tiles, keys.shape[0] // BLOCK))
    for tile, block in np.ndindex(newest + 1, earlier):
        found[tile, block] = max(last[block], last[block + newest - tile])
    means = [every[at : at + BLOCK].mean(0) for at in range(0, past + valid, BLOCK)]
    pooled = [
        np.asarray(
            jax.nn.softmax(
                SCALE
                * np.array(means[: earlier + t + 1])
                @ q[t * BLOCK : min((t + 1) * BLOCK, valid)].mean(0)
            )
        )
        for t in range(newest + 1)
    ]
    apart = jensenshannon(pooled[newest], last, base=2)
    if how.way == "flex" and apart < how.tau:
        found[: newest + 1, :earlier] = [row[:earlier] for row in pooled]
    return found, apart


@pytest.mark.parametrize("tau", [None, 0.0, 0.25, 1.0])
def test_shares_of_the_last_queries_and_of_means(tau):
    how = Reading(way="vertical-slash") if tau is None else Reading(way="flex", tau=tau)
    queries, past, valid = 300, np.array([384, 256, 0], np.int32), np.array([300, 200, 0], np.int32)
    q, k = 3 * normal(3, queries, 4, 16), normal(3, queries, 2, 16, seed=1)
    keys = normal(3, 2, 512, 16, seed=2)
    found = shares(q, k, keys, past, valid, how)
    assert found.shape == (3, 4, 3, 4) and not np.any(found[2])
    distances = []
    for b, n in np.ndindex(2, 4):
        given = [np.asarray(x, np.float64) for x in (q[b, :, n], k[b, :, n // 2], keys[b, n // 2])]
        expected, apart = brute_force(given, past[b], valid[b], how)
        distances.append(apart)
        np.testing.assert_allclose(found[b, n], expected, atol=1e-5)
    assert min(distances) < 0.25 < max(distances)  # both kinds of heads


@pytest.mark.parametrize(
    "how", [Reading(), Reading(way="flex", tau=0.25)], ids=["xattention", "flex"]
)
def test_shares_of_slots_in_stripes_are_those_of_slots_in_one_place(how):
    past, valid = np.array([7 * BLOCK, 4 * BLOCK], np.int32), np.array([300, 256], np.int32)
    q, k = normal(2, 300, 4, 16), normal(2, 300, 2, 16, seed=1)
    keys, layout = normal(2, 2, 8 * BLOCK, 16, seed=2), SlotLayout(2, STRIPE)

    def own(q, k, keys):
        ctx = dataclasses.replace(context(LayerContext), stripe=STRIPE)
        mine = ctx.slots(4 * BLOCK).below(jnp.asarray(past))
        return block_shares(q, k, keys, mine, jnp.asarray(valid), how, ctx)

    divided = P(None, None, "seq")
    run = jax.shard_map(
        own,
        mesh=make_mesh(seq=2),
        in_specs=(P(), P(), divided),
        out_specs=P(None, None, None, "seq"),
        check_vma=False,
    )
    dealt = computed(run, q, k, layout.dealt(keys, 2, 8 * BLOCK))
    found = layout.in_order(jnp.repeat(dealt, BLOCK, axis=3), 3, 8 * BLOCK)[..., ::BLOCK]
    np.testing.assert_allclose(found, shares(q, k, keys, past, valid, how), atol=1e-5)
