"""Dense attention of a chunk of queries: to itself, and to a cache.

Implementations: `xla` on every platform, `gpu` (cuDNN), `tpu` (splash attention), `reference` for
tests. Outputs have q's dtype. The log-sum-exp is the natural log in float32. A query that sees no
key has output 0 and log-sum-exp -inf. Attentions over different keys merge with
`pallas_kernels.common.merge`.
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
    Attended,
    PerRow,
    Queries,
    Scale,
    Stored,
    Window,
    block_of,
    block_size,
    check_heads,
    merge,
)
from pallas_kernels.prefill_attention import gpu, reference, tpu, xla
from pallas_kernels.quantised import Quantised
from pallas_kernels.tpu_common import unsupported_keys


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: Scale,
    window: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The chunk against itself: token t sees j <= t, and with a window t - j < window.

    Args:
      scale: of the scores, above 0, or that and their cap.
    """
    check_heads("causal_attention", q, k, v, kv_axis=2)
    run = dispatch.select(
        "causal_attention",
        implementation,
        dispatch.shape_class(q, k, kv_axis=2, window=window),
        scale,
        xla=xla.causal_attention,
        gpu=dispatch.Kernel(gpu.causal_attention, lambda: gpu.unsupported_causal(q)),
        tpu=dispatch.Kernel(tpu.causal_attention, lambda: unsupported_keys(q), caps=True),
        reference=reference.causal_attention,
    )
    return run(q, k, v, scale=scale, window=window)


def cache_attention(
    q: Float[Array, "B T N H"],
    k: AnyCache,
    v: AnyCache,
    lengths: Int[Array, " B"],
    *,
    scale: Scale,
    window: Window | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Every query of row b against the slots below lengths[b]; the others hold anything finite.

    Args:
      scale: of the scores, above 0, or that and their cap.
      lengths: filled slots of every row, taken as 0 below 0 and as S above S.
      implementation: "xla", "gpu", "tpu" or "reference"; None picks by platform and shape.
    """
    check_heads("cache_attention", q, k, v)
    run = dispatch.select(
        "cache_attention",
        implementation,
        dispatch.shape_class(q, k, v, window=window and window.size),
        scale,
        xla=partial(xla.cache_attention, window=window),
        gpu=dispatch.Kernel(
            partial(_by_block, gpu.cache_attention),
            lambda: gpu.unsupported_cache(q, window),
        ),
        tpu=dispatch.Kernel(
            partial(_by_block, tpu.cache_attention),
            lambda: tpu.unsupported_cache(q, k, window),
            caps=True,
        ),
        reference=partial(reference.cache_attention, window=window),
    )
    return run(q, k, v, jnp.clip(lengths, 0, k.shape[2]), scale=scale)


def _by_block(
    attend: Callable[..., Attended],
    q: Queries,
    k: Stored,
    v: Stored,
    lengths: PerRow,
    *,
    scale: Scale,
) -> Attended:
    """`attend`, which takes only floats, over a cache in 8 bits, block by block, merged.

    With many queries its products take far longer than turning a block into floats. It goes from
    the first block to the last that a row fills.
    """
    if not any(isinstance(x, Quantised) for x in (k, v)):
        return attend(q, k, v, lengths, scale=scale)
    size = block_size(k.shape[2], BLOCK)

    def part(number: Array | int) -> Attended:
        begin = number * size
        keys, values = (block_of(x, begin, size) for x in (k, v))
        held_B = jnp.clip(lengths - begin, 0, size)
        out, lse = attend(q, keys, values, held_B, scale=scale)
        return out.astype(jnp.float32), lse

    def add(number: Array, so_far: Attended) -> Attended:
        return merge([so_far, part(number)])

    out, lse = lax.fori_loop(1, -(-jnp.max(lengths) // size), add, part(0))
    return out.astype(q.dtype), lse
