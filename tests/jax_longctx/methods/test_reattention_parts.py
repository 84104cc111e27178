"""ReAttention's parts alone: votes, spans, planted keys, plans of segments, settings."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_longctx.caches import AppendCache
from jax_longctx.contract import LayerContext, Prompt
from jax_longctx.engine import programs
from jax_longctx.errors import ConfigError
from jax_longctx.methods import ReAttention, make_method, settings_of
from jax_longctx.methods.reattention import WHOLE
from jax_longctx.parts import voted_keys
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.engine.lowering import cache_bytes, compile_decode, no_persistent_cache
from tests.jax_longctx.methods.oracles.reattention import (
    chosen,
    votes_kept,
)
from tests.jax_longctx.methods.released import RELEASED, SMALL, method_of
from tests.jax_longctx.methods.selecting import layer_shape
from tests.support import random_rows, tiny_config

THETA = 1e4
# Where more layers would only take longer to compile.
ONE_LAYER = tiny_config(num_layers=1)
# Of each row: context, question; every row is given as many answer tokens.


def inside(function, *args, theta=THETA):
    """`function(ctx, *args)` as a method runs it, on one device."""
    rope = dataclasses.replace(tiny_config().rope, theta=theta)
    total = jnp.array([64])
    ctx = LayerContext(scale=1.0, window=None, rope=rope, total=total)
    everywhere = PartitionSpec()
    run = jax.shard_map(
        functools.partial(function, ctx),
        mesh=make_mesh(),
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )
    return jax.tree.map(np.asarray, jax.jit(run)(*args))


def test_1c_worked_example():
    def example(ctx, centres, stop):
        spans = voted_keys.spans_around(centres, 4, 2, stop)
        scope = voted_keys.Scope(*spans, stop, stop + 4, global_size=2, span=4, local_size=4)
        return *scope.listed(), scope.number

    slots, listed, number = inside(example, jnp.array([[2, 7]]), jnp.array([8]))
    assert listed[0] == number[0] == 11
    np.testing.assert_array_equal(slots[0], [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, *[-1] * 3])


@pytest.mark.parametrize("span", [1, 5, 8])
def test_ra_b10_spans_even_and_odd_are_cut_at_the_edges(span):
    rng = np.random.default_rng(span)
    start, stops = 3, rng.integers(4, 60, 24)
    centres = np.full((24, 6), -1)
    for row, stop in zip(centres, stops, strict=True):
        most = min(6, stop - start)
        some = rng.choice(np.arange(start, stop), rng.integers(0, most + 1), replace=False)
        # In any order, with gaps.
        row[rng.permutation(6)[: len(some)]] = some
    centres[:2], stops[:2] = [start, 31, -1, -1, -1, -1], 32
    lows, highs = inside(
        lambda ctx, *args: voted_keys.spans_around(args[0], span, start, args[1]),
        jnp.array(centres, jnp.int32),
        jnp.array(stops, jnp.int32),
    )
    before, after = span // 2, span - span // 2
    for low, high, row, stop in zip(lows, highs, centres, stops, strict=True):
        got = sorted(slot for span in zip(low, high, strict=True) for slot in range(*span))
        union = {s for c in row if c >= 0 for s in range(c - before, c + after)}
        expected = sorted(s for s in union if start <= s < stop)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_votes_keep_the_most_named_and_of_equals_the_lower(platform, monkeypatch):
    monkeypatch.setattr(voted_keys, "platform", lambda: platform)
    # Three blocks of entries and three pages, both with some to spare.
    monkeypatch.setattr(voted_keys, "_VOTES", 10)
    monkeypatch.setattr(voted_keys, "_LANES", 16)
    rng = np.random.default_rng(0)
    # Few slots for many votes: ties at the cut; rows of no votes, of fewer than are kept, of one.
    named = rng.integers(-1, 12, (8, 3, 4, 2))
    named[0], named[1] = -1, np.where(rng.random((3, 4, 2)) < 0.5, 7, 3)
    named[2], named[3] = 11, np.arange(24).reshape(3, 4, 2) // 2

    def both(ctx, named):
        alone = named.reshape(named.shape[0], 1, -1, 2)
        return tuple(voted_keys.most_voted(x, 40, 5, ctx) for x in (named, alone))

    ascending, alone = inside(both, jnp.array(named, jnp.int32))
    for row, votes in zip(ascending, named, strict=True):
        expected = votes_kept(votes.ravel().tolist(), 5)
        np.testing.assert_array_equal(row, [*expected, *[-1] * (5 - len(expected))])
    for row, votes in zip(alone, named, strict=True):
        # In any order.
        assert sorted(row[row >= 0].tolist()) == votes_kept(votes.ravel().tolist(), 5)


@pytest.mark.parametrize(("slots", "count"), [(96, 5), (96, 6), (96, 7), (90, 5)])
def test_of_many_slots_those_in_the_best_pages_are_ranked(slots, count, monkeypatch):
    """Pages of 16; more kept than there are pages, or a page cut short, and all are sorted."""
    monkeypatch.setattr(voted_keys, "_LANES", 16)
    monkeypatch.setattr(voted_keys, "_MANY", 64)
    sorted_at_once = []
    top_k = jax.lax.top_k

    def watched(x, k):
        sorted_at_once.append(x.shape[-1])
        return top_k(x, k)

    monkeypatch.setattr(jax.lax, "top_k", watched)
    # Few votes, so that whole pages tie; rows whose best all lie in one page, or one in each.
    votes = np.random.default_rng(count).integers(0, 4, (6, slots))
    votes[0], votes[1] = 0, 1
    votes[2, 40:] = 9
    votes[3], votes[3, ::16] = 0, 2
    most, at = voted_keys._most(jnp.array(votes, jnp.int32), count)
    order = np.argsort(-votes, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(at, order)
    np.testing.assert_array_equal(most, np.take_along_axis(votes, order, axis=-1))
    whole = slots % 16 or count > slots // 16
    assert sorted_at_once == ([slots] if whole else [slots // 16, 16 * count])


@pytest.mark.parametrize("page", [1, 4, 16])
def test_slots_of_most_votes_are_found_by_pages(page):
    """Whole pages tie; the best lie in one page, or one in each; fewer have votes than are kept."""
    votes = np.random.default_rng(page).integers(0, 4, (6, 96))
    votes[0], votes[1] = 0, 1
    votes[2, 40:] = 9
    votes[3], votes[3, ::16] = 0, 2**20
    votes[4], votes[4, 7] = 0, 1
    found = voted_keys._best_by_page(jnp.array(votes, jnp.int32), 5, page)
    for row, slots in zip(votes, np.asarray(found), strict=True):
        best = sorted(s for s in np.argsort(-row, kind="stable")[:5].tolist() if row[s])
        assert slots.tolist() == [*best, *[-1] * (5 - len(best))]


def test_pages_are_as_long_as_makes_both_searches_short(monkeypatch):
    monkeypatch.setattr(voted_keys, "in_one_launch", lambda slots, kept: slots <= 16_384)
    few = 1000
    assert voted_keys._page_size(16_384, 127, few) == 1
    assert voted_keys._page_size(133_120, 127, few) == 32
    assert voted_keys._page_size(2**20, 127, few) == 128
    # No page's size leaves both short.
    assert voted_keys._page_size(2**22, 127, few) is None
    assert voted_keys._page_size(133_121, 127, few) is None
    # Votes that float32 would not tell apart.
    assert voted_keys._page_size(16_384, 127, 2**23) is None
    monkeypatch.setattr(voted_keys, "in_one_launch", lambda slots, kept: False)
    assert voted_keys._page_size(16, 5, few) is None


def test_of_a_tile_the_first_of_equal_scores_stays_where_nothing_else_ties():
    """A query of zeros allows no difference."""
    values, slots = jnp.array([[[[0.0, 0.0, 0.0, 0.0]]]]), jnp.array([[[[5, 4, 9, -1]]]])
    best = voted_keys._best_of_tiles(values, slots, 0, 8, jnp.zeros((1, 1, 1)))
    assert best.tolist() == [[[[-1, 4, 9, -1]]]]


@pytest.mark.parametrize("tokens", [1, 3])
def test_e10_e5_a_planted_key_is_found_at_any_place_without_positions(tokens):
    """Of a cache of 40 keys one is a query, ten times as long; its span is cut at the edges."""
    rules = dataclasses.replace(SMALL, k=1, m=6, kept=12)
    method = method_of(rules)
    rng = np.random.default_rng(tokens)
    places = np.arange(rules.g, 40 - rules.w)
    q = rng.normal(size=(len(places), tokens, 4, 8)).astype(np.float32)
    k = rng.normal(size=(len(places), 2, 48, 8)).astype(np.float32)
    k[np.arange(len(places)), 1, places] = 10 * q[:, 0, 3]
    zeros = jnp.zeros(len(places), jnp.int32)

    def choose(ctx, q, k):
        cache = AppendCache(k, k, zeros + 40, zeros + 40, zeros, zeros)
        return method.choose(q, cache, zeros + tokens, ctx).listed()

    slots, number = inside(choose, jnp.array(q), jnp.array(k))
    for row, count, place, queries, keys in zip(slots, number, places, q, k, strict=True):
        expected = chosen(rules, queries, np.swapaxes(keys, 0, 1)[:40])
        np.testing.assert_array_equal(row[:count], expected)
        span = range(max(place - 3, rules.g), min(place + 3, 40 - rules.w))
        assert set(span) <= set(row[:count])
    assert number.min() < 40
    elsewhere = inside(choose, jnp.array(q), jnp.array(k), theta=5e5)
    np.testing.assert_array_equal(slots, elsewhere[0])


@pytest.mark.slow
def test_a_decode_step_copies_no_cache_on_tpu():
    """A gather along the slots, beside the append, would move the cache's axes and back."""
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    v5e = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    mesh, slots = make_mesh(devices=v5e.devices), 65536
    sizes = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_position": 8192}
    config = tiny_config(num_layers=1, **sizes)
    setup = programs.Setup(config, ReAttention(), mesh, jnp.dtype(jnp.bfloat16), 512)
    with no_persistent_cache(), jax.default_matmul_precision("default"):
        memory = compile_decode(setup, 1, slots).memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < cache_bytes(setup, 1, slots) / 20


# The host: plans, settings, errors.


def plan(method, context):
    """(variant, valid tokens, columns) of each segment of one row."""
    segments = method.segments(Prompt("context", 512, context=[[1] * context]))
    return [(s.variant, int(s.chunk_lengths[0]), s.tokens.shape[1]) for s in segments]


def test_chunks_of_the_paper_and_of_the_released_code():
    whole = [(WHOLE, 512, 512)] * 8
    assert plan(ReAttention(), 5000) == [
        *whole,
        (WHOLE, 32, 512),
        ("", 512, 512),
        ("", 360, 512),
    ]
    assert plan(ReAttention(), 4000)[-1] == (WHOLE, 416, 512)
    assert plan(ReAttention(), 0) == []
    released = plan(ReAttention.released(), 5000)
    assert released == [*whole, (WHOLE, 8, 512), ("", 512, 512), ("", 384, 512)]
    first = [size for variant, size, _ in plan(ReAttention.released(), 131071) if variant]
    assert sum(first) == 4095


def test_where_a_row_ends_is_told_once():
    method = method_of(SMALL)
    for stage in ("context", "question"):
        rows = {stage: random_rows([37, 10, 1, 0])}
        ends = [np.asarray(s.ends) for s in method.segments(Prompt(stage, 8, **rows))]
        np.testing.assert_array_equal(np.sum(ends, axis=0), [1, 1, 1, 0])


def test_a_question_ends_with_a_lone_token():
    rows = random_rows([12, 1, 0])
    *earlier, last = method_of(SMALL).segments(Prompt("question", 512, question=rows))
    np.testing.assert_array_equal(sum(s.chunk_lengths for s in earlier), [11, 0, 0])
    np.testing.assert_array_equal(last.tokens[:2, 0], [rows[0][-1], rows[1][-1]])
    np.testing.assert_array_equal(last.valid[:, 0], [1, 1, 0])


def test_settings_reach_the_released_behaviour():
    method = make_method("reattention", {key: str(value) for key, value in RELEASED.items()})
    assert method == ReAttention.released()
    described: Any = settings_of(method)
    assert make_method(**described) == method
    assert ReAttention().scope_size == 8192


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"global_size": -1}, "global_size must be at least 0, got -1"),
        ({"span": 0}, "span must be at least 1, got 0"),
        ({"kept": 0}, "kept must be at least 1, got 0"),
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"count": 17}, "count must be from 0 to 16, got 17"),
        ({"local_size": 511}, "local_size 511 must hold a chunk of 512 tokens; raise"),
        ({"local_size": 639, "align": 128}, "chunk of 512 tokens and 128 tokens of alignment"),
        ({"local_size": 639, "first_chunk": "released"}, "and 128 tokens of alignment"),
        ({"align": 64}, "expected one of 1, 128"),
    ],
)
def test_bad_settings(settings, said):
    with pytest.raises(ConfigError, match=said):
        make_method("reattention", settings)


def test_a_step_reads_the_scope_and_to_rank_all_keys():
    """A slot has 64 bytes of keys and as many of values: two heads of 8 numbers."""
    keys = np.zeros((1, 2, 512, 8), np.float32)
    ranking = method_of(dataclasses.replace(SMALL, g=4, w=32, kept=8))
    fixed = dataclasses.replace(ranking, count=0)
    cache = ranking.init_cache(layer_shape(keys, keys))
    # Global, 8 spans of 4, local: or the first and the last alone.
    assert ranking.read_bytes(cache, 400) == (4 + 32 + 32) * 128 + 512 * 64
    assert fixed.read_bytes(cache, 400) == (4 + 32) * 128
    assert fixed.read_bytes(cache, 9) == 9 * 128


def test_models_that_it_does_not_fit():
    said = r"global_size 32 \+ kept 127 \* span 32 \+ local_size 4096 = 8192 positions"
    with pytest.raises(ConfigError, match=said):
        ReAttention().validate(tiny_config())
    with pytest.raises(ConfigError, match=r"32 \+ local_size 4096 = 4128 positions"):
        ReAttention(count=0).validate(tiny_config())
    ReAttention(position="original").validate(tiny_config())
    windowed = tiny_config(windows=(None, 16))
    for rules in (SMALL, dataclasses.replace(SMALL, original=True, k=0, w=8)):
        with pytest.raises(ConfigError, match="sliding window of 16 tokens would hide"):
            method_of(rules).validate(windowed)
    method_of(SMALL).validate(tiny_config(windows=(None, 22)))
