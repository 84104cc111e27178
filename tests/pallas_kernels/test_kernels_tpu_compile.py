"""What runs on TPUs compiled ahead of time for three of them, inside a manual shard_map.

That they compile says that their blocks fit the chips' vector memory: the compiler refuses a
kernel that asks for more.
"""

import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.prefill_attention import cache_attention, causal_attention
from pallas_kernels.quantised import Quantised
from pallas_kernels.select_large_k import select_large_k
from pallas_kernels.sparse_decode_attention import sparse_decode_attention
from pallas_kernels.topk_scores import topk_scores

pytestmark = pytest.mark.optimized

pytest.importorskip("libtpu")

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# The chip whose tests are not `slow`. By default a kernel has 16 MiB of vector memory on each.
QUICK = "v5e"
HEADS, ROW = P("data", "tensor"), P("data")  # [B, heads, ...] and [B]
QUERIES = P("data", None, "tensor")  # [B, T, heads, ...]


def cases(names: str, main: dict[str, tuple], also: dict[str, tuple]) -> pytest.MarkDecorator:
    """A kernel's main cases for every chip, and others for the one whose tests are quick."""
    chips = [(chip, () if chip == QUICK else pytest.mark.slow) for chip in TOPOLOGIES]
    rows = [
        pytest.param(chip, *case, id=f"{chip}-{label}", marks=marks)
        for chip, marks in chips
        for label, case in main.items()
    ]
    rows += [
        pytest.param(QUICK, *case, id=f"{QUICK}-{label}", marks=pytest.mark.thorough)
        for label, case in also.items()
    ]
    return pytest.mark.parametrize(f"mesh, {names}", rows, indirect=["mesh"])


@functools.cache
def _mesh(chip: str) -> Mesh:
    from jax.experimental import topologies

    slice_ = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip])
    return Mesh(np.array(slice_.devices).reshape(2, 1, -1), ("data", "seq", "tensor"))


@pytest.fixture
def mesh(request: pytest.FixtureRequest) -> Mesh:
    return _mesh(request.param)


@pytest.fixture(autouse=True)
def _default_precision() -> Iterator[None]:
    """The tests' exact matmuls are for CPU; a program for a TPU is compiled as users run it."""
    with jax.default_matmul_precision("default"):
        yield


def _compile(
    function: Callable, mesh: Mesh, out_specs: tuple | P, *arguments: tuple, donate: tuple = ()
) -> jax.stages.Compiled:
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


def _assert_kernel_without_a_copy(
    compiled: jax.stages.Compiled, name: str, cache_bytes: int
) -> None:
    """The kernel runs under its name, and the program holds nothing of the cache's size."""
    text = compiled.as_text()
    assert "tpu_custom_call" in text and name in text
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes / 10


@cases(
    "head_dim, window",
    {"64": (64, None), "128": (128, None)},
    {"64-window": (64, 4096), "128-window": (128, 4096)},
)
def test_tpu_decode_attention_compiles(mesh: Mesh, head_dim: int, window: int | None) -> None:
    cache = HEADS, (4, 8, 65536, head_dim), jnp.bfloat16
    compiled = _compile(
        lambda q, k, v, n: decode_attention(q, k, v, n, scale=0.1, window=window, query_start=n),
        mesh,
        (QUERIES, QUERIES),
        (QUERIES, (4, 1, 32, head_dim), jnp.bfloat16),
        cache,
        cache,
        (ROW, (4,), jnp.int32),
    )
    _assert_kernel_without_a_copy(compiled, "decode_attention", 2 * 65536 * 8 * head_dim * 2)


@cases("head_dim", {"128": (128,)}, {"64": (64,)})
def test_tpu_decode_attention_of_int8_compiles(mesh: Mesh, head_dim: int) -> None:
    shape, bfloat16 = (4, 8, 65536, head_dim), jnp.dtype(jnp.bfloat16)
    stored = [(HEADS, shape, jnp.int8), (HEADS, shape[:3], jnp.bfloat16)]

    def attend(q, k, k_scales, v, v_scales, n):
        keys, values = Quantised(k, k_scales, bfloat16), Quantised(v, v_scales, bfloat16)
        return decode_attention(q, keys, values, n, scale=0.1)

    compiled = _compile(
        attend,
        mesh,
        (QUERIES, QUERIES),
        (QUERIES, (4, 1, 32, head_dim), jnp.bfloat16),
        *(stored * 2),
        (ROW, (4,), jnp.int32),
    )
    _assert_kernel_without_a_copy(compiled, "decode_attention", 2 * 65536 * 8 * head_dim)


@cases("groups", {}, {"1": (1,), "3": (3,), "8": (8,)})
def test_tpu_decode_attention_compiles_for_any_group(mesh: Mesh, groups: int) -> None:
    """Also with many queries, in float32, and where no block divides the cache."""
    cache = HEADS, (2, 4, 5000, 128), jnp.float32
    compiled = _compile(
        lambda q, k, v, n: decode_attention(q, k, v, n, scale=0.1),
        mesh,
        (QUERIES, QUERIES),
        (QUERIES, (2, 5, 4 * groups, 128), jnp.float32),
        cache,
        cache,
        (ROW, (2,), jnp.int32),
    )
    _assert_kernel_without_a_copy(compiled, "decode_attention", 2 * 2 * 5000 * 128 * 4)


@cases(
    "queries, count, head_dim",
    {"prefill": (512, 4, 128)},
    {"narrow-heads": (512, 4, 64), "decode": (1, 16, 128)},
)
def test_tpu_topk_scores_compiles(mesh: Mesh, queries: int, count: int, head_dim: int) -> None:
    slots = 131072
    compiled = _compile(
        lambda q, k, start, stop: topk_scores(q, k, start, stop, count=count),
        mesh,
        (QUERIES, QUERIES),
        (QUERIES, (2, queries, 32, head_dim), jnp.bfloat16),
        (HEADS, (2, 8, slots, head_dim), jnp.bfloat16),
        *[(ROW, (2,), jnp.int32)] * 2,
    )
    _assert_kernel_without_a_copy(compiled, "topk_scores", slots * 4 * head_dim * 2)


@cases(
    "queries, head_dim, options",
    {"causal": (512, 128, {"causal": True}), "decode": (1, 128, {})},
    {
        "narrow-heads": (512, 64, {"over_group": "max"}),
        "squares": (2048, 128, {"squares": True}),
    },
)
def test_tpu_attention_mass_compiles(
    mesh: Mesh, queries: int, head_dim: int, options: dict
) -> None:
    slots = 131072
    options = dict(options)
    causal, squares = options.pop("causal", False), options.get("squares", False)
    compiled = _compile(
        lambda q, k, lse, n: attention_mass(
            q, k, lse, n, scale=0.1, causal_start=n if causal else None, **options
        ),
        mesh,
        (HEADS, HEADS) if squares else HEADS,
        (QUERIES, (2, queries, 32, head_dim), jnp.bfloat16),
        (HEADS, (2, 8, slots, head_dim), jnp.bfloat16),
        (QUERIES, (2, queries, 32), jnp.float32),
        (ROW, (2,), jnp.int32),
    )
    # Against the logits, which the kernel never holds; a few queries' are as small as k.
    logits = slots * 4 * max(head_dim * 2, 8 * queries)
    _assert_kernel_without_a_copy(compiled, "attention_mass", min(logits, 10 * 2**27))


@cases("lists, page_size", {"kv-heads": (8, 16)}, {"query-heads": (32, 64)})
def test_tpu_sparse_decode_attention_compiles(mesh: Mesh, lists: int, page_size: int) -> None:
    slots = 131072
    cache = HEADS, (4, 8, slots, 128), jnp.bfloat16
    compiled = _compile(
        lambda q, k, v, pages, start, stop: sparse_decode_attention(
            q, k, v, pages, start, stop, page_size=page_size, scale=0.1
        ),
        mesh,
        (QUERIES, QUERIES),
        (QUERIES, (4, 1, 32, 128), jnp.bfloat16),
        cache,
        cache,
        (HEADS, (4, lists, 4096 // page_size), jnp.int32),
        *[(ROW, (4,), jnp.int32)] * 2,
    )
    # Neither the cache nor the listed pages are copied.
    gathered = 2 * 2 * lists * 4096 * 128 * 2
    _assert_kernel_without_a_copy(compiled, "sparse_decode_attention", gathered)


@cases("entries", {"512": (512,)}, {})
def test_tpu_flat_sparse_decode_attention_with_a_prior_compiles(mesh: Mesh, entries: int) -> None:
    slots = 131072
    cache = HEADS, (4, 8, slots, 128), jnp.bfloat16
    q, listed = (QUERIES, (4, 1, 32, 128), jnp.bfloat16), (ROW, (4, entries), jnp.int32)
    compiled = _compile(
        lambda q, prior, k, v, heads, pages, start, stop: sparse_decode_attention(
            *(q, k, v, pages, start, stop),
            heads=heads,
            page_size=64,
            scale=0.1,
            prior_query=prior,
        ),
        mesh,
        (QUERIES,) * 4,
        *(q, q, cache, cache, listed, listed),
        *[(ROW, (4,), jnp.int32)] * 2,
    )
    gathered = 2 * 2 * entries * 64 * 128 * 2
    _assert_kernel_without_a_copy(compiled, "sparse_decode_attention", gathered)


on_one_chip = pytest.mark.parametrize("mesh", [QUICK], indirect=True)


@on_one_chip
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tpu_causal_attention_compiles(mesh: Mesh, head_dim: int, window: int | None) -> None:
    fresh = QUERIES, (2, 600, 4, head_dim), jnp.bfloat16
    compiled = _compile(
        lambda q, k, v: causal_attention(q, k, v, scale=0.1, window=window),
        mesh,
        (QUERIES, QUERIES),
        (QUERIES, (2, 600, 16, head_dim), jnp.bfloat16),
        *(fresh, fresh),
    )
    assert "tpu_custom_call" in compiled.as_text()


def _compile_cache_attention(
    mesh: Mesh, batch: int, queries: int, slots: int, head_dim: int, window: int | None = None
) -> jax.stages.Compiled:
    cache = HEADS, (batch, 4, slots, head_dim), jnp.bfloat16
    return _compile(
        lambda q, k, v, n: cache_attention(q, k, v, n, scale=0.1, window=window, query_start=n),
        mesh,
        (QUERIES, QUERIES),
        (QUERIES, (batch, queries, 16, head_dim), jnp.bfloat16),
        *(cache, cache),
        (ROW, (batch,), jnp.int32),
    )


@on_one_chip
@pytest.mark.parametrize(("head_dim", "batch"), [(64, 2), (128, 8)])
def test_tpu_cache_attention_compiles_without_copying_the_cache(
    mesh: Mesh, head_dim: int, batch: int
) -> None:
    compiled = _compile_cache_attention(mesh, batch, 256, 65536, head_dim)
    assert compiled.as_text().count("tpu_custom_call") >= 2  # whole blocks, and the cut one
    cache_bytes = batch // 2 * 2 * 65536 * head_dim * 2 * 2
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes / 20


@pytest.mark.slow
@on_one_chip
def test_tpu_windowed_cache_attention_compiles_to_streaming_xla(mesh: Mesh) -> None:
    """Splash has no window against a cache: XLA's loop, without a T x S matrix of scores."""
    compiled = _compile_cache_attention(mesh, 2, 2048, 32768, 128, window=4096)
    assert "tpu_custom_call" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 2048 * 32768 * 8 * 4 / 20


@on_one_chip
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tpu_decode_after_an_append_compiles_in_place(mesh: Mesh, head_dim: int) -> None:
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
@on_one_chip
def test_selection_for_a_tpu_compiles_without_scatter_or_sort(mesh: Mesh) -> None:
    def select(scores, k):
        return select_large_k(scores, jnp.broadcast_to(k[:, None], scores.shape[:2]), size=4096)

    scores = HEADS, (2, 8, 131072), jnp.float32
    compiled = _compile(select, mesh, HEADS, scores, (ROW, (2,), jnp.int32))
    text = compiled.as_text()
    assert " scatter(" not in text and " sort(" not in text
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * (4 * 131072 * 4)
