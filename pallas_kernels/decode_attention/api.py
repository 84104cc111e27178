"""Dense attention of one or a few queries to a long cache; it reads the cache once.

`decode_attention` has the arguments and the result of `prefill_attention.cache_attention`, and is
made for few queries. For methods that rank keys while they decode, `attend_with_logits` returns one
query's logits too (RefreshKV's full step, InfLLM), and `decode_logits` only these (ideal top-k).

`shared_decode_attention` is of many rows that have one cache in common.

Implementations: `xla` on every platform, `gpu` (Mosaic; of `decode_attention` and
`attend_with_logits`), `tpu` (Mosaic; of `decode_attention`), `reference` for tests.
"""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import dispatch
from pallas_kernels.common import AnyCache, Scale, Window, check_heads
from pallas_kernels.decode_attention import gpu, reference, tpu, xla
from pallas_kernels.plane import Plane
from pallas_kernels.quantised import Quantised

# Queries of a kv head that a pass over a shared cache takes: the rows of a GPU's matmul tile.
SHARED_QUERIES = 64


def decode_attention(
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
      q: at most 16 queries a row; more are for `cache_attention`.
      lengths: filled slots of every row, taken as 0 below 0 and as S above S.
      implementation: "xla", "gpu", "tpu" or "reference"; None picks by platform and shape.
    """
    check_heads("decode_attention", q, k, v)
    if q.shape[1] > xla.MAX_QUERIES:
        raise NotImplementedError(
            f"decode_attention: {q.shape[1]} queries, at most {xla.MAX_QUERIES}: use "
            "cache_attention"
        )
    run = dispatch.select(
        "decode_attention",
        implementation,
        dispatch.shape_class(q, k, v, window=window and window.size),
        scale,
        xla=dispatch.Kernel(xla.decode_attention, None, planes=True),
        gpu=dispatch.Kernel(gpu.decode_attention, lambda: gpu.unsupported(q, k, v)),
        tpu=dispatch.Kernel(
            tpu.decode_attention, lambda: tpu.unsupported(q, k, v), planes=True, caps=True
        ),
        reference=reference.decode_attention,
    )
    return run(q, k, v, jnp.clip(lengths, 0, k.shape[2]), scale=scale, window=window)


def shared_decode_attention(
    q: Float[Array, "B 1 N H"],
    k: Float[Array, "1 K S H"] | Plane | Quantised,
    v: Float[Array, "1 K S H"] | Plane | Quantised,
    length: Int[Array, " 1"],
    *,
    scale: Scale,
    implementation: str | None = None,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"]]:
    """The query of each of B rows against the same keys: `decode_attention` of one row's cache.

    The rows' queries count as one row's, as many at a time as fill a tile of the kernels. So the
    cache is read once for each `SHARED_QUERIES` queries of a kv head.

    Args:
      k, v: of one row, [1, K, S, H].
    """
    group = q.shape[2] // k.shape[1]
    size = max(1, min(SHARED_QUERIES // group, xla.MAX_QUERIES))
    parts = []
    for first in range(0, q.shape[0], size):
        rows = jnp.swapaxes(q[first : first + size], 0, 1)  # [1, B, N, H]
        part = decode_attention(rows, k, v, length, scale=scale, implementation=implementation)
        parts.append([jnp.swapaxes(x, 0, 1) for x in part])
    out, lse = (jnp.concatenate(each) for each in zip(*parts, strict=True))
    return out, lse


def decode_logits(
    q: Float[Array, "B 1 N H"],
    k: AnyCache,
    lengths: Int[Array, " B"],
    *,
    scale: Scale,
) -> Float[Array, "B N S"]:
    """scale q.k in float32 below lengths[b]; -inf for the other slots, whatever they hold."""
    check_heads("decode_logits", q, k)
    return xla.decode_logits(q, k, lengths, scale=scale)


def weighted_values(weights: Float[Array, "B N S"], v: AnyCache) -> Float[Array, "B N H"]:
    """The sum of the values times their weights, in float32.

    Args:
      weights: float32, 0 where the value may be anything finite.
    """
    return xla.weighted_values(weights, v)


def attend_with_logits(
    q: Float[Array, "B 1 N H"],
    k: AnyCache,
    v: AnyCache,
    lengths: Int[Array, " B"],
    *,
    scale: Scale,
    implementation: str | None = None,
) -> tuple[Float[Array, "B 1 N H"], Float[Array, "B 1 N"], Float[Array, "B N S"]]:
    """One query's attention: output in v's dtype, log-sum-exp, and the logits scale q.k in float32.

    The logits of slots at and beyond lengths[b] are undefined; k and v must be finite there.

    Args:
      implementation: "xla", "gpu" or "reference"; None picks by platform and shape.
    """
    check_heads("attend_with_logits", q, k, v)
    run = dispatch.select(
        "attend_with_logits",
        implementation,
        dispatch.shape_class(q, k, v),
        scale,
        xla=xla.attend_with_logits,
        gpu=dispatch.Kernel(gpu.attend_with_logits, lambda: gpu.unsupported_logits(q, k, v)),
        reference=reference.attend_with_logits,
    )
    return run(q, k, v, lengths, scale=scale)
