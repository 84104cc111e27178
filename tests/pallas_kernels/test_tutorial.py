import re
from functools import partial
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.decode_attention import decode_attention, reference
from tests.drawing import computed, normal

PAGE = (Path(__file__).parents[2] / "docs/tutorials/implementation.md").read_text(encoding="utf-8")
FIRST, SECOND = re.findall(r"```python[^\n]*\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture
def blocks() -> dict:
    names: dict = {}
    exec(FIRST, names)
    return names


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("block", [1, 8, 512])
def test_its_implementation_is_the_definition(blocks: dict, block: int, window: int | None) -> None:
    shapes = (4, 3, 4, 16), (4, 2, 40, 16), (4, 2, 40, 16)
    q, k, v = (normal(*shape, seed=i) for i, shape in enumerate(shapes))
    lengths = jnp.array([0, 1, 17, 40], jnp.int32)
    windowed = window and blocks["Window"](window, lengths + 2, 1)
    options = dict(scale=0.3, window=windowed)
    run = partial(blocks["decode_attention"], block=block)
    pair = (computed(f, q, k, v, lengths, **options) for f in (run, reference.decode_attention))
    for found, expected in zip(*pair, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_its_line_is_the_public_functions_with_one_name_more() -> None:
    q, k = jnp.ones((1, 1, 2, 64)), jnp.ones((1, 2, 2, 64))
    offered = dispatch.offered(
        lambda name: decode_attention(q, k, k, jnp.array([1]), scale=1.0, implementation=name)
    )
    shown = re.findall(r"^    (\w+)=", SECOND, re.MULTILINE)
    assert {*shown} == {*offered, "blocks"}
