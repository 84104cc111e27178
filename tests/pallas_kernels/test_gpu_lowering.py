import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import layout_inference
from jax.sharding import PartitionSpec

from pallas_kernels import hopper
from pallas_kernels.decode_attention import gpu as decode_gpu
from pallas_kernels.quantised import empty
from pallas_kernels.quantised_matrix import quantise_matrix
from pallas_kernels.row_matmul import MAX_ROWS
from pallas_kernels.row_matmul import gpu as row_gpu
from pallas_kernels.sparse_decode_attention import Pages
from pallas_kernels.sparse_decode_attention import gpu as sparse_gpu
from pallas_kernels.topk_scores import gpu as topk_gpu
from tests.pallas_kernels import gpu_programs

programs = functools.cache(gpu_programs.programs)


# One of each form of a kernel whose program no other has; the others are lowered by the smoke test.
QUICK = {"decode-merged", "topk-few", "mass", "sparse-around", "sparse-flat-prior", "select"}
QUICK |= {
    "sparse-prefill",
    "block-masses",
    "ties",
    "voted",
    "pages-shared",
    "rows-of-8-bits",
    "decode-int8",
}
# As on a JAX without the private operation.
PLAIN = "topk-plain-max"
# Both halves of a search are kernels, and the merge of few pieces.
OF_TWO = {"topk", PLAIN, "topk-few", "decode-merged", "pages-shared", "pages-shared-together"}
OF_TWO |= {"decode-int8", "logits", "logits-of-floats-beside-int8"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in (
            *("decode", "decode-merged", "logits", "topk", PLAIN, "topk-few", "mass"),
            *("sparse", "sparse-around", "sparse-flat-prior", "select", "ties"),
            *("sparse-prefill", "block-masses"),
            *("voted", "sparse-one-around", "mass-squares"),
            *("sparse-shared", "pages-shared", "pages-shared-together"),
            *("rows-of-8-bits", "decode-int8", "logits-of-floats-beside-int8", "sparse-int8"),
        )
    ],
)
def test_lowers_for_cuda_within_a_manual_shard_map(monkeypatch, name):
    """Layouts and copies are settled when a kernel is lowered, not when it is compiled."""
    infer, modules = layout_inference.infer_layout, []

    def record(module, **options):
        infer(module, **options)
        modules.append(str(module))

    monkeypatch.setattr(layout_inference, "infer_layout", record)
    monkeypatch.setattr(topk_gpu, "_POINTWISE", name != PLAIN)
    run, args = programs()[name]
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")
    sharded = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = jax.jit(sharded).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    kernels = 2 if name in OF_TWO else 1
    assert text.count("custom_call @mosaic_gpu") == len(modules) == kernels
    for module in modules:
        # Where no tiling is asked for the inference may choose fewer rows, which come out wrong.
        tiles = re.findall(r"mosaic_gpu.tile<\[(\d+), (\d+)\]>", module)
        assert (tiles or "async_load" not in module) and all(
            hopper.TILE_ROWS in (int(rows), int(lanes)) for rows, lanes in tiles
        )


@pytest.mark.parametrize("name", ["decode-int8", "topk"])
@pytest.mark.quick("decode")
def test_a_kernel_lowers_to_the_same_text_each_time(name):
    """Else equal kernels would be compiled once for each call, and not be found on the disk."""
    run, args = programs()[name]

    def text():
        fresh = jax.jit(lambda *args: run(*args))
        return fresh.trace(*args).lower(lowering_platforms=("cuda",)).as_text()

    hashes = [re.findall(r'kernel_hash = "([^"]*)"', each) for each in (text(), text())]
    assert hashes[0] and hashes[0] == hashes[1]


INT8, FLOATS = "int8", None
_shape = jax.ShapeDtypeStruct


def _stored(shape, forms):
    return [jax.eval_shape(lambda form=form: empty(shape, jnp.bfloat16, form)) for form in forms]


def _decode(name, width, queries, *forms):
    """For the most rows that it takes: the plan has a line a row."""
    rows = decode_gpu.MAX_BATCH
    q = _shape((rows, queries, 32, width), jnp.bfloat16)
    run = functools.partial(getattr(decode_gpu, name), scale=1.0)
    return run, [q, *_stored((rows, 8, 1024, width), forms), _shape((rows,), jnp.int32)]


def _sparse(rows, *forms):
    q = _shape((4, 1, 2 * rows, 128), jnp.bfloat16)
    lists = [_shape((4, 2, 256), jnp.int32), *[_shape((4,), jnp.int32)] * 2]

    def run(q, k, v, *lists):
        return sparse_gpu.sparse_decode_attention(q, k, v, Pages(*lists, 16), scale=0.1)

    return run, [q, *_stored((4, 2, 4096, 128), forms), *lists]


def _rows(rows, outputs):
    kept = jax.eval_shape(lambda w: quantise_matrix(w, (0,)), _shape((4096, outputs), jnp.bfloat16))
    run = functools.partial(row_gpu.row_matmul, dtype=jnp.bfloat16)
    return run, [_shape((rows, 4096), jnp.bfloat16), kept]


@pytest.mark.parametrize(
    ("make", "given"),
    [
        (_decode, ("decode_attention", 128, 1, FLOATS, FLOATS)),
        *((_decode, ("decode_attention", 128, 16, *x)) for x in ((INT8, INT8), (FLOATS, INT8))),
        (_decode, ("decode_attention", 128, 16, INT8, FLOATS)),
        (_decode, ("decode_attention", 64, 1, INT8, INT8)),
        (_decode, ("decode_attention", 128, 1, FLOATS, INT8)),
        (_decode, ("attend_with_logits", 128, 1, INT8, FLOATS)),
        *((_sparse, (12, *x)) for x in ((INT8, INT8), (FLOATS, INT8), (INT8, FLOATS))),
        (_sparse, (1, INT8, INT8)),
        *((_rows, (rows, outputs)) for rows in (1, 12, MAX_ROWS) for outputs in (28672, 192)),
    ],
    ids=lambda x: x.__name__.strip("_") if callable(x) else "-".join(map(str, x)),
)
@pytest.mark.quick("128-16-int8-int8", "16-28672")
def test_the_largest_finds_place_in_shared_memory(make, given):
    """Lowering refuses what is too large.

    Every form with the shape that takes the most, and every shape with some form.
    """
    run, arguments = make(*given)
    text = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call @mosaic_gpu" in text
