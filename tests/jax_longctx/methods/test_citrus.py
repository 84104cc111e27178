"""CItruS in its three forms against numpy, and the identities between them and with others."""

import functools

import jax
import numpy as np
import pytest

from jax_longctx.contract import Prompt, beside, chunk_segments
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.methods import TOVA, Citrus, CitrusIndividual, CitrusStandard
from tests.jax_longctx.methods.harness import ask_twice
from tests.jax_longctx.methods.oracles.citrus import Kept, look, nothing
from tests.jax_longctx.methods.reading import (
    ANSWERS,
    CHUNK,
    CONTEXTS,
    KEPT,
    QUESTIONS,
    compare,
    engine_with,
    equals_full_attention,
    feed,
    oracle_params,
    run,
)
from tests.support import random_rows, tiny_config

FORMS = {"standard": CitrusStandard, "shared": Citrus, "individual": CitrusIndividual}
each_form = pytest.mark.parametrize("form", FORMS)


@functools.cache
def engine_of(form):
    return engine_with(FORMS[form](budget=KEPT + CHUNK, chunk=CHUNK), layers=2)


@functools.cache
def run_of(form):
    return run(engine_of(form))


def in_context(seen):
    return [step for step in seen if step.role not in ("probe", "query", "decode")]


def same(left, right, rows=None, thread=-1):
    """The same kept tokens and logits in these rows (all by default), step by step."""
    for a, b in zip(left, right, strict=True):
        for row in range(len(CONTEXTS)) if rows is None else rows:
            assert a.row(row)[thread] == b.row(row)[-1]
            np.testing.assert_allclose(a.logits[row], b.logits[row], atol=1e-5)


@each_form
def test_sh_2_x7_cs_4_x22_it_is_numpys_row_by_row(form):
    """Ragged rows in merged passes keep what each keeps alone, by one pass for each group."""
    compare(run_of(form), engine_of(form), form)


@pytest.mark.thorough
@each_form
def test_a_mesh_keeps_what_one_device_keeps(form):
    """Every head's score must arrive on every shard: by local ones alone shards would differ."""
    method = engine_of(form).method
    engine = engine_with(method, mesh=(2, 2, 2))
    compare(run(engine) if form == "shared" else feed(engine), engine, form)


@each_form
def test_x1_cs_1_cs_6_sh_3_in_3_with_room_for_all_it_is_full_attention(form):
    """k >= L (row 1), and c >= L (row 3, CS-2), and no context at all (row 4)."""
    for row in (1, 3, 4):
        equals_full_attention(run_of(form), engine_of(form), row)
    assert in_context(run_of(form))[-1].row(1) == [[[tuple(range(16))] * 2] * 2] * len(
        run_of(form)[0].kept
    )


def test_sh_4_one_chunk_is_the_same_under_every_form():
    for form in ("shared", "individual"):
        same(run_of(form), run_of("standard"), rows=[3])


def test_in_4_with_room_for_all_shared_and_individual_caches_are_the_same():
    same(run_of("individual"), run_of("shared"), rows=[1])


def test_in_1_x5_the_language_thread_is_standard():
    individual, standard = (in_context(run_of(form)) for form in ("individual", "standard"))
    same(individual, standard, thread=0)
    # The threads do differ, or this would say nothing.
    assert individual[-1].kept[0] != individual[-1].kept[1]


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
            caches[layer] = Kept(
                both.k[index], both.v[index], both.token[index], both.mass[index], both.rows[index]
            )
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


def test_x3_cs_3_tv_2_by_single_tokens_it_is_tova_that_protects_the_current_one():
    standard = CitrusStandard(budget=KEPT + 1, chunk=1)
    tova = TOVA(budget=KEPT + 1, chunk=1, protect_current=True, positions="shifted")
    left, right = (
        feed(engine_with(method), chunk_segments(CONTEXTS, 1, "context"))
        for method in (standard, tova)
    )
    same(left, right)
    assert left[-1].kept[0][0][0][0] != tuple(range(28, 45))


def test_settings_sinks_logits_and_eviction_before_the_chunk():
    settings = {"sink": 3, "score": "logit", "evict_first": True}
    method = Citrus(budget=KEPT + CHUNK, chunk=CHUNK, **settings)
    engine = engine_with(method)
    seen = feed(engine)
    compare(seen, engine, "shared", **settings)
    # First tokens would have left without being told to stay.
    first = (0, 1, 2)
    assert all(head[:3] == first for layer in seen[-1].row(0)[0] for head in layer)
    assert any(head[:3] != first for layer in run_of("shared")[5].row(0)[0] for head in layer)


@each_form
def test_a_second_question_and_a_saved_context(form, tmp_path):
    others = random_rows([4, 2, 12, 3, 1, 6], seed=3) if form == "standard" else QUESTIONS
    rows, others = (CONTEXTS, QUESTIONS, ANSWERS), (others, random_rows([4] * 6, seed=4))
    loaded = ask_twice(engine_of(form), tmp_path, rows, others)
    # Nothing is left of the language thread: 24 tokens and what follows, keys, values and indices.
    rows = len(CONTEXTS) * 2 * (KEPT + CHUNK + 32)
    counters = 2 * len(CONTEXTS) * 4
    assert loaded.resident_bytes == 2 * (rows * (2 * 8 * 4 + 4) + counters)
    assert len(jax.tree.leaves(loaded.caches[0])) == 5


def test_short_questions_share_their_programs():
    method = Citrus(budget=128, chunk=32)
    widths = {method.question_width([[1] * tokens, [1]]) for tokens in (1, 9, 20, 32)}
    assert widths == {32} and method.question_width([[1] * 33]) == 64
    assert Citrus(budget=24, chunk=8).question_width([[1] * 5]) == 16


@each_form
def test_a_question_longer_than_the_cache_is_refused(form):
    engine, contexts, questions = engine_of(form), random_rows([9]), random_rows([25], seed=1)
    words = f"{engine.method.name}: the question has 25 tokens, more than the cache's"
    if form == "standard":
        with pytest.raises(InputError, match=words):
            list(engine.method.segments(Prompt("question", 8, question=questions)))
        return
    with pytest.raises(InputError, match=words):
        engine.prefill(contexts, reserve=8, questions=questions)
    with pytest.raises(InputError, match="needs the question at prefill"):
        engine.prefill(contexts, reserve=8)


@each_form
def test_bad_settings(form):
    method = FORMS[form]
    name = method.name
    for settings, said in [
        ({"chunk": 0}, "chunk must be at least 1, got 0"),
        ({"sink": -1}, "sink must be at least 0, got -1"),
        ({"budget": 8, "chunk": 9}, "budget 8 less chunk 9 leaves -1 tokens"),
        ({"budget": 12, "chunk": 9, "sink": 4}, "leaves 3 tokens, but the method always keeps 4"),
    ]:
        with pytest.raises(ConfigError, match=f"{name}: .*{said}"):
            method(**settings)
    # Every chunk may see its predecessor only.
    method(budget=8, chunk=8)
    narrow = tiny_config(windows=(None, 20))
    with pytest.raises(ConfigError, match=f"{name}: budget 24 and chunk 8 exceed .* 20 tokens"):
        method(budget=24, chunk=8).validate(narrow)
