"""The choice of the best by one block of threads: the compiled PTX runs in NumPy."""

from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from tests.gpu_plugin import needs_plugin
from tests.pallas_kernels import ptx, ptx_block
from tests.pallas_kernels.hopper_best_programs import KERNELS, TIES

# Of a row of `n` scores the first one that counts, the one after the last, and k of `places`.
BOUNDS = {
    "all": lambda n, places: (0, n, places),
    "some": lambda n, places: (3, n - 5, places),
    "fewer than places": lambda n, places: (100, n, 7),
    "fewer than k": lambda n, places: (5, 5 + places // 2, places),
    "none": lambda n, places: (9, 9, places),
    "k is 0": lambda n, places: (0, n, 0),
}


def random(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return draw.standard_normal(shape).astype(np.float32)


def ties(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.round(random(draw, shape) * 2) / 2


def zeros(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Of both signs, which are equal."""
    return np.where(draw.random(shape) < 0.5, -0.0, 0.0).astype(np.float32)


def no_numbers(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    x = random(draw, shape)
    x[draw.random(shape) < 0.3] = np.nan
    x[draw.random(shape) < 0.3] = -np.inf
    return x


def large(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    x = -np.abs(random(draw, shape)) * 1e30
    x[draw.random(shape) < 0.01] = np.inf
    return x


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The PTX of every kernel."""
    found = ptx.compiled("hopper_best_programs", tmp_path_factory.mktemp("ptx"))
    assert found.keys() == KERNELS.keys() | TIES.keys()
    return found


def best(
    scores: np.ndarray, bounds: tuple[int, int, int], places: int, gap: tuple[int, int] | None
) -> np.ndarray:
    """What the kernel is to write."""
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


@pytest.mark.slow
@needs_plugin
def test_every_thread_finds_its_places(programs: dict[str, str]) -> None:
    for name in KERNELS:
        check_places(name, programs[name])


def check_places(name: str, program: str) -> None:
    tiles, places, gap = KERNELS[name]
    cases = [(random, "all"), (ties, "some"), (zeros, "fewer than places"), (no_numbers, "all")]
    cases += [(large, "fewer than k"), (random, "none"), (ties, "k is 0")]
    if tiles > 4:  # which take long
        cases = [(random, "some"), (no_numbers, "all"), (large, "fewer than k")]
    for seed, (make, which) in enumerate(cases):
        draw = np.random.default_rng(seed)
        scores = make(draw, (tiles * 64 * 64,))
        bounds = BOUNDS[which](scores.size, places)
        out = np.full(2 * places * 4, 0x77, np.uint8)
        given = [np.array(bounds, np.int32).view(np.uint8), scores.view(np.uint8), out]
        ptx_block.run(program, given, draw=draw)
        expected = best(scores, bounds, places, gap)
        before, found = out.view(np.int32).reshape(2, places)
        np.testing.assert_array_equal(found, expected, f"{name}, {make.__name__}, {which}")
        assert np.all(before == 0x77777777), name


def tied(name: str, draw: np.random.Generator) -> Iterator[list[np.ndarray]]:
    """Arguments of a kernel of `TIES`."""
    for cut in (-np.inf, 0.5, 2.0):
        shapes = TIES[name][1]
        bounds = draw.random(shapes[0][0]).astype(np.float32) / 5
        scores = draw.standard_normal(shapes[1][0]).astype(np.float32)
        scores[scores < cut] = -np.inf
        if cut == 0.5:
            scores = np.round(scores * 4) / 4
        slots = draw.permutation(4 * scores.size)[: scores.size].astype(np.int32)
        yield [bounds, scores, slots.reshape(scores.shape)][: len(shapes)]


@pytest.mark.slow
@needs_plugin
def test_ties_are_ranked_as_in_the_interpreter(programs: dict[str, str]) -> None:
    for name in TIES:
        check_ranks(name, programs[name])


def check_ranks(name: str, program: str) -> None:
    draw, (run, _) = np.random.default_rng(5), TIES[name]
    for given in tied(name, draw):
        how = plgpu.InterpretGPUParams(inline_mgpu="ignore")
        expected = [np.asarray(x) for x in run(*map(jnp.asarray, given), interpret=how)]
        found = [np.zeros(x.nbytes, np.uint8) for x in expected]
        # Parameters come in the order in which the kernels first use them.
        memory = [x.view(np.uint8).reshape(-1) for x in (*given[1:], given[0])] + found
        # A block of threads a row.
        for index in np.ndindex(expected[0].shape[:-1]):
            ptx_block.run(program, memory, block=index[::-1], draw=draw)
        for x, wanted in zip(found, expected, strict=True):
            np.testing.assert_array_equal(x.view(wanted.dtype).reshape(wanted.shape), wanted, name)
