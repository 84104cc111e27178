"""Attention mass against its definition in numpy, in every combination of its reductions."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention_mass import attention_mass, xla
from pallas_kernels.prefill_attention import cache_attention

BATCH, HEAD_DIM = 4, 8


def _expected(q, k, lse, lengths, *, scale, valid, start, over_group, over_queries):
    """Mass and squares by loops over rows and heads, in float64."""
    (b, t, n, _), (_, kv_heads, s, _) = q.shape, k.shape
    group = n // kv_heads
    p = np.zeros((b, kv_heads, group, t, s))
    for row in range(b):
        for head in range(n):
            logits = scale * q[row, :, head].astype(np.float64) @ k[row, head // group].T
            with np.errstate(over="ignore", invalid="ignore"):
                weights = np.exp(logits - lse[row, :, head, None])
            weights[np.isneginf(lse[row, :, head])] = 0
            if valid is not None:
                weights[max(valid[row], 0) :] = 0
            weights[:, max(lengths[row], 0) :] = 0
            if start is not None:
                weights[np.arange(s) > start[row] + np.arange(t)[:, None]] = 0
            p[row, head // group, head % group] = weights
    per_head = p.sum(3) if over_queries == "sum" else p.max(3)
    mass = {"sum": per_head.sum(2), "max": per_head.max(2), "first": per_head[:, :, 0]}
    return mass[over_group], (p.mean(2) ** 2).sum(2)


def _inputs(
    queries: int, slots: int, lengths: Any, groups: int = 2, large: bool = False
) -> tuple[np.ndarray, ...]:
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
def _compiled(keys: int, pairs: int, implementation: str = "xla", **static: Any) -> Callable:
    """One program for all rows of a shape; keys and pairs bound the blocks of the stream."""
    run = jax.jit(
        functools.partial(attention_mass, scale=1.0, implementation=implementation, **static)
    )

    def call(q, k, lse, lengths, **rows):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(xla, "_MIN_KEYS", keys)
            patch.setattr(xla, "_MAX_KEYS", keys)
            patch.setattr(xla, "_LOGIT_BYTES", 4 * q.shape[0] * q.shape[2] * pairs)
            return run(q, k, lse, lengths, **rows)

    return call


def _check(run: Callable, q, k, lse, lengths, valid, start, group, over_queries, squares) -> None:
    rows = {"valid": valid, "causal_start": start}
    rows = {name: jnp.asarray(x, jnp.int32) for name, x in rows.items() if x is not None}
    result = run(q, k, lse, jnp.asarray(lengths, jnp.int32), **rows)
    expected = _expected(
        q,
        k,
        lse,
        lengths,
        scale=1.0,
        valid=valid,
        start=start,
        over_group=group,
        over_queries=over_queries,
    )
    results = result if squares else (result,)
    beyond = (np.arange(k.shape[2]) >= np.asarray(lengths)[:, None])[:, None].repeat(2, 1)
    for one, other in zip(results, expected, strict=False):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-6)
        assert (np.asarray(one)[beyond] == 0).all()


# Blocks of 8 keys: rows that end beside their edges, one empty, one beyond the capacity's end.
LENGTHS = [(0, 1, 7, 8), (9, 15, 16, 21), (21, 20, 17, 0)]
ROWS = [(7, 3, 0, 7), (5, 7, 1, 6)]
STARTS = [(0, 0, 3, 14), (2, 20, -3, 9)]


@pytest.mark.parametrize("causal", [False, True], ids=["all-see-all", "causal"])
@pytest.mark.parametrize(
    ("group", "over_queries", "squares"),
    [("sum", "sum", True), ("max", "sum", False), ("first", "max", False), ("max", "max", True)],
)
def test_blocks_of_keys_and_queries(
    group: str, over_queries: str, squares: bool, causal: bool
) -> None:
    """7 queries in blocks of 2 against 21 slots in blocks of 8: neither divides."""
    run = _compiled(8, 16, over_group=group, over_queries=over_queries, squares=squares)
    for lengths in LENGTHS:
        q, k, lse = _inputs(7, 21, lengths)
        for valid, start in zip(ROWS, STARTS, strict=True):
            at = start if causal else None
            _check(run, q, k, lse, lengths, valid, at, group, over_queries, squares)


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("queries", [1, 5])
def test_groups_and_one_query(groups: int, queries: int) -> None:
    """One query takes no loop; all rows count where `valid` is left out; large logits."""
    lengths = (0, 1, 12, 13)
    run = _compiled(8, 64, over_group="sum", squares=True)
    for large in (False, True):
        q, k, lse = _inputs(queries, 13, lengths, groups, large)
        _check(run, q, k, lse, lengths, None, None, "sum", "sum", True)


def test_one_query_is_causal_and_may_not_count() -> None:
    lengths, valid, start = (13, 13, 13, 5), (1, 1, 0, 1), (4, 0, 9, 9)
    q, k, lse = _inputs(1, 13, lengths)
    run = _compiled(8, 64, over_group="first")
    _check(run, q, k, np.abs(lse), lengths, valid, start, "first", "sum", False)


@pytest.mark.parametrize("options", [{"squares": True, "over_group": "first"}, {}])
def test_the_reference_is_the_definition(options: dict) -> None:
    lengths = (0, 1, 20, 21)
    q, k, lse = _inputs(7, 21, lengths)
    run = _compiled(8, 24, "reference", **options)
    group, squares = options.get("over_group", "sum"), options.get("squares", False)
    _check(run, q, k, lse, lengths, ROWS[1], STARTS[0], group, "sum", squares)


def test_mass_of_whole_attention_sums_to_the_number_of_queries() -> None:
    """With the attention's own log-sum-exp every counted query and head spreads a mass of 1."""
    lengths = jnp.array([0, 1, 300, 1100], jnp.int32)
    keys = jax.random.split(jax.random.key(0), 2)
    q = jax.random.normal(keys[0], (4, 6, 4, HEAD_DIM)).astype(jnp.bfloat16)
    k = jax.random.normal(keys[1], (4, 2, 1100, HEAD_DIM)).astype(jnp.bfloat16)
    _, lse = cache_attention(q, k, k, lengths, scale=0.7)
    mass = attention_mass(q, k, lse, lengths, scale=0.7, valid=jnp.array([6, 6, 6, 2]))
    np.testing.assert_allclose(mass.sum(-1)[:, 0], [0, 12, 12, 4], rtol=1e-3)


def test_rows_beyond_valid_and_keys_outside_the_blocks_may_hold_nan() -> None:
    """Rows that do not count are not multiplied in, blocks that nobody sees are not read."""
    q, k, lse = _inputs(7, 21, (9, 9, 9, 9))
    q[:, 5:], lse[:, 5:], k[:, :, 16:] = np.nan, np.nan, np.nan
    lengths, valid = jnp.array([9, 8, 3, 0]), jnp.array([5, 4, 0, 1])
    run = _compiled(8, 24, over_group="sum")
    mass = run(q, k, lse, lengths, valid=valid)
    assert np.isfinite(mass).all() and (np.asarray(mass)[0, :, :9] > 0).all()
    late = run(q, k, lse, jnp.full(4, 21), valid=valid, causal_start=jnp.zeros(4, jnp.int32))
    np.testing.assert_array_equal(np.asarray(late)[0, :, 5:], 0)


def _count_blocks(monkeypatch: pytest.MonkeyPatch, **rows: Any) -> int:
    """How many blocks of 8 keys and 2 queries a stream of 7 queries over 21 slots computes."""
    visited = []
    probabilities = xla._probabilities

    def count(*args):
        jax.debug.callback(lambda: visited.append(1))
        return probabilities(*args)

    monkeypatch.setattr(xla, "_probabilities", count)
    q, k, lse = _inputs(7, 21, (21,) * BATCH)
    rows = {name: jnp.asarray(x, jnp.int32) for name, x in rows.items()}
    jax.block_until_ready(_compiled.__wrapped__(8, 16)(q, k, lse, **rows))
    jax.effects_barrier()
    monkeypatch.undo()
    return len(visited)


def test_blocks_that_nobody_fills_or_sees_are_not_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Counted for three blocks of keys and four of queries."""
    count = functools.partial(_count_blocks, monkeypatch)
    assert count(lengths=[21, 1, 0, 8]) == 12
    assert count(lengths=[99, 1, -1, 8]) == 12
    assert count(lengths=[8, 1, 0, 3]) == 4
    assert count(lengths=[0, 0, 0, 0]) == 0
    # The last query stands at slot 8 + 6 and the first of the second block's at 8.
    assert count(lengths=[21] * 4, causal_start=[8, 0, 2, 3]) == 8
    assert count(lengths=[21] * 4, causal_start=[8, 0, 2, 3], valid=[99] * 4) == 8
    # The second block's slots, from 8, are seen by queries 4 to 6: by the last two blocks of them.
    assert count(lengths=[21] * 4, causal_start=[4, 0, 2, 3]) == 4 + 2


def _program(queries: int, slots: int, heads: int = 8, **options: Any) -> jax.stages.Compiled:
    shapes = [(1, queries, heads, 64), (1, 2, slots, 64), (1, queries, heads), (1,)]
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.int32 if len(shape) == 1 else jnp.float32)
        for shape in shapes
    ]
    run = jax.jit(functools.partial(attention_mass, scale=0.1, implementation="xla", **options))
    return run.lower(*arguments).compile()


def _temporaries(*shape: int) -> int:
    return _program(*shape).memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_logits() -> None:
    """A longer cache adds only the sums of its slots, more queries only copies of theirs."""
    short, long, tall = _temporaries(512, 4096), _temporaries(512, 65536), _temporaries(8192, 4096)
    assert short < 64 * 2**20
    assert long <= short + 3 * (65536 - 4096) * 8 * 4
    assert tall <= short + 4 * (8192 - 512) * 8 * (64 + 1) * 4
    # So many queries that even the fewest keys need them in blocks.
    assert _temporaries(65536, 256, 32) < 64 * 2**20 + 4 * 65536 * 32 * (64 + 1) * 4


def test_the_first_heads_alone_are_computed_where_they_alone_count() -> None:
    every, first = (_program(1, 4096, over_group=x).cost_analysis() for x in ("sum", "first"))
    assert first["flops"] < every["flops"] / 3
