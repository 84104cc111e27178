import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.errors import ConfigError
from jax_longctx.models.llama import model_of
from jax_longctx.models.params import init_params
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh
from tests.oracle import causal_attend, forward, to_numpy
from tests.support import random_rows, tiny_config
from tests.train_cpt.tiny_run import tiny_params, tiny_setup
from train_cpt import step
from train_cpt.attention import Pattern, attend_with
from train_cpt.step import OptimizerConfig

LENGTH = 16
TEXTS = np.array(random_rows([LENGTH] * 8, seed=3), np.int32)
PATTERN = Pattern(tail=4, budget=3, kernel=3)
MESHES = [(1, 1, 1), (2, 2, 2)]
OPTIMIZER = OptimizerConfig(steps=20, warmup=2, learning_rate=0.02)


def setup_of(mesh=(1, 1, 1), **changes):
    fields = {"loss_chunk": 6, "pattern": PATTERN, "optimizer": OPTIMIZER, **changes}
    return dataclasses.replace(tiny_setup(mesh), **fields)


@functools.cache
def host_params():
    return jax.device_get(tiny_params())


@functools.cache
def found_gradients(batches=1, **changes):
    """Loss and gradients of all texts as so many micro-batches, as numpy."""
    run = jax.jit(step.gradients, static_argnums=0)
    tokens = TEXTS.reshape(batches, -1, LENGTH)
    return jax.device_get(run(setup_of(**changes), host_params(), tokens))


def test_the_loss_is_that_of_the_next_tokens():
    setup = setup_of(pattern=Pattern())
    params = host_params()
    attend, arrays = causal_attend(1e4), to_numpy(params)
    odds = np.stack([forward(setup.config, arrays, list(row), attend) for row in TEXTS])[:, :-1]
    odds -= np.log(np.exp(odds).sum(-1, keepdims=True))
    losses = -np.take_along_axis(odds, TEXTS[:, 1:, None], 2)[..., 0]
    for last in (LENGTH - 1, 4):
        mean = step.text_losses(setup, params, TEXTS, last)
        np.testing.assert_allclose(mean, losses[:, -last:].mean(), rtol=1e-5)
    sparse = setup_of()
    mean = step.text_losses(sparse, params, TEXTS, LENGTH - 1)
    np.testing.assert_allclose(found_gradients()[0], mean, rtol=1e-6)
    assert abs(mean - losses.mean()) > 1e-4


def test_micro_batches_add_up_and_bfloat16_gradients_are_close_to_exact_ones(monkeypatch):
    same = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-7)
    jax.tree.map(same, found_gradients(batches=2, remat="full"), found_gradients())
    with monkeypatch.context() as on_a_gpu:
        # There the layers are no loop.
        on_a_gpu.setattr(step, "dispatch", types.SimpleNamespace(platform=lambda: "gpu"))
        jax.tree.map(same, found_gradients(remat="dots"), found_gradients())
    loss, found = found_gradients(dtype="bfloat16")
    exact_loss, exact = found_gradients()
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {np.dtype(np.float32)}
    np.testing.assert_allclose(loss, exact_loss, rtol=1e-2)
    ours, theirs = (
        np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)]) for tree in (found, exact)
    )
    assert 0 < np.linalg.norm(ours - theirs) < 0.03 * np.linalg.norm(theirs)


def test_layers_run_again_keep_less():
    def kept(remat):
        config = tiny_config(num_layers=3)
        attend = attend_with(config, make_mesh(), PATTERN)
        params = step.abstract_state(setup_of(config=config)).params

        def residuals(params, tokens):
            def run(params):
                return step.hidden_states(model_of(config, params), tokens, attend, remat)

            return jax.vjp(run, params)[1]

        leaves = jax.tree.leaves(jax.eval_shape(residuals, params, TEXTS))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    whole, matmuls, inputs = kept("none"), kept("dots"), kept("full")
    assert inputs < matmuls < whole


def trained(mesh):
    """Losses of six steps on the same texts, and the state after them."""
    setup = tiny_setup(mesh)
    state = step.init_state(setup, host_params())
    losses = []
    for _ in range(6):
        state, metrics = step.train_step(setup, state, TEXTS.reshape(2, 4, LENGTH))
        losses.append(float(metrics["loss"]))
    return losses, state, metrics


def test_steps_lower_the_loss_and_are_the_same_over_data_tokens_and_tensor():
    (losses, state, metrics), (sharded_losses, sharded, others) = map(trained, MESHES)
    assert losses[-1] < 0.8 * losses[0]
    assert int(state.step) == 6
    np.testing.assert_allclose(metrics["learning_rate"], 0.01 * 7 / 10, rtol=1e-6)
    np.testing.assert_allclose(sharded_losses, losses, rtol=1e-4)
    np.testing.assert_allclose(others["gradient_norm"], metrics["gradient_norm"], rtol=1e-3)
    # What is kept is divided over data and tensor, and still so after a step.
    gate = sharded.params["layers"]["0"]["mlp"]["gate"]
    moments = [leaf for leaf in jax.tree.leaves(sharded.moments) if leaf.shape == gate.shape]
    for leaf in (gate, moments[0]):
        assert leaf.sharding.shard_shape(leaf.shape) == (16, 24)


def test_the_optimizer_is_clipped_adamw():
    config = OptimizerConfig(steps=5, warmup=2, learning_rate=0.1, weight_decay=0.01, clip=1.0)
    optimizer = step.make_optimizer(config)
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(6)
    mean, square = np.zeros(6), np.zeros(6)
    params = jnp.array(weights, jnp.float32)
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for number, rate in enumerate([0.05, 0.1, 0.1, 0.1 * 2 / 3, 0.1 / 3], start=1):
        gradient = rng.standard_normal(6) * (0.1 if number == 3 else 3.0)
        updates, state = update(jnp.array(gradient, jnp.float32), state, params)
        params = params + updates
        gradient = gradient / max(np.linalg.norm(gradient), 1.0)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.999 * square + 0.001 * gradient**2
        turned = mean / (1 - 0.9**number) / (np.sqrt(square / (1 - 0.999**number)) + 1e-8)
        found = step.learning_rate(config, jnp.int32(number - 1))
        np.testing.assert_allclose(found, rate, rtol=1e-6)
        weights = weights - rate * (turned + 0.01 * weights)
        np.testing.assert_allclose(params, weights, atol=1e-5)


def test_the_defaults_are_the_papers_and_weights_in_8_bits_are_refused():
    config = OptimizerConfig(steps=100)
    assert (config.learning_rate, config.warmup, config.weight_decay) == (5e-6, 20, 0.0)
    halved = step.make_optimizer(OptimizerConfig(steps=100, first_moment="bfloat16"))
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(halved.init(jnp.ones(3))) if leaf.shape]
    assert dtypes == [jnp.bfloat16, jnp.float32]
    setup = setup_of()
    params = init_params(setup.config, RunSpec(mesh=setup.mesh, weights="int8"))
    with pytest.raises(ConfigError, match="weights as floats, got int8; load them without"):
        step.init_state(setup, params)


@pytest.mark.parametrize(
    ("make", "fields", "message"),
    [
        (OptimizerConfig, {"steps": 0}, "expected steps at least 1, got 0"),
        (OptimizerConfig, {"warmup": 11}, "expected warmup from 0 to steps=10, got 11"),
        (OptimizerConfig, {"learning_rate": float("nan")}, "learning_rate above 0, got nan"),
        (OptimizerConfig, {"beta2": 1.0}, "expected beta2 from 0 to below 1"),
        (OptimizerConfig, {"clip": -1.0}, "expected clip at least 0"),
        (OptimizerConfig, {"first_moment": "int8"}, "expected first_moment float32 or bfloat16"),
        (setup_of, {"dtype": "float16"}, "dtype must be float32 or bfloat16"),
        (setup_of, {"remat": "some"}, "remat must be of none, dots, full"),
        (setup_of, {"loss_chunk": 0}, "loss_chunk must be at least 1"),
        (Pattern, {"tail": -1}, "tail must be at least 0, got -1"),
        (Pattern, {"budget": 0}, "budget must be at least 1, got 0"),
        (Pattern, {"kernel": 4}, "kernel must be odd"),
    ],
)
def test_bad_settings_are_refused(make, fields, message, unchecked_signatures):
    valid = {"steps": 10, "warmup": 2} if make is OptimizerConfig else {}
    with pytest.raises(ConfigError, match=message):
        make(**valid | fields)


def plain_cross_entropy(hidden, table, targets, weights):
    logits = jnp.einsum("btd,vd->btv", hidden, table)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=2)
    return -jnp.sum(weights * picked[..., 0])


def inputs():
    words, rng = 38, np.random.default_rng(0)
    # Large logits: a softmax that does not subtract the maximum overflows.
    hidden, table = 30 * rng.standard_normal((2, 6, 8)), rng.standard_normal((words, 8))
    targets, weights = rng.integers(0, words, (2, 6)), rng.integers(0, 3, (2, 6))
    return *map(jnp.float32, (hidden, table)), jnp.int32(targets), jnp.float32(weights)


@pytest.mark.parametrize(("mesh", "chunk"), [(MESHES[0], 5), (MESHES[1], 512)])
def test_chunked_cross_entropy_is_the_plain_one(mesh, chunk):
    ours = functools.partial(step.cross_entropy, mesh=make_mesh(*mesh), chunk=chunk)

    def run(loss):
        both = jax.value_and_grad(lambda *arrays: 0.5 * loss(*arrays), argnums=(0, 1))
        return jax.jit(both)(*inputs())

    (found, gradients), (expected, plain) = run(ours), run(plain_cross_entropy)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(gradients[0], plain[0], atol=1e-5)
    np.testing.assert_allclose(gradients[1], plain[1], atol=1e-4)
    # Without a gradient it is another program.
    np.testing.assert_allclose(0.5 * jax.jit(ours)(*inputs()), expected, rtol=1e-6)


@pytest.mark.optimized
def test_logits_of_a_large_vocabulary_are_never_whole():
    tokens, words, width = 4096, 131072, 16
    loss = functools.partial(step.cross_entropy, mesh=make_mesh(), chunk=64)
    shapes = [(1, tokens, width), (words, width), (1, tokens), (1, tokens)]
    dtypes = [jnp.bfloat16, jnp.float32, jnp.int32, jnp.float32]
    arrays = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * words * 4 / 8
