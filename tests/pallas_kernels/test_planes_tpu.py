"""TPU kernels read a layer's part of a stack where it lies, with the bits of the part alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention_mass.reference import Reduction
from pallas_kernels.attention_mass.tpu import attention_mass
from pallas_kernels.decode_attention.tpu import decode_attention
from pallas_kernels.plane import Plane
from pallas_kernels.sparse_decode_attention.tpu import sparse_decode_attention
from pallas_kernels.topk_scores.tpu import topk_scores

BATCH, KV_HEADS, GROUPS, SLOTS = 2, 2, 2, 256
LENGTHS = jnp.array([200, 256], jnp.int32)
NONE = jnp.zeros(BATCH, jnp.int32)


def _decode(q: jax.Array, k: Any, v: Any, **options: Any) -> Any:
    return decode_attention(q, k, v, LENGTHS, scale=0.3, block=128, **options)


def _topk(q: jax.Array, k: Any, v: Any, **options: Any) -> Any:
    tolerance = jnp.zeros(q.shape[:3])
    return topk_scores(q, k, NONE, LENGTHS, tolerance, count=4, **options)


def _mass(q: jax.Array, k: Any, v: Any, **options: Any) -> Any:
    how = Reduction(valid=NONE + 1, scale=0.3)
    return attention_mass(q, k, jnp.zeros(q.shape[:3]), LENGTHS, how, **options)


def _sparse(q: jax.Array, k: Any, v: Any, **options: Any) -> Any:
    pages = jnp.array([[0, 5, 11, -1], [15, 2, 3, 9]], jnp.int32)
    pages = jnp.broadcast_to(pages[:, None], (BATCH, KV_HEADS, 4))
    return sparse_decode_attention(
        q, k, v, pages, NONE, LENGTHS, page_size=16, scale=0.3, **options
    )


@pytest.mark.parametrize(
    ("kernel", "head_dim"),
    [
        pytest.param(_decode, 128, marks=pytest.mark.slow, id="decode"),
        pytest.param(_decode, 64, id="decode-narrow-heads"),
        pytest.param(_topk, 128, id="topk"),
        pytest.param(_mass, 128, id="mass"),
        pytest.param(_sparse, 128, id="sparse"),
    ],
)
@pytest.mark.quick("topk")
def test_a_plane_is_read_as_its_part(kernel: Callable[..., Any], head_dim: int) -> None:
    rng = np.random.default_rng(3)
    q = jnp.asarray(rng.normal(size=(BATCH, 1, KV_HEADS * GROUPS, head_dim)), jnp.float32)
    stacks = np.full((2, 3, BATCH, KV_HEADS, SLOTS, head_dim), np.nan, np.float32)
    stacks[:, 1] = rng.normal(size=stacks[:, 1].shape)
    run = jax.jit(partial(kernel, interpret=pltpu.InterpretParams()))
    k, v = (Plane(jnp.asarray(stack), jnp.int32(1)) for stack in stacks)
    found, expected = run(q, k, v), run(q, k.read(), v.read())
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.isfinite(theirs).all()
        np.testing.assert_array_equal(ours, theirs)
