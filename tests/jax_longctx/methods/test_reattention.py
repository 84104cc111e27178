"""ReAttention against numpy, layer by layer and step by step, and its parts alone.

The names carry the spec's ids.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.caches import AppendCache, counted_votes
from jax_longctx.caches.scope import Scope, spans_around
from jax_longctx.contract import Feed
from jax_longctx.methods import ReAttention
from jax_longctx.methods.reattention import WHOLE
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import check_rows, full_logits, row_logits, texts, traces
from tests.jax_longctx.methods.oracles import reattention as oracle
from tests.jax_longctx.methods.oracles.reattention import Rules, calls_of, chosen, votes_kept
from tests.jax_longctx.methods.selecting import on_one_device, plain_context
from tests.support import random_rows, tiny_config, tiny_engine

# Where more layers would only take longer to compile.
ONE_LAYER = tiny_config(num_layers=1)
# Of each row: context, question; every row is given as many answer tokens.
LENGTHS = [(37, 4), (5, 1), (20, 12), (0, 3)]
ANSWER = 5
NAMES = ("global_size", "local_size", "span", "count", "kept", "chunk")
SMALL = Rules(g=2, w=8, m=4, k=2, kept=3, c=8)


def method_of(rules, kind=ReAttention):
    """ReAttention as the library has it, by the rules of the numpy oracle."""
    values = (rules.g, rules.w, rules.m, rules.k, rules.kept, rules.c)
    return kind(**dict(zip(NAMES, values, strict=True)))


# Slots, which differ from layer to layer: what a method can tell the layers by.
LAYERS = (128, 256)
# What an engine run leaves behind: (layer, slots, number) of each layer and segment.
SEEN: list[tuple[int, np.ndarray, np.ndarray]] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched(ReAttention):
    """Tells which slots each layer attends."""

    slots: int = LAYERS[0]

    def of_layer(self, layer, layers):
        return dataclasses.replace(self, slots=LAYERS[layer])

    def init_cache(self, shape):
        return super().init_cache(dataclasses.replace(shape, slots=self.slots))

    def choose(self, q, cache, valid, ctx, **how):
        scope = super().choose(q, cache, valid, ctx, **how)
        jax.debug.callback(functools.partial(note, LAYERS.index(cache.sizes[2])), *scope.listed())
        return scope


def note(layer, slots, number):
    SEEN.append((layer, np.asarray(slots), np.asarray(number)))


@pytest.fixture(scope="module")
def run():
    """A watched run over ragged rows.

    `scopes[b]` lists, for each of row b's calls, every layer's attended slots; a call that the
    engine feeds in pieces (the first chunk) is its last piece.
    """
    engine = tiny_engine(method_of(SMALL, Watched))
    rows = texts(LENGTHS, ANSWER)
    scopes = [[] for _ in LENGTHS]
    keys = []

    def look(step):
        jax.effects_barrier()
        layers = sorted(SEEN, key=lambda entry: entry[0])
        assert [layer for layer, *_ in layers] == [0, 1]
        SEEN.clear()
        for b, valid in enumerate(step.valid):
            if valid:
                if step.segment.variant == WHOLE and scopes[b]:
                    scopes[b].pop()
                scopes[b].append([slots[b, : number[b]] for _, slots, number in layers])
        keys[:] = [np.asarray(cache.k) for cache in step.caches]

    logits = row_logits(engine, rows, look)
    found = traces(oracle, engine, SMALL, rows)
    return SimpleNamespace(
        engine=engine, rows=rows, logits=logits, scopes=scopes, keys=keys, traces=found
    )


def test_e5_e7_e8_scopes_logits_and_raw_keys_equal_numpy(run):
    """Ragged rows, each as the oracle has it alone; E9: a padded chunk is like a short one."""
    for b, (logits, scopes, trace) in enumerate(
        zip(run.logits, run.scopes, run.traces, strict=True)
    ):
        for got, expected in zip(scopes, trace.indices, strict=True):
            for mine, theirs in zip(got, expected, strict=True):
                np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_allclose(logits, np.concatenate(trace.logits), atol=1e-4)
        for keys_BKSH, raw in zip(run.keys, trace.keys, strict=True):
            held = keys_BKSH[b, :, : len(raw)].swapaxes(0, 1)
            np.testing.assert_allclose(held, raw, atol=1e-5)


def test_e6_what_a_scope_is_made_of(run):
    selected = 0
    for scopes, lengths in zip(run.scopes, LENGTHS, strict=True):
        calls = calls_of(SMALL, *lengths, ANSWER)
        for layers, length in zip(scopes, np.cumsum(calls), strict=True):
            for slots in layers:
                assert np.all(np.diff(slots) > 0)
                assert len(slots) <= run.engine.method.scope_size
                ends = {*range(min(SMALL.g, length)), *range(max(length - SMALL.w, 0), length)}
                assert ends <= set(slots.tolist())
                selected += length > SMALL.g + SMALL.w and len(slots) < length
    # Most calls leave something out, or this would be full attention.
    assert selected > 20


def test_e1_short_texts_see_everything(run):
    short = SMALL.g + SMALL.w
    for logits, expected in zip(run.logits, full_logits(run.engine, run.rows), strict=True):
        np.testing.assert_allclose(logits[:short], expected[:short], atol=1e-4)
        # And beyond they do not, or E1 would say nothing.
        assert len(logits) < 12 or np.abs(logits[12:] - expected[12:]).max() > 1e-2


def test_e8_e13_a_row_is_the_same_in_any_company(run):
    others = texts([(9, 2), (41, 7), (3, 1), (13, 12)], ANSWER, seed=10)
    for mine in range(len(LENGTHS)):
        rows = [[*part] for part in others]
        place = (mine + 1) % len(LENGTHS)
        for part, own in zip(rows, run.rows, strict=True):
            part[place] = own[mine]
        SEEN.clear()
        logits = row_logits(run.engine, rows)
        np.testing.assert_allclose(logits[place], run.logits[mine], atol=1e-5)


@pytest.mark.slow
def test_e7_a_mesh_equals_numpy():
    config = tiny_config(num_layers=1, max_position=512)
    engine = tiny_engine(method_of(SMALL), mesh=make_mesh(2, 2, 2), config=config)
    rows = texts([(37, 1), (5, 1), (20, 1), (0, 1)], 2, seed=4)
    expected = [np.concatenate(trace.logits) for trace in traces(oracle, engine, SMALL, rows)]
    check_rows(row_logits(engine, rows), expected)


@pytest.mark.parametrize(
    ("changes", "context", "whole"),
    [
        pytest.param({"m": 1, "k": 16, "kept": 16}, 25, 26, id="e2 everything selected"),
        # A middle of 8 and 15 in chunks, of 16 under a lone token, under spans of 32.
        pytest.param(
            *({"m": 32, "k": 1, "kept": 1}, 25, 26),
            **{"id": "e3 one vote covers it", "marks": pytest.mark.slow},
        ),
        pytest.param({"k": 0}, 37, 10, id="e4 no keys are streaming-llm"),
    ],
)
def test_e2_e3_e4_what_is_seen_whole_is_full_attention(changes, context, whole):
    """The first tokens; the others equal numpy, which leaves something out."""
    rules = dataclasses.replace(SMALL, **changes)
    engine, rows = tiny_engine(method_of(rules), config=ONE_LAYER), texts([(context, 1)], 0)
    (got,), (full,) = row_logits(engine, rows), full_logits(engine, rows)
    (trace,) = traces(oracle, engine, rules, rows)
    np.testing.assert_allclose(got, np.concatenate(trace.logits), atol=1e-4)
    np.testing.assert_allclose(got[:whole], full[:whole], atol=1e-4)
    assert whole == len(got) or np.abs(got - full).max() > 1e-3


# The parts, as functions of arrays.


def test_1c_worked_example():
    def example(centres, stop):
        spans = spans_around(centres, 4, 2, stop)
        scope = Scope(*spans, stop, stop + 4, global_size=2, span=4, local_size=4)
        return *scope.listed(), scope.number

    slots, listed, number = jax.jit(example)(jnp.array([[2, 7]]), jnp.array([8]))
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
    spans = jax.jit(lambda at, stop: spans_around(at, span, start, stop))
    lows, highs = spans(jnp.array(centres, jnp.int32), jnp.array(stops, jnp.int32))
    before, after = span // 2, span - span // 2
    for low, high, row, stop in zip(*map(np.asarray, (lows, highs)), centres, stops, strict=True):
        got = sorted(slot for ends in zip(low, high, strict=True) for slot in range(*ends))
        union = {s for c in row if c >= 0 for s in range(c - before, c + after)}
        np.testing.assert_array_equal(got, sorted(s for s in union if start <= s < stop))


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_votes_keep_the_most_named_and_of_equals_the_lower(platform, monkeypatch):
    monkeypatch.setattr(counted_votes, "platform", lambda: platform)
    # Three blocks of entries and three pages, both with some to spare.
    monkeypatch.setattr(counted_votes, "_VOTES", 10)
    monkeypatch.setattr(counted_votes, "_LANES", 16)
    rng = np.random.default_rng(0)
    # Few slots for many votes: ties at the cut; rows of no votes, of fewer than are kept, of one.
    named = rng.integers(-1, 12, (8, 3, 4, 2)).astype(np.int32)
    named[0], named[1] = -1, np.where(rng.random((3, 4, 2)) < 0.5, 7, 3)
    named[2], named[3] = 11, np.arange(24).reshape(3, 4, 2) // 2
    kept = on_one_device(lambda x: counted_votes.most_voted(x, 40, 5, plain_context()))
    ascending, alone = (np.asarray(kept(x)) for x in (named, named.reshape(8, 1, -1, 2)))
    for row, single, votes in zip(ascending, alone, named, strict=True):
        expected = votes_kept(votes.ravel().tolist(), 5)
        np.testing.assert_array_equal(row, [*expected, *[-1] * (5 - len(expected))])
        # In any order.
        assert sorted(single[single >= 0].tolist()) == expected


def votes_of(seed, slots, most):
    """Few votes, so that whole pages tie; rows whose best lie in one page, or one in each."""
    votes = np.random.default_rng(seed).integers(0, 4, (6, slots))
    votes[0], votes[1] = 0, 1
    votes[2, 40:] = 9
    votes[3], votes[3, ::16] = 0, most
    votes[4], votes[4, 7] = 0, 1
    return votes


@pytest.mark.parametrize(("slots", "count"), [(96, 5), (96, 6), (96, 7), (90, 5)])
def test_of_many_slots_those_in_the_best_pages_are_ranked(slots, count, monkeypatch):
    monkeypatch.setattr(counted_votes, "_LANES", 16)
    monkeypatch.setattr(counted_votes, "_MANY", 64)
    sorted_at_once, top_k = [], jax.lax.top_k

    def watched(x, k):
        sorted_at_once.append(x.shape[-1])
        return top_k(x, k)

    monkeypatch.setattr(jax.lax, "top_k", watched)
    votes = votes_of(count, slots, 2)
    most, at = counted_votes._most(jnp.array(votes, jnp.int32), count)
    order = np.argsort(-votes, axis=-1, kind="stable")[:, :count]
    np.testing.assert_array_equal(at, order)
    np.testing.assert_array_equal(most, np.take_along_axis(votes, order, axis=-1))
    whole = slots % 16 or count > slots // 16
    assert sorted_at_once == ([slots] if whole else [slots // 16, 16 * count])


@pytest.mark.parametrize("page", [1, 4, 16])
def test_slots_of_most_votes_are_found_by_pages(page):
    votes = votes_of(page, 96, 2**20)
    best_by_page = jax.jit(counted_votes._best_by_page, static_argnums=(1, 2))
    found = best_by_page(jnp.array(votes, jnp.int32), 5, page)
    for row, slots in zip(votes, np.asarray(found), strict=True):
        best = sorted(s for s in np.argsort(-row, kind="stable")[:5].tolist() if row[s])
        assert slots.tolist() == [*best, *[-1] * (5 - len(best))]


def test_pages_are_as_long_as_makes_both_searches_short(monkeypatch):
    monkeypatch.setattr(counted_votes, "in_one_launch", lambda slots, kept: slots <= 16_384)
    few = 1000
    for slots, votes, size in [
        *((16_384, few, 1), (133_120, few, 32), (2**20, few, 128)),
        # No page's size leaves both short; votes that float32 would not tell apart.
        *((2**22, few, None), (133_121, few, None), (16_384, 2**23, None)),
    ]:
        assert counted_votes._page_size(slots, 127, votes) == size
    monkeypatch.setattr(counted_votes, "in_one_launch", lambda slots, kept: False)
    assert counted_votes._page_size(16, 5, few) is None


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

    def listed(theta):
        def choose(q, k):
            zeros = jnp.zeros(len(places), jnp.int32)
            cache = AppendCache(k, k, zeros + 40, zeros + 40, zeros, zeros)
            rope = dataclasses.replace(plain_context().rope, theta=theta)
            ctx = dataclasses.replace(plain_context(), rope=rope)
            return method.choose(q, cache, zeros + tokens, ctx).listed()

        return map(np.asarray, on_one_device(choose)(q, k))

    slots, number = listed(1e4)
    for row, count, place, queries, keys in zip(slots, number, places, q, k, strict=True):
        expected = chosen(rules, queries, np.swapaxes(keys, 0, 1)[:40])
        np.testing.assert_array_equal(row[:count], expected)
        span = range(max(place - 3, rules.g), min(place + 3, 40 - rules.w))
        assert set(span) <= set(row[:count])
    assert number.min() < 40
    np.testing.assert_array_equal(slots, next(listed(5e5)))


# Plans and settings.


def plan(method, context):
    """(variant, valid tokens, columns) of each segment of one row."""
    segments = method.segments(Feed("context", 512, context=[[1] * context]))
    return [(s.variant, int(s.chunk_lengths[0]), s.tokens.shape[1]) for s in segments]


def test_chunks_of_the_paper():
    whole = [(WHOLE, 512, 512)] * 8
    paper = [*whole, (WHOLE, 32, 512), ("", 512, 512), ("", 360, 512)]
    assert plan(ReAttention(), 5000) == paper
    assert plan(ReAttention(), 4000)[-1] == (WHOLE, 416, 512)
    assert plan(ReAttention(), 0) == []


def test_the_questions_last_token_goes_alone():
    rows = random_rows([12, 8, 1, 0])
    sizes = {}
    for stage in ("question", "context"):
        segments = list(method_of(SMALL).segments(Feed(stage, 512, **{stage: rows})))
        sizes[stage] = [s.chunk_lengths.tolist() for s in segments]
        assert np.sum([s.ends for s in segments], axis=0).tolist() == [1, 1, 1, 0]
        if stage == "question":
            assert segments[-1].tokens[:3, 0].tolist() == [row[-1] for row in rows[:3]]
    assert sizes["question"] == [[8, 7, 0, 0], [3, 0, 0, 0], [1, 1, 1, 0]]
    assert ReAttention().scope_size == 8192
