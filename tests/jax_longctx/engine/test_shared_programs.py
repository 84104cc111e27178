"""Texts, questions and answers of about the same lengths share all their programs."""

from functools import partial

import jax
import pytest

from jax_longctx.engine.capacity import bucket, reserved, slots_for
from tests.small_methods import small_method
from tests.support import random_rows, tiny_config, tiny_engine

also = partial(pytest.param, marks=pytest.mark.slow)
TRACED = "/jax/core/compile/jaxpr_trace_duration"


@pytest.fixture
def traced():
    """The names of all functions traced since the test began."""
    seen = []

    def listen(event, duration, fun_name="", **_):
        if event == TRACED:
            seen.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


def answer(engine, text, question, tokens):
    contexts, questions = random_rows([text]), random_rows([question], seed=1)
    context = engine.prefill(contexts, reserve=question + tokens, questions=questions)
    return [
        token
        for (block,) in engine.stream(context, questions, max_tokens=tokens)
        for token in block
    ]


@pytest.mark.parametrize(
    ("name", "by_layer"),
    [
        ("snapkv", True),
        also("refreshkv", False),
        *(also(name, True) for name in ("citrus", "reattention", "star")),
    ],
)
def test_other_lengths_trace_nothing(name, by_layer, traced):
    # Other tests may have traced the same programs.
    jax.clear_caches()
    config = tiny_config(num_layers=2)
    engine = tiny_engine(small_method(name), config=config, chunk=16, by_layer=by_layer)
    answer(engine, 103, 8, 12)
    first = len(traced)
    assert first > 0
    # Of a text, a question and an answer each, and of all at once.
    for lengths in [(120, 8, 12), (103, 5, 12), (103, 8, 17), (97, 6, 15)]:
        assert len(answer(engine, *lengths)) == lengths[-1]
        assert len(traced) == first, lengths
    # A longer text has a larger cache.
    answer(engine, 300, 8, 12)
    assert len(traced) > first


@pytest.mark.parametrize("name", ["quest", "snapkv"])
@pytest.mark.slow
def test_methods_share_the_programs_without_layers(name, traced):
    """Which programs a method traces anew, after another of the same shapes."""
    # Other tests may have traced them.
    jax.clear_caches()
    config = tiny_config(num_layers=2)
    answer(tiny_engine(config=config, chunk=16, by_layer=True), 103, 8, 12)
    shared = {"_embedded", "_normed", "_marker", "_wanted", "_next_state", "_fed", "start_answer"}
    assert shared <= set(traced)
    traced.clear()
    engine = tiny_engine(small_method(name), config=config, chunk=16, by_layer=True)
    answer(engine, 103, 8, 12)
    assert "_through_layer" in traced
    assert shared.isdisjoint(traced)


def test_long_texts_share_a_capacity_within_a_sixtyfourth():
    for tokens in (16_000, 40_000, 130_000, 1_000_000):
        slots = slots_for(tokens, 200)
        assert tokens + 257 <= slots <= (tokens + 257) * (1 + 1 / 64)
        # As many tokens as there are slots in a step have the same capacity.
        alike = [
            slots_for(tokens + more, 200) == slots for more in range(-tokens // 64, tokens // 64)
        ]
        assert sum(alike) >= tokens // 130
    assert bucket(slots_for(1_000_000)) == slots_for(1_000_000)


def test_reserves_come_in_few_sizes():
    assert reserved(0) == 0
    assert [reserved(tokens) for tokens in (1, 128, 129, 256, 300)] == [128, 128, 256, 256, 384]
    assert all(reserved(reserved(tokens)) == reserved(tokens) for tokens in range(1, 70_000, 11))
