"""CItruS in its three forms, and H2O with its shared cache, against numpy; identities between them.

One run of ragged rows, watched, is compared with each row alone in numpy.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from jax_longctx.contract import beside, chunk_segments
from jax_longctx.methods import Citrus
from jax_longctx.methods.citrus_individual import CitrusIndividual, ThreadCaches
from jax_longctx.methods.citrus_standard import CitrusStandard
from jax_longctx.methods.h2o_shared import H2OShared
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.evicting import kept_tokens
from tests.jax_longctx.methods.harness import (
    FedRows,
    ask_twice,
    check_rows,
    full_logits,
    oracle_params,
    steps,
)
from tests.jax_longctx.methods.oracles.citrus import Kept, Rule, look, nothing, read
from tests.support import engine_over, random_rows, tiny_config, tiny_engine

CHUNK, KEPT, RESERVE = 8, 16, 32
SIZES = {"budget": KEPT + CHUNK, "chunk": CHUNK}
# Rows that evict, one as long as what is kept, one of a single chunk, an empty one.
CONTEXTS = random_rows([45, 16, 29, 5, 0, 25])
# One is longer than a chunk.
QUESTIONS = random_rows([3, 11, 7, 5, 2, 1], seed=1)
ANSWERS = random_rows([4] * 6, seed=2)
ROWS = CONTEXTS, QUESTIONS, ANSWERS

FORMS = {
    "standard": CitrusStandard,
    "shared": Citrus,
    "individual": CitrusIndividual,
    "h2o": H2OShared,
}
each_form = pytest.mark.parametrize("form", FORMS)


@functools.cache
def _base(layers, mesh):
    return tiny_engine(mesh=make_mesh(*mesh), config=tiny_config(num_layers=layers))


def engine_with(method, *, layers=1, mesh=(1, 1, 1)):
    """The method on a random model, which methods share: compilation is what these tests cost."""
    base = _base(layers, mesh)
    return engine_over(base.config, base.params, method, base.mesh)


@functools.cache
def engine_of(form):
    return engine_with(FORMS[form](**SIZES), layers=1 if form == "h2o" else 2)


@dataclasses.dataclass(frozen=True)
class Seen:
    """A step on the host: the kept tokens by thread, layer, row and head; valid rows' logits."""

    role: str
    kept: list[list[list[list[tuple[int, ...]]]]]
    logits: list[np.ndarray]
    sums: list[np.ndarray | None]

    @classmethod
    def of(cls, step):
        threads = [list(step.caches)]
        if isinstance(step.caches[0], ThreadCaches):
            threads = [[getattr(c, name) for c in step.caches] for name in ("language", "task")]
        logits = [block[:n] for block, n in zip(step.logits, step.valid, strict=True)]
        sums = [getattr(cache, "statistics", None) for cache in threads[-1]]
        sums = [None if each is None else np.asarray(each)[..., 0] for each in sums]
        return cls(step.segment.role, [kept_tokens(thread) for thread in threads], logits, sums)

    def row(self, index):
        return [[layer[index] for layer in thread] for thread in self.kept]


def run(engine):
    return [Seen.of(step) for step in steps(engine, *ROWS, RESERVE)]


@functools.cache
def run_of(form):
    return run(engine_of(form))


def feed(engine, segments=None):
    run = FedRows.of(engine, CONTEXTS, RESERVE)
    fed = run.read(CONTEXTS, QUESTIONS) if segments is None else run.feed(segments)
    return [Seen.of(step) for step in fed]


def in_context(seen):
    return [step for step in seen if step.role not in ("probe", "query", "decode")]


def compare(seen, engine, form, **options):
    """Kept tokens of every thread, layer and head, and logits, against each row alone in numpy."""
    params = oracle_params(engine)
    rule = Rule(form=form, kept=KEPT, chunk=CHUNK, **options)
    evictions = 0
    for b, texts in enumerate(zip(*ROWS, strict=True)):
        oracle = read(engine.config, params, *texts, rule)
        before: Any = [[[()] * 2] * engine.config.num_layers] * len(seen[0].kept)
        for step in seen:
            if not len(step.logits[b]):
                # The row's context has ended: nothing may change.
                assert step.row(b) == before
                continue
            logits, threads = next(oracle)
            np.testing.assert_allclose(step.logits[b], logits, atol=1e-4)
            before = [[[tuple(h) for h in c.token.T] for c in thread] for thread in threads]
            assert step.row(b) == before
            evictions += len(threads[0][0].token) <= threads[0][0].token.max(initial=0)
            if step.sums[0] is None or step.role not in ("probe_and_context", "probe"):
                continue
            for sums, cache in zip(step.sums, threads[-1], strict=True):
                np.testing.assert_allclose(sums[b, :, : len(cache.mass)].T, cache.mass, atol=1e-5)
    assert evictions


def same(left, right, rows=(0, 1, 2, 3, 4, 5), thread=-1):
    """The same kept tokens, logits and sums, if any, in these rows, step by step."""
    for a, b in zip(left, right, strict=True):
        for row in rows:
            assert a.row(row)[thread] == b.row(row)[-1]
            np.testing.assert_allclose(a.logits[row], b.logits[row], atol=1e-5)
            for sums in zip(a.sums, b.sums, strict=True):
                if sums[0] is not None:
                    held = len(a.row(row)[0][0][0])
                    check_rows(sums[0][row, :, :held], sums[1][row, :, :held], atol=1e-5)


@each_form
def test_sh_2_x7_cs_4_x22_it_is_numpys_row_by_row(form):
    """Ragged rows in merged passes keep what each keeps alone, by one pass for each group."""
    compare(run_of(form), engine_of(form), form)
    if form == "h2o":
        # Head-wise: the kv heads of a layer keep different tokens.
        first, second = run_of(form)[5].row(0)[0][0]
        assert first != second


@pytest.mark.thorough
@each_form
def test_a_mesh_keeps_what_numpy_keeps(form):
    """Every head's score must arrive on every shard: by local ones alone shards would differ."""
    engine = engine_with(FORMS[form](**SIZES), mesh=(2, 2, 2))
    compare(run(engine) if form == "shared" else feed(engine), engine, form)


@each_form
def test_x1_cs_1_cs_6_sh_3_in_3_hs_3_with_room_for_all_it_is_full_attention(form):
    seen = run_of(form)
    expected = full_logits(engine_of(form), ROWS)
    for row in (1, 3, 4):
        logits = np.concatenate([step.logits[row] for step in seen if step.role != "probe"])
        np.testing.assert_allclose(logits, expected[row], atol=2e-5)
    layers = engine_of(form).config.num_layers
    assert in_context(seen)[-1].row(1) == [[[tuple(range(16))] * 2] * layers] * len(seen[0].kept)


def test_in_1_x5_in_4_sh_4_forms_that_are_the_same():
    standard, shared, individual = map(run_of, ("standard", "shared", "individual"))
    same(shared, standard, rows=[3])
    same(individual, standard, rows=[3])
    same(individual, shared, rows=[1])
    same(in_context(individual), in_context(standard), thread=0)
    # The threads do differ, or this would say nothing.
    last = in_context(individual)[-1]
    assert last.kept[0] != last.kept[1]


def with_itself():
    """The context with every chunk as its own instruction."""
    for chunk in chunk_segments(CONTEXTS, CHUNK, "context"):
        valid = np.asarray(chunk.valid)[:, 0]
        rows = [list(map(int, row[:n])) for row, n in zip(chunk.tokens, valid, strict=True)]
        yield beside(chunk, rows, 16)


@pytest.mark.parametrize("form", ["shared", "individual"])
def test_sh_1_x4_in_2_x6_a_chunk_that_instructs_itself_is_standard(form):
    seen = feed(engine_of(form), with_itself())
    same(seen, in_context(run_of("standard")))
    assert all(step.kept[0] == step.kept[-1] for step in seen)


def official(config, params, tokens, kept, chunk):
    """The authors' selection: chunks 0 and 1 in one pass, indices sorted after those of the chunk.

    Yields each layer's kept token indices, and the logits of the pass.
    """
    caches = nothing(config)
    starts = range(2 * chunk, len(tokens), chunk)
    for begin, end in [(0, 2 * chunk), *((s, s + chunk) for s in starts)]:
        part = tokens[begin:end]
        logits, views = look(config, params, part, caches)
        for layer, view in enumerate(views):
            # Rows by all columns [T, n + T], averaged over heads as the attention map has them.
            attention = np.concatenate([view.cached, view.own], axis=-1).mean(0)
            rows = attention[chunk:] if begin == 0 else attention
            old = rows.shape[1] - min(len(part), chunk)
            score = rows.mean(0)[:old]
            top = np.argpartition(-score, kept)[:kept] if old > kept else np.arange(old)
            index = np.sort(np.concatenate([top, np.arange(old, rows.shape[1])]))
            both = caches[layer].joined(view.kept(begin))
            caches[layer] = Kept(both.k[index], both.v[index], both.token[index], both.mass[index])
        yield [cache.token[:, 0].tolist() for cache in caches], logits


def test_cs_5_cs_7_the_authors_selection_keeps_the_same_tokens():
    kept = 4  # fewer than a chunk: their first pass evicts
    engine = engine_with(CitrusStandard(budget=kept + CHUNK, chunk=CHUNK))
    context = CONTEXTS[0]
    seen = feed(engine, chunk_segments([context] + [[]] * 5, CHUNK, "context"))
    passes = list(official(engine.config, oracle_params(engine), context, kept, CHUNK))
    for step, (tokens, logits) in zip(seen[1:], passes, strict=True):
        assert step.row(0)[0] == [[tuple(expected)] * 2 for expected in tokens]
        np.testing.assert_allclose(step.logits[0], logits[-len(step.logits[0]) :], atol=1e-4)


def test_first_tokens_stay():
    engine = engine_with(Citrus(**SIZES, sink=3))
    seen = feed(engine)
    compare(seen, engine, "shared", sink=3)
    # First tokens would have left without being told to stay.
    first = (0, 1, 2)
    assert all(head[:3] == first for layer in seen[-1].row(0)[0] for head in layer)
    assert any(head[:3] != first for layer in run_of("shared")[5].row(0)[0] for head in layer)


@each_form
def test_a_second_question_and_a_saved_context(form, tmp_path):
    others = random_rows([4, 2, 12, 3, 1, 6], seed=3) if form == "standard" else QUESTIONS
    others = others, random_rows([4] * 6, seed=4)
    loaded = ask_twice(engine_of(form), tmp_path, ROWS, others)
    if form != "h2o":
        # Nothing is left of the language thread: 24 tokens and what follows, keys, values, indices.
        slots = len(CONTEXTS) * 2 * (KEPT + CHUNK + 32)
        counters = 2 * len(CONTEXTS) * 4
        assert loaded.resident_bytes == 2 * (slots * (2 * 8 * 4 + 4) + counters)
        assert len(jax.tree.leaves(loaded.caches[0])) == 5


def test_short_questions_share_their_programs():
    method = Citrus(budget=128, chunk=32)
    widths = {method.question_width([[1] * tokens, [1]]) for tokens in (1, 9, 20, 32)}
    assert widths == {32} and method.question_width([[1] * 33]) == 64
    assert Citrus(budget=24, chunk=8).question_width([[1] * 5]) == 16


def test_hs_2_after_two_chunks_heads_rank_by_what_the_instruction_looks_at():
    """The scores of the shared cache, before they are averaged over heads."""
    engine, seen = engine_of("h2o"), run_of("h2o")
    config, params = engine.config, oracle_params(engine)
    caches = nothing(config)
    _, views = look(config, params, CONTEXTS[0][:CHUNK], caches)
    caches = [cache.joined(view.kept(0)) for cache, view in zip(caches, views, strict=True)]
    _, views = look(config, params, QUESTIONS[0], caches)
    for sums, view in zip(seen[1].sums, views, strict=True):
        scores = view.cached.mean(1).reshape(2, 2, CHUNK).mean(1)
        np.testing.assert_allclose(sums[0, :, :CHUNK], CHUNK * scores, atol=1e-5)
        # The chunk that joined has been looked at by nobody.
        assert not sums[0, :, CHUNK : 2 * CHUNK].any()
