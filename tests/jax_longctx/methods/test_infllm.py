"""InfLLM against numpy, layer by layer and step by step; the names carry the spec's ids."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_longctx.contract import Feed, LayerContext, method
from jax_longctx.engine.allocate import abstract_caches
from jax_longctx.engine.capacity import grow
from jax_longctx.engine.context_io import load_context, save_context
from jax_longctx.engine.prefill import whole_segment
from jax_longctx.methods import METHODS, InfLLM
from jax_longctx.models.rope import RopeConfig
from jax_longctx.parts.unit_memory import best_units
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import (
    ask,
    check_rows,
    oracle_params,
    prefill,
    row_logits,
    texts,
    traces,
    whole_rows,
)
from tests.jax_longctx.methods.oracles import infllm as oracle
from tests.jax_longctx.methods.oracles.infllm import Rules, calls_of, follow
from tests.jax_longctx.methods.selecting import layer_shape
from tests.oracle import forward, probabilities, rope, weighted_values
from tests.support import random_rows, score, tiny_config, tiny_engine

SMALL = Rules(i0=4, w=16, bs=4, kb=2, r=2, x=8)
# Of each row: context, question; every row is given as many answer tokens.
LENGTHS, ANSWER = [(75, 4), (5, 1), (42, 13), (0, 2)], 9
THETA = 1e4
# Where more layers would only take longer to compile.
ONE_LAYER = tiny_config(num_layers=1)
# Slots, which differ from layer to layer: what a method can tell the layers by.
LAYERS = (128, 256)
# (layer, units) of every choice of a watched method.
CHOSEN: list[tuple[int, np.ndarray]] = []


def method_of(rules, kind=InfLLM, **settings):
    return kind(
        n_init=rules.i0,
        n_local=rules.w,
        block_size=rules.bs,
        topk=rules.kb,
        repr_topk=rules.r,
        chunk=rules.x,
        **settings,
    )


@method(source="InfLLM", name="watched")
class Watched(InfLLM):
    """Tells which units each layer attends, and starts with garbage wherever nothing is yet."""

    slots: int = LAYERS[0]

    def of_layer(self, layer, layers):
        return dataclasses.replace(self, slots=LAYERS[layer])

    def init_cache(self, shape):
        def fill(leaf):
            return jnp.full_like(leaf, 1e4) if leaf.ndim > 1 else leaf

        shape = dataclasses.replace(shape, slots=self.slots)
        return jax.tree.map(fill, super().init_cache(shape))

    def choose(self, q, cache, valid, ctx):
        chosen = super().choose(q, cache, valid, ctx)
        jax.debug.callback(functools.partial(note, LAYERS.index(cache.store.sizes[2])), chosen)
        return chosen


def note(layer, chosen):
    CHOSEN.append((layer, np.asarray(chosen)))


@pytest.fixture(scope="module")
def run():
    engine = tiny_engine(method_of(SMALL, Watched))
    rows, last = texts(LENGTHS, ANSWER), {}
    chosen = [[] for _ in LENGTHS]

    def look(step):
        jax.effects_barrier()
        layers = sorted(CHOSEN, key=lambda entry: entry[0])
        assert [layer for layer, _ in layers] == [0, 1]
        CHOSEN.clear()
        for b, valid in enumerate(step.valid):
            if valid:
                lists = [units[b, 0] for _, units in layers]
                chosen[b].append([{int(unit) for unit in row if unit >= 0} for row in lists])
        last["caches"] = step.caches

    logits = row_logits(engine, rows, look)
    found = traces(oracle, engine, SMALL, rows)
    return SimpleNamespace(
        engine=engine, rows=rows, logits=logits, chosen=chosen, traces=found, **last
    )


def check_memory(rules, caches, row, trace):
    """Representatives, and what the tokens not packed yet have received."""
    for layer, cache in zip(trace.layers, caches, strict=True):
        units = np.asarray(cache.units)[row, :, : len(layer.units)]
        for unit, expected in enumerate(layer.units):
            np.testing.assert_allclose(units[:, unit], expected, atol=1e-5)
        left = np.arange(rules.i0 + len(layer.units) * rules.bs, len(layer.k))
        ring = np.asarray(cache.received)[row]
        got = ring[:, left % ring.shape[1]]
        np.testing.assert_allclose(got, layer.received[:, left], atol=2e-4)


def check(engine, rules, rows, **options):
    """Logits and memories equal the oracle's; returns its traces."""
    last = []
    logits = row_logits(engine, rows, lambda step: last.append(step.caches))
    found = traces(oracle, engine, rules, rows, **options)
    check_rows(logits, [np.concatenate(trace.logits) for trace in found])
    for b, trace in enumerate([] if options else found):
        check_memory(rules, last[-1], b, trace)
    return found


def test_it_5_it_6_it_15_it_16_units_and_logits_equal_numpy(run):
    """Ragged rows, each as the oracle has it alone; the memory was full of garbage at first.

    IT-10: `follow` derives each representative once more from the sums at the very end.
    """
    chose = 0
    for row, (chosen, trace) in enumerate(zip(run.chosen, run.traces, strict=True)):
        for got, expected in zip(chosen, trace.chosen, strict=True):
            assert got == [heads[0] for heads in expected]
            chose += max(map(len, got)) == SMALL.kb
        np.testing.assert_allclose(run.logits[row], np.concatenate(trace.logits), atol=1e-4)
        check_memory(SMALL, run.caches, row, trace)
    assert chose > 10


def test_it_19_units_appear_one_by_one(run):
    for (context, question), trace in zip(LENGTHS, run.traces, strict=True):
        read_tokens = context + question + ANSWER
        units = len(trace.layers[0].units)
        edge = SMALL.i0 + SMALL.w + units * SMALL.bs
        assert units == 0 or edge <= read_tokens < edge + SMALL.bs
        most = SMALL.w + SMALL.i0 + SMALL.kb * SMALL.bs + SMALL.bs - 1 + SMALL.x
        assert max(trace.seen) <= most


def dense(engine, tokens, clamp, sees=lambda t, at: at <= t):
    """One pass over all tokens with the distances clamped to `clamp` - 1."""
    theta = engine.config.rope.theta

    def attend(layer, q, k, v):
        at = np.arange(len(q))
        rotated = [rope(k, -np.minimum(t - at, clamp - 1), theta) for t in at]
        rows = [probabilities(q[t : t + 1], rotated[t], sees(t, at)[None]) for t in at]
        return weighted_values(np.concatenate(rows, axis=1), v)

    return forward(engine.config, oracle_params(engine), tokens, attend)


def test_it_1_it_2_short_texts_see_everything(run):
    """Full attention within the window, at clamped distances until the first unit is left out."""
    (tokens, *_), (got, *_) = whole_rows(run.rows), run.logits
    full, clamped = dense(run.engine, tokens, 10**6), dense(run.engine, tokens, SMALL.w)
    np.testing.assert_allclose(got[: SMALL.w], full[: SMALL.w], atol=1e-4)
    assert np.abs(got[SMALL.w :] - full[SMALL.w :]).max() > 1e-2
    whole = SMALL.w + SMALL.i0 + (SMALL.kb + 1) * SMALL.bs
    np.testing.assert_allclose(got[:whole], clamped[:whole], atol=1e-4)
    assert np.abs(got[whole + SMALL.x :] - clamped[whole + SMALL.x :]).max() > 1e-2


def test_it_8_the_last_token_asks_alone(run):
    """The question of 4 as one chunk would have chosen other units for its last token."""
    calls = calls_of(SMALL, *LENGTHS[0], 0)
    together, params = [*calls[:-2], calls[-2] + 1], oracle_params(run.engine)
    trace = follow(SMALL, run.engine.config, params, whole_rows(run.rows)[0], together)
    assert np.abs(trace.logits[-1][-1] - run.logits[0][sum(LENGTHS[0]) - 1]).max() > 1e-3


def test_it_7_the_engines_chunk_changes_nothing():
    rows = random_rows([75, 5])
    for chunk in (8, 16, 512):
        segments = method_of(SMALL).segments(Feed("context", chunk, rows))
        assert [segment.tokens.shape for segment in segments] == [(2, 8)] * 10


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{}, {"dense": 3}], ids=["sparse", "dense"])
def test_2x2x2(options):
    """A window, first tokens and units on both shards; an answer by full attention over them."""
    how = {"decode": "dense"} if options else {}
    engine = tiny_engine(method_of(SMALL, **how), mesh=make_mesh(2, 2, 2), config=ONE_LAYER)
    check(engine, SMALL, texts([(137, 4), (5, 1), (42, 13), (0, 2)], 3), **options)


@pytest.mark.thorough
def test_it_9_it_11_units_begin_anywhere_on_sharded_slots():
    rules = Rules(3, 16, 4, 3, 2, 8, temperature=2.25)
    scaled = RopeConfig(kind="yarn", theta=THETA, trained_length=128, attention_factor=1.5)
    config = tiny_config(num_layers=1, rope=scaled)
    engine = tiny_engine(method_of(rules), mesh=make_mesh(1, 4, 2), config=config)
    trace, _ = check(engine, rules, texts([(290, 1), (131, 1)], 2, seed=6))
    picked = [unit for heads in trace.chosen[-1] for units in heads for unit in units]
    assert min(picked) * 4 + 3 < 128 < max(picked) * 4 + 3


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_it_4_nothing_chosen_is_a_window_behind_sinks(shards):
    """The window has one key more, which stands where the one before it does.

    A rotary base that grows from 8 tokens on does not: no distance is beyond 5.
    """
    rules = Rules(i0=3, w=6, bs=1, kb=0, r=1, x=1)
    growing = RopeConfig(kind="dynamic", theta=THETA, trained_length=8, factor=2.0)
    config = tiny_config(num_layers=1, rope=growing)
    engine = tiny_engine(method_of(rules), config=config, mesh=make_mesh(seq=shards))
    rows = texts([(19, 1)], 2)
    (trace,) = check(engine, rules, rows)
    expected = dense(
        engine, whole_rows(rows)[0], 6, lambda t, at: (at <= t) & ((at < 3) | (at > t - 7))
    )
    np.testing.assert_allclose(np.concatenate(trace.logits), expected, atol=1e-9)


def test_it_3_without_positions_and_with_every_unit_it_is_full_attention():
    endless = RopeConfig(kind="linear", theta=THETA, trained_length=128, factor=1e12)
    rules = Rules(i0=0, w=8, bs=3, kb=99, r=1, x=1)
    engine = tiny_engine(method_of(rules), config=tiny_config(num_layers=1, rope=endless))
    (row,) = random_rows([61])
    np.testing.assert_allclose(score(engine, [row])[0], dense(engine, row, 1), atol=1e-4)


def test_it_18_a_unit_that_says_what_is_asked_is_chosen():
    """Also on sharded pages: equal units stay in order, unpacked ones are never candidates."""
    mesh = make_mesh(1, 4, 1)
    rng = np.random.default_rng(0)
    query = rng.normal(size=(2, 4, 8)).astype(np.float32)
    units = rng.normal(size=(2, 4, 16, 8)).astype(np.float32)
    units[0, :, 9] = 5 * query[0]
    units[0, :, 14] = 9 * query[0]
    units[1, :, [2, 5, 11]] = query[1]
    pages = PartitionSpec(None, None, "seq", None)
    ctx = LayerContext(scale=1.0, window=None, rope=ONE_LAYER.rope, total=jnp.array([99, 99]))

    def choose(query, units, packed):
        return best_units(query, units, packed, 3, ctx)

    body = jax.shard_map(
        choose,
        mesh=mesh,
        in_specs=(PartitionSpec(), pages, PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    got = np.asarray(jax.jit(body)(query, units, jnp.array([14, 2])))
    scores = np.einsum("bnh,bnph->bp", query, units)
    assert got[0, 0].tolist() == np.argsort(-scores[0, :14])[:3].tolist()
    assert got[0, 0, 0] == 9
    assert sorted(got[1, 0].tolist()) == [-1, 0, 1]
    got = np.asarray(jax.jit(body)(query, units, jnp.array([0, 16])))
    assert got[0, 0].tolist() == [-1, -1, -1]
    assert got[1, 0].tolist() == [2, 5, 11]


def test_it_17_another_question_does_not_matter_and_a_saved_context_answers_alike(
    run, tmp_path, monkeypatch
):
    engine, (contexts, a, answers) = run.engine, run.rows
    b = random_rows([2, 13, 1, 6], seed=3)
    monkeypatch.setitem(METHODS, "watched", Watched)
    context = prefill(engine, contexts)
    save_context(engine, context, tmp_path / "context")
    first, second = ask(engine, context, a, answers), ask(engine, context, b, answers)
    assert not np.allclose(first[-1], second[-1], atol=1e-3)
    check_rows(first[-1], [logits[-1] for logits in run.logits], atol=1e-5)
    loaded = load_context(engine, tmp_path / "context")
    for again in (context, loaded):
        np.testing.assert_array_equal(first, ask(engine, again, a, answers))
        np.testing.assert_array_equal(second, ask(engine, again, b, answers))
    CHOSEN.clear()


def test_a_longer_question_makes_room_for_its_units():
    arrays = (jnp.zeros(size, jnp.float32) for size in [(1, 4, 8), (1, 2, 4096, 8)])
    cache = method_of(SMALL).init_cache(layer_shape(*arrays))
    (grown,) = jax.eval_shape(lambda caches: grow(caches, 128), (cache,))
    assert grown.units.shape[2] == (4096 + 128) // 4


@pytest.mark.slow
def test_memory_beside_the_cache_does_not_grow_with_it():
    engine = tiny_engine(method_of(SMALL), config=ONE_LAYER)
    caches = abstract_caches(engine.setup, 1, 65536, 0)
    (segment,) = engine.method.segments(Feed("context", 8, random_rows([8])))
    run = whole_segment.lower(
        engine.setup, engine.params, caches, segment, jnp.array([8]), None, "none"
    )
    memory = run.compile().memory_analysis()
    cached = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(caches))
    assert memory is not None and memory.alias_size_in_bytes >= cached
    assert memory.temp_size_in_bytes < cached / 32
