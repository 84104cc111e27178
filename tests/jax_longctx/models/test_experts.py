import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.errors import ConfigError
from jax_longctx.methods import METHODS, Full, make_method
from jax_longctx.models import experts
from jax_longctx.models.mixture import Mixture
from jax_longctx.models.params import init_params
from jax_longctx.planning.work import matmul_weights, step_weight_bytes, weight_bytes
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh
from pallas_kernels.quantised_matrix import quantise_matrix
from tests.drawing import normal
from tests.small_methods import EVERYTHING, KINDS
from tests.support import engine_over, joined, random_rows, score, tiny_config, tiny_engine
from train_cpt.attention import Pattern, check_attention

COUNT, CHOSEN, D, F = 6, 2, 16, 24
MIXTURE = Mixture(count=COUNT, chosen=CHOSEN)
CLAMPED = dataclasses.replace(MIXTURE, alpha=1.702, limit=0.5)
CONFIG = tiny_config(
    family="qwen3_moe", qk_norm=True, experts=Mixture(count=5, chosen=2, normed=False)
)
GPT_OSS = tiny_config(
    family="gpt_oss",
    experts=dataclasses.replace(CLAMPED, limit=7.0),
    windows=(7, None),
    **dict.fromkeys(("sinks", "qkv_bias", "o_bias", "mlp_bias"), True),
)
ROWS, QUESTIONS = random_rows([50, 21]), random_rows([3, 4], seed=1)


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def weights(joined_up=False, biased=False):
    found = {"down": normal(COUNT, F, D, seed=3)}
    if joined_up:
        found["gate_up"] = normal(COUNT, 2, D, F, seed=1)
    else:
        found |= {name: normal(COUNT, D, F, seed=i) for i, name in enumerate(("gate", "up"))}
    if biased:
        found |= {f"{n}_bias": normal(COUNT, F, seed=4 + i) for i, n in enumerate(("gate", "up"))}
    return found


def expected(x, share, chosen, params, clamped):
    """Row by row and expert by expert, from the formulas, in float64."""
    wide = {name: np.asarray(w, np.float64) for name, w in params.items()}
    if "gate_up" in wide:
        wide |= {"gate": wide["gate_up"][:, 0], "up": wide["gate_up"][:, 1]}
    out = np.zeros(x.shape)
    for row, (h, its) in enumerate(zip(np.asarray(x, np.float64), np.asarray(chosen), strict=True)):
        for weight, expert in zip(np.asarray(share)[row], its, strict=True):
            gate, up = h @ wide["gate"][expert], h @ wide["up"][expert]
            if "gate_bias" in wide:
                gate, up = gate + wide["gate_bias"][expert], up + wide["up_bias"][expert]
            slope = 1.0
            if clamped:
                gate, up, slope = np.minimum(gate, 0.5), np.clip(up, -0.5, 0.5) + 1, 1.702
            inner = gate / (1 + np.exp(-slope * gate)) * up
            out[row] += weight * (inner @ wide["down"][expert])
    return out


@pytest.mark.parametrize(
    ("rows", "joined_up", "biased", "clamped"),
    [
        *((1, True, False, False), (5, False, True, True), (16, True, True, False)),
        # More rows than are multiplied with every expert, and blocks of two sizes.
        *((17, False, False, False), (90, True, True, True), (300, True, False, False)),
    ],
)
def test_the_sum_of_a_rows_experts_is_that_of_the_formulas(rows, joined_up, biased, clamped):
    x, params = normal(rows, D, seed=7), weights(joined_up, biased)
    # Expert 0 is chosen by no row, and by one that is chosen often.
    logits = normal(rows, COUNT, seed=8).at[:, 0].set(-9.0).at[::3, 2].set(5.0)
    share, chosen = experts.choose(MIXTURE, logits)
    gated = (lambda gate, up: experts.clamped_swiglu(CLAMPED, gate, up)) if clamped else swiglu
    # Weights of an expert that no row chose are not touched.
    params = {name: w.at[0].set(jnp.nan) for name, w in params.items()}
    found = jax.jit(lambda *given: experts.through_experts(gated, *given))(x, share, chosen, params)
    np.testing.assert_allclose(found, expected(x, share, chosen, params, clamped), atol=1e-4)


def test_the_choice_is_the_first_of_equals_and_its_weights_are_a_softmax():
    logits = jnp.array([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    whole = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    for normed in (True, False):
        mixture = Mixture(count=4, chosen=2, normed=normed)
        share, chosen = experts.choose(mixture, logits)
        np.testing.assert_array_equal(chosen, [[1, 2], [0, 1]])
        best = np.take_along_axis(whole, np.asarray(chosen), -1)
        np.testing.assert_allclose(share, best / (best.sum(-1, keepdims=True) if normed else 1))
        dense = experts.shares(mixture, share, chosen)
        np.testing.assert_allclose(np.take_along_axis(np.asarray(dense), chosen, -1), share)
        assert float(dense.sum()) == pytest.approx(float(share.sum()))


@pytest.mark.parametrize("rows", [3, 40])
def test_experts_in_8_bits_are_the_numbers_that_are_stored(rows):
    x, params = normal(rows, D, seed=7), weights(joined_up=True)
    kept = {name: quantise_matrix(w, (w.ndim - 2,)) for name, w in params.items()}
    floats = {name: w.values * w.scales for name, w in kept.items()}
    choice = experts.choose(MIXTURE, normal(rows, COUNT, seed=8))
    run = jax.jit(lambda params: experts.through_experts(swiglu, x, *choice, params))
    np.testing.assert_allclose(run(kept), run(floats), rtol=1e-4, atol=1e-4)


def answers(engine):
    asked = QUESTIONS if engine.method.info.needs_question else None
    context = engine.prefill(ROWS, questions=asked, reserve=16)
    return joined(engine.stream(context, QUESTIONS, max_tokens=6))


@pytest.fixture(scope="module")
def alone():
    """Answers of one device, layer by layer."""
    return answers(tiny_engine(config=CONFIG, chunk=16, by_layer=True))


def test_rows_are_as_each_alone(alone):
    engine = tiny_engine(config=CONFIG, chunk=16)
    singles = []
    for row, question in zip(ROWS, QUESTIONS, strict=True):
        context = engine.prefill([row], reserve=16)
        singles += joined(engine.stream(context, [question], max_tokens=6))
    assert singles == alone
    whole, chunked = score(tiny_engine(config=CONFIG, chunk=64), ROWS), score(engine, ROWS)
    for one, other in zip(whole, chunked, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, "int8"])
def test_a_mesh_answers_as_one_device(form, alone):
    """Ring Attention gathers the weights, as its tokens are spread over the mesh."""
    found = []
    for sizes, method in (
        *(((1, 1, 1), Full()), ((2, 1, 2), Full()), ((1, 2, 2), Full())),
        ((1, 2, 1), make_method("ring")),
    ):
        mesh = make_mesh(*sizes)
        for by_layer in (True, False):
            params = init_params(CONFIG, RunSpec(mesh=mesh, weights=form))
            engine = engine_over(CONFIG, params, method, mesh, chunk=16, by_layer=by_layer)
            found.append(answers(engine))
            assert found[-1] == (alone if form is None else found[0]), (sizes, method, by_layer)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_methods_with_room_for_all_tokens_answer_as_full_attention(name, alone):
    method = make_method(name, EVERYTHING[name])
    assert answers(tiny_engine(method, config=CONFIG, chunk=16)) == alone


@functools.cache
def of_gpt_oss(name):
    method = make_method(name, EVERYTHING[name])
    return answers(tiny_engine(method, config=GPT_OSS, chunk=16))


# Ring and Star Attention refuse its windows.
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*METHODS} - {"full", "ring", "star"}))
def test_every_method_answers_as_full_attention_on_a_gpt_oss(name):
    assert of_gpt_oss(name) == of_gpt_oss("full")


def test_plan_counts_the_experts_that_a_token_meets():
    setup = tiny_engine(config=CONFIG).setup
    layers, expert = CONFIG.num_layers, 3 * CONFIG.model_dim * CONFIG.mlp_dim
    for rows, share in ((1, 0.4), (2, 0.64)):
        read = step_weight_bytes(setup, rows) - step_weight_bytes(setup, 10**6)
        assert read == -round((1 - share) * 5 * layers * expert * 4)
    # But for one table, of which a step reads a row.
    table = CONFIG.vocab_size * CONFIG.model_dim * 4
    assert step_weight_bytes(setup, 10**6) == weight_bytes(setup) - table
    dense = dataclasses.replace(CONFIG, family="qwen3", experts=None)
    routers = layers * 5 * CONFIG.model_dim
    assert matmul_weights(CONFIG)[0] == matmul_weights(dense)[0] + layers * expert + routers


def test_training_refuses_them():
    with pytest.raises(ConfigError, match=r"training does not take models with experts.*qwen3_moe"):
        check_attention(CONFIG, make_mesh(), Pattern(), 32)
