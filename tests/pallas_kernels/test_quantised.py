"""Keys and values in 8 bits: the numbers that come back, and every operation over them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import hopper, quantised
from pallas_kernels.attention_mass import api as mass_api
from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.attention_mass import reference as mass_reference
from pallas_kernels.common import Window, block_of, empty
from pallas_kernels.decode_attention import (
    attend_logits,
    attend_with_logits,
    decode_attention,
    decode_logits,
    shared_decode_attention,
    weighted_values,
)
from pallas_kernels.decode_attention import gpu as decode_gpu
from pallas_kernels.decode_attention import reference as decode_reference
from pallas_kernels.decode_attention import tpu as decode_tpu
from pallas_kernels.dispatch import Kernel, in_8_bits, select
from pallas_kernels.plane import Plane, part_of
from pallas_kernels.prefill_attention import api, cache_attention, reference, xla
from pallas_kernels.quantised import Quantised, stored_as
from pallas_kernels.sparse_decode_attention import Around, Shared, sparse_decode_attention
from pallas_kernels.sparse_decode_attention import api as sparse_api
from pallas_kernels.sparse_decode_attention import gpu as sparse_gpu
from pallas_kernels.sparse_decode_attention import reference as sparse_reference
from pallas_kernels.topk_scores import api as topk_api
from pallas_kernels.topk_scores import reference as topk_reference
from pallas_kernels.topk_scores import topk_scores
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


def test_zeros_and_numbers_that_are_not_finite():
    x = jnp.stack([jnp.zeros(H), jnp.full(H, jnp.nan), draw(H).at[3].set(jnp.inf), draw(H)])
    back = np.asarray(dequantised(quantise(x)))
    assert (back[0] == 0).all()
    # An engine that looks for them in the logits still finds them.
    assert np.isnan(back[1]).all() and np.isnan(back[2]).all() and np.isfinite(back[3]).all()


def test_bytes():
    """8B's shape: keys and values of 131,072 tokens."""
    shape = (1, 8, 131_072, 128)
    kept, whole = jax.eval_shape(
        lambda: (empty(shape, jnp.bfloat16, "int8"), empty(shape, jnp.bfloat16, None))
    )
    assert kept.shape == shape and kept.dtype == jnp.bfloat16
    assert kept.nbytes == whole.size + 2 * whole.size // 128
    assert kept.nbytes / (2 * whole.size) <= 0.53


def test_what_is_stored_again_stays_in_the_dtype_that_reads_give():
    like = empty((1, K, S, H), jnp.bfloat16, "int8")
    kept = stored_as(like, draw(1, K, 5, H))
    assert jax.tree.structure(kept) == jax.tree.structure(like)
    assert dequantised(kept).dtype == jnp.bfloat16
    assert in_8_bits(draw(3), kept) and not in_8_bits(draw(3))


def test_a_block_of_a_layer_of_many():
    layers = [quantise(draw(B, K, S, H, seed=i)) for i in range(3)]
    stacks = jax.tree.map(lambda *parts: jnp.stack(parts), *layers)
    plane = stacks.map(lambda whole: Plane(whole, jnp.int32(1)))
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


@pytest.mark.parametrize("slots", [S, 5000])
@pytest.mark.parametrize("queries", [1, 3])
def test_decode_attention(queries, slots):
    """Also over more than one block, of which the last is moved back."""
    k, v = stored(slots)
    q, lengths = draw(B, queries, K * G, H), jnp.array([slots - 7, 41])
    close(*both(decode_attention, q, k, v, lengths, scale=0.3), rtol=2e-5, atol=2e-5)
    start = jax.device_put(np.asarray(lengths) - queries)
    window = {"window": 20, "query_start": start, "scale": 0.3}
    close(*both(decode_attention, q, k, v, lengths, **window), rtol=2e-5, atol=2e-5)


def test_decode_attention_of_an_empty_row():
    k, v = stored()
    out, lse = decode_attention(draw(B, 1, K * G, H), k, v, jnp.array([0, 5]), scale=0.3)
    assert (np.asarray(out[0]) == 0).all() and np.isneginf(np.asarray(lse[0])).all()
    assert np.isfinite(np.asarray(lse[1])).all()


def test_rows_over_one_cache():
    k, v = (x.map(lambda part: part[:1]) for x in stored())
    q, length = draw(B, 1, K * G, H), jnp.array([41])
    close(*both(shared_decode_attention, q, k, v, length, scale=0.3), rtol=2e-5, atol=2e-5)


def test_logits_and_values_apart():
    k, v = stored()
    q = draw(B, 1, K * G, H)
    found, expected = both(attend_with_logits, q, k, v, LENGTHS, scale=0.3)
    logits = decode_logits(q, k, LENGTHS, scale=0.3)
    held = np.isfinite(np.asarray(expected[2]))
    close(found[:2], expected[:2], rtol=2e-5, atol=2e-5)
    for one in (found[2], logits):
        np.testing.assert_allclose(np.asarray(one)[held], np.asarray(expected[2])[held], atol=2e-5)
    close(attend_logits(logits, v), expected[:2], rtol=2e-5, atol=2e-5)
    weights = jnp.abs(draw(B, K * G, S, seed=5))
    wide = jnp.repeat(dequantised(v), G, axis=1)
    exact = jnp.einsum("BNS,BNSH->BNH", weights, wide)
    np.testing.assert_allclose(weighted_values(weights, v), exact, rtol=2e-5, atol=2e-4)


def test_cache_attention():
    k, v = stored(1300)
    q, lengths = draw(B, 24, K * G, H), jnp.array([1290, 41])
    close(*both(cache_attention, q, k, v, lengths, scale=0.3), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("slots", "block"), [(640, 256), (640, 8192), (330, 100)])
def test_a_kernel_that_reads_floats_is_given_blocks(slots, block):
    """Blocks of 128, of all slots, and of 66 where no tile divides them."""
    k, v = stored(slots)
    k, v = (x.map(lambda part: jnp.concatenate([part, part[:1]])) for x in (k, v))
    q, lengths, sizes = draw(3, 24, K * G, H), jnp.array([slots - 9, 0, 41]), []

    def attend(q, keys, values, held, scale):
        sizes.append(keys.shape[2])
        return xla.cache_attention(q, keys, values, held, scale=scale)

    by_block = functools.partial(api._by_block, attend, scale=0.3, block=block)
    found = compiled(by_block, q, k, v, lengths)
    floats = map(dequantised, (k, v))
    expected = compiled(reference.cache_attention, q, *floats, lengths, scale=0.3)
    assert set(sizes) == {{256: 128, 8192: 640, 100: 66}[block]}
    close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("floats", ["keys", "values"])
def test_a_kernel_that_reads_floats_beside_8_bits(floats):
    """Methods that rotate their keys as they read hand floats beside values in 8 bits."""
    k, v = stored(640)
    q, lengths = draw(B, 24, K * G, H), jnp.array([600, 41])
    k, v = (dequantised(k), v) if floats == "keys" else (k, dequantised(v))

    def attend(q, keys, values, held, scale):
        assert isinstance(keys, jax.Array) and isinstance(values, jax.Array)
        return xla.cache_attention(q, keys, values, held, scale=scale)

    by_block = functools.partial(api._by_block, attend, scale=0.3, block=256)
    found = compiled(by_block, q, k, v, lengths)
    floats = map(exactly, (k, v))
    expected = compiled(reference.cache_attention, q, *floats, lengths, scale=0.3)
    close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("queries", [1, 9])
@pytest.mark.parametrize("squares", [False, True])
def test_attention_mass(queries, squares):
    k, _ = stored()
    q = draw(B, queries, K * G, H)
    lse = 4.0 + np.asarray(draw(B, queries, K * G, seed=4))
    how = {"scale": 0.3, "squares": squares}
    close(*both(attention_mass, q, k, lse, LENGTHS, **how), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("squares", [False, True])
def test_a_kernel_of_mass_that_reads_floats_is_given_blocks(squares):
    k, _ = stored(640)
    q, lengths = draw(B, 9, K * G, H), jnp.array([600, 41])
    lse = 4.0 + np.asarray(draw(B, 9, K * G, seed=4))
    given = {"scale": 0.3, "squares": squares}
    expected = compiled(attention_mass, q, k, lse, lengths, **given, implementation="reference")
    how = mass_reference.Reduction(**given, valid=jnp.full(B, 9))
    by_block = functools.partial(mass_api._by_block, mass_reference.attention_mass)
    masses, squared = compiled(by_block, q, k, lse, lengths, how=how, block=256)
    found = (masses, squared) if squares else masses
    close(found, expected, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("tile_best", [None, 32])
def test_topk_scores(tile_best):
    k, _ = stored(2500)
    q, start, stop = draw(B, 3, K * G, H), jnp.array([3, 0]), jnp.array([2490, 50])
    found, expected = both(topk_scores, q, k, start, stop, count=4, tile_best=tile_best)
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5, atol=2e-5)


def test_a_kernel_of_the_best_keys_that_reads_floats_is_given_blocks():
    """Ties, of repeated keys, go to the lowest slot whatever block they lie in."""
    k, _ = stored(320)
    k = k.map(lambda part: jnp.concatenate([part, part], axis=2))
    q, start, stop = draw(B, 3, K * G, H), jnp.array([3, 0]), jnp.array([630, 50])
    tolerance = jnp.full(q.shape[:3], 1e-4)
    given = (q, k, start, stop)
    reference = functools.partial(topk_scores, tolerance=tolerance, implementation="reference")
    expected = compiled(reference, *given, count=4)
    by_block = functools.partial(topk_api._by_block, topk_reference.topk_scores)
    found = compiled(by_block, *given, tolerance, count=4, block=256)
    np.testing.assert_array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("lists", [K, K * G])
def test_sparse_decode_attention_of_rows_that_share_slots(lists):
    k, v = stored()
    shared = Shared(*(x.map(lambda y: y[:1]) for x in (k, v)), jnp.array([200]))
    own = [x.map(lambda y: y[:, :, 200:]) for x in (k, v)]
    whole = [
        x.map(lambda y: jnp.concatenate([jnp.repeat(y[:1, :, :200], B, 0), y[:, :, 200:]], 2))
        for x in (k, v)
    ]
    q, start, stop = draw(B, 1, K * G, H), jnp.array([3, 3]), jnp.array([290, 210])
    pages = jnp.tile(jnp.array([0, 3, 20, 28, -1]), (B, lists, 1))
    how = {"page_size": 10, "scale": 0.3}
    args = pages, start, stop
    found = compiled(sparse_decode_attention, q, *own, *args, **how, shared=shared)
    expected = compiled(sparse_decode_attention, q, *whole, *args, **how)
    close(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("prior", [False, True])
@pytest.mark.parametrize("lists", [K, K * G, "flat"])
def test_sparse_decode_attention(lists, prior):
    k, v = stored()
    q, start, stop = draw(B, 1, K * G, H), jnp.array([3, 0]), LENGTHS
    how = {"page_size": 10, "scale": 0.3}
    if prior:
        how |= {"prior_query": draw(B, 1, K * G, H, seed=7)}
    if lists == "flat":
        pages = jnp.array([[0, 7, 3, 7, -1], [1, 2, 4, 0, 3]])
        how |= {"heads": jnp.array([[0, 0, 1, 1, 1], [1, 1, 0, 0, -1]])}
    else:
        pages = jnp.tile(jnp.array([0, 3, 29, -1]), (B, lists, 1))
    found, expected = both(sparse_decode_attention, q, k, v, pages, start, stop, **how)
    close(found, expected, rtol=2e-5, atol=2e-5)


def test_a_kernel_that_reads_no_8_bits_is_refused_by_name_and_passed_over():
    def run(*args):
        return "kernel"

    kernels = {
        "xla": lambda *args: "xla",
        "cpu": Kernel(run, lambda: None),
    }
    assert select("op", None, "shapes", **kernels)() == "kernel"
    assert select("op", None, "shapes", eight_bits=True, **kernels)() == "xla"
    with pytest.raises(NotImplementedError, match="the kernel reads no keys and values in int8"):
        select("op", "cpu", "shapes", eight_bits=True, **kernels)
    kernels["cpu"] = Kernel(run, lambda: None, eight_bits=True)
    assert select("op", None, "shapes", eight_bits=True, **kernels)() == "kernel"


def test_heads_that_do_not_fit_are_refused():
    k, v = stored()
    with pytest.raises(ValueError, match="does not fit"):
        decode_attention(draw(B, 1, K * G, H, dtype=jnp.bfloat16), k, v, LENGTHS, scale=0.3)
    assert isinstance(k, Quantised)


@pytest.mark.parametrize("plane", [False, True])
@pytest.mark.parametrize(
    ("width", "queries", "window"), [(128, 1, None), (64, 3, None), (64, 2, 40)]
)
@pytest.mark.quick("1")
def test_the_tpu_kernel_reads_int8(width, queries, window, plane):
    """In its interpreter, whose memory begins as NaN; a block reaches beyond the slots."""
    slots, lengths = 320, np.array([300, 0, 130], np.int32)
    k, v = (quantise(draw(3, K, slots, width, seed=seed)) for seed in (1, 2))
    q = draw(3, queries, K * G, width)
    start = jax.device_put(np.maximum(lengths - queries, 0))
    how = {"scale": 0.3, "window": Window.of(window, start, 0)}
    floats = map(dequantised, (k, v))
    expected = compiled(decode_reference.decode_attention, q, *floats, lengths, **how)
    if plane:
        k, v = (
            x.map(lambda part: Plane(jnp.stack([part * 0, part, part * 0]), jnp.int32(1)))
            for x in (k, v)
        )
    how |= {"block": 128, "interpret": pltpu.InterpretParams()}
    run = jax.jit(functools.partial(decode_tpu.decode_attention, **how))
    close(run(q, k, v, lengths), expected, rtol=2e-5, atol=2e-5)


def compiled(function, *args, interpret=None, **how):
    """Results in numpy of one program, where operations one by one would be many."""
    if interpret is not None:
        how["interpret"] = interpret
    return jax.device_get(jax.jit(functools.partial(function, **how))(*args))


@functools.cache
def gpu_stored(shape, forms):
    """Keys and values in bfloat16 (None) or in 8 bits, and in float32."""
    found = [draw(*shape, seed=seed, dtype=jnp.bfloat16) for seed in (1, 2)]
    found = [x if form is None else quantise(x) for x, form in zip(found, forms, strict=True)]
    return found, [exactly(x) for x in found]


def exactly(x):
    if isinstance(x, Quantised):
        return dequantised(dataclasses.replace(x, dtype=jnp.dtype(jnp.float32)))
    return np.asarray(x, np.float32)


INTERPRETED = plgpu.InterpretGPUParams(inline_mgpu="ignore")
EIGHT_BITS = ("int8", "int8")
# Methods that rotate keys as they read hand floats beside values in 8 bits.
MIXED = [(None, "int8"), ("int8", None)]
FORMS = [EIGHT_BITS, *MIXED]
GPU_CASES = [
    *((128, 1, None, False, forms) for forms in FORMS),
    *((64, 3, 40, False, forms) for forms in (EIGHT_BITS, MIXED[0])),
    *((64, 1, None, True, forms) for forms in (EIGHT_BITS, MIXED[0])),
]


def check_gpu_decode(width, queries, window, logits, forms, *, slots, group=G, interpret=None):
    """A full row, an empty one and parts of a block."""
    lengths = np.array([slots, 0, 129, slots - 1], np.int32)
    (k, v), exact = gpu_stored((len(lengths), K, slots, width), forms)
    q = draw(len(lengths), queries, K * group, width, dtype=jnp.bfloat16)
    wide, start = exactly(q), jax.device_put(np.maximum(lengths - queries, 0))
    how = {"scale": 0.1} | ({} if logits else {"window": Window.of(window, start, 0)})
    with jax.default_matmul_precision("highest"):
        expected = compiled(decode_reference.decode_attention, wide, *exact, lengths, **how)
    kernel = decode_gpu.attend_with_logits if logits else decode_gpu.decode_attention
    found = compiled(kernel, q, k, v, lengths, interpret=interpret, **how)
    np.testing.assert_allclose(exactly(found[0]), expected[0], atol=1e-2)
    # The log-sum-exp is as exact as the scores: products of bfloat16 and 8 bits are exact.
    np.testing.assert_allclose(found[1], expected[1], atol=1e-4)
    if logits:
        with jax.default_matmul_precision("highest"):
            every = compiled(decode_reference.decode_logits, wide, exact[0], lengths, scale=0.1)
        held = np.isfinite(every)
        np.testing.assert_allclose(found[2][held], every[held], atol=1e-4)


@pytest.mark.parametrize(("width", "queries", "window", "logits", "forms"), GPU_CASES)
@pytest.mark.quick("forms0", "forms1")
def test_the_gpu_kernel_reads_8_bits(monkeypatch, width, queries, window, logits, forms):
    """In the interpreter, with three workers."""
    monkeypatch.setattr(hopper, "processors", lambda: 3)
    check_gpu_decode(width, queries, window, logits, forms, slots=256, interpret=INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("slots", [256, 8192])
@pytest.mark.parametrize(
    ("width", "queries", "window", "logits", "forms"),
    [*GPU_CASES, *((128, 16, None, False, forms) for forms in FORMS)],
)
def test_8_bits_on_a_gpu(width, queries, window, logits, forms, slots, group):
    check_gpu_decode(width, queries, window, logits, forms, slots=slots, group=group)


@pytest.mark.parametrize(
    ("lists", "forms"),
    [*((lists, EIGHT_BITS) for lists in (K, K * G, "flat")), (K, MIXED[0])],
)
@pytest.mark.quick("2-forms0")
def test_the_gpu_kernel_reads_listed_pages_of_8_bits(monkeypatch, lists, forms):
    """In the interpreter: also with a prior, entries of -1, and a list in two pieces."""
    monkeypatch.setattr(hopper, "processors", lambda: 8)
    slots, width, page = 512, 64, 16
    start, stop = np.array([3, 0], np.int32), np.array([500, 130], np.int32)
    (k, v), exact = gpu_stored((B, K, slots, width), forms)
    q, prior = (draw(B, 1, K * G, width, seed=seed, dtype=jnp.bfloat16) for seed in (3, 4))
    how = {"page_size": page, "scale": 0.1}
    if lists == "flat":
        pages = jnp.array([[0, 7, 3, 7, -1], [1, 2, 4, 0, 3]])
        how |= {"heads": jnp.array([[0, 0, 1, 1, 1], [1, 1, 0, 0, -1]])}
    else:
        pages = np.array([[0, 31, 5, -1, 7, 9, 20, 11, 3], [1, 2, 8, 0, 3, -1, -1, 4, -1]])
        pages = np.repeat(pages[:, None], lists, axis=1).astype(np.int32)
    expected = compiled(
        sparse_reference.sparse_decode_attention,
        *(exactly(q), *exact, pages, start, stop),
        prior_query=jax.device_put(exactly(prior)),
        **how,
    )
    kernel = sparse_gpu.sparse_decode_attention
    args = q, k, v, pages, start, stop
    found = compiled(kernel, *args, prior_query=prior, interpret=INTERPRETED, **how)
    for which in (0, 2):
        np.testing.assert_allclose(exactly(found[which]), expected[which], atol=1e-2)
        np.testing.assert_allclose(found[which + 1], expected[which + 1], atol=1e-4)


@pytest.mark.parametrize("split", [0, 256])
@pytest.mark.parametrize("pieces", [1, 8])
@pytest.mark.quick("1-256")
def test_the_gpu_kernel_reads_int8_around_listed_pages(monkeypatch, pieces, split):
    """The first and last slots in the same launch, with scales in the order of the pages.

    With a split, of rows that share the slots below it.
    """
    monkeypatch.setattr(hopper, "processors", lambda: B * K * pieces)
    slots, width, page = 512, 64, 16
    start, stop, length = np.array([[4, 0], [442, 130], [506, 131]], np.int32)
    (k, v), exact = gpu_stored((B, K, slots, width), EIGHT_BITS)
    share = jax.jit(lambda x: x.at[:, :, :split].set(x[:1, :, :split]))
    k, v, *exact = (jax.tree.map(share, x) for x in (k, v, *exact))
    q = draw(B, 1, K * G, width, seed=3, dtype=jnp.bfloat16)
    pages = np.array([[0, 27, 5, -1, 7, 9, 20, 11, 3], [1, 2, 8, 0, 3, -1, -1, 4, -1]], np.int32)
    slot = np.arange(slots, dtype=np.int32)
    seen = np.any(pages[:, :, None] == slot // page, axis=1) & (slot >= start[:, None])
    seen = (seen & (slot < stop[:, None])) | (slot < start[:, None])
    seen |= (slot >= stop[:, None]) & (slot < length[:, None])
    each = np.repeat(np.where(seen, slot, -1)[:, None], K, axis=1)
    pages = np.repeat(pages[:, None], K, axis=1)
    wide = exactly(q), *exact, each, np.zeros_like(start), np.full_like(stop, slots)
    how = {"scale": 0.1}
    expected = compiled(sparse_reference.sparse_decode_attention, *wide, page_size=1, **how)
    if split:
        # Garbage lies behind what is shared.
        behind = jax.jit(lambda x: jnp.flip(x[:1], 2).at[:, :, :split].set(x[:1, :, :split]))
        whole = [jax.tree.map(behind, x) for x in (k, v)]
        how["shared"] = Shared(*whole, jax.device_put(np.array([split], np.int32)))
        k, v = (x.map(lambda y: y[:, :, split:]) for x in (k, v))
    how |= {"page_size": page, "around": Around(jax.device_put(length), 5, 64)}
    kernel = functools.partial(sparse_gpu.sparse_decode_attention, interpret=INTERPRETED, **how)
    found = compiled(kernel, q, k, v, pages, start, stop)
    np.testing.assert_allclose(exactly(found[0]), expected[0], atol=1e-2)
    np.testing.assert_allclose(found[1], expected[1], atol=1e-4)


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


# Every form with the shape that takes the most shared memory, and every shape with some form; the
# interpreter's tests read all of them.
LOWERED = [("decode_attention", 128, 16, forms) for forms in FORMS]
LOWERED += [
    ("decode_attention", 64, 1, EIGHT_BITS),
    ("decode_attention", 128, 1, MIXED[0]),
    ("attend_with_logits", 128, 1, MIXED[1]),
]


@pytest.mark.parametrize(("rows", "forms"), [*((12, forms) for forms in FORMS), (1, EIGHT_BITS)])
@pytest.mark.quick("12-forms0")
def test_the_gpu_kernel_of_listed_pages_lowers_and_fits_shared_memory(forms, rows):
    q = jax.ShapeDtypeStruct((4, 1, 2 * rows, 128), jnp.bfloat16)
    shape = 4, 2, 4096, 128
    k, v = (jax.eval_shape(lambda form=form: empty(shape, jnp.bfloat16, form)) for form in forms)
    pages, bound = (jax.ShapeDtypeStruct(x, jnp.int32) for x in ((4, 2, 256), (4,)))
    how = {"page_size": 16, "scale": 0.1}
    run = jax.jit(functools.partial(sparse_gpu.sparse_decode_attention, **how))
    text = run.trace(q, k, v, pages, bound, bound).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text


@pytest.mark.parametrize(("name", "width", "queries", "forms"), LOWERED)
@pytest.mark.quick("forms0", "forms4", "forms5")
def test_the_gpu_kernel_of_8_bits_lowers_and_fits_shared_memory(name, width, queries, forms):
    """For the most rows that it takes."""
    rows = decode_gpu._MAX_BATCH
    q = jax.ShapeDtypeStruct((rows, queries, 32, width), jnp.bfloat16)
    shape = rows, 8, 1024, width
    k, v = (jax.eval_shape(lambda form=form: empty(shape, jnp.bfloat16, form)) for form in forms)
    lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
    run = jax.jit(functools.partial(getattr(decode_gpu, name), scale=0.1))
    text = run.trace(q, k, v, lengths).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text


def test_what_the_gpu_kernel_refuses_of_8_bits():
    def reason(rows, slots, form="int8"):
        q = jnp.zeros((rows, 1, 4, 64), jnp.bfloat16)
        k, v = (empty((rows, 1, slots, 64), jnp.bfloat16, each) for each in (None, form))
        return decode_gpu.unsupported(q, k, v)

    assert reason(1, 1000) == "1000 slots of int8 are not whole blocks of 128"
    assert "whole blocks" not in str(reason(1, 1000, None))
    assert reason(241, 1024) == "241 rows, at most 240"


def test_the_tpu_kernel_leaves_floats_beside_8_bits_to_others():
    q = jnp.zeros((B, 1, K * G, 128), jnp.bfloat16)
    k, v = (empty((B, K, 256, 128), jnp.bfloat16, form) for form in (None, "int8"))
    assert "reads both alike" in str(decode_tpu.unsupported(q, k, v))
    assert decode_tpu.unsupported(q, v, v) is decode_tpu.unsupported(q, k, k) is None
