"""Dense attention of one or a few queries to a long cache, bound by reading the cache once.

Same arguments and result as `prefill_attention.cache_attention`, tuned for few queries.
Implementations: `xla` on every platform, `gpu` and `tpu` (Mosaic), `reference` for tests.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import dispatch
from pallas_kernels.common import check_heads
from pallas_kernels.decode_attention import gpu, reference, tpu, xla


def decode_attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    lengths: Int[Array, " B"],
    *,
    scale: float,
    window: int | None = None,
    query_start: Int[Array, " B"] | None = None,
    slot_start: Int[Array, ""] | int = 0,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Every query of row b against the slots below lengths[b]; beyond lies anything finite.

    Args:
      q: at most 16 queries a row; more are for `cache_attention`.
      lengths: filled slots of every row, taken as 0 below 0 and as S above S.
      window: slot s stands at position slot_start + s, query t at query_start[b] + t, and only
        slots less than `window` before a query are seen.
      implementation: "xla", "gpu", "tpu" or "reference"; None picks by platform and shape.
    """
    check_heads(q, k, v, kv_axis=1)
    unsupported = xla.unsupported(q)
    if unsupported is not None:
        raise NotImplementedError(f"decode_attention: {unsupported}")
    name = dispatch.select(
        "decode_attention",
        implementation,
        {
            "xla": lambda: None,
            "gpu": lambda: gpu.unsupported(q, k),
            "tpu": lambda: tpu.unsupported(q),
            "reference": lambda: None,
        },
        dispatch.shape_class(q, k.shape[1], window),
    )
    run = {
        "xla": xla.decode_attention,
        "gpu": gpu.decode_attention,
        "tpu": tpu.decode_attention,
        "reference": reference.decode_attention,
    }[name]
    return run(
        q,
        k,
        v,
        jnp.clip(lengths, 0, k.shape[2]),
        scale=scale,
        window=window,
        query_start=query_start,
        slot_start=slot_start,
    )
