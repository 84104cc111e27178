"""8-bit caches of models whose keys have a large constant part, the bias of their projection."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.engine.context_io import FORMAT, MANIFEST, load_context, save_context
from jax_longctx.engine.layers import key_units
from jax_longctx.errors import CheckpointError
from jax_longctx.files import read_sealed, seal
from jax_longctx.methods import make_method
from jax_longctx.methods.full import Full
from jax_longctx.models.params import init_params
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh
from tests.jax_longctx.methods.harness import answer_logits
from tests.small_methods import APART, EVERYTHING, small_method
from tests.support import engine_over, random_rows, tiny_config

BIASED = tiny_config(qkv_bias=True, head_dim=32)
# In the channels that turn slowest, where trained models have it too.
LARGE = np.zeros(32, np.float32)
LARGE[[15, 31]] = 40, -30
ROWS = [[37, 9], [5, 5], [6, 6]]
EACH = [
    pytest.param(name, marks=() if name in ("full", "h2o", "infllm") else pytest.mark.thorough)
    for name in APART
    if not make_method(name, EVERYTHING[name]).measures_keys
]


class Whole(Full):
    """Full attention over keys in the model's units."""

    measures_keys = True


@functools.cache
def biased_params(large, mesh):
    params = init_params(BIASED, RunSpec(mesh=mesh))
    for layer in params["layers"].values():
        bias = layer["attn"]["k_bias"]
        layer["attn"]["k_bias"] = jax.device_put(bias + large * LARGE, bias.sharding)
    return params


def biased_engine(method, large=1, mesh=None, **options):
    mesh = mesh or make_mesh()
    params = jax.tree.map(lambda leaf: leaf, biased_params(large, mesh))
    return engine_over(BIASED, params, method, mesh, chunk=16, **options)


@functools.cache
def logits(method, kv, large=1, mesh=None, **options):
    rows = [random_rows(lengths, seed=seed) for seed, lengths in enumerate(ROWS)]
    return answer_logits(biased_engine(method, large, mesh, kv=kv, **options), rows, before=5)


def error(method, large=1):
    """How far 8-bit caches are from float32's."""
    exact = logits(small_method("full"), None, large)
    return np.sqrt(np.mean((logits(method, "int8", large) - exact) ** 2))


@pytest.mark.parametrize("name", EACH)
def test_a_constant_part_of_the_keys_costs_little(name):
    small = error(small_method("full"), large=0)
    assert 0 < error(make_method(name, EVERYTHING[name])) < 4 * small < error(Whole()) / 1.5


@pytest.mark.slow
def test_units_are_the_same_on_a_mesh_in_either_loop():
    own = logits(small_method("full"), "int8", by_layer=True)
    for by_layer in (False, True):
        spread = logits(small_method("full"), "int8", mesh=make_mesh(2, 2, 2), by_layer=by_layer)
        np.testing.assert_allclose(spread, own, atol=1e-4)


def test_units_change_no_score():
    """They are powers of two, alike for what rotary embedding turns together."""
    bias = jnp.asarray(np.random.default_rng(0).normal(0, 30, (2, 32)), jnp.float32)
    units = np.asarray(key_units(bias))
    assert units.shape == (2, 16) and units.min() >= 1 and units.max() > 8
    np.testing.assert_array_equal(np.log2(units) % 1, 0)
    size = np.max(np.abs(np.split(np.asarray(bias), 2, axis=1)), axis=0)
    assert np.all(np.diff(units[0][np.argsort(size[0])]) >= 0)


def test_a_context_that_was_saved_in_the_models_units_is_refused(tmp_path):
    engine = biased_engine(small_method("full"), kv="int8")
    save_context(engine, engine.prefill(random_rows([5]), reserve=8), tmp_path / "context")
    load_context(engine, tmp_path / "context")
    path = tmp_path / "context" / MANIFEST
    told = read_sealed(path, FORMAT, "")
    assert told["made_by"].pop("key_units") is True
    path.write_text(json.dumps(seal(FORMAT, told)))
    with pytest.raises(CheckpointError, match="key_units"):
        load_context(engine, tmp_path / "context")
