"""Texts, questions and answers of about the same lengths share all their programs."""

import jax
import jax.numpy as jnp
import pytest

from jax_longctx.engine import programs
from tests.jax_longctx.engine.test_running import compilations
from tests.small_methods import small_method
from tests.support import joined, random_rows, tiny_config, tiny_engine

TRACED = programs.EVENTS[0]


def answer(engine, text, question, tokens):
    contexts, questions = random_rows([text]), random_rows([question], seed=1)
    context = engine.prefill(contexts, reserve=question + tokens, questions=questions)
    return joined(engine.stream(context, questions, max_tokens=tokens))[0]


@pytest.mark.parametrize("name", ["snapkv", "refreshkv", "citrus", "reattention", "star"])
@pytest.mark.quick("snapkv")
def test_other_lengths_trace_nothing(name):
    # Other tests may have traced the same programs.
    jax.clear_caches()
    engine = tiny_engine(small_method(name), chunk=16, by_layer=name != "refreshkv")
    with compilations(TRACED) as traced:
        answer(engine, 103, 8, 12)
        assert traced
        traced.clear()
        # Of a text, a question and an answer each, and of all at once.
        for lengths in [(120, 8, 12), (103, 5, 12), (103, 8, 17), (97, 6, 15)]:
            assert len(answer(engine, *lengths)) == lengths[-1]
            assert not traced, lengths


@pytest.mark.slow
def test_methods_share_the_programs_without_layers():
    """Which programs methods trace anew, after another of the same shapes."""
    jax.clear_caches()
    shared = {"_embedded", "_normed", "_marker", "_wanted", "_next_state", "_fed", "start_answer"}
    for name in ("full", "quest", "snapkv"):
        engine = tiny_engine(small_method(name), chunk=16, by_layer=True)
        with compilations(TRACED) as traced:
            answer(engine, 103, 8, 12)
        assert "_through_layer" in traced
        assert shared & set(traced) == (shared if name == "full" else set())


def test_layers_that_are_alike_share_a_program_and_take_their_caches():
    config = tiny_config(num_layers=5, windows=(7, None, 7, None, None))
    engine = tiny_engine(config=config, by_layer=True)
    caches = programs.init_caches(engine.setup, 1, 128, 0)
    prompt = engine.prompt("context", 128, context=random_rows([24]))
    (segment,), total = engine.method.segments(prompt), jnp.array([24], jnp.int32)
    with compilations() as compiled:
        new, _ = programs.run_segment(
            engine.setup, engine.params, caches, segment, total, None, "all"
        )
    assert compiled.count("jit(_through_layer)") == 2
    finished = programs.finish_context(engine.setup, new, total, 0)
    assert all(cache.k.is_deleted() and cache.v.is_deleted() for cache in (*caches, *new))
    assert [int(cache.length[0]) for cache in finished] == [24] * 5
