"""Scores of a cache's pages against one query a row, from two vectors a page.

With the elementwise maximum and minimum of a page's keys the score is Quest's upper bound of
every q.k in the page (Tang et al., 2024); with centre plus and minus radius it is
ArkVale's digest score (Chen et al., 2024). Implementations: `xla` on every platform, `gpu`
(Mosaic), `reference` for tests.
"""

from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import dispatch
from pallas_kernels.page_scores import gpu, reference, xla


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
      implementation: "xla", "gpu" or "reference"; None picks by platform and shape.

    Raises:
      ValueError: q does not fit the bounds.
    """
    fits = (
        q.dtype == upper.dtype == lower.dtype
        and upper.shape == lower.shape
        and (q.shape[0], q.shape[2]) == (upper.shape[0], upper.shape[3])
        and min(q.shape + upper.shape) > 0
        and q.shape[1] % upper.shape[1] == 0
    )
    if not fits:
        raise ValueError(
            f"page_scores: q {q.dtype}{q.shape} does not fit upper {upper.dtype}{upper.shape} and "
            f"lower {lower.dtype}{lower.shape}; expected one dtype, batch and head dim, no empty "
            "axis, and query heads a multiple of kv heads"
        )
    name = dispatch.select(
        "page_scores",
        implementation,
        {
            "xla": lambda: None,
            "gpu": lambda: gpu.unsupported(q, upper),
            "reference": lambda: None,
        },
        dispatch.shape_class(q[:, None], upper.shape[1], None),
        held_back={"gpu": gpu.HELD_BACK},
    )
    run = {"xla": xla.page_scores, "gpu": gpu.page_scores, "reference": reference.page_scores}[name]
    return run(q, upper, lower, pages)
