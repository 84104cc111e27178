import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.contract import context
from jax_longctx.engine.scoring import loglikelihoods
from jax_longctx.methods import METHODS, make_method
from tests.small_methods import SMALL, small_method
from tests.support import random_rows, tiny_config, tiny_engine

FAR = 10**9
# Of the small settings; all other methods' positions grow with the text.
BOUNDED = {
    "dynamic-ntk": 128,
    "streaming-llm": 64,
    "citrus": 64,
    "citrus-individual": 64,
    "citrus-standard": 64,
    "h2o-shared": 64,
    "reattention": 68,
    "free-pages": 60,
    "infllm": 32,
}
OTHER_SETTINGS = [
    ("streaming-llm", {"positions": "true"}, FAR),
    ("h2o", {"positions": "shifted"}, 64),
    ("tova", {"positions": "shifted"}, 64),
    ("roco", {"positions": "shifted"}, 64),
    ("reattention", {"count": 0}, 36),
    ("free-pages", {"lam": 0.0, "budget": 12}, 48),
    ("infllm", {"decode": "dense"}, FAR),
]


@pytest.mark.parametrize("name", METHODS)
def test_every_method_says_how_far_its_positions_go(name):
    for tokens in (1, 20, FAR):
        expected = min(tokens, BOUNDED.get(name, FAR))
        assert small_method(name).reach(tiny_config(), tokens) == expected


@pytest.mark.parametrize(("name", "settings", "expected"), OTHER_SETTINGS, ids=str)
def test_settings_change_how_far_positions_go(name, settings, expected):
    method = make_method(name, {**SMALL[name], **settings})
    assert method.reach(tiny_config(), FAR) == expected


def scores(method, limits, monkeypatch):
    """Log-probabilities of an answer for each limit; angles of positions from there on are others.

    One program has them all: it asks for the limit where it runs.
    """
    contexts, questions = random_rows([200, 90]), random_rows([2, 3], seed=1)
    angles, asked = context.rope_angles, []

    def other(config, head_dim, positions, total):
        limit = jax.pure_callback(lambda: np.int32(asked[-1]), jax.ShapeDtypeStruct((), jnp.int32))
        moved = jnp.where(positions >= limit, 7 * positions + 1, positions)
        return angles(config, head_dim, moved, total)

    # The longest position is part of what a program is compiled for, and of no number in it.
    config = tiny_config(num_layers=1, max_position=1001)
    engine = tiny_engine(method, config=config, chunk=16, by_layer=True)
    answers, found = random_rows([8, 8], seed=2), []
    with monkeypatch.context() as patch:
        patch.setattr(context, "rope_angles", other)
        for limit in limits:
            asked.append(limit)
            logs = loglikelihoods(engine, contexts, answers, questions=questions)
            found.append(np.concatenate([one.logprobs for one in logs]))
    return found


MARKS = {
    "streaming-llm": (),
    "reattention": pytest.mark.slow,
    "infllm": pytest.mark.slow,
    "citrus": pytest.mark.slow,
    "h2o-shared": pytest.mark.thorough,
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS[name]) for name in MARKS])
@pytest.mark.slow
def test_no_position_beyond_it_is_used(name, monkeypatch):
    """Other angles from there on change nothing, though the text is three times as long."""
    method = small_method(name)
    # InfLLM's distances are bounded; a chunk's positions lie as far again behind the window.
    limit = method.reach(tiny_config(), FAR) + (16 if name == "infllm" else 0)
    whole, same, others = scores(method, (FAR, limit, limit // 2), monkeypatch)
    np.testing.assert_array_equal(same, whole)
    assert np.abs(others - whole).max() > 1e-4
