"""H2O with CItruS's shared cache against numpy, and its identities with H2O and CItruS."""

import numpy as np
import pytest

from jax_longctx.contract import beside, chunk_segments
from jax_longctx.errors import ConfigError, InputError
from jax_longctx.methods import H2O, H2OShared
from tests.jax_longctx.methods.harness import ask_twice
from tests.jax_longctx.methods.oracles.citrus import look, nothing
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
from tests.support import random_rows

SIZES = {"budget": KEPT + CHUNK, "chunk": CHUNK}


@pytest.fixture(scope="module")
def engine():
    return engine_with(H2OShared(**SIZES))


@pytest.fixture(scope="module")
def seen(engine):
    return run(engine)


def test_x22_it_is_numpys_row_by_row(engine, seen):
    compare(seen, engine, "h2o")
    # Head-wise: the kv heads of a layer keep different tokens.
    first, second = seen[5].row(0)[0][0]
    assert first != second


def test_hs_3_x1_with_room_for_all_it_is_full_attention(engine, seen):
    for row in (1, 3, 4):
        equals_full_attention(seen, engine, row)


def test_hs_2_after_two_chunks_heads_rank_by_what_the_instruction_looks_at(engine, seen):
    """The scores of the shared cache, before they are averaged over heads."""
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


def test_hs_1_x8_without_the_instruction_it_is_h2o_in_this_setting(seen):
    h2o = H2O(**SIZES, positions="shifted", protocol="citrus")
    plain = feed(engine_with(h2o), chunk_segments(CONTEXTS, CHUNK, "context"))
    segments = chunk_segments(CONTEXTS, CHUNK, "context")
    none = engine_with(H2OShared(**SIZES, alpha=0))
    blended = feed(none, (beside(chunk, QUESTIONS, 16) for chunk in segments))
    for a, b in zip(plain, blended, strict=True):
        assert a.kept == b.kept
        for row in range(len(CONTEXTS)):
            np.testing.assert_allclose(a.logits[row], b.logits[row], atol=1e-5)
            for left, right in zip(a.sums, b.sums, strict=True):
                held = len(a.row(row)[0][0][0])
                np.testing.assert_allclose(left[row, :, :held], right[row, :, :held], atol=1e-5)
    assert blended[-1].kept[0][0][0] != seen[5].kept[0][0][0]


@pytest.mark.thorough
def test_ranked_by_the_mean_it_is_numpys():
    """A blend, so that the rows of a token's own chunk count by halves."""
    engine = engine_with(H2OShared(**SIZES, alpha=0.5, acc_kind="mean"))
    means = feed(engine)
    compare(means, engine, "h2o", alpha=0.5, mean=True)
    # The sum would have kept others.
    summed = feed(engine_with(H2OShared(**SIZES, alpha=0.5)))
    assert [step.kept for step in means] != [step.kept for step in summed]


@pytest.mark.thorough
def test_a_blend_on_a_mesh_is_numpys():
    blend = H2OShared(**SIZES, alpha=0.25)
    engine = engine_with(blend, mesh=(2, 2, 2))
    compare(feed(engine), engine, "h2o", alpha=0.25)


def test_a_second_question_and_a_saved_context(engine, tmp_path):
    others = QUESTIONS, random_rows([4] * 6, seed=4)
    ask_twice(engine, tmp_path, (CONTEXTS, QUESTIONS, ANSWERS), others)


def test_bad_input(engine):
    for settings, said in [
        ({"alpha": 1.5}, "alpha must be from 0 to 1, got 1.5"),
        ({"alpha": float("nan")}, "alpha must be from 0 to 1, got nan"),
        ({"budget": 9, "chunk": 9}, "budget 9 less chunk 9 leaves 0 tokens"),
    ]:
        with pytest.raises(ConfigError, match=f"h2o-shared: {said}"):
            H2OShared(**settings)
    with pytest.raises(InputError, match="h2o-shared: the question has 25 tokens"):
        engine.prefill(random_rows([9]), reserve=8, questions=random_rows([25], seed=1))
