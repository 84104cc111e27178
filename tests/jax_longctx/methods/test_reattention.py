"""ReAttention against numpy, layer by layer and step by step; the names carry the spec's ids."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jax_longctx.caches import AppendCache
from jax_longctx.contract import LayerContext, Prompt
from jax_longctx.engine import programs
from jax_longctx.engine.context_io import load_context, save_context
from jax_longctx.errors import ConfigError
from jax_longctx.methods import ReAttention, make_method, recall, scope, settings_of
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.engine.lowering import cache_bytes, compile_decode, no_persistent_cache
from tests.jax_longctx.methods.harness import steps
from tests.jax_longctx.methods.oracles.reattention import (
    Rules,
    calls_of,
    chosen,
    follow,
    votes_kept,
)
from tests.oracle import causal_attend, forward, to_numpy
from tests.support import random_rows, tiny_config, tiny_engine

NAMES = ("global_size", "local_size", "span", "count", "kept", "chunk")
SMALL = Rules(g=2, w=8, m=4, k=2, kept=3, c=8)
RELEASED = {
    "align": 128,
    "selector": "tilemax128",
    "decode_heads": "scrambled",
    "first_chunk": "released",
}
THETA = 1e4
# Where more layers would only take longer to compile.
ONE_LAYER = tiny_config(num_layers=1)
# Of each row: context, question; every row is given as many answer tokens.
LENGTHS = [(37, 4), (5, 1), (20, 12), (0, 3)]
ANSWER = 5


def method_of(rules: Rules, kind: type = ReAttention) -> Any:
    values = (rules.g, rules.w, rules.m, rules.k, rules.kept, rules.c)
    given: dict[str, Any] = dict(zip(NAMES, values, strict=True))
    released = RELEASED if rules.released else {}
    return kind(**given, **released, position="original" if rules.original else "contiguous")


def texts(lengths=LENGTHS, answer=ANSWER, seed=0):
    """Random contexts, questions and answers."""
    contexts = random_rows([context for context, _ in lengths], seed=seed)
    questions = random_rows([question for _, question in lengths], seed=seed + 1)
    return contexts, questions, random_rows([answer] * len(lengths), seed=seed + 2)


def read(engine, rows, each=None):
    """Every row's logits [tokens, V], in order; `each(step)` looks at each step."""
    pieces = [[] for _ in rows[0]]
    for step in steps(engine, *rows):
        for piece, logits, valid in zip(pieces, step.logits, step.valid, strict=True):
            piece.append(logits[:valid])
        if each is not None:
            each(step)
    return [np.concatenate(piece) for piece in pieces]


def traces(engine, rules, rows):
    """The oracle's account of each row."""
    params = to_numpy(jax.device_get(engine.params))
    for context, question, answer in zip(*rows, strict=True):
        calls = calls_of(rules, len(context), len(question), len(answer))
        yield follow(rules, engine.config, params, [*context, *question, *answer], calls)


def check_logits(engine, rules, rows):
    got = read(engine, rows)
    for logits, trace in zip(got, traces(engine, rules, rows), strict=True):
        np.testing.assert_allclose(logits, np.concatenate(trace.logits), atol=1e-4)
    return got


def full_logits(engine, rows):
    params = to_numpy(jax.device_get(engine.params))
    for parts in zip(*rows, strict=True):
        tokens = [token for part in parts for token in part]
        yield forward(engine.config, params, tokens, causal_attend(THETA))


# What an engine run leaves behind: (layer, slots, number) of each layer and segment.
SEEN: list[tuple[int, np.ndarray, np.ndarray]] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched(ReAttention):
    """Tells which slots each layer attends."""

    def choose(self, q, cache, valid, ctx, *, rank=True):
        slots, number = super().choose(q, cache, valid, ctx, rank=rank)
        jax.debug.callback(functools.partial(note, ctx.layer), slots, number)
        return slots, number


def note(layer, slots, number):
    SEEN.append((layer, np.asarray(slots), np.asarray(number)))


@dataclasses.dataclass
class Run:
    """A watched run over ragged rows.

    `scopes[b]` lists, for each of row b's calls, every layer's attended slots; a call that the
    engine feeds in pieces (the first chunk) is its last piece.
    """

    engine: Any
    rows: tuple[Any, Any, Any]
    logits: list[np.ndarray]
    scopes: list[list[list[np.ndarray]]]
    keys: list[np.ndarray]
    traces: list[Any]


@pytest.fixture(scope="module")
def run():
    engine = tiny_engine(method_of(SMALL, Watched))
    rows = texts()
    scopes = [[] for _ in LENGTHS]
    keys = []

    def look(step):
        jax.effects_barrier()
        layers = sorted(SEEN, key=lambda entry: entry[0])
        assert [layer for layer, *_ in layers] == [0, 1]
        SEEN.clear()
        for b, valid in enumerate(step.valid):
            if valid:
                lists = [slots[b, : number[b]] for _, slots, number in layers]
                # The first chunk's pieces are one call.
                if step.segment.variant == scope.WHOLE and scopes[b]:
                    scopes[b].pop()
                scopes[b].append(lists)
        keys[:] = [np.asarray(cache.k) for cache in step.caches]

    logits = read(engine, rows, look)
    return Run(engine, rows, logits, scopes, keys, list(traces(engine, SMALL, rows)))


def test_e7_e8_scopes_and_logits_equal_numpy(run):
    """Ragged rows, each as the oracle has it alone; E9: a padded chunk is like a short one."""
    for logits, scopes, trace in zip(run.logits, run.scopes, run.traces, strict=True):
        for got, expected in zip(scopes, trace.indices, strict=True):
            for mine, theirs in zip(got, expected, strict=True):
                np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_allclose(logits, np.concatenate(trace.logits), atol=1e-4)


def test_e6_what_a_scope_is_made_of(run):
    selected = 0
    for scopes, lengths in zip(run.scopes, LENGTHS, strict=True):
        calls = calls_of(SMALL, *lengths, ANSWER)
        for layers, length in zip(scopes, np.cumsum(calls), strict=True):
            for slots in layers:
                assert np.all(np.diff(slots) > 0)
                assert len(slots) <= run.engine.method.scope_size
                local = min(SMALL.w, max(length - SMALL.g, 0))
                np.testing.assert_array_equal(slots[: SMALL.g], range(min(SMALL.g, length)))
                np.testing.assert_array_equal(
                    slots[len(slots) - local :], range(length - local, length)
                )
                selected += length > SMALL.g + SMALL.w and len(slots) < length
    # Most calls leave something out, or this would be full attention.
    assert selected > 20


def test_e1_short_texts_see_everything(run):
    for logits, expected in zip(run.logits, full_logits(run.engine, run.rows), strict=True):
        short = SMALL.g + SMALL.w
        np.testing.assert_allclose(logits[:short], expected[:short], atol=1e-4)
        # And beyond they do not, or E1 would say nothing.
        assert len(logits) < 12 or np.abs(logits[12:] - expected[12:]).max() > 1e-2


def test_e5_cached_keys_are_raw_projections(run):
    for layer, keys_BKSH in enumerate(run.keys):
        for row_KSH, trace in zip(keys_BKSH, run.traces, strict=True):
            expected = np.swapaxes(trace.keys[layer], 0, 1)
            np.testing.assert_allclose(row_KSH[:, : expected.shape[1]], expected, atol=1e-5)


def test_e8_e13_a_row_is_the_same_in_any_company(run):
    """The other rows are other texts of other lengths; each row moves to another place, too."""
    others = texts([(9, 2), (41, 7), (3, 1), (13, 12)], seed=10)
    for mine in range(len(LENGTHS)):
        rows = [[*part] for part in others]
        place = (mine + 1) % len(LENGTHS)
        for part, own in zip(rows, run.rows, strict=True):
            part[place] = own[mine]
        SEEN.clear()
        np.testing.assert_allclose(read(run.engine, rows)[place], run.logits[mine], atol=1e-5)


def test_e7_on_a_mesh_with_a_larger_buffer():
    """2x2x2; also E13: the cache has twice the slots of one device's."""
    rows = texts([(37, 1), (5, 1), (20, 1), (0, 1)], answer=2)
    engine = tiny_engine(method_of(SMALL), mesh=make_mesh(2, 2, 2), config=ONE_LAYER)
    check_logits(engine, SMALL, rows)


def test_e12_released_behaviour_on_sharded_slots():
    """Tiles of 128 cross the borders of the shards, heads are scrambled over theirs.

    The middle grows from one tile, less than the k = 4 asked for (RA-B7), to four.
    """
    rules = Rules(g=32, w=192, m=32, k=4, kept=3, c=64, released=True)
    config = tiny_config(num_layers=1, max_position=512)
    engine = tiny_engine(method_of(rules), mesh=make_mesh(1, 4, 2), config=config)
    rows = texts([(612, 1)], answer=0, seed=4)
    assert calls_of(rules, 612, 1, 0)[:3] == [100, 64, 64]
    check_logits(engine, rules, rows)


def test_e2_selecting_everything_is_full_attention():
    rules = Rules(g=2, w=8, m=1, k=16, kept=16, c=8)
    engine = tiny_engine(method_of(rules), config=ONE_LAYER)
    rows = texts([(25, 1)], answer=0)
    for got, expected in zip(read(engine, rows), full_logits(engine, rows), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_e11_original_positions():
    """With everything selected full attention; where less is, the oracle's gaps."""
    rules = Rules(g=2, w=8, m=2, k=4, kept=16, c=8, original=True)
    engine = tiny_engine(method_of(rules), config=ONE_LAYER)
    rows = texts([(37, 1)], answer=0)
    (got,) = check_logits(engine, rules, rows)
    (expected,) = full_logits(engine, rows)
    np.testing.assert_allclose(got[:14], expected[:14], atol=1e-4)
    assert np.abs(got - expected).max() > 1e-3


def test_e3_one_vote_covers_a_tiny_middle():
    """A middle of 8 and 15 in chunks, of 16 under a lone token, under spans of 32."""
    rules = Rules(g=2, w=8, m=32, k=1, kept=1, c=8)
    engine = tiny_engine(method_of(rules), config=ONE_LAYER)
    rows = texts([(25, 1)], answer=0)
    for got, expected in zip(read(engine, rows), full_logits(engine, rows), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


def test_e4_no_keys_are_streaming_llm():
    rules = Rules(g=2, w=8, m=4, k=0, kept=3, c=8)
    np.testing.assert_array_equal(
        chosen(rules, np.zeros((1, 4, 8)), np.zeros((30, 2, 8))), [0, 1, *range(22, 30)]
    )
    engine = tiny_engine(method_of(rules), config=ONE_LAYER)
    check_logits(engine, rules, texts([(37, 1), (20, 1)], answer=0))


def test_questions_leave_no_trace_and_contexts_can_be_saved(tmp_path):
    engine = tiny_engine(method_of(SMALL), config=ONE_LAYER)
    contexts = random_rows([37, 5, 20])
    first, second = random_rows([4, 1, 12], seed=1), random_rows([9, 11, 2], seed=3)

    def ask(context, questions):
        blocks = engine.stream(context, questions, max_tokens=6)
        return [list(itertools.chain(*row)) for row in zip(*blocks, strict=True)]

    context = engine.prefill(contexts, reserve=32)
    save_context(engine, context, tmp_path / "context")
    answers = ask(context, first)
    assert ask(context, second) != answers
    assert ask(context, first) == answers
    assert ask(load_context(engine, tmp_path / "context"), first) == answers
    # The engine's own way of feeding is the harness's: greedy tokens follow from its logits.
    rows = (contexts, first, [row[:5] for row in answers])
    for trace, answer in zip(traces(engine, SMALL, rows), answers, strict=True):
        steps_of_answer = np.concatenate(trace.logits[-6:]).argmax(-1)
        np.testing.assert_array_equal(steps_of_answer, answer)


# The parts, as functions of arrays.


def inside(function, *args, theta=THETA):
    """`function(ctx, *args)` as a method runs it, on one device."""
    rope = dataclasses.replace(tiny_config().rope, theta=theta)
    total = jnp.array([64])
    ctx = LayerContext(layer=0, scale=1.0, window=None, rope=rope, total=total)
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
        kept, number = recall.spread(centres, 4, 2, stop)
        return scope.lay_out(kept, number, stop, global_size=2, local_size=4), number

    slots, number = inside(example, jnp.array([[2, 7]]), jnp.array([8]))
    assert number[0] == 5
    np.testing.assert_array_equal(slots[0, :11], [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11])


@pytest.mark.parametrize("span", [1, 5, 8])
def test_ra_b10_spans_even_and_odd_are_cut_at_the_edges(span):
    rng = np.random.default_rng(span)
    start, stops = 3, rng.integers(4, 60, 24)
    centres = np.full((24, 6), -1)
    for row, stop in zip(centres, stops, strict=True):
        most = min(6, stop - start)
        some = rng.choice(np.arange(start, stop), rng.integers(0, most + 1), replace=False)
        row[: len(some)] = np.sort(some)
    centres[:2], stops[:2] = [start, 31, -1, -1, -1, -1], 32
    slots, number = inside(
        lambda ctx, *args: recall.spread(args[0], span, start, args[1]),
        jnp.array(centres, jnp.int32),
        jnp.array(stops, jnp.int32),
    )
    before, after = span // 2, span - span // 2
    for got, count, row, stop in zip(slots, number, centres, stops, strict=True):
        union = {s for c in row if c >= 0 for s in range(c - before, c + after)}
        expected = sorted(s for s in union if start <= s < stop)
        np.testing.assert_array_equal(got[:count], expected)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_votes_keep_the_most_named_and_of_equals_the_lower(platform, monkeypatch):
    monkeypatch.setattr(recall, "platform", lambda: platform)
    # Three blocks of entries and three pages, both with some to spare.
    monkeypatch.setattr(recall, "_VOTES", 10)
    monkeypatch.setattr(recall, "_LANES", 16)
    rng = np.random.default_rng(0)
    # Few slots for many votes: ties at the cut; rows of no votes, of fewer than are kept, of one.
    named = rng.integers(-1, 12, (8, 3, 4, 2))
    named[0], named[1] = -1, np.where(rng.random((3, 4, 2)) < 0.5, 7, 3)
    named[2], named[3] = 11, np.arange(24).reshape(3, 4, 2) // 2

    def both(ctx, named):
        return recall.centres_of_chunk(named, 40, 5, ctx), recall.centres_of_token(named, 5, ctx)

    for got in inside(both, jnp.array(named, jnp.int32)):
        for row, votes in zip(got, named, strict=True):
            expected = votes_kept(votes.ravel().tolist(), 5)
            np.testing.assert_array_equal(row, [*expected, *[-1] * (5 - len(expected))])


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
        return method.choose(q, cache, zeros + tokens, ctx)

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
    whole = [(scope.WHOLE, 512, 512)] * 8
    assert plan(ReAttention(), 5000) == [
        *whole,
        (scope.WHOLE, 32, 32),
        ("", 512, 512),
        ("", 360, 512),
    ]
    assert plan(ReAttention(), 4000)[-1] == (scope.WHOLE, 416, 512)
    assert plan(ReAttention(), 0) == []
    released = plan(ReAttention.released(), 5000)
    assert released == [*whole, (scope.WHOLE, 8, 8), ("", 512, 512), ("", 384, 512)]
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
