"""The attention doors compiled ahead of time for v5e, inside a fully manual shard_map."""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels.decode_attention import decode_attention
from pallas_kernels.prefill_attention import cache_attention, causal_attention

pytestmark = pytest.mark.optimized

pytest.importorskip("libtpu")

ROWS, CACHE, ROW = P("data", None, "tensor"), P("data", "tensor"), P("data")


@pytest.fixture(scope="module")
def mesh() -> Mesh:
    from jax.experimental import topologies

    slice_ = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2")
    return Mesh(np.array(slice_.devices).reshape(2, 1, 2), ("data", "seq", "tensor"))


@pytest.fixture(autouse=True)
def _default_precision() -> Iterator[None]:
    """The tests' exact matmuls are for CPU; a program for a TPU is compiled as users run it."""
    with jax.default_matmul_precision("default"):
        yield


def _compile(
    function: Callable,
    mesh: Mesh,
    specs: tuple,
    out_specs: tuple,
    shapes: tuple,
    donate: tuple = (),
) -> jax.stages.Compiled:
    arguments = tuple(
        jax.ShapeDtypeStruct(
            shape,
            jnp.int32 if len(shape) == 1 else jnp.bfloat16,
            sharding=NamedSharding(mesh, spec),
        )
        for shape, spec in zip(shapes, specs, strict=True)
    )
    manual = jax.shard_map(
        function, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=False
    )
    return jax.jit(manual, donate_argnums=donate).lower(*arguments).compile()


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tpu_causal_attention_compiles(mesh: Mesh, head_dim: int, window: int | None) -> None:
    shapes = (2, 600, 16, head_dim), *[(2, 600, 4, head_dim)] * 2
    compiled = _compile(
        lambda q, k, v: causal_attention(q, k, v, scale=0.1, window=window),
        mesh,
        (ROWS, ROWS, ROWS),
        (ROWS, ROWS),
        shapes,
    )
    assert "tpu_custom_call" in compiled.as_text()


@pytest.mark.parametrize("batch", [2, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_tpu_cache_attention_compiles_without_copying_the_cache(
    mesh: Mesh, head_dim: int, batch: int
) -> None:
    slots = 65536
    shapes = (batch, 256, 16, head_dim), *[(batch, 4, slots, head_dim)] * 2, (batch,)
    compiled = _compile(
        lambda q, k, v, n: cache_attention(q, k, v, n, scale=0.1),
        mesh,
        (ROWS, CACHE, CACHE, ROW),
        (ROWS, ROWS),
        shapes,
    )
    assert compiled.as_text().count("tpu_custom_call") >= 2  # whole blocks, and the cut one
    cache_bytes = batch // 2 * 2 * slots * head_dim * 2 * 2
    assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes / 20


@pytest.mark.slow
def test_tpu_windowed_cache_attention_compiles_to_streaming_xla(mesh: Mesh) -> None:
    """Splash has no window against a cache: XLA's loop, without a T x S matrix of scores."""
    shapes = (2, 2048, 16, 128), *[(2, 4, 32768, 128)] * 2, (2,)
    compiled = _compile(
        lambda q, k, v, n: cache_attention(q, k, v, n, scale=0.1, window=4096, query_start=n),
        mesh,
        (ROWS, CACHE, CACHE, ROW),
        (ROWS, ROWS),
        shapes,
    )
    assert "tpu_custom_call" not in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes < 2048 * 32768 * 8 * 4 / 20


@pytest.mark.parametrize("head_dim", [64, 128])
def test_tpu_decode_after_an_append_compiles_in_place(mesh: Mesh, head_dim: int) -> None:
    def append_and_decode(q, fresh, k, v, lengths):
        put = jax.vmap(lambda row, x, at: jax.lax.dynamic_update_slice_in_dim(row, x, at, axis=1))
        k, v = (put(x, jnp.moveaxis(fresh, 1, 2), lengths) for x in (k, v))
        return decode_attention(q, k, v, lengths + 1, scale=0.1)[0], k, v

    cache = 4, 4, 16384, head_dim
    compiled = _compile(
        append_and_decode,
        mesh,
        (ROWS, ROWS, CACHE, CACHE, ROW),
        (ROWS, CACHE, CACHE),
        ((4, 1, 16, head_dim), (4, 1, 4, head_dim), cache, cache, (4,)),
        donate=(2, 3),
    )
    memory = compiled.memory_analysis()
    cache_bytes = 2 * 2 * 16384 * head_dim * 2 * 2
    assert memory.alias_size_in_bytes == cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 20
