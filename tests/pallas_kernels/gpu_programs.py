"""A call of every Mosaic GPU kernel, to lower it without a GPU.

    python tests/pallas_kernels/gpu_programs.py

lowers all of them with the installed JAX and needs no other file of the tests.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.attention_mass import gpu as mass_gpu
from pallas_kernels.attention_mass.reference import Reduction
from pallas_kernels.decode_attention import gpu as decode_gpu
from pallas_kernels.page_scores import SharedPages
from pallas_kernels.quantised import quantise
from pallas_kernels.quantised_matrix import quantise_matrix
from pallas_kernels.row_matmul import gpu as row_gpu
from pallas_kernels.select_large_k import gpu as select_gpu
from pallas_kernels.select_pages import gpu as pages_gpu
from pallas_kernels.select_pages import shared_gpu as shared_pages_gpu
from pallas_kernels.sparse_decode_attention import gpu as sparse_gpu
from pallas_kernels.sparse_decode_attention.lists import Around, Shared
from pallas_kernels.topk_scores import gpu as topk_gpu
from pallas_kernels.topk_scores import gpu_ties
from pallas_kernels.voted_slots import gpu as voted_gpu


def programs() -> dict[str, tuple[Callable, tuple]]:
    """Every kernel with the arguments of one call."""
    q = jnp.zeros((1, 200, 8, 128), jnp.bfloat16)
    k = v = jnp.zeros((1, 2, 1024, 128), jnp.bfloat16)
    one, bound = q[:, :1], jnp.array([1000], jnp.int32)
    exact = jnp.zeros(q.shape[:3])
    how = Reduction(
        scale=0.1, valid=bound, causal_start=bound, over_group="max", over_queries="max"
    )
    mass = partial(mass_gpu.attention_mass, how=how)
    squared = Reduction(scale=0.1, valid=bound, causal_start=bound, squares=True)
    squares = partial(mass_gpu.attention_mass, how=squared)
    sparse = partial(sparse_gpu.sparse_decode_attention, page_size=16, scale=0.1)
    pages = jnp.zeros((1, 2, 20), jnp.int32)
    rows, w = jnp.zeros((3, 512), jnp.bfloat16), jnp.zeros((512, 192), jnp.bfloat16)
    choose = partial(pages_gpu.select_pages, size=20)
    shared_pages = SharedPages(k, v, None, bound)
    choose_shared = partial(shared_pages_gpu.select_pages, size=20, shared=shared_pages)
    chosen = one[:, 0], k, v, None, bound * 0, bound, bound
    heads = [jnp.repeat(x, 4, axis=axis) for x, axis in ((one, 2), (k, 1), (v, 1))]
    return {
        "decode": (partial(decode_gpu.decode_attention, scale=0.1), (one, k, v, bound)),
        "decode-merged": (partial(decode_gpu.decode_attention, scale=0.1), (*heads, bound)),
        "logits": (partial(decode_gpu.attend_with_logits, scale=0.1), (one, k, v, bound)),
        "topk": (partial(topk_gpu.topk_scores, count=4), (q, k, bound * 0, bound, exact)),
        "topk-plain-max": (partial(topk_gpu.topk_scores, count=2), (q, k, bound * 0, bound, exact)),
        "topk-few": (
            partial(topk_gpu.topk_scores, count=4),
            (one, k, bound * 0, bound, exact[:, :1]),
        ),
        "ties": (lambda x, t: gpu_ties.tied_best(x, 4, t), (jnp.zeros((32, 1088)), jnp.zeros(32))),
        "sparse-one-around": (
            lambda *args: sparse(*args, around=Around(args[-1] + 9, 4, 9), first_page=1),
            (one, k, v, pages[:, :1], bound * 0 + 4, bound),
        ),
        "voted": (
            partial(
                voted_gpu.voted_slots, kept=127, span=32, first=32, page=1, slots=9999, size=8192
            ),
            (jnp.zeros((1, 128), jnp.int32), bound, bound),
        ),
        "mass": (lambda *args: mass(*args)[0], (q, k, jnp.zeros(q.shape[:3]), bound)),
        "mass-squares": (squares, (q, k, jnp.zeros(q.shape[:3]), bound)),
        "rows": (partial(row_gpu.row_matmul, dtype=jnp.float32), (rows, w)),
        "rows-many-outputs": (
            partial(row_gpu.row_matmul, dtype=jnp.bfloat16),
            (w[:1].reshape(1, -1), w),
        ),
        "rows-of-8-bits": (
            partial(row_gpu.row_matmul, dtype=jnp.float32),
            (rows, quantise_matrix(w, (0,))),
        ),
        "decode-int8": (
            partial(decode_gpu.decode_attention, scale=0.1),
            (one, quantise(k), quantise(v), bound),
        ),
        # As methods that rotate keys as they read hand them on.
        "logits-of-floats-beside-int8": (
            partial(decode_gpu.attend_with_logits, scale=0.1),
            (one, k, quantise(v), bound),
        ),
        "sparse-int8": (sparse, (one, quantise(k), quantise(v), pages, bound * 0, bound)),
        "sparse": (sparse, (one, k, v, pages, bound * 0, bound)),
        "sparse-around": (
            lambda *args: sparse(*args, around=Around(args[-1] + 9, 4, 9)),
            (one, k, v, pages, bound * 0 + 4, bound),
        ),
        "select": (partial(select_gpu.select, size=600), (jnp.zeros((1, 70_000)), bound)),
        "select-short": (partial(select_gpu.select, size=9), (jnp.zeros((1, 5000)), bound)),
        "pages": (partial(choose, together=False), chosen),
        "pages-together": (partial(choose, together=True), chosen),
        "sparse-shared": (
            lambda *args: sparse(
                *args, around=Around(args[-1] + 9, 4, 9), shared=Shared(k, v, bound)
            ),
            (one, k, v, pages, bound * 0 + 4, bound),
        ),
        "pages-shared": (partial(choose_shared, together=False), chosen),
        "pages-shared-together": (partial(choose_shared, together=True), chosen),
        "sparse-flat-prior": (
            lambda q, k, v, pages, *bounds: sparse_gpu.sparse_decode_attention(
                *(q, k, v, pages[:, 1], *bounds),
                heads=pages[:, 0],
                page_size=16,
                scale=0.1,
                prior_query=q,
            ),
            (one, k, v, pages, bound * 0, bound),
        ),
    }


def main() -> None:
    for name, (run, arguments) in programs().items():
        lowered = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
        if "custom_call @mosaic_gpu" not in lowered.as_text():
            raise SystemExit(f"{name}: no Mosaic GPU kernel in the program for CUDA")


if __name__ == "__main__":
    main()
