from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.expert_matmul import expert_matmul, gpu, reference
from pallas_kernels.quantised_matrix import quantise_matrix
from tests.drawing import normal

# Blocks of the rows, rows, inputs, outputs, and the matrix of each block; the last is not used.
SHAPES = {
    "one row for all": (1, 1, 256, 192, [3, 0, 4, 1]),
    "a block of rows for all": (1, 5, 256, 128, [1, 2, 0]),
    "blocks of one matrix": (4, 16, 192, 320, [2, 2, 3, 0]),
    "large blocks": (3, 64, 128, 128, [4, 1, 2]),
}
COUNT = 5
defined = jax.jit(reference.expert_matmul)


def check(run, shape, dtype, form):
    blocks, rows, inputs, outputs, experts = shape
    x, w = normal(blocks, rows, inputs, dtype=dtype), normal(COUNT, inputs, outputs, dtype=dtype)
    if form is not None:
        w = quantise_matrix(w, (1,))
    count = len(experts) - 1
    given = x, w, jnp.array(experts, jnp.int32), jnp.int32(count)
    found, expected = (np.asarray(f(*given), np.float32)[:count] for f in (run, defined))
    close = 2 * float(jnp.finfo(dtype).eps) if dtype != jnp.float32 else 1e-5
    np.testing.assert_allclose(found, expected, atol=close * np.abs(expected).max())


@pytest.mark.parametrize("form", [None, "int8"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_any_platform(shape, dtype, form):
    check(jax.jit(expert_matmul), shape, dtype, form)


@pytest.mark.parametrize("form", [None, "int8"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("processors", [1, 3])
@pytest.mark.quick("1-one row for all-None", "3-blocks of one matrix-int8", "3-large blocks-None")
def test_the_kernel_interpreted(monkeypatch, processors, shape, form):
    monkeypatch.setattr(hopper, "processors", lambda: processors)
    interpreted = plgpu.InterpretGPUParams(inline_mgpu="ignore")
    check(jax.jit(partial(gpu.expert_matmul, interpret=interpreted)), shape, jnp.bfloat16, form)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [None, "int8"])
@pytest.mark.parametrize(
    "shape",
    [
        *SHAPES.values(),
        (1, 1, 2880, 2880, [0, 2, 1, 3, 4]),
        (1, 8, 2048, 768, [4, 2, 1, 0]),
        (4, 128, 2048, 1536, [0, 3, 3, 2]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_on_a_gpu(shape, dtype, form):
    check(jax.jit(gpu.expert_matmul), shape, dtype, form)


def test_what_does_not_fit_is_refused():
    x, w, experts = jnp.zeros((2, 1, 8)), jnp.zeros((3, 8, 4)), jnp.zeros(2, jnp.int32)
    with pytest.raises(ValueError, match=r"bfloat16\(2, 1, 8\) does not fit float32\(3, 8, 4\)"):
        expert_matmul(x.astype(jnp.bfloat16), w, experts, jnp.int32(1))
    with pytest.raises(ValueError, match="2 blocks for 1 experts"):
        expert_matmul(x, w, experts[:1], jnp.int32(1))
