from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper
from pallas_kernels.quantised_matrix import quantise_matrix
from pallas_kernels.row_matmul import MAX_ROWS, gpu, reference, row_matmul, xla
from tests.drawing import normal

# Rows, inputs, outputs; the kernel's tiles hold 64 or 128 outputs.
SHAPES = {
    "one row": (1, 512, 192),
    "an odd number of rows": (3, 256, 320),
    "as many rows as fit": (MAX_ROWS, 256, 128),
    "many outputs": (1, 256, 1024),
    "inputs in tiles of 192": (2, 960, 192),
}
# Layouts of registers, which the conversion of 8 bits asks for, have no meaning there.
INTERPRETED = plgpu.InterpretGPUParams(inline_mgpu="ignore")
FORMS = [None, "int8"]


# Compiled once for all cases of a shape.
quantised = jax.jit(quantise_matrix, static_argnums=1)
defined = jax.jit(reference.row_matmul, static_argnames="dtype")


def arrays(shape, dtype):
    rows, inputs, outputs = shape
    return normal(rows, inputs, dtype=dtype), normal(inputs, outputs, seed=1, dtype=dtype)


def check(run, shape, dtype, form=None):
    x, w = arrays(shape, dtype)
    if form is not None:
        # Outputs of very different sizes, and one of zeros.
        w = np.asarray(w) * np.linspace(0, 20, w.shape[1]).astype(w.dtype)
        w = quantised(w, (0,))
    for result in (dtype, jnp.float32):
        found, expected = run(x, w, dtype=result), defined(x, w, dtype=result)
        assert found.dtype == result
        close = 2 * float(jnp.finfo(result).eps) if result != jnp.float32 else 1e-5
        found, expected = (np.asarray(y, np.float32) for y in (found, expected))
        np.testing.assert_allclose(found, expected, atol=close * np.max(np.abs(expected)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_any_platform(shape, dtype, form):
    check(jax.jit(row_matmul, static_argnames="dtype"), shape, dtype, form)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", ["one row", "an odd number of rows"])
def test_the_form_of_xla_on_a_gpu(monkeypatch, shape, form):
    monkeypatch.setattr(xla, "platform", lambda: "gpu")
    check(jax.jit(xla.row_matmul, static_argnames="dtype"), SHAPES[shape], jnp.bfloat16, form)


# The fewer processors, the more blocks of outputs a worker has tiles of.
@pytest.mark.parametrize(
    ("shape", "processors", "form"),
    [
        *((shape, n, None) for shape in SHAPES for n in (1, 2, 132)),
        *((shape, 2, "int8") for shape in SHAPES),
        ("as many rows as fit", 132, "int8"),
        ("many outputs", 132, "int8"),
    ],
)
@pytest.mark.quick("odd number of rows-1-None", "odd number of rows-2-int8", "outputs-132-None")
def test_the_kernel_interpreted(monkeypatch, shape, processors, form):
    monkeypatch.setattr(hopper, "processors", lambda: processors)
    run = jax.jit(partial(gpu.row_matmul, interpret=INTERPRETED), static_argnames="dtype")
    check(run, SHAPES[shape], jnp.bfloat16, form)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape",
    [*SHAPES.values(), (1, 4096, 28672), (8, 14336, 4096), (2, 2048, 3072), (1, 2880, 2880)],
    ids=str,
)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_on_a_gpu(shape, dtype, form):
    check(jax.jit(gpu.row_matmul, static_argnames="dtype"), shape, dtype, form)


def test_what_does_not_fit_is_refused(monkeypatch):
    x, w = arrays(SHAPES["one row"], jnp.float32)
    with pytest.raises(ValueError, match=r"bfloat16\(1, 512\) does not fit float32\(512, 192\)"):
        row_matmul(x.astype(jnp.bfloat16), w)
    with pytest.raises(ValueError, match="17 rows; expected 1 to 16"):
        row_matmul(jnp.zeros((MAX_ROWS + 1, 512)), w)
    monkeypatch.setattr(hopper, "compute_capability", lambda: hopper.CAPABILITY)
    assert "not float32" in gpu.unsupported(x, w)
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)
    assert gpu.unsupported(x, w) is None
    assert "191 outputs are no multiple of 64" in gpu.unsupported(x, w[:, :-1])
    assert "480 inputs or" in gpu.unsupported(x[:, :480], w[:480])
