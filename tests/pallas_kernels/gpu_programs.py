"""A call of every Mosaic GPU kernel, to lower it without a GPU.

    python tests/pallas_kernels/gpu_programs.py

lowers all of them with the installed JAX and needs no other file of the tests.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels.attention_mass import gpu as mass_gpu
from pallas_kernels.attention_mass.reference import Reduction
from pallas_kernels.decode_attention import gpu as decode_gpu
from pallas_kernels.expert_matmul import gpu as expert_gpu
from pallas_kernels.page_scores import Best, Digests, SharedPages
from pallas_kernels.quantised import quantise
from pallas_kernels.quantised_matrix import quantise_matrix
from pallas_kernels.row_matmul import gpu as row_gpu
from pallas_kernels.select_large_k import gpu as select_gpu
from pallas_kernels.select_pages import gpu as pages_gpu
from pallas_kernels.select_pages import shared_gpu as shared_pages_gpu
from pallas_kernels.sparse_decode_attention import gpu as sparse_gpu
from pallas_kernels.sparse_decode_attention.lists import Around, Pages, Shared
from pallas_kernels.sparse_prefill_attention import Blocks, gpu_masses
from pallas_kernels.sparse_prefill_attention import gpu as prefill_gpu
from pallas_kernels.topk_scores import gpu as topk_gpu
from pallas_kernels.topk_scores import gpu_ties
from pallas_kernels.voted_slots import Spans
from pallas_kernels.voted_slots import gpu as voted_gpu


def programs():
    """Every kernel with the arguments of one call."""
    q = jnp.zeros((1, 200, 8, 128), jnp.bfloat16)
    k = v = jnp.zeros((1, 2, 1024, 128), jnp.bfloat16)
    one, bound = q[:, :1], jnp.array([1000], jnp.int32)
    none, exact = bound * 0, jnp.zeros(q.shape[:3])
    causal = dict(scale=0.1, valid=bound, causal_start=bound)
    most = Reduction(**causal, over_group="max")
    squares = partial(mass_gpu.attention_mass, how=Reduction(**causal, squares=True))
    decode = partial(decode_gpu.decode_attention, scale=0.1)
    logits = partial(decode_gpu.attend_with_logits, scale=0.1)
    topk = partial(topk_gpu.topk_scores, count=4)
    matmul = partial(row_gpu.row_matmul, dtype=jnp.float32)
    sparse = partial(sparse_gpu.sparse_decode_attention, scale=0.1)
    pages = Pages(jnp.zeros((1, 2, 20), jnp.int32), none, bound, 16)
    listed = replace(pages, start=none + 4, around=Around(bound + 9, 4, 9))
    listed_once = replace(listed, listed=pages.listed[:, :1], first=1)
    flat = replace(pages, listed=pages.listed[:, 1], heads=pages.listed[:, 0])
    rows, w = jnp.zeros((3, 512), jnp.bfloat16), jnp.zeros((512, 192), jnp.bfloat16)
    experts = jnp.stack([w] * 4), jnp.array([2, 0, 3]), jnp.int32(2)
    experts_8 = quantise_matrix(experts[0], (1,)), *experts[1:]
    many = jnp.zeros((3, 128, 512), jnp.bfloat16)
    choose = partial(pages_gpu.select_pages, size=20)
    shared_pages = SharedPages(Digests(k, v), bound)
    choose_shared = partial(shared_pages_gpu.select_pages, size=20, shared=shared_pages)
    chosen = one[:, 0], Digests(k, v), Best(none, bound, bound)
    heads = [jnp.repeat(x, 4, axis=axis) for x, axis in ((one, 2), (k, 1), (v, 1))]
    k8, v8 = quantise(k), quantise(v)
    blocks = Blocks(jnp.zeros((1, 8, 2, 8), jnp.int32), jnp.zeros((1, 8, 2), jnp.int32))
    spans = dict(spans=Spans(127, 32, 32), slots=9999, size=8192)

    return {
        # Of more pieces of a head than the kernel merges.
        "decode": (decode, (one, *(jnp.tile(x, (1, 1, 6, 1)) for x in (k, v)), bound)),
        "decode-merged": (decode, (*heads, bound)),
        "decode-int8": (decode, (one, k8, v8, bound)),
        "experts": (expert_gpu.expert_matmul, (rows[None], *experts)),
        "experts-many-rows": (expert_gpu.expert_matmul, (many, *experts)),
        "experts-of-8-bits": (expert_gpu.expert_matmul, (many, *experts_8)),
        "logits": (logits, (one, k, v, bound)),
        # As methods that rotate keys as they read hand them on.
        "logits-of-floats-beside-int8": (logits, (one, k, v8, bound)),
        "topk": (topk, (q, k, (none, bound), exact)),
        "topk-plain-max": (partial(topk, count=2), (q, k, (none, bound), exact)),
        "topk-few": (topk, (one, k, (none, bound), exact[:, :1])),
        "ties": (lambda x, t: gpu_ties.tied_best(x, 4, t), (jnp.zeros((32, 1088)), jnp.zeros(32))),
        "voted": (
            partial(voted_gpu.voted_slots, **spans),
            (jnp.zeros((1, 128), jnp.int32), bound, bound),
        ),
        "mass": (lambda *args: mass_gpu.attention_mass(*args, how=most)[0], (q, k, exact, bound)),
        "mass-squares": (squares, (q, k, exact, bound)),
        "rows": (matmul, (rows, w)),
        "rows-many-outputs": (partial(matmul, dtype=jnp.bfloat16), (w[:1].reshape(1, -1), w)),
        "rows-of-8-bits": (matmul, (rows, quantise_matrix(w, (0,)))),
        "sparse": (sparse, (one, k, v, pages)),
        "sparse-int8": (sparse, (one, k8, v8, pages)),
        "sparse-around": (sparse, (one, k, v, listed)),
        "sparse-one-around": (sparse, (one, k, v, listed_once)),
        "sparse-shared": (partial(sparse, shared=Shared(k, v, bound)), (one, k, v, listed)),
        "sparse-flat-prior": (lambda q, *rest: sparse(q, *rest, prior=q), (one, k, v, flat)),
        "sparse-prefill": (
            partial(prefill_gpu.sparse_prefill_attention, scale=0.1),
            (q, k, v, bound, blocks),
        ),
        "block-masses": (
            partial(gpu_masses.block_masses, scale=0.1, stride=16),
            (jnp.zeros((1, 2, 200, 2048), jnp.bfloat16), k, bound),
        ),
        "select": (partial(select_gpu.select, size=600), (jnp.zeros((1, 70_000)), bound)),
        "select-short": (partial(select_gpu.select, size=9), (jnp.zeros((1, 5000)), bound)),
        "pages": (partial(choose, together=False), chosen),
        "pages-together": (partial(choose, together=True), chosen),
        "pages-shared": (partial(choose_shared, together=False), chosen),
        "pages-shared-together": (partial(choose_shared, together=True), chosen),
    }


def main():
    for name, (run, arguments) in programs().items():
        lowered = jax.jit(run).trace(*arguments).lower(lowering_platforms=("cuda",))
        if "custom_call @mosaic_gpu" not in lowered.as_text():
            raise SystemExit(f"{name}: no Mosaic GPU kernel in the program for CUDA")


if __name__ == "__main__":
    main()
