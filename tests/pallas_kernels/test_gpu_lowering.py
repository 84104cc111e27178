"""The programs that the Mosaic GPU kernels lower to, which needs no GPU."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import layout_inference
from jax.sharding import PartitionSpec

from pallas_kernels import hopper
from pallas_kernels.decode_attention import gpu as decode_gpu
from pallas_kernels.topk_scores import gpu as topk_gpu
from tests.pallas_kernels import gpu_programs

programs = functools.cache(gpu_programs.programs)


@pytest.mark.parametrize(
    "name",
    [
        *("decode", "decode-merged", "logits", "topk", "topk-plain-max", "topk-few", "mass"),
        *("sparse", "sparse-around", "sparse-flat-prior", "select", "ties"),
        *("voted", "sparse-one-around", "mass-squares"),
        *("sparse-shared", "pages-shared", "pages-shared-together"),
        *("rows-of-8-bits", "decode-int8", "logits-of-floats-beside-int8", "sparse-int8"),
    ],
)
def test_lowers_for_cuda_within_a_manual_shard_map(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Layouts and copies are settled when a kernel is lowered, not when it is compiled."""
    infer, modules = layout_inference.infer_layout, []

    def record(module: Any, **options: Any) -> None:
        infer(module, **options)
        modules.append(str(module))

    monkeypatch.setattr(layout_inference, "infer_layout", record)
    # As on a JAX without the private operation.
    monkeypatch.setattr(topk_gpu, "_POINTWISE", name != "topk-plain-max")
    run, args = programs()[name]
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")
    sharded = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = jax.jit(sharded).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    # Both halves of the top-k search are kernels, and the merge of few pieces.
    two = "topk", "topk-plain-max", "topk-few", "decode-merged", "pages-shared"
    two += ("pages-shared-together",)
    kernels = 2 if name in two else 1
    assert text.count("custom_call @mosaic_gpu") == len(modules) == kernels
    for module in modules:
        # Where no tiling is asked for the inference may choose fewer rows, which come out wrong.
        tiles = re.findall(r"mosaic_gpu.tile<\[(\d+), (\d+)\]>", module)
        assert (tiles or "async_load" not in module) and all(
            hopper.TILE_ROWS in (int(rows), int(lanes)) for rows, lanes in tiles
        )


@pytest.mark.parametrize("name", ["decode-int8", "topk"])
def test_a_kernel_lowers_to_the_same_text_each_time(name: str) -> None:
    """Else equal kernels would be compiled once for each call, and not be found on the disk."""
    run, args = programs()[name]

    def text() -> str:
        fresh = jax.jit(lambda *args: run(*args))
        return fresh.trace(*args).lower(lowering_platforms=("cuda",)).as_text()

    hashes = [re.findall(r'kernel_hash = "([^"]*)"', each) for each in (text(), text())]
    assert hashes[0] and hashes[0] == hashes[1]


def test_the_largest_batch_finds_place_in_shared_memory() -> None:
    """Lowering refuses what is too large; the plan has a line a row."""
    rows = decode_gpu._MAX_BATCH
    q = jax.ShapeDtypeStruct((rows, 1, 4, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((rows, 1, 128, 128), jnp.bfloat16)
    run = functools.partial(decode_gpu.decode_attention, scale=1.0)
    lengths = jax.ShapeDtypeStruct((rows,), jnp.int32)
    text = jax.jit(run).trace(q, k, k, lengths).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text
