"""What runs on TPUs compiled ahead of time for three of them, inside a manual shard_map.

That they compile says that their blocks fit the chips' vector memory: the compiler refuses a
kernel that asks for more.
"""

import functools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention_mass import Reduction, attention_mass
from pallas_kernels.common import Window
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.prefill_attention import cache_attention, causal_attention
from pallas_kernels.quantised import Quantised
from pallas_kernels.select_large_k import select_large_k
from pallas_kernels.sparse_decode_attention import Pages, sparse_decode_attention
from pallas_kernels.sparse_prefill_attention import Blocks, sparse_prefill_attention
from pallas_kernels.topk_scores import topk_scores
from tests.absent import tpu

pytestmark = pytest.mark.optimized
slow = partial(pytest.param, marks=pytest.mark.slow)

pytest.importorskip("libtpu")

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# The chip whose tests are not `slow`, but for programs whose parts others have. By default a kernel
# has 16 MiB of vector memory on each.
QUICK = "v5e"
HEADS, ROW = P("data", "tensor"), P("data")  # [B, heads, ...] and [B]
QUERIES = P("data", None, "tensor")  # [B, T, heads, ...]


@functools.cache
def _mesh(chip):
    return Mesh(np.array(tpu(TOPOLOGIES[chip])).reshape(2, 1, -1), ("data", "seq", "tensor"))


@pytest.fixture
def mesh():
    return _mesh(QUICK)


@pytest.fixture(autouse=True)
def _default_precision():
    """The tests' exact matmuls are for CPU; a program for a TPU is compiled as users run it."""
    with jax.default_matmul_precision("default"):
        yield


def _compile(function, mesh, out_specs, *arguments, donate=()):
    """Compile for global arguments (spec, shape, dtype)."""
    specs = tuple(spec for spec, _, _ in arguments)
    manual = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False
    )
    shapes = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for spec, shape, dtype in arguments
    )
    return jax.jit(manual, donate_argnums=donate).lower(*shapes).compile()


PAIR = QUERIES, QUERIES
LONG = 131072


def _bounds(rows, count=1):
    return [(ROW, (rows,), jnp.int32)] * count


def _decode(
    head_dim=128,
    *,
    rows=4,
    queries=1,
    kv_heads=8,
    groups=4,
    slots=65536,
    dtype=jnp.bfloat16,
    window=None,
    int8=False,
):
    shape = rows, kv_heads, slots, head_dim
    parts = [(HEADS, shape, jnp.int8), (HEADS, shape[:3], jnp.bfloat16)]
    stored = parts if int8 else [(HEADS, shape, dtype)]

    def run(q, n, *arrays):
        halves = arrays[: len(stored)], arrays[len(stored) :]
        k, v = (Quantised(*x, jnp.dtype(dtype)) if int8 else x[0] for x in halves)
        return decode_attention(q, k, v, n, scale=0.1, window=window and Window(window, n))

    q = QUERIES, (rows, queries, kv_heads * groups, head_dim), dtype
    cache_bytes = 2 * math.prod(shape) // 4 * jnp.dtype(stored[0][2]).itemsize
    return "decode_attention", run, PAIR, (q, *_bounds(rows), *stored * 2), cache_bytes


def _topk(queries, count, head_dim):
    q = QUERIES, (2, queries, 32, head_dim), jnp.bfloat16
    k = HEADS, (2, 8, LONG, head_dim), jnp.bfloat16

    def run(q, k, *bounds):
        return topk_scores(q, k, bounds, count=count)

    return "topk_scores", run, PAIR, (q, k, *_bounds(2, 2)), LONG * 4 * head_dim * 2


def _mass(queries, head_dim, causal=False, **options):
    def run(q, k, lse, n):
        start = n if causal else None
        return attention_mass(q, k, lse, n, Reduction(0.1, causal_start=start, **options))

    q = QUERIES, (2, queries, 32, head_dim), jnp.bfloat16
    k = HEADS, (2, 8, LONG, head_dim), jnp.bfloat16
    lse = QUERIES, (2, queries, 32), jnp.float32
    outs = (HEADS, HEADS) if options.get("squares") else HEADS
    # Against the logits, which the kernel never holds; a few queries' are as small as k.
    logits = min(LONG * 4 * max(head_dim * 2, 8 * queries), 10 * 2**27)
    return "attention_mass", run, outs, (q, k, lse, *_bounds(2)), logits


def _sparse(lists, page_size, entries, flat=False):
    """A list a kv head or query head, or one of entries of all heads with a prior's query."""
    q = QUERIES, (4, 1, 32, 128), jnp.bfloat16
    cache = HEADS, (4, 8, LONG, 128), jnp.bfloat16
    listed = ROW, (4, entries), jnp.int32
    pages = [listed, listed, q] if flat else [(HEADS, (4, lists, entries), jnp.int32)]

    def run(q, k, v, *rest):
        start, stop, listed, *more = rest
        heads, prior = more or (None, None)
        pages = Pages(listed, start, stop, page_size, heads)
        return sparse_decode_attention(q, k, v, pages, scale=0.1, prior=prior)

    arguments = q, cache, cache, *_bounds(4, 2), *pages
    # Neither the cache nor the listed pages are copied.
    gathered = 2 * 2 * lists * entries * page_size * 128 * 2
    return "sparse_decode_attention", run, PAIR * (1 + flat), arguments, gathered


def _listed(head_dim, queries=2048, int8=False):
    """A chunk over lists of blocks; of a cache in 8 bits one layer becomes floats."""
    q = QUERIES, (2, queries, 32, head_dim), jnp.bfloat16
    shape = 2, 8, LONG, head_dim
    parts = [(HEADS, shape, jnp.int8), (HEADS, shape[:3], jnp.bfloat16)]
    stored = parts if int8 else [(HEADS, shape, jnp.bfloat16)]
    lists = [(HEADS, (2, 32, queries // 128, *more), jnp.int32) for more in ((308,), ())]

    def run(q, n, listed, count, *arrays):
        halves = arrays[: len(stored)], arrays[len(stored) :]
        k, v = (Quantised(*x, q.dtype) if int8 else x[0] for x in halves)
        return sparse_prefill_attention(q, k, v, n, Blocks(listed, count), scale=0.1)

    arguments = q, *_bounds(2), *lists, *stored * 2
    floats = 2 * LONG * 4 * head_dim * 2
    return "sparse_prefill_attention", run, PAIR, arguments, 10.1 * floats if int8 else floats


MAIN = {
    "decode-64": _decode(64),
    "decode-128": _decode(128),
    "decode-int8": _decode(128, int8=True),
    "topk-prefill": _topk(512, 4, 128),
    "mass-causal": _mass(512, 128, causal=True),
    "mass-decode": _mass(1, 128),
    "sparse": _sparse(8, 16, 256),
    "sparse-flat-prior": _sparse(1, 64, 512, flat=True),
    "listed": _listed(128),
}
MORE = ("decode-128", "mass-causal", "sparse")
# Also for any group: with many queries, in float32, and where no block divides the cache.
ODD = dict(rows=2, queries=5, kv_heads=4, slots=5000, dtype=jnp.float32)
ALSO = {
    "decode-64-window": _decode(64, window=4096),
    "decode-128-window": _decode(128, window=4096),
    "decode-64-int8": _decode(64, int8=True),
    **{f"decode-group-{groups}": _decode(groups=groups, **ODD) for groups in (1, 3, 8)},
    "topk-narrow-heads": _topk(512, 4, 64),
    "topk-decode": _topk(1, 16, 128),
    "mass-narrow-heads": _mass(512, 64, over_group="max"),
    "mass-squares": _mass(2048, 128, squares=True),
    "sparse-query-heads": _sparse(32, 64, 64),
    "listed-narrow-heads": _listed(64),
    "listed-int8": _listed(128, int8=True),
}


@pytest.mark.parametrize(
    ("chip", "program"),
    [
        *(
            pytest.param(
                *(chip, program),
                id=f"{chip}-{label}",
                marks=() if chip == QUICK and label not in MORE else pytest.mark.slow,
            )
            for chip in TOPOLOGIES
            for label, program in MAIN.items()
        ),
        *(
            pytest.param(QUICK, program, id=f"{QUICK}-{label}", marks=pytest.mark.thorough)
            for label, program in ALSO.items()
        ),
    ],
)
def test_a_kernel_compiles_without_a_copy(chip, program):
    """It runs under its name, and the program holds nothing of the cache's size."""
    name, run, outs, arguments, cache_bytes = program
    compiled = _compile(run, _mesh(chip), outs, *arguments)
    text = compiled.as_text()
    assert "tpu_custom_call" in text and name in text
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes / 10


@pytest.mark.parametrize(
    ("head_dim", "window"), [(64, 300), (128, None), *(slow(64, None), slow(128, 300))]
)
def test_tpu_causal_attention_compiles(mesh, head_dim, window):
    fresh = QUERIES, (2, 600, 4, head_dim), jnp.bfloat16
    compiled = _compile(
        lambda q, k, v: causal_attention(q, k, v, scale=0.1, window=window),
        mesh,
        PAIR,
        (QUERIES, (2, 600, 16, head_dim), jnp.bfloat16),
        *(fresh, fresh),
    )
    assert "tpu_custom_call" in compiled.as_text()


@pytest.mark.parametrize(
    ("batch", "queries", "slots", "head_dim", "window"),
    [(2, 256, 65536, 64, None), (8, 256, 65536, 128, None), (2, 2048, 32768, 128, 4096)],
)
@pytest.mark.quick("128-None")
def test_tpu_cache_attention_compiles_without_copying_the_cache(
    mesh, batch, queries, slots, head_dim, window
):
    """Splash has no window against a cache: XLA's loop, without a T x S matrix of scores."""
    cache = HEADS, (batch, 4, slots, head_dim), jnp.bfloat16
    compiled = _compile(
        lambda q, k, v, n: cache_attention(
            q, k, v, n, scale=0.1, window=window and Window(window, n)
        ),
        mesh,
        PAIR,
        (QUERIES, (batch, queries, 16, head_dim), jnp.bfloat16),
        *(cache, cache, *_bounds(batch)),
    )
    kernels = compiled.as_text().count("tpu_custom_call")
    # Whole blocks, and the cut one.
    assert kernels == 0 if window else kernels >= 2
    scores, cache_bytes = queries * slots * 8 * 4, batch // 2 * 2 * slots * head_dim * 2 * 2
    most = scores if window else cache_bytes
    assert compiled.memory_analysis().temp_size_in_bytes < most / 20


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tpu_decode_after_an_append_compiles_in_place(mesh, head_dim):
    def append_and_decode(q, fresh, k, v, lengths):
        put = jax.vmap(lambda row, x, at: jax.lax.dynamic_update_slice_in_dim(row, x, at, axis=1))
        k, v = (put(x, jnp.moveaxis(fresh, 1, 2), lengths) for x in (k, v))
        return decode_attention(q, k, v, lengths + 1, scale=0.1)[0], k, v

    cache = HEADS, (4, 4, 16384, head_dim), jnp.bfloat16
    compiled = _compile(
        append_and_decode,
        mesh,
        (QUERIES, HEADS, HEADS),
        (QUERIES, (4, 1, 16, head_dim), jnp.bfloat16),
        (QUERIES, (4, 1, 4, head_dim), jnp.bfloat16),
        *(cache, cache),
        (ROW, (4,), jnp.int32),
        donate=(2, 3),
    )
    memory = compiled.memory_analysis()
    cache_bytes = 2 * 2 * 16384 * head_dim * 2 * 2
    assert memory.alias_size_in_bytes == cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 20


@pytest.mark.slow
def test_selection_for_a_tpu_compiles_without_scatter_or_sort(mesh):
    def select(scores, k):
        return select_large_k(scores, jnp.broadcast_to(k[:, None], scores.shape[:2]), size=4096)

    scores = HEADS, (2, 8, 131072), jnp.float32
    compiled = _compile(select, mesh, HEADS, scores, (ROW, (2,), jnp.int32))
    text = compiled.as_text()
    assert " scatter(" not in text and " sort(" not in text
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * (4 * 131072 * 4)
