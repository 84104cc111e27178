"""Dense attention of a chunk of queries: to itself, and to a cache.

Implementations: `xla` on every platform, `gpu` (cuDNN), `tpu` (splash attention), `reference` for
tests. Outputs have q's dtype. The log-sum-exp is the natural log in float32. A query that sees no
key has output 0 and log-sum-exp -inf. Attentions over different keys merge with
`pallas_kernels.common.merge`.
"""

from functools import partial

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import dispatch
from pallas_kernels.common import AnyCache, Window, check_heads
from pallas_kernels.prefill_attention import gpu, reference, tpu, xla
from pallas_kernels.quantised import form_of


def causal_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    *,
    scale: float,
    window: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The chunk against itself: token t sees j <= t, and with a window t - j < window."""
    check_heads("causal_attention", q, k, v, kv_axis=2)
    run = dispatch.select(
        "causal_attention",
        implementation,
        dispatch.shape_class(q, k.shape[2], window),
        xla=xla.causal_attention,
        gpu=dispatch.Kernel(gpu.causal_attention, lambda: gpu.unsupported_causal(q)),
        tpu=dispatch.Kernel(tpu.causal_attention, lambda: tpu.unsupported_causal(q)),
        reference=reference.causal_attention,
    )
    return run(q, k, v, scale=scale, window=window)


def cache_attention(
    q: Float[Array, "B T N H"],
    k: AnyCache,
    v: AnyCache,
    lengths: Int[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    query_start: Int[Array, " B"] | None = None,
    slot_start: Int[Array, ""] | int = 0,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Every query of row b against the slots below lengths[b]; the others hold anything finite.

    Args:
      lengths: filled slots of every row, taken as 0 below 0 and as S above S.
      window: slot s stands at position slot_start + s, query t at query_start[b] + t, and only
        slots less than `window` before a query are seen.
      implementation: "xla", "gpu", "tpu" or "reference"; None picks by platform and shape.
    """
    check_heads("cache_attention", q, k, v)
    given = Window.of(window, query_start, slot_start)
    run = dispatch.select(
        "cache_attention",
        implementation,
        dispatch.shape_class(q, k.shape[1], window),
        form=form_of(k, v),
        xla=partial(xla.cache_attention, window=given),
        gpu=dispatch.Kernel(gpu.cache_attention, lambda: gpu.unsupported_cache(q, window)),
        tpu=dispatch.Kernel(tpu.cache_attention, lambda: tpu.unsupported_cache(q, k, window)),
        reference=partial(reference.cache_attention, window=given),
    )
    return run(q, k, v, jnp.clip(lengths, 0, k.shape[2]), scale=scale)
