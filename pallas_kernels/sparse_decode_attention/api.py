"""Attention of one query a row to chosen pages of a cache, with RESA's second softmax.

The pages are listed per kv head (one list for a group), per query head, or as one flat list of
(kv head, page) entries a row, for heads with budgets of different sizes (Ada-KV). Slots that every
method keeps lie outside `start` and `stop`; they are attended elsewhere, and the two results are
merged by their log-sum-exp (`pallas_kernels.common`).

Rows may share their first slots (`Shared`). A page is read where it lies. An implementation that
`takes_shared` attends to shared and own pages in one launch; by definition there are two calls,
over the shared slots with all rows' heads as one row's, and over each row's own.

RESA also needs the softmax of a prior over the same slots (its selected set I). A call returns it
beside the attention and reads the values once for both. The prior is given by its query,
whose logits come from the same keys.

Implementations: `xla` on every platform, `gpu` and `tpu` (Mosaic), `reference` for tests.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from pallas_kernels import dispatch
from pallas_kernels.common import (
    AnyCache,
    Capped,
    Scale,
    check_heads,
    fold_rows,
    merge,
    unfold_rows,
)
from pallas_kernels.plane import part_of
from pallas_kernels.sparse_decode_attention import gpu, reference, tpu, xla
from pallas_kernels.sparse_decode_attention.lists import Pages, Shared, lists_of

OPERATION = "sparse_decode_attention"


def sparse_decode_attention(
    q: Float[Array, "B 1 N H"],
    k: AnyCache,
    v: AnyCache,
    pages: Pages,
    *,
    scale: Scale,
    prior: Float[Array, "B 1 N H"] | None = None,
    shared: Shared | None = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Attend to the slots of the listed pages within the bounds of `pages`.

    Args:
      prior: RESA's second softmax: its mean query in q's dtype, whose logits are scale prior.k.
      shared: the slots that all rows share; k and v are then each row's own behind these, and all
        pages and slots are numbered as without it. Below the split `start` is one for all rows, and
        `stop` is not below it. Not with a flat list or a prior.
      implementation: "xla", "gpu", "tpu" or "reference"; None picks by platform and shape.

    Returns:
      (out [B,1,N,H] in q's dtype, lse [B,1,N] float32), and with a prior also (out, lse) of the
      softmax of the prior's logits, both float32. Out is 0 and lse -inf where no slot counts.

    Raises:
      ValueError: q, k, v, the lists or the prior do not fit each other.
    """
    check_heads(OPERATION, q, k, v)
    flat, kv_heads = pages.heads is not None, k.shape[1]
    _check_pages(q, kv_heads, pages)
    if prior is not None and (prior.shape, prior.dtype) != (q.shape, q.dtype):
        raise ValueError(
            f"{OPERATION}: prior {prior.dtype}{prior.shape}; expected {q.dtype}{q.shape}, as q has"
        )
    if shared is not None:
        check_heads(OPERATION, q[:1], shared.k, shared.v)
        if flat or prior is not None or pages.first:
            with_ = "a flat list, a prior or a first page"
            raise ValueError(f"{OPERATION}: shared slots given with {with_}")
    alone = implementation not in (None, "gpu") or flat or isinstance(scale, Capped)
    if pages.around is not None and (
        alone or not takes_around(q, k, pages.listed, pages.size, prior is not None, shared)
    ):
        raise ValueError(
            f"{OPERATION}: around given where takes_around says no, for a flat list, or for "
            f"implementation {implementation}; attend to those slots in a call of their own"
        )
    if shared is not None and (alone or not takes_shared(q, k, pages.listed, pages.size, shared)):
        return _apart(q, k, v, pages, shared, scale=scale, implementation=implementation)
    lists = 1 if flat else lists_of(pages.listed, kv_heads)
    run = dispatch.select(
        OPERATION,
        implementation,
        f"{dispatch.shape_class(q, k, v)}, pages of {pages.size}",
        scale,
        xla=dispatch.Kernel(partial(_of_every_head, xla), None, planes=True),
        gpu=dispatch.Kernel(
            gpu.sparse_decode_attention,
            lambda: gpu.unsupported(q, k, lists, pages.size, prior is not None),
        ),
        tpu=dispatch.Kernel(
            partial(_of_every_head, tpu),
            lambda: tpu.unsupported(q, k, v, pages.listed, pages.size),
            planes=True,
            caps=True,
        ),
        reference=partial(_of_every_head, reference),
    )
    more = {} if shared is None else dict(shared=part_of(shared))
    return run(q, k, v, pages, scale=scale, prior=prior, **more)


def _check_pages(q: Array, kv_heads: int, pages: Pages) -> None:
    listed, heads = pages.listed, pages.heads
    if heads is not None and (heads.shape != listed.shape or heads.shape[1] < 1):
        raise ValueError(
            f"{OPERATION}: heads {heads.shape} and pages {listed.shape} of a flat list; expected "
            "one shape with at least one entry a row"
        )
    if heads is None and (
        lists_of(listed, kv_heads) not in (kv_heads, q.shape[2]) or listed.shape[2:] in ((), (0,))
    ):
        raise ValueError(
            f"{OPERATION}: pages {listed.shape}; expected a list of at least one page "
            f"for each of {kv_heads} kv heads or {q.shape[2]} query heads, or for all"
        )
    if pages.first and heads is not None:
        raise ValueError(f"{OPERATION}: a first page given with a flat list")
    if q.shape[1] != 1 or pages.size < 1:
        raise ValueError(
            f"{OPERATION}: {q.shape[1]} queries a row and pages of {pages.size} slots; expected "
            "one query and at least one slot"
        )


def _of_every_head(module: Any, q: Array, k: Any, v: Any, pages: Pages, **how: Any) -> Any:
    """The module's attention, given a list for every head, numbered from 0 on."""
    listed = pages.listed
    if pages.heads is None and listed.shape[1] == 1:
        listed = jnp.broadcast_to(listed, (len(listed), k.shape[1], listed.shape[2]))
    if pages.first:
        listed = jnp.where(listed < 0, -1, listed + pages.first)
    pages = replace(pages, listed=listed, first=0)
    return module.sparse_decode_attention(q, k, v, pages, **how)


def _apart(
    q: Array, k: AnyCache, v: AnyCache, pages: Pages, shared: Shared, **given: Any
) -> tuple[Array, ...]:
    """Shared and own slots in a call each.

    Over the shared ones the heads of all rows are one row's, each with a list of its own.
    """
    rows, kv_heads, split, listed = q.shape[0], k.shape[1], shared.split, pages.listed
    first = split // pages.size
    own_pages = jnp.where(listed >= first, listed - first, -1)
    start, stop = pages.start - split, pages.stop - split
    own_pages = replace(pages, listed=own_pages, start=start, stop=stop)
    own = sparse_decode_attention(q, k, v, own_pages, **given)
    theirs = jnp.where(listed < first, listed, -1)
    theirs = fold_rows(jnp.repeat(theirs, q.shape[2] // theirs.shape[1], axis=1), kv_heads)
    folded, begin = fold_rows(q[:, 0], kv_heads)[:, None], jnp.minimum(pages.start[:1], split)
    theirs = replace(pages, listed=theirs, start=begin, stop=split)
    found = sparse_decode_attention(folded, shared.k, shared.v, theirs, **given)
    before = tuple(unfold_rows(x[:, 0], rows, kv_heads)[:, None] for x in found)
    return merge([(before[0], before[1]), (own[0], own[1])])


def takes_around(
    q: Array,
    k: AnyCache,
    pages: Array,
    page_size: int,
    priors: bool,
    shared: Shared | None = None,
) -> bool:
    """Whether the platform's kernel reads the slots around the listed ones in the same launch.

    Args:
      pages: lists [B,X,C].
      priors: whether there is a prior's query.
    """
    if dispatch.platform() != "gpu" or pages.ndim != 3:
        return False
    if shared is not None and not takes_shared(q, k, pages, page_size, shared):
        return False
    reason = gpu.unsupported(q, k, lists_of(pages, k.shape[1]), page_size, priors)
    return reason is None and gpu.unsupported_around(pages.shape[2]) is None


def takes_shared(q: Array, k: AnyCache, pages: Array, page_size: int, shared: Shared) -> bool:
    """Whether the platform's kernel reads shared and own pages in the same launch.

    Args:
      pages: lists [B,X,C].
    """
    if dispatch.platform() != "gpu":
        return False
    return all(
        gpu.unsupported(q, x, lists_of(pages, k.shape[1]), page_size, False) is None
        for x in (k, shared.k)
    )
