"""What single blocks of threads compute on Hopper: the compiled PTX runs in NumPy.

What goes from shared memory to registers, and the choice of the best.
"""

import re
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper_bits
from tests.gpu_plugin import needs_plugin
from tests.pallas_kernels import ptx
from tests.pallas_kernels.hopper_programs import BEST, BITS, TIES, outputs

pytestmark = [pytest.mark.slow, needs_plugin]

# Of a row of `n` scores the first one that counts, the one after the last, and k of `places`.
BOUNDS = {
    "all": lambda n, places: (0, n, places),
    "some": lambda n, places: (3, n - 5, places),
    "fewer than places": lambda n, places: (100, n, 7),
    "fewer than k": lambda n, places: (5, 5 + places // 2, places),
    "none": lambda n, places: (9, 9, places),
    "k is 0": lambda n, places: (0, n, 0),
}


# Scores made of normal ones.
SCORES: dict[str, Callable[[np.random.Generator, np.ndarray], np.ndarray]] = {
    "random": lambda draw, x: x,
    "ties": lambda draw, x: np.round(x * 2) / 2,
    # Of both signs, which are equal.
    "zeros": lambda draw, x: np.copysign(0, x),
    "no numbers": lambda draw, x: np.where(
        draw.random(x.shape) < 0.3, np.nan, np.where(draw.random(x.shape) < 0.3, -np.inf, x)
    ),
    "large": lambda draw, x: np.where(draw.random(x.shape) < 0.01, np.inf, -np.abs(x) * 1e30),
}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    found = ptx.compiled("hopper_programs", tmp_path_factory.mktemp("ptx"))
    assert found.keys() == BITS.keys() | BEST.keys() | TIES.keys()
    return found


def best(scores, bounds, places, gap):
    first, last, k = bounds
    slots = np.arange(len(scores))
    there = (slots >= first) & (slots < last) & (scores > -np.inf)
    if gap is not None:
        there &= (slots < gap[0]) | (slots >= gap[1])
    slots = slots[there]
    found = np.sort(slots[np.argsort(-scores[slots], kind="stable")[:k]])
    if gap is not None:
        found = np.where(found >= gap[1], found - (gap[1] - gap[0]), found)
    return np.concatenate([found, np.full(places - len(found), -1)])


@pytest.mark.parametrize("name", BEST)
def test_every_thread_finds_its_places(programs, name):
    tiles, places, gap = BEST[name]
    cases = [("random", "all"), ("ties", "some"), ("zeros", "fewer than places")]
    cases += [("no numbers", "all"), ("large", "fewer than k"), ("ties", "k is 0")]
    if tiles > 4:  # which take long
        cases = [("random", "some"), ("no numbers", "all"), ("large", "fewer than k")]
    for seed, (make, which) in enumerate([*cases, ("random", "none")]):
        draw = np.random.default_rng(seed)
        normal = draw.standard_normal(tiles * 64 * 64).astype(np.float32)
        scores = SCORES[make](draw, normal).astype(np.float32)
        bounds = BOUNDS[which](scores.size, places)
        out = np.full(2 * places * 4, 0x77, np.uint8)
        given = [np.array(bounds, np.int32).view(np.uint8), scores.view(np.uint8), out]
        ptx.run(programs[name], dict(enumerate(given)), draw=draw)
        expected = best(scores, bounds, places, gap)
        before, found = out.view(np.int32).reshape(2, places)
        np.testing.assert_array_equal(found, expected, f"{name}, {make}, {which}")
        assert np.all(before == 0x77777777), name


def tied(name, draw):
    for cut in (-np.inf, 0.5, 2.0):
        shapes = TIES[name][1]
        bounds = draw.random(shapes[0][0]).astype(np.float32) / 5
        scores = draw.standard_normal(shapes[1][0]).astype(np.float32)
        scores[scores < cut] = -np.inf
        if cut == 0.5:
            scores = np.round(scores * 4) / 4
        slots = draw.permutation(4 * scores.size)[: scores.size].astype(np.int32)
        yield [bounds, scores, slots.reshape(scores.shape)][: len(shapes)]


@pytest.mark.parametrize("name", TIES)
def test_ties_are_ranked_as_in_the_interpreter(programs, name):
    draw, (run, _) = np.random.default_rng(5), TIES[name]
    for given in tied(name, draw):
        how = plgpu.InterpretGPUParams(inline_mgpu="ignore")
        expected = [np.asarray(x) for x in run(*map(jnp.asarray, given), interpret=how)]
        found = [np.zeros(x.nbytes, np.uint8) for x in expected]
        # Parameters come in the order in which the kernels first use them.
        memory = [x.view(np.uint8).reshape(-1) for x in (*given[1:], given[0])] + found
        # A block of threads a row.
        for index in np.ndindex(expected[0].shape[:-1]):
            ptx.run(programs[name], dict(enumerate(memory)), block=index[::-1], draw=draw)
        for x, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x.view(wanted.dtype).reshape(wanted.shape), wanted, name)


def swizzled(shape, width):
    """Where TMA puts the bytes of a matrix whose rows have `width` bytes, 64 or 128."""
    place = np.arange(shape[0] * shape[1])
    return place ^ ((place >> 7 & (width // 16 - 1)) << 4)


@pytest.mark.parametrize("name", BITS)
def test_every_thread_has_its_numbers(programs, name):
    program = programs[name]
    what, rows, columns, dtype = BITS[name]
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
    warps = ptx.run(program, arguments, shared, draw=draw)
    assert all(warp.conflicts <= 1 for warp in warps), name
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
        place = int(warps[0].registers[copied[1]][0])
        tiles = shared[
            place
            + np.tile(swizzled((8, 128), 128), (columns // 64, 1))
            + np.arange(columns // 64)[:, None] * 1024
        ]
        tiles = tiles.view(shape.dtype).reshape(-1, 8, 64).swapaxes(0, 1)
        np.testing.assert_array_equal(tiles.reshape(8, -1), x.T.astype(shape.dtype), name)
