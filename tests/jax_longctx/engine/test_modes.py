"""The two modes of an engine give the same answers.

The host calls a layer's program for each layer, or a program loops over the layers on the device
(`Setup.by_layer`). The loop reads joined weights, so its sums may differ in their last bits.
"""

from unittest.mock import create_autospec

import numpy as np
import pytest

from jax_longctx.engine import Sampling, setup
from jax_longctx.engine.products import Divided, FewRows
from jax_longctx.engine.scoring import loglikelihoods
from jax_longctx.engine.setup import Setup
from jax_longctx.methods import Full, RefreshKV
from jax_longctx.models.llama import Products
from jax_longctx.sharding import make_mesh
from pallas_kernels.row_matmul import MAX_ROWS
from tests.small_methods import KINDS, small_method
from tests.support import joined, random_rows, tiny_config, tiny_engine

# Chunks of 16 tokens: the context takes several, the rows end in different ones.
CONTEXTS = random_rows([64, 37])
QUESTIONS = random_rows([5, 2], seed=1), random_rows([3, 5], seed=2)
# Answers of more than one block of decode steps, and given tokens.
TOKENS = 9
GIVEN = random_rows([7, 4], seed=3)
LAYERS = 3


def results(method, by_layer, sizes=(1, 1, 1), scored=True, sampling=None, **changes):
    """The tokens of each question's answer, and each row's log-probabilities of given tokens.

    Where tokens are drawn, the first question is asked again, up to one of its answer's tokens.
    """
    config, mesh = tiny_config(num_layers=LAYERS, **changes), make_mesh(*sizes)
    engine = tiny_engine(method, config=config, mesh=mesh, chunk=16, by_layer=by_layer)
    options = {"max_tokens": TOKENS, "sampling": sampling or Sampling()}
    answers = []
    for questions in QUESTIONS:
        if method.info.needs_question or not answers:
            context = engine.prefill(CONTEXTS, reserve=40, questions=questions)
        answers.append(joined(engine.stream(context, questions, **options)))
    assert all(len(row) == TOKENS for answer in answers for row in answer)
    if sampling:
        stop = answers[0][0][3]
        ended = joined(engine.stream(context, QUESTIONS[0], stop_ids=[stop], **options))
        assert ended[0] == answers[0][0][: answers[0][0].index(stop) + 1]
        answers.append(ended)
    if not scored:
        return answers, []
    found = loglikelihoods(engine, CONTEXTS, GIVEN, questions=QUESTIONS[0])
    return answers, [row.logprobs for row in found]


def check_equal(found, expected):
    assert found[0] == expected[0]
    for row, wanted in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(row, wanted, atol=1e-5)


def check(method, **options):
    check_equal(*(results(method, by_layer, **options) for by_layer in (False, True)))


# Priors; pages of a cache.
@pytest.mark.parametrize("name", [*KINDS, "resa"])
@pytest.mark.quick("full", "refreshkv")
def test_a_loop_over_layers_answers_as_the_host_does(name):
    # Given tokens take programs of their own: tokens that stay, and that leave after the context.
    check(small_method(name), scored=name in ("full", "snapkv"))


DRAWN = Sampling(temperature=0.8, repetition_penalty=1.3, seed=5)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (Full(), {"sizes": (2, 2, 2), "sampling": DRAWN}),
        (small_method("snapkv"), {"sizes": (1, 1, 2), "scored": False}),
        (small_method("quest"), {"sizes": (1, 2, 1), "scored": False}),
        # A conditional that returns part of the cache.
        (RefreshKV(budget=48, qc_stride=2, threshold=0.9), {}),
        # Layers that differ: runs of one and of two.
        (Full(), {"windows": (7, None, None)}),
    ],
    ids=["mesh-full", "mesh-snapkv", "mesh-quest", "conditional", "windows"],
)
@pytest.mark.slow
def test_on_a_mesh_and_with_other_layers_too(method, options):
    check(method, **options)


@pytest.mark.parametrize(
    ("sizes", "biases"),
    [
        ((1, 1, 1), False),
        ((2, 1, 2), True),
        pytest.param((1, 1, 1), True, marks=pytest.mark.slow),
        pytest.param((1, 2, 2), False, marks=pytest.mark.slow),
        pytest.param((1, 4, 1), True, marks=pytest.mark.slow),
    ],
)
def test_the_products_of_few_rows_on_gpus_answer_alike(monkeypatch, sizes, biases):
    """`FewRows` with the products that XLA makes; the kernel has tests of its own."""
    used = []

    def products(setup, rows, peers):
        used.append(rows)
        return (FewRows if rows <= MAX_ROWS else Products)(setup.mesh)

    # Programs are kept by their setup: no other test has this model.
    other = dict(mlp_dim=40, qkv_bias=biases, o_bias=biases, mlp_bias=biases)
    expected = results(Full(), True, scored=biases, **other)
    monkeypatch.setattr(Setup, "products", products)
    check_equal(results(Full(), False, sizes, scored=biases, **other), expected)
    assert min(used) <= MAX_ROWS


def test_products_of_few_rows_are_for_gpus(monkeypatch):
    one, two = (tiny_engine(mesh=make_mesh(1, size, 1)).setup for size in (1, 2))
    assert one.products(1, {}) == Products(one.mesh)
    assert isinstance(two.products(1, {}), Divided)
    monkeypatch.setattr("jax_longctx.engine.setup._platform", lambda mesh: "gpu")
    assert isinstance(one.products(MAX_ROWS, {}), FewRows)
    assert one.products(MAX_ROWS + 1, {}) == Products(one.mesh)
    assert isinstance(two.products(MAX_ROWS, {}), FewRows)
    rows = tiny_engine(mesh=make_mesh(2, 1, 1)).setup
    assert isinstance(rows.products(2 * MAX_ROWS, {}), FewRows)


def test_peers_meet_in_one_order_in_every_process(monkeypatch):
    """Else a program that one process has stored would be another's in the next."""
    monkeypatch.setattr("jax_longctx.engine.setup._platform", lambda mesh: "gpu")
    met = create_autospec(setup.meet, return_value={})
    monkeypatch.setattr(setup, "meet", met)
    for sizes, axes in [((1, 2, 2), [("seq",), ("tensor", "seq")]), ((2, 1, 2), [("tensor",)])]:
        tiny_engine(mesh=make_mesh(*sizes)).setup.peers(1)
        assert met.call_args.args[1] == axes
    met.reset_mock()
    assert not tiny_engine(mesh=make_mesh(2, 1, 2)).setup.peers(2 * MAX_ROWS + 1) and not met.called
