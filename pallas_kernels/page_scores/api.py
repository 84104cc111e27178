"""Scores of a cache's pages against one query a row, from two vectors a page.

With the elementwise maximum and minimum of a page's keys the score is Quest's upper bound of
every q.k in the page (Tang et al., 2024); with centre plus and minus radius it is
ArkVale's digest score (Chen et al., 2024). Implementations: `xla` on every platform, `reference`
for tests.
"""

from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import dispatch
from pallas_kernels.common import check_heads
from pallas_kernels.page_scores import reference, xla


def page_scores(
    q: Float[Array, "B N H"],
    upper: Float[Array, "B K P H"],
    lower: Float[Array, "B K P H"],
    pages: Int[Array, " B"],
    *,
    implementation: str | None = None,
) -> Float[Array, "B N P"]:
    """Sum over d of max(q_d upper_d, q_d lower_d), unscaled, float32; -inf from page pages[b] on.

    Args:
      q: query head n is scored against the pages of kv head n // G.
      upper, lower: finite, upper >= lower, in every coordinate of the pages below pages[b]; beyond
        lies anything.
      pages: filled pages of every row.
      implementation: "xla" or "reference"; None is "xla".

    Raises:
      ValueError: q does not fit the bounds.
    """
    check_heads("page_scores", q, upper, lower)
    shapes = dispatch.shape_class(q, upper.shape[1])
    named = dict(xla=xla.page_scores, reference=reference.page_scores)
    return dispatch.select("page_scores", implementation, shapes, **named)(q, upper, lower, pages)
