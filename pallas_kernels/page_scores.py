"""Scores of a cache's pages against one query a row, from two vectors a page.

With the elementwise maximum and minimum of a page's keys the score is Quest's upper bound of
every q.k in the page (Tang et al., 2024). With centre plus and minus radius it is ArkVale's digest
score (Chen et al., 2024). ArkVale's balls have a centre alone and one number, their radius. Plain
XLA on every platform: two matmuls over the bounds as they are stored.

Where upper >= lower, max(q u, q l) = max(q, 0) u + min(q, 0) l: the sum over coordinates is two
matmuls whose operands are the bounds themselves. The form over centre and radius, q c + |q| r,
needs both of them made in float32, for in bfloat16 they would be rounded and the score could fall
below a key's product. Here nothing is rounded but the sum: products of bfloat16 numbers are exact
in float32, and float32 bounds are multiplied at the highest precision.

Roofline: the bytes of both bounds. On an H200 (copy 4.13 TB/s), 8 rows of 8,192 pages, 32 query
heads over 8 kv heads of 128, bfloat16: 87 us, 77% of it. A Mosaic GPU kernel that read each bound
once was rejected: in one run both took 75 us.
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels.common import check_heads, fold_rows, unfold_rows
from pallas_kernels.plane import part_of


class Digests(NamedTuple):
    """A box (`high`, `low`), a ball (centre `high`, `radius`) or a point (`high`) for each page.

    Attributes:
      high, low: [B,K,P,H], arrays or planes; high >= low.
    """

    high: Any
    low: Any = None
    radius: Float[Array, "B K P"] | None = None


class SharedPages(NamedTuple):
    """Digests of the pages below `split`, which rows share; page p of a row is its own p - split.

    Attributes:
      digests: of one row.
    """

    digests: Digests
    split: Int[Array, " 1"]


class Best(NamedTuple):
    """Which pages are listed: the count[b] best pages p, first[b] <= p < last[b].

    Attributes:
      first, last: the pages outside may hold anything.
      count: for all rows or each; 0 below 0, and at most the lists' length.
    """

    first: Int[Array, " B"]
    last: Int[Array, " B"]
    count: Int[Array, " B"] | int


def page_scores(
    q: Float[Array, "B N H"], digests: Digests, pages: Int[Array, " B"]
) -> Float[Array, "B N P"]:
    """Sum over d of max(q_d high_d, q_d low_d), unscaled, float32; -inf from page pages[b] on.

    To that of a ball |q| radius is added.

    Args:
      q: query head n is scored against the pages of kv head n // G.
      digests: finite below pages[b]; beyond lies anything.
      pages: filled pages of every row.

    Raises:
      ValueError: q does not fit the digests.
    """
    high, low, radius = part_of(digests)
    low = high if low is None else low
    check_heads("page_scores", q, high, low)
    b, n, h = q.shape
    kv_heads = high.shape[1]
    q_BKGH = q.reshape(b, kv_heads, n // kv_heads, h)
    product = partial(
        jnp.einsum,
        "BKGH,BKPH->BKGP",
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    scores_BKGP = product(jnp.maximum(q_BKGH, 0), high) + product(jnp.minimum(q_BKGH, 0), low)
    scores_BNP = scores_BKGP.reshape(b, n, -1)
    if radius is not None:
        norm_BN = jnp.linalg.norm(q.astype(jnp.float32), axis=-1)
        scores_BNP += norm_BN[..., None] * jnp.repeat(radius, n // kv_heads, axis=1)
    held_B1P = jnp.arange(high.shape[2]) < pages[:, None, None]
    return jnp.where(held_B1P, scores_BNP, -jnp.inf)


def shared_page_scores(
    q: Float[Array, "B N H"], own: Digests, pages: Int[Array, " B"], shared: SharedPages
) -> Float[Array, "B N X"]:
    """`page_scores` for rows that share the first pages; X counts shared and own pages.

    The shared digests are read once: all rows' heads count as one row's.

    Args:
      own: of each row's own pages.
      pages: filled pages of every row, shared and own.
    """
    kv_heads, split = own.high.shape[1], shared.split
    before = page_scores(fold_rows(q, kv_heads), shared.digests, split)
    before_BNP = unfold_rows(before, q.shape[0], kv_heads)
    own_BNP = page_scores(q, own, pages - split)
    room = [(0, 0), (0, 0), (0, own_BNP.shape[2])]
    all_BNX = jnp.pad(before_BNP, room, constant_values=-jnp.inf)
    return lax.dynamic_update_slice_in_dim(all_BNX, own_BNP, split[0], axis=2)
