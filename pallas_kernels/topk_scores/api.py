"""The best keys of every query by unscaled dot product, exact, streaming over the cache.

ReAttention (Liu et al., 2024) attends to the segments around these keys. Memory is O(B T N count)
and bounded blocks, never T x S scores. Implementations: `xla` on every platform, `gpu` and `tpu`
(Mosaic), `reference` for tests.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels import dispatch
from pallas_kernels.common import (
    BLOCK,
    AnyCache,
    Bounds,
    PerQuery,
    Queries,
    block_of,
    block_size,
    check_heads,
)
from pallas_kernels.quantised import Quantised
from pallas_kernels.topk_scores import gpu, reference, tpu, xla
from pallas_kernels.topk_scores.merge import merge_topk
from pallas_kernels.tpu_common import unsupported_keys

MAX_COUNT = 16


def topk_scores(
    q: Float[Array, "B T N H"],
    k: AnyCache,
    bounds: tuple[Int[Array, " B"], Int[Array, " B"]],
    *,
    count: int,
    tolerance: Float[Array, "B T N"] | None = None,
    valid: Int[Array, " B"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N C"], Int[Array, "B T N C"]]:
    """The `count` best slots of start[b] <= s < stop[b] for every query, best first.

    Scores are dot products accumulated and compared in float32; query head n reads kv head n // G.
    A score of NaN or -inf makes its slot absent: it is never returned.

    A score ranks as the best score that is at most `tolerance` above it, and ties go to the lowest
    slot. So slots whose scores differ by rounding alone come in ascending order. Implementations
    agree where scores form groups (any two of a group within the tolerance, any two of different
    groups not); `merge` says why. Otherwise they may choose different ones among scores that are
    a few tolerances apart.

    Args:
      bounds: start and stop, taken as 0 below 0 and as S above S; outside may lie anything.
      count: how many slots, 1 to 16.
      tolerance: finite, at least 0; a few times the scores' rounding error, and far below the
        difference of scores that mean something. None is 0: equal scores alone tie.
      valid: queries t >= valid[b] are padding and get nothing.
      implementation: "xla", "gpu", "tpu" or "reference"; None picks by platform and shape.

    Returns:
      (values, indices): float32 scores and int32 slots; -inf and -1 where there are fewer slots.

    Raises:
      ValueError: q does not fit k, or count is out of range.
    """
    check_heads("topk_scores", q, k)
    if not 1 <= count <= MAX_COUNT:
        raise ValueError(f"topk_scores: count {count}; expected 1 to {MAX_COUNT}")
    run = dispatch.select(
        "topk_scores",
        implementation,
        f"{dispatch.shape_class(q, k)}, {count} best",
        xla=dispatch.Kernel(xla.topk_scores, None, planes=True),
        gpu=dispatch.Kernel(
            partial(_by_block, gpu.topk_scores),
            lambda: gpu.unsupported(q, k, count),
        ),
        tpu=dispatch.Kernel(
            partial(_by_block, tpu.topk_scores),
            lambda: unsupported_keys(q),
            planes=True,
        ),
        reference=reference.topk_scores,
    )
    start, stop = (jnp.clip(x.astype(jnp.int32), 0, k.shape[2]) for x in bounds)
    if tolerance is None:
        tolerance = jnp.zeros(q.shape[:3], jnp.float32)
    values, indices = run(q, k, (start, stop), tolerance, count=count)
    if valid is None:
        return values, indices
    padding_BT11 = (jnp.arange(q.shape[1]) >= valid[:, None])[..., None, None]
    return jnp.where(padding_BT11, -jnp.inf, values), jnp.where(padding_BT11, -1, indices)


def _by_block(
    topk: Callable[..., tuple[Array, Array]],
    q: Queries,
    k: AnyCache,
    bounds: Bounds,
    tolerance: PerQuery,
    *,
    count: int,
) -> tuple[Float[Array, "B T N C"], Int[Array, "B T N C"]]:
    """`topk`, which takes only floats, over keys in 8 bits, block by block, merged."""
    if not isinstance(k, Quantised):
        return topk(q, k, bounds, tolerance, count=count)
    size = block_size(k.shape[2], BLOCK)

    def part(number: Array | int) -> tuple[Array, Array]:
        begin = number * size
        low, high = (jnp.clip(x - begin, 0, size) for x in bounds)
        values, slots = topk(q, block_of(k, begin, size), (low, high), tolerance, count=count)
        return values, jnp.where(slots < 0, -1, slots + begin)

    def add(number: Array, best: tuple[Array, Array]) -> tuple[Array, Array]:
        values, slots = (jnp.concatenate(x, axis=-1) for x in zip(best, part(number), strict=True))
        return merge_topk(values, slots, count, tolerance)

    return lax.fori_loop(1, -(-jnp.max(bounds[1]) // size), add, part(0))
