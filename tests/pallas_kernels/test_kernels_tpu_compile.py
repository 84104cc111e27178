"""The Mosaic TPU kernels compiled ahead of time for three TPUs, inside a manual shard_map.

That they compile says that their blocks fit the chips' vector memory: the compiler refuses a
kernel that asks for more.
"""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.attention_mass import attention_mass
from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.quantised import Quantised
from pallas_kernels.sparse_decode_attention import sparse_decode_attention
from pallas_kernels.topk_scores import topk_scores

pytestmark = pytest.mark.optimized

pytest.importorskip("libtpu")

# Cases beyond a kernel's main one.
also = partial(pytest.param, marks=pytest.mark.thorough)

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# The chip whose tests are not `slow`. By default a kernel has 16 MiB of vector memory on each.
QUICK = "v5e"
HEADS, ROW = P("data", "tensor"), P("data")  # [B, heads, ...] and [B]
QUERIES = P("data", None, "tensor")  # [B, T, heads, ...]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in TOPOLOGIES
    ],
)
def mesh(request: pytest.FixtureRequest) -> Mesh:
    from jax.experimental import topologies

    slice_ = topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[request.param])
    return Mesh(np.array(slice_.devices).reshape(2, 1, -1), ("data", "seq", "tensor"))


@pytest.fixture(autouse=True)
def _default_precision() -> Iterator[None]:
    """The tests' exact matmuls are for CPU; a program for a TPU is compiled as users run it."""
    with jax.default_matmul_precision("default"):
        yield


def _compile(
    function: Callable, mesh: Mesh, out_specs: tuple | P, *arguments: tuple
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
    return jax.jit(manual).lower(*shapes).compile()


def _assert_kernel_without_a_copy(
    compiled: jax.stages.Compiled, name: str, cache_bytes: int
) -> None:
    """The kernel runs under its name, and the program holds nothing of the cache's size."""
    text = compiled.as_text()
    assert "tpu_custom_call" in text and name in text
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes / 10


@pytest.mark.parametrize("window", [None, also(4096)])
@pytest.mark.parametrize("head_dim", [64, 128])
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


@pytest.mark.parametrize("head_dim", [also(64), 128])
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


@pytest.mark.parametrize("groups", [also(1), also(3), also(8)])
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


@pytest.mark.parametrize(
    ("queries", "count", "head_dim"), [(512, 4, 128), also(512, 4, 64), also(1, 16, 128)]
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


@pytest.mark.parametrize(
    ("queries", "head_dim", "options"),
    [
        pytest.param(512, 128, {"causal": True}, id="causal"),
        also(1, 128, {}, id="decode"),
        also(512, 64, {"over_group": "max"}, id="narrow-heads"),
        also(2048, 128, {"squares": True}, id="squares"),
    ],
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
    _assert_kernel_without_a_copy(
        compiled, "attention_mass", slots * 4 * max(head_dim * 2, 8 * queries)
    )


@pytest.mark.parametrize(("lists", "page_size"), [(8, 16), also(32, 64)])
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


def test_tpu_flat_sparse_decode_attention_with_a_prior_compiles(mesh: Mesh) -> None:
    slots, entries = 131072, 512
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
