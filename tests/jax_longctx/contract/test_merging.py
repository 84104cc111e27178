"""Both ways of merging shards' partial attention: against float64 (spec: S9), what they send."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_longctx.contract import merging
from jax_longctx.contract.merging import by_sum, merge_cost
from jax_longctx.planning.compiled import count_collectives
from jax_longctx.sharding import make_mesh
from tests.absent import tpu

by_gather = functools.partial(
    merging.by_gather, gather=functools.partial(jax.lax.all_gather, axis_name="seq")
)
WAYS = [by_sum, by_gather]


def over(shards, way, out, lse, devices=None):
    """`way` of parts `[shards, B, T, N, H]`; every shard's result, and the compiled program."""
    mesh = make_mesh(seq=shards, devices=devices)
    spec = PartitionSpec("seq")

    def body(out, lse):
        merged = way(out[0], lse[0])
        return tuple(x[None] for x in merged)

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    return run.lower(out, lse).compile()


def parts(shards, dtype, spread=3.0):
    rng = np.random.default_rng(shards)
    out = rng.normal(size=(shards, 2, 3, 4, 8))
    lse = rng.normal(size=(shards, 2, 3, 4)) * spread
    return jnp.array(out, dtype), jnp.array(lse, jnp.float32)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("shards", "dtype"), [(2, "float32"), (8, "float32"), (4, "bfloat16")])
def test_every_shard_gets_the_attention_over_all(way, shards, dtype):
    out, lse = parts(shards, dtype)
    # An empty shard of a row whatever it holds, a row that nobody saw, and far apart.
    lse = lse.at[0, 0].set(-jnp.inf).at[:, 1, 0].set(-jnp.inf).at[1, 1, 2].set(1e4)
    merged, total = over(shards, way, out, lse)(out, lse)
    exact, weight = np.asarray(out, np.float64), np.asarray(lse, np.float64)
    top = weight.max(axis=0)
    base = np.where(np.isfinite(top), top, 0)
    share = np.exp(weight - base)
    whole = share.sum(axis=0)
    wanted = (share[..., None] * exact).sum(axis=0) / np.where(whole > 0, whole, 1)[..., None]
    with np.errstate(divide="ignore"):
        wanted_lse = np.where(whole > 0, base + np.log(whole), -np.inf)
    for shard in range(shards):
        tolerance = 1e-5 if dtype == "float32" else 1e-2
        np.testing.assert_allclose(np.asarray(merged[shard], np.float64), wanted, atol=tolerance)
        np.testing.assert_allclose(total[shard], wanted_lse, rtol=1e-6)


def test_the_order_of_the_shards_does_not_matter_and_what_is_fewer_bytes_is_sent():
    out, lse = parts(4, "float32")
    run = over(4, by_gather, out, lse)
    other = [2, 0, 3, 1]
    for mine, theirs in zip(run(out, lse), run(out[other, :], lse[other, :]), strict=True):
        np.testing.assert_allclose(mine[0], theirs[0], atol=1e-6)
    cost = functools.partial(merge_cost, width=128, itemsize=2)
    assert cost(32, shards=2)[1] == cost(32, shards=16)[1] == 1
    # 512 queries: less to receive for two shards, as much for four, twice as much for eight.
    assert cost(512 * 32, shards=2)[1] == cost(512 * 32, shards=4)[1] == 1
    assert cost(512 * 32, shards=8)[1] == 2
    assert merge_cost(32, 128, 2, 4) == (received(4, by_gather), 1)
    assert merge_cost(512 * 32, 128, 2, 8) == (512 * received(8, by_sum), 2)


def received(shards, way):
    """Bytes that a device receives by the module's account, for one query of 32 heads of 128."""
    if way is by_gather:
        return (shards - 1) * 32 * (2 * 128 + 4)
    return 2 * (shards - 1) / shards * 32 * (4 * 128 + 8)


@pytest.mark.optimized
@pytest.mark.parametrize("shards", [2, 4, 8])
@pytest.mark.parametrize(("way", "collectives"), [(by_sum, 2), (by_gather, 1)])
def test_the_compiled_program_sends_what_is_said(shards, way, collectives):
    out = jnp.zeros((shards, 1, 1, 32, 128), jnp.bfloat16)
    lse = jnp.zeros((shards, 1, 1, 32), jnp.float32)
    text = over(shards, way, out, lse).as_text()
    count, results = count_collectives(text)
    assert count == collectives
    # A gather's result holds the own part too; an all-reduce's travels twice, but for its own.
    if way is by_gather:
        assert results == received(shards, way) * shards / (shards - 1)
    else:
        assert results == received(shards, way) / 2 * shards / (shards - 1)


@pytest.mark.optimized
@pytest.mark.parametrize(("way", "collectives"), [(by_sum, 2), (by_gather, 1)])
def test_for_v5e_too(way, collectives):
    devices = tpu()
    mesh = make_mesh(seq=4, devices=devices)
    sharding = jax.sharding.NamedSharding(mesh, PartitionSpec("seq"))
    shaped = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    out, lse = shaped((4, 1, 1, 32, 128), jnp.bfloat16), shaped((4, 1, 1, 32), jnp.float32)
    text = over(4, way, out, lse, devices).as_text()
    count, results = count_collectives(text)
    assert count == collectives
    least = received(4, way) * (4 / 3 if collectives == 1 else 2 / 3)
    assert results >= least, text
