"""The softmax mass that every key of a cache receives, from queries whose log-sum-exp is known.

For query t of head n, p[b,n,t,s] = exp(scale q.k - lse[b,t,n]) is its attention to slot s. `lse`
comes from the attention that the query took part in, which may have seen more keys than this cache
holds. Methods rank keys by the mass: the sum over queries (H2O, CSE, SnapKV), the last query alone
(TOVA), the sum and the squares (RoCo). Implementations: `xla` on every platform, `gpu`
and `tpu` (Mosaic), `reference` for tests.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float, Int

from pallas_kernels import dispatch
from pallas_kernels.attention_mass import gpu, reference, tpu, xla
from pallas_kernels.attention_mass.reference import Masses, Reduction
from pallas_kernels.common import (
    BLOCK,
    AnyCache,
    PerQuery,
    PerRow,
    Queries,
    block_of,
    block_size,
    check_heads,
)
from pallas_kernels.quantised import Quantised
from pallas_kernels.tpu_common import unsupported_keys


def attention_mass(
    q: Float[Array, "B T N H"],
    k: AnyCache,
    lse: Float[Array, "B T N"],
    lengths: Int[Array, " B"],
    how: Reduction,
    *,
    implementation: str | None = None,
) -> Float[Array, "B K S"] | Any:
    """The mass of every slot in float32: per head over the queries, then over the group's heads.

    Slots at and beyond lengths[b] receive exactly 0, whatever finite numbers lie there, and so
    does every slot from a query whose log-sum-exp is -inf.

    Args:
      lse: natural log, float32.
      lengths: filled slots of every row, taken as 0 below 0 and as S above S.
      implementation: "xla", "gpu", "tpu" or "reference"; None picks by platform and shape.

    Returns:
      The mass, or with `squares` (mass, squares), both float32 [B,K,S].
    """
    check_heads("attention_mass", q, k)
    cut = None
    if isinstance(k, Quantised) and how.causal_start is not None and k.shape[2] > BLOCK:
        cut = f"causal queries over more than {BLOCK} keys in int8"
    run = dispatch.select(
        "attention_mass",
        implementation,
        dispatch.shape_class(q, k),
        how.scale,
        xla=xla.attention_mass,
        gpu=dispatch.Kernel(
            partial(_by_block, gpu.attention_mass),
            lambda: cut or gpu.unsupported(q, k, how),
        ),
        tpu=dispatch.Kernel(
            partial(_by_block, tpu.attention_mass),
            lambda: cut or unsupported_keys(q),
            planes=True,
        ),
        reference=reference.attention_mass,
    )
    batch, queries = q.shape[:2]
    every = how.valid is None
    valid = jnp.full((batch,), queries) if every else jnp.clip(how.valid, 0, queries)
    how = replace(how, valid=valid)
    mass, squared = run(q, k, lse, jnp.clip(lengths, 0, k.shape[2]), how)
    return mass if squared is None else (mass, squared)


def _by_block(
    mass: Callable[..., Masses],
    q: Queries,
    k: AnyCache,
    lse: PerQuery,
    lengths: PerRow,
    how: Reduction,
) -> Masses:
    """`mass`, which takes only floats, over keys in 8 bits, block by block."""
    if not isinstance(k, Quantised):
        return mass(q, k, lse, lengths, how)
    size = block_size(k.shape[2], BLOCK)

    def part(number: Array) -> Masses:
        begin = number * size
        start = None if how.causal_start is None else how.causal_start - begin
        held_B = jnp.clip(lengths - begin, 0, size)
        return mass(q, block_of(k, begin, size), lse, held_B, replace(how, causal_start=start))

    def joined(parts: Array) -> Float[Array, "B K S"]:
        return jnp.moveaxis(parts, 0, 2).reshape(k.shape[:3])  # [B, K, blocks, Z] before

    masses, squares = lax.map(part, jnp.arange(k.shape[2] // size))
    return joined(masses), None if squares is None else joined(squares)
