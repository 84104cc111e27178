"""The two modes of an engine give the same answers, for every method.

The host calls a layer's program for each layer, or a program loops over the layers on the device
(`Setup.by_layer`). The loop reads joined weights, so its sums may differ in their last bits.
"""

from functools import partial

import numpy as np
import pytest

from jax_longctx.engine import programs
from jax_longctx.engine.scoring import loglikelihoods
from jax_longctx.methods import METHODS, Full, RefreshKV, make_method
from jax_longctx.models.llama import PLAIN
from jax_longctx.parts import selecting
from jax_longctx.sharding import make_mesh
from pallas_kernels.row_matmul import MAX_ROWS, MAX_SOURCE_ROWS
from tests.small_methods import small_method
from tests.support import joined, random_rows, tiny_config, tiny_engine

# Chunks of 16 tokens: the context takes several, the rows end in different ones.
CONTEXTS = random_rows([64, 37])
QUESTIONS = random_rows([5, 2], seed=1), random_rows([3, 5], seed=2)
# Answers of more than one block of decode steps, and given tokens.
TOKENS = 9
GIVEN = random_rows([7, 4], seed=3)
LAYERS = 3


def results(method, by_layer, sizes=(1, 1, 1), **changes):
    """The tokens of each question's answer, and each row's log-probabilities of given tokens."""
    config = tiny_config(num_layers=LAYERS, **changes)
    mesh = make_mesh(*sizes)
    engine = tiny_engine(method, config=config, mesh=mesh, chunk=16, by_layer=by_layer)
    answers = []
    needs_question = method.info.needs_question
    for questions in QUESTIONS:
        if needs_question or not answers:
            context = engine.prefill(CONTEXTS, reserve=40, questions=questions)
        answers.append(joined(engine.stream(context, questions, max_tokens=TOKENS)))
    scored = loglikelihoods(engine, CONTEXTS, GIVEN, questions=QUESTIONS[0])
    return answers, [row.logprobs for row in scored]


def check(method, *args, **options):
    (answers, scores), (expected, likely) = (
        results(method, by_layer, *args, **options) for by_layer in (False, True)
    )
    assert answers == expected
    assert all(len(row) == TOKENS for answer in answers for row in answer)
    for found, wanted in zip(scores, likely, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


also = partial(pytest.param, marks=pytest.mark.slow)
# All tokens stay; each step selects; full and partial steps; tokens leave after the context.
QUICK = ("full", "quest", "refreshkv", "snapkv")


@pytest.mark.parametrize("name", [name if name in QUICK else also(name) for name in METHODS])
def test_a_loop_over_layers_answers_as_the_host_does(name):
    check(small_method(name))


MESHES = {"full": (1, 2, 1), "snapkv": (1, 1, 2), "quest": (1, 2, 1), "star": (1, 2, 1)}


@pytest.mark.parametrize("name", ["snapkv", *map(also, ("full", "quest", "star"))])
def test_on_a_mesh_too(name):
    check(small_method(name), MESHES[name])


def test_with_a_conditional_that_returns_part_of_the_cache():
    check(RefreshKV(budget=48, qc_stride=2, threshold=0.9))


def test_with_layers_that_differ():
    """Runs of one layer and of two."""
    check(Full(), windows=(7, None, None))


@pytest.mark.parametrize("products_of", [programs.FewRows, programs.Unsummed])
@pytest.mark.parametrize("name", ["full", "quest", also("resa"), also("streaming-llm")])
def test_the_products_of_few_rows_on_a_gpu_answer_alike(monkeypatch, name, products_of):
    """With the products that XLA makes; the kernels have tests of their own.

    Selectors take their order of operations on a GPU too.
    """
    used = []

    def products(setup, rows):
        used.append(rows)
        return products_of(setup) if rows <= most else PLAIN

    # Programs are kept by their setup: no other test has this model.
    most, mlp = {programs.FewRows: (MAX_ROWS, 40), programs.Unsummed: (MAX_SOURCE_ROWS, 56)}[
        products_of
    ]
    other = dict(mlp_dim=mlp)
    expected = results(small_method(name), True, **other)
    monkeypatch.setattr(programs.Setup, "products", products)
    monkeypatch.setattr(selecting, "platform", lambda: "gpu")
    found = results(small_method(name), False, **other)
    assert found[0] == expected[0] and min(used) <= most
    for row, wanted in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(row, wanted, atol=1e-5)


@pytest.mark.parametrize("local", [0, 6])
@pytest.mark.parametrize("name", ["quest", "resa"])
def test_selectors_answer_alike_in_the_order_of_a_gpu(monkeypatch, name, local):
    """Digests are made beside the write of the newest key, and after the choice where they may."""
    method = make_method(name, {"budget": 12, "page_size": 4, "sink": 2, "local": local})
    # Programs are kept by their setup: no other test has this model.
    other = dict(mlp_dim=72)
    expected = results(method, True, **other)
    monkeypatch.setattr(selecting, "platform", lambda: "gpu")
    found = results(method, False, **other)
    assert found[0] == expected[0]
    for row, wanted in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(row, wanted, atol=1e-5)
