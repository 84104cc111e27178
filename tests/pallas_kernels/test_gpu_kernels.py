"""The Mosaic GPU kernels against the definitions: small cases interpreted on a CPU, large ones on a
Hopper GPU."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import hopper, hopper_best
from pallas_kernels.attention_mass import gpu as mass_gpu
from pallas_kernels.attention_mass import reference as mass_reference
from pallas_kernels.attention_mass.reference import Reduction
from pallas_kernels.common import Window, merge
from pallas_kernels.decode_attention import gpu as decode_gpu
from pallas_kernels.decode_attention import gpu_plan
from pallas_kernels.decode_attention import reference as decode_reference
from pallas_kernels.page_scores import Best, Digests, SharedPages
from pallas_kernels.quantised import Quantised, dequantised, quantise
from pallas_kernels.select_large_k import gpu as select_gpu
from pallas_kernels.select_large_k import reference as select_reference
from pallas_kernels.select_pages import gpu as pages_gpu
from pallas_kernels.select_pages import reference as pages_reference
from pallas_kernels.select_pages import shared_gpu as shared_pages_gpu
from pallas_kernels.sparse_decode_attention import gpu as sparse_gpu
from pallas_kernels.sparse_decode_attention import reference as sparse_reference
from pallas_kernels.sparse_decode_attention.lists import Around, Pages, Shared
from pallas_kernels.topk_scores import gpu as topk_gpu
from pallas_kernels.topk_scores import gpu_ties, tied_top_k
from pallas_kernels.topk_scores import merge as merge_module
from pallas_kernels.topk_scores import reference as topk_reference
from pallas_kernels.voted_slots import gpu as voted_gpu
from pallas_kernels.voted_slots import reference as voted_reference
from tests.drawing import computed, normal
from tests.pallas_kernels.test_voted_slots import voted_slots_of

# The interpreter runs blocks in step: fences say nothing to it.
INTERPRETED = plgpu.InterpretGPUParams(inline_mgpu="ignore")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table: shapes, dtype and the operation's own options."""

    rows: int = 3
    queries: int = 1
    kv_heads: int = 2
    group: int = 2
    slots: int = 256
    head_dim: int = 64
    dtype: str = "bfloat16"
    # Of keys and of values: "int8", or None where they are of the dtype.
    forms: tuple[str | None, str | None] = (None, None)
    workers: int = 3
    options: tuple[tuple[str, Any], ...] = ()

    def arrays(self):
        """Queries, keys and values, of numpy: what is made of them is no program."""
        queries = self.rows, self.queries, self.kv_heads * self.group, self.head_dim
        cache = self.rows, self.kv_heads, self.slots, self.head_dim
        return [
            np.array(normal(*shape, seed=5 + i, dtype=self.dtype))
            for i, shape in enumerate((queries, cache, cache))
        ]

    def stored(self, keys, values):
        pairs = zip((keys, values), self.forms, strict=True)
        return [x if form is None else _quantise(x) for x, form in pairs]

    def lengths(self):
        """A full row, an empty one and what ends beside the kernels' blocks."""
        return np.array([self.slots, 0, 129, 1, 127, 128, 64, 65][: self.rows], np.int32)


_quantise = jax.jit(quantise)
_dequantised = jax.jit(lambda x: dequantised(replace(x, dtype=jnp.dtype(jnp.float32))))


def _exact(*arrays):
    """In float32, what is stored in 8 bits too."""
    whole = (_dequantised(x) if isinstance(x, Quantised) else x for x in arrays)
    return [np.asarray(x, np.float32) for x in whole]


def _ints(values, rows):
    return np.resize(values, rows).astype(np.int32)


def _spoiled(lengths, *arrays):
    """With garbage beyond the rows' lengths."""
    beyond = (np.arange(arrays[0].shape[2]) >= lengths[:, None])[:, None, :, None]
    return [np.where(beyond, x.dtype.type(3e4), x) for x in arrays]


def _assert_attention(result, expected):
    """bfloat16 products of weights and values; the log-sum-exp is as exact as the scores."""
    np.testing.assert_allclose(*_exact(result[0], expected[0]), atol=1e-2)
    np.testing.assert_allclose(result[1], expected[1], atol=1e-4)


def _decode(case, interpret):
    q, k, v = case.arrays()
    lengths = case.lengths()
    k, v = case.stored(*_spoiled(lengths, k, v))
    options = dict(scale=case.head_dim**-0.5, **dict(case.options))
    if "window" in options:
        # The third row's window begins blocks after its last slot.
        start = jax.device_put(
            lengths + np.where(np.arange(case.rows) == 2, 902, 2).astype("int32")
        )
        options["window"] = Window(size=options["window"], query_start=start, slot_start=1)
    reference = decode_reference.decode_attention
    expected = computed(reference, *_exact(q, k, v), lengths, **options)
    attend = partial(decode_gpu.decode_attention, interpret=interpret, **options)
    result = computed(attend, q, k, v, lengths)
    assert not np.any(result[0][1])
    assert np.all(np.isneginf(result[1][1]))
    _assert_attention(result, expected)


def _logits(case, interpret):
    q, k, v = case.arrays()
    k, v = case.stored(k, v)
    lengths, how = case.lengths(), dict(scale=case.head_dim**-0.5)
    exact = *_exact(q, k, v), lengths
    *expected, all_logits = computed(decode_reference.attend_with_logits, *exact, **how)
    attend = partial(decode_gpu.attend_with_logits, interpret=interpret, **how)
    *attended, logits = computed(attend, q, k, v, lengths)
    _assert_attention(tuple(attended), tuple(expected))
    seen = (np.arange(case.slots) < lengths[:, None])[:, None]
    np.testing.assert_allclose(np.where(seen, logits, 0), np.where(seen, all_logits, 0), atol=1e-4)


def _topk(case: Case, interpret: Any) -> None:
    # Scores are small integers, so that many tie.
    q, k = map(np.round, _exact(*case.arrays()[:2]))
    q[..., 4:] = 0
    k[:, :, 20:23], k[:, :, 30, 3] = np.nan, np.inf
    # And they tie within a tolerance where noise, exact in 16 bits, parts them.
    noisy_q, noisy_k = q.copy(), k.copy()
    noisy_q[..., 4] = 1
    noisy_k[..., 4] = np.random.default_rng(9).integers(-4, 5, k.shape[:3]) / 256
    bounds = tuple(
        np.array(x[: case.rows], np.int32) for x in ([5, 0, 100, 3], [case.slots, 130, 103, 3])
    )
    options = dict(case.options)
    reference = jax.jit(partial(topk_reference.topk_scores, **options))
    run = jax.jit(partial(topk_gpu.topk_scores, interpret=interpret, **options))
    slots = None
    for *arrays, allowed in ((q, k, 0), (noisy_q, noisy_k, 1 / 16)):
        arrays = [x.astype(jnp.dtype(case.dtype)) for x in arrays]
        given = *arrays, bounds, np.full(q.shape[:3], allowed, np.float32)
        expected, found = reference(*given), run(*given)
        slots = np.asarray(expected[1]) if slots is None else slots
        np.testing.assert_array_equal(found[1], slots)
        np.testing.assert_array_equal(found[0], expected[0])


def _tied_top_k(scores, count, tolerance):
    """The XLA form, wherever this runs: its values and places, -1 where there is none."""
    given = jax.device_put((scores, tolerance), jax.devices("cpu")[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge_module, "platform", lambda: "cpu")
        best = jax.jit(tied_top_k, static_argnums=1)
        return jax.device_get(best(given[0], count, given[1]))


def _ties(case: Case, interpret: Any) -> None:
    # Exact ties, close ones, and a row of fewer scores than are asked for.
    scores = np.round(np.array(normal(case.rows, case.slots, seed=4)) * 50) / 50
    scores[0, 3:] = -np.inf
    tolerance = np.linspace(0, 0.2, case.rows, dtype=np.float32)
    count = dict(case.options)["count"]
    values, at = _tied_top_k(scores, count, tolerance)
    best = partial(gpu_ties.tied_best, count=count, interpret=interpret)
    found_values, found_at = jax.jit(best)(scores, tolerance=tolerance)
    np.testing.assert_array_equal(found_values, values)
    np.testing.assert_array_equal(found_at, at)


def _mass(case, interpret):
    q, k, _ = case.arrays()
    lengths = case.lengths()
    lse = 4 + np.array(normal(*q.shape[:3], seed=8))
    lse[0, 0, 0] = -np.inf
    valid = np.arange(case.queries, case.queries - case.rows, -1, dtype=np.int32)
    options = dict(case.options)
    start = jax.device_put(lengths - case.queries) if options.pop("causal", False) else None
    options |= dict(causal_start=start, scale=case.head_dim**-0.5, valid=jax.device_put(valid))
    how = Reduction(**options)
    expected, expected_squares = computed(
        mass_reference.attention_mass, q, k, lse, lengths, how=how
    )
    # Queries that do not count and slots beyond the length may hold anything.
    counts = (np.arange(case.queries) < valid[:, None])[..., None, None]
    q = np.where(counts, q, q.dtype.type(np.nan))
    run = partial(mass_gpu.attention_mass, how=how, interpret=interpret)
    mass, squares = computed(run, q, *_spoiled(lengths, k), lse, lengths)
    if how.squares:
        np.testing.assert_allclose(squares, expected_squares, atol=1e-5, rtol=1e-4)
    else:
        assert squares is None
    np.testing.assert_allclose(mass, expected, atol=1e-5, rtol=1e-4)


def _parted(split, spare, *arrays):
    """What all rows share, of one row and with garbage behind it, and what each has for itself."""
    room = [(0, 0), (0, 0), (0, spare), (0, 0)]
    shared = [np.pad(x[:1, :, :split], room, constant_values=3e4) for x in arrays]
    return jax.device_put(shared), [x[:, :, split:] for x in arrays]


def _sparse(case, interpret):
    q, k, v = case.arrays()
    options = dict(case.options)
    split = options.pop("shared", 0)
    for x in (k, v):
        x[:, :, :split] = x[:1, :, :split]
    lists, entries, page_size = (options.pop(name) for name in ("lists", "entries", "page_size"))
    flat, around = options.pop("flat", False), options.pop("around", False)
    one, first_page = options.pop("one", False), options.pop("first_page", 0)
    if options.pop("prior", False):
        options["prior"] = jax.device_put(np.flip(q, axis=2).copy())
    random = np.random.default_rng(3)
    pages = np.full((case.rows, lists, entries), -1, np.int32)
    for i, row in enumerate(pages.reshape(-1, entries)):  # a full list, an empty one, one with gaps
        count = (entries, 0, entries // 2)[i % 3]
        row[:count] = random.permutation(case.slots // page_size)[:count]
        row[1 : count : max(count, 1)] = -1
    start = _ints([-9, 37, 70, 5], case.rows)
    stop = _ints([case.slots, case.slots - 30, 139, 9], case.rows)
    options |= dict(scale=case.head_dim**-0.5)
    heads, more = None, {}
    if flat:  # the lists of the kv heads, their entries mixed, absent ones named in either way
        order = random.permutation(lists * entries)
        heads = np.broadcast_to(np.arange(lists)[:, None], pages.shape).reshape(case.rows, -1)
        pages = pages.reshape(case.rows, -1)
        heads = np.where((pages < 0) & (heads > 0), -1, heads)[:, order]
        pages = np.where(heads < 0, 0, pages[:, order]).astype(np.int32)
        heads = jax.device_put(heads.astype(np.int32))
    if around:  # a few slots before and after, one row without any, one that overlaps nothing
        start = _ints([4, 0, 3, 5], case.rows)
        stop = _ints([case.slots - 70, 0, 139, 5], case.rows)
        end = np.minimum(stop + _ints([64, 0, 1, 37], case.rows), np.int32(case.slots))
    each, given = pages, {}
    if one:  # a list for all heads
        every = np.where(pages < first_page, -1, pages)[:, :1]
        pages = np.where(every < 0, -1, every - first_page)
        each = np.broadcast_to(every, (case.rows, case.kv_heads, entries))
        more["first"] = first_page

    def define(q, k, v, each, start, stop):
        reference = sparse_reference.sparse_decode_attention
        expected = reference(q, k, v, Pages(each, start, stop, page_size, heads), **options)
        if around:
            slots = jnp.arange(case.slots)
            outside = (slots < start[:, None]) | ((slots >= stop[:, None]) & (slots < end[:, None]))
            fixed = jnp.where(outside, slots, -1)[:, None]
            fixed = jnp.broadcast_to(fixed, (case.rows, case.kv_heads, case.slots))
            fixed = Pages(fixed, jnp.zeros_like(start), jnp.full_like(stop, case.slots), 1)
            ends = reference(q, k, v, fixed, **options)
            pairs = [(expected[i : i + 2], ends[i : i + 2]) for i in range(0, len(ends), 2)]
            expected = tuple(x for one, other in pairs for x in merge([one, other]))
        return expected

    expected = computed(define, *_exact(q, *case.stored(k, v)), each, start, stop)
    if around:
        more["around"] = Around(jax.device_put(end), 5, 64)
    if split:
        shared, (k, v) = _parted(split, 2 * page_size, k, v)
        split_at = jax.device_put(np.array([split], np.int32))
        given["shared"] = Shared(*case.stored(*shared), split_at)
    k, v = case.stored(k, v)
    run = partial(sparse_gpu.sparse_decode_attention, interpret=interpret, **options, **given)
    chosen = Pages(*jax.device_put((pages, start, stop)), page_size, heads, **more)
    result = computed(run, q, k, v, chosen)
    assert np.any(np.isneginf(result[1])) and np.any(np.isfinite(result[1]))
    assert len(result) == len(expected)
    for i in range(0, len(result), 2):
        assert result[i].dtype == (jnp.float32 if i else q.dtype)
        _assert_attention(result[i : i + 2], expected[i : i + 2])


def _select(case, interpret):
    """Rows whose border lies among distinct scores, among ties, below all, and above all."""
    random, slots = np.random.default_rng(2), case.slots
    scores = random.integers(-3, 4, (4, slots)).astype(np.float32)
    scores[[0, 2]] = random.normal(size=(2, slots))
    scores[2, slots // 3 :] = -np.inf
    scores[0, 7:9] = np.nan, np.inf
    # Zeros of both signs are equal.
    scores[1] = np.where(scores[1] == 0, np.copysign(0, scores[2]), scores[1])
    scores = scores[: case.rows]
    k = np.array([slots // 5, slots // 3, slots // 2, 0][: case.rows], np.int32)
    # Longer lists than the kernel for short ones takes, or just as long as they must be.
    size = slots + 512
    least = -np.inf
    if dict(case.options).get("short"):
        size = min(slots // 2, 512)
        k = np.minimum(k, np.int32(size))
    if dict(case.options).get("least"):
        # Neighbours among the numbers of float32, so that the border lies beside the least.
        least = 2.0**23
        scores = np.where(scores > -1, np.round(scores) + 1 + least, -np.inf).astype(np.float32)
    expected = computed(select_reference.select, scores, k, size=None)
    run = partial(select_gpu.select, size=size, least=least, interpret=interpret)
    for row, chosen in enumerate(computed(run, scores, k)):
        listed = np.flatnonzero(expected[row])
        np.testing.assert_array_equal(chosen[: len(listed)], listed)
        assert np.all(chosen[len(listed) :] == -1)


def _pages(case, interpret):
    """Scores are sums of eighths, exact in float32, and many tie; NaN lies outside the bounds."""
    options = dict(case.options)
    point, size = options.pop("point", False), options["size"]
    split = options.pop("shared", 0)
    random, pages = np.random.default_rng(4), case.slots
    shape = case.rows, case.kv_heads, pages, case.head_dim
    high = random.integers(-8, 9, shape) / 8
    low = high - random.integers(0, 9, shape) / 8
    q = random.integers(-8, 9, (case.rows, case.kv_heads * case.group, case.head_dim)) / 8
    q[1:, :, 3:] = 0
    first = np.resize([0, 5, 70, 9, 0, 1, 2, 3], case.rows)
    last = np.resize([pages, pages - 3, 71, 9, pages, 65, pages, 4], case.rows)
    count = np.resize([size, size // 2, 3, size, 0, 7, 1, size], case.rows)
    page = np.arange(pages)
    outside = (page < first[:, None]) | (page >= last[:, None])
    if split:
        high[1:, :, :split], low[1:, :, :split] = high[0, :, :split], low[0, :, :split]
        # The first row has no page of its own, the third no other.
        last[0], first[2:3] = split, split + 1
        # The fourth has none, where its own would begin.
        first[3:4] = last[3:4] = split
        last[2:3], outside = pages - 1, page >= np.maximum(last, split)[:, None]
    high, low = (np.where(outside[:, None, :, None], np.nan, x) for x in (high, low))
    q, high, low = (x.astype(jnp.dtype(case.dtype)) for x in (q, high, low))
    digests = Digests(high, None if point else low)
    best = Best(*(x.astype(np.int32) for x in (first, last, count)))
    options = {"together": False} | options
    expected = computed(pages_reference.select_pages, q, digests, best, **options)
    kernel = pages_gpu.select_pages
    if split:
        shared, (high, low) = _parted(split, -split % 8 + 8, high, low)
        if point:
            shared[1] = None
        split_at = jax.device_put(np.array([split], np.int32))
        options["shared"] = SharedPages(Digests(*shared), split_at)
        digests = Digests(high, None if point else low)
        kernel = shared_pages_gpu.select_pages
    run = partial(kernel, interpret=interpret, **options)
    assert np.any(expected >= 0) and np.any(expected < 0)
    np.testing.assert_array_equal(computed(run, q, digests, best), expected)


def _voted(case, interpret):
    args, how = voted_slots_of(rows=case.rows, slots=case.slots, **dict(case.options))
    expected = computed(voted_reference.voted_slots, *args, **how)
    run = partial(voted_gpu.voted_slots, interpret=interpret, **how)
    for found, wanted in zip(computed(run, *args), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)


Row = tuple[Callable[[Case, Any], None], Case]


def _row(check, **given):
    """A case and its check; what is no field of a case is an option of the operation."""
    own = {field.name for field in fields(Case)}
    options = tuple((name, value) for name, value in given.items() if name not in own)
    return check, Case(**{k: v for k, v in given.items() if k in own}, options=options)


decode, logits, topk, ties, mass, sparse, select, pages, voted = (
    partial(_row, check)
    for check in (_decode, _logits, _topk, _ties, _mass, _sparse, _select, _pages, _voted)
)
SUM, FIRST = dict(over_group="sum"), dict(over_group="first")
MAX = dict(over_group="max", causal=True)
LISTS = dict(lists=2, entries=20, page_size=16)
SHORT_LISTS = dict(lists=2, entries=4, page_size=32)
WIDE = dict(head_dim=128, dtype="float16")
ONE = dict(one=True, first_page=2)
LEAST = dict(short=True, least=True)
VOTED = dict(votes=20, kept=5, span=8, first=4, local=20)
VOTED_PAGES = dict(votes=150, kept=9, span=20, first=20, local=40, page=16)

CASES: dict[str, Row] = {
    "decode": decode(head_dim=128),
    # Pages of one block as rows: two workers at most visit one, however many there are.
    "decode-pages": decode(head_dim=128, rows=8, slots=128, kv_heads=1, workers=50),
    "decode-queries-and-window": decode(queries=4, dtype="float16", workers=1, window=100),
    "logits": logits(head_dim=128, group=3),
    "topk": topk(rows=1, queries=40, kv_heads=1, slots=512, count=2),
    "topk-many": topk(rows=2, queries=40, kv_heads=1, slots=512, count=6),
    "topk-split": topk(rows=2, queries=9, group=1, workers=10, count=1),
    "topk-few": topk(rows=4, slots=384, workers=17, count=4),
    "topk-few-queries": topk(queries=3, workers=1, count=9),
    "ties": ties(slots=700, count=9),
    "voted": voted(rows=2, slots=128, **VOTED),
    "voted-pages": voted(rows=4, **VOTED_PAGES),
    "mass-sum": mass(queries=70, **SUM),
    "mass-max-causal": mass(rows=2, queries=40, slots=200, **MAX),
    "mass-squares": mass(rows=2, queries=70, slots=200, squares=True, causal=True),
    "mass-squares-group": mass(queries=5, group=8, squares=True),
    "mass-squares-one": mass(queries=9, group=1, squares=True),
    "mass-first": mass(rows=2, queries=3, dtype="float16", **FIRST),
    "sparse": sparse(rows=2, workers=8, slots=512, **LISTS),
    "sparse-list-a-head": sparse(rows=1, dtype="float16", lists=4, entries=18, page_size=8),
    "sparse-prior": sparse(rows=1, group=5, **SHORT_LISTS, prior=True),
    "sparse-around": sparse(rows=4, workers=16, **SHORT_LISTS, around=True),
    "sparse-merged": sparse(rows=1, workers=16, slots=1024, lists=2, entries=60, page_size=16),
    "sparse-one": sparse(workers=12, slots=512, **LISTS, **ONE),
    "sparse-one-around": sparse(workers=12, **SHORT_LISTS, **ONE, around=True),
    "sparse-around-prior": sparse(rows=2, workers=16, slots=512, **LISTS, prior=True, around=True),
    "select": select(rows=1, slots=200),
    "select-short": select(rows=4, slots=300, short=True),
    "select-short-least": select(rows=4, slots=300, **LEAST),
    "select-short-tiles": select(slots=9000, short=True),
    "pages": pages(rows=4, kv_heads=1, group=3, slots=136, size=24),
    "pages-group": pages(rows=2, group=9, slots=72, dtype="float16", size=70),
    "pages-points": pages(rows=1, slots=200, head_dim=128, size=201, point=True),
    "pages-together": pages(slots=136, workers=12, size=20, together=True),
    "sparse-flat-prior": sparse(
        rows=2, workers=6, group=3, **dict(SHORT_LISTS, entries=7), flat=True, prior=True
    ),
    "sparse-shared": sparse(workers=1, lists=4, entries=9, page_size=16, shared=128),
    "sparse-shared-around": sparse(rows=4, workers=16, **SHORT_LISTS, shared=128, around=True),
}
# What rows share ends in the middle of a line of scores.
CASES |= {
    f"pages-shared{name}": pages(shared=136, **given)
    for name, given in {
        "": dict(slots=196, workers=6, size=20),
        # More rows of a tile of columns than steps in flight, and more tiles than workers.
        "-heads": dict(rows=9, kv_heads=1, group=1, slots=204, workers=1, size=9),
        "-passes": dict(rows=20, kv_heads=1, group=5, slots=216, workers=4, size=20),
        "-together": dict(rows=4, group=3, slots=200, workers=6, size=20, together=True),
        "-points": dict(rows=4, slots=200, workers=6, size=20, point=True),
    }.items()
}
# Methods that rotate keys as they read hand floats beside values in 8 bits.
FORMS = {"int8": ("int8", "int8"), "floats-int8": (None, "int8"), "int8-floats": ("int8", None)}
IN_8_BITS = {
    f"{name}-{form}": partial(make, forms=forms)
    for name, make in (
        ("decode", partial(decode, head_dim=128)),
        ("decode-window", partial(decode, queries=3, window=40)),
        ("decode-many-queries", partial(decode, queries=16, head_dim=128, dtype="float16")),
        ("logits", logits),
    )
    for form, forms in FORMS.items()
}
# The interpreter has each operation, each form, and not all pairs.
INTERPRETED_IN_8_BITS = ("decode-int8", "decode-int8-floats", "decode-window-floats-int8")
INTERPRETED_IN_8_BITS += ("decode-many-queries-int8-floats", "logits-int8", "logits-floats-int8")
CASES |= {name: IN_8_BITS[name]() for name in INTERPRETED_IN_8_BITS}
INT8 = dict(forms=FORMS["int8"])
CASES |= {
    "sparse-prior-int8": sparse(rows=2, workers=8, slots=512, **LISTS, prior=True, **INT8),
    "sparse-list-a-head-int8": sparse(rows=2, lists=4, entries=9, page_size=16, **INT8),
    "sparse-flat-prior-int8": sparse(
        rows=2, **dict(LISTS, entries=7), flat=True, prior=True, **INT8
    ),
    "sparse-prior-floats-int8": sparse(
        rows=2, **SHORT_LISTS, prior=True, forms=FORMS["floats-int8"]
    ),
    "sparse-around-int8": sparse(rows=2, workers=4, **SHORT_LISTS, around=True, **INT8),
    "sparse-merged-around-int8": sparse(
        rows=2, workers=32, slots=512, **LISTS, around=True, **INT8
    ),
    "sparse-shared-around-int8": sparse(
        rows=2, workers=8, **SHORT_LISTS, shared=128, around=True, **INT8
    ),
}
# One of each kernel; the others are `slow`, for the interpreter is.
QUICK = {
    *("logits", "topk-few", "mass-max-causal"),
    *("ties", "voted", "sparse-shared-around", "sparse-flat-prior-int8", "select-short"),
    *("pages-shared-together", "decode-window-floats-int8"),
}

# What the GPU runs: more rows and heads, both head dims and dtypes, groups of 1, 4 and 8.
LARGE: dict[str, Row] = {}
for _dim, _dtype, _group in ((64, "float16", 1), (128, "bfloat16", 4), (128, "float16", 8)):
    _of = dict(kv_heads=4, group=_group, head_dim=_dim, dtype=_dtype)
    _large, _queries = dict(_of, slots=4096), dict(_of, slots=4096, queries=300)
    _listed = dict(_large, lists=4, page_size=16)
    _shared = dict(_large, rows=16, lists=4, shared=3072)
    _named = {
        "decode": decode(**_large, rows=8),
        "decode-window": decode(**_large, queries=4, window=200),
        "topk": topk(**_queries, count=4),
        "logits": logits(**_large, rows=8),
        "topk-one": topk(**_large, count=7),
        "mass-sum": mass(**_queries, **SUM),
        "mass-max": mass(**_queries, **MAX),
        "mass-squares": mass(**_queries, squares=True),
        "mass-squares-causal": mass(**_queries, squares=True, causal=True),
        "mass-one": mass(**_large, queries=3, **FIRST),
        "sparse": sparse(**_listed, entries=100),
        "sparse-around": sparse(**_listed, entries=70, around=True),
        "sparse-one-around": sparse(
            **_large, lists=4, entries=17, page_size=64, around=True, **ONE
        ),
        "sparse-pages-of-64": sparse(**_large, lists=4, entries=40, page_size=64),
        "sparse-prior": sparse(**_listed, entries=100, prior=True),
        "sparse-flat-prior": sparse(**_listed, entries=60, flat=True, prior=True),
        "sparse-shared": sparse(**dict(_shared, lists=4 * _group), entries=64, page_size=16),
        "sparse-shared-around": sparse(**_shared, entries=70, page_size=32, around=True),
    }
    _boxes = {
        f"pages-shared-{_split}": dict(rows=_rows, slots=_split + 84, shared=_split)
        for _rows, _split in ((16, 8200), (3, 1016), (40, 2000))
    }
    _boxes |= {f"pages-{_count}": dict(rows=8, slots=_count) for _count in (2048, 8192, 10_000)}
    for _name, _box in _boxes.items():
        _named[_name] = pages(**_of, **_box, size=64)
        _size = 32 if "shared" in _box else 128
        _named[f"{_name}-together"] = pages(**_of, **_box, size=_size, together=True)
    LARGE |= {f"{_name}-{_dim}-{_dtype}-{_group}": _case for _name, _case in _named.items()}
LARGE |= {
    f"ties-{_slots}": ties(rows=32, slots=_slots, count=16) for _slots in (136, 1024, 8320, 17408)
}
for _rows in (1, 8):
    _voters = dict(rows=_rows, slots=20_480, span=32, first=32)
    LARGE |= {
        f"voted-{_rows}": voted(**_voters, votes=128, kept=127, local=4096),
        f"voted-pages-{_rows}": voted(**_voters, votes=512, kept=64, local=1024, page=16),
    }
LARGE |= {
    "pages-points": pages(rows=5, slots=4096, size=64, point=True),
    "pages-shared-points": pages(rows=16, group=8, slots=4096, size=64, point=True, shared=4000),
    "pages-shared-that-no-block-can-keep": pages(rows=2, slots=20_000, size=64, shared=19_000),
    "pages-that-no-block-can-keep": pages(rows=2, slots=20_000, size=64),
}
LARGE |= {
    f"{_name}-{_slots}-{_group}": _make(slots=_slots, group=_group)
    for _name, _make in IN_8_BITS.items()
    for _slots in (256, 8192)
    for _group in (1, 4)
}
for _slots in (8192, 131072, 300000):
    LARGE[f"select-{_slots}"] = select(rows=4, slots=_slots)
for _slots in (512, 1000, 8192, 16384):
    LARGE[f"select-short-{_slots}"] = select(rows=4, slots=_slots, short=True)
    LARGE[f"select-short-least-{_slots}"] = select(rows=4, slots=_slots, **LEAST)


# The interpreter multiplies with NumPy, which warns of what is infinite or no number.
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize(
    "name",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES],
)
def test_interpreted(monkeypatch, name):
    check, case = CASES[name]
    monkeypatch.setattr(hopper, "processors", lambda: case.workers)
    check(case, INTERPRETED)


@pytest.mark.parametrize(
    ("module", "name", "most", "row"),
    [
        pytest.param(
            *(gpu_plan, "_FEW", 0, CASES["decode-queries-and-window"]),
            marks=pytest.mark.slow,
            id="plan-of-rows",
        ),
        pytest.param(
            *(select_gpu, "_KEPT", select_gpu._VECTOR, select(rows=4, slots=5000)),
            marks=pytest.mark.thorough,
            id="rows-that-no-cluster-can-keep",
        ),
        pytest.param(
            *(hopper_best, "_KEPT", 1, select(rows=2, slots=5000, short=True)),
            id="scores-that-no-block-can-keep",
        ),
    ],
)
def test_what_has_no_room_is_read_again(monkeypatch, module, name, most, row):
    """From where it lies, whose room would be in registers or in shared memory."""
    monkeypatch.setattr(module, name, most)
    monkeypatch.setattr(hopper, "processors", lambda: 3)
    check, case = row
    check(case, INTERPRETED)


@pytest.mark.gpu
@pytest.mark.parametrize("name", LARGE)
def test_on_a_gpu(name):
    check, case = LARGE[name]
    check(case, None)


def test_what_the_kernels_leave_to_others(monkeypatch):
    monkeypatch.setattr(hopper, "compute_capability", lambda: hopper.CAPABILITY)
    q, k, _ = Case(head_dim=128).arrays()

    def reasons(q, k, **given):
        q, k = jax.device_put((q, k))
        options = dict(count=4, page_size=16, ball=False, size=9) | given
        return [
            decode_gpu.unsupported(q, k),
            topk_gpu.unsupported(q, k, options["count"]),
            mass_gpu.unsupported(q, k, Reduction(1.0)),
            sparse_gpu.unsupported(q, k, 2, options["page_size"], 0),
            pages_gpu.unsupported(q[:, 0], k, options["ball"], options["size"]),
        ]

    assert reasons(q, k) == [None] * 5
    assert all("float32" in str(r) for r in reasons(*_exact(q, k)))
    assert all("head dim 96" in str(r) for r in reasons(q[..., :96], k[..., :96]))
    assert all("250" in str(r) for r in reasons(q, k[:, :, :250]))
    left = dict(count=9, page_size=4, ball=True)
    assert [r is None for r in reasons(q, k, **left)] == [True, False, True, False, False]
    assert "lists of 513" in str(reasons(q, k, size=513)[4])
    odd, wide, wider = jax.device_put(
        [np.repeat(x, n, axis=2) for x, n in ((q[:, :, : k.shape[1]], 3), (q, 33), (q, 16))]
    )
    q, k = jax.device_put((q, k))
    squares = Reduction(1.0, squares=True)
    assert mass_gpu.unsupported(q, k, squares) is None
    assert "group of 3" in str(mass_gpu.unsupported(odd, k, squares))
    assert "at most 64" in str(pages_gpu.unsupported(wide[:, 0], k, False, 9))
    assert "at most 64" in str(decode_gpu.unsupported(wide, k))
    many = jnp.zeros((241, 1, 8, 64), jnp.bfloat16)
    assert decode_gpu.unsupported(many, many) == "241 rows, at most 240"
    # 64 query heads.
    assert sparse_gpu.unsupported(wider, k, 1, 16, 0) is None
    assert "128 query rows of a list, at most 64" in str(sparse_gpu.unsupported(wider, k, 1, 16, 1))
