"""TOVA against its definition in numpy, and its equivalences."""

import dataclasses

import numpy as np
import pytest

from jax_longctx.errors import ConfigError, InputError
from jax_longctx.methods import TOVA
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.evicting import (
    ANSWERS,
    CONTEXTS,
    NOTHING,
    QUESTIONS,
    ask_twice,
    compare,
    full_logits,
    kept_tokens,
)
from tests.jax_longctx.methods.harness import steps
from tests.jax_longctx.methods.oracles.evictors import TOVARule
from tests.support import random_rows, tiny_config, tiny_engine

OWN = TOVA(budget=16, chunk=8)
CITRUS = TOVA(budget=24, chunk=8, positions="shifted", protocol="citrus")


@pytest.fixture(scope="module")
def own():
    return tiny_engine(OWN, chunk=8)


def test_x22_ragged_rows_keep_what_each_keeps_alone(own):
    oracles = compare(own, TOVARule(), answers=ANSWERS)
    for layer in oracles[0].layers:
        assert len({tuple(head) for head in layer.token}) == 1


@pytest.mark.thorough
def test_x22_as_a_baseline_of_citrus():
    engine = tiny_engine(CITRUS, config=tiny_config(num_layers=1), chunk=8)
    compare(engine, TOVARule(), CONTEXTS, QUESTIONS, until="query")
    with pytest.raises(InputError, match="question has 25 tokens, more than the cache's budget"):
        list(steps(engine, CONTEXTS, random_rows([3, 25, 7, 5])))


def test_a_mesh_with_the_current_token_protected_keeps_what_one_device_keeps():
    method = dataclasses.replace(OWN, protect_current=True)
    engine = tiny_engine(method, config=tiny_config(num_layers=1), mesh=make_mesh(2, 2, 2))
    compare(engine, TOVARule(protect_current=True))


def test_tv_1_x1_a_budget_for_all_is_full_attention(own):
    row = CONTEXTS[1] + ANSWERS[1]
    expected = full_logits(own, row)
    at = 0
    for step in steps(own, CONTEXTS, NOTHING, ANSWERS):
        size = int(step.valid[1])
        np.testing.assert_allclose(step.logits[1, :size], expected[at : at + size], atol=1e-5)
        at += size
    assert at == len(row)


def test_tv_4_protection_matters_where_the_current_token_is_the_lowest():
    """Until the newest token is dropped both keep the same; then they differ."""
    free, config = TOVA(budget=6, chunk=1), tiny_config(num_layers=1)
    engines = [
        tiny_engine(dataclasses.replace(free, protect_current=protect), config=config, chunk=1)
        for protect in (False, True)
    ]
    rows = random_rows([37, 30, 25, 20], seed=4)
    same, agreed = [True] * 4, 0
    runs = (steps(engine, rows, NOTHING) for engine in engines)
    for i, (a, b) in enumerate(zip(*runs, strict=True)):
        kept, protected = kept_tokens(a.caches)[0], kept_tokens(b.caches)[0]
        for row in np.flatnonzero(a.valid):
            assert protected[row][0][-1] == i
            if same[row]:
                same[row] = kept[row][0][-1] == i
                assert (kept[row] == protected[row]) == same[row]
                agreed += same[row] and i >= free.budget
    assert agreed and not all(same)


def test_a_second_question_and_a_saved_context(own, tmp_path):
    ask_twice(own, tmp_path)


def test_bad_settings():
    for settings, said in [
        ({"budget": 0}, "tova: budget 0 leaves 0 tokens, but the method always keeps 1"),
        ({"chunk": 0}, "tova: chunk must be at least 1, got 0"),
        (
            {"budget": 16, "chunk": 16, "protocol": "citrus"},
            "tova: budget 16 less chunk 16 leaves 0 tokens",
        ),
    ]:
        with pytest.raises(ConfigError, match=said):
            TOVA(**settings)
