"""Attention whose scores have a soft cap: each operation by its definition."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import dispatch
from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.attention_mass.reference import Reduction
from pallas_kernels.common import Capped, Window
from pallas_kernels.decode_attention import attend_with_logits, decode_attention
from pallas_kernels.decode_attention import tpu as decode_tpu
from pallas_kernels.prefill_attention import cache_attention, causal_attention
from pallas_kernels.prefill_attention import tpu as prefill_tpu
from pallas_kernels.sparse_decode_attention import Pages, sparse_decode_attention
from tests.drawing import computed

SCALE, INTERPRET = Capped(0.9, 1.7), pltpu.InterpretParams()
LENGTHS = np.array([0, 130, 256])


def draw(*shape):
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def operation(name):
    one, few, k, v = draw(3, 1, 4, 8), draw(3, 5, 4, 8), draw(3, 2, 256, 8), draw(3, 2, 256, 8)
    held, new = jnp.array(LENGTHS), draw(3, 5, 2, 8)
    pages = Pages(jnp.array([[[0, 5, 9]]] * 3), jnp.array([2, 0, 7]), held, 16)
    seen, lse = Window(90, held), jnp.full((3, 5, 4), 3.0)
    cases = {
        "causal": partial(causal_attention, few, new, new, scale=SCALE, window=3),
        "cache": partial(cache_attention, few, k, v, held, scale=SCALE, window=seen),
        "decode": partial(decode_attention, one, k, v, held, scale=SCALE),
        "sparse": partial(
            sparse_decode_attention, one, k, v, pages, scale=SCALE, prior=draw(3, 1, 4, 8)
        ),
        "mass": partial(attention_mass, few, k, lse, held, Reduction(SCALE)),
        "logits": partial(attend_with_logits, one, k, v, jnp.array([256, 130, 256]), scale=SCALE),
    }
    return cases[name]


def check(found, expected):
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), found, expected)


@pytest.mark.parametrize("name", ["causal", "cache", "decode", "sparse", "mass", "logits"])
def test_in_bounded_memory_as_by_definition(name):
    check(*(computed(operation(name), implementation=it) for it in ("xla", "reference")))


@pytest.mark.parametrize("name", ["decode", "causal", "cache"])
def test_on_a_tpu_as_by_definition(name):
    kernels = {
        "decode": partial(decode_tpu.decode_attention, block=128, interpret=INTERPRET),
        "causal": partial(prefill_tpu.causal_attention, interpret=True),
        "cache": partial(prefill_tpu.cache_attention, interpret=True),
    }
    given = operation(name)
    how = {key: value for key, value in given.keywords.items() if name != "cache" or key == "scale"}
    expected = computed(partial(given.func, **how, implementation="reference"), *given.args)
    check(computed(partial(kernels[name], **how), *given.args), expected)


def test_a_kernel_without_caps_says_so(monkeypatch):
    monkeypatch.setattr(dispatch, "platform", lambda: "gpu")
    kernel = dispatch.Kernel(lambda: "gpu", lambda: None)

    def chosen(scale, asked=None, **changes):
        given = {"xla": lambda: "xla", "gpu": kernel._replace(**changes)}
        return dispatch.select("attention", asked, "shapes", scale, **given)()

    assert chosen(0.5) == chosen(SCALE, caps=True) == "gpu" and chosen(SCALE) == "xla"
    with pytest.raises(NotImplementedError, match="the scores have a soft cap"):
        chosen(SCALE, "gpu")
