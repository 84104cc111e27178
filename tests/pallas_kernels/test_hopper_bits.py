"""What goes from shared memory to registers, thread by thread: the compiled PTX runs in NumPy."""

import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper_bits
from tests.gpu_plugin import needs_plugin
from tests.pallas_kernels import ptx
from tests.pallas_kernels.hopper_bits_programs import KERNELS, outputs


def swizzled(shape: tuple[int, int], width: int) -> np.ndarray:
    """Where TMA puts the bytes of a matrix whose rows have `width` bytes, 64 or 128."""
    place = np.arange(shape[0] * shape[1])
    return place ^ ((place >> 7 & (width // 16 - 1)) << 4)


@pytest.mark.slow
@needs_plugin
def test_every_thread_has_its_numbers(tmp_path: Path) -> None:
    programs = ptx.compiled("hopper_bits_programs", tmp_path)
    assert programs.keys() == KERNELS.keys()
    for name, program in programs.items():
        check_numbers(name, program)


def check_numbers(name: str, program: str) -> None:
    what, rows, columns, dtype = KERNELS[name]
    draw = np.random.default_rng(0)
    stored = draw.integers(0, 256, (rows, columns)).astype(np.uint8)
    x = draw.standard_normal((columns, 8)).astype(np.float32)
    shape = outputs(what, rows, columns, dtype)
    place = ptx.shared_address(program)
    shared = np.zeros(2**18, np.uint8)
    shared[place + swizzled(stored.shape, columns)] = stored.reshape(-1)
    out = np.zeros(shape.size * shape.dtype.itemsize, np.uint8)
    numbers = {int(n) for n in re.findall(r"_kernel_param_(\d+)", program)}
    # The kernel's arrays that no TMA copies: x where it is read, and the results.
    takes_x = what not in ("rows", "columns")
    arguments = {n: x.view(np.uint8).reshape(-1) if takes_x and n == 0 else out for n in numbers}
    registers, conflicts = ptx.run(program, shared, arguments)
    assert conflicts <= 1, name
    found = out.view(shape.dtype).reshape(shape.shape)
    if what in ("rows", "columns"):
        w = jnp.asarray(stored.view(np.int8))
        run = hopper_bits.rows_of if what == "rows" else hopper_bits.columns_of
        np.testing.assert_array_equal(found, run(w, jnp.dtype(dtype), interpreted=True), name)
    elif what == "order":
        np.testing.assert_array_equal(found, hopper_bits.in_row_order(jnp.asarray(x), True).T, name)
    elif what == "over":
        np.testing.assert_allclose(
            found, np.broadcast_to(x.sum(0), x.shape), atol=1e-5, err_msg=name
        )
    else:
        # In tiles of 64 columns, as TMA would put them there.
        copied = re.search(r"global\.shared::cta[^;]*\}\s*\], \[(%r\d+)\]", program)
        place = int(registers[copied[1]][0])
        tiles = shared[
            place
            + np.tile(swizzled((8, 128), 128), (columns // 64, 1))
            + np.arange(columns // 64)[:, None] * 1024
        ]
        tiles = tiles.view(shape.dtype).reshape(-1, 8, 64).swapaxes(0, 1)
        np.testing.assert_array_equal(tiles.reshape(8, -1), x.T.astype(shape.dtype), name)
