import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_mass import Reduction, attention_mass, xla
from pallas_kernels.prefill_attention import cache_attention
from tests.drawing import normal

BATCH, HEAD_DIM = 4, 8


def _expected(q, k, lse, lengths, valid, start, over_group):
    """Mass and squares of all queries' weights [B,K,G,T,S], in float64."""
    (b, t, n, h), (_, kv_heads, s, _) = q.shape, k.shape
    q = q.reshape(b, t, kv_heads, n // kv_heads, h).astype(np.float64)
    logits = np.einsum("btkgh,bksh->bkgts", q, k)
    lse = lse.reshape(*q.shape[:-1]).transpose(0, 2, 3, 1)[..., None]
    slot, query = np.arange(s), np.arange(t)[:, None]

    def of_rows(x):
        return np.asarray(x)[:, None, None, None, None]

    counts = np.isfinite(lse) & (slot < of_rows(lengths))
    if valid is not None:
        counts &= query < of_rows(valid)
    if start is not None:
        counts &= slot <= of_rows(start) + query
    p = np.exp(np.where(counts, logits - np.where(counts, lse, 0), -np.inf))
    per_head = p.sum(3)
    mass = {"sum": per_head.sum(2), "max": per_head.max(2), "first": per_head[:, :, 0]}
    return mass[over_group], (p.mean(2) ** 2).sum(2)


def _inputs(queries, slots, lengths, groups=2, large=False):
    """Random q and k, 1e4 beyond the lengths, and log-sum-exps near the true ones, some -inf."""
    rng = np.random.default_rng(queries + slots)
    q = rng.normal(size=(BATCH, queries, 2 * groups, HEAD_DIM)).astype(np.float32)
    k = rng.normal(size=(BATCH, 2, slots, HEAD_DIM)).astype(np.float32)
    q *= 40 if large else 1
    k[(np.arange(slots) >= np.asarray(lengths)[:, None])[:, None].repeat(2, 1)] = 1e4
    logits = np.einsum("BTNH,BNSH->BTNS", q, k.repeat(groups, 1))
    seen = (np.arange(slots) < np.asarray(lengths)[:, None])[:, None, None]
    top = np.max(logits, axis=-1, where=seen, initial=0.0)
    lse = top + rng.uniform(0, 2, top.shape)
    lse[:, queries // 2, 1] = -np.inf
    return q, k, lse.astype(np.float32)


@functools.cache
def _compiled(keys, pairs, implementation="xla", **static):
    """One program for all rows of a shape; keys and pairs bound the blocks of the stream."""

    @jax.jit
    def run(*args, **rows):
        how = Reduction(1.0, **static, **rows)
        return attention_mass(*args, how, implementation=implementation)

    def call(q, k, lse, lengths, **rows):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(xla, "_MIN_KEYS", keys)
            patch.setattr(xla, "_MAX_KEYS", keys)
            patch.setattr(xla, "_LOGIT_BYTES", 4 * q.shape[0] * q.shape[2] * pairs)
            return run(q, k, lse, lengths, **rows)

    return call


def _check(run, lengths, valid, start, group, squares, *inputs):
    rows = {"valid": valid, "causal_start": start}
    rows = {name: jnp.asarray(x, jnp.int32) for name, x in rows.items() if x is not None}
    result = run(*inputs, jnp.asarray(lengths, jnp.int32), **rows)
    expected = _expected(*inputs, lengths, valid, start, group)
    for one, other in zip(result if squares else (result,), expected, strict=False):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)
        beyond = np.arange(one.shape[-1]) >= np.asarray(lengths)[:, None, None]
        assert (np.asarray(one)[np.broadcast_to(beyond, one.shape)] == 0).all()


# Blocks of 8 keys: rows that end beside their edges, one empty, one beyond the capacity's end.
LENGTHS = [(0, 1, 7, 8), (9, 15, 16, 21), (21, 20, 17, 0)]
ROWS = [(7, 3, 0, 7), (5, 7, 1, 6)]
STARTS = [(0, 0, 3, 14), (2, 20, -3, 9)]


@pytest.mark.parametrize("causal", [False, True], ids=["all-see-all", "causal"])
@pytest.mark.parametrize(("group", "squares"), [("sum", True), ("max", False), ("first", False)])
def test_blocks_of_keys_and_queries(group, squares, causal):
    run = _compiled(8, 16, over_group=group, squares=squares)
    for lengths in LENGTHS:
        inputs = _inputs(7, 21, lengths)
        for valid, start in zip(ROWS, STARTS, strict=True):
            at = start if causal else None
            _check(run, lengths, valid, at, group, squares, *inputs)


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("queries", [1, 5])
def test_groups_and_one_query(groups, queries):
    lengths = (0, 1, 12, 13)
    run = _compiled(8, 64, over_group="sum", squares=True)
    for large in (False, True):
        inputs = _inputs(queries, 13, lengths, groups, large)
        _check(run, lengths, None, None, "sum", True, *inputs)


def test_one_query_is_causal_and_may_not_count():
    lengths, valid, start = (13, 13, 13, 5), (1, 1, 0, 1), (4, 0, 9, 9)
    q, k, lse = _inputs(1, 13, lengths)
    run = _compiled(8, 64, over_group="first")
    _check(run, lengths, valid, start, "first", False, q, k, np.abs(lse))


@pytest.mark.parametrize("options", [{"squares": True}, {"over_group": "first"}])
def test_the_reference_is_the_definition(options):
    lengths = (0, 1, 20, 21)
    run = _compiled(8, 24, "reference", **options)
    group, squares = options.get("over_group", "sum"), options.get("squares", False)
    inputs = _inputs(7, 21, lengths)
    _check(run, lengths, ROWS[1], STARTS[0], group, squares, *inputs)


def test_mass_sums_to_the_number_of_queries_and_squares_are_beside_a_sum():
    with pytest.raises(ValueError, match="squares beside over_group 'max'"):
        Reduction(1.0, over_group="max", squares=True)
    # With the attention's own log-sum-exp every counted query and head spreads a mass of 1.
    lengths = jnp.array([0, 1, 300, 1100], jnp.int32)
    shapes = (4, 6, 4, HEAD_DIM), (4, 2, 1100, HEAD_DIM)
    q, k = (normal(*shape, seed=i, dtype="bfloat16") for i, shape in enumerate(shapes))
    _, lse = cache_attention(q, k, k, lengths, scale=0.7)
    mass = attention_mass(q, k, lse, lengths, Reduction(0.7, jnp.array([6, 6, 6, 2])))
    np.testing.assert_allclose(mass.sum(-1)[:, 0], [0, 12, 12, 4], rtol=1e-3)


def test_rows_beyond_valid_and_keys_outside_the_blocks_may_hold_nan():
    """Rows that do not count are not multiplied in, blocks that nobody sees are not read."""
    q, k, lse = _inputs(7, 21, (9, 9, 9, 9))
    q[:, 5:], lse[:, 5:], k[:, :, 16:] = np.nan, np.nan, np.nan
    lengths, valid = jnp.array([9, 8, 3, 0]), jnp.array([5, 4, 0, 1])
    run = _compiled(8, 24, over_group="sum")
    mass = run(q, k, lse, lengths, valid=valid)
    assert np.isfinite(mass).all() and (np.asarray(mass)[0, :, :9] > 0).all()
    late = run(q, k, lse, jnp.full(4, 21), valid=valid, causal_start=jnp.zeros(4, jnp.int32))
    np.testing.assert_array_equal(np.asarray(late)[0, :, 5:], 0)


# The last query stands at slot 8 + 6 and the first of the second block's at 8.
FIRST_SEES = dict(lengths=[21] * 4, causal_start=[8, 0, 2, 3])
# The second block's slots, from 8, are seen by queries 4 to 6: by the last two blocks of them.
LATER_SEES = dict(lengths=[21] * 4, causal_start=[4, 0, 2, 3])


@pytest.mark.parametrize(
    ("rows", "visited"),
    [
        (dict(lengths=[21, 1, 0, 8]), 12),
        (dict(lengths=[99, 1, -1, 8]), 12),
        (dict(lengths=[8, 1, 0, 3]), 4),
        (dict(lengths=[0, 0, 0, 0]), 0),
        (FIRST_SEES, 8),
        (dict(FIRST_SEES, valid=[99] * 4), 8),
        (LATER_SEES, 4 + 2),
    ],
)
def test_blocks_that_nobody_fills_or_sees_are_not_computed(monkeypatch, rows, visited):
    """Counted for three blocks of 8 keys and four of 2 queries: 7 queries over 21 slots."""
    found, probabilities = [], xla._probabilities

    def count(*args):
        jax.debug.callback(lambda: found.append(1))
        return probabilities(*args)

    monkeypatch.setattr(xla, "_probabilities", count)
    arrays = {name: jnp.asarray(x, jnp.int32) for name, x in rows.items()}
    run = _compiled.__wrapped__(8, 16)
    jax.block_until_ready(run(*_inputs(7, 21, (21,) * BATCH), **arrays))
    jax.effects_barrier()
    assert len(found) == visited


def _program(queries, slots, heads=8, **options):
    shapes = (1, queries, heads, 64), (1, 2, slots, 64), (1, queries, heads)
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    arguments.append(jax.ShapeDtypeStruct((1,), jnp.int32))
    how = Reduction(0.1, **options)
    run = jax.jit(functools.partial(attention_mass, how=how, implementation="xla"))
    return run.lower(*arguments).compile()


def _temporaries(*shape):
    return _program(*shape).memory_analysis().temp_size_in_bytes


def test_neither_the_logits_nor_heads_that_do_not_count_cost():
    # A longer cache adds only the sums of its slots, more queries only copies of theirs.
    short, long, tall = _temporaries(512, 4096), _temporaries(512, 65536), _temporaries(8192, 4096)
    assert short < 64 * 2**20
    assert long <= short + 3 * (65536 - 4096) * 8 * 4
    assert tall <= short + 4 * (8192 - 512) * 8 * (64 + 1) * 4
    # So many queries that even the fewest keys need them in blocks.
    assert _temporaries(65536, 256, 32) < 64 * 2**20 + 4 * 65536 * 32 * (64 + 1) * 4
    every, first = (_program(1, 4096, over_group=x).cost_analysis() for x in ("sum", "first"))
    assert first["flops"] < every["flops"] / 3
