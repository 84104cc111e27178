"""Attention of one query a row to chosen pages of a cache, with RESA's second softmax.

The pages are listed per kv head (one list for a group), per query head, or, where heads have
budgets of different sizes (Ada-KV), as one flat list of (kv head, page) entries a row. Slots that
are always kept are attended elsewhere, cut out here by `start` and `stop`, and merged by their
log-sum-exp (`pallas_kernels.common`).

RESA (spec: its selected set I) also needs the prior's softmax over the same slots: each call
returns it beside the attention, from one reading of the values. The prior is given by its query,
whose logits are made of the keys that are read anyway, or by the logits themselves.
Implementations: `xla` on every platform, `gpu` and `tpu` (Mosaic, not with a prior's logits, which
would be read beside the keys), `reference` for tests.
"""

from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import dispatch
from pallas_kernels.common import check_heads
from pallas_kernels.sparse_decode_attention import gpu, reference, tpu, xla


def sparse_decode_attention(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    pages: Int[Array, "B X C"],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
    *,
    page_size: int,
    scale: float,
    prior: Float[Array, "B N S"] | None = None,
    prior_query: Float[Array, "B 1 N H"] | None = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Attend to the slots s of the listed pages s // page_size with start[b] <= s < stop[b].

    Args:
      pages: for X = K lists shared by a kv head's group, for X = N one for each query head; a page
        at most once in a list, -1 for none. With page_size 1 they are slots.
      start, stop: what lies outside may be anything.
      prior: float32 logits of every slot, -inf for weight 0.
      prior_query: instead of `prior`, queries in q's dtype whose logits are scale prior_query.k:
        RESA's mean query.
      implementation: "xla", "gpu", "tpu" or "reference"; None picks by platform and shape.

    Returns:
      (out [B,1,N,H] in q's dtype, lse [B,1,N] float32), and with a prior also (out, lse) of the
      softmax whose logits are the prior's, both float32. Where nothing counts 0 and -inf.

    Raises:
      ValueError: q, k, v, the lists or the prior do not fit each other, or both forms of a prior
        are given.
    """
    if pages.shape[1] not in (k.shape[1], q.shape[2]) or pages.shape[2] < 1:
        raise ValueError(
            f"sparse_decode_attention: pages {pages.shape}; expected a list of at least one page "
            f"for each of {k.shape[1]} kv heads or {q.shape[2]} query heads"
        )
    how: dict[str, Any] = dict(page_size=page_size, scale=scale)
    how |= dict(prior=prior, prior_query=prior_query, implementation=implementation)
    return _attend("sparse_decode_attention", q, k, v, None, pages, start, stop, **how)


def flat_sparse_decode_attention(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    heads: Int[Array, "B E"],
    pages: Int[Array, "B E"],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
    *,
    page_size: int,
    scale: float,
    prior: Float[Array, "B N S"] | None = None,
    prior_query: Float[Array, "B 1 N H"] | None = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """`sparse_decode_attention` over one list of (kv head, page) entries a row, in any order.

    Args:
      heads, pages: entry e of row b is page pages[b, e] of kv head heads[b, e], at most once in a
        row; -1 in either for none.

    The other arguments and the results are those of `sparse_decode_attention`.
    """
    if heads.shape != pages.shape or heads.shape[1] < 1:
        raise ValueError(
            f"flat_sparse_decode_attention: heads {heads.shape} and pages {pages.shape}; expected "
            "one shape with at least one entry a row"
        )
    how: dict[str, Any] = dict(page_size=page_size, scale=scale)
    how |= dict(prior=prior, prior_query=prior_query, implementation=implementation)
    return _attend("flat_sparse_decode_attention", q, k, v, heads, pages, start, stop, **how)


def _attend(
    operation: str,
    q: Array,
    k: Array,
    v: Array,
    heads: Array | None,
    pages: Array,
    start: Array,
    stop: Array,
    *,
    page_size: int,
    scale: float,
    prior: Array | None,
    prior_query: Array | None,
    implementation: str | None,
) -> tuple[Array, ...]:
    """Check what both operations share, and run; `heads` of a flat list alone."""
    check_heads(operation, q, k, v)
    if q.shape[1] != 1 or page_size < 1:
        raise ValueError(
            f"{operation}: {q.shape[1]} queries a row and pages of {page_size} slots; expected "
            "one query and at least one slot"
        )
    logits = (*q.shape[::2], k.shape[2])  # [B,N,S]
    if prior is not None and (prior.shape != logits or prior.dtype != jnp.float32):
        raise ValueError(f"{operation}: prior {prior.dtype}{prior.shape}; expected float32{logits}")
    if prior_query is not None and prior is not None:
        raise ValueError(f"{operation}: both prior and prior_query; expected one of them")
    if prior_query is not None and (prior_query.shape, prior_query.dtype) != (q.shape, q.dtype):
        raise ValueError(
            f"{operation}: prior_query {prior_query.dtype}{prior_query.shape}; expected "
            f"{q.dtype}{q.shape}, as q has"
        )
    without = None
    if prior is not None:
        without = "a prior's logits lie apart from the keys; give prior_query"
    lists, priors = 1 if heads is not None else pages.shape[1], prior_query is not None
    run = dispatch.select(
        operation,
        implementation,
        f"{dispatch.shape_class(q, k.shape[1])}, pages of {page_size}",
        xla=xla.sparse_decode_attention,
        gpu=dispatch.Kernel(
            gpu.sparse_decode_attention,
            lambda: without or gpu.unsupported(q, k, lists, page_size, priors),
        ),
        tpu=dispatch.Kernel(
            tpu.sparse_decode_attention, lambda: without or tpu.unsupported(q, k, pages, page_size)
        ),
        reference=reference.sparse_decode_attention,
    )
    how: dict[str, Any] = dict(heads=heads, page_size=page_size, scale=scale)
    how |= dict(prior_query=prior_query) | ({} if prior is None else dict(prior=prior))
    return run(q, k, v, pages, start, stop, **how)
