"""Attention of one query a row to chosen pages of a cache, with RESA's second softmax.

The pages are listed per kv head (one list for a group), per query head, or as one flat list of
(kv head, page) entries a row, for heads with budgets of different sizes (Ada-KV). Slots that every
method keeps lie outside `start` and `stop`; they are attended elsewhere, and the two results are
merged by their log-sum-exp (`pallas_kernels.common`).

Rows may share their first slots (`Shared`). A page is read where it lies. An implementation that
`takes_shared` attends to shared and own pages in one launch; by definition there are two calls,
over the shared slots with the heads of all rows as those of one row, and over each row's own.

RESA also needs the softmax of a prior over the same slots (its selected set I). A call returns it
beside the attention and reads the values once for both. The prior is given by its query, whose
logits come from the same keys, or by the logits themselves.

Implementations: `xla` on every platform, `gpu` and `tpu` (Mosaic; not with a prior's logits, which
they would have to read beside the keys), `reference` for tests.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import dispatch
from pallas_kernels.common import AnyCache, check_heads, fold_rows, merge, unfold_rows
from pallas_kernels.dispatch import in_8_bits
from pallas_kernels.plane import part_of
from pallas_kernels.sparse_decode_attention import gpu, reference, tpu, xla
from pallas_kernels.sparse_decode_attention.lists import Around, Shared, lists_of


def sparse_decode_attention(
    q: Float[Array, "B 1 N H"],
    k: AnyCache,
    v: AnyCache,
    pages: Int[Array, "B X C"] | Int[Array, "B E"],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
    *,
    heads: Int[Array, "B E"] | None = None,
    page_size: int,
    scale: float,
    prior: Float[Array, "B N S"] | None = None,
    prior_query: Float[Array, "B 1 N H"] | None = None,
    around: Around | None = None,
    shared: Shared | None = None,
    first_page: int = 0,
    beside: tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"]] | None = None,
    implementation: str | None = None,
) -> tuple[Array, ...]:
    """Attend to the slots s of the listed pages s // page_size with start[b] <= s < stop[b].

    Args:
      pages: lists [B,X,C]: for X = K one for each kv head's group, for X = N one for each query
        head, for X = 1 one for all heads; a page is at most once in a list, and -1 is no page.
        With page_size 1 they are slots. With `heads` one flat list [B,E] a row.
      start, stop: the slots outside may hold anything.
      heads: entry e of row b is page pages[b,e] of kv head heads[b,e], in any order and at most
        once in a row; -1 in either is no entry.
      prior: float32 logits of every slot, -inf for weight 0.
      prior_query: instead of `prior`, queries in q's dtype whose logits are scale prior_query.k:
        RESA's mean query.
      around: slots to attend beside the listed ones, where `takes_around` says that it can be.
      shared: the slots that all rows share; k and v are then each row's own behind these, and all
        pages and slots are numbered as without it. Below the split `start` is one for all rows, and
        `stop` is not below it. Not with a flat list or a prior.
      first_page: the page that is listed as 0. Not with a flat list or shared slots.
      beside: (out, lse) of the same queries over other slots, to be merged with this one. Not with
        a flat list, shared slots or a prior.
      implementation: "xla", "gpu", "tpu" or "reference"; None picks by platform and shape.

    Returns:
      (out [B,1,N,H] in q's dtype, lse [B,1,N] float32), and with a prior also (out, lse) of the
      softmax of the prior's logits, both float32. Out is 0 and lse -inf where no slot counts.

    Raises:
      ValueError: q, k, v, the lists or the prior do not fit each other, or both forms of a prior
        are given.
    """
    operation = "sparse_decode_attention"
    if heads is not None and (heads.shape != pages.shape or heads.shape[1] < 1):
        raise ValueError(
            f"{operation}: heads {heads.shape} and pages {pages.shape} of a flat list; expected "
            "one shape with at least one entry a row"
        )
    lists = lists_of(pages, k.shape[1]) if heads is None else 1
    if heads is None and (lists not in (k.shape[1], q.shape[2]) or pages.shape[2:] in ((), (0,))):
        raise ValueError(
            f"{operation}: pages {pages.shape}; expected a list of at least one page "
            f"for each of {k.shape[1]} kv heads or {q.shape[2]} query heads, or for all"
        )
    if (first_page or beside is not None) and (heads is not None or shared is not None):
        raise ValueError(
            f"{operation}: first_page or beside given with a flat list or shared slots"
        )
    if beside is not None and (prior is not None or prior_query is not None):
        raise ValueError(f"{operation}: beside given with a prior")
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
    if shared is not None:
        check_heads(operation, q[:1], shared.k, shared.v)
        if heads is not None or prior is not None or prior_query is not None:
            raise ValueError(f"{operation}: shared slots given with a flat list or a prior")
    alone = implementation not in (None, "gpu") or heads is not None
    if around is not None and (
        alone or not takes_around(q, k, pages, page_size, prior_query is not None, shared)
    ):
        raise ValueError(
            f"{operation}: around given where takes_around says no, for a flat list, or for "
            f"implementation {implementation}; attend to those slots in a call of their own"
        )
    without = None
    if prior is not None:
        without = "a prior's logits lie apart from the keys; give prior_query"
    priors = prior_query is not None
    if shared is not None and (alone or not takes_shared(q, k, pages, page_size, shared)):
        given = dict[str, Any](page_size=page_size, scale=scale, implementation=implementation)
        return _apart(q, k, v, pages, start, stop, shared, **given)
    every = partial(_of_every_head, kv_heads=lists, first_page=first_page, beside=beside)
    if heads is not None:
        every = partial
    run = dispatch.select(
        operation,
        implementation,
        f"{dispatch.shape_class(q, k.shape[1])}, pages of {page_size}",
        eight_bits=in_8_bits(k, v),
        xla=dispatch.Kernel(every(xla.sparse_decode_attention), None, planes=True),
        gpu=dispatch.Kernel(
            partial(gpu.sparse_decode_attention, first_page=first_page, beside=beside),
            lambda: without or gpu.unsupported(q, k, lists, page_size, priors),
            eight_bits=True,
        ),
        tpu=dispatch.Kernel(
            every(tpu.sparse_decode_attention),
            lambda: without or tpu.unsupported(q, k, pages, page_size),
            planes=True,
        ),
        reference=every(reference.sparse_decode_attention),
    )
    how: dict[str, Any] = dict(heads=heads, page_size=page_size, scale=scale)
    how |= dict(prior_query=prior_query) | ({} if prior is None else dict(prior=prior))
    how |= {} if around is None else dict(around=around)
    how |= {} if shared is None else dict(shared=part_of(shared))
    return run(q, k, v, pages, start, stop, **how)


def _of_every_head(run: Any, *, kv_heads: int, first_page: int, beside: Any) -> Any:
    """`run`, given the pages of a list for every head, numbered from 0 on, and merged."""

    def run_of_every(q: Array, k: Any, v: Any, pages: Array, *args: Any, **how: Any) -> Any:
        if pages.shape[1] == 1:
            pages = jnp.broadcast_to(pages, (len(pages), kv_heads, pages.shape[2]))
        if first_page:
            pages = jnp.where(pages < 0, -1, pages + first_page)
        found = run(q, k, v, pages, *args, **how)
        return found if beside is None else merge([(found[0], found[1]), beside])

    return run_of_every


def _apart(
    q: Array,
    k: AnyCache,
    v: AnyCache,
    pages: Int[Array, "B X C"],
    start: Int[Array, " B"],
    stop: Int[Array, " B"],
    shared: Shared,
    **given: Any,
) -> tuple[Array, ...]:
    """Shared and own slots in a call each.

    Over the shared ones the heads of all rows are one row's, each with a list of its own.
    """
    rows, kv_heads, split = q.shape[0], k.shape[1], shared.split
    first = split // given["page_size"]
    own_pages = jnp.where(pages >= first, pages - first, -1)
    own = sparse_decode_attention(q, k, v, own_pages, start - split, stop - split, **given)
    theirs = jnp.where(pages < first, pages, -1)
    theirs = fold_rows(jnp.repeat(theirs, q.shape[2] // theirs.shape[1], axis=1), kv_heads)
    folded, begin = fold_rows(q[:, 0], kv_heads)[:, None], jnp.minimum(start[:1], split)
    found = sparse_decode_attention(folded, shared.k, shared.v, theirs, begin, split, **given)
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
