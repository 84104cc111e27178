"""Heads that keep numbers of their own: what they attend, the memory, and which heads look far."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.caches.uneven import PAGE
from jax_longctx.engine.capacity import footprint
from jax_longctx.engine.running import Ask, RunningBatch
from jax_longctx.engine.setup import Setup
from jax_longctx.errors import ConfigError
from jax_longctx.evaluation.heads import measured, query_filters
from jax_longctx.methods import make_method
from jax_longctx.parts.head_budgets import ada_tokens
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import (
    answer_logits,
    check_rows,
    full_logits,
    oracle_params,
    row_logits,
    steps,
    whole_rows,
)
from tests.oracle import forward, probabilities, rope, weighted_values
from tests.support import random_rows, tiny_config, tiny_engine

# A question of more queries than a decode step's kernel takes, and one of a single token.
LENGTHS = [[400, 150, 1], [20, 3, 1], [3, 3, 3]]
ROWS = [random_rows(lengths, seed=seed) for seed, lengths in enumerate(LENGTHS)]
NAMES = [
    "keydiff:budget=100,over_heads=ada",
    "expected-attention:ratio=0.4,over_heads=critical",
    "snapkv:budget=100,window=8,over_heads=critical",
    "duo-attention:heads=10/01,sink=4,recent=32",
]


@functools.cache
def engine_of(name, mesh=(1, 1, 1), **options):
    return tiny_engine(make_method(name), mesh=make_mesh(*mesh), chunk=64, **options)


def pages(name):
    """The layers' caches in the last step of the answers."""
    (*_, last) = steps(engine_of(name), *ROWS)
    return last.caches


def masked(engine, caches, whole, row, after):
    """Logits of a row whose tokens from `after` on attend to what each head keeps before that."""
    theta, params, group = engine.config.rope.theta, oracle_params(engine), 2

    def attend(layer, q, k, v):
        at, cache = np.arange(len(q)), caches[layer]
        q, k = rope(q, at, theta), rope(k, at, theta)
        sees = np.repeat((at[:, None] >= at)[None], q.shape[1], axis=0)
        for head in range(k.shape[1]):
            keys = [
                np.asarray(cache.k)[row, p, : cache.count[row, p]]
                for p in range(cache.head.shape[1])
                if cache.head[row, p] == head
            ]
            stays = np.concatenate(keys)[:, None] - k[None, :after, head]
            stays = np.abs(stays).max(axis=-1) < 1e-5  # [kept, after]
            assert (stays.sum(axis=-1) == 1).all()
            sees[head * group : (head + 1) * group, after:, :after] &= stays.any(axis=0)
        return weighted_values(probabilities(q, k, sees), v)

    return forward(engine.config, params, whole, attend)


@pytest.mark.slow
@pytest.mark.quick("keydiff")
@pytest.mark.parametrize("name", NAMES)
def test_tokens_attend_to_what_each_head_keeps_and_to_those_after(name):
    engine, caches = engine_of(name), pages(name)
    found = row_logits(engine, ROWS)
    assert caches[0].head.shape == caches[0].k.shape[:2] and caches[0].k.shape[2] == PAGE
    for b, (mine, whole) in enumerate(zip(found, whole_rows(ROWS), strict=True)):
        after = len(ROWS[0][b]) + (len(ROWS[1][b]) if name.startswith("snapkv") else 0)
        expected = masked(engine, caches, whole, b, after)
        np.testing.assert_allclose(mine[after:], expected[after:], atol=1e-4)
    counts = [
        [int(np.sum(cache.count[0], where=cache.head[0] == head)) for head in range(2)]
        for cache in caches
    ]
    if name.startswith("duo"):
        assert counts == [[400, 36], [36, 400]]
        return
    most = 100 if "budget" in name else 160
    assert all(sum(each) == 2 * most for each in counts)
    assert any(first != second for first, second in counts)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_mesh_equals_one_device(name):
    one, mesh = (answer_logits(engine_of(name, sizes), ROWS) for sizes in [(1, 1, 1), (1, 2, 2)])
    np.testing.assert_allclose(mesh, one, atol=1e-4)


@pytest.mark.slow
def test_a_budget_for_all_tokens_is_full_attention():
    engine = engine_of("knorm:budget=400,over_heads=critical")
    check_rows(row_logits(engine, ROWS), full_logits(engine, ROWS))


def test_memory_and_reads_are_those_of_the_budget_in_whole_pages():
    def found(name):
        setup = Setup(
            tiny_config(max_position=8192), make_method(name), make_mesh(), jnp.float32, 128
        )
        return footprint(setup, batch=1, context=4000, reserve=90)

    uneven = found("knorm:budget=1024,over_heads=ada")
    # Keys and values of two layers: 2 x 8 pages, one more for what a head's last page leaves, and
    # two heads of 256 slots for question and answer.
    assert uneven.read == 2 * 2 * (8 * 4) * PAGE * (17 + 2 * 2)
    assert uneven.kept < 1.06 * found("knorm:budget=1024").kept


def test_every_head_keeps_its_share_where_what_always_stays_is_more_than_the_budget():
    scores = jnp.full((1, 4, 40), jnp.inf).at[..., 8:24].set(jnp.arange(16.0))
    for norms in (None, jnp.ones(scores.shape)):
        kept = ada_tokens(scores, jnp.array([10]), norms)
        assert jnp.sum(kept) == 40 and jnp.min(jnp.sum(kept, axis=-1)) >= 2


@pytest.mark.parametrize("name", ["duo-attention:heads=1", "knorm:budget=400,over_heads=ada"])
def test_a_row_of_a_batch_may_be_longer_than_the_batch_s_reserve_leaves(name):
    engine, (row,) = engine_of(name), random_rows([400], seed=5)
    batch = RunningBatch(engine, places=1, slots=engine.slots_for(410), reserve=256)
    context = engine.prefill([row], reserve=8, capacity=batch.slots)
    place, first = batch.join(context, Ask([1, 2, 3], max_tokens=5))
    assert len(row) > batch.slots - batch.reserve
    answer = [first, *batch.step()[place]]
    stream = engine.stream(context, [[1, 2, 3]], max_tokens=5)
    assert [each.token for each in answer] == [int(t) for block in stream for t in block[0]]


def test_nothing_follows_uneven_heads():
    with pytest.raises(
        ConfigError, match="nothing can follow knorm: with over_heads=ada its heads"
    ):
        make_method("knorm:over_heads=ada > quest")


def test_a_file_says_which_heads_retrieve(tmp_path):
    scores = np.array([[0.1, 0.9, 0.2], [1.5, -1.0, 0.3]])
    np.savetxt(tmp_path / "heads.tsv", scores, delimiter="\t")
    method = make_method("duo-attention", {"heads": str(tmp_path / "heads.tsv"), "share": 0.34})
    # As kvpress has it: the lowest of all numbers are those of streaming heads.
    streams = np.zeros(scores.shape, bool)
    lowest = np.argsort(np.clip(scores, 0, 1), axis=None)[: round(6 * 0.66)]
    streams[np.unravel_index(lowest, scores.shape)] = True
    assert method.heads == "/".join("".join(str(int(not x)) for x in row) for row in streams)
    for heads, said in {
        "": "write a file with jax-longctx calibrate",
        "101/011": "heads has 2 layers of 3 kv heads, this model 2 of 2",
    }.items():
        with pytest.raises(ConfigError, match=said):
            engine_of(f"duo-attention:heads={heads}" if heads else "duo-attention")
    for text, said in {
        "0.5\tx\n": "is no table of numbers apart by tabs",
        "0.5\t1e39\n": "holds no lines of finite float32 numbers",
    }.items():
        (tmp_path / "heads.tsv").write_text(text)
        with pytest.raises(ConfigError, match=said):
            make_method("duo-attention", {"heads": str(tmp_path / "heads.tsv")})


@pytest.mark.slow
def test_what_is_measured_of_heads_is_what_numpy_says():
    """Far attention, and the first right singular vectors of queries."""
    engine = engine_of("full", config=tiny_config(max_position=2048, sinks=True))
    text, passage, params = ROWS[0][0], ROWS[0][0][60:80], oracle_params(engine)
    found = measured(engine, text, passage, sink=4, recent=32)
    expected, filters, theta = [], [], engine.config.rope.theta

    def attend(layer, q, k, v):
        at, sinks = np.arange(len(q)), params["layers"][str(layer)]["attn"]["sinks"]
        q = rope(q, at, theta)
        p = probabilities(q, rope(k, at, theta), at[:, None] >= at, sinks)
        far = (at >= 4) & (at < at[:, None] - 32)
        mean = (p * far).sum(-1)[:, len(text) :].mean(-1)
        expected.append(mean.reshape(-1, 2).max(-1))
        read = np.swapaxes(q[: len(text)], 0, 1)  # [N, T, H]
        first = np.linalg.svd(read).Vh[:, 0]
        first *= np.sign((read @ first[..., None]).mean(1))
        filters.append(first.reshape(-1, 2, first.shape[1]).mean(1))
        return weighted_values(p, v)

    forward(engine.config, params, [*text, *passage], attend)
    np.testing.assert_allclose(found.far, expected, atol=1e-4)
    made = query_filters(found.queries, found.products, kv_heads=2)
    np.testing.assert_allclose(made, filters, atol=1e-4)
