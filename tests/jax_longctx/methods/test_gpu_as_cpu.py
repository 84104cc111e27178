"""Every method on a GPU finds an answer as likely as on the CPU, token by token.

What runs on a CPU is held against numpy elsewhere; this tells whether a GPU computes the same, with
its kernels in bfloat16 and without them in float32.
"""

import jax
import numpy as np
import pytest

from jax_longctx.engine.scoring import loglikelihoods
from jax_longctx.models.params import init_params
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh
from tests.small_methods import SMALL, small_method
from tests.support import engine_over, random_rows, tiny_config

# Of head dim 64, with groups of 3: what the kernels take and what no power of two is.
SHAPE = {"model_dim": 96, "num_heads": 6, "num_kv_heads": 2, "head_dim": 64}
CONTEXTS, ANSWERS = random_rows([230, 200, 141]), random_rows([40, 40, 40], seed=1)


def engine_on(device, name, dtype):
    mesh = make_mesh(devices=[device])
    config = tiny_config(**SHAPE)
    # Some keys then draw more attention than others, as in trained models.
    params = jax.tree.map(lambda x: 1.5 * x, init_params(config, RunSpec(mesh=mesh, dtype=dtype)))
    return engine_over(config, params, small_method(name), mesh, chunk=64)


def likelihoods(name, dtype, device):
    engine = engine_on(device, name, dtype)
    return np.array([found.logprobs for found in loglikelihoods(engine, CONTEXTS, ANSWERS)])


def away(a, b):
    return float(np.median(np.abs(a - b)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_an_answer_is_as_likely_as_on_the_cpu(name):
    gpu, cpu = jax.devices("cuda")[0], jax.devices("cpu")[0]
    exact = likelihoods(name, "float32", cpu)
    assert away(likelihoods(name, "float32", gpu), exact) < 1e-3
    # Rounding may change what a method chooses: as much as it does on the CPU, and some.
    rounded = away(likelihoods(name, "bfloat16", cpu), exact)
    assert away(likelihoods(name, "bfloat16", gpu), exact) < 3 * rounded + 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_a_context_is_asked_again(name):
    """It returns to where it ended: to numbers that the end of the context has set aside."""
    engine = engine_on(jax.devices("cuda")[0], name, "float32")
    questions = random_rows([4, 7, 5], seed=2)
    context = engine.prefill(CONTEXTS, reserve=32, questions=questions)
    first, second = (list(engine.stream(context, questions, max_tokens=12)) for _ in range(2))
    assert first == second
