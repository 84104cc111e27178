"""ReAttention against numpy, layer by layer and step by step; the names carry the spec's ids."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np
import pytest

from jax_longctx.contract import Prompt
from jax_longctx.engine.context_io import load_context, save_context
from jax_longctx.methods import ReAttention
from jax_longctx.methods.reattention import WHOLE
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import steps
from tests.jax_longctx.methods.oracles.reattention import (
    Rules,
    calls_of,
    chosen,
    follow,
)
from tests.jax_longctx.methods.released import SMALL, method_of
from tests.oracle import causal_attend, forward, to_numpy
from tests.support import random_rows, tiny_config, tiny_engine

THETA = 1e4
# Where more layers would only take longer to compile.
ONE_LAYER = tiny_config(num_layers=1)
# Of each row: context, question; every row is given as many answer tokens.
LENGTHS = [(37, 4), (5, 1), (20, 12), (0, 3)]
ANSWER = 5


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


# Sliding windows that hide nothing, one a layer: what a method can tell the layers by.
LAYERS = (1000, 2000)
# What an engine run leaves behind: (layer, slots, number) of each layer and segment.
SEEN: list[tuple[int, np.ndarray, np.ndarray]] = []


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watched(ReAttention):
    """Tells which slots each layer attends."""

    def choose(self, q, cache, valid, ctx, **how):
        scope = super().choose(q, cache, valid, ctx, **how)
        jax.debug.callback(functools.partial(note, LAYERS.index(ctx.window)), *scope.listed())
        return scope


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
    engine = tiny_engine(method_of(SMALL, Watched), config=tiny_config(windows=LAYERS))
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
                if step.segment.variant == WHOLE and scopes[b]:
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


@pytest.mark.slow
def test_e7_on_a_mesh_with_a_larger_buffer():
    """2x2x2; also E13: the cache has twice the slots of one device's."""
    rows = texts([(37, 1), (5, 1), (20, 1), (0, 1)], answer=2)
    engine = tiny_engine(method_of(SMALL), mesh=make_mesh(2, 2, 2), config=ONE_LAYER)
    check_logits(engine, SMALL, rows)


@pytest.mark.thorough
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


@pytest.mark.thorough
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


def test_the_questions_last_token_goes_alone_unless_told_otherwise():
    question = Prompt("question", 512, question=random_rows([12, 8]))
    sizes = []
    for alone in (True, False):
        method = dataclasses.replace(method_of(SMALL), chunk=8, last_token_decode=alone)
        sizes.append([np.asarray(s.valid)[:, 0].tolist() for s in method.segments(question)])
        assert np.asarray([s.ends for s in method.segments(question)]).sum(0).tolist() == [1, 1]
    assert sizes == [[[8, 7], [3, 0], [1, 1]], [[8, 8], [4, 0]]]


@pytest.mark.thorough
def test_the_questions_last_token_with_its_chunk_equals_numpy():
    rules = dataclasses.replace(SMALL, together=True)
    engine = tiny_engine(method_of(rules), config=ONE_LAYER)
    rows = texts()
    (got, *_) = check_logits(engine, rules, rows)
    alone = next(iter(traces(engine, SMALL, rows)))
    last = sum(LENGTHS[0]) - 1
    assert np.abs(got[last] - np.concatenate(alone.logits)[last]).max() > 1e-3
