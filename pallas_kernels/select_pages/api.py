"""The pages of a cache that promise most to each query head, by digests of their keys.

A page's digest is a box (`high`, `low`), a ball (`high`, `radius`) or a point (`high`). Its score
is the largest q.k in the box (Quest: Tang et al. 2024, section 3) or ball (ArkVale: Chen et al.
2024, section 4), q.high for a point. The exact best pages are listed in ascending order, as
`sparse_decode_attention` reads them; of equal scores the lower page comes first.

Rows may share the digests of their first pages (`SharedPages`), which are then read once for all of
them. Each row has its own lists.

Implementations: `xla` on every platform, `gpu` (Mosaic), `reference` for tests.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import dispatch
from pallas_kernels.common import check_heads
from pallas_kernels.page_scores import Best, Digests, SharedPages
from pallas_kernels.plane import part_of
from pallas_kernels.select_pages import gpu, reference, shared_gpu, xla


def select_pages(
    q: Float[Array, "B N H"],
    digests: Digests,
    best: Best,
    *,
    size: int,
    together: bool = False,
    shared: SharedPages | None = None,
    implementation: str | None = None,
) -> Int[Array, "B X C"]:
    """The best pages ascending, then -1 up to C = `size`, the static length of the lists.

    Args:
      digests: finite, of the pages inside the bounds.
      together: one list a row by the mean of all heads' scores, X = 1; or else X = N.
      shared: of the first pages of all rows; `digests` are then each row's own, of the pages
        behind these.
      implementation: "xla", "gpu" or "reference"; None picks by platform and shape.

    Raises:
      ValueError: q does not fit the digests, there are both `low` and `radius`, or a count given as
        an int is larger than `size`.
    """
    operation = "select_pages"
    (high, low, radius), count = digests, best.count
    digests = part_of(digests)
    check_heads(operation, q, high, *([] if low is None else [low]))
    if low is not None and radius is not None:
        raise ValueError(f"{operation}: low and radius are both given; expected a box or a ball")
    if size < 1 or (isinstance(count, int) and count > size):
        raise ValueError(f"{operation}: count {count} does not fit size {size}, at least 1")
    count_B = jnp.broadcast_to(jnp.asarray(count, jnp.int32), best.first.shape)
    pages, how = high.shape[2], dict[str, Any](size=size, together=together)
    kernel = dispatch.Kernel(
        gpu.select_pages, lambda: gpu.unsupported(q, high, radius is not None, size)
    )
    if shared is not None:
        theirs = part_of(shared)
        check_heads(operation, q[:1], *(x for x in theirs.digests[:2] if x is not None))
        if jax.tree.structure(digests) != jax.tree.structure(theirs.digests):
            raise ValueError(f"{operation}: shared digests of another form than the rows' own")
        pages, how = pages + theirs.digests.high.shape[2], how | dict(shared=theirs)
        kernel = dispatch.Kernel(
            shared_gpu.select_pages, lambda: shared_gpu.unsupported(q, high, theirs, size)
        )
    run = dispatch.select(
        operation,
        implementation,
        f"{size} of {pages} pages, "
        + dispatch.shape_class(q, high)
        + ", together" * together
        + ", shared" * (shared is not None),
        xla=xla.select_pages,
        gpu=kernel,
        reference=reference.select_pages,
    )
    return run(q, digests, best._replace(count=count_B), **how)
