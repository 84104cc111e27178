import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import hopper, quantised
from pallas_kernels.attention_mass import Reduction, attention_mass
from pallas_kernels.attention_mass import api as mass_api
from pallas_kernels.attention_mass import reference as mass_reference
from pallas_kernels.common import Window, block_of
from pallas_kernels.decode_attention import (
    attend_with_logits,
    decode_attention,
    decode_logits,
    shared_decode_attention,
    weighted_values,
)
from pallas_kernels.decode_attention import gpu as decode_gpu
from pallas_kernels.decode_attention import tpu as decode_tpu
from pallas_kernels.plane import Plane, part_of
from pallas_kernels.prefill_attention import api, cache_attention, reference, xla
from pallas_kernels.quantised import coded, empty, stored_as
from pallas_kernels.sparse_decode_attention import Pages, Shared, sparse_decode_attention
from pallas_kernels.sparse_decode_attention import api as sparse_api
from pallas_kernels.topk_scores import api as topk_api
from pallas_kernels.topk_scores import reference as topk_reference
from pallas_kernels.topk_scores import topk_scores
from tests.drawing import computed
from tests.drawing import normal as draw

B, K, G, S, H = 2, 2, 2, 300, 16


# Compiled: one by one their operations would be as many programs of each shape.
quantise = jax.jit(quantised.quantise)
dequantised = jax.jit(quantised.dequantised)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e4])
def test_numbers_come_back_within_half_a_step(dtype, size):
    x = (draw(64, H) * size).astype(dtype)
    kept = quantise(x)
    exact, back = (np.asarray(y, np.float64) for y in (x, dequantised(kept)))
    scales = np.asarray(kept.scales, np.float64)
    # Rounding to the dtype comes on top, of a number of at most 127 steps.
    off = np.abs(back - exact) / scales[:, None]
    assert off.max() <= 0.5 * (1 + 1e-5) + 127 * float(jnp.finfo(dtype).eps) / 2
    least = np.abs(exact).max(axis=1) / 127
    assert (scales >= least * (1 - 1e-6)).all()
    assert (scales <= least * (1 + 2.0**-7)).all()
    assert kept.values.dtype == jnp.int8
    assert np.abs(np.asarray(kept.values)).max() <= 127


def test_what_is_not_finite_bytes_and_dtypes_of_what_is_stored():
    x = jnp.stack([jnp.zeros(H), jnp.full(H, jnp.nan), draw(H).at[3].set(jnp.inf), draw(H)])
    back = np.asarray(dequantised(quantise(x)))
    assert (back[0] == 0).all()
    # An engine that looks for them in the logits still finds them.
    assert np.isnan(back[1]).all() and np.isnan(back[2]).all() and np.isfinite(back[3]).all()
    # 8B's shape: keys and values of 131,072 tokens.
    shape = (1, 8, 131_072, 128)
    kept, whole = jax.eval_shape(
        lambda: (empty(shape, jnp.bfloat16, "int8"), empty(shape, jnp.bfloat16, None))
    )
    assert kept.shape == shape and kept.dtype == jnp.bfloat16
    assert kept.nbytes == whole.size + 2 * whole.size // 128
    assert kept.nbytes / (2 * whole.size) <= 0.53
    like = empty((1, K, S, H), jnp.bfloat16, "int8")
    kept = stored_as(like, draw(1, K, 5, H))
    assert jax.tree.structure(kept) == jax.tree.structure(like)
    assert dequantised(kept).dtype == jnp.bfloat16
    assert coded(draw(3), kept) and not coded(draw(3))


def test_a_block_of_a_layer_of_many():
    layers = [quantise(draw(B, K, S, H, seed=i)) for i in range(3)]
    stacks = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
    plane = jax.tree.map(lambda whole: Plane(whole, jnp.int32(1)), stacks)
    assert plane.shape == (B, K, S, H) and plane.nbytes == layers[1].nbytes
    expected = np.asarray(dequantised(layers[1]))[:, :, 40:60]
    np.testing.assert_array_equal(block_of(plane, 40, 20), expected)
    np.testing.assert_array_equal(dequantised(part_of(plane)), dequantised(layers[1]))


def both(operation, *args, **how):
    """The operation's results as it runs here, and by its definition: one program of each."""

    @jax.jit
    def run(args):
        return operation(*args, **how), operation(*args, implementation="reference", **how)

    return run(args)


def close(found, expected, **how):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **how), found, expected)


LENGTHS = jnp.array([S - 7, 41])


@functools.cache
def stored(slots=S):
    return tuple(quantise(draw(B, K, slots, H, seed=seed)) for seed in (1, 2))


LISTED = {
    "pages": (jnp.tile(jnp.array([0, 3, 29, -1]), (B, K, 1)), None),
    "pages of query heads": (jnp.tile(jnp.array([0, 3, 29, -1]), (B, K * G, 1)), None),
    "flat": (
        jnp.array([[0, 7, 3, 7, -1], [1, 2, 4, 0, 3]]),
        jnp.array([[0, 0, 1, 1, 1], [1, 1, 0, 0, -1]]),
    ),
}
PRIOR = {"prior": draw(B, 1, K * G, H, seed=7)}
# Also over more than one block, of which the last is moved back.
OPERATIONS = [
    *((decode_attention, S, 1, {}), (decode_attention, 5000, 3, {})),
    (decode_attention, 5000, 3, {"window": 20}),
    (cache_attention, 1300, 24, {}),
    *((attention_mass, S, queries, {"squares": x}) for queries in (1, 9) for x in (False, True)),
    (topk_scores, 2500, 3, {}),
    *((sparse_decode_attention, S, 1, {"listed": it, **PRIOR}) for it in ("pages", "flat")),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            *((decode_attention, S, 3, {}), (decode_attention, 5000, 1, {})),
            (decode_attention, S, 3, {"window": 20}),
            *((sparse_decode_attention, S, 1, {"listed": it}) for it in LISTED),
            (sparse_decode_attention, S, 1, {"listed": "pages of query heads", **PRIOR}),
        )
    ),
]


@pytest.mark.parametrize(("operation", "slots", "queries", "how"), OPERATIONS)
def test_an_operation_over_8_bits_is_its_definition(operation, slots, queries, how):
    k, v = stored(slots)
    q, how = draw(B, queries, K * G, H), {"scale": 0.3} | how
    # A row is empty.
    short = 0 if (operation, queries) == (decode_attention, 1) else 41
    stop = jnp.array([slots - 7, short])
    rest = [v, stop]
    if operation is attention_mass:
        rest[0] = 4.0 + np.asarray(draw(B, queries, K * G, seed=4))
        rest, how = [*rest, Reduction(**how)], {}
    elif operation is topk_scores:
        rest, how = [(jnp.array([3, 0]), stop)], {"count": 4}
    elif operation is sparse_decode_attention:
        listed, heads = LISTED[how.pop("listed")]
        rest = [v, Pages(listed, jnp.array([3, 0]), stop, 10, heads)]
    elif "window" in how:
        start = jax.device_put(np.asarray(stop) - queries)
        how["window"] = Window(how["window"], start)
    found, expected = both(operation, q, k, *rest, **how)
    # Slots are the same: they are below half the inverse of this.
    close(found, expected, rtol=2e-5, atol=2e-5 if operation is not attention_mass else 1e-6)


def test_rows_over_one_cache_and_heads_that_do_not_fit():
    k, v = (jax.tree.map(lambda part: part[:1], x) for x in stored())
    q, length = draw(B, 1, K * G, H), jnp.array([41])
    close(*both(shared_decode_attention, q, k, v, length, scale=0.3), rtol=2e-5, atol=2e-5)
    with pytest.raises(ValueError, match="does not fit"):
        decode_attention(draw(B, 1, K * G, H, dtype=jnp.bfloat16), *stored(), LENGTHS, scale=0.3)


def test_logits_and_values_apart():
    k, v = stored()
    q = draw(B, 1, K * G, H)
    found, expected = both(attend_with_logits, q, k, v, LENGTHS, scale=0.3)
    logits = decode_logits(q, k, LENGTHS, scale=0.3)
    held = np.isfinite(np.asarray(expected[2]))
    close(found[:2], expected[:2], rtol=2e-5, atol=2e-5)
    for one in (found[2], logits):
        np.testing.assert_allclose(np.asarray(one)[held], np.asarray(expected[2])[held], atol=2e-5)
    weights = jnp.abs(draw(B, K * G, S, seed=5))
    wide = jnp.repeat(dequantised(v), G, axis=1)
    exact = jnp.einsum("BNS,BNSH->BNH", weights, wide)
    np.testing.assert_allclose(weighted_values(weights, v), exact, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize(
    ("slots", "block", "each", "floats"),
    [
        # Blocks of 128, of all slots, and of 66 where no tile divides them.
        *((640, 256, 128, ()), (640, 8192, 640, ()), (330, 100, 66, ())),
        # Methods that rotate their keys as they read hand floats beside values in 8 bits.
        *((640, 256, 128, (0,)), (640, 256, 128, (1,))),
    ],
)
def test_a_kernel_that_reads_floats_is_given_blocks(monkeypatch, slots, block, each, floats):
    """`floats`: which of keys and values are not in 8 bits."""
    stacked = (
        jax.tree.map(lambda part: jnp.concatenate([part, part[:1]]), x) for x in stored(slots)
    )
    both = [dequantised(x) if i in floats else x for i, x in enumerate(stacked)]
    q, lengths, sizes = draw(3, 24, K * G, H), jnp.array([slots - 9, 0, 41]), []

    def attend(q, keys, values, held, scale):
        assert isinstance(keys, jax.Array) and isinstance(values, jax.Array)
        sizes.append(keys.shape[2])
        return xla.cache_attention(q, keys, values, held, scale=scale)

    monkeypatch.setattr(api, "BLOCK", block)
    by_block = functools.partial(api._by_block, attend, scale=0.3)
    found = computed(by_block, q, *both, lengths)
    whole = (dequantised(x) for x in both)
    expected = computed(reference.cache_attention, q, *whole, lengths, scale=0.3)
    assert set(sizes) == {each}
    close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("squares", [False, True])
def test_a_kernel_of_mass_that_reads_floats_is_given_blocks(monkeypatch, squares):
    k, _ = stored(640)
    q, lengths = draw(B, 9, K * G, H), jnp.array([600, 41])
    lse = 4.0 + np.asarray(draw(B, 9, K * G, seed=4))
    how = Reduction(0.3, jnp.full(B, 9), squares=squares)
    expected = computed(attention_mass, q, k, lse, lengths, how, implementation="reference")
    by_block = functools.partial(mass_api._by_block, mass_reference.attention_mass)
    monkeypatch.setattr(mass_api, "BLOCK", 256)
    masses, squared = computed(by_block, q, k, lse, lengths, how=how)
    found = (masses, squared) if squares else masses
    close(found, expected, rtol=2e-5, atol=1e-6)


def test_a_kernel_of_the_best_keys_that_reads_floats_is_given_blocks(monkeypatch):
    """Ties, of repeated keys, go to the lowest slot whatever block they lie in."""
    k, _ = stored(320)
    k = jax.tree.map(lambda part: jnp.concatenate([part, part], axis=2), k)
    q, start, stop = draw(B, 3, K * G, H), jnp.array([3, 0]), jnp.array([630, 50])
    tolerance = jnp.full(q.shape[:3], 1e-4)
    given = (q, k, (start, stop))
    reference = functools.partial(topk_scores, tolerance=tolerance, implementation="reference")
    expected = computed(reference, *given, count=4)
    by_block = functools.partial(topk_api._by_block, topk_reference.topk_scores)
    monkeypatch.setattr(topk_api, "BLOCK", 256)
    found = computed(by_block, *given, tolerance, count=4)
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("lists", [K, K * G])
def test_sparse_decode_attention_of_rows_that_share_slots(lists):
    k, v = stored()
    shared = Shared(*jax.tree.map(lambda y: y[:1], (k, v)), jnp.array([200]))
    own = jax.tree.map(lambda y: y[:, :, 200:], [k, v])
    whole = [
        jax.tree.map(
            lambda y: jnp.concatenate([jnp.repeat(y[:1, :, :200], B, 0), y[:, :, 200:]], 2), x
        )
        for x in (k, v)
    ]
    pages = jnp.tile(jnp.array([0, 3, 20, 28, -1]), (B, lists, 1))
    q, chosen = draw(B, 1, K * G, H), Pages(pages, jnp.array([3, 3]), jnp.array([290, 210]), 10)
    attend = functools.partial(sparse_decode_attention, scale=0.3)
    found = computed(attend, q, *own, chosen, shared=shared)
    expected = computed(attend, q, *whole, chosen)
    close(found, expected, rtol=2e-5, atol=2e-5)


def test_slots_around_listed_pages_are_read_in_every_form(monkeypatch):
    monkeypatch.setattr(sparse_api.dispatch, "platform", lambda: "gpu")
    monkeypatch.setattr(hopper, "unsupported", lambda q: None)
    q, pages = jnp.zeros((B, 1, K * G, 64), jnp.bfloat16), jnp.zeros((B, K, 4), jnp.int32)
    for form in (None, "int8"):
        cache = empty((B, K, 512, 64), jnp.bfloat16, form)
        assert sparse_api.takes_around(q, cache, pages, 16, False)
        whole = empty((1, K, 512, 64), jnp.bfloat16, form)
        shared = Shared(whole, whole, jnp.array([256]))
        k = empty((B, K, 128, 64), jnp.bfloat16, form)
        assert sparse_api.takes_around(q, k, pages, 16, False, shared)
        assert sparse_api.takes_shared(q, k, pages, 16, shared)
        assert not sparse_api.takes_shared(q, k, pages, 4, shared)


def test_what_the_kernels_refuse_of_8_bits():
    def reason(rows, slots, form="int8"):
        q = jnp.zeros((rows, 1, 4, 64), jnp.bfloat16)
        k, v = (empty((rows, 1, slots, 64), jnp.bfloat16, each) for each in (None, form))
        return decode_gpu.unsupported(q, k, v)

    assert reason(1, 1000) == "1000 slots of int8 are not whole blocks of 128"
    assert "whole blocks" not in str(reason(1, 1000, None))
    assert reason(241, 1024) == "241 rows, at most 240"
    # Floats beside 8 bits are left to others.
    q = jnp.zeros((B, 1, K * G, 128), jnp.bfloat16)
    k, v = (empty((B, K, 256, 128), jnp.bfloat16, form) for form in (None, "int8"))
    assert "reads both alike" in str(decode_tpu.unsupported(q, k, v))
    assert decode_tpu.unsupported(q, v, v) is decode_tpu.unsupported(q, k, k) is None
