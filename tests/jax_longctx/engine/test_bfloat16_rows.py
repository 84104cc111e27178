"""In bfloat16 a row's log-probabilities amid others are those of the row alone, to a tolerance.

The guide of the server states the tolerance. Sums of a matmul round otherwise with another number
of rows. The model is wide enough for that: its logits spread over some nats.
"""

import dataclasses
from typing import Any

import numpy as np
import pytest

from jax_longctx.engine import Sampling
from jax_longctx.engine.running import Ask, RunningBatch
from jax_longctx.models.params import init_params
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.engine.test_running import run
from tests.small_methods import small_method
from tests.support import engine_over, random_rows, tiny_config

# Nats, and the share of positions that keep to it where decode steps choose what they read: a
# choice between keys that score nearly alike can differ.
TOLERANCE, SHARE = 0.1, 0.95
CHOOSING = ("quest", "arkvale", "refreshkv", "infllm")
CONTEXTS = random_rows([164, 137, 190, 150], vocab=512)
QUESTIONS = random_rows([5, 2, 7, 1, 4], vocab=512, seed=1)
ANSWER, RESERVE = 16, 40
CONFIG = tiny_config(
    **{"model_dim": 256, "mlp_dim": 640, "num_heads": 8, "head_dim": 32},
    **{"vocab_size": 512, "max_position": 1024},
)


def answers(name, *, shared, config=CONFIG, share_alone=True):
    """Of each row its request, and what it chose alone and amid the others."""
    mesh = make_mesh()
    params = init_params(config, RunSpec(mesh=mesh, dtype="bfloat16"), seed=0)
    engine = engine_over(config, params, small_method(name), mesh, chunk=64)
    capacity = engine.slots_for(190 + 128)
    requests = [
        Ask(
            question,
            Sampling(temperature=0.8 * (number % 2), seed=number),
            max_tokens=ANSWER,
            logprobs=20,
        )
        for number, question in enumerate(QUESTIONS)
    ]
    held = [
        engine.prefill([text], reserve=RESERVE, capacity=capacity)
        for text in (CONTEXTS[:1] if shared else CONTEXTS)
    ]
    queue = [(held[number % len(held)], request) for number, request in enumerate(requests)]
    own: dict[str, Any] = {"slots": capacity, "reserve": RESERVE}
    places = own | ({"context": held[0]} if shared else {})
    # A single row too as a server runs it.
    one = RunningBatch(engine, places=1, **(places if share_alone else own))
    alone = [run(one, [each])[0][0] for each in queue]
    amid, _ = run(RunningBatch(engine, places=len(queue), **places), queue)
    return zip(requests, alone, amid, strict=True)


def differences(request, alone, amid, *, alike=True):
    """The largest difference at each position, as far as both rows chose the same tokens.

    With `alike` greedy rows part only at tokens that are as likely as each other.
    """
    found = []
    for one, other in zip(alone, amid, strict=True):
        first, second = dict(one.best), dict(other.best)
        both = first.keys() & second.keys()
        assert len(both) >= 10
        found.append(max(abs(first[token] - second[token]) for token in both))
        if one.token != other.token:
            if alike and request.sampling.temperature == 0:
                # As likely as each other, to the tolerance of both.
                assert abs(first[one.token] - first[other.token]) <= 2 * TOLERANCE
            break
    return found


@pytest.mark.parametrize(
    ("name", "shared"), [("full", False), ("quest", True), ("refreshkv", False), ("infllm", False)]
)
@pytest.mark.slow
def test_log_probabilities_amid_others_are_those_alone(name, shared):
    found = [differences(*each) for each in answers(name, shared=shared)]
    told = np.concatenate(found)
    # Most tokens are compared, so few rows part early.
    assert len(told) >= len(found) * ANSWER * 0.7
    # The rounding shows, so that the comparison is one.
    assert told.max() > 0
    within = np.mean(told <= TOLERANCE)
    assert within >= (SHARE if name in CHOOSING else 1.0), (within, told.max())


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["full", "quest", "arkvale"])
def test_shared_rows_on_a_gpu_are_mostly_those_alone(name):
    """With heads that the kernels take; a row alone has a cache of its own, and other kernels.

    A page that scores nearly as another may be chosen in its place, so the median counts.
    """
    config = dataclasses.replace(CONFIG, head_dim=64)
    rows = list(answers(name, shared=True, config=config, share_alone=False))
    told = np.concatenate([differences(*each, alike=False) for each in rows])
    assert len(told) >= 3 * len(rows)
    assert np.median(told) <= TOLERANCE
