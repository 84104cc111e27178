import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jax_longctx.engine.context_io import load_context, save_context
from jax_longctx.errors import CheckpointError, InputError
from jax_longctx.methods import Full, Quest, Ring, make_method
from jax_longctx.models.config import ModelConfig
from jax_longctx.models.params import abstract_params, form_of_weights, init_params, layer_params
from jax_longctx.models.presets import PRESETS
from jax_longctx.planning.plan import PlanRequest, make_plan
from jax_longctx.planning.targets import parse_target
from jax_longctx.planning.work import step_weight_bytes, weight_bytes
from jax_longctx.run_spec import RunSpec
from jax_longctx.sharding import make_mesh
from pallas_kernels.quantised_matrix import QuantisedMatrix, matrix_of, quantise_matrix
from tests.support import engine_over, joined, random_rows, score, tiny_config

ROWS = random_rows([37, 12])
# Products with biases, whose kv heads are no divisor of what is joined.
CONFIG = tiny_config(qkv_bias=True, mlp_bias=True)


def is_quantised(x):
    return isinstance(x, QuantisedMatrix)


def floats(w):
    return (w.values * w.scales).astype(w.dtype) if is_quantised(w) else w


def draw(*shape, seed=0, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_number_is_off_by_half_a_step(dtype):
    w = draw(64, 4, 24, dtype=dtype) * jnp.logspace(-3, 2, 24).astype(dtype)
    kept = quantise_matrix(w, (0,))
    assert kept.shape == w.shape and kept.scales.shape == (1, 4, 24) and kept.dtype == dtype
    wide = w.astype(jnp.float32)
    off = jnp.abs(kept.values.astype(jnp.float32) * kept.scales - wide)
    assert bool((off <= kept.scales / 2 * 1.0001).all())
    # The largest of each output is stored with the largest number.
    largest = jnp.max(jnp.abs(kept.values.astype(jnp.float32)), axis=0)
    np.testing.assert_array_equal(largest, 127)


def test_an_output_of_zeros_stays_zero_and_of_nan_stays_nan():
    w = jnp.stack([jnp.zeros(8), jnp.ones(8), jnp.ones(8).at[3].set(jnp.nan)], axis=1)
    kept = floats(quantise_matrix(w, (0,)))
    np.testing.assert_array_equal(kept[:, 0], 0)
    np.testing.assert_allclose(kept[:, 1], 1)
    assert bool(jnp.isnan(kept[:, 2]).all())


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_product_is_that_of_the_numbers_that_are_stored(dtype):
    x, w = draw(3, 2, 4, 256, dtype=dtype), draw(4, 256, 40, seed=1, dtype=dtype)
    kept = quantise_matrix(w, (0, 1))
    exact = (kept.values.astype(jnp.float32) * kept.scales).astype(jnp.float32)
    expected = jnp.tensordot(x.astype(jnp.float32), exact, 2)
    found = kept.product(x, 2)
    assert found.dtype == dtype
    close = 4 * float(jnp.finfo(dtype).eps) * float(jnp.abs(expected).max())
    np.testing.assert_allclose(found.astype(jnp.float32), expected, atol=max(close, 1e-4))
    flat = matrix_of(kept, 4 * 256)
    assert flat.shape == (1024, 40) and flat.scales.shape == (1, 40)


def engine_of(params, mesh=None, method=None, **options):
    return engine_over(CONFIG, params, method or Full(), mesh or make_mesh(), chunk=16, **options)


def random_params(mesh=None, form=None):
    return init_params(CONFIG, RunSpec(mesh=mesh, weights=form), seed=5)


@pytest.mark.parametrize("by_layer", [True, False])
def test_a_model_is_the_one_of_the_numbers_that_are_stored(by_layer):
    kept = random_params(form="int8")
    given = score(engine_of(jax.tree.map(floats, kept, is_leaf=is_quantised)), ROWS)
    exact = score(engine_of(random_params()), ROWS)
    found = score(engine_of(kept, by_layer=by_layer), ROWS)
    for row, wanted, float_row in zip(found, given, exact, strict=True):
        np.testing.assert_allclose(row, wanted, atol=1e-4)
        assert 1e-3 < np.abs(row - float_row).max() < 0.3


@pytest.mark.slow
def test_a_mesh_answers_as_one_device():
    """Ring Attention gathers the weights, as its tokens are spread over the mesh."""
    rows, questions = random_rows([50, 20]), random_rows([3, 4], seed=1)
    answers = []
    for sizes, method in (((1, 1, 1), Full()), ((1, 2, 2), Full()), ((1, 2, 1), Ring())):
        mesh = make_mesh(*sizes)
        for by_layer in (True, False):
            params = random_params(mesh, "int8")
            engine = engine_of(params, mesh, method, by_layer=by_layer, kv="int8")
            context = engine.prefill(rows, reserve=16)
            answers.append(joined(engine.stream(context, questions, max_tokens=6)))
            assert answers[-1] == answers[0], (sizes, method, by_layer)


@pytest.mark.slow
def test_a_rule_weighs_values_by_the_numbers_that_are_stored():
    method, mesh = make_method("knorm:budget=12,over_heads=critical"), make_mesh(1, 2, 2)
    kept = random_params(form="int8")
    answers = []
    for engine in (
        engine_of(jax.tree.map(floats, kept, is_leaf=is_quantised), method=method),
        engine_of(kept, method=method, by_layer=False),
        engine_of(random_params(mesh, "int8"), mesh, method),
    ):
        context = engine.prefill(random_rows([50, 20]), reserve=16)
        answers.append(joined(engine.stream(context, [[1, 2], [3, 4]], max_tokens=8)))
    assert answers[0] == answers[1] == answers[2]


def test_every_matrix_of_a_layer_is_in_8_bits_and_nothing_else():
    params = random_params(form="int8")
    kept = {
        "/".join(str(key.key) for key in path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(params, is_leaf=is_quantised)
        if is_quantised(leaf)
    }
    names = [*(f"attn/{x}" for x in "qkvo"), *(f"mlp/{x}" for x in ("gate", "up", "down"))]
    assert kept == {f"layers/{layer}/{name}" for layer in range(2) for name in names}
    assert form_of_weights(params) == "int8" and form_of_weights(random_params()) is None
    # Stacked and taken apart again they are the same.
    engine = engine_of(params, by_layer=False)
    for layer in range(2):
        jax.tree.map(
            np.testing.assert_array_equal,
            layer_params(engine.params, layer),
            random_params(form="int8")["layers"][str(layer)],
        )
    assert engine.fingerprint == engine_of(random_params(form="int8")).fingerprint
    assert engine.fingerprint != engine_of(random_params()).fingerprint
    # In a narrower dtype and on a mesh too it is the same model, and with other weights another.
    narrow = init_params(CONFIG, RunSpec(mesh=make_mesh(1, 2, 2), dtype="float32"), seed=5)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), narrow)
    assert engine.identity == engine_of(narrow, make_mesh(1, 2, 2)).identity
    assert engine.identity == engine_of(random_params()).identity
    assert engine.identity != engine_of(init_params(CONFIG, RunSpec(), seed=6)).identity


def test_the_checksum_of_weights_is_of_every_value_and_not_of_the_mesh():
    params = random_params()
    whole = engine_of(params).checksum
    assert whole == engine_of(params, by_layer=False).checksum
    mesh = make_mesh(2, 1, 2)
    assert whole == engine_over(CONFIG, random_params(mesh), Full(), mesh).checksum
    table = params["embed"]["table"]
    # One value, the sign of one, and two rows in each other's place.
    rows = jnp.arange(len(table)).at[5].set(6).at[6].set(5)
    for changed in (table.at[-1, -1].add(1e-6), table.at[3, 3].multiply(-1), table[rows]):
        other = engine_of({**params, "embed": {"table": changed}})
        assert other.checksum != whole and other.fingerprint == engine_of(params).fingerprint


def test_shapes_are_those_of_the_weights():
    mesh = make_mesh(1, 2, 2)
    shapes = abstract_params(CONFIG, RunSpec(mesh=mesh, weights="int8"))
    made = random_params(mesh, "int8")
    assert jax.tree.structure(made) == jax.tree.structure(shapes)

    def check(leaf, shape):
        assert (leaf.shape, leaf.dtype) == (shape.shape, shape.dtype)
        assert leaf.sharding.is_equivalent_to(shape.sharding, leaf.ndim)

    jax.tree.map(check, made, shapes)


def test_weights_of_another_form_are_refused_and_contexts_of_them(tmp_path):
    engine = engine_of(abstract_params(CONFIG, RunSpec(weights="int8")))
    with pytest.raises(InputError, match=r"in no 8-bit form, the engine was made for int8; make"):
        engine.take_params(random_params())
    engine.take_params(random_params(form="int8"))
    assert engine.setup.weights == "int8"
    kept, exact = engine_of(random_params(form="int8")), engine_of(random_params())
    context = kept.prefill([ROWS[0]], reserve=8)
    save_context(kept, context, tmp_path / "context")
    load_context(kept, tmp_path / "context")
    with pytest.raises(CheckpointError, match="weights"):
        load_context(exact, tmp_path / "context")


@pytest.mark.slow
def test_plan_counts_them():
    plans, setups = {}, {}
    for form in (None, "int8"):
        request = PlanRequest(
            config=ModelConfig.from_hf(PRESETS["llama-3.1-8b"]),
            spec=RunSpec(method=Quest(), weights=form),
            target=parse_target("h200x1"),
            context=131072,
        )
        setups[form] = request.setup(make_mesh())
        plans[form] = make_plan(request, {"data": 1, "seq": 1, "tensor": 1})
    wide, kept = (setups[form] for form in (None, "int8"))
    config = wide.config
    d, f, h = config.model_dim, config.mlp_dim, config.head_dim
    heads = config.num_heads + config.num_kv_heads
    matrices = config.num_layers * (2 * d * heads * h + 3 * d * f)
    outputs = config.num_layers * ((config.num_heads + 2 * config.num_kv_heads) * h + 2 * f + 2 * d)
    assert weight_bytes(wide) - weight_bytes(kept) == matrices - 4 * outputs
    assert step_weight_bytes(wide) - step_weight_bytes(kept) == matrices - 4 * outputs
    assert plans["int8"].weights == weight_bytes(kept)
    reads = [plans[form].decode.read for form in (None, "int8")]
    assert reads[0] - reads[1] == matrices - 4 * outputs
