"""The two modes of an engine give the same answers.

The host calls a layer's program for each layer, or a program loops over the layers on the device
(`Setup.by_layer`). The loop reads joined weights, so its sums may differ in their last bits.
"""

from functools import partial

import numpy as np
import pytest

from jax_longctx.engine import programs
from jax_longctx.engine.products import Divided, FewRows
from jax_longctx.engine.scoring import loglikelihoods
from jax_longctx.methods import Full, RefreshKV
from jax_longctx.models.llama import PLAIN
from jax_longctx.sharding import make_mesh
from pallas_kernels.row_matmul import MAX_ROWS
from tests.small_methods import APART, KINDS, small_method
from tests.support import joined, random_rows, tiny_config, tiny_engine

# Chunks of 16 tokens: the context takes several, the rows end in different ones.
CONTEXTS = random_rows([64, 37])
QUESTIONS = random_rows([5, 2], seed=1), random_rows([3, 5], seed=2)
# Answers of more than one block of decode steps, and given tokens.
TOKENS = 9
GIVEN = random_rows([7, 4], seed=3)
LAYERS = 3


def results(method, by_layer, sizes=(1, 1, 1), rows=2, scored=True, **changes):
    """The tokens of each question's answer, and each row's log-probabilities of given tokens."""
    config = tiny_config(num_layers=LAYERS, **changes)
    mesh = make_mesh(*sizes)
    engine = tiny_engine(method, config=config, mesh=mesh, chunk=16, by_layer=by_layer)
    answers = []
    needs_question = method.info.needs_question
    contexts = CONTEXTS[:rows]
    for all_questions in QUESTIONS:
        questions = all_questions[:rows]
        if needs_question or not answers:
            context = engine.prefill(contexts, reserve=40, questions=questions)
        answers.append(joined(engine.stream(context, questions, max_tokens=TOKENS)))
    if not scored:
        return answers, []
    found = loglikelihoods(engine, contexts, GIVEN[:rows], questions=QUESTIONS[0][:rows])
    return answers, [row.logprobs for row in found]


def check(method, *args, **options):
    (answers, scores), (expected, likely) = (
        results(method, by_layer, *args, **options) for by_layer in (False, True)
    )
    assert answers == expected
    assert all(len(row) == TOKENS for answer in answers for row in answer)
    for found, wanted in zip(scores, likely, strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


also = partial(pytest.param, marks=pytest.mark.slow)
# All tokens stay; full and partial steps; tokens leave after the context.
QUICK = ("full", "refreshkv", "snapkv")


@pytest.mark.parametrize("name", [name if name in QUICK else also(name) for name in APART])
@pytest.mark.quick("full", "refreshkv")
def test_a_loop_over_layers_answers_as_the_host_does(name):
    # Given tokens take programs of their own, which methods of a kind have alike.
    check(small_method(name), scored=name in KINDS)


MESHES = {"full": (1, 2, 1), "snapkv": (1, 1, 2), "quest": (1, 2, 1)}


@pytest.mark.parametrize("name", ["full", *map(also, ("snapkv", "quest"))])
@pytest.mark.slow
def test_on_a_mesh_too(name):
    check(small_method(name), MESHES[name], scored=name == "full")


@pytest.mark.slow
def test_with_a_conditional_that_returns_part_of_the_cache():
    check(RefreshKV(budget=48, qc_stride=2, threshold=0.9))


@pytest.mark.slow
def test_with_layers_that_differ():
    """Runs of one layer and of two."""
    check(Full(), windows=(7, None, None))


@pytest.mark.parametrize(
    ("name", "biases"), [("full", False), also("full", True), also("quest", False)]
)
def test_the_products_of_few_rows_on_a_gpu_answer_alike(monkeypatch, name, biases):
    """`FewRows` with the products that XLA makes; the kernel has tests of its own."""
    used = []

    def products(setup, rows):
        used.append(rows)
        return FewRows(setup.mesh) if rows <= MAX_ROWS else PLAIN

    # Programs are kept by their setup: no other test has this model.
    other = dict(mlp_dim=40, qkv_bias=biases, o_bias=biases, mlp_bias=biases)
    expected = results(small_method(name), True, scored=name == "full", **other)
    monkeypatch.setattr(programs.Setup, "products", products)
    found = results(small_method(name), False, scored=name == "full", **other)
    assert found[0] == expected[0] and min(used) <= MAX_ROWS
    for row, wanted in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(row, wanted, atol=1e-5)


def test_products_of_few_rows_are_for_one_gpu(monkeypatch):
    one, two = (tiny_engine(mesh=make_mesh(1, size, 1)).setup for size in (1, 2))
    assert one.products(1) is PLAIN
    monkeypatch.setattr(programs, "_platform", lambda mesh: "gpu")
    assert isinstance(one.products(MAX_ROWS), FewRows)
    assert one.products(MAX_ROWS + 1) is PLAIN
    assert isinstance(two.products(1), Divided)
