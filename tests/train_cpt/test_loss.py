"""Chunked cross-entropy against the plain one, and what it holds in memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.sharding import make_mesh
from train_cpt.step import cross_entropy

BATCH, LENGTH, WIDTH, WORDS = 2, 6, 8, 38


def plain(hidden, table, targets, weights):
    logits = jnp.einsum("btd,vd->btv", hidden, table)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=2)
    return -jnp.sum(weights * picked[..., 0])


@functools.cache
def inputs():
    rng = np.random.default_rng(0)
    # Large logits: a softmax that does not subtract the maximum overflows.
    hidden = 30 * rng.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
    table = rng.standard_normal((WORDS, WIDTH)).astype(np.float32)
    targets = rng.integers(0, WORDS, (BATCH, LENGTH)).astype(np.int32)
    weights = rng.integers(0, 3, (BATCH, LENGTH)).astype(np.float32)
    return hidden, table, targets, weights


@pytest.mark.parametrize(("mesh", "chunk"), [((1, 1, 1), 5), ((2, 2, 2), 512)])
def test_it_is_plain_cross_entropy(mesh, chunk):
    ours = functools.partial(cross_entropy, mesh=make_mesh(*mesh), chunk=chunk)

    def scaled(loss, *arrays):
        return 0.5 * loss(*arrays)

    def run(loss):
        both = jax.value_and_grad(functools.partial(scaled, loss), argnums=(0, 1))
        return jax.jit(both)(*inputs())

    (found, (dhidden, dtable)), (expected, (dhidden_plain, dtable_plain)) = run(ours), run(plain)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(dhidden, dhidden_plain, atol=1e-5)
    np.testing.assert_allclose(dtable, dtable_plain, atol=1e-4)
    # Without a gradient it is another program.
    np.testing.assert_allclose(0.5 * jax.jit(ours)(*inputs()), expected, rtol=1e-6)


@pytest.mark.optimized
def test_logits_of_a_large_vocabulary_are_never_whole():
    tokens, words, width = 4096, 131072, 16
    loss = functools.partial(cross_entropy, mesh=make_mesh(), chunk=64)
    shapes = [(1, tokens, width), (words, width), (1, tokens), (1, tokens)]
    dtypes = [jnp.bfloat16, jnp.float32, jnp.int32, jnp.float32]
    arrays = [jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)]
    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(*arrays).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < tokens * words * 4 / 8
