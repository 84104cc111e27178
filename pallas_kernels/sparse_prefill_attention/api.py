"""Attention of a chunk of queries to some blocks of a cache, chosen for each head.

Implementations: `xla` on every platform, `gpu` and `tpu` (Mosaic), `reference` for tests. Outputs
have q's dtype. The log-sum-exp is the natural log in float32. A query that sees no key has output 0
and log-sum-exp -inf. It merges with attention over other keys by `pallas_kernels.common.merge`.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float, Int

from pallas_kernels import dispatch
from pallas_kernels.common import AnyCache, Attended, Queries, Scale, check_heads
from pallas_kernels.plane import part_of
from pallas_kernels.quantised import coded, dequantised
from pallas_kernels.sparse_prefill_attention import gpu, gpu_masses, reference, tpu, xla
from pallas_kernels.sparse_prefill_attention.reference import BLOCK, Blocks


def sparse_prefill_attention(
    q: Float[Array, "B T N H"],
    k: AnyCache,
    v: AnyCache,
    lengths: Int[Array, " B"],
    blocks: Blocks,
    *,
    scale: Scale,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Every query of row b against the slots below lengths[b] of the blocks listed for it.

    Slots beyond a length hold anything finite.

    Args:
      blocks: for each head and run of 128 queries, of which T fill the last one in part.
      scale: of the scores, above 0, or that and their cap.
      implementation: "xla", "gpu", "tpu" or "reference"; None picks by platform and shape.

    Raises:
      ValueError: the cache is not whole blocks of 128 slots, or the lists are not q's.
    """
    check_heads("sparse_prefill_attention", q, k, v)
    tiles = (q.shape[0], q.shape[2], -(-q.shape[1] // BLOCK))
    if k.shape[2] % BLOCK or blocks.count.shape != tiles or blocks.listed.shape[:3] != tiles:
        raise ValueError(
            f"sparse_prefill_attention: {k.shape[2]} slots and lists {blocks.listed.shape} for "
            f"queries {q.shape}; expected whole blocks of {BLOCK} slots and lists {(*tiles, 'C')}"
        )
    run = dispatch.select(
        "sparse_prefill_attention",
        implementation,
        dispatch.shape_class(q, k, v),
        scale,
        xla=xla.sparse_prefill_attention,
        gpu=dispatch.Kernel(partial(_of_numbers, gpu), lambda: gpu.unsupported(q)),
        tpu=dispatch.Kernel(
            partial(_of_numbers, tpu), lambda: tpu.unsupported(q, blocks), planes=True, caps=True
        ),
        reference=reference.sparse_prefill_attention,
    )
    return run(q, k, v, jnp.clip(lengths, 0, k.shape[2]), blocks, scale=scale)


def block_masses(
    q: Float[Array, "B K M X"],
    keys: AnyCache,
    lengths: Int[Array, " B"],
    *,
    scale: float,
    stride: int,
    implementation: str | None = None,
) -> Float[Array, "B K C M"]:
    """The log of the sum of e^(scale q.k) over each block's runs of keys; -inf for none.

    A run is `stride` keys that follow one another, as one row of X numbers. Those that begin below
    lengths[b] count; slots beyond hold anything finite.

    Args:
      q: rows of queries of each kv head.
      stride: a divisor of 128.
      implementation: "xla", "gpu" or "reference"; None picks by platform and shape.
    """
    run = dispatch.select(
        "block_masses",
        implementation,
        dispatch.shape_class(q, keys),
        scale,
        xla=xla.block_masses,
        gpu=dispatch.Kernel(
            lambda q, keys, *rest, **how: gpu_masses.block_masses(
                q, dequantised(keys), *rest, **how
            ),
            lambda: gpu_masses.unsupported(q, stride),
        ),
        reference=reference.block_masses,
    )
    return run(q, keys, jnp.clip(lengths, 0, keys.shape[2]), scale=scale, stride=stride)


def _of_numbers(
    module: Any, q: Queries, k: AnyCache, v: AnyCache, *rest: Any, **how: Any
) -> Attended:
    """The kernels take only floats: of a layer's cache in 8 bits they are made once."""
    k, v = (dequantised(part_of(x)) if coded(x) else x for x in (k, v))
    return module.sparse_prefill_attention(q, k, v, *rest, **how)
