"""The Mosaic TPU kernels in their interpreter on a CPU, against the definitions.

The interpreter's memory begins as NaN, so whatever a kernel reads before writing shows. The checks
of `bench tpu-check` read a layer's part of a stack too.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention_mass import reference as mass_reference
from pallas_kernels.attention_mass import tpu as mass_tpu
from pallas_kernels.attention_mass.reference import Reduction
from pallas_kernels.common import Window
from pallas_kernels.decode_attention import reference as decode_reference
from pallas_kernels.decode_attention import tpu as decode_tpu
from pallas_kernels.quantised import dequantised, empty, quantise
from pallas_kernels.sparse_decode_attention import Pages
from pallas_kernels.sparse_decode_attention import reference as sparse_reference
from pallas_kernels.sparse_decode_attention import tpu as sparse_tpu
from pallas_kernels.topk_scores import reference as topk_reference
from pallas_kernels.topk_scores import tpu as topk_tpu
from pallas_kernels.tpu_common import key_block, unsupported_keys
from tests.drawing import computed

INTERPRET = pltpu.InterpretParams()
BLOCK = 128
# Rows that end beside a block's edges, an empty one and one that fills the cache.
LENGTHS = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 300)


def _random(dtype, *shapes):
    rng = np.random.default_rng(7)
    return [rng.normal(size=shape).astype(jnp.dtype(dtype)) for shape in shapes]


def _spoil(x_BKSH, lengths_B):
    beyond = (np.arange(x_BKSH.shape[2]) >= lengths_B[:, None])[:, None, :, None]
    return _nan_where(beyond, x_BKSH)


def _nan_where(mask, x):
    return np.where(mask, x.dtype.type(np.nan), x)


_quantised = jax.jit(quantise)


def _assert_attention(result, expected, dtype):
    """Outputs are means of unit-variance values."""
    (out, lse), (expected_out, expected_lse) = result, expected
    assert out.dtype == dtype and lse.dtype == jnp.float32
    loose = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(out.astype("float32"), expected_out.astype("float32"), atol=loose)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-5)


def _table(names, cases, *quick):
    """The cases by their ids, of which only these are quick."""
    rows = [
        pytest.param(*case, id=label, marks=() if label in quick else pytest.mark.slow)
        for label, case in cases.items()
    ]
    return pytest.mark.parametrize(names, rows)


@_table(
    "queries, kv_heads, groups, head_dim, dtype",
    {
        "narrow-heads": (3, 2, 3, 64, "bfloat16"),
        "wide-heads": (16, 1, 4, 256, "float32"),
        "int8": (1, 2, 2, 128, "int8"),
        "int8-narrow-heads": (3, 2, 2, 64, "int8"),
    },
    *("narrow-heads", "int8"),
)
def test_decode_attention(queries, kv_heads, groups, head_dim, dtype):
    """Blocks that do not divide the cache; nothing beyond a row's length is seen, NaN included.

    Other groups and scores are those of `test_dense_attention.py`.
    """
    store = _quantised if dtype == "int8" else np.asarray
    dtype = "float32" if dtype == "int8" else dtype
    lengths = np.array(LENGTHS, np.int32)
    cache = len(LENGTHS), kv_heads, 300, head_dim
    q, k, v = _random(dtype, (len(LENGTHS), queries, kv_heads * groups, head_dim), cache, cache)
    scale = head_dim**-0.5
    floats = (dequantised(store(x)) for x in (k, v))
    expected = computed(decode_reference.decode_attention, q, *floats, lengths, scale=scale)
    run = partial(decode_tpu.decode_attention, scale=scale, block=BLOCK, interpret=INTERPRET)
    k, v = (store(_spoil(x, lengths)) for x in (k, v))
    result = computed(run, q, k, v, lengths)
    assert not np.any(result[0][0]) and np.all(np.isneginf(result[1][0]))
    _assert_attention(result, expected, dtype)


@_table(
    "head_dim, store",
    {"64": (64, np.asarray), "128": (128, np.asarray), "int8": (64, _quantised)},
    "64",
)
def test_windowed_decode_attention_reads_only_what_the_window_reaches(head_dim, store):
    lengths = np.array([0, 1, 130, 400, 500, 512], np.int32)
    cache = 6, 2, 512, head_dim
    q, k, v = _random("float32", (6, 2, 6, head_dim), cache, cache)
    # The last row's queries stand beyond the reach of every slot.
    behind = np.array([0, 0, 3, 10, 99, 101], np.int32)
    start = jax.device_put(40 + lengths + behind)
    window = Window(size=100, slot_start=40, query_start=start)
    options = dict(scale=0.3, window=window)
    floats = (dequantised(store(x)) for x in (k, v))
    expected = computed(decode_reference.decode_attention, q, *floats, lengths, **options)
    assert np.all(np.isneginf(expected[1][5]))
    k, v = (_spoil(x, lengths) for x in (k, v))
    unreached = np.arange(512) < (lengths + behind - 99)[:, None] // BLOCK * BLOCK
    k, v = (store(_nan_where(unreached[:, None, :, None], x)) for x in (k, v))
    run = partial(decode_tpu.decode_attention, block=BLOCK, interpret=INTERPRET, **options)
    _assert_attention(jax.jit(run)(q, k, v, lengths), expected, "float32")


@_table(
    "queries, kv_heads, groups, head_dim, dtype, count",
    {
        "decode": (1, 2, 8, 128, "bfloat16", 4),
        # 150 rows in two tiles, the second one reaching beyond them.
        "narrow-heads-two-tiles": (50, 1, 3, 64, "float32", 10),
        "mha-one-best": (3, 2, 1, 128, "float32", 1),
        "sixteen-best": (3, 1, 4, 64, "bfloat16", 16),
    },
    "decode",
)
def test_topk_scores(queries, kv_heads, groups, head_dim, dtype, count):
    """Scores are small integers, many of them equal: every slot has to be the definition's.

    And where noise, exact in 16 bits, parts those by less than the tolerance.
    """
    starts = jnp.array([0, 3, BLOCK - 1, BLOCK, BLOCK + 1, 298, 50], jnp.int32)
    stops = jnp.array([300, 3, BLOCK + 1, BLOCK + 1, 2 * BLOCK, 300, 49], jnp.int32)
    rng = np.random.default_rng(3)
    q = rng.integers(-2, 3, (7, queries, kv_heads * groups, head_dim)).astype(np.float32)
    k = rng.integers(-2, 3, (7, kv_heads, 300, head_dim)).astype(np.float32)
    k[1:, ..., 3:] = 0  # three numbers count: the lists' ends are full of ties
    q[0, 0, 0] = 0  # all scores equal, and their zeros not negative
    k[0, 0, :5, 0], k[0, 0, 7] = np.nan, -np.inf
    k[:2, :, 20:40] = 3  # the best of a block stand together
    q[..., -1] = 0
    noise = rng.integers(-4, 5, k.shape[:3]) / 256
    noisy_q, noisy_k = (
        np.concatenate([x[..., :-1], y[..., None]], axis=-1)
        for x, y in ((q, np.ones(q.shape[:3])), (k, noise))
    )
    q, k = jnp.asarray(q, dtype), jnp.asarray(k, dtype)
    reference = jax.jit(partial(topk_reference.topk_scores, count=count))
    exact, tolerance = jnp.zeros(q.shape[:3]), jnp.full(q.shape[:3], 1 / 16)
    expected = reference(q, k, (starts, stops), exact)
    outside = (jnp.arange(300) < starts[:, None]) | (jnp.arange(300) >= stops[:, None])
    blocks = BLOCK, BLOCK
    run = jax.jit(partial(topk_tpu.topk_scores, count=count, blocks=blocks, interpret=INTERPRET))

    def spoilt(k):
        return jnp.where(outside[:, None, :, None], jnp.nan, k)

    values, indices = run(q, spoilt(k), (starts, stops), exact)
    np.testing.assert_array_equal(indices, expected[1])
    np.testing.assert_array_equal(values, expected[0])
    noisy = [jnp.asarray(x, dtype) for x in (noisy_q, noisy_k)]
    noisy_values, indices = run(noisy[0], spoilt(noisy[1]), (starts, stops), tolerance)
    np.testing.assert_array_equal(indices, expected[1])
    np.testing.assert_array_equal(noisy_values, reference(*noisy, (starts, stops), tolerance)[0])
    assert not np.signbit(values[0, 0, 0]).any()


def test_two_of_the_best_in_one_class():
    """Keys 5 and 517 share one of the 512 classes of a block, of which only the best is known."""
    planted = [
        ({5: 1, 517: 1, 700: 1}, [5, 517]),  # the second comes before what is listed
        ({5: 1, 517: 2, 700: 1}, [517, 5]),
        ({5: 3, 517: 2, 700: 1}, [5, 517]),
        ({5: 1, 517: 1, 400: 1}, [5, 400]),
    ]
    k = np.zeros((len(planted), 1, 1024, 64), np.float32)
    for row, (scores, _) in zip(k, planted, strict=True):
        row[0, list(scores), 0] = list(scores.values())
    q = jnp.ones((len(planted), 1, 1, 64))
    start, stop = jnp.zeros(len(planted), jnp.int32), jnp.full(len(planted), 1024, jnp.int32)
    run = partial(topk_tpu.topk_scores, count=2, interpret=INTERPRET)
    _, indices = jax.jit(run)(q, jnp.asarray(k), (start, stop), jnp.zeros(q.shape[:3]))
    np.testing.assert_array_equal(indices[:, 0, 0], [best for _, best in planted])


@_table(
    "queries, kv_heads, groups, head_dim, dtype, options",
    {
        "decode": (1, 2, 8, 128, "bfloat16", {}),
        "causal-max": (40, 2, 3, 64, "float32", {"causal": True, "over_group": "max"}),
        "squares": (40, 1, 2, 128, "float32", {"squares": True}),
        "squares-causal": (17, 1, 4, 128, "bfloat16", {"squares": True, "causal": True}),
        "first": (33, 1, 4, 64, "float32", {"over_group": "first"}),
    },
    "causal-max",
)
def test_attention_mass(queries, kv_heads, groups, head_dim, dtype, options):
    lengths = np.array((*LENGTHS, 300), np.int32)
    valid = np.array([queries, queries, queries, queries - 1, 1, queries, 0], np.int32)
    shape = 7, queries, kv_heads * groups
    q, k, lse = _random(dtype, (*shape, head_dim), (7, kv_heads, 300, head_dim), shape)
    lse = lse.astype("float32")
    lse[5, 0, 0] = -np.inf
    options = dict(options)
    # Rows that begin before, at and behind a block's edge, and one whose queries see every slot.
    start = jnp.array([0, 0, 100, 110, 128, 200, 300], jnp.int32)
    options["causal_start"] = start if options.pop("causal", False) else None
    options |= dict(scale=head_dim**-0.5, valid=jax.device_put(valid))
    how = Reduction(**options)
    expected = computed(mass_reference.attention_mass, q, k, lse, lengths, how=how)
    padding = np.arange(queries) >= valid[:, None]
    q, lse = _nan_where(padding[..., None, None], q), _nan_where(padding[..., None], lse)
    run = partial(mass_tpu.attention_mass, how=how, blocks=(32, 16, BLOCK), interpret=INTERPRET)
    result = jax.jit(run)(q, _spoil(k, lengths), lse, lengths)
    for found, wanted in zip(result, expected, strict=True):
        assert (found is None) == (wanted is None)
        if wanted is not None:
            np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=1e-6)


@_table(
    "lists, kv_heads, groups, page_size, dtype, form",
    {
        "by-kv-head": (2, 2, 3, 16, "bfloat16", ""),
        "by-query-head-with-a-prior": (4, 2, 2, 8, "float32", "prior"),
        "flat-with-a-prior": (2, 2, 3, 8, "float32", "flat, prior"),
        "mqa-large-pages": (1, 1, 8, 64, "float32", ""),
        "flat": (2, 2, 1, 16, "bfloat16", "flat"),
    },
    "flat-with-a-prior",
)
def test_sparse_decode_attention(lists, kv_heads, groups, page_size, dtype, form):
    slots = 10 * page_size
    cache = 5, kv_heads, slots, 128
    q, k, v = _random(dtype, (5, 1, kv_heads * groups, 128), cache, cache)
    rng = np.random.default_rng(1)
    pages = np.stack([rng.permutation(10)[:5] for _ in range(5 * lists)]).reshape(5, lists, 5)
    # Row 0 has lists of 0, 1, ... pages; row 1 a hole, and an entry that is no page of the cache.
    pages[0] = np.where(np.arange(5) < np.arange(lists)[:, None], pages[0], -1)
    pages[1, :, 1:3] = -1, 10
    pages[2, 0] = 4, -1, 0, 2, 1  # page 0, cut by the row's stop, stands in for the -1
    starts = np.array([0, page_size, -2 * page_size, page_size + 1, 40], np.int32)
    stops = np.array([slots + 3, slots - page_size, 5, slots - 1, 40], np.int32)
    listed, heads = pages.astype(np.int32), None
    options: dict[str, Any] = dict(scale=128**-0.5)
    if "flat" in form:
        order = rng.permutation(lists * 5)
        heads = np.broadcast_to(np.arange(lists)[:, None], pages.shape).reshape(5, -1)[:, order]
        heads = jax.device_put(heads.astype(np.int32))
        listed = listed.reshape(5, -1)[:, order]
    if "prior" in form:
        options["prior"] = jax.device_put(np.flip(q, axis=2).copy())
    chosen = Pages(*jax.device_put((listed, starts, stops)), page_size, heads)
    expected = computed(sparse_reference.sparse_decode_attention, q, k, v, chosen, **options)
    outside = (np.arange(slots) < starts[:, None]) | (np.arange(slots) >= stops[:, None])
    k, v = (_nan_where(outside[:, None, :, None], x) for x in (k, v))
    run = partial(sparse_tpu.sparse_decode_attention, block=2, interpret=INTERPRET, **options)
    result = computed(run, q, k, v, chosen)
    assert len(result) == len(expected) == (4 if "prior" in form else 2)
    for out, lse, *of in zip(result[::2], result[1::2], expected[::2], expected[1::2], strict=True):
        assert not np.any(out[4]) and np.all(np.isneginf(lse[4]))
        assert np.all(np.isneginf(lse[0, 0, : kv_heads * groups // lists]))
        _assert_attention((out, lse), of, dtype)
    assert [str(x.dtype) for x in result] == [dtype, *["float32"] * (len(result) - 1)]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"head_dim": 64}, "head dim 64: slots lie along the lanes"),
        ({"page_size": 8}, "pages of 8 of 256 slots are not whole tiles of 16"),
        ({"slots": 250}, "of 250 slots"),
        ({"slots": 2**15, "page_size": 2**15}, "a page of 32768 slots do not fit vector memory"),
        ({"pages": 2**18}, "at most 131072 fit scalar memory"),
        ({"dtype": "float16"}, "bfloat16 and float32, not float16"),
        ({"form": "int8"}, "reads no keys and values in int8"),
    ],
)
def test_reasons_against_the_sparse_kernel(changes, reason):
    case = dict(head_dim=128, page_size=16, slots=256, pages=4, dtype="bfloat16", form=None)
    case |= changes
    q = jax.ShapeDtypeStruct((1, 1, 2, case["head_dim"]), case["dtype"])
    shape = 1, 2, case["slots"], case["head_dim"]
    k = jax.eval_shape(lambda: empty(shape, case["dtype"], case["form"]))
    pages = jax.ShapeDtypeStruct((1, 2, case["pages"] // 2), jnp.int32)
    found: list[str | None] = []
    unsupported = partial(sparse_tpu.unsupported, page_size=case["page_size"])
    jax.eval_shape(lambda *args: found.append(unsupported(*args)), q, k, k, pages)
    assert found == [None] if reason is None else reason in str(found[0])


@pytest.mark.parametrize(
    ("head_dim", "dtype", "reason"),
    [
        *((128, "bfloat16", "None"), (64, "float32", "None")),
        (32, "float32", "head dim 32 is not one of"),
        (128, "float16", "bfloat16 and float32, not float16"),
    ],
)
def test_reasons_against_keys(head_dim, dtype, reason):
    q = jnp.ones((1, 1, 1, head_dim), dtype)
    assert reason in str(unsupported_keys(q))


@pytest.mark.parametrize("slots", [1, 128, 129, 4096, 4097, 5000, 131072])
def test_blocks_of_keys_cover_the_cache_evenly(slots):
    """Whole vectors of slots, and no block that the cache could do without."""
    for most in (1, 128, 1000, 4096):
        block = key_block(slots, most)
        assert block % 128 == 0 and block <= max(128, most)
        assert (-(-slots // block) - 1) * block < slots
        assert -(-slots // block) == -(-slots // max(128, most // 128 * 128))
